"""Several turns of a dialogue: P continues from what D has answered, and computes only what is new."""

import random

import pytest
from environment import REMOTE_DECODE
from exact import prompts

from .between import held, hold, stand_aside, stand_between
from .common import AHEAD, PATIENT, eventually, more
from .inside import begin, computed, count_computed, counter, leases, pump, side, steps
from .pushed import CHUNKS, content, ends, start
from .test_held import let_states_be_cached

#: Longer than a test.
KEPT = {"extra": PATIENT | {"next_turn_seconds": 600.0}}


@pytest.mark.parametrize(
    "kind, both, p",
    [
        ("qwen3", {}, {}),
        ("gemma3", {"prefix": False}, {}),
        ("nemotron_h", {}, {}),
        more("qwen3", {"prefix": True}, {}),
        more("qwen3", {}, {"max_num_batched_tokens": 32, "async_scheduling": True}),
        more("gemma3", {}, {"block_size": 64}),
        more("nemotron_h", {"async_scheduling": True}, {}),
        more("nemotron_h", {"prefix": True, "prepare": [let_states_be_cached]}, {}),
        more("falcon_h1", {}, {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}),
    ],
)
def test_six_turns(pair, kind, both, p):
    prefill, decode = pair(kind, both | KEPT, p)
    draw = random.Random(f"turns {kind}")
    prefill.call(count_computed)
    # A state and a window must not have seen the token that D begins with.
    held_back = 0 if kind == "qwen3" else 1
    said, params, there = [], {}, 0
    for turn, (length, answer) in enumerate(zip((70, 5, 33, 1, 64, 40), (12, 20, 1, 31, 7, 12))):
        said += prompts(draw, [length])[0]
        before, moved = prefill.call(computed), prefill.call(counter, "kvferry_loads_begun_total")
        _, params = prefill.generate(said, 1, dict(REMOTE_DECODE) | params)
        assert prefill.call(computed) - before == max(1, len(said) - held_back - there), turn
        # Not even one token is left that P could not have computed sooner than moved.
        assert prefill.call(counter, "kvferry_loads_begun_total") - moved == (turn > 0 and workers(p))
        made, params = decode.generate(said, answer, params)
        alone, _ = decode.generate(said, answer)
        assert made == alone, turn
        said += made
        # D has not computed its last token.
        there = len(said) - 1
        assert params["kvferry"]["tokens"] == params["remote_num_tokens"] == there
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
    decode.call(let_go)


@pytest.mark.parametrize("kind", ["qwen3", more("nemotron_h"), more("gemma3")])
def test_turns_that_go_to_both_engines_at_once(pair, kind):
    """P continues from what D has answered, and D reads while P computes what is new."""
    prefill, decode = pair(kind, {"prefix": False}, CHUNKS, {"extra": AHEAD["extra"] | KEPT["extra"]})
    draw = random.Random(f"turns at once {kind}")
    prefill.call(count_computed)
    held_back = 0 if kind == "qwen3" else 1
    said, kept, there = [[], []], [{}, {}], [0, 0]
    for turn, (lengths, answer) in enumerate((((70, 150), 12), ((100, 5), 20), ((1, 130), 1), ((33, 64), 12))):
        for one, new in zip(said, prompts(draw, lengths)):
            one += new
        before = prefill.call(computed)
        done = pushed(prefill, decode, said, answer, f"turn{turn}-", kept)
        expected = sum(max(1, len(one) - held_back - count) for one, count in zip(said, there))
        assert prefill.call(computed) - before == expected, turn
        assert [how for _, _, how in done] == ["length"] * 2
        assert [made for made, _, _ in done] == [decode.generate(one, answer)[0] for one in said], turn
        for one, (made, _, _) in zip(said, done):
            one += made
        kept, there = [params for _, params, _ in done], [len(one) - 1 for one in said]
        assert [params["kvferry"]["tokens"] for params in kept] == there
    decode.call(let_go)
    assert prefill.idle() == decode.idle() == 0


def pushed(prefill, decode, said, answer, prefix, kept):
    return ends(prefill, decode, start(prefill, decode, said, answer, prefix=prefix, kept=kept))


def workers(options):
    # Ranks that are processes of their own do not tell.
    return "tensor_parallel_size" not in options


def let_go(engine):
    """Nobody will continue from what it has answered."""
    for request in side(engine).turns.answers:
        side(engine).agent.revoke(request)


def answered(prefill, decode, prompt, answer=12):
    """A first turn: all that was said, and what the client is given for the next one."""
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    made, params = decode.generate(prompt, answer, params)
    return prompt + made, params


@pytest.mark.parametrize("kind", ["qwen3", "nemotron_h"])
def test_a_turn_that_does_not_go_on_from_the_answer(pair, kind):
    """Other tokens than D has, all of them or the last: P computes the prompt, and it is right."""
    prefill, decode = pair(kind, KEPT)
    draw = random.Random(f"another turn {kind}")
    prefill.call(count_computed)
    prompt, new, other = prompts(draw, [70, 30, 111])
    said, params = answered(prefill, decode, prompt)
    held_back = 0 if kind == "qwen3" else 1
    for next_ in (
        # As text that is tokenized again may be.
        said[:-2] + [said[-2] % 500 + 1, said[-1]] + new,
        other,
        # Shorter than what D has answered.
        said[:75],
    ):
        before = prefill.call(computed)
        _, again = prefill.generate(next_, 1, dict(REMOTE_DECODE) | params)
        assert prefill.call(computed) - before == len(next_) - held_back
        alone, _ = decode.generate(next_)
        assert decode.generate(next_, 12, again)[0] == alone
    # It is still there for who does.
    before = prefill.call(computed)
    _, again = prefill.generate(said + new, 1, dict(REMOTE_DECODE) | params)
    assert prefill.call(computed) - before == len(new) + 1 - held_back
    assert decode.generate(said + new, 12, again)[0] == decode.generate(said + new)[0]
    decode.call(let_go)


