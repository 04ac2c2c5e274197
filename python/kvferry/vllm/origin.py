"""What a request's cache is computed from, in 16 bytes. P and D each make them from the request that they
have themselves, and what P has computed from anything else D does not use: the ticket, too, comes through a
router and a client, and may be another request's."""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import Any

import torch

from .logs import logger


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
        """Stands for the first tokens of a request, and for all else that vLLM tells blocks of the same
        tokens apart by. None where there are not so many tokens."""
        ids = request.all_token_ids[:tokens]
        if len(ids) < tokens:
            return None
        made = hashlib.sha256(struct.pack("<Q", tokens))
        made.update(array("Q", ids).tobytes())
        lora = request.lora_request
        # The name and not the path, which may be another on another host.
        for text in (lora.lora_name if lora is not None else "", request.cache_salt or ""):
            _add(made, text.encode())
        if request.prompt_embeds is not None:
            rows = request.prompt_embeds[:tokens].detach().cpu().contiguous()
            _add(made, rows.view(torch.uint8).numpy().tobytes())
        for feature in request.mm_features or ():
            place = feature.mm_position
            if place.offset < tokens:
                made.update(struct.pack("<QQ", place.offset, place.length))
                _add(made, self._name(feature).encode())
        return made.digest()[:16]

    def _name(self, feature: Any) -> str:
        if self.media_are_named:
            return str(feature.identifier)
        if not self.warned:
            self.warned = True
            logger.warning(
                "kvferry: vLLM does not hash images and the like, because both of its caches for them are "
                "off: it cannot be told whether those of a hand-over are the same. Turn prefix caching or "
                "the processor's cache (mm_processor_cache_gb) on, on both engines"
            )
        return ""


def _add(made: Any, content: bytes) -> None:
    """With its length before it: no two lists are the same bytes."""
    made.update(struct.pack("<Q", len(content)))
    made.update(content)
