"""D: a request whose blocks are on another engine waits, is loaded by the workers, and is confirmed. So
does P, when a dialogue goes on with what D has answered."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from ..._core import Scheduler
from ..._errors import AgentError
from ..._origin import room_name
from .. import siblings
from ..buffer import landing
from ..groups import Groups
from ..logs import logger
from ..messages import Orders
from ..options import Options
from ..params import Offer, Source, shared_name, shown
from ..stock.source import Stock, is_stock
from .origin import Origins, differ
from .pace import Pace

#: What is counted, for the metrics.
COUNTS = {
    "params_refused": "Requests whose transfer parameters were of no use, malformed or forged: this engine computed "
    "their prompts itself.",
    "prompts_offered": "Requests whose prompts another engine had computed, or was to compute, for this one.",
}
#: Why this engine computed a prompt all the same: counted by reason.
RECOMPUTED = {
    "params": "the parameters were of no use",
    "draining": "the other engine drains, and has promised nothing",
    "in_use": "another request has the same ticket",
    "states": "what the other engine has is of another number of tokens",
    "windows": "an engine with vLLM's own connector has given up what a window needs",
    "not_taken": "vLLM did not take what there was",
    "load_failed": "it could not be loaded, and `kv_load_failure_policy` is `recompute`",
}


def recomputed(reason: str) -> str:
    """What a reason is counted by."""
    return f"prompts_recomputed:{reason}"


def is_rejected(request: Any) -> bool:
    """Whether this only says that vLLM's server has rejected a request, or that it has failed here: its prompt is one
    token that means nothing, and vLLM aborts it as soon as the connector has seen it."""
    return getattr(request, "abort_immediately", False) is True


def is_offered(request: Any) -> bool:
    """Whether a request asks for what another engine has computed."""
    params = request.kv_transfer_params
    return isinstance(params, dict) and bool(params.get("do_remote_prefill")) and not is_rejected(request)


@dataclass
class Wanted:
    """A request from when it comes until it is loaded."""

    #: What came through the router; None where the other engine is asked for all of it.
    offer: Offer | None
    #: Tokens that this engine can use, at most.
    tokens: int
    #: What it must have been computed from.
    origin: bytes | None
    #: The ticket to read it by, as soon as it is known.
    ticket: dict[str, Any] | None = None
    #: The other engine is asked how far it is: what to ask it for.
    follows: dict[str, Any] | None = None
    #: Another request has the same ticket: this one is computed here.
    twin: bool = False
    #: The request that reads for this one, too: another answer to the same prompt.
    reader: str | None = None
    #: As soon as there are blocks: a table for each group, and how many tokens will be in them.
    blocks: list[list[int]] = field(default_factory=list)
    loaded: int = 0
    since: float = field(default_factory=time.monotonic)
    #: How far it was when there was last something new (whether it had begun, and with how many tokens), and
    #: when that was.
    news: tuple[tuple[bool, int], float] = ((False, 0), 0.0)
    #: Tokens that this engine holds already.
    computed: int = 0
    #: The workers know of it: only they can say that it has ended.
    loading: bool = False
    #: Tokens that vLLM was last told it can load.
    told: int = 0
    #: vLLM has done with it.
    over: bool = False
    #: Why the blocks are gone.
    lost: str | None = None
    #: The engine runs vLLM's own connector, and cannot be asked.
    stock: bool = False

    @property
    def next_turn(self) -> bool:
        """An answer of D's, which P continues from."""
        return self.offer is not None and self.offer.hash is not None


