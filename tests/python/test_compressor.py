"""What of a compressor's states is alive after a prefill, and where its results lie in a page: shown by
vLLM's own kernels for GPUs, which Triton's interpreter carries out here."""

import pytest
from stand_in import Backend  # noqa: F401  first: it sets the environment up

# isort: split
import torch
import triton.language
from kvferry.vllm.describe import specs
from triton.runtime.interpreter import InterpretedFunction
from vllm.models.deepseek_v4.common.ops import fused_compress_quant_cache, save_partial_states

#: Compression, tokens before a group that it looks at too, and the block size of its states.
COMPRESSORS = [(4, 4, 4), (128, 0, 8)]
SIZE, ENTRIES = 512, 8


def interpreted(kernel):
    """vLLM does without Triton where there is no GPU: its kernels are plain functions then."""
    kernel.__globals__["tl"] = triton.language
    return InterpretedFunction(kernel)


save = interpreted(save_partial_states.SavePartialStatesKernel.kernel)
compress = interpreted(fused_compress_quant_cache._fused_kv_compress_norm_rope_insert_sparse_attn)


class Compressor:
    """One sequence's states and compressed latents."""

    def __init__(self, ratio, overlap, block):
        self.ratio, self.window, self.block = ratio, ratio + overlap, block
        self.width = SIZE * self.window // ratio
        generator = torch.Generator().manual_seed(ratio)
        tokens = 6 * 128
        self.numbers, self.scores = (
            torch.randn(tokens, self.width, generator=generator) for _ in range(2)
        )
        self.states = torch.full((tokens // block, block, 2 * self.width), 1e3)
        self.pages = torch.zeros(2, ENTRIES * 584, dtype=torch.uint8)
        angles = torch.rand(tokens, 32, generator=generator)
        self.rope = torch.cat([angles.cos(), angles.sin()], dim=-1)

    def store(self, first, end):
        """The states of tokens `first` to `end`."""
        position = torch.arange(first, end)
        rows = [it[first:end].contiguous() for it in (self.numbers, self.scores)]
        rows.append(torch.zeros(self.ratio, self.width))
        save[(end - first,)](
            *(part for row in rows for part in (row, row.stride(0))),
            position,
            *(self.states, *self.states.stride()[:2]),
            *(position, self.block),
            HEAD_SIZE=self.width,
            TRITON_BLOCK_SIZE=self.width,
            STATE_WIDTH=self.width,
            COMPRESS_RATIO=self.ratio,
        )

    def close(self, position):
        """The page after the group that ends with `position` was compressed."""
        self.pages.zero_()
        at, table = torch.tensor([position]), torch.arange(len(self.states), dtype=torch.int32)[None]
        data, scales = specs.TWO_PARTS[584]
        compress[(1,)](
            *(self.states, *self.states.stride()[:2]),
            *(torch.zeros(1, dtype=torch.int32), at, at),
            *(table, table.stride(0), self.block),
            *(torch.ones(SIZE), 1e-6),
            *(self.rope, self.rope.stride(0)),
            *(self.pages, torch.tensor([position // self.ratio % ENTRIES]), ENTRIES),
            HEAD_SIZE=SIZE,
            TRITON_BLOCK_SIZE=SIZE,
            STATE_WIDTH=self.width,
            COMPRESS_RATIO=self.ratio,
            OVERLAP=self.window > self.ratio,
            ROPE_HEAD_DIM=64,
            FP8_MAX=448.0,
            QUANT_BLOCK=64,
            TOKEN_STRIDE=data,
            SCALE_DIM=scales,
            KV_BLOCK_STRIDE=self.pages.stride(0),
            SANITIZE_CACHE_NANS=False,
        )
        return self.pages.clone()


@pytest.mark.parametrize("ratio, overlap, block", COMPRESSORS)
@pytest.mark.parametrize("groups, beyond", [(1, 0), (1, 1), (2, -1), (2, 0), (3, 2)])
def test_the_window_of_the_spec_holds_all_that_the_next_group_reads(ratio, overlap, block, groups, beyond):
    tokens = groups * ratio + beyond
    boundary = (tokens // ratio + 1) * ratio - 1
    it = Compressor(ratio, overlap, block)
    it.store(0, boundary + 1)
    expected = it.close(boundary)
    assert expected.any()
    # D gets the states of the window alone, and computes those of further tokens itself.
    first = max(0, tokens + 1 - it.window)
    other = Compressor(ratio, overlap, block)
    other.store(first, tokens)
    other.store(tokens, boundary + 1)
    assert torch.equal(other.close(boundary), expected)
    # Alive are the open group, and the one before it where groups overlap: no other state is read.
    alive = max(0, tokens // ratio * ratio - overlap)
    assert first <= alive
    looked_at = {first, alive - 1, alive, tokens - 1, *range(first, tokens, 11)}
    for token in looked_at & set(range(first, tokens)):
        saved = it.states.view(-1, 2 * it.width)[token].clone()
        it.states.view(-1, 2 * it.width)[token] = -50 * saved
        assert torch.equal(it.close(boundary), expected) == (token < alive), token
        it.states.view(-1, 2 * it.width)[token] = saved


def test_scales_lie_behind_all_records_of_a_page():
    data, scales = specs.TWO_PARTS[584]
    for slot in range(ENTRIES):
        it = Compressor(4, 4, 4)
        it.store(0, 4 * ENTRIES)
        page = it.close(4 * slot + 3)[0]
        written = torch.nonzero(page).flatten().tolist()
        records = range(slot * data, (slot + 1) * data)
        behind = range(ENTRIES * data + slot * scales, ENTRIES * data + (slot + 1) * scales)
        assert all(at in records or at in behind for at in written)
        # The last of a token's scales is padding.
        assert set(behind[:7]) <= set(written)
        assert len([at for at in written if at in records]) > data // 2
