"""DeepSeek-V4 and V4.1: the caches of their layers, by vLLM's own classes.

The specs come from the layers' own `get_kv_cache_spec`, block sizes and layouts from their back ends. Told
by hand is what their `__init__` would compute from weights and a GPU: which caches a layer has, and that
V4.1 runs on a GPU of the Blackwell generation, with the kernels that vLLM prefers there.
"""

from types import SimpleNamespace

from stand_in import Backend  # noqa: F401  first: it sets the environment up

# isort: split
import torch
from vllm.models.deepseek_v4 import attention as v4
from vllm.models.deepseek_v4.compressor import CompressorBackend, CompressorStateCache
from vllm.models.deepseek_v4.sparse_mla import DeepseekV4FlashMLABackend
from vllm.models.deepseek_v41 import attention as v41
from vllm.models.deepseek_v41.compressor import CompressorBackend as RingBackend
from vllm.models.deepseek_v41.compressor import CompressorStateCache as RingStateCache
from vllm.models.deepseek_v41.nvidia.flash_mla_mega_attn import DeepseekV4MegaAttnAttention
from vllm.models.deepseek_v41.sparse_mla import FlashMLAMegaAttnBackend as V41Backend
from vllm.v1.attention.backends.mla.indexer import DeepseekV4IndexerBackend, DeepseekV41IndexerBackend
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekSparseSWABackend, DeepseekV4SWACache

FAMILIES = ("deepseek_v4", "deepseek_v41")
v41._use_v41_mxfp8_kv_record = lambda: True


def resolved(kind, cache_type, cache=None):
    """What vLLM's layers make of a cache data type; they tell the others by `cache`."""
    if kind == "deepseek_v4":
        return v4._resolve_dsv4_kv_cache_dtype(True, cache_type, cache)[0]
    preferred = DeepseekV4MegaAttnAttention.packed_kv_cache_dtype.fget(None)
    return v41._resolve_dsv4_kv_cache_dtype(True, cache_type, cache, preferred)[0]


def layers_of(kind, config, index, cache_type):
    """The caches of a layer, in the order in which vLLM makes them: sort, module, and facts."""
    ratio = ratio_of(config, index)
    if kind == "deepseek_v4":
        size = config.head_dim
        # The numbers and scores of tokens; compressed a little, of two groups.
        both = 2 if ratio == 4 else 1
        latent = {"planes": (576, 8)}
        window = {"window": config.sliding_window, "role": "window", **latent}
        if ratio == 4:
            keys = config.index_head_dim
            yield "indexer", "attn.indexer.k_cache", {"planes": (keys, 4), "rate": 4, "role": "indexer"}
            yield "sliding mla", "attn.indexer.compressor.state_cache", open_group(ratio, both, keys)
        yield "sliding mla", "attn.swa_cache", window
        if ratio > 1:
            yield "mla", "attn", {"rate": ratio, "role": "latent", **latent}
            yield "sliding mla", "attn.compressor.state_cache", open_group(ratio, both, size)
        return
    latent = {"planes": (512, 16)}
    kept = {"planes": (256, 32)} if resolved(kind, cache_type) == "nvfp4_ds_mla" else latent
    source = index in config.kv_source_layer_ids
    if source:
        yield "mla", "attn", {"rate": ratio, "role": "latent", **kept}
        keys = config.index_head_dim
        yield "indexer", "attn.indexer.k_cache", {"planes": (keys, 4), "rate": ratio, "role": "indexer"}
    yield "sliding mla", "attn.swa_cache", {"window": config.sliding_window, "role": "window", **latent}
    if source and ratio > 1:
        yield "ring", "attn.compressor.state_cache", {"size": 2 * config.head_dim, "role": "ring"}


def open_group(ratio, groups, size):
    return {
        "window": groups * ratio,
        "planes": (2 * groups * size * 4,),
        "size": 2 * groups * size,
        "block": 4 if ratio == 4 else 8,
        "role": "open",
    }


def ratio_of(config, index):
    """How many tokens are one entry of a layer: since vLLM 0.33, V4's configuration says it by the layer's type."""
    ratios = getattr(config, "compress_ratios", None)
    return config.compress_rates.get(config.layer_types[index], 0) if ratios is None else ratios[index]


def spec_of(kind, layer, vllm_config):
    """A layer's spec, by the layer class's own code."""
    first = kind == "deepseek_v4"
    cache = vllm_config.cache_config
    cache_type = resolved(kind, cache.cache_dtype, cache)
    role = layer["role"]
    if role == "latent":
        stand_in = SimpleNamespace(
            compress_ratio=layer["rate"],
            kv_cache_dtype=cache_type,
            head_dim=512,
            kv_cache_torch_dtype=torch.uint8,
            is_kv_source=True,
            kv_page_alignment=512,
            compressed_bytes_per_token=sum(layer["planes"]),
        )
        return (v4 if first else v41).DeepseekV4Attention.get_kv_cache_spec(stand_in, vllm_config)
    if role == "indexer":
        stand_in = SimpleNamespace(
            cache_config=cache,
            head_dim=132,
            dtype=torch.uint8,
            compress_ratio=layer["rate"],
            sparse_logits=False,
            rocm_mxfp4=False,
        )
        return (v4 if first else v41).DeepseekV4IndexerCache.get_kv_cache_spec(stand_in, vllm_config)
    if role == "window":
        stand_in = SimpleNamespace(
            bounded_replay=False,
            block_size=64 if first else 32,
            head_dim=512,
            dtype=torch.uint8,
            window_size=layer["window"],
            packed_bytes_per_token=584 if first else 528,
            packed_page_alignment=576 if first else 512,
            packed_block_stride_alignment=None if first else 528,
            cache_config=cache,
        )
        return DeepseekV4SWACache.get_kv_cache_spec(stand_in, vllm_config)
    if role == "open":
        stand_in = SimpleNamespace(
            block_size=layer["block"],
            state_dim=layer["size"],
            dtype=torch.float32,
            sliding_window=layer["window"],
        )
        return CompressorStateCache.get_kv_cache_spec(stand_in, vllm_config)
    rows = vllm_config.num_speculative_tokens + 2
    stand_in = SimpleNamespace(
        block_size=max(8, 1 << (rows - 1).bit_length()), state_dim=layer["size"], dtype=torch.float32
    )
    return RingStateCache.get_kv_cache_spec(stand_in, vllm_config)


def backend_of(kind, layer):
    first = kind == "deepseek_v4"
    return {
        "latent": DeepseekV4FlashMLABackend if first else V41Backend,
        "indexer": DeepseekV4IndexerBackend if first else DeepseekV41IndexerBackend,
        "window": DeepseekSparseSWABackend,
        "open": CompressorBackend,
        "ring": RingBackend,
    }[layer["role"]]


def layouts(layers):
    """The layouts that all of their back ends take, the preferred one first."""
    given = [layer["backend"].supported_kv_cache_layouts() for layer in layers]
    given = [it for it in given if it is not None]
    return [it.name for it in given[0] if all(it in other for other in given)]


def stage_refused(config, stages):
    """Whether a layer would read, across stages, what another one keeps."""
    sources = getattr(config, "kv_source_layer_ids", None) or []
    for start, end in stages:
        for index in range(start, end):
            if sources and ratio_of(config, index) > 0 and max(s for s in sources if s <= index) < start:
                return True
    return False
