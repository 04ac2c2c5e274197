"""The tools that say what is tested, and what has become slow."""

import importlib.util
import json
import shutil
import subprocess
from pathlib import Path

TOOLS = Path(__file__).parents[2] / "tools"


def tool(name):
    spec = importlib.util.spec_from_file_location(name, TOOLS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_what_doubles_is_named_and_a_slow_machine_is_not(tmp_path, capsys):
    durations = tool("durations")

    def run(at, **tests):
        lines = [json.dumps({"name": name, "seconds": seconds}) for name, seconds in tests.items()]
        (tmp_path / f"{at:02}.jsonl").write_text("\n".join(lines))

    def named():
        durations.main(tmp_path)
        return [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("slower: ")]

    usual = dict(one=10.0, two=10.0, three=10.0, short=0.1)
    # The first has nothing to compare with; one slow run is not what is usual.
    for at, tests in enumerate((usual, usual | {"one": 90.0}, usual)):
        run(at, **tests)
        if at != 1:
            assert named() == []
    run(3, **usual | {"two": 21.0, "short": 2.0, "new": 60.0})
    assert named() == ["two:"]
    # Three times as slow, all of them: the machine.
    run(4, **{name: 3 * seconds for name, seconds in usual.items()})
    assert named() == []
    # Old runs are forgotten.
    for at in range(5, 20):
        run(at, **usual)
    assert named() == [] and len(list(tmp_path.iterdir())) == durations.RUNS + 1


def test_what_failed_is_said_again_at_the_end(tmp_path, capsys):
    (tmp_path / "1.jsonl").write_text(
        json.dumps({"name": "engines/a", "failed": "AssertionError: 1 == 2"})
        + "\n"
        + json.dumps({"name": "engines/a", "seconds": 3.0})
    )
    tool("durations").main(tmp_path)
    said = capsys.readouterr().out
    assert said.endswith("\nfailed: engines/a\nAssertionError: 1 == 2\n") and "3.0 s  engines/a" in said


def test_a_file_is_as_old_as_what_it_holds(tmp_path):
    """Cargo builds what is newer than what it has built: never may a changed file seem older than what was made of the
    one before."""
    clone, record = tmp_path / "clone", tmp_path / "record"

    def run(now, **files):
        """A clean clone of these files, looked at `now`, and the times of what is in it."""
        shutil.rmtree(clone, ignore_errors=True)
        (clone / "crate").mkdir(parents=True)
        for name, text in files.items():
            (clone / "crate" / name).write_text(text)
        for command in (["init", "--quiet"], ["add", "."]):
            subprocess.run(["git", "-C", clone, *command], check=True)
        tool("unchanged").main(clone, record, now)
        return {path.name: path.stat().st_mtime for path in (clone / "crate").iterdir()} | {
            "crate": (clone / "crate").stat().st_mtime
        }

    assert run(100, a="1", b="1") == {"a": 100, "b": 100, "crate": 100}
    # Nothing was built at 100 from what is there now.
    assert run(200, a="1", b="2") == {"a": 100, "b": 200, "crate": 100}
    # What was cut short at 200 was not built: as new as it was then.
    assert run(300, a="1", b="2") == {"a": 100, "b": 200, "crate": 100}
    # Back again is a change, too; and a file more or less is one of its folder.
    assert run(400, a="1", b="1") == {"a": 100, "b": 400, "crate": 100}
    assert run(500, a="1") == {"a": 100, "crate": 500}
    assert run(600, a="1", b="1") == {"a": 100, "b": 600, "crate": 600}


def test_whoever_uses_what_changed_is_linted_and_what_changed_is_tested():
    def package(name, *uses, tests=()):
        targets = [{"kind": ["lib"], "name": name}] + [{"kind": ["test"], "name": test} for test in tests]
        return {"name": name, "dependencies": [{"name": use} for use in uses], "targets": targets}

    changed = tool("changed")
    packages = [package("a"), package("b", "a"), package("c", "b", "serde"), package("d")]
    assert changed.crates(["crates/b/src/lib.rs", "docs/a.md"], packages) == ({"b"}, {"b", "c"})
    assert changed.crates(["crates/gone/src/lib.rs"], packages) == (set(), set())
    everything = {"a", "b", "c", "d"}
    assert changed.crates(["Cargo.lock"], packages) == (everything, everything)
    assert changed.targets(package("a", tests=["conformance", "exact"])) == ["--lib", "--test=exact"]


def test_what_is_built_for_tests_alone_is_not_shipped(tmp_path):
    source = """\
//! What it is for.

#[cfg(test)]
mod beside;
#[cfg(any(test, fuzzing))]
pub(crate) mod hostile;
mod kept;

struct Kept {
    #[cfg(test)]
    seen: usize,
    a: usize,
}

impl Kept {
    #[cfg(test)]
    fn count(&self) -> usize {
        let it = Self { a: 1 };
        it.a
    }

    fn used() {
        #[cfg(test)]
        assert_eq!(1, 1, "as a test wants it");
        #[cfg(target_arch = "x86_64")]
        work();
    }
}

#[cfg(test)]
mod tests {
    fn it() {}
}
"""
    lines = tool("lines")
    left = [line.strip() for line in lines.shipped(source)[0] if line.strip()]
    assert left == [
        "//! What it is for.",
        "mod kept;",
        "struct Kept {",
        "a: usize,",
        "}",
        "impl Kept {",
        "fn used() {",
        '#[cfg(target_arch = "x86_64")]',
        "work();",
        "}",
        "}",
    ]

    def file(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    file("src/room/mod.rs", source)
    for name in ("room/beside.rs", "room/hostile/mod.rs", "room/hostile/deep.rs", "room/page.js", "room/host.c"):
        file(f"src/{name}", "one line\n")
    before = lines.of_crate(tmp_path)
    assert before == len(lines.shipped(source)[0])
    file("src/room/kept.rs", "one line\n#[cfg(test)]\nmod apart;\n")
    file("src/room/kept/apart.rs", "one line\n")
    file("src/room/kept/used.rs", "one line\n")
    file("src/copy.cu", "two\nlines\n")
    file("tests/it.rs", "one line\n")
    assert lines.of_crate(tmp_path) == before + 1 + 1 + 2


def test_the_sum_is_of_all_crates(capsys):
    tool("lines").main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    counts = {name: int(count.replace(",", "")) for name, count in rows}
    assert counts.pop("all") == sum(counts.values())
    assert {"python", "kvferry-plan"} < counts.keys() and "kvferry-testkit" not in counts


def test_files_that_name_each_other_are_found(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(TOOLS))
    circles = tool("circles")

    def found(of, **files):
        for name, text in files.items():
            (tmp_path / name.replace("__", ".")).write_text(text)
        return circles.circles(of(tmp_path))

    rust = circles.of_crate
    test = "\n#[cfg(test)]\nmod tests {\n    use super::super::one::One;\n}\n"
    assert found(rust, lib__rs="mod one;", one__rs="use super::two::{Three, self as two};", two__rs="fn of() {}" + test) == []
    assert found(rust, two__rs="fn of(one: &crate::one::One) {}") == [["one", "two"]]
    # Through a third, by whatever name.
    assert found(rust, two__rs="use crate::{a::B, three};", three__rs="pub use super::one;") == [["one", "three", "two"]]
    python = tmp_path / "package"
    python.mkdir()
    (python / "__init__.py").touch()
    (python / "one.py").write_text("from .two import two")
    (python / "two.py").write_text("def two():\n    from .one import one")
    assert circles.circles(circles.of_package(python)) == []
    (python / "two.py").write_text("from . import one")
    assert circles.circles(circles.of_package(python)) == [["package/one", "package/two"]]
