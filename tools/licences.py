"""Collects the licences of what is linked into the wheel, for tools/build-wheel.sh.

    python3 tools/licences.py FOLDER [TARGET]    TARGET: this machine's, if none is named

FOLDER/LICENSES.txt has every crate with its licence and the texts that came with its source, equal texts once.
FOLDER/rust-standard-library.html is what the Rust project says of its own library, which is linked in, too.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: What is built into the extension module: no proc macros, no build scripts, no tests.
LINKED = ["tree", "--package", "kvferry-python", "--edges", "normal,no-proc-macro", "--prefix", "none", "--no-dedupe"]
TEXT = re.compile(r"(licen[cs]e|copying|notice|unlicense|copyright)", re.IGNORECASE)


def cargo(*words):
    return subprocess.check_output(["cargo", *words, "--locked", "--quiet"], cwd=ROOT, text=True)


def host():
    said = subprocess.check_output(["rustc", "-vV"], text=True)
    return re.search(r"^host: (.+)$", said, re.MULTILINE)[1]


def linked(target):
    """The packages of others that are linked in, as `cargo metadata` has them."""
    tree = cargo(*LINKED, "--target", target, "--format", "{p}")
    names = {tuple(line.split()[:2]) for line in tree.splitlines() if line}
    packages = json.loads(cargo("metadata", "--format-version", "1"))["packages"]
    found = [one for one in packages if (one["name"], f"v{one['version']}") in names and one["source"] is not None]
    return sorted(found, key=lambda one: (one["name"], one["version"]))


def texts(package):
    """The licence files of a crate, by name."""
    files = Path(package["manifest_path"]).parent.iterdir()
    return {file.name: file.read_text(errors="replace").strip() for file in files if TEXT.match(file.name) and file.is_file()}


def written(packages):
    """One text for all of them. A crate without any is an error: its licence asks for its text."""
    lines = [
        "kvferry contains the following software, under the licences named here. Their texts follow; the number in",
        "brackets says which of them came with which source. The Rust standard library is linked in, too:",
        "rust-standard-library.html has its notices.",
        "",
    ]
    numbers = {}
    for package in packages:
        name = f"{package['name']} {package['version']}"
        found = texts(package)
        if not found:
            raise SystemExit(f"{name}: no licence text in {Path(package['manifest_path']).parent}, and its licence is "
                             f"{package['license']}: replace the crate, or teach tools/licences.py where its text is")
        those = [numbers.setdefault(found[file], len(numbers) + 1) for file in sorted(found)]
        lines.append(f"{name}: {package['license']} {those}")
    for text, number in numbers.items():
        lines += ["", "-" * 100, f"[{number}]", "", text]
    return "\n".join(lines) + "\n"


def main(folder, target=None):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    packages = linked(target or host())
    (folder / "LICENSES.txt").write_text(written(packages))
    root = Path(subprocess.check_output(["rustc", "--print", "sysroot"], text=True).strip())
    own = root / "share/doc/rust/COPYRIGHT-library.html"
    if not own.exists():
        raise SystemExit(f"{own} is not there: this tool chain was installed without it. rustup installs it with rustc")
    shutil.copyfile(own, folder / "rust-standard-library.html")
    print(f"licences: {len(packages)} crates and the Rust standard library", file=sys.stderr)


if __name__ == "__main__":
    main(*sys.argv[1:])
