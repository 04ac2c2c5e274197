"""What SGLang has compiled kernels for, in plain torch and token by token: convolutions, Mamba2's scan, delta rules.

States change in place, in the layout in which SGLang keeps them: what is tested is how they are handed over.
`test_standins.py` compares each function with transformers' or vLLM's own.
"""

import torch
import torch.nn.functional as F


def causal_conv1d_fn(x, weight, bias=None, query_start_loc=None, cache_indices=None, has_initial_state=None,
                     conv_states=None, activation="silu", **_):
    """x: [channels, tokens] of all requests; conv_states: [slots, channels, width - 1], oldest column first."""
    out, starts = torch.empty_like(x), query_start_loc.tolist()
    for at, (begin, end) in enumerate(zip(starts, starts[1:])):
        before = conv_states[int(cache_indices[at])]
        if has_initial_state is None or not bool(has_initial_state[at]):
            before = torch.zeros_like(before)
        seen = torch.cat([before.to(x.dtype), x[:, begin:end]], dim=1)
        out[:, begin:end] = _convolved(seen, weight, bias, activation)
        conv_states[int(cache_indices[at])] = seen[:, 1 - weight.shape[-1] :].to(conv_states.dtype)
    return out


def causal_conv1d_update(x, conv_state, weight, bias=None, activation=None, conv_state_indices=None, **_):
    """x: [requests, channels], one token of each."""
    out = torch.empty_like(x)
    for at, slot in enumerate(conv_state_indices.tolist()):
        seen = torch.cat([conv_state[slot].to(x.dtype), x[at][:, None]], dim=1)
        out[at] = _convolved(seen, weight, bias, activation)[:, 0]
        conv_state[slot] = seen[:, 1:].to(conv_state.dtype)
    return out


def _convolved(seen, weight, bias, activation):
    bias = None if bias is None else bias.float()
    made = F.conv1d(seen[None].float(), weight[:, None].float(), bias, groups=len(seen))[0]
    return (F.silu(made) if activation in ("silu", "swish", True) else made).to(seen.dtype)


def mamba_chunk_scan_combined(x, dt, A, B, C, chunk_size=None, D=None, z=None, dt_bias=None, initial_states=None,
                              cu_seqlens=None, dt_softplus=False, out=None, state_dtype=None, **_):
    """x: [1, tokens, heads, dim]; B and C: [1, tokens, groups, n]. Gives the state at the end of each request."""
    ends, starts = [], cu_seqlens.tolist()
    steps = _steps(dt[0], dt_bias, dt_softplus)
    for at, (begin, end) in enumerate(zip(starts, starts[1:])):
        state = torch.zeros(x.shape[2], x.shape[3], B.shape[3])
        if initial_states is not None:
            state = initial_states[at].float()
        for token in range(begin, end):
            state, made = _scanned(state, x[0, token], steps[token], A, B[0, token], C[0, token], D)
            out[0, token] = made.to(out.dtype)
        ends.append(state)
    return None, torch.stack(ends).to(state_dtype or torch.float32), None


def selective_state_update(state, x, dt, A, B, C, D=None, z=None, dt_bias=None, dt_softplus=False,
                           state_batch_indices=None, out=None, **_):
    """x: [requests, heads, dim], one token of each; what belongs to a head is repeated for all that it has."""
    steps = _steps(dt[:, :, 0], dt_bias[:, 0], dt_softplus)
    for at, slot in enumerate(state_batch_indices.tolist()):
        now, made = _scanned(state[slot].float(), x[at], steps[at], A[:, 0, 0], B[at], C[at], D[:, 0])
        state[slot] = now.to(state.dtype)
        out[at] = made.to(out.dtype)


def _steps(dt, bias, softplus):
    steps = dt.float() + (0 if bias is None else bias.float())
    return F.softplus(steps) if softplus else steps


