"""Mooncake's transfer engine over tcp, as a worker of `kvferry-bench transfer`.

`read BYTES` starts the process that is read as `serve BYTES`, and answers lines of
"piece order check" with the nanoseconds a read took.
"""

import ctypes
import mmap
import os
import subprocess
import sys
import time

SEED = 0x0123456789ABCDEF
MASK = (1 << 64) - 1
# Larger batches end with connection resets.
BATCH = 2048


def quiet():
    """Keeps the pipe to the bench for us: the engine prints to the standard output."""
    pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return pipe


def word(at):
    return SEED * (((at ^ SEED) * 0x9E3779B97F4A7C15 & MASK) | 1) & MASK


class Memory:
    def __init__(self, size):
        self.map = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.words = (ctypes.c_uint64 * (size // 8)).from_buffer(self.map)
        self.base = ctypes.addressof(self.words)


def sources(size, piece, order):
    count = size // piece
    order_of = list(range(count))
    if order == "scattered":
        state = 0x2545F4914F6CDD1D
        for i in range(count - 1, 0, -1):
            state ^= state << 13 & MASK
            state ^= state >> 7
            state ^= state << 17 & MASK
            j = state % (i + 1)
            order_of[i], order_of[j] = order_of[j], order_of[i]
    return [i * piece for i in order_of]


def engine(memory, size):
    from mooncake.engine import TransferEngine

    made = TransferEngine()
    if made.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") != 0:
        sys.exit("Mooncake does not start")
    if made.register_memory(memory.base, size) != 0:
        sys.exit("Mooncake does not take memory")
    return made


def serve(size, pipe):
    memory = Memory(size)
    # Only what is checked: filling all of it takes Python too long.
    for at in range(0, size // 8, 4096 // 8):
        memory.words[at] = word(at)
    made = engine(memory, size)
    print(made.get_rpc_port(), memory.base, file=pipe, flush=True)
    sys.stdin.read()


def read(size, pipe):
    script = open(f"/proc/{os.getpid()}/cmdline", "rb").read().split(b"\0")[2]
    peer = subprocess.Popen(
        [sys.executable, "-c", script, "serve", str(size)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    port, base = map(int, peer.stdout.readline().split())
    memory = Memory(size)
    made = engine(memory, size)
    print("ready", peer.pid, file=pipe, flush=True)
    lists = {}
    for line in sys.stdin:
        piece, order, check = line.split()
        piece = int(piece)
        key = piece, order
        if key not in lists:
            froms = sources(size, piece, order)
            lists[key] = [
                (
                    [memory.base + (b + i) * piece for i in range(len(froms[b : b + BATCH]))],
                    [base + at for at in froms[b : b + BATCH]],
                    [piece] * len(froms[b : b + BATCH]),
                )
                for b in range(0, len(froms), BATCH)
            ]
        if check == "1":
            ctypes.memset(memory.base, 0, size)
        began = time.perf_counter_ns()
        for ours, theirs, lengths in lists[key]:
            if made.batch_transfer_sync_read(f"127.0.0.1:{port}", ours, theirs, lengths) != 0:
                sys.exit("Mooncake does not read")
        took = time.perf_counter_ns() - began
        if check == "1":
            for i, at in enumerate(sources(size, piece, order)):
                if memory.words[i * piece // 8] != word(at // 8):
                    sys.exit("a read of Mooncake's is not exact")
        print(took, took, file=pipe, flush=True)
    peer.kill()
    peer.wait()


if __name__ == "__main__":
    role, size = sys.argv[1], int(sys.argv[2])
    {"read": read, "serve": serve}[role](size, quiet())
