"""The tensor-parallel ranks of an engine. SGLang runs one scheduler in each of them, and they do the same things in the
same order: what one says to the others here, it says at a point that all of them pass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Ranks:
    #: SGLang's group of them that speaks through host memory.
    group: Any
    rank: int
    size: int

    @property
    def leads(self) -> bool:
        """The first of them holds the engine's word."""
        return self.rank == 0

    def told(self, said: Any) -> Any:
        """What the first says, at all of them."""
        if self.size == 1:
            return said
        import torch.distributed

        heard = [said if self.leads else None]
        torch.distributed.broadcast_object_list(heard, group=self.group, group_src=0)
        return heard[0]

    def gathered(self, own: bytes) -> list[bytes]:
        """What each of them has, in order."""
        if self.size == 1:
            return [own]
        import torch.distributed

        found: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(found, own, group=self.group)
        return found

    def same(self, own: bytes) -> bool:
        """Whether all of them have the same, by its first seven bytes."""
        if self.size == 1:
            return True
        import torch
        import torch.distributed

        number = int.from_bytes(own[:7], "big")
        most = torch.tensor([number, -number])
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=self.group)
        return int(most[0]) == -int(most[1])
