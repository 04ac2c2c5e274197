"""The metadata row of a request: SGLang's prefill engine writes its first token there, how likely that was, and so on,
and its decode engine reads it from a row of its own."""

from __future__ import annotations

from typing import Any

import torch

from .._first import First

#: Whose word on a first token this is.
BY = "SGLang"


def enclosed(rows: Any, row: int, greedy: bool) -> bytes:
    """What goes with the cache of the request that has this row."""
    arrays = {}
    for name, tensor in _arrays(rows):
        arrays[name] = str(tensor.dtype), tensor[row].view(torch.uint8).numpy().tobytes().hex()
    return First(int(rows.output_ids[row][0]), BY, greedy, arrays).write()


def fill(rows: Any, row: int, first: First, room: int, probabilities: bool) -> None:
    """As if this engine's own prefill had written it. Raises `ValueError` for what is of no use here."""
    arrays = dict(_arrays(rows))
    if first.by != BY:
        if probabilities:
            raise ValueError(
                f"its first token was sampled by {first.by}, which does not say how likely it was: ask without log-probabilities"
            )
        for tensor in arrays.values():
            tensor[row] = 0
        rows.output_ids[row, 0] = first.token
        rows.bootstrap_room[row, 0] = room
        return
    told = {name: (kind, len(digits) // 2) for name, (kind, digits) in first.row.items()}
    ours = {name: (str(tensor.dtype), tensor[row].nbytes) for name, tensor in arrays.items()}
    if told != ours:
        names = sorted(name for name in told.keys() | ours.keys() if told.get(name) != ours.get(name))
        differ = ", ".join(f"{name} is {told.get(name)} there and {ours.get(name)} here" for name in names)
        raise ValueError(
            f"the prefill engine's metadata rows are those of another version of SGLang, or of other settings: {differ}"
        )
    for name, tensor in arrays.items():
        read = torch.frombuffer(bytearray.fromhex(first.row[name][1]), dtype=torch.uint8)
        tensor[row].view(torch.uint8).copy_(read)


def _arrays(rows: Any) -> list[tuple[str, Any]]:
    """The arrays of SGLang's metadata rows by their names, in its order."""
    named = {it.data_ptr(): (name, it) for name, it in vars(rows).items() if hasattr(it, "data_ptr")}
    return [named[address] for address in rows.get_buf_infos()[0]]
