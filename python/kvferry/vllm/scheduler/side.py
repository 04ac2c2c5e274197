"""The connector in the scheduler's process: one agent, and a part each for prefill, decode and turns."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from ..._core import Scheduler
from ..buffer import Saves, is_wanted
from ..groups import Groups
from ..logs import logger
from ..messages import Orders
from ..metrics import Stats
from ..options import Options
from ..params import KEY, admit, check_name, to_be_handed_over
from ..stock.source import Stock
from ..worker.written import is_known
from .decode import Decode, is_offered
from .keep import Keep
from .origin import Origins
from .prefill import Prefill
from .turns import Turns


class SchedulerSide:
    """Hands each of vLLM's calls to the part that it concerns. Every engine has all of them: what a
    request's parameters ask for decides, not the engine's `kv_role`."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        engine = str(vllm_config.kv_transfer_config.engine_id)
        self.parallel = parallel = vllm_config.parallel_config
        self.agent = Scheduler(
            engine,
            lease=options.lease_seconds,
            **options.address(options.port_of(parallel.data_parallel_index)),
            **options.trust(),
        )
        if options.advertise is None:
            logger.info("kvferry: engine %s listens on %s", engine, self.agent.address)
        else:
            logger.info(
                "kvferry: engine %s listens on %s, and peers are told %s", engine, options.listens_on(), self.agent.address
            )
        logger.info("kvferry: `kvferry drain %s` prepares its end", self.agent.address)
        # The process is vLLM's: its signals are left alone unless that was asked for.
        if options.drain_signal != "none":
            self.agent.drain_on(getattr(signal, options.drain_signal))
            logger.info("kvferry: so does %s to process %d", options.drain_signal, os.getpid())
        #: The engine's word for its address, where it shares a key with others.
        self.seal = self.agent.engine_seal
        #: Tokens of the longest request.
        self.longest: int = vllm_config.model_config.max_model_len
        groups = Groups(vllm_config, kv_cache_config)
        self.keep = Keep(self.agent, groups, options.lease_share)
        self.origins = origins = Origins(vllm_config)
        alone = parallel.data_parallel_size == 1
        self.push = options.push == "always" or (options.push == "auto" and alone)
        by_layer = is_known(vllm_config, kv_cache_config)
        self.prefill = Prefill(self.agent, self.keep, groups, origins, self.push, by_layer)
        self.stock: Stock | None = None
        if options.nixl_connector_lease_seconds:
            self.stock = Stock(self.agent, groups, options.nixl_connector_lease_seconds)
        self.decode = Decode(self.agent, groups, origins, options, self.stock)
        policy = getattr(vllm_config.kv_transfer_config, "kv_load_failure_policy", None)
        self.decode.recomputes = policy == "recompute"
        self.turns = Turns(
            self.agent, self.keep, groups, origins, vllm_config, options.next_turn_seconds
        )
        #: Where others read from a buffer in host memory: what steps write to it.
        self.saves = Saves(kv_cache_config) if is_wanted(vllm_config) else None
        self.decode.buffered = self.saves is not None
        if self.saves is not None and options.next_turn_seconds:
            raise ValueError(
                "the option 'next_turn_seconds' of kv_connector_extra_config is not for an engine whose "
                "kv_buffer_device is 'cpu': what it answers is not in host memory; leave it out"
            )
        #: What the counters were when they were last asked for.
        self.counted: dict[str, int] = {}

    def bind(self, manager: Any) -> None:
        """vLLM's manager of all blocks, as soon as there is one."""
        self.prefill.manager = self.decode.manager = self.keep.manager = manager

    def on_new_request(self, request: Any) -> None:
        self.decode.counts["prompts_offered"] += is_offered(request)
        params = self._admit(request)
        if params.get("do_remote_decode"):
            self.prefill.begin(request)
        # P reads, too, when a dialogue goes on: what came with D's last answer.
        if params.get("do_remote_prefill") or params.get("do_remote_decode") and params.get(KEY):
            self.decode.begin(request)

    def _admit(self, request: Any) -> dict[str, Any]:
        """What a request asks for, in values of our own. They take the place of what its client has handed in, which
        vLLM would send on to its workers: what is nested deeply does not survive that, and neither does the engine."""
        given = request.kv_transfer_params
        if not given:
            return {}
        params: dict[str, Any] = {}
        try:
            check_name(request.request_id)
            # P can hand the request over whatever else there is.
            params = to_be_handed_over(given)
            params = admit(given, self.longest)
        except ValueError as error:
            self.decode.refuse(request, error)
        request.kv_transfer_params = params or None
        sampling = request.sampling_params
        if sampling is not None and sampling.extra_args:
            sampling.extra_args = sampling.extra_args | {"kv_transfer_params": request.kv_transfer_params}
        return params

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        count, any_ = self.decode.matched(request, computed)
        if count is not None:
            self.turns.without_blocks.add(request.request_id)
        return count, any_

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        self.turns.without_blocks.discard(request.request_id)
        self.decode.allocated(request, blocks, external)

    def orders(self, scheduled: Mapping[str, int]) -> Orders:
        step = self.prefill.advance(scheduled)
        orders = self.decode.orders()
        orders.step = step
        if self.saves is not None:
            requests = {name: it.request for name, it in self.prefill.prefilling.items()}
            orders.saves = self.saves.of_step(requests, scheduled, self.prefill.manager)
        self.turns.make_room()
        orders.released = list(self.released())
        self.turns.released(orders.released)
        orders.hands_over = self.prefill.may_finish(scheduled)
        return orders

    def released(self) -> dict[str, str]:
        """Requests whose blocks nobody reads any more, and why."""
        return self.keep.released()

    def loaded(self, loads: Mapping[str, list[dict[str, Any]]]) -> None:
        """What each rank did for requests that it has loaded: told where they are traced."""

    def ended(self, request: str, failed: bool, seconds: float) -> None:
        self.decode.ended(request, failed, seconds)

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Whether the blocks are kept for another engine, and what the router is to pass on."""
        self.decode.finish(request)
        offer = self.prefill.finish(request, block_ids) or self.turns.finish(request, block_ids)
        if offer is None:
            return False, None
        return True, offer.write(
            request.request_id,
            self.agent.address,
            self.parallel.tensor_parallel_size,
            self.parallel.pipeline_parallel_size,
            self.push,
            self.seal,
        )

    def forget(self) -> None:
        """What was computed up to now is not to be used any more: nobody reads what is kept. Requests that
        are still being computed are vLLM's affair: it starts them over, or says that it did not."""
        forgotten = [request for request in self.keep.kept if self.agent.revoke(request)]
        if forgotten:
            logger.info(
                "kvferry: vLLM's cache is reset: %d requests are not handed over, because they were computed "
                "before that",
                len(forgotten),
            )

    def stats(self) -> Stats:
        counts = self.agent.counts() | self.decode.counts | self.keep.counts
        if self.stock is not None:
            counts |= self.stock.counts
        stats, self.counted = Stats.of_counts(counts, self.counted), counts
        return stats

    def close(self) -> None:
        self.agent.close()
        if self.stock is not None:
            self.stock.close()
