"""The stand-ins for SGLang's kernels, beside transformers' and vLLM's own, on random numbers."""

import arithmetic
import pytest
import torch
import torch.nn.functional as F

TOKENS, HEADS, DIM, N = 13, 4, 8, 6


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(3)


def close(ours, theirs):
    assert ours.shape == theirs.shape
    torch.testing.assert_close(ours.float(), theirs.float(), rtol=2e-4, atol=2e-4)


def test_convolutions_are_those_of_vllm():
    from vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d import causal_conv1d_update_torch

    channels, width = 10, 4
    x, weight, bias = torch.randn(TOKENS, channels), torch.randn(channels, width), torch.randn(channels)
    states = torch.randn(3, channels, width - 1)
    whole, steps = states.clone(), states.clone()
    starts = torch.tensor([0, 5, TOKENS])
    slots, has = torch.tensor([2, 1]), torch.tensor([True, False])
    out = arithmetic.causal_conv1d_fn(x.T, weight, bias, starts, slots, has, whole, "silu")
    # The same token by token, and by vLLM's own step.
    steps[1] = 0
    theirs = steps.clone()
    for at in range(TOKENS):
        slot = slots[:1] if at < 5 else slots[1:]
        made = arithmetic.causal_conv1d_update(x[at : at + 1], steps, weight, bias, "silu", slot)
        close(out[:, at], made[0])
        row = int(slot)
        own = causal_conv1d_update_torch(x[at : at + 1, :, None], theirs[row : row + 1], weight, bias, "silu")
        close(made[0], own.reshape(-1))
    close(whole[1:], steps[1:])
    close(steps[1:], theirs[1:])


def test_mamba2_is_that_of_vllm():
    from vllm.model_executor.layers.mamba.ops.cpu import mamba_ssm

    groups = 2
    x, dt = torch.randn(TOKENS, HEADS, DIM), torch.randn(TOKENS, HEADS)
    B, C = torch.randn(TOKENS, groups, N), torch.randn(TOKENS, groups, N)
    A, D, bias = -torch.rand(HEADS), torch.randn(HEADS), torch.randn(HEADS)
    first = torch.randn(1, HEADS, DIM, N)
    out = torch.empty(1, TOKENS, HEADS, DIM)
    _, ends, _ = arithmetic.mamba_chunk_scan_combined(
        x[None], dt[None], A, B[None], C[None], D=D, dt_bias=bias, initial_states=first,
        cu_seqlens=torch.tensor([0, TOKENS]), dt_softplus=True, out=out,
    )
    spread = (HEADS, DIM)
    wide = {"A": A[:, None, None].expand(*spread, N), "D": D[:, None].expand(spread), "dt_bias": bias[:, None].expand(spread)}
    # Slot 0 is nobody's in vLLM.
    ours, theirs = (torch.cat([torch.zeros_like(first), first]) for _ in range(2))
    for at in range(TOKENS):
        step = dt[at : at + 1, :, None].expand(1, *spread)
        made, own = torch.empty(1, *spread), torch.empty(1, *spread)
        slot = torch.tensor([1], dtype=torch.int32)
        words = (x[at : at + 1], step, wide["A"], B[at : at + 1], C[at : at + 1])
        rest = {"D": wide["D"], "dt_bias": wide["dt_bias"], "dt_softplus": True, "state_batch_indices": slot}
        arithmetic.selective_state_update(ours, *words, **rest, out=made)
        mamba_ssm.selective_state_update(theirs, *words, **rest, out=own)
        close(made, own)
        close(out[0, at], own[0])
    close(ours, theirs)
    close(ends, theirs[1:])


def test_the_gated_delta_rule_is_that_of_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

    q, k = torch.randn(1, TOKENS, 2, DIM), torch.randn(1, TOKENS, 2, DIM)
    v, a, b = torch.randn(1, TOKENS, HEADS, N), torch.randn(TOKENS, HEADS), torch.randn(TOKENS, HEADS)
    A_log, bias = torch.randn(HEADS), torch.randn(HEADS)
    g, beta = arithmetic.fused_gdn_gating_cpu(A_log, a, b, bias)
    close(g[0], -A_log.exp() * F.softplus(a + bias))
    states = torch.randn(2, HEADS, N, DIM)
    first = states[1:].clone()
    out, *_ = arithmetic.chunk_gated_delta_rule_cpu(
        q, k, v, g, beta, states, torch.tensor([0, TOKENS]), torch.tensor([1]), True
    )
    wide = [it.repeat_interleave(2, 2) for it in (q, k)]
    # Theirs is by key and then by value.
    own, state = torch_recurrent_gated_delta_rule(*wide, v, g, beta, first.transpose(2, 3), True, use_qk_l2norm_in_kernel=True)
    close(out, own)
    close(states[1:], state.transpose(2, 3))
    again = torch.cat([states[:1], first])
    close(
        arithmetic.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log, bias, q, k, v, a, b, again, torch.tensor([1]), torch.tensor([0, TOKENS])
        ),
        own,
    )


def test_kimis_delta_rule_is_that_of_transformers():
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention

    q, k, v = (torch.randn(1, TOKENS, HEADS, DIM) for _ in range(3))
    g, b = torch.randn(1, TOKENS, HEADS, DIM), torch.randn(1, TOKENS, HEADS)
    A_log, bias = torch.randn(HEADS), torch.randn(HEADS * DIM)
    states = torch.randn(1, HEADS, DIM, DIM)
    first = states.clone()
    out = arithmetic.chunk_kda(
        q, k, v, g, b, states, torch.tensor([0]), True, torch.tensor([0, TOKENS]), A_log, bias, beta_is_raw=True
    )
    decay = -A_log.exp().view(1, 1, -1, 1) * F.softplus(g + bias.view(HEADS, DIM))
    own, state = recurrent_kimi_delta_attention(
        q, k, v, decay, b.sigmoid(), first.transpose(2, 3), True, use_qk_l2norm_in_kernel=True
    )
    close(out, own)
    close(states, state.transpose(2, 3))
    again = first.clone()
    close(
        arithmetic.fused_sigmoid_gating_delta_rule_update_cpu(
            A_log, bias, q, k, v, g, b, again, torch.tensor([0]), torch.tensor([0, TOKENS]), is_kda=True
        ),
        own,
    )


def test_norms_are_those_of_transformers():
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    norm = Qwen3_5RMSNorm(DIM, eps=1e-6)
    norm.weight.data = torch.randn(DIM)
    q_gate, k = torch.randn(TOKENS, HEADS * 2 * DIM), torch.randn(TOKENS, 2 * DIM)
    q, made, gate = arithmetic.fused_qk_gemma_rmsnorm_with_gate_cpu(q_gate, k, norm.weight, norm.weight, 1e-6, DIM, HEADS)
    given = q_gate.view(TOKENS, HEADS, 2 * DIM)
    close(q.reshape(TOKENS, HEADS, DIM), norm(given[..., :DIM]).detach())
    close(gate, given[..., DIM:])
    close(made.reshape(TOKENS, 2, DIM), norm(k.view(TOKENS, 2, DIM)).detach())
    x, gate = torch.randn(TOKENS, 6), torch.randn(TOKENS, 6)
    expected = x * gate.sigmoid()
    arithmetic.fused_sigmoid_mul_cpu(x, gate)
    close(x, expected)
