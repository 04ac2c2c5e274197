"""How the kernels of vLLM that store what a layer keeps are called: one class for each kind of pages.

Each is given the layer of the running engine and the lengths of what is described for it. What cannot be
called raises `CannotAsk` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from .. import versions
from ..describe import specs
from . import deepseek
from .inputs import Lengths, int32, namespace, numbers, only, slots_of, spread, unknown, with_cache, without_views
from .probe import BLOCK, POISON, CannotAsk, Kernel

def attention(module: Any, backend: Any, spec: Any, dtype: Any, lengths: Lengths) -> Kernel:
    only(lengths, {"k", "v"}, {"kv"})
    return _Attention(module, backend, spec, dtype, lengths)


def latent(module: Any, backend: Any, spec: Any, dtype: Any, lengths: Lengths) -> Kernel:
    only(lengths, {"latent"}, {"latent", "latent.scale"})
    if "latent.scale" in lengths:
        return deepseek.TwoParts(module, spec, lengths)
    return _Latent(module, spec, dtype, lengths)


def indexer(module: Any, backend: Any, spec: Any, dtype: Any, lengths: Lengths) -> Kernel:
    only(lengths, {"indexer", "indexer.scale"})
    if (made := deepseek.keys(module, spec, lengths)) is not None:
        return made
    return _Indexer(module, dtype, lengths)


def ring(module: Any, backend: Any, spec: Any, dtype: Any, lengths: Lengths) -> Kernel:
    only(lengths, {"ring"})
    return deepseek.Ring(module, lengths)


def recurrent(module: Any, backend: Any, spec: Any, dtype: Any, lengths: Lengths) -> Kernel:
    kind = specs.recurrent_kind("", spec)
    if not updates(kind):
        raise CannotAsk(f"there is no way yet to call the kernels that update {kind} states")
    return _States(module, kind, dtype, lengths)


def nothing(module: Any, backend: Any, spec: Any, dtype: Any, lengths: Lengths) -> Kernel:
    raise unknown(lengths)


def cpu_layer(spec: Any, tokens: int) -> Any:
    """As much of a layer with the CPU back end as a question needs, where no engine runs: its order
    depends on the processor, and nothing else says it."""
    from vllm.v1.attention.backends import cpu_attn

    isa = cpu_attn._get_attn_isa(spec.dtype, tokens, spec.head_size)
    return _CpuLayer(cpu_attn.CPUAttentionBackend, isa)


class _CpuLayer:
    _k_scale_float = _v_scale_float = 1.0
    attn_type, kv_cache_dtype = "decoder", "auto"

    def __init__(self, backend: Any, isa: str) -> None:
        self.backend, self.isa, self.impl, self.kv_cache = backend, isa, self, None

    def get_attn_backend(self) -> Any:
        return self.backend

    def bind_kv_cache(self, cache: Any) -> None:
        self.kv_cache = cache

    def do_kv_cache_update(self, *given: Any) -> None:
        self.backend.get_impl_cls().do_kv_cache_update(self, *given)


def offers_update(backend: Any) -> str | None:
    """Why a back end of attention cannot be asked, from its class alone; None where it can be."""
    if getattr(backend, "forward_includes_kv_cache_update", True):
        return "its cache is written in the midst of its attention kernel"
    if not callable(getattr(backend.get_impl_cls(), "do_kv_cache_update", None)):
        return "it offers no update of its cache"
    return None


def forget() -> None:
    """Gives the memory back that questions have used."""
    numbers.cache_clear()


def updates(kind: str) -> bool:
    """Whether the kernels of a kind of recurrent layers can be asked."""
    return kind in _RECURRENT


class _Attention:
    """Keys and values of heads; or whole records of them, by token and head."""

    blank = POISON

    def __init__(self, module: Any, backend: Any, spec: Any, dtype: Any, lengths: Lengths) -> None:
        if (why := offers_update(backend)) is not None:
            raise CannotAsk(why)
        self.states = lengths
        self._module, self._dtype = module, dtype
        tokens, heads = next(iter(lengths.values()))[:2]
        self.writer = f"{backend.get_impl_cls().__name__}.do_kv_cache_update"
        self._slots = BLOCK * tokens
        self._key = (tokens, heads, spec.head_size)
        self._value = (tokens, heads, spec.head_size_v)

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        layer = with_cache(self._module, cache)
        layer.impl = without_views(self._module.impl, self._module.kv_cache)
        # A record's keys and values change together.
        key, value = (
            numbers(shape, cache.device)
            * spread(signs.get(name, signs.get("kv")), shape)
            * float(getattr(layer, scale, 1.0))
            for name, shape, scale in (
                ("k", self._key, "_k_scale_float"),
                ("v", self._value, "_v_scale_float"),
            )
        )
        layer.impl.do_kv_cache_update(
            layer,
            key.to(self._dtype),
            value.to(self._dtype),
            layer.kv_cache,
            slots_of(self._slots, self._key[0], cache.device),
        )


class _Latent:
    """One vector for each token, or a record of it: the latent, and the part with the position."""

    blank = POISON

    def __init__(self, module: Any, spec: Any, dtype: Any, lengths: Lengths) -> None:
        if not callable(getattr(getattr(module, "impl", None), "do_kv_cache_update", None)):
            raise CannotAsk("it offers no update of its cache")
        self.states = lengths
        self._module, self._dtype = module, dtype
        self.writer = f"{type(module.impl).__name__}.do_kv_cache_update"
        self._tokens = lengths["latent"][0]
        self._sizes = (module.kv_lora_rank, module.qk_rope_head_dim)

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        layer = with_cache(self._module, cache)
        shape = (self._tokens, sum(self._sizes))
        values = numbers(shape, cache.device) * spread(signs["latent"], shape)
        values = (values * float(getattr(layer, "_k_scale_float", 1.0))).to(self._dtype)
        latent, position = values.split(self._sizes, dim=-1)
        without_views(layer.impl, self._module.kv_cache).do_kv_cache_update(
            latent.contiguous(),
            position.contiguous().unsqueeze(1),
            layer.kv_cache,
            slots_of(BLOCK * self._tokens, self._tokens, cache.device),
            layer.kv_cache_dtype,
            layer._k_scale,
        )


class _Indexer:
    """The keys of a sparse indexer and their scales."""

    writer, blank = "indexer_k_quant_and_cache", POISON

    def __init__(self, module: Any, dtype: Any, lengths: Lengths) -> None:
        import torch
        from vllm import _custom_ops as ops

        if not hasattr(torch.ops._C_cache_ops, "indexer_k_quant_and_cache"):
            raise CannotAsk("vLLM has no kernel for it on this platform")
        self.states = lengths
        self._module, self._dtype, self._store = module, dtype, ops.indexer_k_quant_and_cache

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        keys, scales = signs["indexer"], signs["indexer.scale"]
        quantised = keys.shape[1] // scales.shape[1]
        # A scale has no sign, but follows the largest of its keys.
        sizes = (scales < 0).to(keys.dtype).repeat_interleave(quantised, dim=1) * 3 + 1
        values = numbers(tuple(keys.shape), cache.device) * keys * sizes
        layer = with_cache(self._module, cache)
        slots = slots_of(BLOCK * len(keys), len(keys), cache.device)
        # As the layer's own file says it.
        scales_are = "ue8m0" if versions.has_float_scales() else "mxfp8"
        self._store(values.to(self._dtype), layer.kv_cache, slots, quantised, scales_are)


class _States:
    """A convolution's last columns, and the state behind it, as a prefill or a token leaves them."""

    # What a state was before is part of what it becomes.
    blank = 0

    def __init__(self, module: Any, kind: str, dtype: Any, lengths: Lengths) -> None:
        self.states = lengths
        self.writer = f"the kernels that update {kind} states"
        self._module, self._dtype, self._kind = module, dtype, kind
        self._channels = _sections(module, kind, lengths)

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        layer = with_cache(self._module, cache)
        kept = list(layer.kv_cache)
        if self._channels:
            self._convolve(layer, kept[0], signs)
        if "ssm" in signs:
            _RECURRENT[self._kind](layer, kept[-1], signs["ssm"], self._dtype)

    def _convolve(self, layer: Any, states: Any, signs: Mapping[str, Any]) -> None:
        import torch
        from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

        if not is_conv_state_dim_first():
            states = states.transpose(-1, -2)
        columns = self.states[next(iter(self._channels))][1]
        inputs = torch.ones(columns, states.shape[1], device=states.device)
        for name, channels in self._channels.items():
            inputs[:, channels.to(states.device)] = signs[name].transpose(0, 1)
        inputs *= numbers(tuple(inputs.shape), states.device)
        weight = torch.ones(states.shape[1], columns + 1, dtype=self._dtype, device=states.device)
        _convolution(layer, self._kind, states.shape[-1] > columns)(
            inputs.to(self._dtype).transpose(0, 1),
            weight,
            None,
            conv_states=states,
            query_start_loc=int32([0, columns], states.device),
            cache_indices=int32([BLOCK], states.device),
            has_initial_state=torch.zeros(1, dtype=torch.bool, device=states.device),
            activation="silu",
        )


