"""D: a request whose blocks are on another engine waits, is loaded by the workers, and is confirmed. So
does P, when a dialogue goes on with what D has answered."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

from .._core import Scheduler
from .groups import Groups
from .logs import logger
from .messages import Orders
from .options import Options
from .params import Offer
from .turns import hash_tokens


@dataclass
class Wanted:
    """A request from when it comes until it is loaded."""

    offer: Offer
    #: Tokens of the offer that this engine can use.
    tokens: int
    #: Tokens that this engine holds already.
    computed: int = 0
    #: The workers know of it: only they can say that it has ended.
    loading: bool = False
    #: Why the blocks are gone.
    lost: str | None = None

    @property
    def next_turn(self) -> bool:
        """An answer of D's, which P continues from."""
        return self.offer.hash is not None


class Decode:
    """The half of the scheduler's side that takes requests over."""

    def __init__(self, agent: Scheduler, groups: Groups, options: Options) -> None:
        self.agent, self.groups, self.options = agent, groups, options
        #: Requests that wait or load.
        self.wanted: dict[str, Wanted] = {}
        #: The last tickets that came to an end: whoever replays a request brings one of them again.
        self.spent: deque[dict[str, Any]] = deque(maxlen=256)
        #: What the workers are told in the next step.
        self.next = Orders()
        #: vLLM's manager of all blocks.
        self.manager: Any = None

    def begin(self, request: Any) -> None:
        """A request that another engine has computed. What cannot be used is computed here."""
        try:
            offer = Offer.read(request.kv_transfer_params)
            if any(offer.ticket == other.offer.ticket for other in self.wanted.values()):
                # The answers of one prompt (`n`): the lease ends when the first of them has read.
                raise ValueError("another request is reading the same blocks")
            if offer.ticket in self.spent:
                raise ValueError("they have been used already, and the blocks are gone")
            continues = request.kv_transfer_params.get("do_remote_decode") or offer.hash is not None
            if continues and (offer.hash is None or offer.hash != hash_tokens(request, offer.tokens)):
                # D need not be told: it keeps them for whoever does continue.
                raise ValueError(
                    f"the first {offer.tokens} tokens of this prompt are not those of the answer that "
                    "they are for"
                )
            self.agent.hold(offer.ticket, patience=self.options.patience)
        except ValueError as error:
            logger.warning(
                "kvferry: cannot use the transfer parameters of %s: %s. This engine computes the "
                "prompt itself",
                request.request_id,
                error,
            )
            return
        self.wanted[request.request_id] = Wanted(offer, offer.tokens)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        """How many tokens can be loaded after those that are held already, and whether any can."""
        wanted = self.wanted.get(request.request_id)
        if wanted is None or wanted.loading:
            return 0, False
        self.hear_of_lost()
        usable = min(wanted.tokens, request.num_prompt_tokens - self.groups.held_back)
        if 0 < usable < wanted.tokens and self._has_moved_on(wanted):
            logger.warning(
                "kvferry: the states of %s are those after %d tokens, but this engine needs them "
                "after %d. It computes the prompt itself",
                request.request_id,
                wanted.tokens,
                usable,
            )
            wanted.tokens = usable = 0
        if wanted.lost is not None and wanted.next_turn:
            # To compute prompts is what P is for.
            wanted.tokens = usable = 0
        wanted.computed = computed
        count = max(0, usable - computed)
        return count, count > 0

    def _has_moved_on(self, wanted: Wanted) -> bool:
        """Whether nothing shorter than the offer can be had of it. P has held its windows back for the
        token that D needs; an answer has not."""
        if wanted.next_turn:
            return self.groups.of_one_position
        return any(self.groups.recurrent)

    def hear_of_lost(self) -> None:
        for ticket, why in self.agent.lost():
            for wanted in self.wanted.values():
                # What a router adds to a ticket means nothing to us.
                if ticket.items() <= wanted.offer.ticket.items():
                    wanted.lost = why

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        """A request has its blocks, and `external` tokens are to be loaded into them."""
        name = request.request_id
        wanted = self.wanted.get(name)
        if wanted is None or wanted.loading:
            return
        if external == 0:
            # Everything is here, or nothing can be had: P need not keep it.
            self._give_up(name)
            return
        wanted.loading = True
        if wanted.lost is not None:
            # What follows is what the user chose for loads that fail.
            logger.warning("kvferry: the blocks of %s are gone: %s", name, wanted.lost)
            self.next.refused.append(name)
            return
        offer = wanted.offer
        self.agent.reading(offer.ticket)
        tokens = wanted.computed + external
        if self.manager is not None:
            self.groups.cache_what_is_loaded(self.manager, name, tokens)
        self.next.loads.append(
            {
                "request": name,
                "ticket": offer.ticket,
                "tokens": tokens,
                "granted": offer.tokens,
                "cached": self.groups.cached(blocks.blocks, wanted.computed),
                "source_blocks": offer.blocks,
                "source_first": offer.first,
                "destination_blocks": self.groups.tables(blocks.get_block_ids(), tokens),
                "deadline": self.options.deadline,
            }
        )

    def orders(self) -> Orders:
        """What has come up for the workers since the last call."""
        orders, self.next = self.next, Orders()
        return orders

    def ended(self, request: str, failed: bool) -> None:
        """All ranks have reported the end of a load."""
        if request not in self.wanted:
            return
        if failed:
            self._give_up(request)
            return
        wanted = self.wanted.pop(request)
        self.spent.append(wanted.offer.ticket)
        self.agent.settle(wanted.offer.ticket)

    def finish(self, request: Any) -> None:
        """vLLM has done with a request, which may not have been loaded yet."""
        name = request.request_id
        wanted = self.wanted.get(name)
        if wanted is None:
            return
        if wanted.loading:
            # vLLM keeps the blocks until the workers say that nothing lands in them any more.
            self.next.aborts.append(name)
        else:
            self._give_up(name)

    def _give_up(self, request: str) -> None:
        wanted = self.wanted.pop(request)
        self.spent.append(wanted.offer.ticket)
        self.agent.abandon(wanted.offer.ticket)
