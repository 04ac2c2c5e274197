"""P: a finished prompt's blocks are kept under a lease until D has read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus

from .._core import Scheduler
from .groups import Groups
from .logs import logger
from .params import Offer


class Prefill:
    """The half of the scheduler's side that hands requests over."""

    def __init__(self, agent: Scheduler, groups: Groups, parallel: Any) -> None:
        self.agent, self.groups, self.parallel = agent, groups, parallel
        #: Requests whose blocks will be kept, and finished ones whose blocks are being kept.
        self.prefilling: set[str] = set()
        self.kept: set[str] = set()

    def begin(self, request: Any) -> None:
        """A request whose answer another engine will give."""
        self.prefilling.add(request.request_id)
        self._hold_back(request)

    def _hold_back(self, request: Any) -> None:
        """Stops short of what D computes itself."""
        count = self.groups.held_back
        if not count or request.num_prompt_tokens <= count:
            return
        if request.get_skip_reading_prefix_cache():
            # Prompt log-probabilities: they are wanted for all tokens, and D reads nothing.
            return
        # Other requests may share the list of a prompt; `_all_token_ids` has a view on it.
        if request.prompt_token_ids is not None:
            request.prompt_token_ids = request.prompt_token_ids[:-count]
        else:
            request.prompt_embeds = request.prompt_embeds[:-count]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> dict[str, Any] | None:
        """What the router is to pass on, if the blocks are kept."""
        name = request.request_id
        if name not in self.prefilling:
            return None
        self.prefilling.discard(name)
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
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        tables, first = [], []
        for table in self.groups.tables(block_ids, tokens):
            dead = next((at for at, block in enumerate(table) if block), len(table))
            first.append(dead)
            tables.append(table[dead:])
        if not any(tables):
            return None
        ticket = self.agent.grant(name, tokens=tokens, blocks=tables, first=first)
        offer = Offer(ticket, tokens, tables, first)
        self.kept.add(name)
        parallel = self.parallel
        return offer.write(
            name,
            self.agent.address,
            parallel.tensor_parallel_size,
            parallel.pipeline_parallel_size,
        )

    def may_finish(self, scheduled: Iterable[str]) -> bool:
        """Whether a step may finish a prompt that another engine reads then."""
        return not self.prefilling.isdisjoint(scheduled)

    def released(self) -> list[str]:
        """Requests whose blocks nobody reads any more."""
        released = []
        for request, why in self.agent.released():
            if request in self.kept:
                logger.debug("kvferry: the blocks of %s are free again: %s", request, why)
                self.kept.discard(request)
                released.append(request)
        return released
