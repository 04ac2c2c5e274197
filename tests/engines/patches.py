"""What vLLM needs on a CPU to run as these tests want it, in an engine's own process only."""

import multiprocessing
import os

import torch
from vllm import _custom_ops
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, KVCacheLayout
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.executor import multiproc_executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.gpu_model_runner import GPUModelRunner


def install():
    # Workers that are spawned import vLLM again, which takes long, and know nothing of what is done
    # here. On a CPU vLLM insists on it whatever the environment says.
    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")
    # As does a process in which vLLM looks at a model for the first time, lest it initialise CUDA.
    registry._run_in_subprocess = lambda look: look()
    GPUModelRunner.sync_and_gather_intermediate_tensors = _with_buffer(
        GPUModelRunner.sync_and_gather_intermediate_tensors
    )
    _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu = _with_dense_indices(
        _custom_ops.fused_sigmoid_gating_delta_rule_update_cpu
    )


def _with_dense_indices(update):
    """A single request's slot comes out of a table with room for speculative tokens, with a stride
    that the kernel rejects."""

    def update_dense(*args, initial_state_indices, **options):
        dense = initial_state_indices.clone(memory_format=torch.contiguous_format)
        return update(*args, initial_state_indices=dense, **options)

    return update_dense


def _with_buffer(gather):
    """A later pipeline stage receives into a buffer that only a dummy run makes, and there is none
    on a CPU."""

    def gather_into_buffer(self, *args, **options):
        if self.intermediate_tensors is None:
            self.intermediate_tensors = self.model.make_empty_intermediate_tensors(
                batch_size=self.max_num_tokens, dtype=self.model_config.dtype, device=self.device
            )
        return gather(self, *args, **options)

    return gather_into_buffer


def environment(**values):
    """For settings that vLLM takes from the environment only, and that P and D may differ in."""
    return lambda: os.environ.update(values)


def blocks_outermost():
    """A layout that vLLM's CPU kernels can read, as they follow strides, but it does not offer."""
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    CPUAttentionBackend.supported_kv_cache_layouts = classmethod(lambda _: layouts)


def latent_blocks():
    """Blocks of latents as large as they are asked for. vLLM would make them 16 tokens, because
    that is what its CPU kernel reads, but it can divide larger ones as it does on a GPU."""
    CPUMLABackend.supports_block_size = classmethod(lambda _, size: size is None or size % 16 == 0)
    update = CpuPlatform.check_and_update_config

    def update_but_blocks(config):
        wanted = config.cache_config.block_size
        update(config)
        config.cache_config.block_size = wanted

    CpuPlatform.check_and_update_config = staticmethod(update_but_blocks)
    # Not where a GPU's worker runs.
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    CPUModelRunner._zero_block_ids = _zero_whole_blocks


def _zero_whole_blocks(runner, blocks):
    """vLLM's own for CPUs takes the engine's blocks for the kernel's, of which there are several in each, and so
    zeroes other requests' memory: a hybrid with latents then answers wrongly now and then."""
    cache = runner.kv_cache_config
    context = runner.compilation_config.static_forward_context
    for group in cache.kv_cache_groups:
        if isinstance(group.kv_cache_spec, FullAttentionSpec):
            for layer in group.layer_names:
                kernels = context[layer].kv_cache
                parts = len(kernels) // cache.num_blocks
                for block in blocks:
                    kernels[block * parts : (block + 1) * parts].zero_()


def split_prompts():
    """An engine computes the last token of a prompt in a step of its own, as D does after a handover:
    in bfloat16 another split rounds otherwise, and so flips tokens."""
    schedule = Scheduler.schedule
    most = "max_num_scheduled_tokens"

    def schedule_split(self, *args, **options):
        whole = getattr(self, most)
        for request in self.waiting:
            handing = (request.kv_transfer_params or {}).get("do_remote_decode")
            # P computes a hybrid's prompt without its last token, which is a split already.
            whole_on_p = handing and not self.vllm_config.model_config.is_hybrid
            if request.kv_transfer_params is None or whole_on_p:
                setattr(self, most, max(1, request.num_prompt_tokens - 1))
        try:
            return schedule(self, *args, **options)
        finally:
            setattr(self, most, whole)

    Scheduler.schedule = schedule_split
