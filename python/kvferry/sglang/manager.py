"""What an SGLang engine has one of in each rank: the rank's memory, described and registered, and in the first of them the
engine's word on what it keeps for others."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
from sglang.srt.disaggregation.base.conn import BaseKVManager
from sglang.srt.runtime_context import get_disagg, get_parallel

from .. import _memory
from .._core import Ending, Scheduler, Worker
from .._metrics import ended
from .._refusal import refuse
from .._starter import Starter
from . import inside, logs, versions
from .describe import Rank, dump
from .logs import logger
from .metrics import Metrics
from .options import Options
from .ranks import Ranks
from .settings import refuse_settings


class Manager(BaseKVManager):  # type: ignore[misc]
    #: SGLang asks for these two: pages of a failed load are kept until nothing can land in them.
    supports_deferred_decode_kv_release = True
    enable_deferred_decode_kv_release = True

    def __init__(self, args: Any, disaggregation_mode: Any, server_args: Any, is_mla_backend: bool | None = False) -> None:
        if gone := inside.missing():
            raise refuse("", f"SGLang {versions.running()} does not have what kvferry needs of it: {', '.join(gone)}. "
                             f"Tried are {', '.join(versions.TRIED)}")
        self.options = Options.of_environment()
        logs.start(self.options.logging)
        if not versions.is_tried(versions.running()):
            logger.warning("kvferry: an untried version: %s", versions.untried(versions.running()))
        self.kv_args, self.mode, self.server_args = args, disaggregation_mode, server_args
        #: SGLang looks here for how many data-parallel ranks an engine has that it is to read from.
        self.prefill_info_table: dict[str, Any] = {}
        #: As P: requests of which it is not known yet which states are wanted, and how those that were granted have ended.
        #: As D: who waits for a load, and what is read.
        self.sought: dict[str, Any] = {}
        self.released: dict[str, str] = {}
        self.loading: dict[str, Any] = {}
        self.followed: dict[str, Any] = {}

    def bind(self, queue: Any) -> None:
        """As soon as the pools and the model are known."""
        parallel = get_parallel()
        refuse_settings(self.server_args, parallel)
        if queue.draft_token_to_kv_pool is not None:
            raise refuse("", "the caches of draft models are not handed over")
        self.ranks = Ranks(parallel.attn_tp_group.cpu_group, parallel.attn_tp_rank, parallel.attn_tp_size)
        self.scheduler, self.rows = queue.scheduler, queue.metadata_buffers
        engine = self.ranks.told(f"sglang-{self.mode.value}-{uuid.uuid4().hex[:12]}")
        components = [it.value for it in self.kv_args.state_types]
        window = queue.scheduler.sliding_window_size
        rank = Rank(
            queue.scheduler.model_config,
            components,
            window,
            self.ranks.rank,
            self.ranks.size,
            prefills=self.prefills,
            tries_others=self.options.tries_others,
            caches_prefixes=self.prefills or bool(self.server_args.disaggregation_decode_enable_radix_cache),
        )
        described = rank.describe(engine, queue.token_to_kv_pool)
        dump(described.manifest)
        self.manifest, self.tables = described.manifest, described.tables
        self.storages = [_memory.whole(tensor) for tensor in described.memory]
        self.device = self.storages[0].device.type
        options = self.options
        self.worker = Worker(
            described.manifest,
            ranks=self.ranks.size,
            memory=self.storages,
            transport=options.transport_for(self.device),
            handshake=options.handshake_timeout_seconds,
            concurrent=options.advanced.max_concurrent_reads,
            least_ahead=options.advanced.min_read_ahead_seconds,
            lowering=options.advanced.read_method,
            audit=options.audited(),
            gpu_sms=options.advanced.gpu_max_sms or None,
            gpu_kernel=options.advanced.gpu_kernel_file,
            gpu_staging=options.advanced.gpu_staging_mib,
            **options.rank_address(),
            **options.trust(),
        )
        self.starter = Starter(lambda load: self.loading[load["request"]].start(load))
        cards = self.ranks.gathered(self.worker.card())
        self.agent: Scheduler | None = None
        if self.ranks.leads:
            # Requests name P by this port.
            port = get_disagg().disaggregation_bootstrap_port if self.prefills else 0
            self.agent = Scheduler(engine, lease=options.lease_seconds, **options.address(port), **options.trust())
            self.agent.publish(cards)
            if self.has_states:
                self.agent.watch()
            logger.info("kvferry: engine %s listens on %s", engine, self.agent.address)
        self.metrics = Metrics(self.ranks.rank, self._counts) if self.server_args.enable_metrics else None

    def _counts(self) -> dict[str, int]:
        return self.worker.counts() | (self.agent.counts() if self.agent is not None else {})

    @property
    def has_states(self) -> bool:
        """What it keeps of a request is that of one position only."""
        return any(table.page is None for table in self.tables)

    @property
    def prefills(self) -> bool:
        return bool(self.mode.value == "prefill")

    def register_to_bootstrap(self) -> None:
        """The agent is where requests say that it is, and nothing else needs to be known."""

    def tables_of(
        self, pages: Any, components: Sequence[Any], tokens: int, prefix: int = 0
    ) -> tuple[list[Any], list[int]]:
        """The table of every group, and the position that each begins at. The first `prefix` tokens are not in `pages`."""
        tables, first = [], []
        for table in self.tables:
            given = pages if table.source == "pages" else components[table.component]
            found = np.asarray(given, dtype=np.int64).ravel()
            tables.append(found)
            if table.page is None:
                first.append(0)
            elif table.window:
                # As many pages as the window has, and the prompt's last page is the last.
                first.append(-(-tokens // table.page) - len(found))
            else:
                first.append(prefix // table.page)
        return tables, first

    def held(self, first: Sequence[int]) -> list[int]:
        """How many tokens of each group are there already, where its table begins further on."""
        return [position * (table.page or 0) for table, position in zip(self.tables, first, strict=True)]

    def on_gpu(self) -> bool:
        return bool(self.device != "cpu")

    def written(self) -> Any:
        """Where the GPU is with what it was told to write: a step that has begun may still write to pages that its
        request has given back since."""
        if not self.on_gpu():
            return None
        import torch

        stream = self.scheduler.tp_worker.model_runner.forward_stream
        return stream.record_event() if stream is not None else torch.accelerator.current_stream().record_event()

    def hear(self) -> None:
        """What has happened since the last time, to whom it concerns."""
        endings = self.worker.endings()
        released = self.agent.released() if self.agent is not None else []
        if self.metrics is not None:
            loads = [ended(ending) for ending in endings if ending.outcome != "settled"]
            self.metrics.tell(loads, bool(released))
        for ending in endings:
            receiver = self.loading.get(ending.request)
            if receiver is not None:
                receiver.ended(ending)
        if self.agent is None:
            return
        self.released.update(released)
        for request, did, *_ in self.agent.notes():
            if did == "followed" and request in self.sought:
                self.sought[request].found(request)
        for ticket, why in self.agent.lost():
            follows = ticket.get("follows")
            for receiver in list(self.followed.values()):
                if receiver.request == follows or (receiver.ticket and ticket.items() <= receiver.ticket.items()):
                    receiver.lost(why)

    def zero(self, ending: Ending) -> None:
        """What is left of a request's own pages: nobody else's numbers stay there."""
        if self.on_gpu():
            _memory.zero(ending.rest.tolist(), self.storages)
        else:
            self.worker.zero(ending)

    # What SGLang's decode engine asks for.

    def try_ensure_parallel_info(self, bootstrap_addr: str) -> bool:
        self.prefill_info_table[bootstrap_addr] = SimpleNamespace(dp_size=1, follow_bootstrap_room=True)
        return True

    def is_abort_release_safe(self, room: int, _required: int) -> bool:
        """Whether nothing will land any more in the pages of a load that failed."""
        self.hear()
        return all(receiver.room != room for receiver in self.loading.values())

    def clear_deferred_abort_state(self, room: int) -> None:
        """There is none beside what `is_abort_release_safe` looks at."""

    def submit_prefill_recompute(self, receiver: Any, _payload: Any) -> None:
        receiver.fail("SGLang wants the prompt computed again (it was retracted while generation was paused), which is not "
                      "handed over")
