"""Engines made by hand: ranks that share the heads of one layer, on real memory."""

import contextlib
import random
import socket

import kvferry
import numpy as np
import pytest

HEADS, WIDTH = 4, 8


def draft(engine, heads, tokens, base, blocks=10, **facts):
    """A rank with some of one layer's heads, 8 bytes each."""
    row = (heads[1] - heads[0]) * WIDTH
    return {
        "identity": {"model": "example"},
        "engine": engine,
        "rank": 0,
        "label": "tp0",
        "regions": [{"base": base, "bytes": blocks * tokens * row, "place": "host"}],
        "kinds": [
            {
                "format": {"name": "opaque", "bytes": WIDTH},
                "axes": [{"name": "head", "length": HEADS}],
                "law": {"entries": 1, "tokens": 1, "open": 0},
            }
        ],
        "groups": [
            {
                "name": "attention",
                "blocks": blocks,
                "null_block": 0,
                "tokens_per_block": tokens,
                "window": {"tokens": None, "chunk": 1, "extra": 0},
                "pieces": [
                    {
                        "state": "layers.0/kv",
                        "kind": 0,
                        "bounds": [list(heads)],
                        "phase": {"modulus": 1, "held": [0, 1]},
                        "view": {
                            "region": 0,
                            "offset": 0,
                            "block": tokens * row,
                            "kernel": None,
                            "entry": row,
                            "axes": [WIDTH],
                        },
                    }
                ],
                "scratch": [],
            }
        ],
        **facts,
    }


LONG = 60.0
BLOCKS = 10


def quiet_port():
    """A free port below those that the kernel hands out by itself: it stays free."""
    while True:
        with socket.socket() as one, contextlib.suppress(OSError):
            port = random.SystemRandom().randrange(20000, 32000)
            one.bind(("127.0.0.1", port))
            return port


class Engine:
    """Ranks that share the four heads of one layer; nothing that it promises ends by itself, unless that is said."""

    #: Of its options, those that are for the ranks, too.
    trusted = ("key", "key_file", "tls", "insecure")

    def __init__(self, name, ranks, tokens, transport="local", ports=None, **options):
        share = HEADS // ranks
        self.name, self.tokens = name, tokens
        self.pools = [np.zeros(BLOCKS * tokens * share, dtype=np.uint64) for _ in range(ranks)]
        self.scheduler = kvferry.Scheduler(name, **{"lease": 600.0} | options)
        self.workers = []
        for rank, pool in enumerate(self.pools):
            heads = (rank * share, (rank + 1) * share)
            facts = draft(name, heads, tokens, pool.ctypes.data, rank=rank, label=f"tp{rank}")
            trust = {key: options[key] for key in self.trusted if key in options}
            worker = kvferry.Worker(
                kvferry.Manifest(facts), ranks=ranks, memory=pool, transport=transport, ports=ports, **trust
            )
            self.workers.append(worker)
        self.scheduler.publish([worker.card() for worker in self.workers])

    def close(self):
        for half in (*self.workers, self.scheduler):
            half.close()


@pytest.fixture
def engines():
    """Makes engines that are closed when their test ends."""
    made = []

    def make(*args, **options):
        made.append(Engine(*args, **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def value(token, head):
    return 1000 + token * HEADS + head


def fill(engine, table, tokens):
    share = HEADS // len(engine.pools)
    for rank, pool in enumerate(engine.pools):
        for token in range(tokens):
            slot = table[token // engine.tokens] * engine.tokens + token % engine.tokens
            for head in range(share):
                pool[slot * share + head] = value(token, rank * share + head)


def grant(engine, request, tokens=4, source_blocks=((1,),), **_):
    """A ticket for what is loaded by the same facts."""
    return engine.scheduler.grant(request, tokens=tokens, blocks=source_blocks)


def load(engine, request, ticket, **facts):
    for worker in engine.workers:
        worker.load(request, ticket, deadline=LONG, **facts)
    return [ending for worker in engine.workers for ending in worker.endings(LONG)]
