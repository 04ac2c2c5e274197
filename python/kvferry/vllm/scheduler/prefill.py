"""P: a prompt is computed for D. D may follow how far it is, and its blocks are kept until D has read them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from vllm.v1.request import RequestStatus

from ..._core import Scheduler
from ..._errors import AgentError
from ..._first import First
from ..._origin import room_name
from .. import siblings
from ..groups import Groups
from ..logs import logger
from ..params import ROOM, Offer, shared_name
from .keep import Keep, settled
from .origin import Origins


@dataclass
class Growing:
    """A prompt that D can follow."""

    request: Any
    #: How often vLLM had started it over, and how far it was, when D was last told.
    preemptions: int
    tokens: int = 0
    #: The steps that D was told of and that are not complete: their numbers, and the tokens that are then.
    in_flight: list[tuple[int, int]] = field(default_factory=list)
    #: Where the last step that computes it ends, which the next one goes on from.
    end: int | None = None


@dataclass
class Prefilling:
    """A prompt whose blocks will be kept."""

    request: Any
    #: What they are computed from.
    origin: bytes | None
    #: The room that D looks for; None where a router brings it what there is to know.
    room: int | None = None


class Prefill:
    """The part of the scheduler's side that hands requests over."""

    def __init__(
        self,
        agent: Scheduler,
        keep: Keep,
        groups: Groups,
        origins: Origins,
        push: bool,
        by_layer: bool = False,
    ) -> None:
        self.agent, self.keep, self.groups, self.push = agent, keep, groups, push
        self.origins = origins
        #: Whether workers say which layers they have written, so that D is told of steps in flight.
        self.by_layer = by_layer
        #: The number of the last one.
        self.step = 0
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
        room = (request.kv_transfer_params or {}).get(ROOM)
        self.prefilling[name] = Prefilling(request, origin, room)
        if room is None:
            self._hold_back(request)
        else:
            # D goes on from the first token, and computes nothing of the prompt.
            request.max_tokens = 1
        if self.push or room is not None:
            # At once: D may have it already, and asks for it by name.
            agreed = request.num_prompt_tokens if any(self.groups.recurrent) else prompt
            shared = shared_name(name, agreed, origin) if room is None else room_name(room, origin or b"")
            try:
                self.agent.open(name, name=shared)
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

    def advance(self, scheduled: Mapping[str, int]) -> int:
        """How far the prompts are: at the end of each of the scheduler's turns, before the workers have
        heard of it. What vLLM has counted since the last one is computed, and blocks that it has given
        to somebody else are not overwritten yet. So many tokens of each request are `scheduled` in the step
        that follows. Answers by which number D knows of that; 0 if it does not."""
        named = False
        for name, growing in list(self.growing.items()):
            try:
                named |= self._advance(name, growing, scheduled.get(name, 0))
            except AgentError as error:
                # D has given it up, or there is a mistake in here. From here on P does not even say that it starts
                # over, so D must read no more of it; what the grant says in the end is another matter.
                logger.debug("kvferry: %s is not followed any more: %s", name, error)
                del self.growing[name]
                if error.kind != "given_up":
                    self.agent.revoke(name)
        self.step += named
        return self.step if named else 0

    def _advance(self, name: str, growing: Growing, scheduled: int) -> bool:
        """Whether D is told of the step that follows."""
        request = growing.request
        if request.num_preemptions != growing.preemptions or self._goes_back(growing, scheduled):
            growing.preemptions, growing.tokens = request.num_preemptions, 0
            growing.in_flight, growing.end = [], None
            self.agent.restart(name)
        if request.status != RequestStatus.RUNNING:
            # It waits: for its turn, or for what D has answered in the last turn to be loaded.
            return False
        tokens = max(settled(request), growing.tokens)
        growing.in_flight = [step for step in growing.in_flight if step[1] > tokens]
        reached = growing.in_flight[-1][1] if growing.in_flight else tokens
        named = False
        if scheduled:
            growing.end = request.num_computed_tokens + scheduled
            # What comes behind the prompt is not for D.
            end = min(growing.end, request.num_prompt_tokens)
            named = self.by_layer and end > reached
            if named:
                growing.in_flight.append((self.step + 1, end))
                reached = end
        if tokens > growing.tokens or named:
            growing.tokens = tokens
            blocks = self.groups.grown(self.manager, name, reached)
            self.agent.advance(name, tokens=tokens, blocks=blocks, in_flight=growing.in_flight)
        return named

    def _goes_back(self, growing: Growing, scheduled: int) -> bool:
        """Whether the step that follows computes again what an earlier one has written, because what that read has
        failed to load: D must not take the one for the other."""
        computed = growing.request.num_computed_tokens
        if not scheduled or growing.end is None or computed >= growing.request.num_prompt_tokens:
            return False
        return bool(computed != growing.end)

    def finish(self, request: Any, block_ids: tuple[list[int], ...]) -> Offer | None:
        """What D can read, if the blocks are kept."""
        name = request.request_id
        if name not in self.prefilling:
            return None
        prefilling = self.prefilling.pop(name)
        origin, room = prefilling.origin, prefilling.room
        if self.growing.pop(name, None) is not None and room is not None and request.output_token_ids:
            self._enclose_first(name, request)
        offer = self.keep.keep(request, block_ids, origin)
        if offer is None and (self.push or room is not None):
            # It ended in another way, and D need not wait for it.
            self.agent.revoke(name)
        if offer is None:
            return None
        if not self.push and room is None:
            self._keep_one_of(name)
        return replace(offer, prompt=self.origins.facts(request, offer.tokens))

    def _enclose_first(self, name: str, request: Any) -> None:
        """The token that D goes on from. How likely it was vLLM does not say here."""
        sampling = request.sampling_params
        greedy = sampling.temperature < 1e-5 or sampling.top_k == 1
        with suppress(AgentError):
            # Whoever has given it up meanwhile is told when it is granted.
            self.agent.enclose(name, First(request.output_token_ids[0], "vLLM", greedy).write())

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
