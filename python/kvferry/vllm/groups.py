"""vLLM's cache groups as a hand-over sees them: which of a request's blocks count, and how much of a
prompt is left for D to compute."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from .describe.specs import (
    FULL,
    all_specs,
    current_slot,
    first_spec,
    is_replayed,
    is_state_group,
    keeps_window,
    sight_of,
)


class Groups:
    """The groups whose blocks are moved, by their index in block tables and manifests."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any) -> None:
        self.config, self.cache = vllm_config, kv_cache_config
        self.specs = [
            kv_cache_config.kv_cache_groups[group].kv_cache_spec
            for group in kv_cache_config.transfer_group_ids
        ]
        self.recurrent = [is_state_group(spec) for spec in self.specs]
        #: Whether what is kept of a request is of use at no other position than its last: states, and
        #: windows that have moved on.
        self.of_one_position = any(self.recurrent) or any(keeps_window(spec) for spec in self.specs)
        #: Whether a second request for the same prompt finds the blocks of the first: vLLM's cache of prefixes
        #: keeps all of them.
        caching = getattr(getattr(vllm_config, "cache_config", None), "enable_prefix_caching", False)
        self.shared = bool(caching) and not self.of_one_position
        #: How many of a prompt's last tokens are D's to compute: a recurrent state must not have seen
        #: them, a window must reach as far back as they look (once all tokens are computed, vLLM keeps
        #: it for the one after them), a cache that is replayed must be laid out for them, and what
        #: several draft modules write for them is a guess.
        self.held_back = max(1 if self._needs_last_token() else 0, vllm_config.num_prefill_lookahead_tokens - 1)

    def share(self, tokens: int) -> float:
        """The share of all blocks that a request of so many tokens takes at most, one more being computed. That
        of a state is the same for all of them."""
        blocks = 0
        for group in self.cache.kv_cache_groups:
            spec = group.kv_cache_spec
            most = -(-spec.max_memory_usage_bytes(self.config) // spec.page_size_bytes)
            blocks += most if is_state_group(spec) else min(most, tokens // spec.block_size + 1)
        share: float = blocks / self.cache.num_blocks
        return share

    def agreed(self, prompt: int) -> int:
        """What P and D must agree on, for a prompt of so many tokens."""
        return prompt - self.held_back if any(self.recurrent) and prompt > self.held_back else prompt

    def _needs_last_token(self) -> bool:
        everything = (group.kv_cache_spec for group in self.cache.kv_cache_groups)
        return (
            any(self.recurrent)
            or any(keeps_window(spec) for spec in self.specs)
            or any(is_replayed(spec) for spec in everything)
        )

    def tables(self, block_ids: Any, tokens: int) -> list[list[int]]:
        """A table for each group, from all that vLLM has for a request of so many tokens."""
        chosen = self.cache.select_transfer_block_ids(block_ids)
        return [self.table(group, ids, tokens) for group, ids in enumerate(chosen)]

    def alive(self, block_ids: Any, tokens: int) -> tuple[list[list[int]], list[int]]:
        """The same without what a window has left behind, and the position that each table starts with."""
        tables, first = [], []
        for table in self.tables(block_ids, tokens):
            dead = next((at for at, block in enumerate(table) if block), len(table))
            first.append(dead)
            tables.append(table[dead:])
        return tables, first

    def grown(self, manager: Any, request: str, tokens: int) -> list[list[int]]:
        """The tables of a request that is still computed, as far as it is complete. What a window or a
        state holds may change: it comes at the end."""
        ids = manager.get_block_ids(request)
        tables: list[list[int]] = []
        for group, index in enumerate(self.cache.transfer_group_ids):
            if self.recurrent[group] or keeps_window(self.specs[group]):
                tables.append([])
                continue
            size = manager.coordinator.single_type_managers[index].block_size
            tables.append(list(ids[index][: -(-tokens // size)]))
        return tables

    def block_sizes(self, manager: Any) -> list[int]:
        """How many tokens a block of each group holds."""
        managers = manager.coordinator.single_type_managers
        return [int(managers[index].block_size) for index in self.cache.transfer_group_ids]

    def table(self, group: int, ids: Iterable[int], tokens: int) -> list[int]:
        """A group's table. For a state it is the one slot that is current after so many tokens,
        without former states before it and the scratch of speculative tokens behind it."""
        blocks = list(ids)
        if not self.recurrent[group]:
            return blocks
        at = current_slot(self.specs[group], tokens)
        return blocks[at : at + 1]

    def cache_what_is_loaded(self, manager: Any, request: str, tokens: int) -> None:
        """Keeps vLLM from taking blocks for the prefix of other requests that are not loaded whole: of
        a window only what the next token sees is, wherever in a block that begins."""
        for group, index in enumerate(self.cache.transfer_group_ids):
            seen = max(first_seen(spec, tokens) for spec in all_specs(self.specs[group]))
            if seen:
                of_group = manager.coordinator.single_type_managers[index]
                done = of_group.num_cached_block.get(request, 0)
                # vLLM goes on from here when the blocks have been loaded.
                of_group.num_cached_block[request] = max(done, -(-seen // of_group.block_size))

    def cached(self, blocks: Sequence[Sequence[Any]], computed: int) -> list[int]:
        """How many tokens each group already holds, from all blocks that vLLM has for a request."""
        return [
            self.cached_in(group, blocks[index], computed)
            for group, index in enumerate(self.cache.transfer_group_ids)
        ]

    def cached_in(self, group: int, blocks: Sequence[Any], computed: int) -> int:
        """`computed` is what full attention holds; the blocks of others may have been given away
        earlier. A state always comes whole."""
        if self.recurrent[group]:
            return 0
        held = (block.block_hash_num_tokens for block in reversed(blocks))
        return min(computed, next((tokens for tokens in held if tokens), 0))


def first_seen(spec: Any, tokens: int) -> int:
    """The first token that the one after so many looks at."""
    sight = sight_of(spec)
    if sight == FULL:
        return 0
    first: int = max(0, tokens + 1 - sight["tokens"])
    alive: int = first - first % sight["chunk"] - sight["extra"]
    return max(0, alive)
