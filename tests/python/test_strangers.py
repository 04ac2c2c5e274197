"""P on one host, D on another that is 50 ms away, and on P's ports strangers without the key, at rates that leave the
cores idle: from D's own address, and from a third host. All loads succeed, and P takes no more than its places allow.
"""

import contextlib
import time

import pytest
from attackers import KINDS, Listening, Prefill, attacked, loads

# isort: split
from wire import Wire, on

#: Files that P may open, and how many of them strangers may have at each of its three ports (control, tasks, memory).
FILES, PLACES = 1024, 1024 // 8
#: As much smaller than the 5,000 a second for which a port has 2,048 places: of each kind, on each port.
RATE = 5000 * PLACES // 2048 // len(KINDS)
#: Of each D: both ranks and the scheduler ask, and each rank has up to four connections to P's memory, a thread each.
LINKS, LANES = 3, 2 * 4
WAYS = [(port, kind) for port in ("control", "data") for kind in KINDS]
NEW, KNOWN = 2, 2
#: What a connection that has proven nothing may cost: its socket, what it has said, and what it is told.
EACH_KIB = 32


@pytest.fixture(scope="module")
def besieged():
    with contextlib.closing(Wire()) as wire, contextlib.closing(Prefill(wire.left, FILES)) as prefill:
        wire.set(delay_ms=50.0)
        yield wire, prefill


@pytest.mark.parametrize("origin", ["right", "third"])
def test_all_loads_succeed_and_p_stays_within_its_bounds(besieged, origin):
    wire, prefill = besieged
    host = getattr(wire, origin)
    with on(wire.right), contextlib.closing(Listening("known", 2, 2, wire.right)) as known:
        assert loads(known, "before", prefill.grant())
        threads, files, mib = prefill.used()
        with attacked(prefill.targets, WAYS, RATE, host.address, host):
            most, end = prefill.used(), time.monotonic() + 60
            while most[1] < files + 2 * PLACES:
                assert time.monotonic() < end, f"the attackers take no places: {most[1]} files"
                time.sleep(0.1)
                most = prefill.used()
            for number in range(NEW):
                with contextlib.closing(Listening(f"new {number}", 2, 2, wire.right)) as new:
                    assert loads(new, f"new {number}", prefill.grant())
                    for again in range(KNOWN):
                        assert loads(known, f"known {number} {again}", prefill.grant())
                    most = tuple(map(max, most, prefill.used()))
    assert most[0] <= threads + NEW * LANES
    assert most[1] <= files + 3 * PLACES + NEW * (LINKS + LANES)
    assert most[2] <= mib + 3 * PLACES * EACH_KIB // 1024
