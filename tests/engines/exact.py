"""What a handover must hold: the tokens of one engine alone, from P's state, and nothing left behind."""

import random

from serving import REMOTE_DECODE

#: Prompts within one block, at its edges and over several.
LENGTHS = (1, 2, 31, 33, 100, 200)


def prompts(draw, lengths):
    return [[draw.randrange(1, 500) for _ in range(length)] for length in lengths]


def hand_over(prefill, decode, prompt, tokens=12, sent=None):
    """The answer of `decode` to `sent`, with the state that `prefill` has after `prompt`."""
    _, params = prefill.generate(prompt, 1, dict(REMOTE_DECODE))
    return decode.generate(prompt if sent is None else sent, tokens, params)[0]


def check(prefill, decode, lengths=LENGTHS, seed=0):
    draw = random.Random(seed)
    for prompt in prompts(draw, lengths):
        alone, _ = decode.generate(prompt)
        assert hand_over(prefill, decode, prompt) == alone, f"a prompt of {len(prompt)} tokens"
    # The control, with the last prompt: D's own is another in all but its last token, and P's answer
    # must come out all the same, which only P's state can do.
    other = prompts(draw, [len(prompt) - 1])[0] + prompt[-1:]
    assert decode.generate(other)[0] != alone
    assert hand_over(prefill, decode, prompt, sent=other) == alone
    nothing_left(prefill, decode)


def nothing_left(prefill, decode):
    # P learns in its next step that its blocks are its own again.
    prefill.generate([1, 2, 3], 1)
    assert (prefill.used_blocks(), decode.used_blocks()) == (0, 0)
