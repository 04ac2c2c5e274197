"""Engines without an engine: the pools and views that vLLM itself lays out, on real memory.

A model here is a list of layers (`kept`). Groups and pools come from vLLM's `get_kv_cache_configs`,
tensors from `allocate_kv_cache`.
"""

import os
from dataclasses import replace
from types import SimpleNamespace

from stand_in import Backend, first_spec, get_kv_cache_configs  # first: it sets the environment up

# isort: split
import kvferry
import kvferry.vllm
import numpy as np
import torch
from kept import Attention, is_mamba2
from vllm.config import CacheConfig
from vllm.distributed.utils import get_pp_indices
from vllm.v1.attention.backend import MultipleOf
from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    MambaSpec,
    SlidingWindowSpec,
)
from vllm.v1.kv_cache_layout import KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes


class Cannot(Exception):
    """vLLM itself cannot run the case."""


class Engine:
    """All ranks of one side, each with a pool of its own."""

    def __init__(self, name, layers, side, layer_names=None, forced=False, told=None):
        self.name, self.side = name, side
        #: What else the model's configuration says.
        self.told = told or {}
        names = layer_names or [f"model.layers.{i}.mixer" for i in range(len(layers))]
        self.layers = dict(zip(names, layers))
        # What is several modules of one layer has one number.
        self.index = {layer: int(layer.split(".")[2]) for layer in names}
        self.count = len(self.told.get("layer_types", ())) or max(self.index.values()) + 1
        if not all(layer.allows(side.tp) for layer in layers):
            raise Cannot("tensor parallelism")
        if side.cpu and any(getattr(layer, "value", None) for layer in layers):
            raise Cannot("the CPU back end keeps keys and values of one size only")
        os.environ["VLLM_KV_CACHE_LAYOUT"] = side.layout
        Backend.sizes = [side.kernel] if side.kernel else [MultipleOf(16)]
        self.config = vllm_config = self._config()
        register_all_kvcache_specs(vllm_config)
        #: What the layers ask for; without the hybrid manager vLLM makes others of them.
        self.specs = specs = {layer: kept.spec(side) for layer, kept in self.layers.items()}
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
            Rank(self, *stage, number, tp, pcp)
            for number, stage in enumerate(self.stages)
            for pcp in range(side.pcp)
            for tp in range(side.tp)
        ]

    def _config(self):
        side = self.side
        cache = CacheConfig(block_size=side.block, enable_prefix_caching=side.caching)
        cache.num_gpu_blocks_override = side.blocks
        arch = [SimpleNamespace(total_num_kv_heads=1) for _ in range(self.count)]
        for layer, kept in self.layers.items():
            if isinstance(kept, Attention):
                arch[self.index[layer]].total_num_kv_heads = kept.heads
        indexer = any(getattr(kept, "indexes", False) for kept in self.layers.values())
        text = SimpleNamespace(index_head_dim=128 if indexer else None, **self.told)
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
            compilation_config=SimpleNamespace(
                static_forward_context={
                    layer: kept.module for layer, kept in self.layers.items() if hasattr(kept, "module")
                }
            ),
            parallel_config=SimpleNamespace(
                tensor_parallel_size=side.tp,
                pipeline_parallel_size=side.pp,
                decode_context_parallel_size=side.dcp,
                cp_kv_cache_interleave_size=side.turn,
                prefill_context_parallel_size=side.pcp,
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
            for _ in range(self.side.tp * self.side.pcp)
        ]

    def block_tokens(self, group):
        """Tokens between two entries of a group's table; None for states."""
        spec = first_spec(self.groups[group])
        if isinstance(spec, MambaSpec | CircularBufferSpec):
            return None
        return spec.block_size * (self.side.dcp if spec.dcp_sharded else 1)

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

    def write(self, tables, states, tokens, cached=None, zero=False, there=None):
        """Puts a request into the pools of all ranks as the layers' own kernels would; with `zero`,
        zeroes its own blocks first. `there` says from which token on each layer's numbers exist."""
        for rank in self.ranks:
            for layer in rank.kv_caches:
                kept, group = self.layers[layer], self.group_of(layer)
                size, table = self.block_tokens(group), tables[group]
                held = cached[group] if cached else 0
                if held == tokens:
                    continue
                # Turns go over the ranks of a prefill first, and then over those of tensors.
                turn = rank.tp * self.side.pcp + rank.pcp
                args = (replace(self.side, token_rank=turn), rank.tp, rank.kv_caches[layer])
                first = max(held, self.window(group)(tokens), there.get(layer, 0) if there else 0)
                own = table if size is None else [b for b in table[held // size :] if b]
                if zero:
                    kept.write(*args, own, None, first, tokens)
                kept.write(*args, table, states[layer], first, tokens)


class Rank:
    def __init__(self, engine, config, tensors, stage, tp, pcp=0):
        self.tp, self.pcp = tp, pcp
        self.kv_caches = tensors[pcp * engine.side.tp + tp]
        storage = next(iter(self.kv_caches.values())).untyped_storage()
        self.memory = torch.empty(0, dtype=torch.uint8).set_(storage)
        side = engine.side
        backend = "CPU_ATTN" if side.cpu else "FLASH_ATTN"
        groups = [kept.sections[1][1] for kept in engine.layers.values() if is_mamba2(kept)]
        self.config = config
        vllm_config = SimpleNamespace(**vars(engine.config))
        vllm_config.compilation_config = SimpleNamespace(
            static_forward_context={
                **engine.config.compilation_config.static_forward_context,
                **{
                    layer: kept.module_on(side, tp)
                    for layer, kept in engine.layers.items()
                    if hasattr(kept, "module_on")
                },
            }
        )
        self.facts = dict(
            tp_rank=tp,
            pp_rank=stage,
            pcp_rank=pcp,
            engine=engine.name,
            conv_order=side.conv,
            backends={
                layer: getattr(engine.layers[layer], "backend", backend) for layer in self.kv_caches
            },
            layer_specs=engine.specs,
            mamba_groups=groups[0] if groups else None,
        )
        self.manifest = kvferry.vllm.manifest(vllm_config, config, self.kv_caches, **self.facts)


def poison(engine, seed):
    # Of numpy: torch draws every byte by itself, which took longer than all else that is done with them.
    draw = np.random.default_rng(seed)
    for rank in engine.ranks:
        rank.memory.numpy()[:] = np.frombuffer(draw.bytes(len(rank.memory)), np.uint8)
