"""What the installed vLLM answers: groups, block sizes and byte strides for a model and a topology.

Every number comes out of vLLM's own functions: the specs of a model's layers are `modules`', and the
pool comes from `get_kv_cache_configs` and `create_kv_cache_views`. Only what would need weights or a GPU
is stood in for: the list of a model's layers, and the attention back end, of which nothing but its
block sizes is used.
"""

import os
from types import SimpleNamespace

from stand_in import Backend, first_spec, get_kv_cache_configs, order_convolutions, per_layer  # first: the environment

# isort: split
import compressed
import torch
from modules import (
    ATTENTION,
    GONE,
    MAMBA_TYPES,
    PRESETS,
    Refused,
    gone_model,
    is_gone,
    layer_spec,
    list_layers,
    model_config,
    state_shapes,
    total_layers,
    tp_refused,
)
from vllm.config import CacheConfig
from vllm.distributed.utils import get_pp_indices
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry
from vllm.platforms.interface import Platform
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import AttentionSpec, SlidingWindowSpec, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import (
    AttentionGroup,
    prepare_kernel_block_sizes,
    select_common_block_size,
)

__all__ = ["GONE", "MAMBA_TYPES", "PRESETS", "Refused", "answer", "is_gone", "parse", "torch"]


def parse(topology):
    values = dict(part.split("=") for part in topology.split(","))
    words = ("layout", "conv", "hma", "caching", "kv", "kscale", "vscale")
    numbers = {key: int(value) for key, value in values.items() if key not in words}
    return {**values, **numbers}