def _sections(module: Any, kind: str, lengths: Lengths) -> dict[str, Any]:
    """The channels of each section of a convolution, as the layer itself takes them apart."""
    import torch

    told = [tensor for tensor in specs.KINDS[kind]["tensors"] if tensor["packing"] == "convolution"]
    names = [state["name"] for tensor in told for state in tensor["states"]]
    sizes = [lengths[name][0] for name in names]
    order = torch.arange(sum(sizes))
    parts = list(order.split(sizes))
    split = getattr(module, _SPLITS.get(kind, ""), None)
    if split is not None:
        # Some layers repeat keys for several heads.
        taken = split(order.float().unsqueeze(0))
        parts = [torch.unique_consecutive(part.flatten().to(torch.int64)) for part in taken]
        if [len(part) for part in parts] != sizes:
            found = [len(part) for part in parts]
            raise CannotAsk(f"it takes a convolution apart in {found} channels instead of {sizes}")
    return dict(zip(names, parts, strict=True))


#: How a layer calls what takes the channels of its convolution apart.
_SPLITS = {"mamba2": "split_hidden_states_B_C_fn", "gdn": "rearrange_mixed_qkv"}


def _convolution(layer: Any, kind: str, is_wide: bool) -> Any:
    """What stores the last columns of a prompt; `is_wide` where there are more, for guesses."""
    import torch
    from vllm.model_executor.layers.mamba.ops import causal_conv1d
    from vllm.platforms import current_platform

    if kind == "gdn" and current_platform.is_cpu() and not _is_kimi(layer):
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        if is_wide or not torch.cpu._is_avx512_bf16_supported():
            return gdn_attention.causal_conv1d_torch
        return lambda x, weight, bias, activation, **rest: gdn_attention._causal_conv1d_fwd_cpu(
            x=x, weight=weight, bias=bias, silu_activation=True, is_weight_packed=False, **rest
        )
    # As the layer's own file knows it.
    return getattr(namespace(layer), "causal_conv1d_fn", causal_conv1d.causal_conv1d_fn)


