"""P's end of a request: D may find it when P begins it, and its pages are kept until D has read them."""

from __future__ import annotations

import hashlib
from itertools import count
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVBootstrapServer, BaseKVSender, KVPoll, KVTransferMetric

from .._errors import AgentError
from .logs import logger
from .manager import Manager
from .requests import NotMoved, origin_of, shared_name

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
        self.granted = self.opened = False
        self.concluded: int | None = None
        self.why = ""
        #: SGLang sets it where the step that writes these pages may still be on the GPU.
        self._early_send_wait_event: Any = None

    def begin(self, req: Any) -> None:
        """The request that this is for."""
        self.length, self.origin = len(req.origin_input_ids), origin_of(req)
        if self.kv_mgr.agent is None:
            return
        try:
            self.kv_mgr.agent.open(self.request, name=shared_name(self.room, self.origin))
            self.opened = True
        except AgentError as error:
            self.fail(str(error))

    def init(self, num_kv_indices: int, aux_index: int | None = None) -> None:
        self.row = -1 if aux_index is None else aux_index

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
        tables, first = self.kv_mgr.tables_of(self.pages, components, self.row, self.length)
        # The lease has one table for all ranks. Each has its own allocator, and all of them do the same.
        own = hashlib.sha256(b"".join(np.asarray(table, np.int64).tobytes() + b"|" for table in tables)).digest()
        if not self.kv_mgr.ranks.same(own):
            self.fail("the ranks of this engine keep it in different pages")
        elif self.concluded is None:
            self.granted = True
            if self.kv_mgr.agent is not None:
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
        if self.opened and self.concluded is None and self.kv_mgr.agent is not None:
            self.kv_mgr.agent.revoke(self.request)
            # Reported as any other end, to nobody.
            self.kv_mgr.hear()
            self.kv_mgr.released.pop(self.request, None)

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
