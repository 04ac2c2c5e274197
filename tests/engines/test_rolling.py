"""Two prefill and two decode servers behind `vllm-router`, each with a MultiConnector: they are restarted one
after the other while requests go on, and come back with the addresses of others.

With the Python of an environment in KVFERRY_OLDER, all four begin in that one, and come back with today's kvferry: a
change from an earlier release (`tools/test-release.sh`). Each has kvferry alone then: what an earlier release did
beside other connectors is not asked here.

A request that fails is counted by who let it fail. The router says that it cannot reach a server that has ended. And
a server that vLLM is shutting down still says that it is well, and answers 500 to every new request: the router goes
on to ask it. Whatever else fails is a mistake of ours.
"""

import contextlib
import os
import random
import subprocess
import sys
import threading
import time

import openai
import pytest
from environment import REMOTE_DECODE
from http_fleet import DECODE, PREFILL, SERVERS, Fleet
from http_pair import ANSWER, START, free_ports, save_tokenizer, until
from test_served import ask, text
from tiny import save_model

pytestmark = pytest.mark.more

BLOCKS, LEASE = 160, 6
#: Seconds from a client's answer to its next request: a server that starts needs the machine, too.
PAUSE = 1.0
#: Seconds that vLLM gives a server to finish what it has begun.
FINISH = 60
#: The Python of an environment with an earlier release.
OLDER = os.environ.get("KVFERRY_OLDER")
SERVE = [
    *("--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching", "--block-size", "32"),
    *("--max-model-len", "1024", "--num-gpu-blocks-override", str(BLOCKS)),
    # When they are asked to end, they finish what they have begun: leases, too.
    *("--shutdown-timeout", str(FINISH)),
]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fleet")
    save_tokenizer(save_model("qwen3", folder / "qwen3"))
    # Each has its address for good, as in a cluster: whoever comes back has another engine's.
    ports = dict(zip(SERVERS, free_ports(len(SERVERS)), strict=True))
    fleet = Fleet(
        folder / "qwen3",
        folder,
        SERVE,
        {"kv_load_failure_policy": "recompute"},
        {"lease": LEASE},
        {name: {"port": port} for name, port in ports.items()},
        **({"python": OLDER, "beside": ()} if OLDER else {}),
    )
    try:
        fleet.start(*SERVERS)
        fleet.start("router")
        yield fleet
    finally:
        fleet.close()


def asked(count, seed):
    draw = random.Random(seed)
    return [text(draw, draw.randrange(40, 400)) for _ in range(count)]


def loads(fleet, who):
    return fleet.metric(who, "kvferry_loads_total", outcome="done")


def nothing_is_held(fleet):
    for who in SERVERS:
        until(
            f"every block of {who} comes back",
            LEASE + ANSWER,
            lambda who=who: fleet.used_blocks(who, BLOCKS) == 0,
        )


def test_answers_are_those_of_one_server(fleet):
    prompts = asked(12, 1)
    before = {who: loads(fleet, who) for who in DECODE}
    made = [ask(fleet, "router", prompt) for prompt in prompts]
    for who in DECODE:
        until(f"{who} has loaded", ANSWER, lambda who=who: loads(fleet, who) > before[who])
    for who in PREFILL:
        assert fleet.metric(who, "kvferry_leases_granted_total") > 0
    # Again: now the other connectors have them, too.
    assert [ask(fleet, "router", prompt) for prompt in prompts] == made
    assert made == [alone(fleet, prompt) for prompt in prompts]
    nothing_is_held(fleet)


def alone(fleet, prompt):
    """What a server answers that computes everything itself: nothing is ever handed over to it."""
    return ask(fleet, "prefill", prompt)


