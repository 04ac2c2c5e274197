"""Mamba2 and the gated delta rules in few large kernels, in the place of transformers' own, which are slow to train."""

import torch
import torch.nn.functional as F

CHUNK = 64


def use():
    """Patches transformers. The models compute the same as before; `check.py` shows it."""
    from transformers import masking_utils
    from transformers.models.falcon_h1 import modeling_falcon_h1
    from transformers.models.kimi_linear import modeling_kimi_linear
    from transformers.models.nemotron_h import modeling_nemotron_h
    from transformers.models.qwen3_5 import modeling_qwen3_5

    modeling_falcon_h1.mamba2_chunk_scan = mamba2
    modeling_nemotron_h.mamba2_chunk_scan = mamba2
    modeling_qwen3_5.torch_chunk_gated_delta_rule = delta_rule
    modeling_kimi_linear.chunk_kimi_delta_attention = delta_rule
    # It waits for the GPU, which the capture of a graph does not allow. Nothing is packed here.
    masking_utils.find_packed_sequence_indices = lambda *_, **__: None


def mamba2(x, dt, A, B, C, D=None, dt_bias=None, dt_limit=(0.0, float("inf")), **_):
    """All pairs of tokens of a chunk at once, as attention does, and then all pairs of chunks."""
    heads, size = x.shape[2] // B.shape[2], min(CHUNK, x.shape[1])
    dt = F.softplus(dt.float() + dt_bias.float()).clamp(*dt_limit)
    # [batch, chunk, head or group, token, column]
    chunks = lambda x: x.unflatten(1, (-1, size)).transpose(2, 3)
    values = chunks(x.float() * dt[..., None])
    B, C = (chunks(x.float()) for x in (B, C))
    decay = chunks((A.float() * dt)[..., None])[..., 0].cumsum(-1)
    weights = (C @ B.transpose(-1, -2)).repeat_interleave(heads, 2) * between(decay)
    B, C = (x.repeat_interleave(heads, 2) for x in (B, C))
    states = (B * (decay[..., -1:] - decay).exp()[..., None]).transpose(-1, -2) @ values
    # A chunk's own state is no part of what it starts with.
    whole = between(F.pad(decay[..., -1].cumsum(1), (0, 0, 1, 0)).transpose(1, 2))[..., :-1, 1:]
    before = torch.einsum("bhij,bjhnp->bihnp", whole, states)
    out = weights @ values + (C * decay.exp()[..., None]) @ before
    return (out.transpose(2, 3).flatten(1, 2) + D.float()[:, None] * x.float()).contiguous()


def between(decay):
    """What is left between any two places of what has decayed so far; nothing goes back."""
    future = torch.ones(decay.shape[-1], decay.shape[-1], dtype=torch.bool, device=decay.device).triu(1)
    return (decay[..., :, None] - decay[..., None, :]).masked_fill(future, float("-inf")).exp()


def delta_rule(query, key, value, g, beta, chunk_size=16, **_):
    """The decay `g` is one number for a head, or one for each of its columns."""
    kind, length = query.dtype, query.shape[1]
    if g.dim() == 3:
        g = g[..., None]
    query, key = (x.float() * (x.float().square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    # [chunk, batch, head, token, column]
    chunks = lambda x: x.float().unflatten(1, (-1, chunk_size)).permute(1, 0, 3, 2, 4)
    query, key, value, g, beta = (chunks(x) for x in (query, key, value, g, beta[..., None]))
    g = g.cumsum(-2)
    future = torch.ones(chunk_size, chunk_size, dtype=torch.bool, device=g.device).triu(1)[..., None]
    decay = (g[..., :, None, :] - g[..., None, :, :]).masked_fill(future, float("-inf")).exp()
    if decay.shape[-1] == 1:
        among = lambda x: x @ key.transpose(-1, -2) * decay[..., 0]
    else:
        among = lambda x: (x[..., :, None, :] * key[..., None, :, :] * decay).sum(-1)
    ones = torch.eye(chunk_size, device=g.device)
    system = ones + among(key * beta).tril(-1)
    # The columns of both right sides in one go.
    solved = torch.linalg.solve_triangular(
        system, torch.cat([value * beta, key * beta * g.exp()], -1), upper=False, unitriangular=True
    )
    values, keys = solved.split([value.shape[-1], key.shape[-1]], -1)
    inside, reads = among(query), query * g.exp()
    kept, writes = g[..., -1, :].exp()[..., None], key * (g[..., -1:, :] - g).exp()
    state, out = torch.zeros_like(keys[0].transpose(-1, -2) @ values[0]), []
    for number in range(length // chunk_size):
        new = values[number] - keys[number] @ state
        out.append(reads[number] @ state + inside[number] @ new)
        state = state * kept[number] + writes[number].transpose(-1, -2) @ new
    return torch.stack(out).permute(1, 0, 3, 2, 4).flatten(1, 2).to(kind), None
