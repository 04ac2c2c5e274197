"""The connector in the scheduler's process: one agent, and a half each for prefill and decode."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .._core import Scheduler
from .decode import Decode
from .groups import Groups
from .logs import logger
from .messages import Orders
from .metrics import Stats
from .options import Options
from .prefill import Prefill


class SchedulerSide:
    """Hands each of vLLM's calls to the half that it concerns. `kv_role` says which halves there are."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        self.role = transfer.kv_role
        groups = Groups(vllm_config, kv_cache_config)
        self.agent = Scheduler(
            str(transfer.engine_id),
            lease=options.lease,
            **options.address(options.port_of(parallel.data_parallel_index)),
            **options.trust(),
        )
        logger.info("kvferry: engine %s listens on %s", transfer.engine_id, self.agent.address)
        self.prefill = Prefill(self.agent, groups, parallel) if transfer.is_kv_producer else None
        self.decode = Decode(self.agent, groups, options) if transfer.is_kv_consumer else None
        #: What the counters were when they were last asked for.
        self.counted: dict[str, int] = {}

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            if self.prefill is not None:
                self.prefill.begin(request)
            else:
                self._lacks(request, "do_remote_decode", "keeps no blocks for others")
        if params.get("do_remote_prefill"):
            if self.decode is not None:
                self.decode.begin(request)
            else:
                self._lacks(request, "do_remote_prefill", "computes the prompt itself")

    def _lacks(self, request: Any, asked: str, instead: str) -> None:
        logger.warning(
            "kvferry: %s asks for '%s', but this engine's kv_role is '%s': it %s. Send such requests "
            "to another engine, or set kv_role to 'kv_both'",
            request.request_id,
            asked,
            self.role,
            instead,
        )

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        return (0, False) if self.decode is None else self.decode.matched(request, computed)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        if self.decode is not None:
            self.decode.allocated(request, blocks, external)

    def orders(self, scheduled: Iterable[str]) -> Orders:
        orders = Orders() if self.decode is None else self.decode.orders()
        if self.prefill is not None:
            orders.released = self.prefill.released()
            orders.hands_over = self.prefill.may_finish(scheduled)
        return orders

    def ended(self, request: str, failed: bool) -> None:
        if self.decode is not None:
            self.decode.ended(request, failed)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept for another engine, and what the router is to pass on."""
        params = self.prefill.finish(request, block_ids) if self.prefill is not None else None
        if self.decode is not None:
            self.decode.finish(request)
        return params is not None, params

    def stats(self) -> Stats:
        counts = self.agent.counts()
        stats, self.counted = Stats.of_counts(counts, self.counted), counts
        return stats
