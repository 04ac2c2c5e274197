"""What was measured, as tables: medians, their quartiles, and ratios."""

import statistics


def table(run, against, which, draw):
    """Of what `--save` writes, as far as the run has come."""

    def of(contender, length):
        return [seconds[which] for seconds in run["measured"][contender].get(str(length), [])]

    ours = [contender for contender in run["contenders"] if contender != against]
    titles = ["prompt", *(title for name in ours for title in (name, "ratio")), against]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for length in [0, *run["lengths"]]:
        cells = [f"{length} tokens" if length else f"first, {run['lengths'][0]} tokens"]
        theirs = of(against, length)
        for contender in (*ours, against):
            seconds = of(contender, length)
            cells.append("{1:.1f} ({0:.1f}–{2:.1f})".format(*spread(seconds)) if seconds else "")
            if contender != against:
                # Of a run that was cut short, one may have a round more than the other.
                rounds = min(len(seconds), len(theirs))
                found = ratio(seconds[:rounds], theirs[:rounds], draw) if rounds else None
                cells.append("**{:.2f}** ({:.2f}–{:.2f})".format(*found) if found else "")
        print("| " + " | ".join(cells) + " |")


def spread(seconds):
    """The median and its quartiles, in milliseconds."""
    if len(seconds) < 2:
        return (seconds[0] * 1e3,) * 3
    low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return low * 1e3, middle * 1e3, high * 1e3


def ratio(ours, rivals, draw):
    """The ratio of medians, and where it lies in 95 % of resampled rounds."""
    seen = []
    for _ in range(400):
        rounds = draw.choices(range(len(ours)), k=len(ours))
        pick = [statistics.median(side[at] for at in rounds) for side in (ours, rivals)]
        seen.append(pick[0] / pick[1])
    seen.sort()
    return statistics.median(ours) / statistics.median(rivals), seen[10], seen[389]
