"""A request's first token, and what belongs to it: enclosed with the cache by engines that sample it where they
compute the prompt, for those that go on from there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class First:
    token: int
    #: Which engine has sampled it.
    by: str
    #: Whether it took the likeliest one.
    greedy: bool
    #: What an engine of the same kind makes of it: arrays by their names, each as the kind of its numbers and in
    #: hexadecimal digits.
    row: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def write(self) -> bytes:
        return json.dumps(vars(self), separators=(",", ":")).encode()

    @classmethod
    def read(cls, enclosed: bytes) -> First:
        """Raises `ValueError` for what no engine has written."""
        try:
            given: Any = json.loads(enclosed)
            arrays = given["row"].items()
            row = {str(name): (str(kind), bytes.fromhex(digits).hex()) for name, (kind, digits) in arrays}
            token, by, greedy = given["token"], given["by"], given["greedy"]
            if type(token) is not int or not 0 <= token < 1 << 31 or type(greedy) is not bool:
                raise ValueError(f"its token is {token!r}, and its word on sampling {greedy!r}")
            return cls(token, str(by), greedy, row)
        except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
            raise ValueError(f"what came with the cache is no first token: {error!r}") from None
