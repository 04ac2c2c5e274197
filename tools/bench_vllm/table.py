"""What was measured, as tables: medians, their quartiles, and ratios."""

import statistics


def table(arguments, measured, which, draw):
    def of(contender, length):
        return [seconds[which] for seconds in measured[contender][length]]

    ours = [contender for contender in arguments.contenders if contender != arguments.against]
    titles = ["prompt", *(title for name in ours for title in (name, "ratio")), arguments.against]
    print("| " + " | ".join(titles) + " |\n" + "|---" * len(titles) + "|")
    for length in [0, *arguments.lengths]:
        cells = [f"{length} tokens" if length else f"first, {arguments.lengths[0]} tokens"]
        for contender in (*ours, arguments.against):
            low, middle, high = spread(of(contender, length))
            cells.append(f"{middle:.1f} ({low:.1f}–{high:.1f})")
            if contender != arguments.against:
                value, least, most = ratio(of(contender, length), of(arguments.against, length), draw)
                cells.append(f"**{value:.2f}** ({least:.2f}–{most:.2f})")
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