def _mamba1(layer: Any, states: Any, signs: Any, dtype: Any) -> None:
    """Of channels and states."""
    import torch

    channels, size = signs.shape
    device = states.device
    values = numbers((1, channels), device) * signs[:, 0]
    inputs = (signs[:1] * signs[:1, :1]).to(dtype)
    namespace(layer).selective_state_update(
        states,
        values.to(dtype),
        torch.ones(1, channels, dtype=dtype, device=device),
        -torch.ones(channels, size, device=device),
        inputs,
        torch.ones(1, size, dtype=dtype, device=device),
        torch.ones(channels, device=device),
        torch.zeros(channels, device=device),
        z=torch.ones(1, channels, dtype=dtype, device=device),
        dt_softplus=True,
        state_batch_indices=int32([BLOCK], device),
        dst_state_batch_indices=int32([BLOCK], device),
        out=torch.empty(1, channels, dtype=dtype, device=device),
    )


def _mamba2(layer: Any, states: Any, signs: Any, dtype: Any) -> None:
    """Of heads, their channels, and states."""
    import torch

    heads, channels, size = signs.shape
    device = states.device
    values = numbers((1, heads, channels), device) * signs[:, :, 0]
    inputs = (signs[:1, 0] * signs[:1, 0, :1]).to(dtype)

    def each(value: float, kind: Any = torch.float32, *more: int) -> Any:
        """One number for each head, seen along the other axes."""
        made = torch.full((heads,), value, dtype=kind, device=device)
        return made.view(heads, *[1] * (1 + len(more))).expand(heads, channels, *more)

    namespace(layer).selective_state_update(
        states,
        values.to(dtype),
        each(1.0, dtype).unsqueeze(0),
        each(-1.0, torch.float32, size),
        inputs.unsqueeze(1),
        torch.ones(1, 1, size, dtype=dtype, device=device),
        each(1.0, dtype),
        each(0.0, dtype),
        dt_softplus=True,
        state_batch_indices=int32([BLOCK], device),
        dst_state_batch_indices=int32([BLOCK], device),
        out=torch.empty(1, heads, channels, dtype=dtype, device=device),
    )


