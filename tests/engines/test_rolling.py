"""Two prefill and two decode servers behind `vllm-router`, each with a MultiConnector: they are restarted one
after the other while requests go on, and come back with the addresses of others. Then servers are added that nobody has
heard of, and others leave for good.

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
import re
import subprocess
import sys
import threading
import time

import openai
import pytest
from environment import REMOTE_DECODE
from http_fleet import ADDED, DECODE, PREFILL, SERVERS, Announcer, Fleet, role_of
from http_pair import ANSWER, START, free_ports, save_tokenizer, until
from test_served import ask, operate, text
from tiny import save_model

pytestmark = pytest.mark.more

BLOCKS, LEASE = 160, 15
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
    names = (*SERVERS, *ADDED)
    ports = dict(zip(names, free_ports(len(names)), strict=True))
    fleet = Fleet(
        folder / "qwen3",
        folder,
        SERVE,
        {"kv_load_failure_policy": "recompute"},
        {"lease_seconds": LEASE},
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


def nothing_is_held(fleet, *who):
    for name in who or fleet.servers():
        until(
            f"every block of {name} comes back",
            LEASE + ANSWER,
            lambda name=name: fleet.used_blocks(name, BLOCKS) == 0,
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

    def __init__(self, fleet, seed, router="router"):
        self.fleet, self.draw, self.router = fleet, random.Random(seed), router
        self.answers = {}
        #: Prompts that wait for their answer.
        self.waiting = set()
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
                    self.waiting.add(prompt)
                self.one(prompt)
                self.waiting.discard(prompt)
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
            self.answers[prompt] = ask(self.fleet, self.router, prompt)
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

    def those_under_way_end(self):
        """Until none is left of those that wait now."""
        before = set(self.waiting)
        until("those under way end", START, lambda: not before & self.waiting)

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
#: What it answers where it has heard of no server for five seconds: whoever tells it has been too slow.
UNHEARD = "no workers available via service discovery"


#: What vLLM's engine says when nothing is left to compute, to keep or to hand over.
FINISHED = "request processing complete"
#: What vLLM's own server stumbles over while it ends.
ENDING = "cannot schedule new futures after shutdown"


def is_the_routers(said):
    return any(words in said.lower() for words in (*ROUTERS_WORDS, UNHEARD))


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
    name = "kvferry_leases_confirmed_total" if role_of(who) == "prefill" else "kvferry_loads_total"
    until(f"{who} takes part", START, lambda: fleet.metric(who, name) > 0)


# The last: two of the first servers are no longer there.
def test_servers_come_that_nobody_knew_and_others_leave_for_good(fleet):
    load = Load(fleet, 5, "router2")
    leaving = ("prefill2", "decode2")
    with Announcer(fleet).running() as announcer:
        announcer.add(*SERVERS)
        fleet.start("router2")
        with load.running():
            load.goes_on()
            # One at a time: no more than five run at once.
            for new, old in zip(ADDED, leaving, strict=True):
                fleet.start(new)
                assert served(fleet, new) == 0
                announcer.add(new)
                takes_part(fleet, new)
                leave(fleet, announcer, load, old)
            load.goes_on()
            # The two that came also hand over to each other.
            (prompt,) = asked(1, 6)
            before = loads(fleet, "decode3")
            ticket = promised(fleet, "prefill3", prompt)
            assert ask(fleet, "decode3", prompt, kv_transfer_params=ticket) == alone(fleet, prompt)
            until("decode3 has loaded it", ANSWER, lambda: loads(fleet, "decode3") > before)
    load.check()
    # Whoever leaves has left the router first: nobody is turned away, or asks a server that is not there.
    assert not load.ending, load.ending
    assert all(UNHEARD in said.lower() for said in load.dropped), load.dropped
    assert sorted(fleet.servers()) == ["decode", "decode3", "prefill", "prefill3"]
    nothing_is_held(fleet)


def leave(fleet, announcer, load, who):
    """As an operator takes a server away for good: first out of the router, then drained, then ended."""
    announcer.remove(who)
    load.those_under_way_end()
    until(f"{who} has answered everybody", ANSWER, lambda: fleet.metric(who, "num_requests_running") == 0)
    already = served(fleet, who)
    load.goes_on()
    address = re.findall(r"`kvferry drain (\S+)`", fleet.log(who).read_text(errors="replace"))[-1]
    code, said = operate("drain", address, "--wait", str(LEASE + ANSWER // 2))
    assert code == 0 and said.endswith("drained: nothing is left\n"), (who, code, said)
    nothing_is_held(fleet, who)
    assert served(fleet, who) == already, f"{who} is still asked"
    end(fleet, who)
    load.goes_on()


def served(fleet, who):
    """Requests that it has answered."""
    return fleet.metric(who, "request_success_total")
