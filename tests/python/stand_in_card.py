"""A rank on the memory of a card, where there is none: `driver.c` stands in for CUDA's driver, named by
`KVFERRY_CUDA_DRIVER` before the process starts. What moves the bytes is kvferry's own, and NIXL.

Run by `test_gpu.py`: hands a request over by the transport `gpu` and prints how, or says what a worker takes of the
card.
"""

import ctypes
import json
import logging
import os
import sys

import kvferry
import numpy as np
from kvferry import _loopback

CARD = "cuda:0"
#: The stand-in has its kernels built in.
BUILT_IN = "/dev/null"

driver = ctypes.CDLL(os.environ["KVFERRY_CUDA_DRIVER"])


class OnStandIn:
    #: Bytes that an allocation has beside those that are asked for.
    spare = 0

    def __init__(self, device, words):
        assert device == CARD
        base, self.bytes = ctypes.c_uint64(), 8 * words
        assert driver.cuMemAlloc_v2(ctypes.byref(base), ctypes.c_size_t(self.bytes + self.spare)) == 0
        self.base = base.value

    def fill(self, words):
        at = words.ctypes.data_as(ctypes.c_void_p)
        assert driver.cuMemcpyHtoD_v2(ctypes.c_uint64(self.base), at, ctypes.c_size_t(self.bytes)) == 0

    def read(self):
        words = np.empty(self.bytes // 8, dtype=np.uint64)
        at = words.ctypes.data_as(ctypes.c_void_p)
        assert driver.cuMemcpyDtoH_v2(at, ctypes.c_uint64(self.base), ctypes.c_size_t(self.bytes)) == 0
        return words


# Here, and in the process that prefills, which imports this file before it does anything.
_loopback._OnCard = OnStandIn


def taken():
    """Bytes of the card that this process has."""
    files = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
    return sum(os.stat(file).st_size for file in files if card(file))


def card(file):
    return os.path.lexists(file) and os.readlink(file).startswith("/memfd:card")


def main():
    asked = json.loads(sys.argv[1])
    logging.basicConfig(stream=sys.stderr, format="%(message)s", level=logging.DEBUG)
    kvferry.log_to(logging.getLogger("decode"), "info")
    OnStandIn.spare = asked.pop("spare", 0)
    transport = asked.pop("transport", "gpu")
    if asked.pop("only", None):
        pool = _loopback._Pool(CARD, 2, 16)
        before = taken()
        manifest = pool.manifest("e")
        worker = kvferry.Worker(
            manifest, ranks=1, memory=pool, transport=transport, gpu_kernel=BUILT_IN, **asked
        )
        answer = taken() - before
        worker.close()
    else:
        moved = _loopback.hand_over(transport, CARD, 4, "info", gpu_kernel=BUILT_IN, **asked)
        answer = {"says": str(moved), "read_by": moved.read_by}
    kvferry.log_to(logging.getLogger("decode"), "off")
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
else:
    # In the process that prefills, nothing takes long.
    os.environ.pop("KVFERRY_TWIN_COMPILES_MS", None)
