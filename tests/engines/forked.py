"""`vllm serve` in a process that is forked from this one, which has imported vLLM once: a server that is spawned spends
most of its start with that, and its engine and its workers do so again."""

import faulthandler
import gc
import logging
import os
import signal
import subprocess
import sys
import time
import traceback

#: What a server begins with, also one that is not forked: a process that waits for another one's message looks for it
#: a thousand times a second, and not all the time. There are more such processes than cores.
CALM = """\
import time
from vllm.distributed.device_communicators import shm_broadcast
shm_broadcast.sched_yield = lambda: time.sleep(0.001)
"""
#: What one that is forked begins with: its children are forked, on a CPU as on a GPU, and a signal to one of them is none to it;
#: and a model is looked at here, and not in one more process that imports vLLM.
FORKING = """\
import multiprocessing, os, signal
from vllm.model_executor.models import registry
registry._run_in_subprocess = lambda look: look()
context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)
os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
"""


class Forked:
    """As much of `subprocess.Popen` as a test of servers needs; the process leads a session of its own."""

    def __init__(self, words, environment, log):
        sys.stdout.flush()
        sys.stderr.flush()
        # A server collects garbage: not in what was there before it.
        gc.freeze()
        self.args, self.returncode = words, None
        self.pid = os.fork()
        if self.pid == 0:
            try:
                _become(words, environment, log)
            finally:
                # Never back into the tests.
                os._exit(1)

    def poll(self):
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            if ended:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout):
        end = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(self.args, timeout)
            time.sleep(0.01)
        return self.returncode

    def terminate(self):
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)


def _become(words, environment, log):
    """The command itself, in a process that was a test's."""
    os.setsid()
    # What the test runner has open or has changed is its own.
    faulthandler.disable()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    os.closerange(3, 65536)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w", buffering=1), open(2, "w", buffering=1)
    logging.root.handlers.clear()
    os.environ.clear()
    os.environ.update(environment)
    exec(CALM + FORKING, {})
    import vllm.logger
    from vllm.entrypoints.cli.main import main

    # It was told to be silent for the tests.
    vllm.logger._configure_vllm_root_logger()
    sys.argv = words
    try:
        code = main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
