"""D's end of a request: it finds what P computes, takes pages for it, reads, and is confirmed by P."""

from __future__ import annotations

import time
from itertools import count
from typing import Any

from sglang.srt.disaggregation.base.conn import BaseKVReceiver, KVPoll

from .._core import Ending
from .._errors import AgentError, Error
from .._first import First
from .._origin import room_name
from . import rows
from .logs import logger
from .manager import Manager
from .requests import NotMoved, origin_of

#: A room may come again, and a request's name must not.
_numbers = count()


class Receiver(BaseKVReceiver):  # type: ignore[misc]
    #: What SGLang looks at: staging is another back end's, and no prefill rank is to acknowledge anything.
    require_staging = False
    supports_host_destination = False
    bootstrap_infos = ()

    def __init__(self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int | None = None) -> None:
        self.kv_mgr, self.address, self.room = mgr, bootstrap_addr, bootstrap_room or 0
        self.request = f"{bootstrap_room}-{next(_numbers)}"
        self.conclude_state: int | None = None
        self.ticket: dict[str, Any] | None = None
        self.why = ""
        self.since = 0.0
        #: Whether pages may still be written to although the load has failed.
        self.abort_notified = False
        self.follows = self.loads = self.over = False
        #: Where it is read to.
        self.tables: list[Any] = []

    def begin(self, req: Any, again: bool) -> None:
        """The request that this is for."""
        self.req, self.length, self.origin = req, len(req.origin_input_ids), origin_of(req)
        if again:
            self.fail("SGLang wants its prompt computed again, which is not handed over")

    def init(self, prefill_dp_rank: int) -> None:
        """P is known by its address; the request is what it computes under this name."""
        if self.conclude_state is not None or self.kv_mgr.agent is None:
            self.follows = True
            return
        name, patience = room_name(self.room, self.origin), self.kv_mgr.options.queue_timeout_seconds
        try:
            self.kv_mgr.agent.follow(self.request, engine="", address=self.address, name=name, patience=patience)
        except (AgentError, ValueError) as error:
            self.fail(str(error))
            return
        self.follows, self.since = True, time.monotonic()
        self.kv_mgr.followed[self.request] = self

    def poll(self) -> Any:
        """SGLang takes the least of what all ranks say."""
        if self.conclude_state is None:
            self.kv_mgr.hear()
        if self.conclude_state is not None:
            return self.conclude_state
        if self.loads:
            return KVPoll.Transferring
        if self.kv_mgr.agent is None:
            # What the first rank says is less, until it is time.
            return KVPoll.WaitingForInput if self.follows else KVPoll.Bootstrapping
        return self._found() if self.follows else KVPoll.Bootstrapping

    def _found(self) -> Any:
        """How far P is: pages are taken when it has all of the prompt, or, if that is asked for, when it has begun."""
        assert self.kv_mgr.agent is not None
        options = self.kv_mgr.options
        frontier = self.kv_mgr.agent.frontier(self.request)
        if frontier is None:
            waited = time.monotonic() - self.since
            if waited >= options.push_timeout_seconds:
                self.fail(f"the prefill engine at {self.address} has not heard of room {self.room} with this prompt within "
                          f"{waited:.0f} s (option 'push_timeout_seconds')")
                return KVPoll.Failed
            return KVPoll.Bootstrapping
        self.ticket = frontier["ticket"]
        ready = frontier["sealed"] or (options.pages == "early" and frontier["begun"])
        return KVPoll.WaitingForInput if ready else KVPoll.Bootstrapping

    def send_metadata(
        self,
        kv_indices: Any,
        aux_index: int | None = None,
        state_indices: list[Any] | None = None,
        decode_prefix_len: int | None = None,
        **_: Any,
    ) -> None:
        """There are pages, a slot and a row: all ranks are here, and read their own parts."""
        self.ticket = self.kv_mgr.ranks.told(self.ticket)
        prefix = decode_prefix_len or 0
        self.row = -1 if aux_index is None else aux_index
        tables, first = self.kv_mgr.tables_of(kv_indices, state_indices or [], self.length, prefix)
        load = {
            "request": self.request,
            "ticket": self.ticket,
            "tokens": self.length,
            "destination_blocks": tables,
            "destination_first": first,
            "cached": self.kv_mgr.held(first),
            "origin": self.origin,
            "deadline": self.kv_mgr.options.load_timeout_seconds,
            "patience": self.kv_mgr.options.queue_timeout_seconds,
        }
        self.loads, self.tables = True, tables
        self.kv_mgr.loading[self.request] = self
        if self.kv_mgr.agent is not None and self.ticket is not None:
            self.kv_mgr.agent.reading(self.ticket)
        self.kv_mgr.starter.put(self.kv_mgr.written(), [load])

    def start(self, load: dict[str, Any]) -> None:
        """May be called in a thread of its own."""
        try:
            self.kv_mgr.worker.load(**load)
        except (Error, ValueError, TypeError, OverflowError) as error:
            self._done()
            self.fail(f"it cannot be read: {error}")

    def ended(self, ending: Ending) -> None:
        """The load has."""
        if not ending.quarantined or ending.outcome == "settled":
            self._done()
        if ending.outcome == "done" and self.conclude_state is None:
            self.kv_mgr.zero(ending)
            logger.debug("kvferry: room %d has %d bytes in %d copies", self.room, ending.bytes, ending.copies)
            self._take_first(ending.enclosed)
        elif ending.outcome not in ("done", "settled"):
            self.fail(f"{ending.outcome}: {ending.reason}")

    def _take_first(self, enclosed: bytes) -> None:
        """The first token, which P has sampled. All ranks are given the same."""
        try:
            first = First.read(enclosed)
            if first.greedy != (self.req.sampling_params.top_k == 1):
                raise ValueError(
                    "one of the two engines was asked to take the likeliest token, and the other to sample: both must be sent "
                    "the same parameters"
                )
            rows.fill(self.kv_mgr.rows, self.row, first, self.room, self.req.return_logprob)
        except ValueError as error:
            self.fail(str(error))
            return
        self.conclude_state = KVPoll.Success

    def lost(self, why: str) -> None:
        """P has no longer what it had. A load that is under way hears of it from P itself."""
        if not self.loads:
            self.fail(f"the prefill engine at {self.address} has given it up: {why}")

    def fail(self, why: str) -> None:
        if self.conclude_state is None:
            logger.warning("kvferry: room %d is not handed over: %s", self.room, why)
            self.conclude_state, self.why = KVPoll.Failed, why
        self._let_go()

    def abort(self) -> None:
        """The client does not want it any more."""
        if self.conclude_state is None:
            self.conclude_state, self.why = KVPoll.Failed, "it was aborted"
            self.ensure_abort_notified()
        self._let_go()

    def ensure_abort_notified(self, *, force_arm: bool = False) -> None:
        """SGLang keeps the pages while this is set and `Manager.is_abort_release_safe` says no."""
        if self.request not in self.kv_mgr.loading:
            return
        if self.kv_mgr.starter.forget(self.request):
            self._done()
            return
        self.kv_mgr.worker.abort(self.request)
        self.abort_notified = True

    def clear(self) -> None:
        """SGLang has taken it over, or given it up."""
        if self.conclude_state == KVPoll.Success and self.kv_mgr.agent is not None and not self.over:
            self.over = True
            self.kv_mgr.followed.pop(self.request, None)
            assert self.ticket is not None
            self.kv_mgr.agent.settle(self.ticket)
        self._let_go()

    def _let_go(self) -> None:
        """P need not keep it."""
        if self.over:
            return
        self.over = True
        if self.kv_mgr.followed.pop(self.request, None) is None or self.kv_mgr.agent is None:
            return
        if self.loads and self.ticket is not None:
            self.kv_mgr.agent.abandon(self.ticket)
        else:
            self.kv_mgr.agent.unfollow(self.request)

    def _done(self) -> None:
        """Nothing will land any more."""
        self.kv_mgr.loading.pop(self.request, None)

    def failure_exception(self) -> None:
        raise NotMoved(self.why or "another rank says why", elsewhere=not self.why)
