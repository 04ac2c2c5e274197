"""Engines without an engine: the pools and views that vLLM itself lays out, on real memory.

A model here is a list of layers. Specs are vLLM's, state shapes come from vLLM's calculators, groups
and pools from `get_kv_cache_configs`, tensors from `allocate_kv_cache`. What a layer writes where is
told once more by hand, in the way its kernels index a cache: that is what kvferry is judged by.
"""

import os
from dataclasses import dataclass
from types import SimpleNamespace

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRANSFORMERS_OFFLINE="1",
    VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="ERROR",
    CUDA_VISIBLE_DEVICES="",
)

import kvferry  # noqa: E402
import kvferry.vllm  # noqa: E402
import torch  # noqa: E402
from vllm import _custom_ops as ops  # noqa: E402
from vllm.config import CacheConfig  # noqa: E402
from vllm.distributed.utils import get_pp_indices  # noqa: E402
from vllm.model_executor.layers.mamba import mamba_utils  # noqa: E402
from vllm.model_executor.layers.mamba.abstract import MambaBase  # noqa: E402
from vllm.v1.attention.backend import AttentionBackend, MultipleOf  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import _get_attn_isa  # noqa: E402
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum as Mamba  # noqa: E402
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout  # noqa: E402
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs  # noqa: E402
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs  # noqa: E402
from vllm.v1.kv_cache_interface import (  # noqa: E402
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    SparseCacheRole,
    UniformTypeKVCacheSpecs,
)
from vllm.v1.kv_cache_layout import KVCacheLayout  # noqa: E402
from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes  # noqa: E402

Shapes = mamba_utils.MambaStateShapeCalculator


class Backend(AttentionBackend):
    """An attention back end of which only the block sizes matter."""

    sizes: list = [MultipleOf(16)]

    @staticmethod
    def get_name():
        return "FLASH_ATTN"

    @staticmethod
    def get_impl_cls():
        raise NotImplementedError

    @staticmethod
    def get_builder_cls():
        raise NotImplementedError

    @classmethod
    def get_supported_kernel_block_sizes(cls, kv_cache_spec=None):
        return cls.sizes


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
    hma: bool = True
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


def order_convolutions(order):
    os.environ["VLLM_SSM_CONV_STATE_LAYOUT"] = order
    mamba_utils.get_conv_state_layout.cache_clear()


def kernel_blocks(tensor, blocks, block):
    parts = tensor.shape[0] // blocks
    return slice(block * parts, (block + 1) * parts)


