"""What both engines call a request: SGLang's router gives it a number, its room, and the prompt is known to both."""

from __future__ import annotations

from array import array
from typing import Any

from .._origin import digest, origin


def origin_of(req: Any) -> bytes:
    """Stands for what a request's cache is computed from. Images and the like are tokens here: SGLang puts numbers in
    their place that it makes of their content."""
    ids = req.origin_input_ids
    parts = {"tokens": digest(array("Q", ids).tobytes())}
    if req.extra_key:
        # Whatever keeps caches of equal tokens apart.
        parts["salt"] = digest(str(req.extra_key).encode(errors="surrogatepass"))
    return origin(parts, len(ids))


class NotMoved(RuntimeError):
    """Why a request was not handed over, for SGLang's answer to its client."""

    def __init__(self, why: str, elsewhere: bool = False) -> None:
        super().__init__(f"kvferry: {why}")
        self.failure_reason = why
        #: SGLang logs the same failure at one rank only.
        self.is_from_another_rank = elsewhere
