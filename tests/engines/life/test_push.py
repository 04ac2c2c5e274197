"""A request that goes to both engines at once: D reads what P has computed while P goes on."""

import dataclasses
import random
import time

import pytest
from environment import REMOTE_DECODE
from exact import prompts, unbound
from heard import forget_lines, listen, said

from .between import (
    end_of_less,
    end_of_more,
    epoch_before,
    far_out_of_range,
    fewer_blocks,
    fewer_tokens,
    longer_than_the_pool,
    more_than_anything_holds,
    more_than_the_tables_hold,
    other_blocks,
    out_of_range,
    stand_aside,
    stand_between,
    tell,
)
from .common import AHEAD, HANDSHAKE, PATIENT, USUAL, eventually, more
from .inside import (
    abort,
    begin,
    blank,
    computed,
    count_computed,
    count_preemptions,
    counter,
    filled,
    filled_of_each,
    forget,
    preemptions,
    pump,
    restarts,
    side,
    steps,
    take_at_once,
    turn,
    waiting,
    whats_left,
    where,
)
from .pushed import answers, push, start
from .test_held import ATTENTION, RECURRENT, STATES, block_size

#: Chunks of two or three blocks, or of less than one.
CHUNKS = {
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
    "async_scheduling": False,
    "extra": PATIENT | {"push": "always"},
}
#: Blocks of a P that has too few for all that it begins.
FEW = {"qwen3": 13, "nemotron_h": 7}
TWO = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
STAGES = {"pipeline_parallel_size": 2, "distributed_executor_backend": "mp"}
#: Options of a D that does not wait for long.
HASTY = {"extra": AHEAD["extra"] | HANDSHAKE | {"meet": 3.0, "patience": 20.0}}
#: What D's log says of a P that says what it cannot mean, and of one that says what cannot be.
CONTRADICTS = "the load failed failure=the engine to read from is not to be believed: the engine"
NOT_THERE = "the load failed failure=the request does not fit: source group 0:"


@pytest.mark.parametrize(
    "kind, p, d",
    [
        ("qwen3", {}, {"block_size": 64}),
        ("gemma3", {}, {}),
        ("nemotron_h", {}, {}),
        ("qwen3", TWO, {}),
        more("qwen3", STAGES, {}),
        more("qwen3", {"block_size": 96}, {}),
        more("qwen3", {"async_scheduling": True}, {"async_scheduling": True}),
        more("qwen3", {}, TWO),
        more("qwen3", STAGES, TWO),
        more("gemma3", {"block_size": 64}, TWO),
        more("nemotron_h", {"async_scheduling": True}, {"async_scheduling": True}),
        more("nemotron_h", STAGES, {}),
        more("falcon_h1", TWO, {}),
        more("falcon_h1", {}, STAGES),
    ],
)
def test_answers_are_those_of_one_engine(pair, kind, p, d):
    prefill, decode = pair(kind, None, CHUNKS | p, d)
    draw = random.Random(f"push {kind}")
    some = prompts(draw, [200, 1, 2, 31, 33, 64, 65, 130])
    alone = [prefill.generate(prompt)[0] for prompt in some]
    if kind == "gemma3":
        assert prefill.call(forget)
    # One after the other, and all at once.
    for prompt, expected in zip(some[:3], alone):
        assert push(prefill, decode, [prompt]) == [expected], len(prompt)
    assert push(prefill, decode, some) == alone
    # The control: only P's state leads to this answer.
    other = prompts(draw, [199])[0] + some[0][-1:]
    with unbound(prefill, decode):
        assert push(prefill, decode, some[:1], sent=[other]) == alone[:1]


