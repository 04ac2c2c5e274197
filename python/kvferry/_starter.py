"""Loads that wait for the GPU: they start when it has written what it was told to write before.

What a transport moves is not ordered with the stream of the steps. The engine's own thread must not wait for that
stream, or the GPU would have nothing to do between two steps.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class Event(Protocol):
    """A point of a stream, as PyTorch has it."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Starter:
    """Calls `start` with every load: at once where nothing is to be waited for, or else in a thread. That thread takes
    the interpreter from the engine's own each time that it wakes up: where loads are many and need not be punctual, it
    rests for `pause` seconds in between."""

    def __init__(self, start: Callable[[dict[str, Any]], None], pause: float = 0.0) -> None:
        self._start, self._pause = start, pause
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Event, dict[str, Any]]] = deque()
        self._thread: threading.Thread | None = None
        self._closed = False

    def put(self, event: Event | None, loads: Iterable[dict[str, Any]]) -> None:
        """Starts loads once the stream has passed `event`, in the order in which they are put."""
        with self._changed:
            if not self._waiting and (event is None or event.query()):
                for load in loads:
                    self._start(load)
                return
            self._waiting.extend((event or _Passed(), load) for load in loads)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kvferry-starter", daemon=True)
                self._thread.start()
            self._changed.notify()

    def forget(self, request: str) -> bool:
        """Whether the load was still waiting; then it never starts."""
        with self._changed:
            left = deque(one for one in self._waiting if one[1]["request"] != request)
            forgotten = len(left) < len(self._waiting)
            self._waiting = left
            return forgotten

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._waiting.clear()
            self._changed.notify()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                event = self._waiting[0][0]
            event.synchronize()
            with self._changed:
                # Others may have been forgotten meanwhile, or come, and be due as well.
                while self._waiting and (self._waiting[0][0] is event or self._waiting[0][0].query()):
                    event, load = self._waiting.popleft()
                    self._start(load)
            if self._pause:
                time.sleep(self._pause)


class _Passed:
    """Where there is nothing to wait for but the loads before."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        return
