"""The vLLM connector: a thin shell that hands every question to the half that lives in its process."""

from __future__ import annotations

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.platforms import current_platform

from . import logs, neighbours, versions
from .logs import logger
from .messages import Card, Moved, Orders
from .metrics import PromMetrics, Stats
from .options import Options
from .refusal import refuse
from .scheduler.side import SchedulerSide
from .stock import source as stock
from .tracing import sides as tracing
from .worker.side import WorkerSide


class FerryConnector(KVConnectorBase_V1, SupportsHMA):
    """`--kv-transfer-config '{"kv_connector":"FerryConnector","kv_role":"kv_producer"}'`"""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        options = Options.read(vllm_config.kv_transfer_config.kv_connector_extra_config or {})
        logs.start(options.logging)
        if getattr(getattr(vllm_config, "aux_output_config", None), "enable_return_routed_experts", False) is True:
            raise refuse(
                "", "--enable-return-routed-experts: vLLM keeps the experts of each token beside its cache, and they are "
                "not handed over; since 0.33 it loads hardly any prompt then, without a word. Start the engine without it"
            )
        scheduler, worker = tracing.sides(vllm_config, options)
        self._scheduler: SchedulerSide | None = None
        self._worker: WorkerSide | None = None
        if role == KVConnectorRole.SCHEDULER:
            _look_at_version()
            self._scheduler = scheduler(vllm_config, kv_cache_config, options)
        else:
            neighbours.check()
            self._worker = worker(vllm_config, kv_cache_config, options)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        # vLLM asks while it reads a server's arguments, where it captures full graphs: the first time that it calls us. A
        # wrong option should end it there, and not when it has loaded the weights.
        Options.read(extra_config or {})
        return False

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: Any) -> bool:
        # A GPU's memory goes away meanwhile. Before 0.33 nobody asked: `refuse_sleep` says it later.
        return bool(current_platform.is_cpu())

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        transfer = vllm_config.kv_transfer_config
        options = Options.read(transfer.kv_connector_extra_config or {})
        reads = options.nixl_connector_lease_seconds and transfer.is_kv_consumer
        return stock.layout(vllm_config) if reads else None

    # In the scheduler's process.

    @property
    def scheduler(self) -> SchedulerSide:
        assert self._scheduler is not None
        return self._scheduler

    @property
    def supports_divergent_local_hybrid_hits(self) -> bool:
        # A prefix that full attention still holds is good although its recurrent state is gone:
        # states come whole with every load.
        return True

    def set_xfer_handshake_metadata_pp_aware(self, metadata: dict[tuple[int, int], Any]) -> None:
        by_stage = zip(*(metadata[rank].cards for rank in sorted(metadata)), strict=True)
        self.scheduler.agent.publish([card for stage in by_stage for card in stage])

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self.scheduler.bind(kv_cache_manager)

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        # Whatever is left out here would be zeroed while the read lands.
        return tuple(self._kv_cache_config.transfer_group_ids)

    def on_new_request(self, request: Any) -> None:
        self.scheduler.on_new_request(request)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self.scheduler.matched(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self.scheduler.allocated(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        orders = self.scheduler.orders(scheduler_output.num_scheduled_tokens)
        orders.idle = scheduler_output.total_num_scheduled_tokens == 0
        copies = getattr(scheduler_output, "kv_cache_block_copies", None)
        orders.writes = not orders.idle or bool(scheduler_output.new_block_ids_to_zero or copies)
        return orders

    def update_connector_output(self, connector_output: Any) -> None:
        failed = connector_output.failed_recving or ()
        told = connector_output.kv_connector_worker_meta
        moved = told.seconds if isinstance(told, Moved) else {}
        if isinstance(told, Moved) and told.loads:
            self.scheduler.loaded(told.loads)
        for request in connector_output.finished_recving or ():
            self.scheduler.ended(request, request in failed, moved.get(request, 0.0))
        self.scheduler.turns.freed(connector_output.finished_sending or ())

    def has_pending_push_work(self) -> bool:
        # vLLM goes on with its steps.
        return bool(self.scheduler.decode.unwanted)

    def has_pending_block_frees(self) -> bool:
        return self.scheduler.turns.can_make_room()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.scheduler.finished(request, block_ids)

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        # Asked instead of the one above where a neighbour in a MultiConnector knows no groups.
        return self.scheduler.finished(request, (block_ids,))

    def reset_cache(self) -> bool | None:
        # vLLM asks for this when its cache means nothing any more, because it gets other weights, or sleeps.
        self.scheduler.forget()
        return True

    # In a worker's process.

    @property
    def worker(self) -> WorkerSide:
        assert self._worker is not None
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.worker.register(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        self.worker.copy_with(copy_operation)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        assert self.worker.agent is not None
        cards = neighbours.gather(self.worker.agent.card(), self.worker.fellows())
        return Card(cards) if cards is not None else None

    def _orders(self) -> Orders:
        orders = self._get_connector_metadata()
        assert isinstance(orders, Orders)
        return orders

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        self.worker.prepare(self._orders())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self.worker.obey(self._orders())

    def wait_for_save(self) -> None:
        self.worker.written(self._orders())

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        return self.worker.results()

    def build_connector_worker_meta(self) -> Moved | None:
        return self.worker.told()

    # Whole requests are loaded, between steps: no layer waits for its own.

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kw: Any) -> None:
        # D may read it while the next one is computed.
        self.worker.wrote(layer_name)

    # What is counted, from both kinds of process.

    def get_kv_connector_stats(self) -> Stats | None:
        side = self._scheduler or self._worker
        stats = side.stats() if side is not None else None
        return None if stats is None or stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> Stats:
        # A copy: it is added to, and others may have been given the same.
        return Stats().aggregate(Stats(data)) if data is not None else Stats()

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: Any,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PromMetrics:
        return PromMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()


def _look_at_version() -> None:
    """A version of vLLM that nobody has tried is named in the log, and not used where its hooks are others:
    one that is never called, or is called with other arguments, fails at some request instead."""
    version = versions.running()
    if versions.mixed():
        logger.warning("kvferry: vLLM's files are not all of one build: %s", versions.build())
    if versions.is_tried(version):
        return
    if wrong := versions.differences(FerryConnector):
        raise refuse(
            "", f"vLLM {version} is not one that this release of kvferry works with: {'; '.join(wrong)}; "
            f"use one of {', '.join(versions.TRIED)}"
        )
    logger.warning("kvferry: an untried version: %s", versions.untried(version))
