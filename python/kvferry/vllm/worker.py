"""The connector in a worker's process: it describes the rank's memory, and reads into it."""

from __future__ import annotations

import logging
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from .._core import Ending, Worker
from .._errors import Error
from .describe import dump, manifest
from .messages import Orders
from .options import Options

logger = logging.getLogger("vllm.kvferry")

#: Seconds that a step with nothing to compute waits for a load: as long as vLLM sleeps after such a
#: step. What arrives in that time is used a step earlier.
GLANCE = 0.001


class WorkerSide:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self.config, self.cache, self.options = vllm_config, kv_cache_config, options
        self.agent: Worker | None = None
        self.storages: list[torch.Tensor] = []
        self.released: set[str] = set()
        #: Loads whose end has not been reported.
        self.loading: set[str] = set()
        #: For how long this step may wait for one of them.
        self.wait = 0.0
        #: Loads that failed while bytes may still land.
        self.quarantined: set[str] = set()
        self.refused: set[str] = set()

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        made = manifest(self.config, self.cache, kv_caches)
        dump(made)
        tensor = next(iter(kv_caches.values()))
        for layer in kv_caches.values():
            whole = torch.empty(0, dtype=torch.uint8, device=layer.device)
            whole.set_(layer.untyped_storage())
            if all(whole.data_ptr() != known.data_ptr() for known in self.storages):
                self.storages.append(whole)
        parallel = self.config.parallel_config
        transport = self.options.transport or ("tcp" if tensor.device.type == "cpu" else "nixl")
        self.agent = Worker(
            made,
            ranks=parallel.tensor_parallel_size * parallel.pipeline_parallel_size,
            memory=self.storages,
            transport=transport,
            bind=self.options.bind(0),
            advertise=self.options.advertise,
            handshake=self.options.handshake,
            concurrent=self.options.concurrent,
            **self.options.trust(),
        )

    def obey(self, orders: Orders) -> None:
        self.released.update(orders.released)
        # Data-parallel engines may step together: the others are not kept waiting.
        alone = self.config.parallel_config.data_parallel_size == 1
        self.wait = GLANCE if orders.idle and alone else 0.0
        assert self.agent is not None or not (orders.loads or orders.aborts)
        for load in orders.loads:
            try:
                self.agent.load(**load)  # type: ignore[union-attr]
                self.loading.add(load["request"])
            except (Error, ValueError, TypeError, OverflowError) as error:
                # A ticket or table from outside that makes no sense fails its request alone.
                logger.warning("kvferry: cannot load %s: %s", load["request"], error)
                self.refused.add(load["request"])
        for request in orders.aborts:
            self.agent.abort(request)  # type: ignore[union-attr]

    def results(self) -> KVConnectorTransferResults:
        results = KVConnectorTransferResults(finished_sending=self.released)
        self.released = set()
        results.finished_recving |= self.refused
        results.failed_recving |= self.refused
        self.refused = set()
        for ending in self._endings():
            if ending.outcome == "done":
                self._zero(ending)
                results.finished_recving.add(ending.request)
                continue
            if ending.outcome == "settled":
                self.quarantined.discard(ending.request)
            else:
                logger.warning(
                    "kvferry: loading %s %s: %s", ending.request, ending.outcome, ending.reason
                )
                if ending.quarantined:
                    # vLLM may give the blocks to others once it hears of the end.
                    self.quarantined.add(ending.request)
                    continue
            results.finished_recving.add(ending.request)
            results.failed_recving.add(ending.request)
        return results

    def _endings(self) -> list[Ending]:
        if self.agent is None:
            return []
        endings = self.agent.endings(self.wait if self.loading else 0.0)
        self.loading.difference_update(ending.request for ending in endings)
        return endings

    def _zero(self, ending: Ending) -> None:
        """vLLM does not zero blocks that are loaded, and stale tails decode to NaN."""
        assert self.agent is not None
        if self.storages[0].device.type == "cpu":
            self.agent.zero(ending)
            return
        for address, length in ending.rest.tolist():
            for storage in self.storages:
                offset = address - storage.data_ptr()
                if 0 <= offset < storage.numel():
                    storage[offset : offset + length].zero_()
