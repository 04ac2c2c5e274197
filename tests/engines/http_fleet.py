"""Two prefill servers, two decode servers and the router, each server with another connector beside ours; servers that
are added later, and a second router that learns of servers while it runs."""

import contextlib
import json
import re
import sys
import threading
from pathlib import Path

import msgspec
import zmq
from http_pair import ANSWER, Pair, free_ports, until
from offload import OFFLOAD

PREFILL, DECODE = ("prefill", "prefill2"), ("decode", "decode2")
SERVERS = (*PREFILL, *DECODE)
#: Servers that come later.
ADDED = ("prefill3", "decode3")


class Fleet(Pair):
    """`beside` are other connectors; `python` is that of the environment which the first servers run in, and can be
    changed for each of them in `pythons`, from its next start on.

    `router` has a list of the first servers; `router2` has none, and is told who is there (`Announcer`)."""

    names = (*SERVERS, *ADDED, "router", "router2")

    def __init__(self, *args, beside=(OFFLOAD,), python=sys.executable, **options):
        super().__init__(*args, **options)
        self.beside = beside
        self.pythons = dict.fromkeys(SERVERS, python) | dict.fromkeys(ADDED, sys.executable)
        self.told_at = f"127.0.0.1:{free_ports(1)[0]}"
        # `offload` is found there.
        self.environment["PYTHONPATH"] = str(Path(__file__).parent)
        # vLLM waits so long for a worker to end by itself, before it asks it to.
        self.environment["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = "1"

    def servers(self):
        """Those that run now."""
        return [name for name in self.processes if role_of(name) != "router"]

    def command(self, who):
        role = role_of(who)
        words = super().command(role)
        if who == "router":
            others = [("--prefill", "prefill2"), ("--decode", "decode2")]
            words += [word for option, name in others for word in (option, self.url(name))]
            # A server that does not answer is out at once, and back at once when it does.
            return words + ["--health-failure-threshold", "1", "--health-success-threshold", "1"]
        words = [re.sub(rf"\b{self.ports[role]}\b", str(self.ports[who]), word) for word in words]
        if who == "router2":
            for option in ("--prefill", "--decode"):
                at = words.index(option)
                del words[at : at + 2]
            return [*words, "--vllm-discovery-address", self.told_at]
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
        return [self.pythons[who], str(self.folder / "bin" / "vllm"), *words[1:]]


def role_of(name):
    return name.rstrip("0123456789")


class Announcer:
    """Tells `router2` who is there, again and again, as something beside each server would: the router asks those that
    it has heard of in the last five seconds, and no other."""

    def __init__(self, fleet):
        self.fleet, self.names = fleet, set()
        #: The last word about each server that was removed.
        self._last_words = []
        self._lock, self._end = threading.Lock(), threading.Event()

    @contextlib.contextmanager
    def running(self):
        thread = threading.Thread(target=self._tell)
        thread.start()
        try:
            yield self
        finally:
            self._end.set()
            thread.join()

    def add(self, *names):
        with self._lock:
            self.names.update(names)

    def remove(self, name):
        """Returns when the router no longer has it, and has read all that was sent about it: on a slow machine it may
        forget a server, and then read an older message that names it."""
        word = f"no more of {name}"
        with self._lock:
            self.names.remove(name)
            self._last_words.append(word)
        told = f" {role_of(name).capitalize()} [HTTP:{self._address(name)},"

        def forgotten():
            log = self.fleet.log("router2").read_text(errors="replace")
            return f"Unknown service type '{word}'" in log and log.rfind(f"Remove{told}") > log.rfind(f"Add{told}")

        until(f"the router forgets {name}", ANSWER, forgotten)

    def _address(self, name):
        return self.fleet.url(name).removeprefix("http://")

    def _tell(self):
        with zmq.Context() as context, context.socket(zmq.DEALER) as told:
            # What has not been taken when it closes is of no use to anybody.
            told.linger = 0
            told.connect(f"tcp://{self.fleet.told_at}")
            while not self._end.wait(0.5):
                for message in self._messages():
                    told.send(msgspec.msgpack.encode(message), zmq.NOBLOCK)

    def _messages(self):
        with self._lock:
            names, words, self._last_words = sorted(self.names), self._last_words, []
        for name in names:
            # The second address is for a connector of vLLM's that kvferry does not use.
            address = self._address(name)
            yield {"type": role_of(name)[0].upper(), "http_address": address, "zmq_address": address}
        for word in words:
            # The router says that it does not know such a type, and does no more.
            yield {"type": word, "http_address": "", "zmq_address": ""}
