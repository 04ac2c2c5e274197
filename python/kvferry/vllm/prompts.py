"""What a request's blocks depend on beside the model: its tokens, its adapter, its images. Two engines that are
sent one request may be given different ones: a prompt that each cuts to its own limit, an adapter that was
trained again under the same name."""

from __future__ import annotations

import hashlib
import json
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

from .logs import logger

Facts = dict[str, str]


def facts(request: Any, tokens: int) -> Facts:
    """What stands for each of them, for so many tokens. Nothing is said of what a request has not."""
    said: Facts = {}
    if request.prompt_embeds is not None:
        said["embeddings"] = _embeddings(request, tokens)
    if request.prompt_token_ids is not None and tokens <= len(request.all_token_ids):
        said["tokens"] = _short(array("Q", request.all_token_ids[:tokens]).tobytes())
    return said | surroundings(request, tokens)


def surroundings(request: Any, tokens: int | None = None) -> Facts:
    """The same without what its positions hold; for all of it where `tokens` is left out."""
    said: Facts = {}
    lora = request.lora_request
    if lora is not None:
        said["adapter"] = f"{lora.lora_name} {_weights(lora.lora_path)}"
    media = [
        f"{feature.mm_position.offset} {feature.identifier}"
        for feature in request.mm_features or ()
        if tokens is None or feature.mm_position.offset < tokens
    ]
    if media:
        said["media"] = _short("\0".join(media).encode())
    return said


def differ(here: Facts, there: Facts) -> str | None:
    """What differs, and both values."""
    for name in sorted(here.keys() | there.keys()):
        ours, theirs = here.get(name, "none"), there.get(name, "none")
        if ours != theirs:
            return f"its {name} differ: {theirs} there, {ours} here"
    return None


def read(given: Any) -> Facts:
    """Facts that came through a router: none from an engine that does not say them."""
    if not isinstance(given, dict):
        return {}
    return {str(name): str(value) for name, value in given.items()}


def _embeddings(request: Any, tokens: int) -> str:
    import torch

    held = request.prompt_embeds[:tokens].contiguous()
    return _short(held.view(torch.uint8).numpy().tobytes())


def _weights(path: str) -> str:
    """Stands for an adapter, whatever folder it is in; for one that is not in a folder of this machine, its
    name elsewhere."""
    try:
        files = sorted(file for file in Path(path).expanduser().glob("adapter_*") if file.is_file())
        # An adapter may be replaced where it lies.
        return _content(tuple((file, file.stat().st_mtime_ns) for file in files)) if files else path
    except (OSError, ValueError, AttributeError) as error:
        # The engine has read it, and goes on without us.
        logger.warning("kvferry: cannot read the adapter in %s: %s. It is known by its name alone", path, error)
        return path


@lru_cache(maxsize=1024)
def _content(files: tuple[tuple[Path, int], ...]) -> str:
    made = hashlib.sha256()
    for file, _ in files:
        if file.suffix == ".json":
            settings = json.loads(file.read_text())
            # Each machine has the model in a place of its own.
            settings.pop("base_model_name_or_path", None)
            made.update(json.dumps(settings, sort_keys=True).encode())
            continue
        with file.open("rb") as opened:
            made.update(hashlib.file_digest(opened, "sha256").digest())
    return made.hexdigest()[:16]


def _short(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