def keeps(policy):
    """Options of both engines, of which one may fail to load."""
    return KEPT | ({} if policy == "fail" else {"failure": policy})


POLICIES = pytest.mark.parametrize(
    "kind, policy",
    [("qwen3", "fail"), ("qwen3", "recompute"), more("nemotron_h", "fail"), more("nemotron_h", "recompute")],
)


@POLICIES
def test_an_answer_that_is_gone(pair, kind, policy):
    """P computes what D keeps no longer: that is no load that fails, whatever is to become of those."""
    prefill, decode = pair(kind, keeps(policy))
    draw = random.Random(f"gone {kind}")
    (prompt, new) = prompts(draw, [70, 30])
    prefill.call(count_computed)
    said, params = answered(prefill, decode, prompt)
    decode.call(let_go)
    assert decode.idle() == 0
    before, moved = prefill.call(computed), prefill.call(counter, "kvferry_loads_begun_total")
    again, how = continued(prefill, said + new, params)
    assert how == "length"
    assert prefill.call(computed) - before == len(said + new) - (kind != "qwen3")
    # Nothing was tried.
    assert prefill.call(counter, "kvferry_loads_begun_total") == moved
    assert again["do_remote_prefill"]
    assert decode.generate(said + new, 12, again)[0] == decode.generate(said + new)[0]
    decode.call(let_go)


def continued(prefill, prompt, params):
    """What P hands over for the next turn, and how it ended there."""
    prefill.call(begin, "next", prompt, 1, dict(REMOTE_DECODE) | params)
    ((_, again, how),) = prefill.call(pump).values()
    return again, how


@POLICIES
def test_an_answer_that_is_let_go_while_p_reads_it(pair, kind, policy):
    """Others may have its blocks by then: nothing that was read is used, and P's policy decides."""
    prefill, decode = pair(kind, keeps(policy))
    draw = random.Random(f"let go {kind}")
    prompt, new, other = prompts(draw, [70, 30, 200])
    prefill.call(count_computed)
    said, params = answered(prefill, decode, prompt)
    params["kvferry"]["ticket"]["address"] = f"127.0.0.1:{decode.call(stand_between)}"
    decode.call(hold, True)
    before, held_before = prefill.call(computed), prefill.call(content)
    prefill.call(begin, "next", said + new, 1, dict(REMOTE_DECODE) | params)
    # P has all of it, and D has not heard of that.
    eventually(lambda: prefill.call(steps, 1) or decode.call(held) == 1)
    assert prefill.call(content) != held_before
    assert prefill.call(computed) == before
    decode.call(let_go)
    assert decode.idle() == 0
    decode.generate(other, 1)
    decode.call(hold, False)
    ((_, again, how),) = prefill.call(pump).values()
    if policy == "fail":
        assert (again, how) == (None, "error")
        assert prefill.call(computed) == before
    else:
        assert how == "length"
        assert prefill.call(computed) - before == len(said + new) - (kind != "qwen3")
        assert decode.generate(said + new, 12, again)[0] == decode.generate(said + new)[0]
    decode.call(let_go)
    assert decode.call(stand_aside) == []


def test_answers_make_room(pair):
    """They are kept while nobody needs their blocks, and the oldest go first."""
    few = {"blocks": 33, "max_model_len": 512}
    prefill, decode = pair("qwen3", KEPT, d=few)
    draw = random.Random(20)
    # Six blocks each, of 32.
    kept = [answered(prefill, decode, prompt) for prompt in prompts(draw, [162] * 7)]
    names = [params["kvferry"]["ticket"]["request"] for _, params in kept]
    left = [lease["request"] for lease in decode.call(leases)]
    assert sorted(left) == sorted(names[-len(left) :]) and len(left) == 5
    # One that is being answered, and needs more and more.
    (short, long) = prompts(draw, [20, 480])
    assert decode.generate(short, 300)[0] == prefill.generate(short, 300)[0]
    assert len(decode.call(leases)) == 3
    # One that needs half of all at once.
    assert decode.generate(long)[0] == prefill.generate(long)[0]
    assert len(decode.call(leases)) == 2
    # What is left is as it was.
    said, params = kept[-1]
    prefill.call(count_computed)
    before = prefill.call(computed)
    _, again = prefill.generate(said + short, 1, dict(REMOTE_DECODE) | params)
    assert prefill.call(computed) - before == len(short) + 1
    assert decode.generate(said + short, 12, again)[0] == prefill.generate(said + short)[0]
    decode.call(let_go)


def test_nothing_is_kept_that_was_not_asked_for(pair):
    prefill, decode = pair("qwen3")
    (prompt,) = prompts(random.Random(21), [70])
    _, params = answered(prefill, decode, prompt)
    assert params is None
    prefill, decode = pair("qwen3", KEPT)
    assert decode.generate(prompt)[1] is None


def test_an_answer_that_nobody_continues_from(pair):
    """Its time is over: that is no loss to anybody."""
    prefill, decode = pair("qwen3", {"extra": PATIENT | {"next_turn_seconds": 12.0}})
    (prompt,) = prompts(random.Random(22), [70])
    answered(prefill, decode, prompt)
    assert decode.used_blocks() == 3
    assert decode.idle() == 0
    counts = decode.call(counts_of)
    assert (counts["leases_revoked"], counts["leases_expired"], counts["holds_lost"]) == (1, 0, 0)


def counts_of(engine):
    return side(engine).agent.counts()