class Decode:
    """The part of the scheduler's side that takes requests over."""

    def __init__(
        self,
        agent: Scheduler,
        groups: Groups,
        origins: Origins,
        options: Options,
        stock: Stock | None = None,
    ) -> None:
        self.agent, self.groups, self.origins, self.options = agent, groups, origins, options
        #: Engines without kvferry.
        self.stock = stock
        self.counts = dict.fromkeys((*COUNTS, *map(recomputed, RECOMPUTED)), 0)
        #: Whether prompts that fail to load are computed here.
        self.recomputes = False
        #: Whether engines share a key, and tickets are sealed with it.
        self.sealed = agent.engine_seal is not None
        #: Requests that wait or load.
        self.wanted: dict[str, Wanted] = {}
        #: The last tickets that came to an end: whoever replays a request brings one of them again.
        self.spent: deque[dict[str, Any]] = deque(maxlen=256)
        #: What the workers are told in the next step.
        self.next = Orders()
        #: Requests that are not wanted any more, of which the other engine could not be told because it
        #: has not heard of them yet: where they are followed, and until when it is worth while.
        self.unwanted: dict[str, tuple[dict[str, Any], float]] = {}
        self.pace = Pace()
        #: vLLM's manager of all blocks.
        self.manager: Any = None
        #: Whether bytes come through host memory (`kv_buffer_device`).
        self.buffered = False
        #: The share of them that the longest request takes, once it was asked for.
        self.largest: float | None = None

    def begin(self, request: Any) -> None:
        """A request that another engine has computed, or computes. What cannot be used is computed
        here."""
        try:
            wanted = self._begin(request)
        except (ValueError, AgentError) as error:
            self.refuse(request, error)
            return
        if wanted is not None:
            self.wanted[request.request_id] = wanted

    def refuse(self, request: Any, error: Exception) -> None:
        """A request whose parameters are of no use."""
        self.counts["params_refused"] += 1
        self.counts[recomputed("params")] += is_offered(request)
        logger.warning(
            "kvferry: cannot use the transfer parameters of %s: %s. This engine computes the "
            "prompt itself",
            shown(request.request_id),
            error,
        )

    def _begin(self, request: Any) -> Wanted | None:
        name, params, patience = request.request_id, request.kv_transfer_params, self.options.queue_timeout_seconds
        origin = self.origins.of(request, request.num_prompt_tokens)
        rejected = is_rejected(request)
        source = Source.read(params)
        if source is not None:
            if rejected:
                # It is known by a name that this one does not have.
                return None
            prompt = request.num_prompt_tokens
            # As many as that engine will have: it has the same prompt.
            tokens, agreed = prompt - self.groups.held_back, self.groups.agreed(prompt)
            if source.room is None:
                self.agent.check_engine(source.engine, source.address, source.seal)
                shared = shared_name(name, agreed, origin)
            elif self.sealed and not self.options.peers:
                raise ValueError(
                    f"a router of SGLang's names the engine at {source.address}, which has sealed nothing: say in the option "
                    "'peers' in which networks such engines are"
                )
            else:
                shared = room_name(source.room, origin or b"", agreed < prompt)
            where: dict[str, Any] = {
                "engine": source.engine,
                "address": source.address,
                "name": shared,
            }
            self.agent.follow(name, **where, patience=patience)
            self._want_again(where)
            return Wanted(None, tokens, origin, follows=where)
        stock = self.stock.read(params) if self.stock is not None else None
        if self.stock is None and is_stock(params):
            raise ValueError(
                "the other engine runs vLLM's stock NixlConnector, which cannot confirm what is read from it: use "
                "FerryConnector there, too, or set the option 'nixl_connector_lease_seconds' here to read from it all the same"
            )
        offer = stock or Offer.read(params)
        if stock is None and self.sealed:
            self.agent.check(offer.ticket, tokens=offer.tokens, blocks=offer.blocks, first=offer.first)
        reader = self._reader(offer.ticket)
        spent = offer.ticket in self.spent
        if rejected and (stock is None or reader is not None or spent):
            if reader is None and not spent:
                self._decline(offer.ticket)
            return None
        if (wrong := self._not_for(request, offer)) is not None:
            if reader is None and stock is None:
                self._decline(offer.ticket)
            raise ValueError(wrong)
        if reader is not None:
            if offer.hash is not None:
                raise ValueError("another request is reading the same blocks")
            if origin != self.wanted[reader].origin:
                raise ValueError("another request with another prompt is reading the same blocks")
            # Several answers to one prompt (`n`): what one of them reads is for all.
            return Wanted(offer, offer.tokens, origin, offer.ticket, reader=reader)
        if spent:
            raise ValueError("they have been used already, and the blocks are gone")
        if params.get("do_remote_decode") or offer.hash is not None:
            # Of what was answered, which the prompt goes on from.
            origin = self.origins.of(request, offer.tokens)
            if origin is None or offer.hash != origin.hex():
                # D need not be told: it keeps them for whoever does continue.
                raise ValueError(
                    f"the first {offer.tokens} tokens of this prompt are not those of the answer that "
                    "they are for"
                )
            # Whether D still has it is asked first: P can compute it, so it must not fail for that.
            where = {"ticket": offer.ticket}
            self.agent.follow(name, **where, patience=patience)
            return Wanted(offer, offer.tokens, origin, offer.ticket, follows=where)
        if stock is not None and self.stock is not None:
            self.stock.hold(offer.ticket)
            return Wanted(offer, offer.tokens, None, offer.ticket, stock=True)
        self.agent.hold(offer.ticket, patience=patience)
        return Wanted(offer, offer.tokens, origin, offer.ticket, lost=offer.wrong)

    def _computed_here(self, wanted: Wanted, reason: str) -> None:
        """Nothing of a request is loaded. To compute what an answer is followed by is what P is for."""
        if wanted.tokens and not wanted.next_turn:
            self.counts[recomputed(reason)] += 1
        wanted.tokens = 0

    def _decline(self, ticket: dict[str, Any]) -> None:
        """Of a request that never waited here. Held first: its engine may not have been met yet, and is tried once."""
        self.agent.hold(ticket, patience=self.options.queue_timeout_seconds)
        self.agent.abandon(ticket)

    def _not_for(self, request: Any, offer: Offer) -> str | None:
        """Why what P has is of no use to a request, as far as P's hints say it. Who changes them gains
        nothing: P confirms for its own prompt only."""
        if getattr(request, "resumable", False):
            return "more of its prompt comes later (streamed input)"
        if not offer.prompt:
            return None
        wrong = differ(self.origins.facts(request, offer.tokens), offer.prompt)
        return None if wrong is None else f"they are for another prompt: {wrong}"

    def _reader(self, ticket: dict[str, Any]) -> str | None:
        """Who reads what this ticket is for."""
        same = (name for name, it in self.wanted.items() if it.ticket == ticket and it.reader is None)
        return next(same, None)

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        """How many tokens can be loaded after those that are held already, and whether any can. None: not
        known yet, or not yet to be given blocks."""
        name = request.request_id
        wanted = self.wanted.get(name)
        if wanted is None or wanted.loading:
            return 0, False
        self.hear_of_lost()
        if wanted.stock and not self._knows_stock(name, wanted):
            return None, False
        # Who reads waits for the others; they do not, or they might come when it has gone on.
        if wanted.reader is None and siblings.may_come(name, time.monotonic() - wanted.since):
            return None, False
        if wanted.reader is not None:
            reader = self.wanted.get(wanted.reader)
            if reader is not None and (self.groups.shared or not reader.loading):
                return None, False
            # Afterwards, what is not in the cache is computed.
            wanted.tokens = min(wanted.tokens, reader.loaded) if reader is not None else 0
        if wanted.tokens > computed and wanted.follows is not None and wanted.lost is None:
            if not self._is_time(name, wanted):
                return None, False
        usable = min(wanted.tokens, request.num_prompt_tokens - self.groups.held_back)
        if 0 < usable < wanted.tokens and self._has_moved_on(wanted):
            logger.warning(
                "kvferry: the states of %s are those after %d tokens, but this engine needs them "
                "after %d. It computes the prompt itself",
                name,
                wanted.tokens,
                usable,
            )
            self._computed_here(wanted, "states")
            usable = 0
        if wanted.stock and usable > computed and not self._has_windows(name, wanted, usable):
            self._computed_here(wanted, "windows")
            usable = 0
        if wanted.lost is not None and wanted.next_turn:
            # To compute prompts is what P is for.
            wanted.tokens = usable = 0
        wanted.computed = computed
        wanted.told = max(0, usable - computed)
        return wanted.told, wanted.told > 0

    def _knows_stock(self, name: str, wanted: Wanted) -> bool:
        """Whether it is known what an engine without kvferry has, or that it cannot be had."""
        assert self.stock is not None and wanted.offer is not None and wanted.ticket is not None
        if wanted.lost is None and wanted.offer.first is None:
            wanted.lost = self.stock.lost(wanted.ticket)
            try:
                offer = self.stock.complete(wanted.offer)
            except (ValueError, TypeError) as error:
                wanted.lost, offer = str(error), None
            if offer is not None:
                wanted.offer = offer
            elif wanted.lost is None and time.monotonic() - wanted.since > self.options.handshake_timeout_seconds:
                wanted.lost = f"its engine has not answered within {self.options.handshake_timeout_seconds:.0f} s"
        return wanted.lost is not None or wanted.offer.first is not None

    def _has_windows(self, name: str, wanted: Wanted, tokens: int) -> bool:
        assert self.stock is not None and wanted.offer is not None
        if wanted.lost is not None or self.stock.usable(wanted.offer, tokens):
            return True
        logger.warning(
            "kvferry: the engine without kvferry has given up a block of a window that the last token of %s "
            "looks at. This engine computes the prompt itself",
            name,
        )
        return False

    def _is_time(self, name: str, wanted: Wanted) -> bool:
        """Whether to take blocks for a request that is followed."""
        frontier = self.agent.frontier(name)
        if frontier is None:
            waited = time.monotonic() - wanted.since
            if waited < self.options.push_timeout_seconds:
                return False
            wanted.lost = f"the other engine has not heard of it within {waited:.0f} s"
            return True
        if wanted.ticket is None and not self._is_new(name, wanted, frontier["ticket"]):
            return wanted.twin
        wanted.ticket = frontier["ticket"]
        if wanted.offer is None and frontier["sealed"]:
            # It may have computed fewer, or a state for another position than this engine's.
            wanted.tokens = frontier["tokens"]
        now = time.monotonic()
        far = (frontier["begun"], frontier["tokens"])
        if wanted.news[0] != far:
            wanted.news = (far, now)
        free = self._free_share()
        if not frontier["sealed"] and not self._leaves_room(wanted, free):
            return False
        return self.pace.is_time(frontier, now - wanted.news[1], wanted.tokens, free)

    def _leaves_room(self, wanted: Wanted, free: float) -> bool:
        """Whether what P has finished can still be loaded, whatever it is, while this request holds blocks
        and P computes it. P may need the blocks of those for this one: if each waited for the other,
        neither would ever be served."""
        if self.largest is None:
            self.largest = self.groups.share(self.groups.config.model_config.max_model_len)
        return free - self.groups.share(wanted.tokens) >= self.largest

    def _is_new(self, name: str, wanted: Wanted, ticket: dict[str, Any]) -> bool:
        """Whether a ticket that was found by a name is nobody else's."""
        if ticket in self.spent:
            # That of a request that was given up and is tried again: P has not heard of it yet.
            assert wanted.follows is not None
            self.agent.unfollow(name)
            self.agent.follow(name, **wanted.follows, patience=self.options.queue_timeout_seconds)
            return False
        if any(ticket == other.ticket for other in self.wanted.values()):
            # Whatever becomes of this one, the other needs it.
            self.agent.leave(name)
            wanted.twin, wanted.follows = True, None
            self._computed_here(wanted, "in_use")
            return False
        return True

    def _free_share(self) -> float:
        pool = self.manager.block_pool
        share: float = pool.get_num_free_blocks() / pool.num_gpu_blocks
        return share

    def _has_moved_on(self, wanted: Wanted) -> bool:
        """Whether nothing shorter than the offer can be had of it. P has held its windows back for the
        token that D needs; an answer has not."""
        if wanted.next_turn:
            return self.groups.of_one_position
        return any(self.groups.recurrent)

    def hear_of_lost(self) -> None:
        for ticket, why in self.agent.lost():
            followed, draining = ticket.pop("follows", None), ticket.pop("draining", False)
            for name, wanted in self.wanted.items():
                # What a router adds to a ticket means nothing to us.
                same = wanted.ticket is not None and ticket.items() <= wanted.ticket.items()
                if name == followed or same:
                    wanted.lost = why
                    if draining and not wanted.loading:
                        # Nothing was promised, so nothing has failed: this engine computes the prompt.
                        logger.info("kvferry: %s is computed here: %s", name, why)
                        self._computed_here(wanted, "draining")

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """A request has its blocks, and `external` tokens are to be loaded into them."""
        name = request.request_id
        wanted = self.wanted.get(name)
        if wanted is None or wanted.loading:
            return
        if external == 0:
            # Everything is here, or nothing can be had: P need not keep it.
            if wanted.told:
                self._computed_here(wanted, "not_taken")
            self._give_up(name)
            return
        wanted.loading = True
        tokens = wanted.loaded = wanted.computed + external
        wanted.blocks = self.groups.tables(blocks.get_block_ids(), tokens)
        if wanted.reader is None and wanted.lost is not None:
            # What follows is what the user chose for loads that fail.
            logger.warning("kvferry: the blocks of %s are gone: %s", name, wanted.lost)
            self.next.refused.append(name)
            return
        if self.manager is not None:
            self.groups.cache_what_is_loaded(self.manager, name, tokens)
        if wanted.reader is not None:
            read = self.wanted[wanted.reader].blocks
            self.next.shares.append(siblings.Share(wanted.reader, name, read, wanted.blocks))
            return
        assert wanted.ticket is not None
        ticket, deadline = wanted.ticket, self.options.load_timeout_seconds
        if wanted.stock and self.stock is not None:
            ticket, good = self.stock.reading(ticket)
            deadline = min(deadline, good)
        else:
            self.agent.reading(ticket)
        load = {
            "request": name,
            "ticket": ticket,
            "tokens": tokens,
            "origin": wanted.origin,
            "cached": self.groups.cached(blocks.blocks, wanted.computed),
            "destination_blocks": wanted.blocks,
            "deadline": deadline,
        }
        if wanted.offer is None:
            load["patience"] = self.options.queue_timeout_seconds
        else:
            load["granted"] = wanted.offer.tokens
            load["source_blocks"], load["source_first"] = wanted.offer.blocks, wanted.offer.first
        self.next.loads.append(load)
        if self.buffered:
            self.next.lands[name] = landing(
                wanted.blocks, load["cached"], self.groups.block_sizes(self.manager)
            )

    def orders(self) -> Orders:
        """What has come up for the workers since the last call."""
        self._tell_of_unwanted()
        orders, self.next = self.next, Orders()
        if self.stock is not None:
            orders.introductions = self.stock.introductions()
        return orders

    def ended(self, request: str, failed: bool, seconds: float) -> None:
        """All ranks have reported the end of a load, which was on the wire for so long."""
        wanted = self.wanted.get(request)
        if wanted is None:
            return
        if failed or wanted.ticket is None:
            if self.recomputes and not wanted.over:
                self._computed_here(wanted, "load_failed")
            self._give_up(request, failed)
            return
        del self.wanted[request]
        if wanted.reader is not None:
            return
        frontier = self.agent.frontier(request) if wanted.follows is not None else None
        self.pace.learn(frontier, wanted.tokens - wanted.computed, seconds)
        self.spent.append(wanted.ticket)
        if wanted.stock and self.stock is not None:
            self.stock.settle(wanted.ticket)
            return
        self.agent.settle(wanted.ticket)

    def finish(self, request: Any) -> None:
        """vLLM has done with a request, which may not have been loaded yet."""
        name = request.request_id
        wanted = self.wanted.get(name)
        if wanted is None:
            return
        wanted.over = True
        if wanted.loading:
            # vLLM keeps the blocks until the workers say that nothing lands in them any more.
            if not any(other.reader == name and other.loading for other in self.wanted.values()):
                self.next.aborts.append(name)
        else:
            self._give_up(name)

    def _give_up(self, request: str, failed: bool = False) -> None:
        wanted = self.wanted.pop(request)
        if wanted.reader is not None or (not wanted.loading and self._replace_reader(request)):
            # The others still want it.
            return
        if wanted.ticket is not None:
            self.spent.append(wanted.ticket)
        if wanted.stock and self.stock is not None and wanted.ticket is not None:
            self.stock.abandon(wanted.ticket, failed)
        elif wanted.follows is None:
            if wanted.ticket is not None:
                self.agent.abandon(wanted.ticket)
        elif wanted.ticket is None and wanted.lost is None and self.agent.frontier(request) is None:
            self.unwanted[request] = (wanted.follows, time.monotonic() + self.options.push_timeout_seconds)
        else:
            self.agent.unfollow(request)

    def _replace_reader(self, request: str) -> bool:
        """Another reads in its place, if there is one."""
        others = {name: it for name, it in self.wanted.items() if it.reader == request}
        reader = next(iter(others), None)
        for name, other in others.items():
            other.reader = None if name == reader else reader
        return reader is not None

    def _want_again(self, where: dict[str, Any]) -> None:
        """What the other engine will have by this name is wanted after all: a router tries again."""
        for request in [name for name, (before, _) in self.unwanted.items() if before == where]:
            self.agent.leave(request)
            del self.unwanted[request]

    def _tell_of_unwanted(self) -> None:
        now = time.monotonic()
        for request, (_, until) in list(self.unwanted.items()):
            if now > until or self.agent.frontier(request) is not None:
                self.agent.unfollow(request)
                del self.unwanted[request]
