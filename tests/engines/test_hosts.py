"""A pair on two hosts: prefill on one, decode and the router on the other, with a wire between them that is
slow, loses packets, or goes away.

Every answer is the one that the decode server gives alone, or an error that says so; the link heals by
itself, and neither server keeps a block.
"""

import base64
import contextlib
import os
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest
from http_pair import ANSWER, Pair, save_tokenizer, until
from test_served import LEASE, SMALL, ask, assert_no_block_is_held, moved, text
from tiny import save_model
from wire import Wire, on

#: A load that fails is an error, and not an answer that D computes itself: it must show.
FAIL = {"kv_load_failure_policy": "fail"}


@pytest.fixture(scope="module")
def wire():
    with contextlib.closing(Wire()) as wire:
        yield wire


@pytest.fixture(scope="module")
def pair(wire, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hosts")
    save_tokenizer(save_model("nemotron_h", folder / "model"))
    key = folder / "key"
    key.write_bytes(base64.b64encode(os.urandom(32)))
    key.chmod(0o600)
    extra = {"lease_seconds": LEASE, "transport": "tcp", "push": "never", "key_file": str(key)}
    only = {
        # As behind a NAT: the address to listen on is not the one that peers use.
        "prefill": {"host": "0.0.0.0", "advertise": wire.left.address},
        "decode": {"host": wire.right.address},
    }
    # The router is where this thread is.
    hosts = {"prefill": wire.left, "decode": wire.right}
    with (
        on(wire.right),
        contextlib.closing(Pair(folder / "model", folder, SMALL, FAIL, extra, only, hosts)) as pair,
    ):
        pair.start("prefill", "decode")
        pair.start("router")
        try:
            yield pair
        finally:
            wire.set()


def test_answers_are_those_of_one_server_in_any_weather(wire, pair):
    draw = random.Random(1)
    for weather in ({}, {"delay_ms": 5.0, "jitter_ms": 2.0, "loss": 0.01}):
        wire.set(**weather)
        prompts = [text(draw, length) for length in (1, 127, 700, 3000)]
        alone = [ask(pair, "decode", prompt) for prompt in prompts]
        before = moved(pair)
        with ThreadPoolExecutor(len(prompts)) as pool:
            assert list(pool.map(lambda prompt: ask(pair, "router", prompt), prompts)) == alone
        assert moved(pair) - before >= sum(len(prompt) - 1 for prompt in prompts)
    wire.set()
    assert_no_block_is_held(pair)
    # With a key, between hosts.
    met = [line for line in pair.log("decode").read_text().splitlines() if "shook hands" in line]
    assert met and all("encrypted=1" in line and "sources=1" in line for line in met), met


def test_a_link_that_goes_away_in_the_middle_of_loads(wire, pair):
    draw = random.Random(2)
    prompts = [text(draw, 2000) for _ in range(6)]
    alone = [ask(pair, "decode", prompt) for prompt in prompts]
    # Slow enough for the link to go while bytes are on it.
    wire.set(rate=1e6, delay_ms=5.0)
    before = moved(pair)
    gone = threading.Event()

    def asked(prompt):
        try:
            return ask(pair, "router", prompt)
        except openai.APIStatusError as error:
            assert error.status_code >= 500
            return None

    def goes():
        # Some loads have ended, others have not.
        end = time.monotonic() + 60
        while moved(pair) == before and time.monotonic() < end:
            time.sleep(0.02)
        wire.set(cut=True)
        gone.set()
        time.sleep(5)
        wire.set(delay_ms=5.0)

    with ThreadPoolExecutor(len(prompts) + 1) as pool:
        link = pool.submit(goes)
        answers = list(pool.map(asked, prompts))
        link.result()
    assert gone.is_set()
    assert [answer or own for answer, own in zip(answers, alone)] == alone
    # It heals by itself, as soon as the router has seen that the other host is there.
    before = moved(pair)
    assert until("the router answers", ANSWER, lambda: asked(prompts[0])) == alone[0]
    assert moved(pair) - before >= len(prompts[0]) - 1
    wire.set()
    assert_no_block_is_held(pair)
