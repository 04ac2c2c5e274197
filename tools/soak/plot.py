"""The run as a picture (SVG): a panel for what was answered and for each thing that servers take, with a line for each
server."""

from html import escape

WIDE, HIGH, LEFT, GAP = 900, 120, 70, 34
COLOURS = {"prefill": "#1b6ca8", "prefill2": "#63a7d6", "decode": "#b3541e", "decode2": "#e39a5f", "router": "#777777"}
PANELS = {"memory": "memory of its own, MiB", "threads": "threads", "files": "open files", "blocks": "blocks in use"}


def plot(run):
    end = max(run["samples"][-1]["at"], 1.0)
    parts, at = [], 24
    rates = _rates(run["samples"])
    parts += _panel(at, "answers a second", end, {"right": rates}, {"right": "#2a7f3f"}, run["events"], named=True)
    for what, title in PANELS.items():
        at += HIGH + GAP
        lines = {
            who: [(one["at"], one["servers"].get(who, {}).get(what)) for one in run["samples"]]
            for who in COLOURS
            if any(what in one["servers"].get(who, {}) for one in run["samples"])
        }
        parts += _panel(at, title, end, lines, COLOURS, run["events"])
    at += HIGH + GAP
    for place, (who, colour) in enumerate(COLOURS.items()):
        parts.append(_text(LEFT + 110 * place, at, who, colour))
    size = f'width="{WIDE}" height="{at + 16}" viewBox="0 0 {WIDE} {at + 16}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">\n'
        f'<rect width="100%" height="100%" fill="white"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rates(samples):
    made = []
    for before, after in zip(samples, samples[1:]):
        count = after["answers"].get("right", 0) - before["answers"].get("right", 0)
        made.append((after["at"], count / max(after["at"] - before["at"], 0.1)))
    return made


def _panel(top, title, end, lines, colours, events, named=False):
    most = max((value for points in lines.values() for _, value in points if value is not None), default=1) or 1
    width = WIDE - LEFT - 10
    x, y = (lambda time: LEFT + time / end * width), (lambda value: top + HIGH - value / (1.05 * most) * HIGH)
    yield f'<rect x="{LEFT}" y="{top}" width="{width}" height="{HIGH}" fill="none" stroke="#cccccc"/>'
    yield _text(LEFT, top - 4, title, "#000000")
    yield _text(8, top + 10, f"{most:.4g}", "#555555")
    yield _text(8, top + HIGH, "0", "#555555")
    yield _text(WIDE - 60, top + HIGH + 12, f"{end:.0f} s", "#555555")
    for event in events:
        if not 0 < event["at"] < end or "alone" in event["what"]:
            continue
        colour = "#dddddd" if event["what"].endswith("is back") else "#d9534f"
        yield f'<line x1="{x(event["at"]):.1f}" x2="{x(event["at"]):.1f}" y1="{top}" y2="{top + HIGH}" stroke="{colour}"/>'
        if named and not event["what"].endswith("is back"):
            yield _text(x(event["at"]) + 2, top + 11, event["what"], "#d9534f")
    for who, points in lines.items():
        pieces, piece = [], []
        for time, value in points:
            if value is None:
                pieces.append(piece)
                piece = []
            else:
                piece.append(f"{x(time):.1f},{y(value):.1f}")
        for one in [*pieces, piece]:
            if one:
                yield f'<polyline points="{" ".join(one)}" fill="none" stroke="{colours[who]}" stroke-width="1.5"/>'


def _text(x, y, words, colour):
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="{colour}">{escape(words)}</text>'