def answer(name, draft, topology):
    """Groups, block sizes and views of every pipeline stage."""
    asked = parse(topology)
    tp, pp, spec = asked.get("tp", 1), asked.get("pp", 1), asked.get("spec", 0)
    order_convolutions(asked.get("conv", "sd").upper())

    gone = is_gone(name)
    model = gone_model(name) if gone else model_config(name)
    cache_type = asked.get("kv", "auto")
    layers = list_layers(name, model, draft, tp, cache_type)
    latent = any(layer["sort"] == "mla" for layer in layers)
    own = any("role" in layer for layer in layers)
    backends = list(dict.fromkeys(layer["backend"] for layer in layers))
    if own and "kernel" in asked and asked["kernel"] not in kernel_sizes(backends):
        raise Refused("it has no other back ends")
    Backend.sizes = [asked["kernel"]] if "kernel" in asked else [64] if latent else [MultipleOf(16)]

    cache_config = CacheConfig(block_size=asked.get("block"), enable_prefix_caching=False)
    cache_config.cache_dtype = cache_type
    keys = any(layer["sort"] in ("attention", "sliding") and "role" not in layer for layer in layers)
    if cache_type.endswith("ds_mla") and keys:
        raise Refused("no back end keeps keys and values so")
    latents = {layer["backend"] for layer in layers if layer.get("role") == "latent"}
    if own and not all(it.supports_kv_cache_dtype(cache_type) for it in latents):
        raise Refused("its back ends do not take the cache data type")
    cache_config.num_gpu_blocks_override = asked.get("blocks", 4096)
    model.max_model_len = 256
    model.original_max_model_len = 256
    cache_config.mamba_block_size = model.max_model_len
    vllm_config = SimpleNamespace(
        model_config=model,
        cache_config=cache_config,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp,
            pipeline_parallel_size=pp,
            prefill_context_parallel_size=asked.get("pcp", 1),
            decode_context_parallel_size=asked.get("dcp", 1),
            cp_kv_cache_interleave_size=asked.get("interleave", 1),
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=asked.get("hma") == "off"),
        attention_config=SimpleNamespace(hisparse_config=None),
        kv_transfer_config=None,
        speculative_config=SimpleNamespace(
            num_speculative_tokens=spec,
            uses_draft_kv_cache=lambda: False,
            use_eagle=lambda: False,
            use_eagle_block_drop=lambda: False,
            method="ngram",
        )
        if spec
        else None,
        num_speculative_tokens=spec,
        num_prefill_lookahead_tokens=0,
        max_in_flight_tokens=256,
        mamba_config=SimpleNamespace(backend=None),
    )
    vllm_config.with_hf_config = lambda hf: SimpleNamespace(
        **{**vars(vllm_config), "model_config": SimpleNamespace(hf_config=hf, dtype=model.dtype)}
    )
    register_all_kvcache_specs(vllm_config)
    Platform._find_non_ssm_backends = classmethod(lambda cls, config: [Backend])

    # The block size.
    if "block" not in asked:
        has_attention = any(layer["sort"] in ATTENTION for layer in layers)
        if has_attention:
            cache_config.block_size = Platform._preferred_block_size_for_backends(
                backends if own else [Backend],
                CacheConfig.DEFAULT_BLOCK_SIZE,
                fake_current(vllm_config),
            )
        else:
            cache_config.block_size = CacheConfig.DEFAULT_BLOCK_SIZE
    elif not all(it.supports_block_size(asked["block"]) for it in (backends if own else [Backend])):
        raise Refused("block size")
    shapes, dtypes = state_shapes(name, model, vllm_config, gone)
    if shapes and any(layer["sort"] in ATTENTION for layer in layers):
        align(vllm_config, model, shapes, dtypes, gone, backends)

    # Every layer's spec, from the layer classes.
    specs = {}
    for layer in layers:
        specs[layer["name"]] = layer_spec(layer, vllm_config, model, shapes, dtypes)

    # The layout.
    names = [member.name for member in KVCacheLayout]
    os.environ["VLLM_KV_CACHE_LAYOUT"] = asked.get("layout", "LBHNC")
    if own:
        names = compressed.layouts(layers)
        if "layout" not in asked:
            del os.environ["VLLM_KV_CACHE_LAYOUT"]
    resolve_kv_cache_layout(vllm_config, [names], specs.values())

    # The pools.
    check_turns(asked, layers, specs)
    if cache_type == "nvfp4" and keys and not KVCacheLayout[config_layout_name(cache_config)].is_block_contiguous:
        raise Refused("a head's slot in several pieces")
    if tp_refused(layers, model, tp) or (
        draft not in (None, "mtp") and tp_refused([{"sort": "mla"}], model_config(draft), tp)
    ):
        raise Refused("tensor parallelism")
    if pp > 1 and not gone and not ModelRegistry.is_pp_supported_model(
        model.architectures, model
    ):
        raise Refused("pipeline parallelism")
    count = total_layers(name, model)
    stages = [get_pp_indices(count, stage, pp) for stage in range(pp)]
    if compressed.stage_refused(model.hf_text_config, stages):
        raise Refused("a source on another stage")
    workers = [
        {
            layer["name"]: specs[layer["name"]]
            for layer in layers
            if start <= layer["index"] < end
        }
        for start, end in stages
    ]
    try:
        configs = get_kv_cache_configs(vllm_config, workers, [1 << 50] * pp)
    except TypeError as error:
        # vLLM fails at windows of latents without the hybrid manager.
        if "bounded_replay" not in str(error):
            raise
        raise Refused(str(error)) from error
    by_name = {layer["name"]: layer for layer in layers}
    answers = []
    for config, worker in zip(configs, workers):
        groups = []
        views = {}
        attention_groups = [
            [SimpleNamespace(backend=backend, kv_cache_spec=first_spec(group)) for backend in dict.fromkeys(by_name[layer]["backend"] for layer in group.layer_names)]
            or [SimpleNamespace(backend=Backend, kv_cache_spec=first_spec(group))]
            for group in config.kv_cache_groups
        ]
        kernels = prepare_kernel_block_sizes(config, attention_groups)
        placed = {name for tensor in config.kv_cache_tensors for name in tensor.layers}
        if placed - set(worker):
            # vLLM would go on to bind memory to layers that this stage does not have.
            raise Refused("a group that a stage has no layer of")
        for number, group in enumerate(config.kv_cache_groups):
            groups.append(
                {
                    "names": list(group.layer_names),
                    "block": group.kv_cache_spec.block_size,
                    "kernel": kernels[number],
                    "pages": [
                        per_layer(group, layer).page_size_bytes for layer in group.layer_names
                    ],
                }
            )
            for tensor in config.kv_cache_tensors:
                if not set(tensor.layers) <= set(group.layer_names):
                    continue
                layer_spec_ = per_layer(group, tensor.layers[0])
                raw = torch.empty(tensor.size, dtype=torch.int8, device="meta")
                made = create_kv_cache_views(
                    raw,
                    layer_spec_,
                    config.num_blocks,
                    KVCacheLayout[config_layout(config, cache_config)],
                    tensor,
                    kernel_block_size=kernels[number],
                )
                backend = by_name[tensor.layers[0]]["backend"]
                check_split(layer_spec_, tensor, number, kernels[number], made[0], backend)
                for layer, view in zip(tensor.layers, made):
                    views[layer] = bind(by_name[layer], view, layer_spec_)
        answers.append(
            {
                "groups": groups,
                "views": views,
                "sliding": [
                    layer
                    for group in config.kv_cache_groups
                    for layer in group.layer_names
                    if isinstance(per_layer(group, layer), SlidingWindowSpec)
                ],
                "bytes": config.kv_cache_tensors[0].size,
                "blocks": config.num_blocks,
            }
        )
    return {"layers": by_name, "stages": answers, "bounds": stages}


