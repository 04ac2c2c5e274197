"""The connector in the scheduler's process: which blocks are kept for whom, and which are loaded.

P keeps a finished prompt's blocks under a lease and hands a ticket to the router; D's workers read,
and D confirms.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.v1.request import RequestStatus

from .._core import Scheduler
from .logs import logger
from .messages import Orders
from .metrics import Stats
from .options import Options

#: Where our part of `kv_transfer_params` lies; the rest is vLLM's own contract.
KEY = "kvferry"
#: Caches that keep no more than what the next token can see.
WINDOWED = ("SlidingWindowSpec", "SlidingWindowMLASpec", "ChunkedLocalAttentionSpec")


@dataclass
class Wanted:
    """A request of D whose blocks are elsewhere, from when it comes until it is loaded."""

    ticket: dict[str, Any]
    #: Tokens that the other engine has computed.
    tokens: int
    source_blocks: Any
    source_first: Any
    #: Tokens that this engine holds already.
    computed: int = 0
    #: The workers know of it: only they can say that it has ended.
    loading: bool = False
    #: Why the blocks are gone.
    lost: str | None = None


class SchedulerSide:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        parallel = vllm_config.parallel_config
        transfer = vllm_config.kv_transfer_config
        port = options.port + parallel.data_parallel_index if options.port else 0
        if port > 65535:
            raise ValueError(
                f"the option 'port' of kv_connector_extra_config is {options.port}, which leaves no port "
                f"for the data-parallel engine {parallel.data_parallel_index}; choose a lower one"
            )
        self.options = options
        self.cache = kv_cache_config
        self.groups = [
            kv_cache_config.kv_cache_groups[group].kv_cache_spec
            for group in kv_cache_config.transfer_group_ids
        ]
        self.recurrent = [type(_first(spec)).__name__ == "MambaSpec" for spec in self.groups]
        # The last tokens of a prompt are D's to compute: a recurrent state must not have seen them, a
        # window must reach as far back as they look (once all tokens are computed, vLLM keeps it for the
        # one after them), one that is replayed must be laid out for them, and what several draft modules
        # write for them is a guess.
        sliding = any(type(_first(spec)).__name__ in WINDOWED for spec in self.groups)
        everything = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
        replayed = any(spec.prefix_replay_tokens > 0 for spec in everything)
        lookahead = vllm_config.num_prefill_lookahead_tokens
        own = replayed or sliding or any(self.recurrent)
        self.held_back = max(1 if own else 0, lookahead - 1)
        self.parallel = parallel
        self.agent = Scheduler(
            str(transfer.engine_id),
            bind=options.bind(port),
            advertise=options.advertise,
            lease=options.lease,
            **options.trust(),
        )
        logger.info("kvferry: engine %s listens on %s", transfer.engine_id, self.agent.address)
        #: P: requests whose blocks will be kept, and finished ones whose blocks are.
        self.prefilling: set[str] = set()
        self.kept: set[str] = set()
        #: D: requests that wait or load.
        self.wanted: dict[str, Wanted] = {}
        #: The last tickets that came to an end: who replays a request brings one again.
        self.spent: deque[dict[str, Any]] = deque(maxlen=256)
        self.next = Orders()
        #: What the counters were when they were last asked for.
        self.counted: dict[str, int] = {}

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self.prefilling.add(request.request_id)
            self._hold_back(request)
        if not params.get("do_remote_prefill"):
            return
        try:
            wanted = _wanted(params)
            if any(wanted.ticket == other.ticket for other in self.wanted.values()):
                # The answers of one prompt (`n`): the lease ends when the first of them has read.
                raise ValueError("another request reads the same blocks")
            if wanted.ticket in self.spent:
                raise ValueError("they have been used, and the blocks are gone")
            self.agent.hold(wanted.ticket, patience=self.options.patience)
        except ValueError as error:
            # This engine computes the prompt itself.
            name = request.request_id
            logger.warning("kvferry: the transfer parameters of %s are of no use: %s", name, error)
            return
        self.wanted[request.request_id] = wanted

    def _hold_back(self, request: Any) -> None:
        """P stops short of what D computes itself."""
        count = self.held_back
        if not count or request.num_prompt_tokens <= count:
            return
        if request.get_skip_reading_prefix_cache():
            # Prompt log-probabilities: they are wanted of all tokens, and D reads nothing.
            return
        # Other requests may share the list of a prompt; `_all_token_ids` has a view on it.
        if request.prompt_token_ids is not None:
            request.prompt_token_ids = request.prompt_token_ids[:-count]
        else:
            request.prompt_embeds = request.prompt_embeds[:-count]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        wanted = self.wanted.get(request.request_id)
        if wanted is None or wanted.loading:
            return 0, False
        self._hear_of_lost()
        there = min(wanted.tokens, request.num_prompt_tokens - self.held_back)
        if there > 0 and there < wanted.tokens and any(self.recurrent):
            # A state is that of one position.
            logger.warning(
                "kvferry: the states of %s are those after %d tokens and not after %d: this engine "
                "computes it",
                request.request_id,
                wanted.tokens,
                there,
            )
            wanted.tokens = there = 0
        wanted.computed = computed
        count = max(0, there - computed)
        return count, count > 0

    def _hear_of_lost(self) -> None:
        for ticket, why in self.agent.lost():
            for wanted in self.wanted.values():
                # What a router adds to a ticket is nothing to us.
                if ticket.items() <= wanted.ticket.items():
                    wanted.lost = why

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
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
            # As the user chose for loads that fail.
            logger.warning("kvferry: the blocks of %s are gone: %s", name, wanted.lost)
            self.next.refused.append(name)
            return
        self.agent.reading(wanted.ticket)
        tokens = wanted.computed + external
        tables = self.cache.select_transfer_block_ids(blocks.get_block_ids())
        self.next.loads.append(
            {
                "request": name,
                "ticket": wanted.ticket,
                "tokens": tokens,
                "cached": [
                    self._cached(group, blocks.blocks[index], wanted.computed)
                    for group, index in enumerate(self.cache.transfer_group_ids)
                ],
                "source_blocks": wanted.source_blocks,
                "source_first": wanted.source_first,
                "destination_blocks": [
                    self._table(group, ids, tokens) for group, ids in enumerate(tables)
                ],
                "patience": self.options.deadline,
            }
        )

    def _cached(self, group: int, blocks: Sequence[Any], computed: int) -> int:
        """Tokens that a group holds already. `computed` is what full attention holds; the blocks of
        others may have been given away earlier. A state comes whole."""
        if self.recurrent[group]:
            return 0
        held = (block.block_hash_num_tokens for block in reversed(blocks))
        return min(computed, next((tokens for tokens in held if tokens), 0))

    def _table(self, group: int, ids: Iterable[int], tokens: int) -> list[int]:
        """A group's table; that of a state is the slot that runs after so many tokens, without
        former states before it and the scratch of speculative tokens behind it."""
        blocks = list(ids)
        if not self.recurrent[group]:
            return blocks
        at = (tokens - 1) // _first(self.groups[group]).block_size
        return blocks[at : at + 1]

    def orders(self, scheduled: Iterable[str]) -> Orders:
        for request, why in self.agent.released():
            if request in self.kept:
                logger.debug("kvferry: the blocks of %s come back: %s", request, why)
                self.kept.discard(request)
                self.next.released.append(request)
        orders, self.next = self.next, Orders()
        orders.hands_over = not self.prefilling.isdisjoint(scheduled)
        return orders

    def ended(self, request: str, failed: bool) -> None:
        if request not in self.wanted:
            return
        if failed:
            self._give_up(request)
            return
        wanted = self.wanted.pop(request)
        self.spent.append(wanted.ticket)
        self.agent.settle(wanted.ticket)

    def _give_up(self, request: str) -> None:
        wanted = self.wanted.pop(request)
        self.spent.append(wanted.ticket)
        self.agent.abandon(wanted.ticket)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        name = request.request_id
        self.prefilling.discard(name)
        wanted = self.wanted.get(name)
        if wanted is not None and wanted.loading:
            # vLLM keeps the blocks until the workers say that nothing lands in them any more.
            self.next.aborts.append(name)
            return False, None
        if wanted is not None:
            # It ended before it was scheduled.
            self._give_up(name)
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        if request.status not in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        ):
            return False, None
        # The blocks are complete on every rank, whatever is scheduled ahead. vLLM learns from a
        # sampled token that a request has finished. Where there is a connector it waits for the
        # answers of all ranks to that step, and a rank that samples answers when its token has come
        # to the host, by a stream that waits for the one that all layers have written on. An
        # earlier stage of a pipeline does not sample, but what it sent on came after what it wrote,
        # and the token came from that. A draft model may write after the token:
        # `WorkerSide.written` waits for it.
        tokens = request.num_computed_tokens - request.num_in_flight_tokens
        tables, first = [], []
        for group, ids in enumerate(self.cache.select_transfer_block_ids(block_ids)):
            table = self._table(group, ids, tokens)
            dead = next((at for at, block in enumerate(table) if block), len(table))
            first.append(dead)
            tables.append(table[dead:])
        if not any(tables):
            return False, None
        ticket = self.agent.grant(name)
        self.kept.add(name)
        host, _, port = self.agent.address.rpartition(":")
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": tables,
            "remote_engine_id": ticket["engine"],
            "remote_request_id": name,
            "remote_host": host.strip("[]"),
            "remote_port": int(port),
            "tp_size": self.parallel.tensor_parallel_size,
            "pp_size": self.parallel.pipeline_parallel_size,
            "remote_num_tokens": tokens,
            KEY: {"ticket": ticket, "tokens": tokens, "first": first},
        }

    def stats(self) -> Stats:
        counts = self.agent.counts()
        stats, self.counted = Stats.of_counts(counts, self.counted), counts
        return stats


def _wanted(params: dict[str, Any]) -> Wanted:
    """What a router passed on, if it can be of use. The workers look at the tables."""
    ours, blocks = params.get(KEY), params.get("remote_block_ids")
    if not isinstance(ours, dict):
        raise ValueError("they do not come from kvferry")
    ticket, tokens, first = ours.get("ticket"), ours.get("tokens"), ours.get("first")
    if not (
        isinstance(ticket, dict)
        and isinstance(tokens, int)
        and isinstance(first, list)
        and isinstance(blocks, list | tuple)
    ):
        raise ValueError("they are incomplete")
    return Wanted(ticket, tokens, blocks, first)


def _first(spec: Any) -> Any:
    by_layer = getattr(spec, "kv_cache_specs", None)
    return spec if by_layer is None else next(iter(by_layer.values()))
