"""Finds circles between files: what imports each other has to be read at once.

    python3 tools/circles.py

Of Rust, what files name by `use` and by paths that begin with `crate::`; of Python, what modules import when they are
loaded. Tests do not count.
"""

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TESTS = re.compile(r"\n *#\[cfg\(test\)\]\n *(?:pub )?mod \w+ \{.*", re.DOTALL)
USE = re.compile(r"^ *(?:pub(?:\([^)]*\))? )?use ([^;]+);", re.MULTILINE)


def paths(tree):
    """`a::{b, c::{d, e}}` as [a::b, a::c::d, a::c::e]."""
    tree = tree.strip()
    if not tree.endswith("}"):
        return [tree.split(" as ")[0]]
    before, inside = tree[:-1].split("{", 1)
    parts, depth = [""], 0
    for letter in inside:
        depth += (letter == "{") - (letter == "}")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return [before.strip() + path for part in parts if part.strip() for path in paths(part)]


def of_crate(folder):
    """Which file names which, as modules."""
    files = {}
    for path in folder.rglob("*.rs"):
        module = path.relative_to(folder).with_suffix("").parts
        if not {"tests", "fuzz"} & set(module):
            files[module[:-1] if module[-1] in ("mod", "lib", "main") else module] = path
    graph = {module: set() for module in files}
    for module, path in files.items():
        text = re.sub(r"//.*", "", TESTS.sub("", path.read_text()))
        named = [path for tree in USE.findall(text) for path in paths(tree)]
        named += re.findall(r"\b(crate::[\w:]+)", USE.sub("", text))
        for words in (path.split("::") for path in named):
            at = list(module)
            if words[0] == "crate":
                at, words = [], words[1:]
            elif words[0] == "self":
                words = words[1:]
            elif words[0] != "super" and tuple(at + words[:1]) not in files:
                continue
            while words and words[0] == "super":
                at, words = at[:-1], words[1:]
            at += words
            while tuple(at) not in files:
                at.pop()
            # A crate's root only gathers names.
            if at and tuple(at) != module:
                graph[module].add(tuple(at))
    return graph


def of_package(folder):
    """Which module imports which when it is loaded."""
    files = {path.relative_to(folder.parent).with_suffix("").parts: path for path in folder.rglob("*.py")}
    files = {module[:-1] if module[-1] == "__init__" else module: path for module, path in files.items()}
    graph = {module: set() for module in files}
    for module, path in files.items():
        package = module if path.stem == "__init__" else module[:-1]
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ImportFrom) and node.level:
                base = package[: len(package) - node.level + 1] + tuple((node.module or "").split("."))
                base = tuple(word for word in base if word)
                named = [(*base, alias.name) for alias in node.names]
                graph[module] |= {one if one in files else base for one in named} & set(files) - {module}
    return graph


def circles(graph):
    """The sets of files that can all be reached from each other."""

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            new = graph[todo.pop()] - seen
            seen |= new
            todo += new
        return seen

    all_reached = {one: reached(one) for one in graph}
    found = {frozenset(o for o in all_reached[one] if one in all_reached[o]) for one in graph}
    return sorted(sorted("/".join(one) for one in circle) for circle in found if circle)


def main():
    found = []
    for crate in sorted((ROOT / "crates").iterdir()):
        found += [f"{crate.name}: {', '.join(circle)}" for circle in circles(of_crate(crate / "src"))]
    found += [f"python: {', '.join(circle)}" for circle in circles(of_package(ROOT / "python" / "kvferry"))]
    for line in found:
        print(line)
    print(f"circles: {len(found)}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
