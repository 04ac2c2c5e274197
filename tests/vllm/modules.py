"""A model's layers and their specs, by vLLM's own classes.

The model's configuration is read by vLLM's `ModelConfig`, state shapes come from the model class, each
layer's spec from the layer class's own `get_kv_cache_spec`. Only the list of a model's layers is told by
hand: it would need weights.
"""

import json
import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

from stand_in import Backend  # first: it sets the environment up

# isort: split
import compressed
import torch
from vllm.config import ModelConfig
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.mamba import mamba_utils, short_conv
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.model_executor.models import ModelRegistry, registry
from vllm.model_executor.models.config import MODELS_CONFIG_MAP
from vllm.model_executor.models.deepseek_v2 import DeepseekV32IndexerCache
from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE, nvfp4_kv_cache_full_dim
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Mamba
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend

class PerTokenHead(Backend):
    """Of the back end that keeps scales with each token and head, how it sizes them."""

    @staticmethod
    def get_name():
        return "TRITON_ATTN"

    @classmethod
    def customize_spec(cls, spec):
        return TritonAttentionBackend.customize_spec(spec)


class Slots(Backend):
    """Of the back end with slots of 4-bit numbers, how it sizes them: it needs FlashInfer to load."""

    @staticmethod
    def get_name():
        return "FLASHINFER"

    @classmethod
    def customize_spec(cls, spec):
        content = {nvfp4_kv_cache_full_dim(size) for size in (spec.head_size, spec.head_size_v)}
        assert len(content) == 1, "nvfp4 with asymmetric K/V head sizes not yet supported"
        return replace(spec, num_head_slots=2 * spec.num_kv_heads, state_content_bytes=content.pop())


def attention_backend(cache_type):
    """The back end of keys and values of a cache data type."""
    if cache_type == "nvfp4":
        return Slots
    return PerTokenHead if cache_type.endswith("_per_token_head") else Backend


#: Kinds of layers whose caches grow with tokens.
ATTENTION = ("attention", "sliding", "mla", "sliding mla", "indexer", "ring")

# Model classes are looked at in this process: a process for each would take ten seconds a model.
registry._run_in_subprocess = lambda function: function()

PRESETS = Path(__file__).parents[2] / "crates/kvferry-models/presets"

# Architectures that vLLM 0.32 no longer carries, and the state shapes they would ask its calculators
# for.
GONE = {"BambaForCausalLM", "MiniMaxText01ForCausalLM"}


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


def list_layers(name, model, draft, tp, cache_type="auto"):
    """The layers that keep something, in the order in which vLLM's modules register."""
    config = model.hf_text_config
    kind = raw_config(name).model_type
    if model.hf_config.model_type in compressed.FAMILIES:
        # Its language model has a type of its own.
        kind = model.hf_config.model_type
    text = getattr(config, "model_type", kind)
    count = total_layers(name, model)
    layers = []

    def add(index, sort, module=None, **facts):
        module = len(layers) if module is None else module
        backend = Backend
        if "role" in facts:
            backend = compressed.backend_of(kind, facts)
        elif sort in ("attention", "sliding"):
            backend = attention_backend(cache_type)
        layers.append(
            {
                "name": f"model.layers.{index}.{module}",
                "index": index,
                "sort": sort,
                "backend": backend,
                **facts,
            }
        )

    def attention(index, at=None, window=None, **facts):
        arch = None if is_gone(name) else model.model_arch_config[at if at is not None else index]
        size = model.get_head_size() if arch is None else arch.head_size
        heads = raw_config(name).num_key_value_heads if arch is None else arch.total_num_kv_heads
        facts = {"heads": heads, "key": size, "value": size, **facts}
        add(index, "attention" if window is None else "sliding", window=window, **facts)

    for index in range(count):
        if kind in compressed.FAMILIES:
            for sort, module, facts in compressed.layers_of(kind, config, index, cache_type):
                add(index, sort, module, **facts)
        elif text in ("kimi_linear",):
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
        if kind in compressed.FAMILIES:
            (facts,) = (it for _, _, it in compressed.layers_of(kind, config, 0, cache_type))
            for number in range(config.num_nextn_predict_layers):
                add(index, "sliding mla", f"mtp.{number}", **facts)
        elif model.use_mla:
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
    if getattr(model.hf_text_config, "o_groups", tp) % tp:
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


#: What the back ends of latents take (`supported_kv_cache_dtypes`).
LATENT_TYPES = ("auto", "fp8", "fp8_ds_mla", "nvfp4_ds_mla")


def layer_spec(layer, vllm_config, model, shapes, dtypes):
    """A layer's spec, by the layer class's own code."""
    tp = vllm_config.parallel_config.tensor_parallel_size
    sort = layer["sort"]
    if "role" in layer:
        return compressed.spec_of(model.hf_config.model_type, layer, vllm_config)
    cache_type = vllm_config.cache_config.cache_dtype
    if sort in ("attention", "sliding"):
        stand_in = SimpleNamespace(
            attn_type=AttentionType.DECODER,
            kv_cache_dtype=cache_type,
            kv_cache_torch_dtype=STR_DTYPE_TO_TORCH_DTYPE.get(cache_type, model.dtype),
            sliding_window=layer["window"],
            attn_backend=layer["backend"],
            num_kv_heads=max(1, layer["heads"] // tp),
            head_size=layer["key"],
            head_size_v=layer["value"],
        )
        return layer["backend"].customize_spec(Attention.get_kv_cache_spec(stand_in, vllm_config))
    if sort == "mla":
        if cache_type.endswith("ds_mla") and not layer.get("indexed"):
            raise Refused("only latents with an indexer are kept so")
        if cache_type not in LATENT_TYPES:
            raise Refused("no back end keeps latents so")
        stand_in = SimpleNamespace(
            kv_cache_dtype=cache_type,
            head_size=layer["size"],
            sliding_window=None,
            indexer=object() if layer.get("indexed") else None,
            non_causal_multi_token_decode=False,
            topk_buffer_width=None,
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
