"""The examples run as a reader would run them."""

import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_two_processes_hand_a_request_over():
    command = [sys.executable, EXAMPLES / "python" / "handover.py"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "decode rank 0: 96 bytes in 6 copies",
        "decode rank 1: 96 bytes in 6 copies",
        "prefill: the blocks of request-1 are free again, confirmed",
        "0 wrong words",
    ]


def test_manifests_written_by_hand_are_manifests():
    import kvferry

    def read(name):
        return kvferry.Manifest.from_json((EXAMPLES / "manifest" / f"{name}.json").read_text())

    for rank in range(2):
        plan = kvferry.compile(read(f"decode-tp{rank}"), [read("prefill")])
        request = dict(tokens=3, source_blocks=[[7]], destination_blocks=[[3]])
        (copies,) = plan.copies(**request)
        # Two heads of K and V for each token.
        assert len(copies) == 3 * 2 * 2 and (copies[:, 2] == 128).all()
