"""What it costs to spoil one kind of state."""

from .asking import Questions, answers, handed_over
from .spoil import PARTS, count_guesses, guesses, kinds, spoil, spoilt
from .table import whole


def controls(engines, asked):
    """Of all kinds of states that a family has, in all parts; and of its draft, where it has one."""
    family, cell = engines.family, engines.site.CONTROL
    prefill, decode = engines.ours(*engines.site.CELLS[family][cell])
    found = []
    alone = answers(decode, asked)
    unspoilt = whole(asked.right(alone))[0]
    for kind in decode.call(kinds):
        for part in PARTS:
            right, differ, count = spoiled(prefill, decode, asked, alone, kind, part)
            found.append({"family": family, "cell": cell, "state": kind, "part": part, "spoilt": count})
            found[-1] |= {"right": right, "differ": differ, "unspoilt": unspoilt}
    if family in engines.site.DRAFTS:
        engines.close()
        # The answer's second and third token can be guessed, and nothing else that is asked for.
        found += draft(engines, Questions(len(asked.prompts), tasks=["echo"]), PARTS)
    return found


def spoiled(prefill, decode, asked, alone, kind, part):
    """D's right answers, how many differ, and how many numbers were spoiled."""
    decode.call(spoil, kind, part)
    try:
        made = handed_over(prefill, decode, asked)
    finally:
        count = decode.call(spoilt)
        decode.call(spoil, None, None)
    return asked.right(made), sum(one != own for one, own in zip(made, alone, strict=True)), count


def draft(engines, asked, parts):
    """What guesses from a state that is wrong guesses worse; the model itself then answers as it did."""
    cell = engines.site.DRAFTS[engines.family]
    prefill, decode = engines.ours(*engines.site.CELLS[engines.family][cell])
    decode.call(count_guesses)
    alone = answers(decode, asked)
    decode.call(guesses)
    handed_over(prefill, decode, asked)
    made, right = decode.call(guesses)
    (kind,) = (one for one in decode.call(kinds) if one.startswith("draft"))
    for part in parts:
        correct, differ, count = spoiled(prefill, decode, asked, alone, kind, part)
        yield {
            "family": engines.family,
            "cell": cell,
            "state": kind,
            "part": part,
            "spoilt": count,
            "right": correct,
            "differ": differ,
            "guesses": decode.call(guesses),
            "unspoilt": right / made,
        }
