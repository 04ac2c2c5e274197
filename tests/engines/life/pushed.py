"""Requests that go to both engines at once, as a router sends them when P's parameters say so."""

import time

from environment import REMOTE_DECODE

from .inside import begin, turn, where


def start(prefill, decode, prompts, tokens=12, sent=None, prefix="r", on_p=None, there=None, kept=None):
    """Names of requests that both engines have now, on P beginning with `on_p` where that is another. D looks for P
    where it is, or where it is told to. P continues from what D has `kept` of each, where it has."""
    there, kept = there or prefill.call(where), kept or [{}] * len(prompts)
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
