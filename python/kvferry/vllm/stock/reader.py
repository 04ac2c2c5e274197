"""A worker's loads from engines with vLLM's stock NixlConnector: each waits until its engine is introduced."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from ..._core import Manifest, Worker, introduce
from ..._errors import Error
from ..logs import logger
from .wire import Introduction

Load = dict[str, Any]


class StockReader:
    """Describes engines in a thread of its own, where a step need not wait for it, and starts their loads."""

    def __init__(
        self,
        describe: Callable[[Introduction], list[Manifest]],
        start: Callable[[Load], None],
        fail: Callable[[str, str], None],
    ) -> None:
        """`fail` is given a request and a word for why."""
        self._describe, self._start, self._fail = describe, start, fail
        self._changed = threading.Condition()
        self._waiting: deque[Load | tuple[Worker, Introduction]] = deque()
        self._busy = False
        #: Why engines cannot be read, by address and life.
        self._refused: dict[tuple[str, str], str] = {}
        self._thread: threading.Thread | None = None

    def meet(self, agent: Worker, introduction: Introduction) -> None:
        """Gets to know an engine, before the loads that are put later."""
        with self._changed:
            self._waiting.append((agent, introduction))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvferry-stock", daemon=True)
                self._thread.start()
            self._changed.notify()

    def take(self, load: Load) -> bool:
        """Whether a load is from such an engine; if so, it is started here, sooner or later."""
        if not str(load["ticket"].get("address")).startswith("nixl://"):
            return False
        with self._changed:
            if self._waiting or self._busy:
                self._waiting.append(load)
                self._changed.notify()
                return True
        self._begin(load)
        return True

    def forget(self, request: str) -> bool:
        """Whether the load was still waiting; then it never starts."""
        with self._changed:
            left = deque(
                one for one in self._waiting if isinstance(one, tuple) or one["request"] != request
            )
            forgotten = len(left) < len(self._waiting)
            self._waiting = left
            return forgotten

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting:
                    self._changed.wait()
                next_ = self._waiting.popleft()
                self._busy = True
            if isinstance(next_, tuple):
                self._introduce(*next_)
            else:
                self._begin(next_)
            with self._changed:
                self._busy = False

    def _introduce(self, agent: Worker, introduction: Introduction) -> None:
        place = introduction.place
        try:
            made = self._describe(introduction)
            introduce(
                agent,
                place.address,
                introduction.incarnation,
                [
                    (manifest, rank.agent_metadata, _name(rank.agent_metadata))
                    for manifest, rank in zip(made, introduction.ranks(), strict=True)
                ],
            )
        except Exception as error:
            # Whatever it is, the requests of this engine fail, and others go on.
            why = f"{error}" if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            logger.warning("kvferry: the engine at %s cannot be read: %s", place.address, why)
            self._refused[place.address, introduction.incarnation] = why

    def _begin(self, load: Load) -> None:
        ticket = load["ticket"]
        why = self._refused.get((ticket["address"], ticket["incarnation"]))
        if why is None:
            self._start(load)
            return
        logger.warning("kvferry: cannot load %s: %s", load["request"], why)
        self._fail(load["request"], "refused")


def _name(metadata: bytes) -> bytes:
    """A name for one life of a process."""
    return hashlib.blake2b(metadata, digest_size=16).digest()