def slots_of(side, rank, tensor, table, positions):
    """Kernel block and slot of each token, None where another rank holds it."""
    tokens = tensor.shape[2]
    block_size = tokens * (tensor.shape[0] // side.blocks)
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


class Cannot(Exception):
    """vLLM itself cannot run the case."""


class Engine:
    """All ranks of one side, each with a pool of its own."""

    def __init__(self, name, layers, side, layer_names=None, forced=False):
        self.name, self.side = name, side
        names = layer_names or [f"model.layers.{i}.mixer" for i in range(len(layers))]
        self.layers = dict(zip(names, layers))
        # What is several modules of one layer has one number.
        self.index = {layer: int(layer.split(".")[2]) for layer in names}
        self.count = max(self.index.values()) + 1
        if not all(layer.allows(side.tp) for layer in layers):
            raise Cannot("tensor parallelism")
        if side.cpu and any(getattr(layer, "value", None) for layer in layers):
            raise Cannot("the CPU back end keeps keys and values of one size only")
        os.environ["VLLM_KV_CACHE_LAYOUT"] = side.layout
        Backend.sizes = [side.kernel] if side.kernel else [MultipleOf(16)]
        self.config = vllm_config = self._config()
        register_all_kvcache_specs(vllm_config)
        specs = {layer: kept.spec(side) for layer, kept in self.layers.items()}
        stages = [get_pp_indices(self.count, stage, side.pp) for stage in range(side.pp)]
        workers = [
            {layer: spec for layer, spec in specs.items() if start <= self.index[layer] < end}
            for start, end in stages
        ]
        try:
            names = [layout.name for layout in KVCacheLayout]
            if forced:
                vllm_config.cache_config.kv_cache_layout = side.layout
            else:
                resolve_kv_cache_layout(vllm_config, [names], specs.values())
            if vllm_config.cache_config.get_resolved_kv_cache_layout().name != side.layout:
                raise Cannot("layout")
            configs = get_kv_cache_configs(vllm_config, workers, [1 << 40] * side.pp)
            # Every stage's configuration, and the tensors of each of its ranks.
            self.stages = [
                self._stage(config, worker) for config, worker in zip(configs, workers)
            ]
        except (ValueError, NotImplementedError, AssertionError) as error:
            raise Cannot(str(error)) from error
        self.groups = self.stages[0][0].kv_cache_groups
        self.ranks = [
            Rank(self, *stage, number, tp)
            for number, stage in enumerate(self.stages)
            for tp in range(side.tp)
        ]

    def _config(self):
        side = self.side
        cache = CacheConfig(block_size=side.block, enable_prefix_caching=False)
        cache.num_gpu_blocks_override = side.blocks
        arch = [SimpleNamespace(total_num_kv_heads=1) for _ in range(self.count)]
        for layer, kept in self.layers.items():
            if isinstance(kept, Attention):
                arch[self.index[layer]].total_num_kv_heads = kept.heads
        indexer = any(isinstance(kept, Indexer) for kept in self.layers.values())
        text = SimpleNamespace(index_head_dim=128 if indexer else None)
        return SimpleNamespace(
            model_config=SimpleNamespace(
                model="tiny",
                dtype=side.dtype,
                hf_config=SimpleNamespace(model_type="tiny"),
                hf_text_config=text,
                model_arch_config=arch,
                max_model_len=64,
                original_max_model_len=64,
                get_total_num_hidden_layers=lambda: self.count,
            ),
            cache_config=cache,
            parallel_config=SimpleNamespace(
                tensor_parallel_size=side.tp,
                pipeline_parallel_size=side.pp,
                decode_context_parallel_size=side.dcp,
                cp_kv_cache_interleave_size=side.turn,
            ),
            scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=not side.hma),
            attention_config=SimpleNamespace(hisparse_config=None),
            kv_transfer_config=None,
            speculative_config=None,
            num_speculative_tokens=side.spec,
            num_prefill_lookahead_tokens=0,
            max_in_flight_tokens=64,
        )

    def _stage(self, config, worker):
        placed = {layer for tensor in config.kv_cache_tensors for layer in tensor.layers}
        if not placed or placed - set(worker):
            # vLLM would bind memory to layers that this stage does not have.
            raise Cannot("a stage without layers of a group")
        groups = [
            [SimpleNamespace(backend=Backend, kv_cache_spec=first_spec(group))]
            for group in config.kv_cache_groups
        ]
        kernels = prepare_kernel_block_sizes(config, groups)
        layout = self.config.cache_config.get_resolved_kv_cache_layout()
        return config, [
            allocate_kv_cache(config, torch.device("cpu"), layout, kernels)
            for _ in range(self.side.tp)
        ]

    def block_tokens(self, group):
        """Tokens between two entries of a group's table; None for states."""
        spec = first_spec(self.groups[group])
        return None if isinstance(spec, MambaSpec) else spec.block_size * self.side.dcp

    def kept(self, group):
        """The first layer of a group, on any stage."""
        for config, _ in self.stages:
            for layer in config.kv_cache_groups[group].layer_names:
                return self.layers[layer]
        raise AssertionError("a group without layers")

    def window(self, group):
        """What the group itself keeps: without the hybrid manager it keeps all."""
        spec = first_spec(self.groups[group])
        kept = self.kept(group)
        narrow = isinstance(spec, SlidingWindowSpec | ChunkedLocalAttentionSpec)
        return kept.first_live if narrow else lambda tokens: 0

    def tables(self, draw, tokens, cached=None):
        """Block tables of one request: random ids, no id twice, dead entries 0."""
        free = list(range(1, self.side.blocks))
        draw.shuffle(free)
        tables = []
        for group in range(len(self.groups)):
            size = self.block_tokens(group)
            if size is None:
                tables.append([free.pop()] if tokens else [])
                continue
            live = self.window(group)(tokens) // size
            entries = -(-tokens // size)
            tables.append([0 if at < live else free.pop() for at in range(entries)])
        return tables

    def group_of(self, layer):
        for config, _ in self.stages:
            for number, group in enumerate(config.kv_cache_groups):
                if layer in group.layer_names:
                    return number
        raise AssertionError(layer)

    def write(self, tables, states, tokens, cached=None, zero=False):
        """Puts a request into the pools of all ranks as the layers' own kernels would; with `zero`,
        zeroes its own blocks first."""
        for rank in self.ranks:
            for layer in rank.kv_caches:
                kept, group = self.layers[layer], self.group_of(layer)
                size, table = self.block_tokens(group), tables[group]
                held = cached[group] if cached else 0
                if held == tokens:
                    continue
                args = (self.side, rank.tp, rank.kv_caches[layer])
                first = max(held, self.window(group)(tokens))
                own = table if size is None else [b for b in table[held // size :] if b]
                if zero:
                    kept.write(*args, own, None, first, tokens)
                kept.write(*args, table, states[layer], first, tokens)


class Rank:
    def __init__(self, engine, config, tensors, stage, tp):
        self.tp, self.kv_caches = tp, tensors[tp]
        storage = next(iter(self.kv_caches.values())).untyped_storage()
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        side = engine.side
        backend = "CPU_ATTN" if side.cpu else "FLASH_ATTN"
        groups = [kept.sections[1][1] for kept in engine.layers.values() if is_mamba2(kept)]
        self.manifest = kvferry.vllm.manifest(
            engine.config,
            config,
            self.kv_caches,
            tp_rank=tp,
            pp_rank=stage,
            engine=engine.name,
            conv_order=side.conv,
            backends=dict.fromkeys(self.kv_caches, backend),
            mamba_groups=groups[0] if groups else None,
        )


def is_mamba2(kept):
    return isinstance(kept, Recurrent) and kept.type == Mamba.MAMBA2


def first_spec(group):
    spec = group.kv_cache_spec
    if isinstance(spec, UniformTypeKVCacheSpecs):
        return next(iter(spec.kv_cache_specs.values()))
    return spec


def poison(engine, seed):
    generator = torch.Generator().manual_seed(seed)
    for rank in engine.ranks:
        rank.memory.copy_(
            torch.randint(0, 256, rank.memory.shape, generator=generator, dtype=torch.uint8)
        )
