"""What an engine says in its log. All of this is called in the engine's process."""

import logging
import time

from kvferry.vllm.logs import logger

_said = []


class _Keep(logging.Handler):
    def emit(self, record):
        _said.append(record.getMessage())


def listen(_engine):
    logger.addHandler(_Keep())


def said(_engine, words, seconds=30.0):
    """The last line with these words, or None if there is none within so many seconds."""
    # Lines are logged by a thread of their own.
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for line in reversed(_said):
            if words in line:
                return line
        time.sleep(0.01)
    return None


def everything_said(_engine):
    return list(_said)


def forget_lines(_engine):
    _said.clear()
