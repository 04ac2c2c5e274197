"""Requests of both engines that one of them gets late or never, or that somebody leaves."""

import random
import time

import pytest
from environment import REMOTE_DECODE
from exact import prompts
from heard import forget_lines, listen, said

from .common import eventually, more
from .inside import abort, begin, counter, pump, steps, waiting, whats_left, where
from .pushed import CHUNKS, BOUNDED, answers, begin_to_read, epochs, hasty, knows, read, read_some, start


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_whoever_comes_late_or_never(pair, policy):
    prefill, decode = pair("qwen3", None, CHUNKS, BOUNDED | {"failure": policy})
    draw = random.Random(33)
    prompt, another = prompts(draw, [150, 150])
    alone = decode.generate(prompt)[0]
    there = prefill.call(where)

    def ends(name, ok):
        ((made, _, how),) = decode.call(pump).values()
        assert (made == alone) if ok or policy == "recompute" else (how == "error"), name

    def waits_in_vain(name, there):
        with hasty(decode):
            decode.call(begin, name, prompt, 12, dict(there))
            ends(name, False)

    # D has it before P has heard of it.
    decode.call(begin, "early", prompt, 12, dict(there))
    decode.call(steps, 20)
    assert [name.startswith("early") for name in decode.call(waiting)] == [True]
    assert decode.used_blocks() == 0
    prefill.call(begin, "early", prompt, 1, dict(REMOTE_DECODE))
    assert answers(prefill, decode, ["early"])[0][0] == alone
    # P has long finished.
    prefill.call(begin, "late", prompt, 1, dict(REMOTE_DECODE))
    prefill.call(pump)
    decode.call(begin, "late", prompt, 12, dict(there))
    assert answers(prefill, decode, ["late"])[0][0] == alone
    # P never gets it.
    waits_in_vain("never", there)
    # P's client leaves: before P has begun, and when D has read some of it.
    for count in (0, 2):
        (name,) = begin_to_read(prefill, decode, prompt, f"left{count}-")
        read_some(prefill, decode, count)
        prefill.call(abort, name)
        ends("left", False)
        assert prefill.idle() == 0
    # D's client leaves before P has heard of it.
    decode.call(begin, "unheard", prompt, 12, dict(there))
    decode.call(steps, 2)
    decode.call(abort, "unheard")
    prefill.call(begin, "unheard", prompt, 1, dict(REMOTE_DECODE))
    assert decode.idle() == 0
    prefill.call(pump)
    assert prefill.idle() == 0
    # The same, and it is tried again under the same name: P hears of it once, and it is wanted.
    decode.call(begin, "retried0", prompt, 12, dict(there))
    decode.call(steps, 2)
    decode.call(abort, "retried0")
    before = read(decode)
    assert answers(prefill, decode, start(prefill, decode, [prompt], prefix="retried"))[0][0] == alone
    assert read(decode) > before
    # D's client leaves: P computes it, and keeps nothing.
    for count in (0, 2):
        (name,) = begin_to_read(prefill, decode, prompt, f"gone{count}-")
        read_some(prefill, decode, count)
        decode.call(abort, name)
        assert decode.idle() == 0
        prefill.call(pump)
        assert prefill.idle() == 0
    # And it is tried again under the same name, at once, with another prompt.
    names = start(prefill, decode, [another], prefix="again")
    prefill.call(steps, 2)
    decode.call(steps, 5)
    for engine in (decode, prefill):
        engine.call(abort, names[0])
    names = start(prefill, decode, [prompt], prefix="again")
    assert answers(prefill, decode, names)[0][0] == alone
    # Another engine is there than the one that was meant.
    waits_in_vain("other", there | {"remote_engine_id": "another"})
    # Nobody is there.
    waits_in_vain("nobody", there | {"remote_port": 1})
    assert prefill.idle() == decode.idle() == 0


@pytest.mark.parametrize("policy", [more("fail"), more("recompute")])
def test_whoever_leaves_while_states_are_computed(pair, policy):
    """What grows has been read, and what comes at the end has not."""
    prefill, decode = pair("nemotron_h", None, CHUNKS, BOUNDED | {"failure": policy})
    (prompt,) = prompts(random.Random(44), [480])
    alone = decode.generate(prompt)[0]
    eventually(knows, prefill, decode, prompt)
    (name,) = begin_to_read(prefill, decode, prompt, "left")
    read_some(prefill, decode, 7)
    prefill.call(abort, name)
    ((made, _, how),) = decode.call(pump).values()
    assert (how == "error") if policy == "fail" else (made == alone)
    assert prefill.idle() == decode.idle() == 0
    (name,) = begin_to_read(prefill, decode, prompt, "gone")
    read_some(prefill, decode, 7)
    decode.call(abort, name)
    assert decode.idle() == 0
    prefill.call(pump)
    assert prefill.idle() == 0


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_time_counts_from_when_p_has_something(pair, policy):
    """A deadline is for what there is to read. How long D waits for more is another matter, which ends, too."""
    prefill, decode = pair("qwen3", None, CHUNKS, BOUNDED | {"failure": policy})
    some = prompts(random.Random(43), [300, 200])
    alone = [decode.generate(prompt)[0] for prompt in some]
    eventually(knows, prefill, decode, some[0])
    # P has some of the first one and nothing of the second when it rests, for longer than the deadline: which
    # must do for a busy machine to read what there is.
    deadline = 15.0
    before, ended = read(decode), decode.call(counter, "kvferry_loads_ended_total")
    names = begin_to_read(prefill, decode, some[0], "first", load_timeout_seconds=deadline)
    prefill.call(steps, 3)
    names += begin_to_read(prefill, decode, some[1], "second", load_timeout_seconds=deadline)
    time.sleep(deadline + 1)
    assert decode.call(counter, "kvferry_loads_ended_total") == ended
    assert answers(prefill, decode, names) == [(tokens, "length") for tokens in alone]
    # D has computed neither: 2,048 bytes a token.
    assert read(decode) - before >= 2048 * (299 + 199)
    assert prefill.idle() == decode.idle() == 0
    # P stops half way, and D does not wait for ever.
    decode.call(listen)
    decode.call(forget_lines)
    begin_to_read(prefill, decode, some[0], "still", queue_timeout_seconds=5.0)
    prefill.call(steps, 3)
    # D's scheduler has heard that nothing comes any more when it hears how the load has ended.
    eventually(lambda: not decode.call(epochs))
    ((made, _, how),) = decode.call(pump, 90).values()
    assert decode.call(whats_left)["unwanted"] == []
    assert (how == "error") if policy == "fail" else (made == alone[0])
    assert decode.call(said, "the load failed failure=the deadline passed while it was following")
    prefill.call(pump)
    assert prefill.idle() == decode.idle() == 0
