"""What the tests of this folder have in common."""

import time

from .inside import begin, counter, pump

#: Nothing ends by itself while a test waits for it, however busy the machine.
PATIENT = {"lease_seconds": 600.0, "push_timeout_seconds": 600.0}
#: What is tiny takes no time, and is read ahead all the same.
AHEAD = {"extra": PATIENT | {"advanced": {"min_read_ahead_seconds": 0.0}}}
#: How the engines of a kind are started where a test does not care.
USUAL = {
    "qwen3": AHEAD | {"block_size": 32, "async_scheduling": False},
    "gemma3": AHEAD | {"block_size": 32, "prefix": True},
    "nemotron_h": AHEAD,
    "falcon_h1": AHEAD,
}
#: Options of a P whose leases are over soon: only for what is to come too late.
SHORT = {"lease_seconds": 1.0}
#: Options of a D that soon knows when nobody is there. A busy machine may take longer to shake hands: where D
#: must read, it `meets` P first.
HANDSHAKE = {"handshake_timeout_seconds": 4.0}


def more(*case):
    """A case for `tools/test.sh --all`."""
    # tools/check-gpu-vllm.sh reads this file where nobody has installed pytest.
    import pytest

    return pytest.param(*case, marks=pytest.mark.more)


def eventually(what, *args):
    deadline = time.monotonic() + 90
    while not what(*args):
        assert time.monotonic() < deadline, "too late"
        time.sleep(0.02)


def meets(prefill, decode, prompt):
    """Whether D reads from P: it does not where it takes longer to shake hands than D has for that."""
    before = decode.call(counter, "kvferry_read_bytes_total")
    (params,) = prefill.prefill([prompt])
    decode.generate(prompt, params=params)
    return decode.call(counter, "kvferry_read_bytes_total") > before


def expect(decode, policy, prompt, params, alone):
    """An answer, or an error for that request alone."""
    other = prompt[:50]
    well, _ = decode.generate(other)
    decode.call(begin, "bad", prompt, 12, params)
    decode.call(begin, "good", other, 12)
    done = {}
    while len(done) < 2:
        new = decode.call(pump)
        assert new, f"only {done}"
        done |= new
    assert done["good"][0] == well
    if policy == "fail":
        assert done["bad"][2] == "error"
    else:
        assert done["bad"][0] == alone
    assert decode.idle() == 0
