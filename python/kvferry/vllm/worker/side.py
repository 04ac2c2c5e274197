"""The connector in a worker's process: it describes the rank's memory, and reads into it."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorTransferResults

from ..._core import Ending, Worker
from ..._errors import Error
from ..._memory import whole, zero
from .. import buffer, metrics
from ..describe.manifest import dump, manifest
from ..logs import logger
from ..messages import Moved, Orders
from ..options import Options
from ..refusal import refuse
from ..siblings import Shares
from ..stock import facts as stock_facts
from ..stock.reader import StockReader
from .starter import Starter
from .written import Written, is_known, keepers_of_states

#: Seconds that a step with nothing to compute waits for a load: longer than most take when all is in place,
#: and less than such a step costs. What arrives in that time is used a step earlier.
GLANCE = 0.003


class WorkerSide:
    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        self.config, self.cache, self.options = vllm_config, kv_cache_config, options
        self.agent: Worker | None = None
        #: As soon as there is memory.
        self.rank, self.transport = 0, ""
        self.storages: list[torch.Tensor] = []
        self.kv_caches: dict[str, torch.Tensor] = {}
        #: Where others cannot reach the cache itself.
        self.buffer: buffer.HostBuffer | None = None
        #: Blocks of loads that are copied from there when they are done.
        self.lands: dict[str, buffer.Tables] = {}
        self.released: set[str] = set()
        #: Loads whose end has not been reported.
        self.loading: set[str] = set()
        #: The last orders that were obeyed.
        self.obeyed: Orders | None = None
        #: For how long this step may wait for one of them.
        self.wait = 0.0
        self.refused: set[str] = set()
        #: Requests that have a copy of what another one has loaded, to be reported.
        self.shared: set[str] = set()
        #: Seconds on the wire of loads that are done, for the scheduler.
        self.moved: dict[str, float] = {}
        #: Loads that ended since they were last counted.
        self.ended: list[dict[str, Any]] = []
        #: What the agent had counted by then.
        self.counted: dict[str, int] = {}
        #: On a GPU: all that was to be written there when the last step ended.
        self.last_writes: torch.Event | None = None
        self.shares = Shares(kv_cache_config)
        self.starter = Starter(self._load)
        #: Where it is known layer by layer what a step has written.
        self.step: Written | None = None
        #: Loads that were not started, and why: to be reported.
        self.failed: deque[tuple[str, str]] = deque()
        #: Loads from engines without kvferry.
        self.stock = StockReader(
            lambda introduction: stock_facts.manifests(
                introduction, self.config, self.cache, self.kv_caches
            ),
            self._start,
            lambda request, why: self.failed.append((request, why)),
        )

    def register(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self.kv_caches = kv_caches
        if buffer.is_wanted(self.config):
            self.buffer = buffer.HostBuffer(self.cache, kv_caches, pinned=torch.cuda.is_available())
            self.storages = self.buffer.storages
        made = manifest(
            self.config,
            self.cache,
            kv_caches,
            elsewhere=None if self.buffer is None else self.buffer.addresses,
            own_draft=self.options.draft == "own",
            tries_others=self.options.tries_others,
        )
        dump(made)
        if not kv_caches:
            raise refuse("", "this rank holds no cache; choose other pipeline stages")
        refuse_sleep(self.config, next(iter(kv_caches.values())).device.type)
        for layer in kv_caches.values() if self.buffer is None else ():
            storage = whole(layer)
            if all(storage.data_ptr() != known.data_ptr() for known in self.storages):
                self.storages.append(storage)
        self.shares.register(kv_caches)
        parallel = self.config.parallel_config
        self.rank = made.rank
        self.transport = self.options.transport_for(self.storages[0].device.type)
        self.agent = Worker(
            made,
            ranks=parallel.tensor_parallel_size
            * parallel.pipeline_parallel_size
            * parallel.prefill_context_parallel_size,
            memory=self.storages,
            transport=self.transport,
            handshake=self.options.handshake_timeout_seconds,
            concurrent=self.options.advanced.max_concurrent_reads,
            least_ahead=self.options.advanced.min_read_ahead_seconds,
            lowering=self.options.advanced.read_method,
            audit=self.options.audited(),
            gpu_sms=self.options.advanced.gpu_max_sms or None,
            gpu_kernel=self.options.advanced.gpu_kernel_file,
            gpu_staging=self.options.advanced.gpu_staging_mib,
            **self.options.rank_address(),
            **self.options.trust(),
        )

        if is_known(self.config, self.cache):
            keepers = keepers_of_states(self.config, self.cache, made)
            self.step = Written(keepers, self.agent, self._mark if self._on_gpu() else None)

    def fellows(self) -> list[Any]:
        """vLLM's groups of ranks that differ from this one in their stage, or in their part of a prefill's context."""
        from vllm.distributed import parallel_state

        fellows = [parallel_state.get_pp_group()]
        if self.config.parallel_config.prefill_context_parallel_size > 1:
            fellows.append(parallel_state.get_pcp_group())
        return fellows

    def copy_with(self, copy: buffer.Copy) -> None:
        """How the engine copies blocks between its device and host memory."""
        if self.buffer is not None:
            self.buffer.copy = copy

    def prepare(self, orders: Orders) -> None:
        """Before a step computes. In host memory nothing is under way then, and what is to be loaded
        need not wait for the step; on a GPU it would have to wait for the one before."""
        if not self._on_gpu():
            self.obey(orders)
        if self.step is not None:
            self.step.begin(orders.step)

    def wrote(self, layer: str) -> None:
        """The step is through with a layer."""
        if self.step is not None:
            self.step.layer(layer)

    def obey(self, orders: Orders) -> None:
        """As early as possible in each step, and once."""
        if orders is self.obeyed:
            return
        self.obeyed = orders
        self.released.update(orders.released)
        self.refused.update(orders.refused)
        self.ended += [metrics.refused("lost") for _ in orders.refused]
        self.lands.update(orders.lands)
        # Data-parallel engines may step together: the others are not kept waiting.
        alone = self.config.parallel_config.data_parallel_size == 1
        self.wait = GLANCE if orders.idle and alone else 0.0
        assert self.agent is not None or not (orders.loads or orders.aborts)
        for introduction in orders.introductions:
            self.stock.meet(self.agent, introduction)  # type: ignore[arg-type]
        if orders.loads:
            self.loading.update(load["request"] for load in orders.loads)
            # What lands is not ordered with the GPU's stream. The blocks are free because vLLM has
            # seen the last token of who had them, but a step that was scheduled ahead of that token, a
            # draft model, or `_zero`, may still be writing to them. The load waits for that; this step
            # does not.
            self.starter.put(self.last_writes, orders.loads)
        for share in orders.shares:
            done = self.shares.order(share, share.reader in self.loading)
            if done is not None:
                (self.shared if done else self.refused).add(share.request)
        for request in orders.aborts:
            if self.shares.forget(request):
                self.refused.add(request)
            elif self.starter.forget(request) or self.stock.forget(request):
                self.failed.append((request, "cancelled"))
            else:
                self.agent.abort(request)  # type: ignore[union-attr]

    def _load(self, load: dict[str, Any]) -> None:
        """May be called in a thread of its own."""
        if not self.stock.take(load):
            self._start(load)

    def _start(self, load: dict[str, Any]) -> None:
        try:
            self.agent.load(**load)  # type: ignore[union-attr]
        except (Error, ValueError, TypeError, OverflowError) as error:
            # A ticket or table from outside that makes no sense fails its request alone.
            logger.warning("kvferry: cannot load %s: %s", load["request"], error)
            self.failed.append((load["request"], "bad_request"))

    def written(self, orders: Orders) -> None:
        """At the end of a step, of drafts too."""
        if self.buffer is not None:
            for tables in orders.saves:
                self.buffer.save(tables)
        if orders.hands_over and self.config.speculative_config is not None and self._on_gpu():
            # What a draft model writes may come after the token from which the scheduler learns
            # that the blocks can be handed over.
            torch.accelerator.current_stream().synchronize()
        if self.step is not None:
            self.step.end()
        if orders.writes or orders.shares:
            # An engine that only waits, and steps every millisecond, leaves the GPU alone: it may be another's as
            # well, whose work would stop for that.
            self._mark_writes()

    def _on_gpu(self) -> bool:
        """Whether steps work behind the engine's back: also where the cache lies in host memory."""
        here = self.storages[0].device.type if self.storages else "cpu"
        return here != "cpu" or (bool(self.storages) and buffer.device_of(self.config) != "cpu")

    def _mark_writes(self) -> None:
        self.last_writes = self._mark()

    def _mark(self) -> torch.Event | None:
        """Where the stream is that steps write on; None: nothing is under way."""
        return torch.accelerator.current_stream().record_event() if self._on_gpu() else None

    def results(self) -> KVConnectorTransferResults:
        # A load that is done is in the memory for every kernel that is launched from now on, and
        # vLLM launches those that need it after it has heard from all ranks.
        results = KVConnectorTransferResults(finished_sending=self.released)
        self.released = set()
        while self.failed:
            request, why = self.failed.popleft()
            self.refuse(request, why)
            self.refused.update(self.shares.failed(request))
            self.lands.pop(request, None)
        results.finished_recving |= self.refused | self.shared
        results.failed_recving |= self.refused
        self.refused, self.shared = set(), set()
        wrote = False
        for ending in self._endings():
            if ending.outcome != "settled":
                self.count(ending)
            if ending.outcome == "done":
                self._zero(ending)
                self._land(ending.request)
                wrote = True
                self.moved[ending.request] = ending.seconds["wire"]
                results.finished_recving.add(ending.request)
                results.finished_recving.update(self.shares.loaded(ending.request))
                continue
            self.lands.pop(ending.request, None)
            # They have received nothing, so nothing lands in their blocks.
            without = self.shares.failed(ending.request)
            results.finished_recving.update(without)
            results.failed_recving.update(without)
            if ending.quarantined:
                # vLLM may give the blocks to others once it hears of the end: it hears of it when the
                # load is settled.
                continue
            results.finished_recving.add(ending.request)
            results.failed_recving.add(ending.request)
        if wrote:
            self._mark_writes()
        return results

    def count(self, ending: Ending) -> None:
        self.ended.append(metrics.ended(ending))

    def refuse(self, request: str, why: str) -> None:
        """A load that was not started has ended."""
        self.loading.discard(request)
        self.refused.add(request)
        self.ended.append(metrics.refused(why))

    def _endings(self) -> list[Ending]:
        if self.agent is None:
            return []
        endings = self.agent.endings(self.wait if self.loading else 0.0)
        self.loading.difference_update(ending.request for ending in endings)
        return endings

    def _land(self, request: str) -> None:
        """From host memory to the device, before a step uses it."""
        tables = self.lands.pop(request, None)
        if self.buffer is not None and tables is not None:
            self.buffer.load(tables)

    def told(self) -> Moved | None:
        """What the scheduler is told with the results."""
        moved, self.moved = self.moved, {}
        return Moved(moved) if moved else None

    def stats(self) -> metrics.Stats:
        ended, self.ended = self.ended, []
        stats = metrics.Stats.of_loads(ended)
        if self.agent is not None:
            counts = self.agent.counts()
            stats.aggregate(metrics.Stats.of_counts(counts, self.counted))
            self.counted = counts
        return stats

    def close(self) -> None:
        self.starter.close()
        if self.step is not None:
            self.step.close()
        if self.agent is not None:
            self.agent.close()

    def _zero(self, ending: Ending) -> None:
        """vLLM does not zero blocks that are loaded, and stale tails decode to NaN. On a GPU this
        goes to the stream of the steps, before the next of them."""
        assert self.agent is not None
        if self.storages[0].device.type == "cpu":
            self.agent.zero(ending)
            return
        zero(ending.rest.tolist(), self.storages)


def refuse_sleep(config: Any, device: str) -> None:
    """A GPU's memory is given back when an engine sleeps, and other memory is there when it wakes: what others have mapped
    or registered would be memory of nobody. vLLM 0.33 asks the connector itself, before it loads the weights."""
    if device != "cpu" and getattr(config.model_config, "enable_sleep_mode", False):
        raise refuse(
            "",
            f"with sleep mode vLLM gives the cache's memory on a {device} device back, and kvferry does "
            "not register it anew: others would read what is not there any more; start the engine without "
            "--enable-sleep-mode",
        )
