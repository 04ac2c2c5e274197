"""What tools/release.sh must know: whether the tree is ready to be released, and what goes with it.

    python3 tools/release.py check VERSION          every problem, one a line; exit code 1 if there is any
    python3 tools/release.py notes VERSION          what the changelog says of it
    python3 tools/release.py version                what Cargo.toml says
    python3 tools/release.py crates                 those that are published
    python3 tools/release.py wheel FILE FOLDER      whether a wheel has what belongs into one; its SBOM goes to FOLDER
    python3 tools/release.py set VERSION            writes the version, wherever Cargo needs it
"""

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import licences

ROOT = Path(__file__).resolve().parent.parent
#: What crates.io, or those who look for a crate there, want to know of it.
FIELDS = ("description", "license", "readme", "keywords", "categories")
#: Three numbers: with anything behind them PyPI and crates.io do not agree on the form.
VERSION = re.compile(r"\d+\.\d+\.\d+")


def versions(cargo_toml):
    """Every place in the workspace's Cargo.toml that has our own version, and what it says."""
    workspace = tomllib.loads(cargo_toml)["workspace"]
    found = {"[workspace.package]": workspace["package"]["version"]}
    for name, needed in workspace["dependencies"].items():
        if isinstance(needed, dict) and "path" in needed and "version" in needed:
            found[f"the dependency {name}"] = needed["version"]
    return found


def with_version(cargo_toml, version):
    """The same with another version everywhere."""
    own = re.compile(r'^(version = |kvferry(?:-\w+)? = \{ path = "[^"]+", version = )"[^"]+"', re.MULTILINE)
    return own.sub(rf'\g<1>"{version}"', cargo_toml)


def notes(changelog, version):
    """What the changelog says of a version, without its heading; nothing, if it has no such section."""
    section = re.search(rf"^## {re.escape(version)}(?=\s)[^\n]*\n(.*?)(?=^## |\Z)", changelog, re.MULTILINE | re.DOTALL)
    return section[1].strip() if section else ""


def published(packages):
    """Those that `cargo publish` takes: `publish = false` is an empty list."""
    return [package for package in packages if package["publish"] is None]


def unready(packages):
    """What is missing in the metadata of the crates that are published."""
    problems = []
    public = {package["name"] for package in published(packages)}
    for package in published(packages):
        missing = [field for field in FIELDS if not package.get(field)]
        problems += [f"{package['name']}: Cargo.toml has no {field}" for field in missing]
        if not Path(package["manifest_path"]).with_name("LICENSE").exists():
            problems.append(f"{package['name']}: has no LICENSE (a link to ours), which must go with every copy")
        for needed in package["dependencies"]:
            # Cargo leaves out those of tests.
            if needed["kind"] != "dev" and needed.get("path") and needed["name"] not in public:
                problems.append(f"{package['name']}: is published, but needs {needed['name']}, which is not")
    return problems


def check(version):
    """Every reason not to release this version."""
    if not VERSION.fullmatch(version):
        return [f"the version is {version}, but must be three numbers, as in 0.1.0"]
    problems = []
    for place, said in versions((ROOT / "Cargo.toml").read_text()).items():
        if said != version:
            problems.append(f"Cargo.toml: {place} has version {said}, not {version}: `python3 tools/release.py set {version}`")
    if not notes((ROOT / "CHANGELOG.md").read_text(), version):
        problems.append(f"CHANGELOG.md: there is no section '## {version}', or nothing in it")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if "version" in project or "version" not in project["dynamic"]:
        problems.append("pyproject.toml: has a version of its own, but must take it from Cargo.toml (dynamic)")
    return problems + unready(workspace())


def workspace():
    return json.loads(licences.cargo("metadata", "--format-version", "1", "--no-deps"))["packages"]


def wheel(path, crates):
    """What is wrong with a wheel that has these crates of others in it; and its SBOM."""
    with zipfile.ZipFile(path) as file:
        names = file.namelist()
        wanted = ("licenses/LICENSE", "licenses/third-party/LICENSES.txt", "licenses/third-party/rust-standard-library.html")
        problems = [f"has no .dist-info/{one}" for one in wanted if not any(name.endswith(f".dist-info/{one}") for name in names)]
        boms = [name for name in names if re.search(r"\.dist-info/sboms/[^/]+\.json$", name)]
        if len(boms) != 1:
            return [*problems, f"has {len(boms)} SBOMs, not one"], ""
        text = file.read(boms[0]).decode()
    listed = {(one["name"], one["version"]) for one in json.loads(text)["components"]}
    missing = [f"{name} {version}" for name, version in crates if (name, version) not in listed]
    problems += [f"its SBOM does not list {one}, which is linked in" for one in missing]
    return problems, text


def main(verb, *words):
    problems = []
    if verb == "check":
        problems = check(*words)
    elif verb == "notes":
        print(notes((ROOT / "CHANGELOG.md").read_text(), *words))
    elif verb == "version":
        print(versions((ROOT / "Cargo.toml").read_text())["[workspace.package]"])
    elif verb == "crates":
        print("\n".join(package["name"] for package in published(workspace())))
    elif verb == "wheel":
        path, folder = words
        target = "aarch64-unknown-linux-gnu" if "aarch64" in Path(path).name else licences.host()
        crates = [(one["name"], one["version"]) for one in licences.linked(target)]
        problems, bom = wheel(path, crates)
        problems = [f"{Path(path).name}: {problem}" for problem in problems]
        (Path(folder) / f"{Path(path).stem}.cyclonedx.json").write_text(bom)
    elif verb == "set":
        path = ROOT / "Cargo.toml"
        path.write_text(with_version(path.read_text(), *words))
        for manifest in ("Cargo.toml", "fuzz/Cargo.toml"):
            subprocess.check_call(["cargo", "update", "--workspace", "--manifest-path", str(ROOT / manifest)])
    else:
        raise SystemExit(__doc__)
    print("\n".join(problems), end="\n" * bool(problems), file=sys.stderr)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]) if len(sys.argv) > 1 else __doc__)
