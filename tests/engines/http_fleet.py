"""Two prefill servers, two decode servers and the router, each server with another connector beside ours."""

import json
import re
from pathlib import Path

from http_pair import Pair
from offload import OFFLOAD

PREFILL, DECODE = ("prefill", "prefill2"), ("decode", "decode2")
SERVERS = (*PREFILL, *DECODE)


class Fleet(Pair):
    names = (*SERVERS, "router")

    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        # `offload` is found there.
        self.environment["PYTHONPATH"] = str(Path(__file__).parent)

    def command(self, who):
        role = who.rstrip("0123456789")
        words = super().command(role)
        if who == "router":
            others = [("--prefill", "prefill2"), ("--decode", "decode2")]
            words += [word for option, name in others for word in (option, self.url(name))]
            # A server that does not answer is out at once, and back at once when it does.
            return words + ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
        words = [re.sub(rf"\b{self.ports[role]}\b", str(self.ports[who]), word) for word in words]
        at = words.index("--kv-transfer-config") + 1
        ours = json.loads(words[at])
        ours["kv_connector_extra_config"] |= self.only.get(who, {})
        both = {"connectors": [OFFLOAD, ours]}
        words[at] = json.dumps(
            {"kv_connector": "MultiConnector", "kv_role": ours["kv_role"], "kv_connector_extra_config": both}
            | self.transfer
        )
        return words
