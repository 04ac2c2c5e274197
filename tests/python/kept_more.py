"""What the rarer layers keep, and how their kernels index a cache: see `kept`.

Specs come from vLLM's own layers where these can be asked without a GPU, and the views of a page from
vLLM's own functions.
"""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from kept import Attention, kernel_blocks, numbers, slots_of  # first: it sets the environment up

# isort: split
import torch
from vllm.models.deepseek_v4 import attention as v4
from vllm.models.deepseek_v4.compressor import CompressorStateCache
from vllm.models.deepseek_v41 import attention as v41
from vllm.models.deepseek_v41.compressor import CompressorStateCache as RingStateCache
from vllm.utils.torch_utils import nvfp4_kv_cache_full_dim, nvfp4_split_data_scale
from vllm.v1.attention.backends.mla.sparse_swa import DeepseekV4SWACache
from vllm.v1.kv_cache_interface import (
    CircularBufferSpec,
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVQuantMode,
    MLAAttentionSpec,
    RSWASpec,
    SinkFullAttentionSpec,
    SparseCacheRole,
)


def octets(seed, shape):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)


@dataclass(frozen=True)
class Rows:
    """One vector for every `ratio` tokens; its last bytes, the scales, may lie behind all others of a
    kernel block."""

    make: Any = field(hash=False)
    backend: str
    ratio: int = 1
    scales: int = 0
    window: int | None = None
    indexes: bool = False

    def allows(self, tp):
        return True

    def spec(self, side):
        return self.make(side)

    def first_live(self, tokens):
        return max(0, tokens + 1 - self.window) if self.window else 0

    def states(self, seed, tokens, side):
        return octets(seed, (tokens // self.ratio, self.spec(side).state_content_size_bytes))

    def write(self, side, rank, tensor, table, states, first, last):
        entries, parts = tensor.shape[2], tensor.shape[0] // side.blocks
        raw = tensor.view(torch.uint8)
        if states is None:
            for block in table:
                raw[kernel_blocks(tensor, side.blocks, block)] = 0
            return
        data = raw.shape[3] - self.scales
        for entry in range(first // self.ratio, last // self.ratio):
            at = table[entry // (entries * parts)] * parts * entries + entry % (entries * parts)
            block, slot = at // entries, at % entries
            page = raw[block].reshape(-1)
            assert page.data_ptr() == raw[block].data_ptr()
            page[: entries * data].view(entries, data)[slot] = states[entry, :data]
            if self.scales:
                page[entries * data :].view(entries, self.scales)[slot] = states[entry, data:]


def config(side, cache="fp8_ds_mla"):
    return SimpleNamespace(cache_config=SimpleNamespace(block_size=side.block, cache_dtype=cache))


def v4_latent(ratio, cache="fp8_ds_mla"):
    """DeepSeek-V4's compressed latents."""
    packed = cache == "fp8_ds_mla"

    def make(side):
        layer = SimpleNamespace(
            compress_ratio=ratio,
            kv_cache_dtype=cache,
            head_dim=512,
            kv_cache_torch_dtype=torch.uint8 if packed else torch.bfloat16,
        )
        return v4.DeepseekV4Attention.get_kv_cache_spec(layer, config(side, cache))

    return Rows(make, "FLASHMLA_SPARSE_DSV4", ratio, 8 if packed else 0)


def v4_window(cache="fp8_ds_mla", content=584, scales=8, window=128, block=64):
    """The latents of the last tokens."""
    packed = cache.endswith("ds_mla")

    def make(side):
        layer = SimpleNamespace(
            bounded_replay=False,
            block_size=block,
            head_dim=512,
            dtype=torch.uint8 if packed else torch.bfloat16,
            window_size=window,
            packed_bytes_per_token=content,
            packed_page_alignment=576 if content == 584 else 512,
            cache_config=SimpleNamespace(cache_dtype=cache),
        )
        return DeepseekV4SWACache.get_kv_cache_spec(layer, None)

    return Rows(make, "DEEPSEEK_SPARSE_SWA", 1, scales if packed else 0, window)


def v4_indexer(cache="fp8_ds_mla", content=132):
    """Keys of 8 bits with a scale of 4 bytes, or (68 bytes) of 4 bits with four of one."""

    def make(side):
        layer = SimpleNamespace(
            cache_config=SimpleNamespace(block_size=side.block),
            head_dim=content,
            dtype=torch.uint8,
            compress_ratio=4,
        )
        return v4.DeepseekV4IndexerCache.get_kv_cache_spec(layer, config(side, cache))

    return Rows(make, "DEEPSEEK_V4_INDEXER", 4, 4, indexes=True)


def v4_compressor(ratio, size, cache="fp8_ds_mla"):
    """What a compressor has not closed yet: for each token, numbers and scores."""
    overlap = 2 if ratio == 4 else 1

    def make(side):
        layer = SimpleNamespace(
            block_size=4 if ratio == 4 else 8,
            state_dim=2 * overlap * size,
            dtype=torch.float32,
            sliding_window=overlap * ratio,
        )
        return CompressorStateCache.get_kv_cache_spec(layer, config(side, cache))

    return Rows(make, "CompressorBackend", 1, 0, overlap * ratio)


def v41_latent(ratio, cache="fp8_ds_mla"):
    content, scales = (528, 16) if cache == "fp8_ds_mla" else (288, 32)

    def make(side):
        layer = SimpleNamespace(
            is_kv_source=True,
            compress_ratio=ratio,
            kv_cache_dtype=cache,
            head_dim=512,
            kv_page_alignment=512,
            compressed_bytes_per_token=content,
        )
        return v41.DeepseekV4Attention.get_kv_cache_spec(layer, config(side, cache))

    return Rows(make, "FLASHMLA_MEGA_ATTN_DSV41", ratio, scales)


@dataclass(frozen=True)
class Tiled(Rows):
    """The keys of an indexer as ROCm's kernels have them: in tiles of several tokens, the first bytes of
    all tokens of a tile, then the next."""

    tokens: int = 16
    bytes: int = 16
    lanes: int = 1

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            return super().write(side, rank, tensor, table, states, first, last)
        entries, data = tensor.shape[2], tensor.shape[3] - self.scales
        assert tensor.shape[0] == side.blocks
        deep = self.scales // self.lanes
        for entry in range(first // self.ratio, last // self.ratio):
            page = tensor[table[entry // entries]].reshape(-1)
            assert page.data_ptr() == tensor[table[entry // entries]].data_ptr()
            tile, lane = divmod(entry % entries, self.tokens)
            for byte in range(data):
                at = tile * self.tokens * data + byte // self.bytes * self.tokens * self.bytes
                page[at + lane * self.bytes + byte % self.bytes] = states[entry, byte]
            for scale in range(self.scales):
                if self.lanes > 1:
                    at = tile * self.tokens * self.scales + scale % self.lanes * self.tokens * deep
                    at += lane * deep + scale // self.lanes
                else:
                    at = entry % entries * self.scales + scale
                page[entries * data + at] = states[entry, data + scale]


def rocm_indexer(content=132, tokens=16, lanes=1, backend="DEEPSEEK_V32_INDEXER", ratio=1):
    def make(side):
        return MLAAttentionSpec(
            block_size=side.block,
            num_kv_heads=1,
            max_tp_shards=1,
            head_size=content,
            dtype=torch.uint8,
            cache_role=SparseCacheRole.INDEXER,
            tokens_per_state=ratio,
        )

    return Tiled(make, backend, ratio, 4, indexes=True, tokens=tokens, lanes=lanes)


@dataclass(frozen=True)
class Ring:
    """The rows of a compressor's open group: one ring for a sequence."""

    parts: int = 1
    size: int = 64
    backend: str = "CompressorBackend"

    def allows(self, tp):
        return True

    def spec(self, side):
        if self.parts == 1:
            rows = side.spec + 2
            layer = SimpleNamespace(
                block_size=max(8, 1 << (rows - 1).bit_length()), state_dim=self.size, dtype=torch.float32
            )
            return RingStateCache.get_kv_cache_spec(layer, None)
        return CircularBufferSpec(
            block_size=8,
            num_kv_heads=self.parts,
            head_size=self.size,
            head_size_v=0,
            dtype=torch.bfloat16,
            dcp_sharded=False,
        )

    def first_live(self, tokens):
        return 0

    def states(self, seed, tokens, side):
        spec = self.spec(side)
        return numbers(seed, (self.parts, spec.block_size, self.size), spec.dtype)

    def write(self, side, rank, tensor, table, states, first, last):
        (slot,) = table
        tensor[slot] = 0 if states is None else states


@dataclass(frozen=True)
class Apart(Attention):
    """Keys of all heads in one slot, values in the other."""

    backend = "B12X"

    def spec(self, side):
        spec = super().spec(side)
        content = spec.num_kv_heads * spec.head_size * spec.dtype.itemsize
        return replace(spec, num_head_slots=2, state_content_bytes=content)

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            return super().write(side, rank, tensor, table, states, first, last)
        positions = range(first, last)
        block, slot = slots_of(side, rank, tensor, table, positions)
        # As `B12xPagedAttentionImpl._kv_cache_views` has it.
        views = [it.unflatten(-1, (-1, self.key)) for it in tensor.unbind(1)]
        for view, state in zip(views, states):
            view[block, slot] = state[first:last, self.own_heads(side, rank)]


@dataclass(frozen=True)
class Nvfp4(Attention):
    """Four-bit numbers and their scales, in head slots of their own."""

    key: int = 64
    backend = "FLASHINFER"

    def spec(self, side):
        # As FlashInferBackend.customize_spec does, which needs FlashInfer to load.
        return FullAttentionSpec(
            block_size=side.block,
            num_kv_heads=max(1, self.heads // side.tp),
            head_size=self.key,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.NVFP4,
            num_head_slots=2 * max(1, self.heads // side.tp),
            state_content_bytes=nvfp4_kv_cache_full_dim(self.key),
        )

    def states(self, seed, tokens, side):
        content = nvfp4_kv_cache_full_dim(self.key)
        return tuple(octets(seed + i, (tokens, self.heads, content)) for i in range(2))

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            return super().write(side, rank, tensor, table, states, first, last)
        block, slot = slots_of(side, rank, tensor, table, range(first, last))
        for held, state in zip(tensor.split(tensor.shape[1] // 2, dim=1), states):
            own = state[first:last, self.own_heads(side, rank)]
            data, scale = nvfp4_split_data_scale(held)
            data[block, :, slot] = own[..., : data.shape[-1]]
            scale.view(torch.uint8)[block, :, slot] = own[..., data.shape[-1] :]


@dataclass(frozen=True)
class Nvfp4ByHead(Nvfp4):
    """The slots of a head lie together: key, value, key, value."""

    backend = "CUTLASS_MSA"

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            return super().write(side, rank, tensor, table, states, first, last)
        block, slot = slots_of(side, rank, tensor, table, range(first, last))
        for side_, state in enumerate(states):
            own = state[first:last, self.own_heads(side, rank)]
            for head in range(own.shape[1]):
                # A slot is that head's numbers of all tokens, and then its scales.
                slots = tensor[:, 2 * head + side_ : 2 * head + side_ + 1]
                data, scale = nvfp4_split_data_scale(slots)
                data[block, 0, slot] = own[:, head, : data.shape[-1]]
                scale.view(torch.uint8)[block, 0, slot] = own[:, head, data.shape[-1] :]


@dataclass(frozen=True)
class Hidden:
    """Hidden states of several layers."""

    layers: int = 3
    size: int = 32
    backend: str = "CACHE_ONLY_ATTN"

    def allows(self, tp):
        return True

    def spec(self, side):
        return HiddenStateCacheSpec(
            block_size=side.block, num_kv_heads=self.layers, head_size=self.size, dtype=side.dtype
        )

    def first_live(self, tokens):
        return 0

    def states(self, seed, tokens, side):
        return numbers(seed, (tokens, self.layers, self.size), side.dtype)

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            for block in table:
                tensor[kernel_blocks(tensor, side.blocks, block)] = 0
            return
        block, slot = slots_of(side, rank, tensor, table, range(first, last))
        tensor[block, :, slot] = states[first:last]


@dataclass(frozen=True)
class Records(Attention):
    """Quantised keys and values with a scale each, for every token and head."""

    def spec(self, side):
        spec = super().spec(side)
        content = 2 * (self.key + 4)
        return replace(
            spec,
            dtype=torch.uint8,
            kv_quant_mode=KVQuantMode.FP8_PER_TOKEN_HEAD,
            state_content_bytes=content,
        )

    def states(self, seed, tokens, side):
        return tuple(octets(seed + i, (tokens, self.heads, self.key + 4)) for i in range(2))

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            return super().write(side, rank, tensor, table, states, first, last)
        block, slot = slots_of(side, rank, tensor, table, range(first, last))
        own = [state[first:last, self.own_heads(side, rank)] for state in states]
        tensor[block, :, slot] = torch.cat(own, dim=-1)


@dataclass(frozen=True)
class Scaled(Attention):
    """Keys and values of eight bits, with scales that are the layer's."""

    scales: tuple = (1.0, 1.0)

    @property
    def module(self):
        keys, values = (torch.tensor(scale) for scale in self.scales)
        by_head = any(isinstance(scale, tuple) for scale in self.scales)
        scheme = {"strategy": "attn_head" if by_head else "tensor"}
        method = SimpleNamespace(quant_config=SimpleNamespace(kv_cache_scheme=scheme))
        return SimpleNamespace(_k_scale=keys, _v_scale=values, kv_cache_dtype="fp8", quant_method=method)

    def module_on(self, side, rank):
        """Of scales for each head, a rank has those of its own."""
        own = self.own_heads(side, rank)
        scales = [scale[own] if isinstance(scale, tuple) else scale for scale in self.scales]
        return replace(self, scales=tuple(scales)).module

    def spec(self, side):
        mode = KVQuantMode.FP8_PER_TENSOR
        return replace(super().spec(side), dtype=torch.uint8, kv_quant_mode=mode)

    def states(self, seed, tokens, side):
        return tuple(octets(seed + i, (tokens, self.heads, self.key)) for i in range(2))


@dataclass(frozen=True)
class Like(Attention):
    """Attention with a spec of its own class."""

    cls: type = FullAttentionSpec
    facts: tuple = ()

    def spec(self, side):
        spec = super().spec(side)
        given = {name: getattr(spec, name) for name in ("block_size", "num_kv_heads", "head_size", "dtype")}
        return self.cls(**given, **dict(self.facts))


def windowed_answers(heads=4):
    return Like(heads, cls=RSWASpec, facts=(("rswa_window", 8),))


def with_sinks(heads=4):
    return Like(heads, cls=SinkFullAttentionSpec, facts=(("sink_len", 16),))


@dataclass(frozen=True)
class Vectors(Attention):
    """One vector for each head and token of a short window."""

    window: int | None = 4
    backend = "INKLING_SCONV_SWA"

    def spec(self, side):
        return replace(super().spec(side), head_size_v=0)

    def states(self, seed, tokens, side):
        return (numbers(seed, (tokens, self.heads, self.key), side.dtype),)

    def write(self, side, rank, tensor, table, states, first, last):
        if states is None:
            return super().write(side, rank, tensor, table, states, first, last)
        block, slot = slots_of(side, rank, tensor, table, range(first, last))
        tensor[block, :, slot] = states[0][first:last, self.own_heads(side, rank)]
