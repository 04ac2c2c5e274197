"""What makes equal shapes mean equal things, in one form for every engine: each rewrites a model's configuration in its
own way, and two engines may serve each other only where they mean the same."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ENGINES = ("SGLang", "vLLM")
#: By family (`model_type`): the engines from whose caches one of another kind gave the tokens of one engine alone.
#: `docs/sglang.md` says how that was shown.
SHOWN: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("qwen3", "nemotron_h", "falcon_h1", "lfm2", "gemma3_text", "qwen3_5_text"), ENGINES),
    # SGLang computes no prompt of it on a CPU.
    "deepseek_v3": ("vLLM",),
}

#: What DeepSeek-V4 and V4.1 take of a scaled position encoding, whatever else their configuration says of it.
_SCALED = ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")
#: Samples of each file of weights, spread over it, and bytes of each: 64 KiB in all.
_SAMPLES, _SAMPLE = 64, 1024
#: As the format of these files says.
_LONGEST_HEADER = 100_000_000


def identity(
    engine: str,
    name: str,
    model: Any,
    form: str,
    weights: str | None = None,
    *,
    gives: bool = True,
    takes: bool = True,
    tries_others: bool = False,
) -> dict[str, str]:
    """The facts of an engine of this kind, which `gives` caches, `takes` them, or both: by which name it was given the
    model, its own idea of the model's configuration, and the format of its numbers. With `tries_others` it takes from
    engines of any other kind, whatever the family."""
    text, family = model.hf_text_config, str(model.hf_config.model_type)
    made = {"model": name, "family": family, "format": form}
    for fact in ("revision", "quantization"):
        if said := getattr(model, fact, None):
            made[fact] = str(said)
    if weights:
        made["weights"] = weights
    if given := _told(text):
        made["positions"] = positions(given)
    shared = getattr(text, "num_kv_shared_layers", None)
    if shared is not None:
        made["num_kv_shared_layers"] = str(shared)
    # Where both sides say who they are, only engines of one kind are the same.
    shown = SHOWN.get(family, ())
    others = [other for other in ENGINES if other != engine and other not in shown]
    if (gives and engine not in shown) or (takes and others and not tries_others):
        made["engine"] = (
            f"{engine} (of models of the type '{family}' this was not shown between engines of two kinds; the option "
            "'other_engines' of the decode engine lets it try)"
        )
    return made


def _told(text: Any) -> Any:
    """A model's position encoding as its configuration says it, whichever version of an engine has read that."""
    told = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None)
    theta = getattr(text, "compress_rope_theta", None)
    if theta is None:
        return told
    # DeepSeek-V4 has one for its windows, which is plain, and one for what is compressed. Up to vLLM 0.32 its
    # configuration says what scales the latter; since then both, and more than the model looks at.
    told = told or {}
    scaled = told["compress"] if isinstance(told.get("compress"), dict) else told
    compressed = {"rope_theta": float(theta)}
    if (scaled.get("rope_type") or scaled.get("type") or "default") != "default":
        compressed |= {name: float(scaled[name]) for name in _SCALED if name in scaled}
    plain = getattr(text, "rope_theta", None)
    return {"main": {"rope_theta": plain if plain is None else float(plain)}, "compress": compressed}


def positions(given: Mapping[str, Any]) -> str:
    """How a model turns its keys: without what engines add that changes nothing."""
    return json.dumps(_plain(given), sort_keys=True, default=str)


def _plain(given: Mapping[str, Any]) -> dict[str, Any]:
    if all(isinstance(it, Mapping) for it in given.values()):
        # One for each kind of layers.
        return {name: _plain(it) for name, it in given.items()}
    # `type` is what `rope_type` was called before; two engines have words of their own for DeepSeek's.
    kind = str(given.get("rope_type") or given.get("type") or "default").removeprefix("deepseek_")
    made: dict[str, Any] = {"rope_type": kind}
    for name, value in given.items():
        if name in ("rope_type", "type") or value is None or (name, value) == ("partial_rotary_factor", 1):
            continue
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        made[name] = float(value) if is_number else value
    return made


def weights(model: str, revision: str | None = None, cache: str | None = None) -> str | None:
    """Stands for the weights that an engine has loaded: the header of each file of safetensors, and samples of its
    numbers. Two models of one configuration differ in it. None where there are no such files on this machine."""
    files = sorted(_folder(model, revision, cache).glob("*.safetensors"))
    made = hashlib.sha256()
    try:
        for file in files:
            made.update(_sampled(file))
    except (OSError, struct.error, ValueError):
        # The engine has read them in some way that we do not know.
        return None
    return made.hexdigest()[:32] if files else None


def _folder(model: str, revision: str | None, cache: str | None) -> Path:
    if (path := Path(model).expanduser()).is_dir():
        return path
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(model, revision=revision, cache_dir=cache, local_files_only=True))
    except Exception:
        # Whatever it is, it is no folder here.
        return path


def _sampled(path: Path) -> bytes:
    """Of one file; whatever it is called, and in whatever order it lists its tensors."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _LONGEST_HEADER:
            raise ValueError(f"{path} has a header of {length} bytes")
        made = hashlib.sha256(file.read(length))
        first, size = 8 + length, path.stat().st_size
        for at in range(_SAMPLES):
            file.seek(first + max(0, size - first - _SAMPLE) * at // (_SAMPLES - 1))
            made.update(file.read(_SAMPLE))
    return made.digest()
