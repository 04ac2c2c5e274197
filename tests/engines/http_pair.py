"""The servers and the router of README.md's "With vLLM" section, as processes on loopback.

The commands are the ones a user copies: they are read from README.md, and only the model, the ports and
what a small machine without a GPU needs are changed.
"""

import contextlib
import importlib.metadata
import json
import os
import random
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import environment
from forked import CALM, FORKING, Forked
from openai import OpenAI
from wire import on

README = Path(__file__).parents[2] / "README.md"
#: The ports in README.md, by who listens there.
PORTS = {"prefill": "8100", "decode": "8200", "router": "30000"}

#: Seconds. A server takes half a minute to start on an idle machine, and many times that on a busy
#: one; a server that ends is noticed at once.
START, ANSWER, STOP = 1200, 180, 240

#: Ports below those that the kernel hands out by itself: whoever starts later finds free ones still free.
QUIET = range(20000, 32000)
#: Engines are forked, and what `random` draws next is forked with them.
DRAW = random.SystemRandom()


def readme_commands():
    """The command of each process, as words."""
    for block in re.findall(r"```sh\n(.*?)```", README.read_text(), re.DOTALL):
        if "vllm serve" in block:
            break
    else:
        raise AssertionError("README.md does not say how to serve with vLLM")
    commands = [shlex.split(line) for line in block.replace("\\\n", " ").splitlines() if line]
    prefill, decode, router = commands
    assert [words[0] for words in commands] == ["vllm", "vllm", "vllm-router"], commands
    return {"prefill": prefill, "decode": decode, "router": router}


def until(what, seconds, true):
    """Waits until `true()` is, and returns it. The longer it takes, the less often it looks: a server that is asked for
    its metrics all the time does little else."""
    end, pause = time.monotonic() + seconds, 0.01
    while not (answer := true()):
        assert time.monotonic() < end, f"{what}: not within {seconds} s"
        time.sleep(pause)
        pause = min(1.3 * pause, 0.5)
    return answer


