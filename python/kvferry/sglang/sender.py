"""P's end of a request: D may find it when P begins it, and its pages are kept until D has read them."""

from __future__ import annotations

import hashlib
import time
from itertools import count
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, BaseKVSender, KVPoll, KVTransferMetric

from .._errors import AgentError
from .._origin import room_name
from . import rows
from .logs import logger
from .manager import Manager
from .requests import NotMoved, origin_of

#: A room may come again, and a request's name must not.
_numbers = count()


class NoBootstrapServer(BaseKVBootstrapServer):  # type: ignore[misc]
    """The engine's agent listens at this port itself."""

    def __init__(self, host: str, port: int) -> None:
        pass


class Sender(BaseKVSender):  # type: ignore[misc]
    def __init__(
        self, mgr: Manager, bootstrap_addr: str, bootstrap_room: int, req_has_disagg_prefill_dp_rank: bool = False
    ) -> None:
        self.kv_mgr, self.room = mgr, bootstrap_room
        self.request = f"{bootstrap_room}-{next(_numbers)}"
        self.pages: list[int] = []
        self.tokens = 0
        self.row = -1
        self.granted, self.since = False, time.monotonic()
        #: What D may find: more than one until it is known what it looks for.
        self.opened: list[str] = []
        self.concluded: int | None = None
        self.why = ""
        #: SGLang sets it where the step that writes these pages may still be on the GPU.
        self._early_send_wait_event: Any = None

    def begin(self, req: Any) -> None:
        """The request that this is for."""
        self.req, self.length, self.origin = req, len(req.origin_input_ids), origin_of(req)
        if self.kv_mgr.agent is None:
            return
        # Whoever decodes it wants the states after all of the prompt, or those before its last token: it says so by the
        # name that it looks for, and is waited for.
        both = self.kv_mgr.has_states and self.length > 1
        try:
            for but_last in (False, True) if both else (False,):
                request = self.request + "-" * but_last
                self.kv_mgr.agent.open(request, name=room_name(self.room, self.origin, but_last))
                self.opened.append(request)
                if both:
                    self.kv_mgr.sought[request] = self
        except AgentError as error:
            self.fail(str(error))

    def found(self, request: str) -> None:
        """By whoever decodes it."""
        for other in [other for other in self.opened if other != request]:
            self._take_back(other)
        self.kv_mgr.sought.pop(request, None)
        self.request = request

    def _is_sought(self) -> bool:
        """Whether it is not known yet what to compute."""
        if len(self.opened) > 1 and time.monotonic() - self.since > self.kv_mgr.options.lease_seconds:
            self.fail(_WHY["expired"])
        return len(self.opened) > 1

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        """All ranks are here, before it is computed."""
        self.row = -1 if aux_index is None else aux_index
        if self.kv_mgr.has_states and self.kv_mgr.ranks.told(self.request.endswith("-")):
            self.req.origin_input_ids = self.req.origin_input_ids[:-1]
            self.length -= 1

    def should_send_kv_chunk(self, num_pages: int, last_chunk: bool) -> bool:
        return num_pages > 0 or last_chunk

    def send(self, kv_indices: Any, state_indices: list[Any] | None = None, num_kv_tokens: int | None = None) -> None:
        """More of the prompt is computed: whole pages, and all of it at the end, which is when states are known."""
        self.pages += (int(page) for page in kv_indices)
        self.tokens += num_kv_tokens or 0
        try:
            if state_indices is None:
                self._advance()
            else:
                self._grant(state_indices)
        except AgentError as error:
            self.fail(_WHY["abandoned"] if error.kind == "given_up" else str(error))

    def _advance(self) -> None:
        event, self._early_send_wait_event = self._early_send_wait_event, None
        if event is not None and not event.query():
            # It is said with what comes next.
            return
        if self.opened and self.concluded is None and self.kv_mgr.agent is not None:
            grown = [self.pages if table.source == "pages" else [] for table in self.kv_mgr.tables]
            self.kv_mgr.agent.advance(self.request, tokens=self.tokens, blocks=grown)

    def _grant(self, components: list[Any]) -> None:
        tables, first = self.kv_mgr.tables_of(self.pages, components, self.length)
        # The lease has one table for all ranks. Each has its own allocator, and all of them do the same.
        own = hashlib.sha256(b"".join(np.asarray(table, np.int64).tobytes() + b"|" for table in tables)).digest()
        if not self.kv_mgr.ranks.same(own):
            self.fail("the ranks of this engine keep it in different pages")
        elif self.concluded is None:
            self.granted = True
            if self.kv_mgr.agent is not None:
                greedy = self.req.sampling_params.top_k == 1
                self.kv_mgr.agent.enclose(self.request, rows.enclosed(self.kv_mgr.rows, self.row, greedy))
                self.kv_mgr.agent.grant(self.request, tokens=self.length, blocks=tables, first=first, origin=self.origin)

    def poll(self) -> Any:
        """SGLang takes the least of what all ranks say, which is what the first says: the others know nothing."""
        if self.concluded is None and self.kv_mgr.agent is None:
            return KVPoll.Success if self.granted else KVPoll.WaitingForInput
        if self.concluded is None:
            self.kv_mgr.hear()
            why = self.kv_mgr.released.pop(self.request, None)
            if why == "confirmed":
                self.concluded = KVPoll.Success
            elif why is not None:
                self.fail(_WHY.get(why, why))
            elif self._is_sought():
                return KVPoll.Bootstrapping
        if self.concluded is not None:
            return self.concluded
        return KVPoll.Transferring if self.granted else KVPoll.WaitingForInput

    poll_pp_consensus = poll

    def fail(self, why: str) -> None:
        if self.concluded is None:
            logger.warning("kvferry: room %d is not handed over: %s", self.room, why)
        self._revoke()
        self.concluded, self.why = KVPoll.Failed, why

    def _revoke(self) -> None:
        for request in list(self.opened) if self.concluded is None else ():
            self._take_back(request)

    def _take_back(self, request: str) -> None:
        if self.kv_mgr.agent is not None:
            self.opened.remove(request)
            self.kv_mgr.sought.pop(request, None)
            self.kv_mgr.agent.revoke(request)
            # Reported as any other end, to nobody.
            self.kv_mgr.hear()
            self.kv_mgr.released.pop(request, None)

    def abort(self) -> None:
        """Its pages are somebody else's from now on: what D has read of them is not confirmed."""
        if self.concluded is None:
            self.why = "it was aborted"
        self._revoke()
        self.concluded = KVPoll.Failed

    def failure_exception(self) -> None:
        raise NotMoved(self.why or "another rank says why", elsewhere=not self.why)

    def get_transfer_metric(self) -> KVTransferMetric:
        return KVTransferMetric()


#: How a promise can end that was not kept to the end.
_WHY = {
    "expired": "no decode engine has asked for it, or gone on asking, within `lease_seconds`",
    "abandoned": "the decode engine has given it up",
    "revoked": "it was taken back",
}
