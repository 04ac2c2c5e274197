"""What of a compressor's states is alive after a prefill, and where its results lie in a page: shown by
vLLM's own kernels for CPUs, which index memory as those for GPUs do."""

import pytest
from stand_in import Backend  # noqa: F401  first: it sets the environment up

# isort: split
import torch
from kvferry.vllm import specs
from vllm import _custom_ops as ops
from vllm.models.deepseek_v4.cpu.cpu_utils import map_local_to_global_slots_cpu

#: Compression, tokens before a group that it looks at too, and the block size of its states.
COMPRESSORS = [(4, 4, 4), (128, 0, 8)]
SIZE, ENTRIES = 512, 8


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
        ape = torch.zeros(self.ratio, self.width)
        rows = self.numbers[first:end].contiguous(), self.scores[first:end].contiguous()
        ops.save_partial_states_cpu(*rows, ape, position, self.states, position)

    def close(self, position):
        """The page after the group that ends with `position` was compressed."""
        at = torch.tensor([position])
        local = at[:, None] - self.window + 1 + torch.arange(self.window)
        table = torch.arange(len(self.states), dtype=torch.int32)[None]
        slots = map_local_to_global_slots_cpu(local, torch.zeros(1, dtype=torch.int32), table, self.block)
        self.pages.zero_()
        entry = torch.tensor([position // self.ratio % ENTRIES])
        weight = torch.ones(SIZE)
        ops.compress_norm_rope_store_cpu(
            self.states, slots, at, entry, weight, 1e-6, self.rope, self.pages, ENTRIES, self.ratio
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
    for token in range(first, tokens):
        saved = it.states.view(-1, 2 * it.width)[token].clone()
        it.states.view(-1, 2 * it.width)[token] = -50 * saved
        assert torch.equal(it.close(boundary), expected) == (token < alive), token
        it.states.view(-1, 2 * it.width)[token] = saved


def test_scales_lie_behind_all_records_of_a_page():
    data, scales = specs.SCALES_LAST[584]
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
