"""For tools/quick.sh: which crates the files on standard input belong to, and which use those, tests included.

    git diff --name-only … | python3 tools/changed.py "$(cargo metadata --no-deps …)"
"""

import json
import shlex
import sys

#: What every crate is built by.
ALL = ("Cargo.toml", "Cargo.lock", ".cargo/")
#: Files of tests that take minutes by themselves: every back end, between processes.
LONG = {"conformance"}


def crates(files, packages):
    """Names of those that changed, and of those and all that use them."""
    names = {package["name"] for package in packages}
    changed = {file.split("/")[1] for file in files if file.startswith("crates/")} & names
    if any(file.startswith(ALL) for file in files):
        changed = names
    affected = set(changed)
    while more := {
        package["name"] for package in packages if affected & {used["name"] for used in package["dependencies"]}
    } - affected:
        affected |= more
    return changed, affected


def targets(package):
    """What of a crate is tested, as arguments for cargo."""
    kinds = {"lib": "--lib", "cdylib": "--lib", "bin": "--bins"}
    some = {kinds[kind] for target in package["targets"] for kind in target["kind"] if kind in kinds}
    tests = {target["name"] for target in package["targets"] if "test" in target["kind"]}
    return sorted(some) + [f"--test={name}" for name in sorted(tests - LONG)]


def main():
    packages = {package["name"]: package for package in json.loads(sys.argv[1])["packages"]}
    changed, affected = crates(sys.stdin.read().splitlines(), packages.values())
    if changed:
        # Its tests read the sources of all: errors and log lines are documented.
        changed.add("kvferry-docs")
    tests = {target for name in changed for target in targets(packages[name])}
    for name, words in (("changed", changed), ("affected", affected)):
        print(f"{name}=({' '.join(shlex.quote(f'--package={crate}') for crate in sorted(words))})")
    print(f"tests=({' '.join(map(shlex.quote, sorted(tests)))})")


if __name__ == "__main__":
    main()