@pytest.mark.parametrize("kind, length", [("qwen3", 300), ("nemotron_h", 480)])
def test_what_is_computed_is_read_while_p_goes_on(pair, kind, length):
    prefill, decode = pair(kind, None, CHUNKS)
    (prompt,) = prompts(random.Random(f"early {kind}"), [length])
    alone = prefill.generate(prompt)[0]
    decode.call(take_at_once, True)
    before = decode.call(content)
    (name,) = start(prefill, decode, [prompt])
    # All but two chunks, and then P rests.
    prefill.call(steps, length // 64)
    eventually(lambda: decode.call(steps, 1) or not decode.call(waiting))
    assert prefill.call(followed) == [(length // 64 - 1) * 64]
    # D computes nothing itself.
    eventually(lambda: decode.call(content) != before)
    ((made, _),) = answers(prefill, decode, [name])
    decode.call(take_at_once, False)
    assert made == alone


def content(engine):
    """Stands for all that is in its caches."""
    import hashlib

    from vllm.distributed.kv_transfer import get_kv_transfer_group

    made = hashlib.sha256()
    for storage in get_kv_transfer_group().worker.storages:
        made.update(storage.numpy().tobytes())
    return made.hexdigest()


def followed(engine):
    """How many tokens of each prompt D may read already."""
    return [one.tokens for one in side(engine).prefill.growing.values()]


def whole_blocks(engine):
    """The same in blocks that are full, by request."""
    from kvferry.vllm.params import stem

    prefill = side(engine).prefill
    # The smallest: a state's is as long as a prompt may be.
    size = min(prefill.groups.block_sizes(prefill.manager))
    return {stem(name): one.tokens // size for name, one in prefill.growing.items()}


def preempted(engine):
    """Requests that it has started over and not yet said anything of since."""
    from kvferry.vllm.params import stem

    growing = side(engine).prefill.growing.values()
    return [stem(one.request.request_id) for one in growing if one.request.status.name == "PREEMPTED"]


def read(decode):
    return decode.call(counter, "kvferry_read_bytes_total")


def test_prefixes_that_either_side_holds(pair):
    """What P holds can be read before it computes anything; what D holds is not moved."""
    prefill, decode = pair("qwen3", {"prefix": True}, CHUNKS, {})
    draw = random.Random(30)
    (prompt,) = prompts(draw, [250])
    alone = prefill.generate(prompt)[0]
    assert prefill.call(forget)
    for on_p, on_d in ((0, 0), (130, 0), (0, 130), (100, 200), (249, 40), (40, 249)):
        for engine, held in ((prefill, on_p), (decode, on_d)):
            if held:
                engine.generate(prompt[:held], 1)
        before = read(decode)
        assert push(prefill, decode, [prompt]) == [alone], (on_p, on_d)
        # 2,048 bytes a token, and little more.
        assert 0 < read(decode) - before < 2048 * (250 - on_d // 32 * 32) + 2048 * 32
        for engine in (prefill, decode):
            assert engine.idle() == 0
            assert engine.call(forget)


@pytest.mark.more
def test_prefixes_of_states_that_either_side_holds(pair):
    """A state comes whole, at the end, whatever else is held."""
    chunks = CHUNKS | {"max_num_batched_tokens": 256, "extra": CHUNKS["extra"] | STATES["extra"]}
    prefill, decode = pair("nemotron_h", STATES, chunks, {"extra": AHEAD["extra"] | STATES["extra"]})
    size = decode.call(block_size)
    (prompt,) = prompts(random.Random(45), [3 * size + 20])
    alone = prefill.generate(prompt)[0]
    prefill.call(count_computed)
    assert prefill.call(forget) and decode.call(forget)
    for on_p, on_d in ((0, 0), (2, 0), (0, 2), (1, 2), (2, 1), (3, 3)):
        for engine, held in ((prefill, on_p), (decode, on_d)):
            if held:
                engine.generate(prompt[: held * size + 5], 1)
        before, done = read(decode), prefill.call(computed)
        assert push(prefill, decode, [prompt]) == [alone], (on_p, on_d)
        assert prefill.call(computed) - done == len(prompt) - 1 - on_p * size, (on_p, on_d)
        assert read(decode) - before == RECURRENT + ATTENTION * (len(prompt) - 1 - on_d * size), (on_p, on_d)
        for engine in (prefill, decode):
            assert engine.idle() == 0
            assert engine.call(forget)


@pytest.mark.parametrize("kind", ["qwen3", more("nemotron_h")])
def test_more_requests_than_either_engine_holds(pair, kind):
    """P keeps what it has finished until D has blocks for it, and D takes none that P needs for that."""
    few = {"blocks": FEW[kind], "max_model_len": 256, "scheduler_reserve_full_isl": False}
    chunks = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": 24}
    prefill, decode = pair(kind, few | chunks, {"extra": CHUNKS["extra"]})
    draw = random.Random(46)
    many = prompts(draw, [1, 32, 33] + [draw.randrange(50, 180) for _ in range(9)])
    alone = [decode.generate(prompt, 40)[0] for prompt in many]
    there = prefill.call(where)
    # As it would be; and D is as eager as it can be, for those that P comes to last.
    for at_once in (False, True):
        decode.call(take_at_once, at_once)
        prefill.call(count_preemptions)
        names = [f"many{at_once}-{at}" for at in range(len(many))]
        for name, prompt in zip(names, many):
            prefill.call(begin, name, prompt, 1, dict(REMOTE_DECODE))
        for name, prompt in sorted(zip(names, many), reverse=at_once, key=lambda one: names.index(one[0])):
            decode.call(begin, name, prompt, 40, dict(there))
        # D has all the blocks that it will take.
        decode.call(steps, 20)
        assert answers(prefill, decode, names, 90) == [(tokens, "length") for tokens in alone]
        assert prefill.call(preemptions) > 0
    decode.call(take_at_once, False)


@pytest.mark.parametrize("kind", ["qwen3", more("nemotron_h")])
def test_p_starts_requests_over(pair, kind):
    """On few blocks, while D reads them: what was read before counts for nothing."""
    few = {"blocks": FEW[kind], "max_model_len": 256, "scheduler_reserve_full_isl": False}
    # The hybrid's blocks are of 128 tokens: two requests have one when the first one needs another.
    chunk, shortest = (24, 50) if kind == "qwen3" else (32, 140)
    chunks = {"max_num_batched_tokens": 64, "long_prefill_token_threshold": chunk}
    prefill, decode = pair(kind, None, few | chunks | {"extra": CHUNKS["extra"]}, {})
    draw = random.Random(31)
    many = prompts(draw, [draw.randrange(shortest, 180) for _ in range(12)])
    alone = [decode.generate(prompt)[0] for prompt in many]
    decode.call(take_at_once, True)
    names = start(prefill, decode, many)
    eventually(lambda: decode.call(steps, 1) or len(decode.call(waiting)) < 6)
    decode.call(blank)
    # D gives nothing back yet, so P gets short of blocks on every machine.
    again, until = set(), time.monotonic() + 90
    while not again:
        assert time.monotonic() < until
        eventually(lambda: behind(prefill, decode) == set())
        there = {name for name, count in decode.call(filled_of_each).items() if count}
        prefill.call(steps, 1)
        again = there & set(prefill.call(preempted))
    decode.call(take_at_once, False)
    assert [made for made, _ in answers(prefill, decode, names)] == alone


def behind(prefill, decode):
    """Requests of which D has not read all whole blocks that P has computed."""
    done, here = prefill.call(whole_blocks), decode.call(filled_of_each)
    return {name for name in done.keys() & here.keys() if here[name] < done[name]}


@pytest.mark.parametrize("kind, length", [("qwen3", 300), more("nemotron_h", 480)])
def test_a_request_that_is_started_over_while_it_is_read(pair, kind, length):
    prefill, decode = pair(kind, None, CHUNKS)
    draw = random.Random(32)
    prompt, other = prompts(draw, [length, 300])
    alone = prefill.generate(prompt)[0]
    (name,) = begin_to_read(prefill, decode, prompt)
    decode.call(blank)
    prefill.call(steps, length // 64)
    eventually(lambda: decode.call(filled) > 0)
    # Its blocks go to somebody else before it gets others.
    prefill.call(preempt, other)
    prefill.call(steps, 3)
    decode.call(steps, 3)
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone
    prefill.call(pump)


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_an_epoch_of_the_past(pair, policy):
    """What P has started over is another grant: nobody reads by the one before."""
    prefill, decode = pair("qwen3", None, CHUNKS, HASTY | {"failure": policy})
    prompt, other = prompts(random.Random(37), [300, 300])
    alone = decode.generate(prompt)[0]
    made = {}
    for change in (-1, 1, 0):
        prefill.call(begin, "r", prompt, 1, dict(REMOTE_DECODE))
        prefill.call(steps, 3)
        prefill.call(preempt, other)
        eventually(lambda: prefill.call(steps, 1) or prefill.call(restarts) == [1])
        while "r" not in made:
            made |= prefill.call(pump)
        _, params, _ = made.pop("r")
        params["kvferry"]["ticket"]["epoch"] += change
        before = prefill.call(refused)
        decode.call(begin, "r", prompt, 12, params)
        ((tokens, _, how),) = decode.call(pump).values()
        if change and policy == "fail":
            assert how == "error"
        else:
            assert tokens == alone, change
        assert prefill.call(refused) - before == bool(change)
        assert decode.idle() == prefill.idle() == 0


def refused(engine):
    return side(engine).agent.counts()["confirmations_not_granted"]


def preempt(engine, prompt):
    """As vLLM does when blocks are short; another request comes first then."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    (request,) = scheduler.running
    scheduler.running.remove(request)
    scheduler._preempt_request(request, time.monotonic())
    begin(engine, "other", prompt, 1)
    other = next(one for one in scheduler.waiting if one is not request)
    scheduler.waiting.remove_requests([other])
    scheduler.waiting.prepend_request(other)


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_whoever_comes_late_or_never(pair, policy):
    prefill, decode = pair("qwen3", None, CHUNKS, HASTY | {"failure": policy})
    draw = random.Random(33)
    prompt, another = prompts(draw, [150, 150])
    alone = decode.generate(prompt)[0]
    there = prefill.call(where)

    def ends(name, ok):
        ((made, _, how),) = decode.call(pump).values()
        assert (made == alone) if ok or policy == "recompute" else (how == "error"), name

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
    decode.call(begin, "never", prompt, 12, dict(there))
    ends("never", False)
    # P's client leaves: before P has begun, and when D has read some of it.
    for count in (0, 2):
        (name,) = begin_to_read(prefill, decode, prompt, f"left{count}-", meet=3.0)
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
    decode.call(begin, "other", prompt, 12, there | {"remote_engine_id": "another"})
    ends("other", False)
    # Nobody is there.
    decode.call(begin, "nobody", prompt, 12, there | {"remote_port": 1})
    ends("nobody", False)
    assert prefill.idle() == decode.idle() == 0


@pytest.mark.parametrize("policy", [more("fail"), more("recompute")])
def test_whoever_leaves_while_states_are_computed(pair, policy):
    """What grows has been read, and what comes at the end has not."""
    prefill, decode = pair("nemotron_h", None, CHUNKS, HASTY | {"failure": policy})
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


def read_some(prefill, decode, count):
    """P takes so many steps, and D reads what they have computed."""
    decode.call(blank)
    prefill.call(steps, count)
    eventually(lambda: decode.call(filled) >= bool(count))


def test_two_with_one_name(pair):
    """Whoever has it first reads it, and the other one is computed."""
    prefill, decode = pair("qwen3", None, CHUNKS, HASTY | {"failure": "recompute"})
    (prompt,) = prompts(random.Random(34), [150])
    alone = decode.generate(prompt)[0]
    there = prefill.call(where)
    prefill.call(begin, "twin", prompt, 1, dict(REMOTE_DECODE))
    made = decode.call(twins, prompt, there)
    until = time.monotonic() + 60
    while len(made) < 2:
        assert time.monotonic() < until
        prefill.call(turn)
        made |= decode.call(turn)
    assert [one[0] for one in made.values()] == [alone] * 2


def test_a_twin_leaves(pair):
    """The other one goes on reading what both have the name of."""
    prefill, decode = pair("qwen3", None, CHUNKS, HASTY)
    (prompt,) = prompts(random.Random(44), [150])
    alone = decode.generate(prompt)[0]
    prefill.call(begin, "twin", prompt, 1, dict(REMOTE_DECODE))
    decode.call(twins, prompt, prefill.call(where))
    prefill.call(steps, 1)
    eventually(lambda: decode.call(steps, 1) or decode.call(computed_here))
    (twin,) = decode.call(computed_here)
    decode.call(abort, twin)
    ((name, (made, _, how)),) = turns_until(prefill, decode).items()
    assert (made, how) == (alone, "length") and name != twin
    assert not decode.call(whats_left)["unwanted"], "D steps for nothing"


def computed_here(engine):
    """Requests that do not wait for what another engine has, without what vLLM adds to their names."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    here = (name for name in scheduler.requests if name not in side(engine).decode.wanted)
    return [name.rpartition("-")[0] for name in here]


def turns_until(prefill, decode):
    """Both engines work until D has an answer."""
    made, until = {}, time.monotonic() + 90
    while not made:
        assert time.monotonic() < until
        prefill.call(turn)
        made = decode.call(turn)
    return made


@pytest.mark.more
def test_one_name_at_two_engines(engines, pair):
    """Both follow it: one of them has it at least, and the other one has it or computes it."""
    options = HASTY | {"failure": "recompute"}
    prefill, decode = pair("qwen3", None, CHUNKS, options)
    other = engines("qwen3", "kv_both", **USUAL["qwen3"] | options)
    (prompt,) = prompts(random.Random(41), [150])
    alone = decode.generate(prompt)[0]
    there = prefill.call(where)
    made, until = [], time.monotonic() + 90
    for engine in (decode, other):
        engine.call(begin, "both", prompt, 12, dict(there))
    prefill.call(begin, "both", prompt, 1, dict(REMOTE_DECODE))
    while len(made) < 2:
        assert time.monotonic() < until
        prefill.call(turn)
        for engine in (decode, other):
            made += [tokens for tokens, _, _ in engine.call(turn).values()]
    assert made == [alone] * 2
    assert prefill.idle() == decode.idle() == other.idle() == 0


def test_requests_that_each_server_names_for_itself(pair):
    """As those to `/v1/responses`: the prompt is what they have in common."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    draw = random.Random(39)
    some = prompts(draw, [150, 33, 70])
    alone = [prefill.generate(prompt)[0] for prompt in some]
    before = read(decode)
    names = start(prefill, decode, some, prefix="resp_d", on_p="resp_p")
    assert [made for made, _ in answers(prefill, decode, names)] == alone
    # 2,048 bytes a token: D has computed none of them.
    assert read(decode) - before >= 2048 * sum(len(prompt) - 1 for prompt in some)


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_a_name_of_somebody_else(pair, policy):
    """Names of requests are no secret, and tables are P's own: the prompt tells."""
    prefill, decode = pair("qwen3", None, CHUNKS, HASTY | {"failure": policy})
    prompt, theirs = prompts(random.Random(38), [150, 150])
    alone = decode.generate(prompt)[0]
    before = prefill.call(refused)
    (name,) = start(prefill, decode, [theirs], sent=[prompt])
    ((made, how),) = answers(prefill, decode, [name])
    assert (how == "error") if policy == "fail" else (made == alone)
    assert prefill.call(refused) - before == 1
    assert decode.idle() == prefill.idle() == 0


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_time_counts_from_when_p_has_something(pair, policy):
    """A deadline is for what there is to read. How long D waits for more is another matter, which ends, too."""
    prefill, decode = pair("qwen3", None, CHUNKS, HASTY | {"failure": policy})
    some = prompts(random.Random(43), [300, 200])
    alone = [decode.generate(prompt)[0] for prompt in some]
    eventually(knows, prefill, decode, some[0])
    # P has some of the first one and nothing of the second when it rests, for longer than the deadline.
    before, ended = read(decode), decode.call(counter, "kvferry_loads_ended_total")
    names = begin_to_read(prefill, decode, some[0], "first", deadline=5.0, patience=90.0)
    prefill.call(steps, 3)
    names += begin_to_read(prefill, decode, some[1], "second", deadline=5.0, patience=90.0)
    time.sleep(6)
    assert decode.call(counter, "kvferry_loads_ended_total") == ended
    assert answers(prefill, decode, names) == [(tokens, "length") for tokens in alone]
    # D has computed neither: 2,048 bytes a token.
    assert read(decode) - before >= 2048 * (299 + 199)
    assert prefill.idle() == decode.idle() == 0
    # P stops half way, and D does not wait for ever.
    decode.call(listen)
    decode.call(forget_lines)
    begin_to_read(prefill, decode, some[0], "still", patience=5.0)
    prefill.call(steps, 3)
    # D's scheduler has heard that nothing comes any more when it hears how the load has ended.
    eventually(lambda: not decode.call(epochs))
    ((made, _, how),) = decode.call(pump, 90).values()
    assert decode.call(whats_left)["unwanted"] == []
    assert (how == "error") if policy == "fail" else (made == alone[0])
    assert decode.call(said, "the load failed failure=the deadline passed while it was following")
    prefill.call(pump)
    assert prefill.idle() == decode.idle() == 0


def epochs(engine):
    """Of the requests that D waits for and knows how far they are."""
    decode = side(engine).decode
    so_far = [decode.agent.frontier(name) for name in decode.wanted]
    return [frontier["epoch"] for frontier in so_far if frontier is not None]


def knows(prefill, decode, prompt, there=None):
    """Whether D reads from P: it does not where a busy machine takes longer than D gives it to shake hands."""
    before = read(decode)
    answers(prefill, decode, start(prefill, decode, [prompt], prefix="met", there=there))
    return read(decode) > before


def begin_to_read(prefill, decode, prompt, prefix="r", there=None, **given):
    """Both engines have it, and D has blocks for it, with other options than it has for others."""
    given = {"meet": 90.0, "patience": 90.0} | given
    before = decode.call(set_options, given)
    decode.call(take_at_once, True)
    names = start(prefill, decode, [prompt], prefix=prefix, there=there)
    eventually(lambda: decode.call(steps, 1) or not decode.call(waiting))
    decode.call(take_at_once, False)
    decode.call(set_options, before)
    return names


def set_options(engine, given):
    """From now on. Answers what they were."""
    decode = side(engine).decode
    before = {name: getattr(decode.options, name) for name in given}
    decode.options = dataclasses.replace(decode.options, **given)
    return before


def twins(engine, prompt, there):
    """Two requests whose names differ in what vLLM adds to them."""
    for name in ("twin-1", "twin-2"):
        begin(engine, name, prompt, 12, dict(there))
    # Names of one stem: vLLM's own digits come last.
    for name, wanted in side(engine).decode.wanted.items():
        assert wanted.follows["name"] in ("twin-1:150", "twin-2:150"), name
        side(engine).agent.unfollow(name)
        wanted.follows["name"] = "twin:150"
        side(engine).agent.follow(name, **wanted.follows, patience=20.0)
    return {}


def test_an_engine_that_contradicts_itself(pair):
    """P's own agent does not pass on what cannot be: D reads by what was right."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    (prompt,) = prompts(random.Random(35), [300])
    alone = prefill.generate(prompt)[0]
    (name,) = start(prefill, decode, [prompt])
    prefill.call(steps, 3)
    decode.call(steps, 3)
    # Fewer tokens, other blocks, and more blocks than there are.
    assert prefill.call(contradict) == ["changed", "changed", "table_too_long"]
    ((made, _),) = answers(prefill, decode, [name])
    assert made == alone


def contradict(engine):
    import kvferry

    prefill, agent = side(engine).prefill, side(engine).agent
    ((name, growing),) = prefill.growing.items()
    (table,) = prefill.groups.grown(prefill.manager, name, growing.tokens)
    kinds = []
    for tokens, blocks in (
        (growing.tokens - 32, [table[:-1]]),
        (growing.tokens, [table[::-1]]),
        (growing.tokens, [table + list(range(1, 64)) * 20]),
    ):
        try:
            agent.advance(name, tokens=tokens, blocks=blocks)
            kinds.append("passed on")
        except kvferry.AgentError as error:
            kinds.append(error.kind)
    return kinds


@pytest.mark.parametrize("policy", [more("fail"), "recompute"])
def test_an_agent_that_passes_contradictions_on(pair, policy):
    """What D has heard does not shrink, does not change, and does not go back to an epoch that is over. What it hears
    then must be there. From whoever says otherwise nothing is read any more, and nothing that was read is used."""
    prefill, decode = pair("qwen3", None, CHUNKS, HASTY | {"failure": policy})
    prompt, other = prompts(random.Random(42), [300, 64])
    alone = decode.generate(prompt)[0]
    decode.call(listen)
    there = prefill.call(where) | {"remote_port": prefill.call(stand_between)}
    eventually(knows, prefill, decode, prompt, there)
    for change, why in (
        (fewer_tokens, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 64 "),
        (fewer_blocks, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 129 "),
        (other_blocks, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 129 "),
        (end_of_less, f"{CONTRADICTS} had granted 128 tokens in epoch {{0}}, and now grants 64 "),
        (epoch_before, f"{CONTRADICTS} speaks of epoch {{1}} after epoch {{0}}"),
        # P is asked whether they were its tables.
        (longer_than_the_pool, "what was read is not used loss=the block tables that were read are not those"),
        (out_of_range, f"{NOT_THERE} the table names block 1000000 at position 6, but there are only 64"),
        (far_out_of_range, f"{NOT_THERE} the table names block 4294967295 at position 6, but there are only 64"),
        (more_than_the_tables_hold, f"{NOT_THERE} position 6 is needed, but the table has 6 entries"),
        (more_than_anything_holds, f"{NOT_THERE} position 6 is needed, but the table has 6 entries"),
        (end_of_more, f"{NOT_THERE} position 6 is needed, but the table has 6 entries"),
    ):
        begin_to_read(prefill, decode, prompt, there=there)
        # Twice, because P starts over: three chunks, of which D knows that two are complete, and reads all.
        for again in (False, True):
            if again:
                prefill.call(preempt, other)
            decode.call(blank)
            eventually(lambda: prefill.call(steps, 1) or prefill.call(followed) == [128])
            eventually(lambda: decode.call(filled) == 6)
        decode.call(forget_lines)
        (epoch,) = decode.call(epochs)
        why = why.format(epoch, epoch - 1)
        # P computes nothing meanwhile: D hears of it because it asks.
        prefill.call(tell, change)
        ((made, _, how),) = decode.call(pump, 90).values()
        prefill.call(tell, None)
        assert (how == "error") if policy == "fail" else (made == alone), why
        assert decode.call(said, why), why
        prefill.call(pump)
        assert prefill.idle() == decode.idle() == 0
    # It was what is said in between, and nothing else.
    names = begin_to_read(prefill, decode, prompt, there=there)
    assert answers(prefill, decode, names) == [(alone, "length")]
    assert prefill.call(stand_aside) == []


def test_routers_that_ask_p_first_keep_working(pair):
    """With P's parameters as they were, and with what the stock router leaves of them."""
    prefill, decode = pair("qwen3", None, CHUNKS)
    (prompt,) = prompts(random.Random(36), [150])
    alone = decode.generate(prompt)[0]
    (params,) = prefill.prefill([prompt])
    assert params["transfer_mode"] == "push"
    assert decode.generate(prompt, params=params)[0] == alone
    prefill.call(begin, "first", prompt, 1, dict(REMOTE_DECODE))
    ((_, params, _),) = prefill.call(pump).values()
    del params["kvferry"], params["remote_block_ids"]
    decode.call(begin, "first", prompt, 12, params)
    assert answers(prefill, decode, ["first"])[0][0] == alone
    quiet, _ = pair("qwen3", None, CHUNKS | {"extra": PATIENT | {"push": "never"}})
    (params,) = quiet.prefill([prompt])
    assert "transfer_mode" not in params
    assert decode.generate(prompt, params=params)[0] == alone
