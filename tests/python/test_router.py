"""What `vllm-router` makes of `kv_transfer_params`, with stand-ins for the two servers."""

import contextlib
import importlib.metadata
import json
import random
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

#: Seconds for the router to start, on a busy machine.
START = 120
OF_P = {"do_remote_prefill": True, "remote_block_ids": [[1]], "kvferry": {"ticket": {"nonce": "00ff"}}}
OF_D = {"do_remote_decode": True, "do_remote_prefill": False, "kvferry": {"hash": "12"}}


class Server(ThreadingHTTPServer):
    """Answers with parameters, and remembers what it was asked."""

    daemon_threads = True

    def __init__(self, params):
        super().__init__(("127.0.0.1", 0), Handler)
        self.params, self.asked = params, []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def do_GET(self):
        self.say({})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(asked)
        choice = {"index": 0, "text": "so", "finish_reason": "length", "logprobs": None}
        answer = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": "tiny", "choices": [choice]}
        self.say(answer | {"kv_transfer_params": self.server.params})

    def say(self, answer):
        said = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)


@pytest.fixture
def servers():
    made = [Server(OF_P), Server(OF_D)]
    yield made
    for server in made:
        server.shutdown()
        server.server_close()


@pytest.fixture
def router(servers):
    prefill, decode = servers
    (entry, *_) = importlib.metadata.entry_points(group="console_scripts", name="vllm-router")
    run = f"import sys; from {entry.module} import {entry.attr}; sys.exit({entry.attr}())"
    port, metrics = free_ports(2)
    command = [sys.executable, "-c", run, "--vllm-pd-disaggregation", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prefill", prefill.url, "--decode", decode.url, "--policy", "round_robin"]
    command += ["--prometheus-port", str(metrics), "--worker-startup-check-interval", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    yield process, f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(START)


def free_ports(count):
    """Ports that were free at the same time, below those that the kernel hands out by itself: the router
    finds them free when it gets there."""
    with contextlib.ExitStack() as opened:
        found = []
        while len(found) < count:
            one, port = opened.enter_context(socket.socket()), random.randrange(20000, 32000)
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
        return found


def ask(router, asked):
    process, url = router
    end = time.monotonic() + START
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(asked).encode(), {"Content-Type": "application/json"}
    )
    while True:
        assert process.poll() is None and time.monotonic() < end
        try:
            with urllib.request.urlopen(request, timeout=START) as answer:
                return json.loads(answer.read())
        except (urllib.error.URLError, ConnectionError):
            # It has not started, or has not found the servers.
            time.sleep(0.2)


def test_a_client_s_parameters_do_not_reach_p(servers, router):
    """D's answer comes back whole, but whoever sends its parameters with the next turn must ask P directly."""
    prefill, decode = servers
    said = ask(router, {"model": "tiny", "prompt": "Once", "max_tokens": 5, "kv_transfer_params": OF_D})
    assert said["kv_transfer_params"] == OF_D
    assert "kvferry" not in prefill.asked[-1]["kv_transfer_params"]
    assert prefill.asked[-1]["kv_transfer_params"]["do_remote_decode"] is True
    assert decode.asked[-1]["kv_transfer_params"] == OF_P
