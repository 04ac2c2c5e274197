"""What can go wrong between two SGLang engines: controls, aborts, deaths, forged rooms, settings that are refused. The client
gets an error, both logs say why, nothing is lost, and the next request is served."""

import functools
import time

import faults
import pytest
from exact import check, check_control, hand_over, prompts, room

MORE = pytest.mark.more
QUICK = {"lease_seconds": 2, "push_timeout_seconds": 2, "load_timeout_seconds": 5}


def pair(start, kind="qwen3", p=None, d=None):
    """P, D, and an engine alone."""
    engines = [
        start(kind, "prefill", **{"settings": QUICK, **(p or {})}),
        start(kind, "decode", **{"settings": QUICK, **(d or {})}),
        start(kind, "alone"),
    ]
    return [engine.ready() for engine in engines]


def nothing_left(*engines):
    """All that an engine had taken is free again, as it says itself: SGLang counts its pools when it is idle."""
    for engine in engines:
        assert not engine.said("memory leak"), engine.log.read_text()[-2000:]
        assert not engine.said("Traceback"), engine.log.read_text()[-3000:]


@pytest.mark.parametrize("kind", [pytest.param("qwen3", marks=MORE), "nemotron_h"])
def test_the_answer_is_made_of_what_p_has(start, kind):
    prefill, decode, alone = pair(
        start, kind, p={"prepare": [faults.any_prompt]}, d={"prepare": [faults.any_prompt]}
    )
    check_control(prefill, decode, alone)
    nothing_left(prefill, decode)


@pytest.mark.parametrize("source", [pytest.param("pages", marks=MORE), "component"])
def test_a_spoiled_number_shows(start, source):
    prefill, decode, alone = pair(start, "nemotron_h", d={"prepare": [functools.partial(faults.spoiled, source)]})
    (prompt,) = prompts(3, (90,))
    made, _ = hand_over(prefill, decode, prompt)
    assert "error" not in made and made["ids"] != alone.generate(prompt, 8)


def test_a_request_that_is_aborted_leaves_nothing_behind(start):
    prefill, decode, alone = pair(start, d={"prepare": [functools.partial(faults.slow, 1.0)]})
    first, second = prompts(4, (50, 60))
    # While D waits for pages to be read, and again before P has even heard of it.
    for reads in (True, False):
        number = room()
        ours = prefill.ask(first, 8, room=number) if reads else None
        theirs = decode.ask(first, 8, room=number, source=prefill)
        if reads:
            decode.wait_for(f"room {number} waits")
        else:
            time.sleep(0.5)
        decode.abort(theirs)
        assert "abort" in str(decode.answer(theirs)).lower()
        if reads:
            assert "given it up" in prefill.answer(ours)["error"]
    # So does P, before D has asked.
    ours = prefill.ask(second, 8, room=room())
    time.sleep(0.5)
    prefill.abort(ours)
    assert "error" in prefill.answer(ours)
    check(prefill, decode, alone, lengths=(40, 70))
    nothing_left(prefill, decode)


def test_a_room_that_nobody_serves_and_one_of_another_prompt(start):
    prefill, decode, alone = pair(start)
    ours, theirs = prompts(5, (40, 41))
    # A room that P never hears of.
    lost = decode.answer(decode.ask(ours, 8, room=room(), source=prefill))
    assert "has not heard of room" in lost["error"]
    # One of somebody else's request: it finds nothing, and disturbs nobody.
    number = room()
    p = prefill.ask(ours, 8, room=number)
    forged = decode.ask(theirs, 8, room=number, source=prefill)
    right = decode.ask(ours, 8, room=number, source=prefill)
    assert decode.answer(right)["ids"] == alone.generate(ours, 8)
    assert "error" not in prefill.answer(p)
    assert "has not heard of room" in decode.answer(forged)["error"]
    # A prompt that nobody asks for: P gives it up when its time is over.
    assert "no decode engine has asked for it" in prefill.answer(prefill.ask(theirs, 8, room=room()))["error"]
    check(prefill, decode, alone, lengths=(40, 70))
    nothing_left(prefill, decode)


def test_the_death_of_either_side(start):
    prefill, decode, alone = pair(start, d={"prepare": [faults.dies_when_it_reads]})
    (prompt,) = prompts(6, (80,))
    # D, when it is about to read.
    number = room()
    p = prefill.ask(prompt, 8, room=number)
    d = decode.ask(prompt, 8, room=number, source=prefill)
    assert "error" in decode.answer(d)
    assert "error" in prefill.answer(p)
    # P, when it has promised: another D holds on to it until it is clear that nothing comes.
    heir = start("qwen3", "decode", settings=QUICK, prepare=[functools.partial(faults.slow, 1.5)]).ready()
    number = room()
    prefill.ask(prompt, 8, room=number)
    d = heir.ask(prompt, 8, room=number, source=prefill)
    heir.wait_for(f"room {number} waits")
    prefill.kill()
    assert "error" in heir.answer(d)
    # And a new P serves it.
    after = start("qwen3", "prefill", settings=QUICK).ready()
    for engine in (after, heir):
        assert not engine.said("memory leak")
    made, _ = hand_over(after, heir, prompt)
    assert made["ids"] == alone.generate(prompt, 8)


@MORE
def test_a_prefix_that_d_holds_is_not_read_again(start):
    cached = {"options": {"disaggregation_decode_enable_radix_cache": True, "page_size": 4}, "settings": QUICK | {"logging": "debug"}}
    prefill, decode, alone = pair(start, d=cached)
    (prompt,) = prompts(7, (64,))
    for longer in (prompt, prompt + [7, 8, 9], prompt[:40] + [11, 12, 13, 14]):
        made, _ = hand_over(prefill, decode, longer)
        assert "error" not in made, made
        assert made["ids"] == alone.generate(longer, 8)
    read = [int(line.split(" has ")[1].split()[0]) for line in decode.log.read_text().splitlines() if "bytes in" in line and "room" in line]
    assert len(read) == 3 and max(read[1:]) < read[0] / 2, read
    nothing_left(prefill, decode)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"options": {"optimistic_prefill_attempts": 1}}, "with --optimistic-prefill-attempts (1): a prompt may be"),
        ({"settings": {"port": 7000}}, "--disaggregation-bootstrap-port says where"),
        ({"prepare": [faults.moved]}, "DecodePreallocQueue._create_receiver_and_enqueue"),
    ],
)
def test_what_is_refused_is_said_by_name_when_an_engine_starts(start, more, words):
    engine = start("qwen3", "prefill", **more)
    with pytest.raises((RuntimeError, AssertionError)):
        engine.ready()
    assert engine.said(words), engine.log.read_text()[-3000:]


@MORE
def test_another_version_is_warned_of(start):
    engine = start("qwen3", "prefill", prepare=[faults.another_version]).ready()
    assert engine.said("SGLang 0.6.0 has not been tried with this release of kvferry")


@MORE
def test_engines_of_two_models_are_told_apart(start, folder):
    prefill, decode = start("qwen3", "prefill", settings=QUICK).ready(), start("lfm2", "decode", settings=QUICK).ready()
    (prompt,) = prompts(8, (20,))
    made, ours = hand_over(prefill, decode, prompt)
    assert "qwen3" in made["error"] and "lfm2" in made["error"]
    assert "error" in ours
