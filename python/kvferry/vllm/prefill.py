"""P: a prompt is computed for D. D may follow how far it is, and its blocks are kept until D has read them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from vllm.v1.request import RequestStatus

from .._core import Scheduler
from .._errors import AgentError
from . import siblings
from .groups import Groups
from .keep import Keep, settled
from .logs import logger
from .origin import Origins
from .params import Offer, shared_name


@dataclass
class Growing:
    """A prompt that D can follow."""

    request: Any
    #: How often vLLM had started it over, and how far it was, when D was last told.
    preemptions: int
    tokens: int = 0


@dataclass
class Prefilling:
    """A prompt whose blocks will be kept."""

    request: Any
    #: What they are computed from.
    origin: bytes | None


class Prefill:
    """The part of the scheduler's side that hands requests over."""

    def __init__(
        self, agent: Scheduler, keep: Keep, groups: Groups, origins: Origins, push: bool
    ) -> None:
        self.agent, self.keep, self.groups, self.push = agent, keep, groups, push
        self.origins = origins
        self.prefilling: dict[str, Prefilling] = {}
        #: Those of them that are followed, or may be.
        self.growing: dict[str, Growing] = {}
        #: By prompts with several answers, the last one whose blocks are kept.
        self.last_of: dict[str, str] = {}
        #: vLLM's manager of all blocks.
        self.manager: Any = None

    def begin(self, request: Any) -> None:
        """A request whose answer another engine will give."""
        name = request.request_id
        if getattr(request, "resumable", False):
            logger.warning(
                "kvferry: %s is not handed over: more of its prompt comes later (streamed input)", name
            )
            return
        prompt = request.num_prompt_tokens
        # Of all of the prompt, as D has it.
        origin = self.origins.of(request, prompt)
        self.prefilling[name] = Prefilling(request, origin)
        self._hold_back(request)
        if self.push:
            # At once: D may have it already, and asks for it by name.
            agreed = request.num_prompt_tokens if any(self.groups.recurrent) else prompt
            try:
                self.agent.open(name, name=shared_name(name, agreed, origin))
            except AgentError as error:
                # An engine that drains computes it, and hands nothing over.
                if error.kind != "draining":
                    raise
                return
            self.growing[name] = Growing(request, request.num_preemptions)

    def _hold_back(self, request: Any) -> None:
        """Stops short of what D computes itself."""
        count = self.groups.held_back
        if not count or request.num_prompt_tokens <= count:
            return
        if request.get_skip_reading_prefix_cache():
            # Prompt log-probabilities: they are wanted for all tokens, and D reads nothing.
            return
        # Other requests may share the list of a prompt; `_all_token_ids` has a view on it.
        for name in ("prompt_token_ids", "prompt_embeds", "prompt_is_token_ids"):
            if (given := getattr(request, name, None)) is not None:
                setattr(request, name, given[:-count])
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def advance(self) -> None:
        """How far the prompts are: at the end of each of the scheduler's turns, before the workers have
        heard of it. What vLLM has counted since the last one is computed, and blocks that it has given
        to somebody else are not overwritten yet."""
        for name, growing in list(self.growing.items()):
            try:
                self._advance(name, growing)
            except AgentError as error:
                # D has given it up, or there is a mistake in here. Either way D reads no more of it;
                # what the grant says in the end is another matter.
                logger.debug("kvferry: %s is not followed any more: %s", name, error)
                del self.growing[name]

    def _advance(self, name: str, growing: Growing) -> None:
        request = growing.request
        if request.num_preemptions != growing.preemptions:
            growing.preemptions, growing.tokens = request.num_preemptions, 0
            self.agent.restart(name)
        if request.status != RequestStatus.RUNNING:
            # It waits: for its turn, or for what D has answered in the last turn to be loaded.
            return
        tokens = settled(request)
        if tokens > growing.tokens:
            growing.tokens = tokens
            blocks = self.groups.grown(self.manager, name, tokens)
            self.agent.advance(name, tokens=tokens, blocks=blocks)

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> Offer | None:
        """What D can read, if the blocks are kept."""
        name = request.request_id
        if name not in self.prefilling:
            return None
        origin = self.prefilling.pop(name).origin
        self.growing.pop(name, None)
        offer = self.keep.keep(request, block_ids, origin)
        if offer is None and self.push:
            # It ended in another way, and D need not wait for it.
            self.agent.revoke(name)
        if offer is None:
            return None
        if not self.push:
            self._keep_one_of(name)
        return replace(offer, prompt=self.origins.facts(request, offer.tokens))

    def _keep_one_of(self, name: str) -> None:
        """Of several answers to one prompt (`n`) vLLM passes on the parameters of the last alone. Where D asks
        for requests by name, it asks for each of them."""
        prompt = siblings.prompt_of(name)
        if prompt is None:
            return
        before = self.last_of.get(prompt)
        self.last_of = {it: last for it, last in self.last_of.items() if last in self.keep.kept}
        self.last_of[prompt] = name
        if before is not None:
            self.agent.revoke(before)

    def may_finish(self, scheduled: Iterable[str]) -> bool:
        """Whether a step computes a prompt that another engine reads then."""
        return not self.prefilling.keys().isdisjoint(scheduled)