class Load:
    """Requests that go on and on, each with another prompt: the other connector knows none of them."""

    def __init__(self, fleet, seed):
        self.fleet, self.draw = fleet, random.Random(seed)
        self.answers = {}
        #: What the router said it could not do, and what servers that are ending said.
        self.dropped, self.ending = [], []
        self.failed = []

    @contextlib.contextmanager
    def running(self, clients=2):
        end, lock = threading.Event(), threading.Lock()

        def client():
            while not end.is_set():
                with lock:
                    prompt = text(self.draw, self.draw.randrange(40, 400))
                self.one(prompt)
                end.wait(PAUSE)

        threads = [threading.Thread(target=client) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            end.set()
            for thread in threads:
                thread.join()

    def one(self, prompt):
        try:
            self.answers[prompt] = ask(self.fleet, "router", prompt)
        except openai.APIStatusError as error:
            said = f"{error.status_code} {error.response.text}"
            if is_the_routers(said):
                self.dropped.append(said)
            elif ENDING in said:
                self.ending.append(said)
            else:
                self.failed.append(said)
            time.sleep(0.2)
        except Exception as error:  # noqa: BLE001
            self.failed.append(repr(error))

    def goes_on(self, count=4):
        """Until so many more have been answered."""
        already = len(self.answers)
        until("requests are answered", START, lambda: len(self.answers) >= already + count)

    def check(self, most=60):
        some = self.draw.sample(list(self.answers), min(most, len(self.answers)))
        wrong = [prompt for prompt in some if self.answers[prompt] != alone(self.fleet, prompt)]
        counted = (
            f"{len(self.answers)} answered, {len(wrong)} of {len(some)} wrong, {len(self.dropped)} dropped by the "
            f"router, {len(self.ending)} turned away by servers that were ending, {len(self.failed)} failed"
        )
        print(counted)
        assert not self.failed, (counted, self.failed)
        assert not wrong, (counted, wrong)


#: What the router answers itself, where it has no server or cannot reach one.
ROUTERS_WORDS = ("no healthy", "no available", "policy failed to select a worker", "error sending request")


#: What vLLM's engine says when nothing is left to compute, to keep or to hand over.
FINISHED = "request processing complete"
#: What vLLM's own server stumbles over while it ends.
ENDING = "cannot schedule new futures after shutdown"


def is_the_routers(said):
    return any(words in said.lower() for words in ROUTERS_WORDS)


def test_one_after_the_other_is_replaced(fleet):
    load = Load(fleet, 3)
    # Promised by an engine whose address another one then has.
    (prompt,) = asked(1, 4)
    with load.running():
        load.goes_on()
        for who in SERVERS:
            old = promised(fleet, who, prompt) if who in PREFILL else None
            end(fleet, who)
            load.goes_on()
            fleet.pythons[who] = sys.executable
            fleet.start(who)
            load.goes_on()
            if old is not None:
                assert ask(fleet, "decode2", prompt, kv_transfer_params=old) == alone(fleet, prompt)
            takes_part(fleet, who)
    load.check()
    nothing_is_held(fleet)


def end(fleet, who):
    """As an operator ends a server. What it has promised holds it for a lease, and no longer; what vLLM does after
    that takes as long as it takes."""
    log = fleet.log(who)
    before = log.read_text(errors="replace").count(FINISHED)
    fleet.processes[who].terminate()
    until(
        f"{who} has finished what it had begun",
        LEASE + ANSWER,
        lambda: log.read_text(errors="replace").count(FINISHED) > before,
    )
    try:
        fleet.processes[who].wait(FINISH + ANSWER)
    except subprocess.TimeoutExpired:
        raise AssertionError(f"{who} does not end:\n{log.read_text(errors='replace')[-4000:]}") from None
    fleet.kill(who)


def promised(fleet, who, prompt):
    answer = fleet.client(who).completions.create(
        model=fleet.model, prompt=prompt, max_tokens=1, extra_body={"kv_transfer_params": dict(REMOTE_DECODE)}
    )
    return answer.kv_transfer_params


def takes_part(fleet, who):
    """A server that came back takes part again: its requests are handed over."""
    name = "kvferry_leases_confirmed_total" if who in PREFILL else "kvferry_loads_total"
    until(f"{who} takes part", START, lambda: fleet.metric(who, name) > 0)
