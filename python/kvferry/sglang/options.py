"""What a user can set, as JSON in the environment variable `KVFERRY_OPTIONS`: by the same names as for vLLM's connector, and
with the same meaning, where both have them."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

from .. import _options
from .._options import option

VARIABLE = "KVFERRY_OPTIONS"
#: Options of vLLM's connector that have no meaning here, and what is there instead.
ELSEWHERE = {
    "port": "SGLang's --disaggregation-bootstrap-port says where the prefill engine listens",
    "lease_share": "the prefill engine keeps all that it has promised",
    "push": "SGLang's router sends every request to both engines at once",
    "next_turn_seconds": "answers are not handed back",
    "drain_signal": "`kvferry drain ADDRESS` does it",
    "nixl_connector_lease_seconds": "an SGLang engine reads from engines with kvferry",
    "draft": "draft models are not handed over",
    "trace": "requests are not traced",
}


@dataclass(frozen=True)
class Options(_options.Options):
    WHERE = VARIABLE
    ELSEWHERE = ELSEWHERE

    #: When D takes pages for a request: `late`, when P has all of it, or `early`, when P has begun: D then reads while P
    #: computes, and keeps the pages from others meanwhile.
    pages: str = option("late", one_of=("late", "early"))

    @classmethod
    def of_environment(cls) -> Options:
        text = os.environ.get(VARIABLE) or "{}"
        try:
            given = json.loads(text)
        except ValueError as error:
            raise ValueError(f"{VARIABLE} is not JSON: {error}. It is {text[:200]!r}") from None
        if not isinstance(given, dict):
            raise ValueError(f"{VARIABLE} must be options by their names, not {text[:200]!r}")
        return cls.read(given)

    def _own_address(self) -> str:
        from sglang.srt.utils.network import get_local_ip_auto

        return str(get_local_ip_auto())
