#!/usr/bin/env python3
"""Checks every dependency against deny.toml: licence, source, and that there is one version of it; and,
where that can be done, that none has a known vulnerability.

`cargo deny check licenses bans sources` reads the same file; this does the same from `cargo metadata`
alone, so that the check needs nothing installed.

Vulnerabilities are another matter: RustSec publishes its database as a git repository, and no package
registry carries it. Where `cargo-deny` or `cargo-audit` is installed it is asked, and it may fetch the
database; where neither is, or the database cannot be had, that is said. `--advisories` makes it an error.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def allowed(expression: str, allow: set[str]) -> bool:
    """Whether an SPDX expression can be satisfied with the allowed licences."""
    tokens = re.findall(r"\(|\)|[^\s()]+", expression.replace("/", " OR "))

    def either() -> bool:
        answer = both()
        while tokens and tokens[0] == "OR":
            tokens.pop(0)
            answer = both() or answer
        return answer

    def both() -> bool:
        answer = one()
        while tokens and tokens[0] == "AND":
            tokens.pop(0)
            answer = one() and answer
        return answer

    def one() -> bool:
        token = tokens.pop(0)
        if token == "(":
            answer = either()
            tokens.pop(0)
            return answer
        if tokens and tokens[0] == "WITH":
            token = " ".join([token, tokens.pop(0), tokens.pop(0)])
        return token in allow

    return either()


#: What looks for vulnerabilities, by the program that must be installed; and how each says that it could
#: not get the database.
AUDITORS = {
    "cargo-deny": ["cargo", "deny", "check", "advisories"],
    "cargo-audit": ["cargo", "audit"],
}
NO_DATABASE = re.compile(r"advisory[- ](database|db)|couldn't fetch", re.IGNORECASE)


def vulnerabilities() -> tuple[list[str], str | None]:
    """Problems; and, where nobody could look for them, why."""
    for program, command in AUDITORS.items():
        if shutil.which(program) is None:
            continue
        try:
            asked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        except subprocess.TimeoutExpired:
            return [], f"{program} did not answer within 300 s"
        said = asked.stdout + asked.stderr
        if asked.returncode == 0:
            print(f"advisories: {program} knows of no vulnerability")
            return [], None
        if NO_DATABASE.search(said) and "RUSTSEC-" not in said:
            return [], f"{program} could not get the database: {said.strip().splitlines()[-1]}"
        return [f"{program} found:\n{said.strip()}"], None
    return [], f"neither {' nor '.join(AUDITORS)} is installed"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--advisories", action="store_true", help="fail if nobody could look for vulnerabilities"
    )
    asked = parser.parse_args()
    rules = tomllib.loads((ROOT / "deny.toml").read_text())
    allow = set(rules["licenses"]["allow"])
    skipped = {skip["name"] for skip in rules["bans"].get("skip", []) if skip["reason"]}
    # `metadata` knows licences and sources, but also lists optional packages that nothing turns on;
    # `tree` knows what is really built.
    tree = ["cargo", "tree", "--workspace", "--locked", "-q", "-e", "all", "--prefix", "none"]
    built = set()
    for line in subprocess.check_output([*tree, "-f", "{p}"], cwd=ROOT, text=True).splitlines():
        if not line:
            continue
        name, version = line.split()[:2]
        built.add((name, version.removeprefix("v")))
    metadata = ["cargo", "metadata", "--format-version", "1", "--locked", "-q"]
    packages = json.loads(subprocess.check_output(metadata, cwd=ROOT))["packages"]
    packages = [package for package in packages if (package["name"], package["version"]) in built]
    problems = []
    versions = defaultdict(set)
    for package in packages:
        name = f"{package['name']} {package['version']}"
        versions[package["name"]].add(package["version"])
        if not allowed(package["license"] or "none", allow):
            problems.append(f"{name}: licence '{package['license']}' is not in deny.toml's allow list")
        source = package["source"]
        if source is not None and not source.startswith("registry+"):
            problems.append(f"{name}: comes from {source}, not from the registry")
        for dependency in package["dependencies"]:
            if source is None and dependency["req"] == "*" and not dependency.get("path"):
                problems.append(f"{name}: takes any version of {dependency['name']}")
    for name, found in sorted(versions.items()):
        if len(found) > 1 and name not in skipped:
            problems.append(f"{name}: {len(found)} versions ({', '.join(sorted(found))}); a skip needs a reason in deny.toml")
    found, unchecked = vulnerabilities()
    problems += found
    if unchecked is not None:
        print(f"WARNING: ADVISORIES WERE NOT CHECKED: {unchecked}. "
              "`cargo install --locked cargo-deny`, with a network, checks them.", file=sys.stderr)
        if asked.advisories:
            problems.append(f"advisories were not checked: {unchecked}")
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"dependencies: {len(packages)} packages, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
