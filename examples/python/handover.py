"""Two processes: the first has read a prompt, the second takes it over.

    pip install .                           # from a clone, once
    python examples/python/handover.py

The prefill process has one rank and blocks of 4 tokens, the decode process two ranks, which share the
heads, and blocks of 8 tokens. Neither knows the other's layout: each rank describes its own memory, and
that is enough. Between the processes travel a ticket and block ids, as JSON: what a router would carry.
"""

import json
import multiprocessing

import kvferry
import numpy as np

HEADS, BLOCKS = 4, 10
#: Seconds for any one step: nothing waits without a limit.
PATIENCE = 60.0
TOKENS = 6
#: What memory holds that nobody has written.
UNTOUCHED = 0xEEEE


class Engine:
    """One scheduler, and a worker with its memory for each rank."""

    def __init__(self, name, ranks, tokens_per_block):
        self.tokens_per_block = tokens_per_block
        self.scheduler = kvferry.Scheduler(name)
        self.share = HEADS // ranks
        self.pools, self.workers = [], []
        for rank in range(ranks):
            # A word of 8 bytes for each head of each token.
            pool = np.full((BLOCKS * tokens_per_block, self.share), UNTOUCHED, dtype=np.uint64)
            manifest = kvferry.Manifest(self.describe(name, rank, pool))
            self.pools.append(pool)
            self.workers.append(kvferry.Worker(manifest, ranks=ranks, memory=pool))
        self.scheduler.publish([worker.card() for worker in self.workers])

    def describe(self, name, rank, pool):
        """The facts of one rank: which part of which state it holds, and at which bytes."""
        row = self.share * 8
        return {
            "identity": {"model": "example"},
            "engine": name,
            "rank": rank,
            "label": f"tp{rank}",
            "regions": [{"base": pool.ctypes.data, "bytes": pool.nbytes, "place": "host"}],
            "kinds": [
                {
                    "format": {"name": "u64", "bytes": 8},
                    "axes": [{"name": "head", "length": HEADS}],
                    "law": {"entries": 1, "tokens": 1, "open": 0},
                }
            ],
            "groups": [
                {
                    "name": "attention",
                    "blocks": BLOCKS,
                    "null_block": 0,
                    "tokens_per_block": self.tokens_per_block,
                    "window": {"tokens": None, "chunk": 1, "extra": 0},
                    "pieces": [
                        {
                            "state": "layers.0/kv",
                            "kind": 0,
                            "bounds": [[rank * self.share, (rank + 1) * self.share]],
                            "phase": {"modulus": 1, "held": [0, 1]},
                            "view": {
                                "region": 0,
                                "offset": 0,
                                "block": self.tokens_per_block * row,
                                "kernel": None,
                                "entry": row,
                                "axes": [8],
                            },
                        }
                    ],
                    "scratch": [],
                }
            ],
        }

    def expected(self, rank, blocks):
        """What a rank's memory looks like with the request in these blocks and nothing else."""
        pool = np.full_like(self.pools[rank], UNTOUCHED)
        for token in range(TOKENS):
            block = blocks[token // self.tokens_per_block]
            slot = block * self.tokens_per_block + token % self.tokens_per_block
            for head in range(self.share):
                pool[slot, head] = 1000 + token * HEADS + rank * self.share + head
        return pool

    def close(self):
        for half in (*self.workers, self.scheduler):
            half.close()


def prefill(pipe):
    """Reads a prompt, hands it over, and gets its blocks back."""
    engine = Engine("prefill", ranks=1, tokens_per_block=4)
    blocks = [7, 2]
    engine.pools[0][:] = engine.expected(0, blocks)
    ticket = engine.scheduler.grant("request-1", tokens=TOKENS, blocks=[blocks])
    pipe.send(json.dumps({"ticket": ticket, "blocks": blocks, "tokens": TOKENS}))
    # Waits until decode has confirmed the request, or its lease is over.
    pipe.send(engine.scheduler.released(PATIENCE))
    engine.close()


def decode(pipe):
    """Takes the request over, and answers how many words of its memory are wrong."""
    engine = Engine("decode", ranks=2, tokens_per_block=8)
    message = json.loads(receive(pipe))
    blocks = [3]
    # Keeps the blocks alive on prefill while the request waits for its turn.
    engine.scheduler.hold(message["ticket"], patience=PATIENCE)
    for worker in engine.workers:
        worker.load(
            "request-1",
            message["ticket"],
            deadline=PATIENCE,
            rest=False,
            tokens=message["tokens"],
            source_blocks=[message["blocks"]],
            destination_blocks=[blocks],
        )
    wrong = 0
    for rank, worker in enumerate(engine.workers):
        (ending,) = worker.endings(PATIENCE)
        if ending.outcome != "done":
            raise RuntimeError(f"rank {rank}: {ending.outcome}: {ending.reason}")
        print(f"decode rank {rank}: {ending.bytes} bytes in {ending.copies} copies")
        wrong += int((engine.pools[rank] != engine.expected(rank, blocks)).sum())
    engine.scheduler.settle(message["ticket"])
    engine.close()
    return wrong


def receive(pipe):
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"prefill has not answered within {PATIENCE:.0f} s")
    return pipe.recv()


def main():
    # A fresh process: threads do not survive a fork.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(target=prefill, args=(theirs,), daemon=True)
    other.start()
    # So that the pipe ends with the other process.
    theirs.close()
    wrong = decode(ours)
    for request, why in receive(ours):
        print(f"prefill: the blocks of {request} are free again, {why}")
    other.join(PATIENCE)
    print(f"{wrong} wrong words")
    return 0 if wrong == 0 and other.exitcode == 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
