"""Blocks of finished requests that are kept under a lease, because another engine reads them."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

from vllm.v1.request import RequestStatus

from ..._core import Scheduler
from ..._errors import AgentError
from ..groups import Groups
from ..logs import logger
from ..params import Offer

#: What is counted, for the metrics.
COUNTS = {
    "leases_declined": "Requests that were not handed over, because the blocks that are kept for others had reached the "
    "option `lease_share`."
}


class Keep:
    def __init__(self, agent: Scheduler, groups: Groups, share: float) -> None:
        self.agent, self.groups, self.share = agent, groups, share
        self.counts = dict.fromkeys(COUNTS, 0)
        #: Requests whose blocks are being kept, the oldest first, and the tickets to read them.
        self.kept: dict[str, dict[str, Any]] = {}
        #: Their blocks, and by how many of them each block is kept.
        self.tables: dict[str, list[list[int]]] = {}
        self.pinned: Counter[int] = Counter()
        #: vLLM's manager of all blocks.
        self.manager: Any = None

    def keep(
        self, request: Any, block_ids: tuple[list[int], ...], origin: bytes | None
    ) -> Offer | None:
        """Grants a lease on what a finished request has computed from `origin`, unless there is nothing of
        use."""
        if request.status not in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        ):
            return None
        # The blocks are complete on every rank, whatever is scheduled ahead. vLLM learns from a
        # sampled token that a request has finished. Where there is a connector it waits for the
        # answers of all ranks to that step, and a rank that samples answers when its token has come
        # to the host, by a stream that waits for the one that all layers have written on. An
        # earlier stage of a pipeline does not sample, but what it sent on came after what it wrote,
        # and the token came from that. A draft model may write after the token:
        # `WorkerSide.written` waits for it.
        tokens = settled(request)
        tables, first = self.groups.alive(block_ids, tokens)
        if not any(tables):
            return None
        name = request.request_id
        if not self._has_room(name, tables):
            return None
        try:
            ticket = self.agent.grant(
                name, tokens=tokens, blocks=tables, first=first, origin=origin
            )
        except AgentError as error:
            if error.kind == "draining":
                logger.info("kvferry: %s. Whoever answers it computes the prompt again", error)
            elif error.kind != "given_up":
                # Not what was said while it was computed: nobody may use it.
                logger.error("kvferry: %s cannot be handed over: %s", name, error)
            return None
        self.kept[name], self.tables[name] = ticket, tables
        for table in tables:
            self.pinned.update(table)
        return Offer(ticket, tokens, tables, first)

    def _has_room(self, name: str, tables: list[list[int]]) -> bool:
        """Whether these blocks can be kept as well. Who prefills and never comes to D must not take the whole pool; a
        request that is the only one may."""
        if self.manager is None or not self.pinned:
            return True
        most = int(self.share * self.manager.block_pool.num_gpu_blocks)
        more = sum(block not in self.pinned for table in tables for block in table)
        if len(self.pinned) + more <= most:
            return True
        self.counts["leases_declined"] += 1
        logger.warning(
            "kvferry: %s is not handed over: it has %d blocks, and %d are kept for others already, where the option "
            "'lease_share' allows %d. Whoever answers it computes the prompt again",
            name,
            more,
            len(self.pinned),
            most,
        )
        return False

    def released(self) -> dict[str, str]:
        """Requests whose blocks nobody reads any more, and why."""
        released = {}
        for request, why in self.agent.released():
            if self.kept.pop(request, None) is not None:
                logger.debug("kvferry: the blocks of %s are free again: %s", request, why)
                released[request] = why
                for block in chain.from_iterable(self.tables.pop(request)):
                    self.pinned[block] -= 1
                    if not self.pinned[block]:
                        del self.pinned[block]
        return released


def settled(request: Any) -> int:
    """Tokens of a request that all ranks have computed, whatever is scheduled ahead."""
    tokens: int = request.num_computed_tokens - request.num_in_flight_tokens
    return max(0, tokens)
