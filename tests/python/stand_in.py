"""What stands in for a running engine: the process's environment, and an attention back end of which
only the block sizes matter."""

import functools
import os
from types import SimpleNamespace

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    CUDA_VISIBLE_DEVICES="",
    # So that kernels for GPUs can be carried out.
    TRITON_INTERPRET="1",
)

from vllm.model_executor.layers.mamba import mamba_utils  # noqa: E402
from vllm.v1 import kv_cache_interface  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend, MultipleOf  # noqa: E402
from vllm.v1.engine import core  # noqa: E402
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs  # noqa: E402

# vLLM makes a tensor to learn how many bytes a number of a type takes. It asks hundreds of times for each pool.
kv_cache_interface.get_dtype_size = functools.cache(kv_cache_interface.get_dtype_size)


class Backend(AttentionBackend):
    """An attention back end of which only the block sizes matter."""

    sizes: list = [MultipleOf(16)]

    @staticmethod
    def get_name():
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return cls.sizes


def get_kv_cache_configs(vllm_config, workers, memory):
    """As the engine calls it: vLLM 0.33 makes the groups beforehand."""
    if isinstance(vllm_config.model_config, SimpleNamespace):
        # Models may bring a rule of their own since then.
        vllm_config.model_config.supports_kv_cache_grouping = False
    make_groups = getattr(core, "get_global_kv_cache_groups", None)
    groups = () if make_groups is None else (make_groups(vllm_config, workers),)
    return core.get_kv_cache_configs(vllm_config, workers, memory, *groups)


def order_convolutions(order):
    """vLLM looks at the process for the order of convolution states."""
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = order
    mamba_utils.get_conv_state_layout.cache_clear()


def per_layer(group, layer):
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def first_spec(group):
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec
