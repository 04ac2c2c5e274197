"""What the installed vLLM answers: groups, block sizes and byte strides for a model and a topology.

Every number comes out of vLLM's own functions. The model's configuration is read by vLLM's
`ModelConfig`, state shapes come from the model class, each layer's spec from the layer class's own
`get_kv_cache_spec`, and the pool from `get_kv_cache_configs` and `create_kv_cache_views`. Only what
would need weights or a GPU is stood in for: the list of a model's layers, and the attention back end,
of which nothing but its block sizes is used.
"""

import json
import os
import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    CUDA_VISIBLE_DEVICES="",
)

import torch  # noqa: E402
from vllm.config import CacheConfig, ModelConfig  # noqa: E402
from vllm.distributed.utils import get_pp_indices  # noqa: E402
from vllm.model_executor.layers.attention.attention import Attention  # noqa: E402
from vllm.model_executor.layers.attention.mla_attention import MLAAttention  # noqa: E402
from vllm.model_executor.layers.mamba import mamba_utils, short_conv  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.model_executor.models import ModelRegistry, registry  # noqa: E402
from vllm.model_executor.models.config import MODELS_CONFIG_MAP  # noqa: E402
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache  # noqa: E402
from vllm.platforms.interface import Platform  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf  # noqa: E402
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Mamba  # noqa: E402
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    AttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    create_kv_cache_views,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import (  # noqa: E402
    AttentionGroup,
    prepare_kernel_block_sizes,
    select_common_block_size,
)

# Model classes are looked at in this process: a process for each would take ten seconds a model.
registry._run_in_subprocess = lambda function: function()

PRESETS = Path(__file__).parents[2] / "crates/kvferry-models/presets"

# Architectures that vLLM 0.32 no longer carries, and the state shapes they would ask its calculators
# for.
GONE = {"BambaForCausalLM", "MiniMaxText01ForCausalLM"}


class Backend(AttentionBackend):
    """An attention back end of which only the block sizes matter."""

    sizes: list = [MultipleOf(16)]

    @staticmethod
    def get_name():
        return "STAND_IN"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return cls.sizes


class Refused(Exception):
    """vLLM itself cannot run the case."""


def config_file(name):
    """A file by its path, or a preset's."""
    return Path(name) if name.endswith(".json") else PRESETS / f"{name}.json"


@cache
def model_config(name):
    config = json.loads(config_file(name).read_text())
    for part in (config, config.get("text_config", {})):
        part.pop("quantization_config", None)
    folder = tempfile.mkdtemp()
    (Path(folder) / "config.json").write_text(json.dumps(config))
    return ModelConfig(model=folder, skip_tokenizer_init=True)


@cache
def raw_config(name):
    config = json.loads(config_file(name).read_text())
    return SimpleNamespace(**{**config, **config.get("text_config", {})})


def is_gone(name):
    return raw_config(name).architectures[0] in GONE


def parse(topology):
    values = dict(part.split("=") for part in topology.split(","))
    numbers = {key: int(value) for key, value in values.items() if key not in ("layout", "conv")}
    return {**values, **numbers}


def answer(name, draft, topology):
    """Groups, block sizes and views of every pipeline stage."""
    asked = parse(topology)
    tp, pp, spec = asked.get("tp", 1), asked.get("pp", 1), asked.get("spec", 0)
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = asked.get("conv", "sd").upper()
    mamba_utils.get_conv_state_layout.cache_clear()

    gone = is_gone(name)
    model = gone_model(name) if gone else model_config(name)
    layers = list_layers(name, model, draft, tp)
    latent = any(layer["sort"] == "mla" for layer in layers)
    Backend.sizes = [asked["kernel"]] if "kernel" in asked else [64] if latent else [MultipleOf(16)]

    cache_config = CacheConfig(block_size=asked.get("block"), enable_prefix_caching=False)
    cache_config.num_gpu_blocks_override = asked.get("blocks", 4096)
    model.max_model_len = 256
    model.original_max_model_len = 256
    cache_config.mamba_block_size = model.max_model_len
    vllm_config = SimpleNamespace(
        model_config=model,
        cache_config=cache_config,
        parallel_config=SimpleNamespace(
            tensor_parallel_size=tp, pipeline_parallel_size=pp, decode_context_parallel_size=1
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
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
                [Backend], CacheConfig.DEFAULT_BLOCK_SIZE, fake_current(vllm_config)
            )
        else:
            cache_config.block_size = CacheConfig.DEFAULT_BLOCK_SIZE
    elif not Backend.supports_block_size(asked["block"]):
        raise Refused("block size")
    shapes, dtypes = state_shapes(name, model, vllm_config, gone)
    if shapes and any(layer["sort"] in ATTENTION for layer in layers):
        align(vllm_config, model, shapes, dtypes, gone)

    # Every layer's spec, from the layer classes.
    specs = {}
    for layer in layers:
        specs[layer["name"]] = layer_spec(layer, vllm_config, model, shapes, dtypes)

    # The layout.
    layout = asked.get("layout", "LBHNC")
    os.environ["VLLM_KV_CACHE_LAYOUT"] = layout
    names = [member.name for member in KVCacheLayout]
    resolve_kv_cache_layout(vllm_config, [names], specs.values())

    # The pools.
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
    workers = [
        {
            layer["name"]: specs[layer["name"]]
            for layer in layers
            if start <= layer["index"] < end
        }
        for start, end in stages
    ]
    configs = get_kv_cache_configs(vllm_config, workers, [1 << 50] * pp)
    by_name = {layer["name"]: layer for layer in layers}
    answers = []
    for config, worker in zip(configs, workers):
        groups = []
        views = {}
        attention_groups = [
            [SimpleNamespace(backend=Backend, kv_cache_spec=first_spec(group))]
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
                check_split(layer_spec_, tensor, number, kernels[number], made[0])
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


def check_split(spec, tensor, number, kernel, view):
    """Lets vLLM map a block to the kernel's blocks where the pool leaves it whole."""
    if not isinstance(spec, AttentionSpec):
        return
    size = select_common_block_size(kernel, [Backend], [spec])
    if size != spec.block_size and size != kernel:
        group = AttentionGroup(Backend, tensor.layers, spec, number, kernel_block_size=size)
        group.map_kv_cache_to_kernel_blocks(view)


ATTENTION = ("attention", "sliding", "mla", "indexer")


def config_layout(config, cache_config):
    return config.kv_cache_layout or cache_config.kv_cache_layout


def per_layer(group, layer):
    spec = group.kv_cache_spec
    return spec.kv_cache_specs[layer] if isinstance(spec, UniformTypeKVCacheSpecs) else spec


def first_spec(group):
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def fake_current(vllm_config):
    """A configuration that can be made the current one."""
    vllm_config.compilation_config = SimpleNamespace(
        static_forward_context={}, mode=None, custom_ops=[], enabled_custom_ops=None
    )
    return vllm_config


def align(vllm_config, model, shapes, dtypes, gone):
    from contextlib import nullcontext

    import vllm.config.vllm as config_module

    config_module.set_current_vllm_config = lambda *args, **kwargs: nullcontext()
    if gone:
        stand_in = SimpleNamespace(
            get_mamba_state_shape_from_config=lambda _: shapes,
            get_mamba_state_dtype_from_config=lambda _: dtypes,
        )
        resolve = ModelRegistry.resolve_model_cls
        ModelRegistry.resolve_model_cls = lambda *args, **kwargs: (stand_in, "")
        try:
            Platform._align_hybrid_block_size(vllm_config, Backend)
        finally:
            ModelRegistry.resolve_model_cls = resolve
    else:
        Platform._align_hybrid_block_size(vllm_config, Backend)


def gone_model(name):
    """As much of a model's configuration as the platform asks for."""
    config = raw_config(name)
    heads = config.num_key_value_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return SimpleNamespace(
        dtype=torch.bfloat16,
        use_mla=False,
        hf_config=config,
        hf_text_config=config,
        architecture=config.architectures[0],
        get_num_kv_heads=lambda parallel: max(1, heads // parallel.tensor_parallel_size),
        get_head_size=lambda: size,
    )


def total_layers(name, model):
    config = getattr(model, "hf_text_config", None) or raw_config(name)
    blocks = getattr(config, "layers_block_type", None)
    return config.num_hidden_layers if not blocks else len(blocks)


def state_shapes(name, model, vllm_config, gone):
    """The shapes and formats of a recurrent layer's states, by the model class."""
    config = raw_config(name)
    tp, spec = vllm_config.parallel_config.tensor_parallel_size, vllm_config.num_speculative_tokens
    shape, dtype = mamba_utils.MambaStateShapeCalculator, mamba_utils.MambaStateDtypeCalculator
    if config.model_type == "bamba":
        return shape.mamba2_state_shape(
            tp_world_size=tp,
            intermediate_size=config.mamba_expand * config.hidden_size,
            n_groups=config.mamba_n_groups,
            num_heads=config.mamba_n_heads,
            head_dim=config.mamba_d_head,
            state_size=config.mamba_d_state,
            conv_kernel=config.mamba_d_conv,
            num_spec=spec,
        ), dtype.mamba2_state_dtype(model.dtype, "auto", "auto")
    if config.model_type == "minimax_text_01":
        heads = config.num_attention_heads
        return shape.linear_attention_state_shape(
            heads, tp, config.head_dim
        ), dtype.linear_attention_state_dtype(model.dtype, "auto")
    if gone or not (model.is_hybrid or model.is_attention_free):
        return None, None
    update = MODELS_CONFIG_MAP.get(model.architecture)
    if update is not None and hasattr(update, "update_mamba_ssm_cache_dtype"):
        update.update_mamba_ssm_cache_dtype(
            cache_config=vllm_config.cache_config, hf_config=model.hf_config
        )
    elif update is not None and model.architecture.startswith("Qwen3_5"):
        update.verify_and_update_config(vllm_config)
    cls, _ = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
    try:
        shapes = cls.get_mamba_state_shape_from_config(vllm_config)
    except AssertionError as error:
        raise Refused(f"state shapes: {error}") from error
    return shapes, cls.get_mamba_state_dtype_from_config(vllm_config)


MAMBA_TYPES = {
    "mamba1": Mamba.MAMBA1,
    "mamba2": Mamba.MAMBA2,
    "gdn": Mamba.GDN_ATTN,
    "kda": Mamba.GDN_ATTN,
    "short conv": Mamba.SHORT_CONV,
    "linear": Mamba.LINEAR,
}


def list_layers(name, model, draft, tp):
    """The layers that keep something, in the order in which vLLM's modules register."""
    config = model.hf_text_config
    kind = raw_config(name).model_type
    text = getattr(config, "model_type", kind)
    count = total_layers(name, model)
    layers = []

    def add(index, sort, **facts):
        number = len(layers)
        layers.append(
            {"name": f"model.layers.{index}.{number}", "index": index, "sort": sort, **facts}
        )

    def attention(index, at=None, window=None, **facts):
        arch = None if is_gone(name) else model.model_arch_config[at if at is not None else index]
        size = model.get_head_size() if arch is None else arch.head_size
        heads = raw_config(name).num_key_value_heads if arch is None else arch.total_num_kv_heads
        facts = {"heads": heads, "key": size, "value": size, **facts}
        add(index, "attention" if window is None else "sliding", window=window, **facts)

    for index in range(count):
        if text in ("kimi_linear",):
            if config.is_kda_layer(index) if hasattr(config, "is_kda_layer") else (
                index + 1 in config.linear_attn_config["kda_layers"]
            ):
                add(index, "kda")
            else:
                add(index, "mla", size=model.get_head_size())
        elif model.use_mla:
            size = model.get_head_size()
            if hasattr(config, "index_topk"):
                add(index, "indexer", size=config.index_head_dim)
            add(index, "mla", size=size, indexed=hasattr(config, "index_topk"))
        elif kind == "nemotron_h":
            block = config.layers_block_type[index]
            if block in ("mamba", "linear_attention"):
                add(index, "mamba2")
            elif block in ("attention", "full_attention"):
                attention(index)
        elif kind == "falcon_h1":
            attention(index)
            add(index, "mamba2")
        elif kind in ("granitemoehybrid", "bamba"):
            if kind == "bamba":
                attends = index in config.attn_layer_indices
            else:
                attends = config.layer_types[index] in ("attention", "full_attention")
            attention(index) if attends else add(index, "mamba2")
        elif kind in ("mamba2", "falcon_mamba", "mamba"):
            add(index, "mamba2" if kind == "mamba2" else "mamba1")
        elif kind == "jamba":
            block = config.layers_block_type[index]
            attention(index) if block == "attention" else add(index, "mamba1")
        elif kind in ("lfm2", "lfm2_moe"):
            full = config.layer_types[index] == "full_attention"
            attention(index) if full else add(index, "short conv")
        elif kind == "minimax_text_01":
            attention(index) if config.attn_type_list[index] == 1 else add(index, "linear")
        elif hasattr(config, "linear_num_key_heads"):
            full = config.layer_types[index] == "full_attention"
            attention(index) if full else add(index, "gdn")
        elif kind == "mimo_v2_flash":
            if config.hybrid_layer_pattern[index] == 0:
                attention(index, heads=config.num_key_value_heads, key=config.head_dim,
                          value=config.v_head_dim)
            else:
                attention(index, heads=config.swa_num_key_value_heads, key=config.swa_head_dim,
                          value=config.swa_v_head_dim, window=config.sliding_window)
        elif kind == "zamba2":
            pass
        else:
            slides = getattr(config, "layer_types", None)
            slides = slides is not None and slides[index] == "sliding_attention"
            attention(index, window=config.sliding_window if slides else None)
    if kind == "zamba2":
        calls = [i for i, block in enumerate(config.layers_block_type) if block == "hybrid"]
        for block in range(config.num_mem_blocks):
            for call in calls[block :: config.num_mem_blocks]:
                attention(call)
        for index in range(count):
            add(index, "mamba2")
    if draft == "mtp":
        index = count - 1
        if model.use_mla:
            for _ in range(config.num_nextn_predict_layers):
                if hasattr(config, "index_topk"):
                    add(index, "indexer", size=config.index_head_dim)
                add(index, "mla", size=model.get_head_size(),
                    indexed=hasattr(config, "index_topk"))
        else:
            attention(index, at=next(l["index"] for l in layers if l["sort"] == "attention"))
    elif draft:
        other = model_config(draft)
        for _ in range(other.hf_text_config.num_hidden_layers):
            if other.use_mla:
                add(count - 1, "mla", size=other.get_head_size())
            else:
                size = other.get_head_size()
                window = getattr(other.hf_text_config, "sliding_window", None)
                add(count - 1, "sliding" if window else "attention", window=window, heads=other.get_total_num_kv_heads(),
                    key=size, value=size)
    return layers


def tp_refused(layers, model, tp):
    """Whether vLLM's layers would assert: heads divide by ranks, or ranks by KV heads."""
    heads = getattr(model.hf_text_config, "num_attention_heads", None)
    if heads and any(layer["sort"] in ATTENTION for layer in layers) and heads % tp:
        return True
    kv = {layer["heads"] for layer in layers if "heads" in layer}
    if any((tp % count if tp >= count else count % tp) for count in kv):
        return True
    keys = getattr(model.hf_text_config, "linear_num_key_heads", None)
    if keys is not None and keys % tp:
        return True
    groups = next(
        (getattr(model.hf_text_config, key) for key in ("n_groups", "mamba_n_groups", "mamba_ngroups")
         if hasattr(model.hf_text_config, key)),
        None,
    )
    is_mamba2 = any(layer["sort"] == "mamba2" for layer in layers)
    return is_mamba2 and groups is not None and groups % tp != 0 and groups != 1


def layer_spec(layer, vllm_config, model, shapes, dtypes):
    """A layer's spec, by the layer class's own code."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    sort = layer["sort"]
    if sort in ("attention", "sliding"):
        stand_in = SimpleNamespace(
            attn_type=AttentionType.DECODER,
            kv_cache_dtype="auto",
            kv_cache_torch_dtype=model.dtype,
            sliding_window=layer["window"],
            attn_backend=Backend,
            num_kv_heads=max(1, layer["heads"] // tp),
            head_size=layer["key"],
            head_size_v=layer["value"],
        )
        return Attention.get_kv_cache_spec(stand_in, vllm_config)
    if sort == "mla":
        stand_in = SimpleNamespace(
            kv_cache_dtype="auto",
            head_size=layer["size"],
            sliding_window=None,
            indexer=object() if layer.get("indexed") else None,
            non_causal_multi_token_decode=False,
        )
        return MLAAttention.get_kv_cache_spec(stand_in, vllm_config)
    if sort == "indexer":
        # The size of a token's record, as `Indexer.__init__` computes it.
        stand_in = SimpleNamespace(
            cache_config=vllm_config.cache_config,
            head_dim=layer["size"] + layer["size"] // 128 * 4,
            dtype=torch.uint8,
        )
        return DeepseekV32IndexerCache.get_kv_cache_spec(stand_in, vllm_config)
    if sort == "short conv":
        # The layer reserves columns for speculative tokens, which the model class does not count.
        short_conv.get_tensor_model_parallel_world_size = lambda: tp
        config = model.hf_text_config
        stand_in = SimpleNamespace(
            conv_dim=getattr(config, "conv_dim", None) or config.hidden_size,
            L_cache=config.conv_L_cache,
            num_spec=vllm_config.num_speculative_tokens,
        )
        shapes = short_conv.ShortConv.get_state_shape(stand_in)
    stand_in = SimpleNamespace(
        get_state_shape=lambda: shapes,
        get_state_dtype=lambda: dtypes,
        mamba_type=MAMBA_TYPES[sort],
        is_kv_cache_tp_replicated=False,
    )
    vllm_config.cache_config.use_replayssm = False
    return MambaBase.get_kv_cache_spec(stand_in, vllm_config)


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