def check_turns(asked, layers, specs):
    """Which ranks can take turns at tokens, as vLLM's ParallelConfig and ModelConfig have it."""
    tp, pcp, dcp = (asked.get(key, 1) for key in ("tp", "pcp", "dcp"))
    if tp % dcp if pcp == 1 else dcp not in (1, pcp, tp * pcp):
        raise Refused("ranks that take turns")
    if dcp == 1:
        return
    heads = {layer["heads"] for layer in layers if "heads" in layer}
    if any(tp <= count or dcp > tp // count for count in heads):
        raise Refused("more ranks take turns than share a head")
    for spec in specs.values():
        if isinstance(spec, SlidingWindowSpec):
            raise Refused("sliding windows have no turns")
        if isinstance(spec, AttentionSpec) and spec.block_size % asked.get("interleave", 1):
            raise Refused("turns that do not divide a block")


def kernel_sizes(backends):
    """The block sizes of which kernels take one and no other."""
    return {
        size for it in backends for size in it.get_supported_kernel_block_sizes() if isinstance(size, int)
    }


def check_split(spec, tensor, number, kernel, view, backend):
    """Lets vLLM map a block to the kernel's blocks where the pool leaves it whole."""
    if not isinstance(spec, AttentionSpec):
        return
    size = select_common_block_size(kernel, [backend], [spec])
    if size != spec.block_size and size != kernel:
        group = AttentionGroup(backend, tensor.layers, spec, number, kernel_block_size=size)
        group.map_kv_cache_to_kernel_blocks(view)


def config_layout_name(cache_config):
    return cache_config.get_resolved_kv_cache_layout().name


def config_layout(config, cache_config):
    return config.kv_cache_layout or cache_config.kv_cache_layout


def fake_current(vllm_config):
    """A configuration that can be made the current one."""
    vllm_config.compilation_config = SimpleNamespace(
        static_forward_context={}, mode=None, custom_ops=[], enabled_custom_ops=None
    )
    return vllm_config


def align(vllm_config, model, shapes, dtypes, gone, backends):
    from contextlib import nullcontext

    import vllm.config.vllm as config_module

    config_module.set_current_vllm_config = lambda *args, **kwargs: nullcontext()
    # That of the layers which are not recurrent.
    backend = next((it for it in backends if it is not Backend), Backend)
    if gone:
        stand_in = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda _: shapes,
            get_mamba_state_dtype_from_config=lambda _: dtypes,
        )
        resolve = ModelRegistry.resolve_model_cls
        ModelRegistry.resolve_model_cls = lambda *args, **kwargs: (stand_in, "")
        try:
            Platform._align_hybrid_block_size(vllm_config, backend)
        finally:
            ModelRegistry.resolve_model_cls = resolve
    else:
        Platform._align_hybrid_block_size(vllm_config, backend)


def bind(layer, view, spec):
    """The byte offset, shape and byte strides of what a layer would be handed."""
    if layer["sort"] in ATTENTION:
        tensors = [view]
    else:
        stand_in = SimpleNamespace(
            get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes
        )
        MambaBase.bind_kv_cache(stand_in, view)
        tensors = stand_in.kv_cache
    return [
        {
            "offset": tensor.storage_offset() * tensor.element_size(),
            "shape": list(tensor.shape),
            "strides": [stride * tensor.element_size() for stride in tensor.stride()],
            "size": tensor.element_size(),
        }
        for tensor in tensors
    ]
