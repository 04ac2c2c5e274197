"""What was found, as text."""

import math

TASKS = ("recall", "sum", "latest", "echo")
ALONE = "one engine"
#: Of it: with a cache in the format that the model is computed in.
USUAL = "–"


def wilson(right, of):
    """Where the share of right answers lies, in 95 of 100 cases."""
    z, share = 1.96, right / of
    middle = share + z * z / (2 * of)
    wide = z * math.sqrt(share * (1 - share) / of + z * z / (4 * of * of))
    return tuple((middle + sign * wide) / (1 + z * z / of) for sign in (-1, 1))


def whole(right):
    """Of all kinds of questions."""
    return tuple(sum(numbers) for numbers in zip(*right.values()))


def interval(right):
    low, high = wilson(*whole(right))
    return f"{low:.3f}–{min(high, 1):.3f}"


def share(right, of):
    return f"{right / of:.3f}"


def latest(kept, part):
    """Of several runs: what each says of a model through somebody that no later one has."""
    found = {}
    for run in kept:
        by = {}
        for one in run[part]:
            by.setdefault((one["family"], one.get("through")), []).append(one)
        for key in by:
            found.pop(key, None)
        found |= by
    order = sorted(found, key=lambda key: (list(dict.fromkeys(name for name, _ in found)).index(key[0]), key[1] != ALONE))
    return [one for key in order for one in found[key]]


def rows(titles, lines):
    yield "| " + " | ".join(titles) + " |"
    yield "|---" * len(titles) + "|"
    for line in lines:
        yield "| " + " | ".join(line) + " |"


def accuracy(found):
    """A line for each pair: who hands over, and what comes out. Then why some do not run, each once."""
    by, why = {}, {}
    for one in found:
        by.setdefault((one["family"], one["cell"]), {})[one["through"]] = one
    through = [name for name in dict.fromkeys(one["through"] for one in found) if name != ALONE]
    lines = []
    for (family, cell), who in by.items():
        if ALONE in who:
            said = ALONE if cell == USUAL else f"{ALONE}, {cell}"
            lines.append([f"**{family}**", said, *_answers(who[ALONE], why)[:2], *[""] * (3 * len(through) - 2)])
            continue
        lines.append([family, cell])
        for name in through:
            lines[-1] += _answers(who[name], why) if name in who else [""] * 3
    kinds = " / ".join(TASKS)
    titles = [title for name in through for title in (f"{name}: {kinds}", "all (95 %)", "differ")]
    yield from rows(["model", "pair", *titles], lines)
    if why:
        yield ""
    for error, number in why.items():
        yield f"{number}. `{error}`"


def _answers(one, why):
    if "error" in one:
        return [f"does not run ({why.setdefault(one['error'], len(why) + 1)})", "", ""]
    right, of = whole(one["right"])
    kinds = " / ".join(share(*one["right"][task]) for task in TASKS)
    return [kinds, f"{share(right, of)} ({interval(one['right'])})", _differ(one)]


def _differ(one):
    if not one.get("differ"):
        return str(one.get("differ", ""))
    return f"**{one['differ']}** of {whole(one['right'])[1]}"


def controls(found):
    """A line for each kind of state, and what spoiling it costs."""
    by_state = {}
    for one in found:
        by_state.setdefault((one["family"], one["cell"], one["state"]), {})[one["part"]] = one
    parts = list(dict.fromkeys(one["part"] for one in found))
    lines = []
    for (family, cell, state), spoilt in by_state.items():
        line = [family, cell, state]
        for part in parts:
            line.append(_control(spoilt[part]) if part in spoilt else "")
        line.append(_verdict(spoilt))
        lines.append(line)
    return rows(["model", "pair", "spoiled", *parts, "most is lost of"], lines)


def _control(one):
    if not one["spoilt"]:
        return "–"
    if "guesses" in one:
        return f"{one['guesses'][1]} of {one['guesses'][0]} guesses right, {one['differ']} answers differ"
    right, of = whole(one["right"])
    return f"{right / of:.2f}, {one['differ']} of {of} differ"


def costs(one):
    """Whether spoiling shows: as one right answer in ten that is lost, or as fewer right guesses."""
    if "guesses" in one:
        return one["guesses"][1] / one["guesses"][0] < one["unspoilt"] - 0.05
    return whole(one["right"])[0] <= 0.9 * one["unspoilt"]


def _verdict(spoilt):
    one = spoilt["all"]
    if not costs(one):
        return "**nothing: this model does not test it**"
    if "guesses" in one:
        return f"guesses (of which {one['unspoilt']:.2f} are right otherwise)"
    worst = min(TASKS, key=lambda task: one["right"][task][0] / one["right"][task][1])
    return f"{worst}: {share(*one['right'][worst])}"


def summary(found):
    """The small table: by model and topology, ours beside the rival."""
    topologies = ["TP 1 → 1", "TP 1 → 2", "TP 2 → 1"]
    through = list(dict.fromkeys(one["through"] for one in found if one["cell"] in topologies))
    by = {(one["family"], one["cell"], one["through"]): one for one in found}
    alone = {one["family"]: one for one in found if one["through"] == ALONE and one["cell"] == USUAL}
    topologies = [cell for cell in topologies if any(one["cell"] == cell for one in found)]
    lines = []
    for family in dict.fromkeys(one["family"] for one in found):
        line = [family, _short(alone.get(family))]
        for who in through:
            line.append(" / ".join(_short(by.get((family, cell, who))) for cell in topologies))
        lines.append(line)
    return rows(["model", ALONE, *(f"{who}: {', '.join(topologies)}" for who in through)], lines)


def _short(one):
    if one is None:
        return "?"
    if "error" in one:
        return "does not run"
    right, of = whole(one["right"])
    return share(right, of) + (f", {one['differ']} of {of} differ" if one.get("differ") else "")
