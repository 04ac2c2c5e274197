"""How the kernels of DeepSeek-V4 and V4.1 are called that belong to no attention back end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .inputs import Lengths, int32, namespace, numbers, slots_of, unknown
from .probe import BLOCK, POISON, CannotAsk, Kernel


class TwoParts:
    """Latents and their scales: those of a window, or compressed ones."""

    #: Numbers of a latent, and how many of them have scales, by the bytes that vLLM keeps of it.
    NUMBERS, SCALED = 512, {584: 448, 528: 512, 288: 512}
    blank = POISON

    def __init__(self, module: Any, spec: Any, lengths: Lengths) -> None:
        import torch

        self.states = lengths
        self._content = spec.state_content_size_bytes
        compressor = getattr(module, "compressor", None)
        insert = compressor and getattr(namespace(compressor), "rope_quant_insert", None)
        window = getattr(torch.ops._C, "fused_deepseek_v4_kv_rope_insert", None)
        self._write: Callable[..., Any]
        if insert is not None:
            self.writer = "rope_quant_insert"
            self._write = lambda cache, latents, positions, turns, slots: insert(
                latents, positions, turns, cache, slots, 1
            )
        elif window is not None and hasattr(module, "window_size"):
            # What vLLM calls for a window whose query is not there. In a model's own steps it is fused with that.
            self.writer, is_mx = "fused_deepseek_v4_kv_rope_insert", self._content != 584
            self._write = lambda cache, latents, positions, turns, slots: window(
                latents, cache, slots, positions, turns, cache.shape[1], None, is_mx
            )
        else:
            raise unknown(lengths)

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        import torch

        tokens, device = self.states["latent"][0], cache.device
        sizes = torch.ones(tokens, self.NUMBERS, device=device)
        sizes[:, : self.SCALED[self._content]] += 3 * (signs["latent.scale"] < 0).unsqueeze(-1)
        values = numbers((tokens, self.NUMBERS), device) * sizes * signs["latent"].unsqueeze(-1)
        positions, slots = (slots_of(first, tokens, device) for first in (0, BLOCK * tokens))
        self._write(cache.squeeze(1), values.to(torch.bfloat16), positions, _still(tokens, device), slots)


class Keys:
    """The keys of V4.1's indexer and their scales."""

    writer, blank = "indexer_k_norm_rope_store", POISON

    def __init__(self, store: Callable[..., Any], spec: Any, lengths: Lengths) -> None:
        self.states = lengths
        self._store = store
        self._is_fp4 = lengths["indexer"][1] * 2 == 128
        if not self._is_fp4 and lengths["indexer"][1] != 128:
            raise CannotAsk(f"its kernel takes keys of 128 numbers, not {lengths['indexer'][1]}")

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        import torch

        keys, scales, device = signs["indexer"], signs["indexer.scale"], cache.device
        sizes = (1 + 3 * (scales < 0)).repeat_interleave(128 // scales.shape[1], dim=1)
        # In a byte of two keys both have its sign.
        values = numbers((len(keys), 128), device) * keys.repeat_interleave(128 // keys.shape[1], dim=1) * sizes
        # Beside so large an addend the norm of a key is the same for all, and their sizes stay what they are.
        even = float(1 << 20)
        self._store(
            (values * 8).to(torch.bfloat16),
            slots_of(0, len(keys), device),
            _still(len(keys), device),
            torch.full((128,), 1024.0, dtype=torch.bfloat16, device=device),
            even,
            cache.squeeze(1),
            slots_of(BLOCK * len(keys), len(keys), device),
            1,
            self._is_fp4,
        )


def keys(module: Any, spec: Any, lengths: Lengths) -> Kernel | None:
    """The kernel of an indexer of V4 or V4.1; None for others."""
    here = type(module).__module__
    if here.startswith("vllm.models.deepseek_v4."):
        raise CannotAsk("it is fused with what compresses the keys")
    store = getattr(namespace(module), "indexer_k_norm_rope_store", None)
    return None if store is None else Keys(store, spec, lengths)


class Ring:
    """The rows of V4.1's open group."""

    writer, blank = "fused_save_compress_norm", POISON

    def __init__(self, module: Any, lengths: Lengths) -> None:
        self.states = lengths
        save = getattr(namespace(module), "fused_save_compress_norm", None)
        if save is None or lengths["ring"][::2] != (1, 1024):
            raise unknown(lengths)
        self._save: Callable[..., Any] = save

    def write(self, cache: Any, signs: Mapping[str, Any]) -> None:
        import torch

        rows, device = signs["ring"][0], cache.device
        values = numbers(tuple(rows.shape), device) * rows
        count = len(rows)
        self._save(
            values,
            slots_of(0, count, device),
            cache.squeeze(1),
            slots_of(BLOCK * count, count, device),
            int32([0, count], device),
            int32([0] * count, device),
            torch.ones(512, dtype=torch.bfloat16, device=device),
            1e-6,
            2,
            torch.empty(count, 512, dtype=torch.bfloat16, device=device),
        )


def _still(tokens: int, device: Any) -> Any:
    """Angles at which nothing turns: cosines of one, and sines of zero."""
    import torch

    half = torch.ones(tokens, 32, device=device)
    return torch.cat([half, torch.zeros_like(half)], dim=-1)
