"""What tools/release.sh asks before it releases anything, and what goes into a wheel."""

import json
import subprocess
import zipfile

import pytest
from test_tools import TOOLS, tool

CARGO = """[workspace.package]
version = "0.1.0"
rust-version = "1.88"

[workspace.dependencies]
kvferry-plan = { path = "crates/kvferry-plan", version = "0.1.0" }
kvferry-testkit = { path = "crates/kvferry-testkit" }
clap = { version = "0.1.0", features = ["derive"] }
"""
CHANGELOG = """# Changelog

## Unreleased
- Later.

## 0.2.0 (2027-01-01)
- New.

  More of it.

## 0.1.0
- First.
"""


@pytest.fixture
def release(monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    return tool("release")


def check(version):
    return subprocess.run([TOOLS / "release.sh", "--check", version], capture_output=True, text=True)


def test_this_tree_could_be_released(release):
    version = release.versions((TOOLS.parent / "Cargo.toml").read_text())["[workspace.package]"]
    ran = check(version)
    assert ran.returncode == 0, ran.stderr
    assert f"{version}: metadata, changelog and licences are complete" in ran.stdout


def test_another_version_is_refused_with_both(release):
    ran = check("9.8.7")
    assert ran.returncode != 0
    assert "[workspace.package] has version" in ran.stderr and "not 9.8.7" in ran.stderr
    assert "no section '## 9.8.7'" in ran.stderr
    assert release.check("1.0rc1") == ["the version is 1.0rc1, but must be three numbers, as in 0.1.0"]


def test_the_version_is_changed_everywhere_at_once_and_nowhere_else(release):
    changed = release.with_version(CARGO, "0.2.0")
    assert set(release.versions(CARGO).values()) == {"0.1.0"}
    assert release.versions(changed) == {"[workspace.package]": "0.2.0", "the dependency kvferry-plan": "0.2.0"}
    assert 'rust-version = "1.88"' in changed and 'clap = { version = "0.1.0"' in changed
    # In the real one, too: what is found is what is changed.
    real = (TOOLS.parent / "Cargo.toml").read_text()
    assert set(release.versions(release.with_version(real, "9.8.7")).values()) == {"9.8.7"}


def test_notes_are_one_section_of_the_changelog(release):
    assert release.notes(CHANGELOG, "0.2.0") == "- New.\n\n  More of it."
    assert release.notes(CHANGELOG, "0.1.0") == "- First."
    # The dots are dots, and a version is no beginning of another.
    for other in ("0.3.0", "0.2", "0x1.0", "0.1.00"):
        assert release.notes(CHANGELOG, other) == "", other


def test_what_crates_io_wants_to_know_is_there(release, tmp_path):
    licence = tmp_path / "LICENSE"
    licence.write_text("ours")

    def crate(name, publish, *needs, **fields):
        known = {field: "there" for field in release.FIELDS} | fields
        needs = [{"name": need, "path": "crates/it", "kind": kind} for need, kind in needs]
        where = str(tmp_path / "Cargo.toml")
        return {"name": name, "publish": publish, "dependencies": needs, "manifest_path": where, **known}

    public = crate("a", None, ("b", None), ("tests", "dev"))
    assert release.unready([public, crate("b", None), crate("tests", [], readme=None)]) == []
    assert release.unready([crate("a", None, readme=None)]) == ["a: Cargo.toml has no readme"]
    assert release.unready([public, crate("b", [])]) == ["a: is published, but needs b, which is not"]
    licence.unlink()
    (found,) = release.unready([crate("a", None)])
    assert "a: has no LICENSE" in found


def test_a_wheel_has_licences_and_a_list_of_what_is_in_it(release, tmp_path):
    path, inside = tmp_path / "kvferry.whl", "kvferry-0.1.0.dist-info"
    bom = json.dumps({"components": [{"name": "ring", "version": "0.17.14"}]})
    files = {
        f"{inside}/licenses/LICENSE": "ours",
        f"{inside}/licenses/third-party/LICENSES.txt": "theirs",
        f"{inside}/licenses/third-party/rust-standard-library.html": "Rust's",
        f"{inside}/sboms/kvferry-python.cyclonedx.json": bom,
    }

    def problems(without=(), crates=(("ring", "0.17.14"),)):
        with zipfile.ZipFile(path, "w") as file:
            for name, text in files.items():
                if name not in without:
                    file.writestr(name, text)
        return release.wheel(path, crates)

    assert problems() == ([], bom)
    for name in files:
        (found, *more), _ = problems(without=[name])
        assert not more and ("SBOM" in found if "sboms" in name else name.split("/", 1)[1] in found), found
    assert problems(crates=[("snow", "0.10.0")])[0] == ["its SBOM does not list snow 0.10.0, which is linked in"]


def test_a_crate_without_a_licence_text_is_an_error(release, tmp_path):
    licences = release.licences

    def package(name, **files):
        folder = tmp_path / name
        folder.mkdir()
        for file, text in files.items():
            (folder / file).write_text(text)
        return {"name": name, "version": "1.0.0", "license": "MIT", "manifest_path": str(folder / "Cargo.toml")}

    one, two = package("one", LICENSE="the text\n"), package("two", COPYING="the text", NOTICE="and more")
    text = licences.written([one, two])
    assert "one 1.0.0: MIT [1]" in text and "two 1.0.0: MIT [1, 2]" in text
    assert text.count("the text") == 1 and "and more" in text
    with pytest.raises(SystemExit, match="three 1.0.0: no licence text"):
        licences.written([package("three", README="no")])