class Pair:
    """A prefill server, a decode server and a router.

    `serve` is added to what starts the servers, `transfer` to their `--kv-transfer-config`, and `extra`
    to its `kv_connector_extra_config`; `only` is more of the last, for one server. `hosts` says where each
    runs, if not all on this machine's own loopback. `alone` are the servers whose commands begin as a user's do; the
    others' begin in a process that has imported vLLM, which is all that their start saves.
    """

    #: Who listens, by the name of a role in README.md.
    names = tuple(PORTS)

    def __init__(self, model, folder, serve, transfer, extra, only=None, hosts=None, alone=()):
        self.hosts, self.alone = hosts or {}, alone
        self.model, self.folder = str(model), Path(folder)
        self.serve, self.transfer, self.extra, self.only = serve, transfer, extra, only or {}
        self.ports = dict(zip(self.names, free_ports(len(self.names)), strict=True))
        self.clients = {
            name: OpenAI(
                base_url=f"{self.url(name)}/v1", api_key="none", max_retries=0, timeout=ANSWER
            )
            for name in self.names
        }
        self.processes = {}
        # A user's servers know nothing of how the engines of other tests are run.
        users = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
        self.environment = users | environment.SERVER
        self.environment["PATH"] = f"{self._commands()}:{os.environ['PATH']}"

    def _commands(self):
        """The two commands as an installer makes them, for the environment that runs the tests."""
        made = self.folder / "bin"
        made.mkdir()
        for name in ("vllm", "vllm-router"):
            (entry, *_) = importlib.metadata.entry_points(group="console_scripts", name=name)
            script = made / name
            # The router knows nothing of vLLM.
            before = (CALM if self.alone else CALM + FORKING) if name == "vllm" else ""
            script.write_text(
                f"#!{sys.executable}\n{before}import sys\nfrom {entry.module} import {entry.attr}\n"
                f'if __name__ == "__main__":\n    sys.exit({entry.attr}())\n'
            )
            script.chmod(0o755)
        return made

    def command(self, who):
        words = readme_commands()[who]
        for name, port in PORTS.items():
            words = [word.replace(f"127.0.0.1:{port}", f"{self.address(name)}:{port}") for word in words]
            words = [re.sub(rf"\b{port}\b", str(self.ports[name]), word) for word in words]
        if who == "router":
            # A metrics port of its own, and a health check that does not take a minute.
            return words + [
                *("--prometheus-port", str(free_ports(1)[0])),
                *("--health-check-interval-secs", "1"),
                *("--worker-startup-check-interval", "1"),
            ]
        words[words.index("MODEL")] = self.model
        at = words.index("--kv-transfer-config") + 1
        extra = self.extra | self.only.get(who, {})
        config = json.loads(words[at]) | self.transfer | {"kv_connector_extra_config": extra}
        words[at] = json.dumps(config)
        return words + self.serve

    def start(self, *who):
        """Starts them together and waits until each answers."""
        for name in who:
            with open(self.log(name), "ab") as log:
                words = self.command(name)
                if words[0] == "vllm" and name not in self.alone:
                    with on(self.hosts[name]) if name in self.hosts else contextlib.nullcontext():
                        self.processes[name] = Forked(words, self.environment, log)
                    continue
                # In a session of its own, so that it can be ended with all its children.
                entered = self.hosts[name].enter if name in self.hosts else []
                self.processes[name] = subprocess.Popen(
                    [*entered, *words],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=self.environment,
                    start_new_session=True,
                )
        for name in who:
            until(f"{name} starts", START, lambda name=name: self._started(name))

    def _started(self, name):
        ended = self.processes[name].poll()
        assert ended is None, f"{name} ended with {ended}:\n{self.log(name).read_text()[-4000:]}"
        return self.healthy(name)

    def log(self, name):
        return self.folder / f"{name}.log"

    def kill(self, name):
        """As the machine's failing would end it, children included."""
        process = self.processes.pop(name)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait(STOP)

    def stop(self, name):
        """As an operator ends a server, and waits for it."""
        self.processes[name].terminate()
        self.processes[name].wait(STOP)
        self.kill(name)

    def close(self):
        """Asks all to end; what does not is killed, and that is an error."""
        late = []
        for process in self.processes.values():
            process.terminate()
        for name, process in list(self.processes.items()):
            try:
                process.wait(STOP)
            except subprocess.TimeoutExpired:
                late.append(name)
            self.kill(name)
        assert not late, f"{late} did not end within {STOP} s of being asked to"

    def address(self, name):
        return self.hosts[name].address if name in self.hosts else "127.0.0.1"

    def url(self, name):
        return f"http://{self.address(name)}:{self.ports[name]}"

    def client(self, name):
        return self.clients[name]

    def healthy(self, name):
        try:
            with urllib.request.urlopen(f"{self.url(name)}/health", timeout=5) as answer:
                return answer.status == 200
        except (OSError, urllib.error.URLError):
            return False

    def metric(self, name, wanted, **labels):
        """The sum of a server's metric over its engines."""
        with urllib.request.urlopen(f"{self.url(name)}/metrics", timeout=ANSWER) as answer:
            lines = answer.read().decode().splitlines()
        found = [
            float(line.rpartition(" ")[2])
            for line in lines
            if line.startswith(f"vllm:{wanted}{{")
            and all(f'{label}="{value}"' in line for label, value in labels.items())
        ]
        assert found, f"{name} has no metric {wanted} with {labels}"
        return sum(found)

    def used_blocks(self, name, blocks):
        """Blocks in use on a server of `blocks` blocks. vLLM keeps one for itself, and updates the
        share with every step."""
        used = self.metric(name, "kv_cache_usage_perc") * (blocks - 1)
        assert abs(used - round(used)) < 1e-6, used
        return round(used)


def free_ports(count):
    """Ports that were free at the same time."""
    with contextlib.ExitStack() as opened:
        found = []
        while len(found) < count:
            one, port = opened.enter_context(socket.socket()), DRAW.choice(QUIET)
            with contextlib.suppress(OSError):
                one.bind(("127.0.0.1", port))
                found.append(port)
        return found


def free_neighbours():
    """A port that was free together with the next one."""
    while True:
        with socket.socket() as one, socket.socket() as next_, contextlib.suppress(OSError):
            port = DRAW.choice(QUIET)
            one.bind(("127.0.0.1", port))
            next_.bind(("127.0.0.1", port + 1))
            return port


def save_tokenizer(folder):
    """A token for every byte, and a plain chat template."""
    byte_tokenizer().save_pretrained(folder)


def byte_tokenizer(more=()):
    """The same with more special tokens, behind those of the bytes."""
    import tokenizers
    import transformers

    special = ["<s>", "</s>", "<pad>"]
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocab={token: at for at, token in enumerate([*special, *alphabet, *more])}, merges=[]
        )
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    made.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        bos_token=special[0],
        eos_token=special[1],
        pad_token=special[2],
        **({"additional_special_tokens": list(more)} if more else {}),
        chat_template="{% for message in messages %}{{ message['role'] }}: "
        "{{ message['content'] }}\n{% endfor %}assistant: ",
    )
