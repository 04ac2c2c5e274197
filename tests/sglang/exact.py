"""What a hand-over must hold: one engine's tokens."""

import random
from itertools import count

LENGTHS = (1, 2, 31, 33, 100, 200)
_rooms = count(1)


def prompts(seed, lengths=LENGTHS):
    draw = random.Random(seed)
    return [[draw.randrange(6, 500) for _ in range(length)] for length in lengths]


def hand_over(prefill, decode, prompt, tokens=12, sent=None, room=None):
    """The answer of D to `sent`, with what P has computed of `prompt`, and P's own answer."""
    room = next(_rooms) if room is None else room
    ours = prefill.ask(prompt, tokens, room=room)
    theirs = decode.ask(prompt if sent is None else sent, tokens, room=room, source=prefill)
    return decode.answer(theirs), prefill.answer(ours)


def check(prefill, decode, alone, lengths=LENGTHS, seed=1):
    """All at once, which is when requests are in each other's way."""
    asked = []
    for prompt in prompts(seed, lengths):
        room = next(_rooms)
        asked.append((prompt, prefill.ask(prompt, room=room), decode.ask(prompt, room=room, source=prefill)))
    for prompt, ours, theirs in asked:
        p, d = prefill.answer(ours), decode.answer(theirs)
        assert "error" not in p and "error" not in d, (len(prompt), p, d, prefill.log.read_text()[-1500:], decode.log.read_text()[-1500:])
        assert d["ids"] == alone.generate(prompt), f"a prompt of {len(prompt)} tokens"
