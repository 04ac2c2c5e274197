"""Other connectors beside ours, in vLLM's MultiConnector: what cannot go well is refused by name, and what
only concerns us is kept from them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from .describe import specs
from .logs import logger
from .plugin import NAME
from .refusal import refuse


def check() -> None:
    """Refuses neighbours with which the engine would end at its first request."""
    others = [child for child in _children() if not _is_ours(child)]
    children = [str(child.get("kv_connector")) for child in others]
    if len(_children()) - len(children) > 1:
        raise refuse(
            "",
            f"{NAME} is in the MultiConnector more than once: each would hand over every request, and "
            "vLLM ends the engine when two do; leave one",
        )
    if rivals := [name for name in children if name in specs.HAND_OVER]:
        raise refuse(
            "",
            f"{NAME} and {' and '.join(rivals)} are in one MultiConnector: both would hand over every "
            "request, and vLLM ends the engine when two do; leave one of them",
        )
    if plain := [name for child, name in zip(others, children, strict=True) if not _knows_groups(child)]:
        logger.warning(
            "kvferry: vLLM keeps the whole prompt in every layer, sliding windows too, because of %s "
            "beside %s, which knows no groups of layers",
            " and ".join(plain),
            NAME,
        )


def gather(card: bytes, groups: Sequence[Any]) -> tuple[bytes, ...] | None:
    """The cards of a rank in all of `groups` (vLLM's: pipeline stages, for one), in the first rank of all of
    them; None in the others.

    vLLM hands what one connector makes known to all of its neighbours, too, and most of these end the
    engine when it comes from a later stage. And of ranks that differ in nothing but their part of a
    prefill's context, it keeps what one of them makes known.
    """
    import torch

    cards, first = (card,), True
    for group in groups:
        if group.world_size == 1:
            continue
        of_each: list[Any] = [None] * group.world_size
        torch.distributed.all_gather_object(of_each, cards, group=group.cpu_group)
        cards = tuple(itertools.chain.from_iterable(of_each))
        first = first and group.is_first_rank
    return cards if first else None


def _children() -> list[dict[str, Any]]:
    """The connectors of the engine that is being started, if there are several. A child is told nothing
    of the others: vLLM knows its configuration as a whole while it starts a worker."""
    from vllm.config import get_current_vllm_config_or_none

    transfer = getattr(get_current_vllm_config_or_none(), "kv_transfer_config", None)
    extra = getattr(transfer, "kv_connector_extra_config", None) or {}
    children = extra.get("connectors") or []
    return [child for child in children if isinstance(child, dict)]


def _knows_groups(child: dict[str, Any]) -> bool:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    return bool(KVConnectorFactory.supports_hma_config(KVTransferConfig(**child)))


def _is_ours(child: dict[str, Any]) -> bool:
    path = str(child.get("kv_connector_module_path") or "")
    return child.get("kv_connector") == NAME or path.startswith("kvferry.")
