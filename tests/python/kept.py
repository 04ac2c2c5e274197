"""What layers keep, and how their kernels index a cache: that is what kvferry is judged by.

Specs are vLLM's and state shapes come from vLLM's calculators; where each number goes is told once more
by hand.
"""

from dataclasses import dataclass
from types import SimpleNamespace

from stand_in import order_convolutions  # first: it sets the environment up

# isort: split
import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.model_executor.layers.mamba.abstract import MambaBase
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Mamba
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
)

Shapes = mamba_utils.MambaStateShapeCalculator


@dataclass(frozen=True)
class Topology:
    """How one side runs a model."""

    tp: int = 1
    pp: int = 1
    block: int = 16
    kernel: int | None = None
    layout: str = "LBHNC"
    conv: str = "SD"
    spec: int = 0
    blocks: int = 40
    cpu: bool = False
    dcp: int = 1
    turn: int = 1
    pcp: int = 1
    #: Which of the ranks that take turns at tokens writes: its tensor-parallel rank unless told.
    token_rank: int | None = None
    hma: bool = True
    caching: bool = False
    dtype: torch.dtype = torch.bfloat16
    state_dtype: torch.dtype = torch.float32


def numbers(seed, shape, dtype):
    """Numbers that depend on nothing but the state and the place in it. Finite, so that a kernel may
    touch them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)


# What a layer keeps. `write` puts tokens `first` to `last` of a sequence into a rank's blocks (or, for
# `numbers` of None, zeroes the blocks) in the way the layer's kernels index them.


@dataclass(frozen=True)
class Attention:
    heads: int
    key: int = 32
    value: int | None = None
    window: int | None = None
    chunk: int | None = None
    queries: int | None = None

    def allows(self, tp):
        even = self.heads % tp == 0 if tp <= self.heads else tp % self.heads == 0
        return even and (self.queries or 24) % tp == 0

    def spec(self, side):
        facts = dict(
            block_size=side.block,
            num_kv_heads=max(1, self.heads // side.tp),
            head_size=self.key,
            head_size_v=self.value or self.key,
            dtype=side.dtype,
        )
        if self.window:
            return SlidingWindowSpec(sliding_window=self.window, **facts)
        if self.chunk:
            return ChunkedLocalAttentionSpec(attention_chunk_size=self.chunk, **facts)
        return FullAttentionSpec(**facts)

    def first_live(self, tokens):
        if self.window:
            return max(0, tokens + 1 - self.window)
        return tokens // self.chunk * self.chunk if self.chunk else 0

    def states(self, seed, tokens, side):
        key = numbers(seed, (tokens, self.heads, self.key), side.dtype)
        value = numbers(seed + 1, (tokens, self.heads, self.value or self.key), side.dtype)
        return key, value

    def own_heads(self, side, rank):
        # As vLLM's weight loader deals them out.
        if side.tp >= self.heads:
            replicas = side.tp // self.heads
            return slice(rank // replicas, rank // replicas + 1)
        share = self.heads // side.tp
        return slice(rank * share, (rank + 1) * share)

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            for block in table:
                tensor[kernel_blocks(tensor, side.blocks, block)] = 0
            return
        key, value = (state[first:last, self.own_heads(side, rank)] for state in states)
        positions = range(first, last)
        if side.cpu:
            count, heads, tokens, _ = tensor.shape
            keys, values = tensor.view(count, heads, 2 * tokens, -1).chunk(2, dim=2)
            slots = [table[t // tokens] * tokens + t % tokens for t in positions]
            isa = _get_attn_isa(side.dtype, tokens, self.key)
            slots = torch.tensor(slots, dtype=torch.int64)
            ops.cpu_attn_reshape_and_cache(
                key.contiguous(), value.contiguous(), keys, values, slots, isa
            )
            return
        block, slot = slots_of(side, rank, tensor, table, positions)
        keep = [i for i, b in enumerate(block) if b is not None]
        block, slot = [block[i] for i in keep], [slot[i] for i in keep]
        tensor[block, :, slot, : self.key] = key[keep]
        tensor[block, :, slot, self.key :] = value[keep]


@dataclass(frozen=True)
class Latent:
    size: int = 96

    def allows(self, tp):
        return True

    def spec(self, side):
        return MLAAttentionSpec(
            block_size=side.block,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.size,
            dtype=side.dtype,
            cache_dtype_str="auto",
        )

    def first_live(self, tokens):
        return 0

    def states(self, seed, tokens, side):
        return (numbers(seed, (tokens, self.size), side.dtype),)

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            for block in table:
                tensor[kernel_blocks(tensor, side.blocks, block)] = 0
            return
        for t in range(first, last):
            (block,), (slot,) = slots_of(side, rank, tensor, table, [t])
            if block is not None:
                tensor[block, 0, slot] = states[0][t]


@dataclass(frozen=True)
class Indexer:
    size: int = 128
    indexes = True

    def allows(self, tp):
        return True

    def spec(self, side):
        return MLAAttentionSpec(
            block_size=side.block,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=self.size + self.size // 128 * 4,
            dtype=torch.uint8,
            cache_role=SparseCacheRole.INDEXER,
        )

    def first_live(self, tokens):
        return 0

    def states(self, seed, tokens, side):
        generator = torch.Generator().manual_seed(seed)
        keys = torch.randint(0, 256, (tokens, self.size), generator=generator, dtype=torch.uint8)
        return keys, numbers(seed + 1, (tokens, self.size // 128), torch.float32)

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            for block in table:
                tensor[kernel_blocks(tensor, side.blocks, block)] = 0
            return
        tokens = tensor.shape[2]
        for t in range(first, last):
            (block,), (slot,) = slots_of(side, rank, tensor, table, [t])
            if block is None:
                continue
            # All keys of a kernel block, then all its scales.
            page = tensor[block].reshape(-1)
            assert page.data_ptr() == tensor[block].data_ptr()
            page[: tokens * self.size].view(tokens, self.size)[slot] = states[0][t]
            page[tokens * self.size :].view(torch.float32).view(tokens, -1)[slot] = states[1][t]


@dataclass(frozen=True)
class Recurrent:
    """A layer with states for the whole sequence. `sections` are those of its convolution: channels
    and the units that stay whole."""

    type: Mamba
    sections: tuple[tuple[int, int], ...]
    kernel: int
    state: tuple[int, ...] | None

    def allows(self, tp):
        whole = all(units % tp == 0 or units == 1 for _, units in self.sections)
        return whole and (self.state is None or self.state[0] % tp == 0)

    def shapes(self, side):
        """By vLLM's own calculators, which look at the process for the order of a convolution."""
        order_convolutions(side.conv)
        if self.type == Mamba.MAMBA1:
            return Shapes.mamba1_state_shape(side.tp, *self.state, self.kernel)
        if self.type == Mamba.MAMBA2:
            (inner, heads), (_, groups), _ = self.sections
            size, state = self.state[1:]
            return Shapes.mamba2_state_shape(
                side.tp, inner, groups, heads, size, state, self.kernel, side.spec
            )
        if self.type == Mamba.GDN_ATTN:
            (_, keys), _, (_, values) = self.sections
            value, key = self.state[1:]
            if keys == values and value == key:
                return Shapes.kda_state_shape(
                    side.tp, values, value, conv_kernel_size=self.kernel, num_spec=side.spec
                )
            return Shapes.gated_delta_net_state_shape(
                side.tp, keys, values, key, value, self.kernel, side.spec
            )
        if self.type == Mamba.SHORT_CONV:
            return Shapes.short_conv_state_shape(
                side.tp, self.sections[0][0], self.kernel, side.spec
            )
        heads, size, _ = self.state
        return Shapes.linear_attention_state_shape(heads, side.tp, size)

    def spec(self, side):
        shapes = self.shapes(side)
        both = (side.dtype, side.state_dtype)
        dtypes = both if len(shapes) == 2 else both[:1] if self.sections else both[1:]
        return MambaSpec(
            shapes=tuple(shapes),
            dtypes=dtypes,
            block_size=4096,
            mamba_type=self.type,
            num_speculative_blocks=side.spec,
        )

    def first_live(self, tokens):
        return 0

    def states(self, seed, tokens, side):
        conv = [
            numbers(seed + i, (channels, self.kernel - 1), side.dtype)
            for i, (channels, _) in enumerate(self.sections)
        ]
        state = self.state and numbers(seed + 7, self.state, side.state_dtype)
        return conv, state

    def write(self, side, rank, tensor, table, states, first, last):
        spec = self.spec(side)
        layer = SimpleNamespace(
            get_state_shape=lambda: spec.shapes, get_state_dtype=lambda: spec.dtypes
        )
        MambaBase.bind_kv_cache(layer, tensor)
        (slot,) = table
        if states is None:
            for state in layer.kv_cache:
                state[slot] = 0
            return
        conv, state = states
        if conv:
            held = layer.kv_cache[0][slot]
            held = held if side.conv == "DS" else held.T
            at = 0
            for numbers_, (channels, units) in zip(conv, self.sections):
                unit = channels // units
                own = max(1, units // side.tp)
                begin = 0 if units == 1 else rank * own
                share = numbers_[begin * unit : (begin + own) * unit]
                held[at : at + len(share), : self.kernel - 1] = share
                at += len(share)
            assert at == held.shape[0]
        if state is not None:
            share = state.shape[0] // side.tp
            layer.kv_cache[-1][slot] = state[rank * share : (rank + 1) * share]


def kernel_blocks(tensor, blocks, block):
    parts = tensor.shape[0] // blocks
    return slice(block * parts, (block + 1) * parts)


def slots_of(side, rank, tensor, table, positions):
    """Kernel block and slot of each token, None where another rank holds it."""
    tokens = tensor.shape[2]
    block_size = tokens * (tensor.shape[0] // side.blocks)
    rank = rank if side.token_rank is None else side.token_rank
    block, slot = [], []
    for t in positions:
        virtual = block_size * side.dcp
        offset = t % virtual
        if offset // side.turn % side.dcp != rank % side.dcp:
            block.append(None)
            slot.append(None)
            continue
        own = offset // (side.dcp * side.turn) * side.turn + offset % side.turn
        at = table[t // virtual] * block_size + own
        block.append(at // tokens)
        slot.append(at % tokens)
    return block, slot


def mamba1(channels=24, state=4, kernel=4):
    return Recurrent(Mamba.MAMBA1, ((channels, channels),), kernel, (channels, state))


def mamba2(heads=24, size=4, groups=12, state=8, kernel=4):
    sections = ((heads * size, heads), (groups * state, groups), (groups * state, groups))
    return Recurrent(Mamba.MAMBA2, sections, kernel, (heads, size, state))


def delta_net(keys=6, values=12, key=4, value=8, kernel=4):
    sections = ((keys * key, keys), (keys * key, keys), (values * value, values))
    return Recurrent(Mamba.GDN_ATTN, sections, kernel, (values, value, key))


def kda(heads=12, size=4, kernel=4):
    return Recurrent(Mamba.GDN_ATTN, ((heads * size, heads),) * 3, kernel, (heads, size, size))


def short_conv(channels=24, kernel=3):
    return Recurrent(Mamba.SHORT_CONV, ((channels, channels),), kernel, None)


def linear(heads=12, size=4):
    return Recurrent(Mamba.LINEAR, (), 1, (heads, size, size))


def is_mamba2(kept):
    return isinstance(kept, Recurrent) and kept.type == Mamba.MAMBA2
