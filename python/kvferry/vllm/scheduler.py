"""The connector in the scheduler's process: which blocks are kept for whom, and which are loaded.

P keeps a finished prompt's blocks under a lease and hands a ticket to the router; D's workers read, and D
confirms.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.v1.request import RequestStatus

from .._core import Scheduler
from .logs import logger
from .messages import Orders
from .metrics import Stats
from .options import Options


#: Where our part of `kv_transfer_params` lies; the rest is vLLM's own contract.
KEY = "kvferry"


class SchedulerSide:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        parallel = vllm_config.parallel_config
        transfer = vllm_config.kv_transfer_config
        port = options.port + parallel.data_parallel_index if options.port else 0
        self.options = options
        self.cache = kv_cache_config
        self.groups = [
            kv_cache_config.kv_cache_groups[group].kv_cache_spec
            for group in kv_cache_config.transfer_group_ids
        ]
        self.recurrent = [type(_first(spec)).__name__ == "MambaSpec" for spec in self.groups]
        # The last tokens of a prompt are D's to compute: a recurrent state must not have seen them.
        lookahead = getattr(vllm_config, "num_prefill_lookahead_tokens", 0)
        self.held_back = max(1 if any(self.recurrent) else 0, lookahead - 1)
        self.parallel = parallel
        self.agent = Scheduler(
            str(transfer.engine_id),
            bind=options.bind(port),
            advertise=options.advertise,
            lease=options.lease,
            **options.trust(),
        )
        logger.info("kvferry: engine %s listens on %s", transfer.engine_id, self.agent.address)
        #: P: finished requests whose blocks are kept.
        self.kept: set[str] = set()
        #: D: tickets of requests that wait or load, and where the tables of a load begin.
        self.tickets: dict[str, dict[str, Any]] = {}
        self.computed: dict[str, int] = {}
        self.loading: set[str] = set()
        self.next = Orders()
        #: What the counters were when they were last asked for.
        self.counted: dict[str, int] = {}

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self._hold_back(request, params)
        ticket = _ticket(params)
        if not params.get("do_remote_prefill"):
            return
        try:
            if ticket is None:
                raise ValueError("they do not come from kvferry")
            self.agent.hold(ticket, patience=self.options.patience)
        except ValueError as error:
            # This engine computes the prompt itself.
            logger.warning(
                "kvferry: the transfer parameters of %s are of no use: %s", request.request_id, error
            )
            return
        self.tickets[request.request_id] = ticket

    def _hold_back(self, request: Any, params: dict[str, Any]) -> None:
        """P stops short of what D computes itself. Once: a preempted request comes here again."""
        count = self.held_back
        if not count or params.get("_p_side_truncated") or request.num_prompt_tokens <= count:
            return
        if request.prompt_token_ids is None:
            raise ValueError("kvferry cannot hold back tokens of a prompt of embeddings")
        del request.prompt_token_ids[-count:]
        del request._all_token_ids[-count:]
        request.num_prompt_tokens -= count
        request.max_tokens = 1
        params["_p_side_truncated"] = True

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill") or request.request_id not in self.tickets:
            return 0, False
        self._forget_lost()
        if request.request_id not in self.tickets:
            # Its blocks are gone: this engine computes the prompt itself.
            return 0, False
        there = min(params[KEY]["tokens"], request.num_prompt_tokens - self.held_back)
        count = max(0, there - computed)
        self.computed[request.request_id] = computed
        return count, count > 0

    def _forget_lost(self) -> None:
        for name, why in self.agent.lost():
            for request, ticket in list(self.tickets.items()):
                if ticket["request"] == name and request not in self.loading:
                    logger.warning("kvferry: the blocks of %s are gone: %s", request, why)
                    del self.tickets[request]

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        params = request.kv_transfer_params or {}
        if not params.get("do_remote_prefill"):
            return
        params["do_remote_prefill"] = False
        ticket = self.tickets.get(request.request_id)
        if ticket is None:
            return
        if external == 0:
            # Everything is here, or nothing can be had: P need not keep it.
            self.agent.abandon(self.tickets.pop(request.request_id))
            return
        computed = self.computed.pop(request.request_id, 0)
        tables = self.cache.select_transfer_block_ids(blocks.get_block_ids())
        self.loading.add(request.request_id)
        self.next.loads.append(
            {
                "request": request.request_id,
                "ticket": ticket,
                "tokens": computed + external,
                "cached": [0 if state else computed for state in self.recurrent],
                "source_blocks": params["remote_block_ids"],
                "source_first": params[KEY]["first"],
                "destination_blocks": [self._table(g, ids) for g, ids in enumerate(tables)],
                "patience": self.options.deadline,
            }
        )

    def _table(self, group: int, ids: Iterable[int]) -> list[int]:
        """A group's table; that of a state is its running slot, without the scratch that
        speculative tokens use behind it."""
        blocks = list(ids)
        if not self.recurrent[group] or not blocks:
            return blocks
        scratch = min(_first(self.groups[group]).num_speculative_blocks, len(blocks) - 1)
        return [blocks[len(blocks) - scratch - 1]]

    def orders(self) -> Orders:
        for request, why in self.agent.released():
            if request in self.kept:
                logger.debug("kvferry: the blocks of %s come back: %s", request, why)
                self.kept.discard(request)
                self.next.released.append(request)
        orders, self.next = self.next, Orders()
        return orders

    def ended(self, request: str, failed: bool) -> None:
        self.loading.discard(request)
        ticket = self.tickets.pop(request, None)
        if ticket is None:
            return
        if failed:
            self.agent.abandon(ticket)
        else:
            self.agent.settle(ticket["request"])

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        params = request.kv_transfer_params or {}
        name = request.request_id
        if name in self.loading:
            # vLLM keeps the blocks until the workers say that nothing lands in them any more.
            self.next.aborts.append(name)
            return False, None
        if name in self.tickets:
            # It ended before it was scheduled.
            self.agent.abandon(self.tickets.pop(name))
            return False, None
        if not params.get("do_remote_decode"):
            return False, None
        if request.status not in (
            RequestStatus.FINISHED_LENGTH_CAPPED,
            RequestStatus.FINISHED_STOPPED,
        ):
            return False, None
        # The blocks are complete: vLLM learns that a request has finished from the token that its
        # last step sampled, which was on its way to the host only after all layers had written.
        tables, first = [], []
        for group, ids in enumerate(self.cache.select_transfer_block_ids(block_ids)):
            table = self._table(group, ids)
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
            "remote_host": host,
            "remote_port": int(port),
            "tp_size": self.parallel.tensor_parallel_size,
            "pp_size": self.parallel.pipeline_parallel_size,
            "remote_num_tokens": request.num_computed_tokens,
            KEY: {"ticket": ticket, "tokens": request.num_computed_tokens, "first": first},
        }

    def stats(self) -> Stats:
        counts = self.agent.counts()
        stats, self.counted = Stats.of_counts(counts, self.counted), counts
        return stats


def _ticket(params: dict[str, Any]) -> dict[str, Any] | None:
    """The ticket in what a router passed on, if all that goes with it is there."""
    ours = params.get(KEY)
    if not isinstance(ours, dict) or not isinstance(params.get("remote_block_ids"), list | tuple):
        return None
    ticket, tokens, first = ours.get("ticket"), ours.get("tokens"), ours.get("first")
    fits = isinstance(ticket, dict) and isinstance(tokens, int) and isinstance(first, list)
    return ticket if fits else None


def _first(spec: Any) -> Any:
    by_layer = getattr(spec, "kv_cache_specs", None)
    return spec if by_layer is None else next(iter(by_layer.values()))
