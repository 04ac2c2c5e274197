"""What a hand-over must hold: the tokens of one engine alone."""

import random
from itertools import count

#: Prompts within one page, at its edges and over several, and over chunks of 32.
LENGTHS = (1, 2, 31, 33, 100)
_rooms = count(1)


def prompts(seed, lengths=LENGTHS):
    draw = random.Random(seed)
    return [[draw.randrange(6, 500) for _ in range(length)] for length in lengths]


def room():
    return next(_rooms)


def hand_over(prefill, decode, prompt, tokens=8, sent=None):
    """The answer of D to `sent`, with what P has computed of `prompt`, and P's own answer."""
    number = room()
    ours = prefill.ask(prompt, tokens, room=number)
    theirs = decode.ask(prompt if sent is None else sent, tokens, room=number, source=prefill)
    return decode.answer(theirs), prefill.answer(ours)


def check(prefill, decode, alone, lengths=LENGTHS, seed=1, tokens=8, together=True):
    """All at once, which is when requests are in each other's way; or one after the other, where numbers are so coarse that a
    step with several requests rounds otherwise."""
    given, made = prompts(seed, lengths), []
    for some in [given] if together else [[prompt] for prompt in given]:
        asked = []
        for prompt in some:
            number = room()
            ours = prefill.ask(prompt, tokens, room=number)
            theirs = decode.ask(prompt, tokens, room=number, source=prefill)
            asked.append((prompt, ours, theirs, alone.ask(prompt, tokens)))
        made += [(it[0], prefill.answer(it[1]), decode.answer(it[2]), alone.answer(it[3])) for it in asked]
    for prompt, p, d, a in made:
        said = f"a prompt of {len(prompt)} tokens: {p} {d} {a}"
        assert "error" not in p | d | a, said
        assert d["ids"] == a["ids"], said
        assert len(d["ids"]) == tokens


def check_control(prefill, decode, alone, seed=2):
    """P is given another prompt than D, and nothing but P's state can make D answer as if it had been its own."""
    ours, theirs = prompts(seed, (64, 64))
    expected = [alone.generate(prompt, 8) for prompt in (ours, theirs)]
    assert expected[0] != expected[1]
    made, _ = hand_over(prefill, decode, ours, sent=theirs)
    assert made["ids"] == expected[0]
