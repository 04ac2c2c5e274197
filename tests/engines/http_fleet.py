"""Two prefill servers, two decode servers and the router, each server with another connector beside ours."""

import json
import re
import sys
from pathlib import Path

from http_pair import Pair
from offload import OFFLOAD

PREFILL, DECODE = ("prefill", "prefill2"), ("decode", "decode2")
SERVERS = (*PREFILL, *DECODE)
#: What a server begins with: it forks its children, which would import vLLM once more each if they were spawned.
FORKING = """\
import multiprocessing
context = multiprocessing.get_context
multiprocessing.get_context = lambda method=None: context("fork" if method == "spawn" else method)
"""


class Fleet(Pair):
    """`beside` are other connectors; `python` is that of the environment which servers run in, and can be changed for
    each of them in `pythons`, from its next start on."""

    names = (*SERVERS, "router")

    def __init__(self, *args, beside=(OFFLOAD,), python=sys.executable, **options):
        super().__init__(*args, **options)
        self.beside, self.pythons = beside, dict.fromkeys(SERVERS, python)
        # `offload` is found there.
        self.environment["PYTHONPATH"] = str(Path(__file__).parent)
        # vLLM waits so long for a worker to end by itself, before it asks it to.
        self.environment["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "1"
        (_, _, serve) = (self.folder / "bin" / "vllm").read_text().partition("\n")
        self.forking = self.folder / "forking.py"
        self.forking.write_text(FORKING + serve)

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
        words[at] = json.dumps(ours)
        if self.beside:
            both = {"connectors": [*self.beside, ours]}
            words[at] = json.dumps(
                {"kv_connector": "MultiConnector", "kv_role": ours["kv_role"], "kv_connector_extra_config": both}
                | self.transfer
            )
        return [self.pythons[who], str(self.forking), *words[1:]]
