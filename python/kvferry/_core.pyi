from collections.abc import Mapping, Sequence
from typing import Any, final

import numpy as np
import numpy.typing as npt

__all__ = ["Manifest", "Plan", "Summary", "compile", "version"]

_Numbers = Sequence[int] | npt.NDArray[np.integer[Any]]
_Words = npt.NDArray[np.uint64]

def version() -> str:
    """The version of the compiled part."""

@final
class Manifest:
    """All the facts of one rank: regions, groups, and at which bytes each state lies.

    Whatever a manifest says has been checked: every view lies in its region, no two pieces of a group
    share a byte, and groups that share memory agree on every byte's block.
    """

    def __new__(cls, draft: dict[str, Any]) -> Manifest:
        """Checks a draft, in the shape of `to_dict`. Raises `ManifestError`, naming the place."""

    @staticmethod
    def from_json(text: str) -> Manifest: ...
    @staticmethod
    def from_bytes(data: bytes) -> Manifest:
        """Decodes and checks the compact form. Safe on any bytes."""

    def to_json(self) -> str:
        """The readable form."""

    def to_bytes(self) -> bytes:
        """The compact form: kilobytes for a hundred layers, whatever the number of blocks."""

    def to_dict(self) -> dict[str, Any]:
        """The facts, to be changed and checked again."""

    @property
    def engine(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def label(self) -> str: ...
    @property
    def identity(self) -> Mapping[str, str]: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Summary:
    """What the copies of a request from one source rank amount to."""

    @property
    def bytes(self) -> int: ...
    @property
    def copies(self) -> int: ...
    @property
    def shortest(self) -> int: ...
    @property
    def longest(self) -> int: ...
    @property
    def mean(self) -> float: ...
    def __eq__(self, value: object, /) -> bool: ...
    def __ne__(self, value: object, /) -> bool: ...

@final
class Plan:
    """What one destination rank does, for any request.

    The methods take a request by keyword. `source_blocks` and `destination_blocks` hold one block
    table for every KV-cache group of that side, indexed by position: entry 0 holds the first tokens,
    and the group's null block (0 in vLLM) marks a dead entry. A table that was clipped says with which
    position it starts in `source_first` or `destination_first` (all 0 when left out). The table of a
    group of per-sequence states is its one running slot. `cached` says for every destination group how
    many of the first tokens it holds already (none when left out); a state group holds all of them or
    is moved whole.

    Every method raises `RequestError` when the request does not fit.
    """

    @property
    def sources(self) -> int:
        """How many source ranks the plan was compiled from."""

    def reads(self, source: int) -> bool:
        """Whether anything is read from a source rank."""

    def copies(
        self,
        *,
        tokens: int,
        source_blocks: Sequence[_Numbers],
        destination_blocks: Sequence[_Numbers],
        cached: _Numbers | None = None,
        source_first: _Numbers | None = None,
        destination_first: _Numbers | None = None,
    ) -> list[_Words]:
        """For every source rank, in the order given to `compile`, an array of shape (n, 3):
        source address, destination address, length in bytes."""

    def rest(
        self,
        *,
        tokens: int,
        source_blocks: Sequence[_Numbers],
        destination_blocks: Sequence[_Numbers],
        cached: _Numbers | None = None,
        source_first: _Numbers | None = None,
        destination_first: _Numbers | None = None,
    ) -> _Words:
        """What no copy writes of the request's own destination blocks, for engines that want it
        zeroed: an array of shape (n, 2) of address and length."""

    def summary(
        self,
        *,
        tokens: int,
        source_blocks: Sequence[_Numbers],
        destination_blocks: Sequence[_Numbers],
        cached: _Numbers | None = None,
        source_first: _Numbers | None = None,
        destination_first: _Numbers | None = None,
    ) -> list[Summary]:
        """What the copies from every source rank amount to, without making them."""

def compile(destination: Manifest, sources: Sequence[Manifest]) -> Plan:
    """The plan of one destination rank, proven; `sources` are all ranks of the other side. Raises
    `Incompatible` when the two sides do not fit."""
