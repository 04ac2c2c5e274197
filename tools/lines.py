"""Counts the lines that are shipped: Rust with its kernels, and Python; comments too, and empty lines.

    tools/lines.sh

Not shipped are the crates of `APART`; and of the others what is no part of a build: tests, in files of their own or
inline, benchmarks and examples.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: Crates that are built for tests, documents and measurements alone.
APART = {"kvferry-bench", "kvferry-conformance", "kvferry-docs", "kvferry-testkit", "kvferry-wire"}
#: Rust, and what a card runs. (The C files beside them are the same for tests on a CPU.)
KINDS = {".rs", ".cu", ".h"}
#: What no build that is shipped has.
ATTRIBUTE = re.compile(r"( *)#\[cfg\((?:test|fuzzing|any\(test, fuzzing\))\)\]$")
MODULE = re.compile(r" *(?:pub(?:\(.*\))? )?mod (\w+);$")


def shipped(text):
    """The lines of a Rust file without what is built for tests alone, and the modules that are in files of their own
    and likewise. As rustfmt has it, an item ends at its own indentation."""
    lines, modules = [], set()
    ends = None
    for line in text.splitlines():
        if ends is not None:
            if module := MODULE.match(line):
                modules.add(module[1])
            if re.match(ends, line):
                ends = None
        elif attribute := ATTRIBUTE.match(line):
            ends = rf"{attribute[1]}(?:\}}.*|\S.*[;,])$"
        else:
            lines.append(line)
    return lines, modules


def of_crate(folder):
    """How many lines a crate ships."""
    counts, apart = {}, set()
    for path in sorted(folder.glob("src/**/*")):
        if path.suffix not in KINDS:
            continue
        lines, modules = shipped(path.read_text())
        counts[path] = len(lines)
        beside = path.parent if path.name in ("lib.rs", "main.rs", "mod.rs") else path.with_suffix("")
        apart |= {beside / name for name in modules}
    return sum(count for path, count in counts.items() if not apart & {path.with_suffix(""), *path.parents})


def table(counts):
    total = sum(counts.values())
    rows = [*sorted(counts.items(), key=lambda row: -row[1]), ("all", total)]
    return "\n".join(f"{name:<20} {count:>6,}" for name, count in rows)


def main():
    metadata = ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"]
    packages = json.loads(subprocess.check_output(metadata, cwd=ROOT))["packages"]
    folders = {package["name"]: Path(package["manifest_path"]).parent for package in packages}
    if missing := APART - folders.keys():
        sys.exit(f"no crate is called {', '.join(sorted(missing))}: correct APART in tools/lines.py")
    counts = {name: of_crate(folder) for name, folder in folders.items() if name not in APART}
    python = [path for path in (ROOT / "python").rglob("*.py*") if path.suffix in (".py", ".pyi")]
    counts["python"] = sum(len(path.read_text().splitlines()) for path in python)
    print(table(counts))


if __name__ == "__main__":
    main()
