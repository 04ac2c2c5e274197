"""What a handover must hold: one engine's tokens, from P's state, and nothing left behind."""

import contextlib
import math
import random

from environment import REMOTE_DECODE
from heard import forget_lines, listen, said
from serving import sampled

#: Prompts within one block, at its edges and over several.
LENGTHS = (1, 2, 31, 33, 100, 200)

#: How far roundings take the logarithm of a token's chance; another state takes it much further.
NEAR = 0.15


def prompts(draw, lengths):
    return [[draw.randrange(1, 500) for _ in range(length)] for length in lengths]


def hand_over(prefill, decode, prompt, tokens=12, sent=None):
    """The answer of `decode` to `sent`, with the state that `prefill` has after `prompt`."""
    with unbound(prefill, decode) if sent is not None else contextlib.nullcontext():
        _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
        return decode.generate(prompt if sent is None else sent, tokens, params)[0]


@contextlib.contextmanager
def unbound(*engines):
    """For controls: what P has computed serves any prompt meanwhile."""
    for engine in engines:
        engine.call(bind, False)
    try:
        yield
    finally:
        for engine in engines:
            engine.call(bind, True)


def bind(engine, bound):
    from kvferry.vllm.scheduler.origin import Origins

    if bound:
        Origins.of, Origins.facts = Origins.given
    else:
        Origins.given = (Origins.of, Origins.facts)
        Origins.of, Origins.facts = (lambda *_: None), (lambda *_: {})


def without_hints(params):
    """As a client sends them that says nothing of what they are for."""
    ours = {name: value for name, value in params["kvferry"].items() if name != "prompt"}
    return params | {"kvferry": ours}


def check(prefill, decode, lengths=LENGTHS, seed=0):
    draw = random.Random(seed)
    for prompt in prompts(draw, lengths):
        # In this order: what is not moved must not be there already.
        moved = hand_over(prefill, decode, prompt)
        alone, _ = decode.generate(prompt)
        assert moved == alone, f"a prompt of {len(prompt)} tokens"
    # The control, with the last prompt: D's own is another in all but its last token, and P's
    # answer must come out all the same, which only P's state can do.
    other = prompts(draw, [len(prompt) - 1])[0] + prompt[-1:]
    assert decode.generate(other)[0] != alone
    assert hand_over(prefill, decode, prompt, sent=other) == alone
    nothing_left(prefill, decode)


def check_refused(prefill, decode, words):
    """A pair that cannot work: the request fails, D's log says why in these words, and nothing is left."""
    decode.call(listen)
    decode.call(forget_lines)
    (prompt,) = prompts(random.Random(str(words)), [70])
    assert hand_over(prefill, decode, prompt) == []
    why = decode.call(said, "the load failed")
    for word in words:
        assert word in why, why
    nothing_left(prefill, decode)


def check_close(prefill, decode, lengths=LENGTHS, tokens=6, seed=0):
    """As `check`, for a pair that no single engine computes like: in bfloat16, two ranks round
    otherwise than one. What is likely next must be as likely after a handover."""
    draw = random.Random(seed)
    for prompt in prompts(draw, lengths):
        _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
        moved = decode.call(likely, tokens, prompt, params)
        alone = decode.call(likely, tokens, prompt)
        assert distance(alone, moved) < NEAR, f"a prompt of {len(prompt)} tokens"
    other = prompts(draw, [len(prompt) - 1])[0] + prompt[-1:]
    assert distance(alone, decode.call(likely, tokens, other)) > 4 * NEAR
    with unbound(prefill, decode):
        _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
        assert distance(alone, decode.call(likely, tokens, other, params)) < NEAR
    nothing_left(prefill, decode)


def likely(engine, tokens, prompt, params=None):
    """The tokens of an answer, and at each the likeliest ones with their chance's logarithm."""
    sampling = sampled(tokens, params, logprobs=20)
    (made,) = engine.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)
    (answer,) = made.outputs
    steps = [{token: what.logprob for token, what in step.items()} for step in answer.logprobs]
    return list(zip(answer.token_ids, steps, strict=True))


def distance(alone, moved):
    """How far the likeliest tokens' chances are apart, as long as the answers are the same."""
    apart = 0.0
    for (token, chances), (same, others) in zip(alone, moved, strict=True):
        best = sorted(chances, key=chances.get)[-4:]
        apart = max(apart, *(abs(chances[at] - others.get(at, -math.inf)) for at in best))
        if token != same:
            break
    return apart


def nothing_left(prefill, decode):
    assert (prefill.idle(), decode.idle()) == (0, 0)
