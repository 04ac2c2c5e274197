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
    """Hands each of vLLM's calls to the half that it concerns. Every engine has both: what a request's
    parameters ask for decides, not the engine's `kv_role`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        engine = str(vllm_config.kv_transfer_config.engine_id)
        parallel = vllm_config.parallel_config
        self.agent = Scheduler(
            engine,
            lease=options.lease,
            **options.address(options.port_of(parallel.data_parallel_index)),
            **options.trust(),
        )
        logger.info("kvferry: engine %s listens on %s", engine, self.agent.address)
        groups = Groups(vllm_config, kv_cache_config)
        self.prefill = Prefill(self.agent, groups, parallel)
        self.decode = Decode(self.agent, groups, options)
        #: What the counters were when they were last asked for.
        self.counted: dict[str, int] = {}

    def on_new_request(self, request: Any) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_decode"):
            self.prefill.begin(request)
        if params.get("do_remote_prefill"):
            self.decode.begin(request)

    def matched(self, request: Any, computed: int) -> tuple[int, bool]:
        return self.decode.matched(request, computed)

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        self.decode.allocated(request, blocks, external)

    def orders(self, scheduled: Iterable[str]) -> Orders:
        orders = self.decode.orders()
        orders.released = self.prefill.released()
        orders.hands_over = self.prefill.may_finish(scheduled)
        return orders

    def ended(self, request: str, failed: bool) -> None:
        self.decode.ended(request, failed)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept for another engine, and what the router is to pass on."""
        self.decode.finish(request)
        params = self.prefill.finish(request, block_ids)
        return params is not None, params

    def stats(self) -> Stats:
        counts = self.agent.counts()
        stats, self.counted = Stats.of_counts(counts, self.counted), counts
        return stats
