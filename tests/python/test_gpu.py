"""The transports of a GPU's memory, of real parts: `gpu`, which is `cuda`, `nixl` and `tcp`, and those by themselves. Where
CUDA's driver should be is its stand-in, with host memory; NIXL is NIXL."""

import json
import os
import pathlib
import subprocess
import sys
from dataclasses import fields

import kvferry
import pytest
from handmade import draft
from kvferry.vllm.options import Advanced

HERE = pathlib.Path(__file__).parent
STAND_INS = HERE.parents[1] / "crates/kvferry-conformance/src"
#: What carries out the kernel on the CPU.
KERNEL = HERE.parents[1] / "crates/kvferry-cuda/src"
MIB = 1 << 20


def build(source, library, *options):
    command = ["cc", "-std=gnu11", "-O1", "-shared", "-fPIC", "-pthread", *options, "-I", KERNEL, "-o", library]
    subprocess.run([*command, STAND_INS / source], check=True)
    return str(library)


@pytest.fixture(scope="module")
def driver(tmp_path_factory):
    return build("driver.c", tmp_path_factory.mktemp("driver") / "libtwin.so")


def run(driver, refuses="nothing", environment=None, **asked):
    """What a process says that has the stand-in for its driver, and what it and its peer log."""
    told = {
        "KVFERRY_CUDA_DRIVER": driver,
        "KVFERRY_TWIN_REFUSES": refuses,
        # The stand-in has no kernel for digests that could be compiled: nothing is audited.
        "KVFERRY_NVRTC": "/nowhere",
        "UCX_NET_DEVICES": "lo",
        "UCX_MEM_EVENTS": "n",
    }
    command = [sys.executable, HERE / "stand_in_card.py", json.dumps(asked)]
    done = subprocess.run(
        command,
        capture_output=True,
        timeout=300,
        text=True,
        env=os.environ | told | (environment or {}),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1]), done.stderr


def test_inside_a_node_cuda_moves_every_byte(driver):
    moved, log = run(driver)
    assert moved["read_by"] == [[0, "cuda", ""]]
    assert moved["says"].startswith("4 MiB in ") and "every byte right" in moved["says"]
    assert moved["says"].endswith(" by cuda (same node)")
    assert "is read by cuda" in log and "is read by nixl" not in log


@pytest.mark.parametrize("lowering", ["direct", "packed"])
def test_what_cuda_cannot_open_tcp_moves_and_says_why(driver, lowering):
    """As with a peer in another container, or under MIG. There is no RDMA here."""
    moved, log = run(driver, refuses="open", lowering=lowering)
    ((rank, by, why),) = moved["read_by"]
    assert (rank, by) == (0, "tcp")
    assert why.startswith("cuda: ") and "operation not permitted" in why
    assert "nixl: this machine has no RDMA" in why
    assert "every byte right" in moved["says"] and f" by tcp (not by {why})" in moved["says"]
    (line,) = [line for line in log.splitlines() if "is read by" in line]
    assert "is read by tcp" in line and "operation not permitted" in line


@pytest.mark.parametrize("lowering", ["direct", "packed"])
@pytest.mark.parametrize("transport", ["tcp", "nixl"])
def test_a_transport_by_itself_moves_every_byte(driver, transport, lowering):
    moved, _ = run(driver, transport=transport, lowering=lowering)
    assert "every byte right" in moved["says"] and moved["read_by"] == [[0, transport, ""]]


def test_without_the_kernel_nixl_moves_and_says_why(driver):
    """One that the driver does not load: this rank has nixl alone."""
    moved, log = run(driver, refuses="module")
    ((_, by, why),) = moved["read_by"]
    assert by == "nixl" and why.startswith("cuda: ") and "loading the kernel" in why
    assert "this rank does without cuda: " in log and "this rank does without tcp: " in log


def test_without_anything_the_reasons_are_said(driver):
    told = {
        "KVFERRY_CUDA_DRIVER": driver,
        "KVFERRY_TWIN_REFUSES": "module",
        "KVFERRY_NIXL": "/nowhere",
        "KVFERRY_NVRTC": "/nowhere",
    }
    command = [sys.executable, HERE / "stand_in_card.py", json.dumps({"only": True})]
    done = subprocess.run(command, capture_output=True, timeout=300, text=True, env=os.environ | told)
    assert done.returncode != 0 and "no way to move GPU memory works here: cuda: " in done.stderr
    said = done.stderr.partition("no way to move")[2]
    assert "; nixl: " in said and "; tcp: " in said


def test_a_process_may_end_while_a_kernel_is_compiled(driver, tmp_path):
    """That for digests, in the background: what compiles it does not bear to be left in the middle of it."""
    slow = {
        "KVFERRY_NVRTC": build("nvrtc.c", tmp_path / "libnvrtc.so", "-DCUDA=13"),
        "KVFERRY_TWIN_COMPILES_MS": "4000",
    }
    moved, _ = run(driver, environment=slow)
    assert "every byte right" in moved["says"]


def test_what_is_taken_of_a_card_to_pack_into_is_set(driver):
    without, log = run(driver, only=True, gpu_staging=0)
    assert "is taken to " not in log
    some, log = run(driver, only=True, gpu_staging=16)
    # And what the kernels that pack are told what to do in.
    assert some - without == (16 + 8) * MIB
    (line,) = [line for line in log.splitlines() if "is taken to move its memory over tcp" in line]
    assert f"bytes={16 * MIB}" in line and "memory of GPU 0" in line
    _, log = run(driver, only=True, transport="nixl", gpu_staging=16)
    assert f"bytes={16 * MIB}" in log and "is taken to pack short runs into" in log
    # Not more than an eighth of the gigabyte that the stand-in has, whatever is asked for.
    most, _ = run(driver, only=True)
    assert most - without == (128 + 8) * MIB
    moved, log = run(driver, refuses="open", gpu_staging=0)
    assert moved["read_by"][0][1] == "nixl" and "every byte right" in moved["says"]
    assert "are read one by one, because" in log


def test_memory_that_peers_open_in_small_pages_is_spoken_of(driver):
    """From a gigabyte on: an engine's pool, and not what this one has."""
    said = {}
    for spare in (0, 1024 * MIB):
        _, log = run(driver, only=True, gpu_staging=0, spare=spare)
        said[spare] = [line for line in log.splitlines() if "in small pages" in line]
    assert not said[0]
    (line,) = said[1024 * MIB]
    assert "not multiples of 2 MiB" in line


def test_too_little_to_pack_into_is_refused():
    manifest = kvferry.Manifest(draft("d", (0, 4), 4, 4096))
    # The connector's options say the same.
    (option,) = [option for option in fields(Advanced) if option.name == "gpu_staging_mib"]
    least = f"gpu_staging is 1 .MiB., but must be 0, .* or {option.metadata['least']} or more: "
    with pytest.raises(ValueError, match=least):
        kvferry.Worker(manifest, ranks=1, memory=None, transport="tcp", gpu_staging=1)
