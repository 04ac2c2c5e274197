"""Requests that go to both engines at once, as a router sends them when P's parameters say so."""

import contextlib
import dataclasses
import itertools
import time

from environment import REMOTE_DECODE

from .common import AHEAD, PATIENT, eventually
from .inside import begin, blank, counter, filled, side, steps, take_at_once, turn, waiting, where

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
#: Options of a D that does not wait for ever, but for longer than anything takes on a busy machine. Where it
#: is to give up soon, it is made `hasty`.
BOUNDED = {"extra": AHEAD["extra"] | {"handshake_timeout_seconds": 20.0, "push_timeout_seconds": 60.0, "queue_timeout_seconds": 60.0}}


#: No request has the name of one that a test before it has left behind.
_NUMBERS = itertools.count()


def start(prefill, decode, prompts, tokens=12, sent=None, prefix=None, on_p=None, there=None, kept=None):
    """Names of requests that both engines have now, on P beginning with `on_p` where that is another; new ones, where
    no `prefix` is given. D looks for P where it is, or where it is told to. P continues from what D has `kept` of
    each, where it has."""
    there, kept = there or prefill.call(where), kept or [{}] * len(prompts)
    prefix = prefix or f"r{next(_NUMBERS)}."
    names = []
    for at, prompt in enumerate(prompts):
        names.append(f"{prefix}{at}")
        prefill.call(begin, f"{on_p or prefix}{at}", prompt, 1, dict(REMOTE_DECODE) | kept[at])
        decode.call(begin, names[-1], prompt if sent is None else sent[at], tokens, dict(there))
    return names


def answers(prefill, decode, names, seconds=240):
    """Steps both engines until D has answered: tokens and how each finished, in their order."""
    return [(made, how) for made, _, how in ends(prefill, decode, names, seconds)]


def ends(prefill, decode, names, seconds=240):
    """The same with what D gives to the client for the next turn."""
    done, until = {}, time.monotonic() + seconds
    while len(done) < len(names):
        assert time.monotonic() < until, f"only {sorted(done)} of {names} have an answer"
        prefill.call(turn)
        done |= decode.call(turn)
    return [done[name] for name in names]


def push(prefill, decode, prompts, tokens=12, sent=None):
    names = start(prefill, decode, prompts, tokens, sent)
    return [made for made, _ in answers(prefill, decode, names)]


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


def read(decode):
    return decode.call(counter, "kvferry_read_bytes_total")


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


def read_some(prefill, decode, count):
    """P takes so many steps, and D reads what they have computed."""
    decode.call(blank)
    prefill.call(steps, count)
    eventually(lambda: decode.call(filled) >= bool(count))


def epochs(engine):
    """Of the requests that D waits for and knows how far they are."""
    decode = side(engine).decode
    so_far = [decode.agent.frontier(name) for name in decode.wanted]
    return [frontier["epoch"] for frontier in so_far if frontier is not None]


def knows(prefill, decode, prompt, there=None):
    """Whether D reads from P: it does not where a busy machine takes longer than D gives it to shake hands."""
    before = read(decode)
    answers(prefill, decode, start(prefill, decode, [prompt], there=there))
    return read(decode) > before


def begin_to_read(prefill, decode, prompt, prefix=None, there=None, **given):
    """Both engines have it, and D has blocks for it, with other options than it has for others."""
    given = {"push_timeout_seconds": 90.0, "queue_timeout_seconds": 90.0} | given
    before = decode.call(set_options, given)
    decode.call(take_at_once, True)
    names = start(prefill, decode, [prompt], prefix=prefix, there=there)
    eventually(lambda: decode.call(steps, 1) or not decode.call(waiting))
    decode.call(take_at_once, False)
    decode.call(set_options, before)
    return names


@contextlib.contextmanager
def hasty(*engines):
    """They soon give up on a P that has not heard of a request."""
    before = [engine.call(set_options, {"push_timeout_seconds": 3.0}) for engine in engines]
    try:
        yield
    finally:
        for engine, options in zip(engines, before):
            engine.call(set_options, options)


def set_options(engine, given):
    """From now on. Answers what they were."""
    decode = side(engine).decode
    before = {name: getattr(decode.options, name) for name in given}
    decode.options = dataclasses.replace(decode.options, **given)
    return before
