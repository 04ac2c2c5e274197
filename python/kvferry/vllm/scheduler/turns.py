"""Several turns of a dialogue: what D computed for an answer is kept, and P reads it when the next turn
comes, so that nobody computes it again."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from ..._core import Scheduler
from ..groups import Groups
from ..logs import logger
from ..params import Offer
from .keep import Keep, settled
from .origin import Origins


class Turns:
    """Keeps the blocks of answers. That is a saving and no promise: when requests wait for blocks, the
    oldest answers are let go."""

    def __init__(
        self,
        agent: Scheduler,
        keep: Keep,
        groups: Groups,
        origins: Origins,
        config: Any,
        seconds: float,
    ) -> None:
        self.agent, self.keep, self.groups, self.seconds = agent, keep, groups, seconds
        self.origins = origins
        self.drafts = config.speculative_config is not None
        #: Answers that are kept, the oldest first: their tickets, and until when.
        self.answers: dict[str, tuple[dict[str, Any], float]] = {}
        #: Those among them that were let go, and whose blocks vLLM has not got back yet.
        self.leaving: set[str] = set()
        #: Requests that vLLM has asked about in this step and has not found blocks for.
        self.without_blocks: set[str] = set()

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> Offer | None:
        """What P can read, if the blocks are kept."""
        params = request.kv_transfer_params or {}
        if not self.seconds or not params or params.get("do_remote_decode"):
            return None
        if any(self.groups.recurrent) and (self.drafts or request.num_in_flight_tokens):
            # A state is that of one position: that of drafts depends on how many were accepted, and
            # a step that vLLM scheduled ahead still changes it.
            return None
        origin = self.origins.of(request, settled(request))
        if origin is None:
            return None
        offer = self.keep.keep(request, block_ids, origin)
        if offer is None:
            return None
        # Nobody reads it for a while: this engine itself keeps its lease alive, and ends it.
        self.agent.hold(offer.ticket, patience=2 * self.seconds + 60)
        self.answers[request.request_id] = (offer.ticket, time.monotonic() + self.seconds)
        return replace(offer, hash=origin.hex())

    def make_room(self) -> None:
        """At the end of each of the scheduler's turns: lets go what was kept for long enough, or what
        stands in a request's way."""
        if not self.leaving and self.answers:
            _, until = next(iter(self.answers.values()))
            if self.without_blocks or time.monotonic() > until:
                self._let_go()
        self.without_blocks.clear()

    def can_make_room(self) -> bool:
        """A request that is being answered needs a block, and there is none: whether one comes soon."""
        if not self.leaving:
            self._let_go()
        return bool(self.leaving)

    def _let_go(self) -> None:
        oldest = next(iter(self.answers), None)
        if oldest is not None and self.agent.revoke(oldest):
            logger.debug("kvferry: %s is not kept for a next turn any more", oldest)
            self.leaving.add(oldest)

    def released(self, requests: list[str]) -> None:
        """Nobody reads these any more."""
        for request in requests:
            answer = self.answers.pop(request, None)
            if answer is not None:
                self.agent.settle(answer[0])

    def freed(self, requests: Iterable[str]) -> None:
        """vLLM gets the blocks of these back."""
        self.leaving.difference_update(requests)
