"""HTTP servers of both kinds behind SGLang's own router, unchanged: as a user starts them, but that servers are forked from a
process that has imported what they need."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import types
import urllib.error
import urllib.request

import engines
import environment
from forked import Forked
from http_pair import free_ports, until

# SGLang's server imports it; nobody here speaks.
sys.modules["soundfile"] = types.ModuleType("soundfile")
import sglang.srt.entrypoints.http_server  # noqa: E402, F401

del sys.modules["soundfile"]

START, ANSWER = 180, 60
MIDDLEWARE = "kvferry.vllm.rooms.Rooms"
#: As in `docs/sglang.md`.
ROUTER = ["-m", "sglang_router.launch_router", "--pd-disaggregation"]


class Fleet:
    def __init__(self, model, folder):
        self.model, self.folder, self.ports, self.bootstrap, self.processes = str(model), folder, {}, {}, {}

    def log(self, name):
        return self.folder / f"{name}.log"

    def sglang(self, name, role):
        self.ports[name], self.bootstrap[name] = free_ports(2)
        options = engines.OPTIONS | engines.ROLES[role] | {
            "model_path": self.model, "port": self.ports[name], "skip_tokenizer_init": False, "host": "127.0.0.1",
            "disaggregation_bootstrap_port": self.bootstrap[name], "context_length": 512, "skip_server_warmup": True, "enable_metrics": True,
        }
        told = {"KVFERRY_OPTIONS": json.dumps({"audit": "all", "push_timeout_seconds": 10})}
        self.processes[name] = engines.become(engines.serve, options, told, self.log(name))

    def vllm(self, name, role, **extra):
        self.ports[name], self.bootstrap[name] = free_ports(2)
        transfer = {
            "kv_connector": "FerryConnector", "kv_role": role, "kv_load_failure_policy": "fail",
            "kv_connector_extra_config": {"port": self.bootstrap[name], "audit": "all", "push_timeout_seconds": 10} | extra,
        }
        words = [
            "vllm", "serve", self.model, "--port", str(self.ports[name]), "--host", "127.0.0.1", "--middleware", MIDDLEWARE,
            "--kv-transfer-config", json.dumps(transfer), "--dtype", "float32", "--enforce-eager", "--max-model-len", "512",
            "--max-num-seqs", "8", "--no-enable-prefix-caching", "--num-gpu-blocks-override", "64", "--block-size", "32",
        ]
        told = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")} | environment.SERVER
        with open(self.log(name), "ab") as log:
            self.processes[name] = Forked(words, told, log)

    def router(self, prefill, decode, *more):
        """Drives these servers, once they are up."""
        for name in (*prefill, *decode):
            self.wait_for(name)
        self.ports["router"], metrics = free_ports(2)
        words = [sys.executable, *ROUTER, "--host", "127.0.0.1", "--port", str(self.ports["router"]), "--prometheus-port", str(metrics)]
        for name in prefill:
            words += ["--prefill", self.url(name), str(self.bootstrap[name])]
        for name in decode:
            words += ["--decode", self.url(name)]
        with open(self.log("router"), "ab") as log:
            self.processes["router"] = subprocess.Popen(
                [*words, "--policy", "round_robin", *more], stdout=log, stderr=log, start_new_session=True
            )
        self.wait_for("router")
        # It is up before it has met the servers.
        until("the router knows its servers", START, lambda: (self.complete("router", "once", 1) or "?")[0] != 503)

    def url(self, name):
        return f"http://127.0.0.1:{self.ports[name]}"

    def wait_for(self, name):
        until(f"{name} starts", START, lambda: self._is_up(name))

    def _is_up(self, name):
        process = self.processes[name]
        ended = process.exitcode if hasattr(process, "exitcode") else process.poll()
        assert ended is None, f"{name} ended with {ended}:\n{self.log(name).read_text()[-4000:]}"
        try:
            return self.ask(name, "/health", None, 5)[0] == 200
        except OSError:
            return False

    def ask(self, name, path, body, timeout=ANSWER):
        """Status, and the answer."""
        data = None if body is None else json.dumps(body).encode()
        asked = urllib.request.Request(self.url(name) + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(asked, timeout=timeout) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def complete(self, name, prompt, tokens=8):
        """The answer's text, with its status where there is none."""
        status, text = self.ask(name, "/v1/completions", self._body(prompt, tokens))
        # The two engines differ in what half a character is.
        return json.loads(text)["choices"][0]["text"].replace("\ufffd", "") if status == 200 else (status, text)

    def stream(self, name, prompt, tokens=8):
        """The same, as it comes."""
        status, text = self.ask(name, "/v1/completions", self._body(prompt, tokens) | {"stream": True})
        lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: {")]
        assert status == 200 and len(lines) > 1, (status, text)
        parts = [json.loads(line)["choices"] for line in lines]
        return "".join(choices[0]["text"] for choices in parts if choices).replace("\ufffd", "")

    def _body(self, prompt, tokens):
        return {"model": self.model, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}

    def logs(self):
        return "\n".join(f"== {name}\n{self.log(name).read_text()[-2500:]}" for name in self.processes)

    def close(self):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

