"""The `kvferry` command as the wheel brings it."""

import signal
import subprocess
import sys
from pathlib import Path

import kvferry
import pytest

#: As pip puts it, and without its script.
WAYS = [[str(Path(sys.executable).with_name("kvferry"))], [sys.executable, "-m", "kvferry"]]


def ran(*words, way=WAYS[0]):
    return subprocess.run([*way, *words], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("way", WAYS, ids=["script", "module"])
def test_it_is_installed(way):
    said = ran("--version", way=way)
    assert (said.returncode, said.stdout) == (0, f"kvferry {kvferry.__version__}\n")


def test_its_exit_codes_are_those_of_the_program():
    pair = ["plan", "--model", "llama-3.1-8b", "--prefill", "tp=2", "--decode"]
    fits, refused, wrong = ran(*pair, "tp=4"), ran(*pair, "tp=4,kv=fp8"), ran(*pair, "tp=four")
    assert fits.returncode == 0 and "llama-3.1-8b" in fits.stdout and fits.stderr == "", fits
    assert refused.returncode == 2 and refused.stderr.startswith("refused: "), refused
    assert wrong.returncode == 1 and "'four'" in wrong.stderr and "Traceback" not in wrong.stderr, wrong


def test_a_demo_starts_its_processes_and_leaves_none():
    said = ran("demo", "--requests", "6", "--prefill", "tp=1", "--decode", "tp=2", "--json")
    assert said.returncode == 0, said
    assert '"wrong_bytes": 0' in said.stdout, said.stdout
    assert not left(), left()


def left():
    """The command lines of processes of a demo."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = file.read_bytes().split(b"\0")
        except OSError:
            continue
        lines += [words] if b"demo-process" in words else []
    return lines


def test_it_ends_when_it_is_interrupted():
    demo = subprocess.Popen(
        [*WAYS[0], "demo", "--requests", "100000"], stderr=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    # Before its processes are there it is Python's, after that it is not.
    while demo.poll() is None and not left():
        pass
    demo.send_signal(signal.SIGINT)
    assert demo.wait(60) == -signal.SIGINT
    demo.stdout.close()
