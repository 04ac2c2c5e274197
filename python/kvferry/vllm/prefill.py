"""P: a prompt is computed for D, and its blocks are kept until D has read them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .groups import Groups
from .keep import Keep
from .params import Offer


class Prefill:
    """The half of the scheduler's side that hands requests over."""

    def __init__(self, keep: Keep, groups: Groups) -> None:
        self.keep, self.groups = keep, groups
        #: Requests whose blocks will be kept.
        self.prefilling: set[str] = set()

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

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> Offer | None:
        """What D can read, if the blocks are kept."""
        name = request.request_id
        if name not in self.prefilling:
            return None
        self.prefilling.discard(name)
        return self.keep.keep(request, block_ids)

    def may_finish(self, scheduled: Iterable[str]) -> bool:
        """Whether a step may finish a prompt that another engine reads then."""
        return not self.prefilling.isdisjoint(scheduled)
