"""Kimi-Linear on a CPU: slow stand-ins for the kernels that vLLM has for GPUs only.

The cache and everything that happens to it stay vLLM's own; only the arithmetic is done here.
"""

import torch
from vllm.model_executor.models import ModelRegistry
from vllm.platforms import current_platform


def kimi():
    # vLLM searches all modules for kernels that it has CPU versions of, and stumbles over what
    # comes with Kimi's: it must search before they are there.
    current_platform.register_triton_kernel_overrides()
    type(current_platform).register_triton_kernel_overrides = classmethod(lambda _: None)

    from vllm.model_executor.layers.mamba.gdn import kimi_gdn_linear_attn as layer
    from vllm.model_executor.layers.mamba.ops.cpu import causal_conv1d

    # Of vLLM's two versions of the model, the one whose latent attention other models share.
    from vllm.models.kimi_k3.amd.linear import KimiLinearForCausalLM
    from vllm.models.kimi_k3.nvidia.ops.third_party import kda

    ModelRegistry.register_model("KimiLinearForCausalLM", KimiLinearForCausalLM)
    layer.causal_conv1d_fn = causal_conv1d.causal_conv1d_fn_cpu
    layer.causal_conv1d_update = causal_conv1d.causal_conv1d_update_cpu
    layer.gather_initial_states = _gather
    kda.chunk_kda_with_fused_gate = _prefill
    kda.fused_recurrent_kda_packed_decode = _decode


def _gather(state, indices, has_initial_state):
    return state[indices.long()] * has_initial_state.view(-1, 1, 1, 1)


def _prefill(
    q, k, v, raw_g, raw_beta, A_log, g_bias, initial_state, cu_seqlens, lower_bound, **_options
):
    assert lower_bound is None
    decay, rate = _gates(raw_g[0], raw_beta[0], A_log, g_bias)
    out, states = torch.empty_like(v), initial_state.clone()
    bounds = cu_seqlens.tolist()
    for state, begin, end in zip(states, bounds, bounds[1:], strict=False):
        for at in range(begin, end):
            out[0, at] = _step(state, q[0, at], k[0, at], v[0, at], decay[at], rate[at])
    return out, states


def _decode(
    mixed_qkv, raw_g, raw_beta, A_log, dt_bias, lower_bound, initial_state, state_indices
):
    assert lower_bound is None
    decay, rate = _gates(raw_g[0], raw_beta[0], A_log, dt_bias)
    q, k, v = mixed_qkv.view(len(mixed_qkv), 3, *raw_g.shape[2:]).unbind(1)
    out = torch.empty_like(v)
    for at, slot in enumerate(state_indices.tolist()):
        out[at] = _step(initial_state[slot], q[at], k[at], v[at], decay[at], rate[at])
    return out.unsqueeze(0), initial_state


def _gates(raw_g, raw_beta, A_log, bias):
    """How much each key's channel keeps, and how fast each head learns."""
    kept = torch.nn.functional.softplus(raw_g.float() + bias.view(raw_g.shape[1:]))
    return torch.exp(-A_log.exp().view(-1, 1) * kept), raw_beta.float().sigmoid()


def _step(state, q, k, v, decay, rate):
    """One token of the delta rule, for all heads: `state` is [head, value, key], and changes."""
    q = torch.nn.functional.normalize(q, dim=-1) * q.shape[-1] ** -0.5
    k = torch.nn.functional.normalize(k, dim=-1)
    state *= decay.unsqueeze(1)
    known = (state * k.unsqueeze(1)).sum(-1)
    state += ((v - known) * rate.view(-1, 1)).unsqueeze(-1) * k.unsqueeze(1)
    return (state * q.unsqueeze(1)).sum(-1)
