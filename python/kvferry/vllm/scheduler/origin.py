"""What a request's cache is computed from: its tokens, and whatever else makes vLLM tell blocks of the same
tokens apart. P and D each make it from the request that they have themselves, and what P has computed from
anything else D does not use. The ticket, too, comes through a router and a client, and may be another
request's; and two engines that are sent one request may be given different ones: a prompt that each cuts to its own
limit, an adapter that was trained again under the same name."""

from __future__ import annotations

import hashlib
import json
from array import array
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from ..._origin import digest, origin
from ..logs import logger

#: A few digits of each part, by its name: enough to say what differs, not to prove that nothing does.
Facts = dict[str, str]


class Origins:
    def __init__(self, vllm_config: Any) -> None:
        media = vllm_config.model_config.multimodal_config
        #: Whether vLLM names images and the like by their content. With both of its caches off it does not.
        self.media_are_named = (
            media is None
            or media.mm_processor_cache_gb != 0
            or vllm_config.cache_config.enable_prefix_caching
        )
        self.warned = False

    def of(self, request: Any, tokens: int) -> bytes | None:
        """Stands for the first tokens of a request, and for all that goes with them, in 16 bytes. None where
        there are not so many tokens."""
        parts = self._parts(request, tokens)
        return None if parts is None else origin(parts, tokens)

    def facts(self, request: Any, tokens: int) -> Facts:
        """The same in words, part by part: a hint, which passes through the router."""
        parts = self._parts(request, tokens) or {}
        return {name: part.hex()[:16] for name, part in parts.items()}

    def _parts(self, request: Any, tokens: int) -> dict[str, bytes] | None:
        ids = request.all_token_ids[:tokens]
        if len(ids) < tokens:
            return None
        parts = {"tokens": digest(array("Q", ids).tobytes())}
        if request.prompt_embeds is not None:
            rows = request.prompt_embeds[:tokens].detach().cpu().contiguous()
            parts["embeddings"] = digest(rows.view(torch.uint8).numpy().tobytes())
        lora = request.lora_request
        if lora is not None:
            parts["adapter"] = digest(lora.lora_name.encode(), _weights(lora.lora_path))
        if request.cache_salt:
            # Whatever JSON lets through: half a character, too.
            parts["salt"] = digest(request.cache_salt.encode(errors="surrogatepass"))
        media = [feature for feature in request.mm_features or () if feature.mm_position.offset < tokens]
        if media:
            parts["media"] = digest(*(part for feature in media for part in self._media(feature)))
        return parts

    def _media(self, feature: Any) -> tuple[bytes, bytes]:
        place = feature.mm_position
        where = b"%d %d" % (place.offset, place.length)
        if self.media_are_named:
            return where, str(feature.identifier).encode()
        if not self.warned:
            self.warned = True
            logger.warning(
                "kvferry: vLLM does not hash images and the like, because both of its caches for them are "
                "off: it cannot be told whether those of a hand-over are the same. Turn prefix caching or "
                "the processor's cache (mm_processor_cache_gb) on, on both engines"
            )
        return where, b""


def differ(here: Facts, there: Facts) -> str | None:
    """What differs, and both values."""
    for name in sorted(here.keys() | there.keys()):
        ours, theirs = here.get(name, "none"), there.get(name, "none")
        if ours != theirs:
            return f"its {name} differ: {theirs} there, {ours} here"
    return None


def _weights(path: str) -> bytes:
    """Stands for an adapter, whatever folder it is in; for one that is not in a folder of this machine, its
    name elsewhere."""
    try:
        files = sorted(file for file in Path(path).expanduser().glob("adapter_*") if file.is_file())
        # An adapter may be replaced where it lies.
        seen = tuple((file, file.stat().st_mtime_ns) for file in files)
        return _content(seen) if files else path.encode()
    except (OSError, ValueError, AttributeError) as error:
        # The engine has read it, and goes on without us.
        logger.warning("kvferry: cannot read the adapter in %s: %s. It is known by its name alone", path, error)
        return path.encode()


@lru_cache(maxsize=1024)
def _content(files: tuple[tuple[Path, int], ...]) -> bytes:
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
    return made.digest()