def _delta_net(layer: Any, states: Any, signs: Any, dtype: Any) -> None:
    """Of heads, values and keys."""
    import torch
    from vllm.platforms import current_platform

    heads, values, keys = signs.shape
    device = states.device
    # Each head's value carries the signs of head and value, each key its own; a length is unchanged.
    value = numbers((1, 1, heads, values), device) * signs[:, :, 0]
    along = signs[0, 0] * signs[0, 0, :1]
    key = numbers((keys,), device) * along
    gates = torch.ones(1, heads, dtype=dtype, device=device)
    weights = {
        "A_log": torch.zeros(heads, dtype=torch.float32, device=device),
        "dt_bias": torch.zeros(heads, dtype=layer.dt_bias.dtype, device=device),
    }
    if _is_kimi(layer):
        module = "amd" if current_platform.is_rocm() else "nvidia"
        kda = import_module(f"vllm.models.kimi_k3.{module}.ops.third_party.kda")
        key = key.expand(1, 1, heads, keys)
        mixed = torch.cat([part.reshape(1, -1) for part in (key, key, value)], dim=-1)
        weights["dt_bias"] = torch.zeros(heads * keys, dtype=torch.float32, device=device)
        kda.fused_recurrent_kda_packed_decode(
            mixed_qkv=mixed.to(dtype),
            raw_g=torch.zeros(1, 1, heads, keys, dtype=dtype, device=device),
            raw_beta=gates.unsqueeze(0),
            lower_bound=layer.gate_lower_bound,
            initial_state=states,
            state_indices=int32([BLOCK], device),
            **weights,
        )
        return
    key_heads = layer.num_k_heads // layer.tp_size
    key = key.expand(1, 1, key_heads, keys).to(dtype).contiguous()
    given = {"q": key, "k": key, "v": value.to(dtype), "a": gates, "b": gates, **weights}
    bounds = int32([0, 1], device)
    if current_platform.is_cpu():
        from vllm import _custom_ops as ops
        from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

        ops.fused_sigmoid_gating_delta_rule_update_cpu(
            **given,
            initial_state_source=gdn_attention._ssm_state_view(layer),
            initial_state_indices=int32([BLOCK], device),
            cu_seqlens=bounds,
            use_qk_l2norm_in_kernel=True,
        )
        return
    namespace(layer).fused_sigmoid_gating_delta_rule_update(
        **given,
        initial_state=states,
        inplace_final_state=True,
        cu_seqlens=bounds,
        ssm_state_indices=int32([BLOCK], device),
        use_qk_l2norm_in_kernel=True,
    )


def _nothing(layer: Any, states: Any, signs: Any, dtype: Any) -> None:
    """A convolution alone."""


#: What updates a state, by kind.
_RECURRENT = {"mamba1": _mamba1, "mamba2": _mamba2, "gdn": _delta_net, "short conv": _nothing}


def _is_kimi(layer: Any) -> bool:
    """Whether a delta net forgets by channel: those have kernels of their own."""
    return hasattr(layer, "gate_lower_bound")
