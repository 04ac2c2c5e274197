"""What cannot be loaded costs its own request, or nothing, as the user chose."""

import contextlib
import random

import pytest
from exact import prompts
from serving import Server

from .common import HANDSHAKE, SHORT, USUAL, eventually, expect, meets, more
from .inside import begin, counter, give_up, leases, pump, side, steps

POLICIES = pytest.mark.parametrize("policy", [more("fail"), "recompute"])


@pytest.mark.parametrize(
    "kind, policy",
    [
        ("qwen3", "fail"),
        more("qwen3", "recompute"),
        more("nemotron_h", "fail"),
        ("nemotron_h", "recompute"),
    ],
)
def test_what_cannot_be_loaded(engines, pair, kind, policy, tmp_path):
    options = {"failure": policy, "extra": HANDSHAKE}
    # D hears of a lease that is over when it asks for more time, which it does three times a term.
    prefill, decode = pair(kind, p={"extra": {"lease_seconds": 60.0}}, d=options)
    hasty, _ = pair(kind, p={"extra": SHORT}, d=options)
    draw = random.Random(8)
    (prompt,) = prompts(draw, [70])
    alone = decode.generate(prompt)[0]

    def fails(params):
        expect(decode, policy, prompt, params, alone)

    # It works.
    eventually(meets, prefill, decode, prompt)
    assert decode.generate(prompt, params=prefill.prefill([prompt])[0])[0] == alone
    # The lease has ended: nobody came, and nobody is asked to.
    (params,) = hasty.prefill([prompt])
    assert hasty.idle() == 0
    fails(params)
    # It ends while the request waits.
    (params,) = prefill.prefill([prompt])
    decode.call(begin, "r", prompt, 12, params)
    prefill.call(give_up, params)
    eventually(lambda: decode.call(side_lost))
    before = decode.call(counter, "kvferry_loads_begun_total")
    (end,) = decode.call(pump).values()
    assert end[2] == "error" if policy == "fail" else end[0] == alone
    assert decode.call(counter, "kvferry_loads_begun_total") == before
    # Tables that make no sense.
    for change in (
        {"remote_block_ids": []},
        {"remote_block_ids": [[]] * len(params["remote_block_ids"])},
        {"remote_block_ids": [[10**6]] * 9},
        {"remote_block_ids": [[-1]] * len(params["remote_block_ids"])},
        {"remote_block_ids": [[2**63]] * len(params["remote_block_ids"])},
        {"remote_block_ids": [["1", None]]},
        {"remote_block_ids": [{"a": 1}, 5]},
        {"first": [2**63] * len(params["remote_block_ids"])},
        {"first": [-1] * len(params["remote_block_ids"])},
        {"first": ["x"]},
        {"first": []},
    ):
        (params,) = prefill.prefill([prompt])
        params["kvferry"] |= {k: v for k, v in change.items() if k == "first"}
        fails(params | {k: v for k, v in change.items() if k != "first"})
        prefill.call(give_up, params)
        assert prefill.idle() == 0
    # A ticket of another engine's lease, and one of none.
    for change in ({"nonce": "0"}, {"request": "no such"}, {"incarnation": "1"}):
        (params,) = prefill.prefill([prompt])
        ticket = dict(params["kvferry"]["ticket"])
        params["kvferry"]["ticket"] |= change
        fails(params)
        params["kvferry"]["ticket"] = ticket
        prefill.call(give_up, params)
    # Another model.
    stranger = {"qwen3": "gemma3", "nemotron_h": "falcon_h1"}[kind]
    other = engines(stranger, "kv_producer", **USUAL[stranger])
    (params,) = other.prefill([prompt])
    fails(params)
    other.call(give_up, params)
    assert other.idle() == 0


def side_lost(engine):
    decode = side(engine).decode
    decode.hear_of_lost()
    return any(wanted.lost for wanted in decode.wanted.values())


@POLICIES
def test_an_engine_that_is_gone(engines, pair, folder, policy, tmp_path):
    # A seed of its own, for an engine of its own to kill.
    options = {"failure": policy, "extra": HANDSHAKE | {"load_timeout_seconds": 5.0}}
    prefill, decode = pair("qwen3", p={"seed": len(policy)}, d=options)
    draw = random.Random(9)
    (prompt,) = prompts(draw, [200])
    alone = decode.generate(prompt)[0]
    eventually(meets, prefill, decode, prompt)
    known, killed, unknown = prefill.prefill([prompt] * 3)
    assert decode.generate(prompt, params=known)[0] == alone
    # While it is read.
    with prefill.stopped():
        decode.call(begin, "r", prompt, 12, killed)
        decode.call(steps, 5)
        prefill.kill()
    (end,) = decode.call(pump).values()
    assert end[2] == "error" if policy == "fail" else end[0] == alone
    # Before it is asked.
    expect(decode, policy, prompt, unknown, alone)
    # Whoever does not hold the key is told nothing.
    key = tmp_path / "key"
    key.write_text("0123456789abcdef0123456789abcdef")
    options = USUAL["qwen3"] | {"extra": {"key_file": str(key)}}
    locked = Server(folder / "qwen3", "kv_producer", **options)
    with contextlib.closing(locked):
        expect(decode, policy, prompt, locked.prefill([prompt])[0], alone)


def test_parameters_that_are_no_parameters(pair):
    prefill, decode = pair("nemotron_h")
    (prompt,) = prompts(random.Random(10), [70])
    alone = decode.generate(prompt)[0]
    (good,) = prefill.prefill([prompt])
    ours = good["kvferry"]
    want = {"do_remote_prefill": True}
    for params in (
        want,
        want | {"kvferry": None},
        want | {"kvferry": {}},
        want | {"kvferry": ours},
        good | {"kvferry": ours | {"ticket": {}}},
        good | {"kvferry": ours | {"ticket": ours["ticket"] | {"address": 5}}},
        good | {"kvferry": ours | {"ticket": ours["ticket"] | {"term_ms": -1}}},
        good | {"kvferry": ours | {"ticket": ours["ticket"] | {"nonce": "none"}}},
        good | {"kvferry": ours | {"ticket": {"address": [["a"]] * 50}}},
        good | {"kvferry": ours | {"tokens": "70"}},
        good | {"kvferry": ours | {"tokens": None}},
        good | {"kvferry": ours | {"first": 0}},
        good | {"remote_block_ids": None},
    ):
        # This engine computes the prompt.
        assert decode.generate(prompt, params=params)[0] == alone, params
        assert decode.used_blocks() == 0
    # States of another position are of no use, and P need not keep them.
    for tokens in (70, 2**63, -5, 0):
        (params,) = prefill.prefill([prompt])
        params["kvferry"]["tokens"] = tokens
        assert decode.generate(prompt, params=params)[0] == alone, tokens
        eventually(lambda: len(prefill.call(leases)) == 1)
    assert decode.generate(prompt, params=good)[0] == alone