def _scanned(state, x, step, A, B, C, D):
    """One token: the state is [heads, dim, n], and several heads share the B and C of a group."""
    B, C = (it.float().repeat_interleave(len(state) // len(it), 0) for it in (B, C))
    x = x.float()
    state = state * torch.exp(step * A.float())[:, None, None] + (step[:, None] * x)[:, :, None] * B[:, None, :]
    return state, (state * C[:, None, :]).sum(-1) + D.float()[:, None] * x


def delta_rule(q, k, v, decay, rate, states, slots, starts, normed):
    """q, k, v: [1, tokens, heads, size]; decay: [tokens, heads] or [tokens, heads, keys], of which the exponential is
    kept; rate: [tokens, heads]; states: [slots, heads, values, keys]."""
    each = v.shape[2] // k.shape[2]
    q, k = (_unit(it[0].float()) if normed else it[0].float() for it in (q, k))
    q, k = ((it).repeat_interleave(each, 1) for it in (q * q.shape[-1] ** -0.5, k))
    decay = decay.exp() if decay.dim() == 3 else decay.exp()[:, :, None]
    out = torch.empty_like(v)
    for at, (begin, end) in enumerate(zip(starts, starts[1:])):
        state = states[int(slots[at])].float()
        for token in range(begin, end):
            state = state * decay[token][:, None, :]
            known = (state * k[token][:, None, :]).sum(-1)
            learned = rate[token][:, None] * (v[0, token].float() - known)
            state = state + learned[:, :, None] * k[token][:, None, :]
            out[0, token] = (state * q[token][:, None, :]).sum(-1).to(out.dtype)
        states[int(slots[at])] = state.to(states.dtype)
    return out


def _unit(x):
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


def _decay(a, A_log, dt_bias):
    """By head, or by head and key."""
    return -A_log.float().exp().reshape(-1, *[1] * (a.dim() - 2)) * F.softplus(a.float() + dt_bias.float().reshape(a.shape[1:]))


def fused_gdn_gating_cpu(A_log, a, b, dt_bias):
    return _decay(a, A_log, dt_bias)[None], b.float().sigmoid()[None]


def chunk_gated_delta_rule_cpu(q, k, v, g, beta, initial_state=None, cu_seqlens=None, initial_state_indices=None,
                               use_qk_l2norm_in_kernel=False, **_):
    out = delta_rule(q, k, v, g[0].float(), beta[0].float(), initial_state, initial_state_indices,
                     cu_seqlens.tolist(), use_qk_l2norm_in_kernel)
    return out, None, None


def fused_sigmoid_gating_delta_rule_update_cpu(A_log, dt_bias, q, k, v, a, b, initial_state_source,
                                               initial_state_indices, cu_seqlens, use_qk_l2norm_in_kernel=True,
                                               is_kda=False, **_):
    tokens, heads = v.shape[1:3]
    a = a.reshape(tokens, heads, k.shape[3]) if is_kda else a.reshape(tokens, heads)
    return delta_rule(q, k, v, _decay(a, A_log, dt_bias), b.reshape(tokens, heads).float().sigmoid(),
                      initial_state_source, initial_state_indices, cu_seqlens.tolist(), use_qk_l2norm_in_kernel)


def chunk_kda(q, k, v, g, beta, initial_state=None, initial_state_indices=None, use_qk_l2norm_in_kernel=True,
              cu_seqlens=None, A_log=None, dt_bias=None, beta_is_raw=False, output_intermediate_states=False, **_):
    tokens, heads = v.shape[1:3]
    rate = beta.float().reshape(tokens, heads)
    out = delta_rule(q, k, v, _decay(g.reshape(tokens, heads, k.shape[3]), A_log, dt_bias),
                     rate.sigmoid() if beta_is_raw else rate, initial_state, initial_state_indices,
                     cu_seqlens.tolist(), use_qk_l2norm_in_kernel)
    return (out, None) if output_intermediate_states else out


def gemma_norm(x, weight, eps):
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * (1 + weight.float())).to(x.dtype)


def fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim, *_):
    return tuple(gemma_norm(it.reshape(-1, head_dim), weight, eps) for it, weight in ((q, q_weight), (k, k_weight)))


def fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, q_weight, k_weight, eps, head_dim, heads):
    q, gate = q_gate.reshape(len(q_gate), heads, 2, head_dim).unbind(2)
    return *fused_qk_gemma_rmsnorm_cpu(q, k, q_weight, k_weight, eps, head_dim), gate.contiguous()


def fused_sigmoid_mul_cpu(x, gate):
    x.mul_(gate.float().reshape(x.shape).sigmoid().to(x.dtype))


def fused_qkvzba_split_reshape_cat_contiguous_cpu(qkvz, ba, key_heads, value_heads, key, value):
    qkv, z = qkvz.split([2 * key_heads * key + value_heads * value, value_heads * value], -1)
    b, a = ba.split(value_heads, -1)
    return qkv.contiguous(), z.reshape(-1, value_heads, value).contiguous(), b.contiguous(), a.contiguous()
