"""A request handed over between two processes of one machine, with every byte checked."""

from __future__ import annotations

import importlib
import logging
import multiprocessing
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ._core import Manifest, Scheduler, Worker
from ._log import log_to

#: Seconds for any one step.
PATIENCE = 60.0
LAYERS, HEADS, WORDS = 4, 8, 16
#: Tokens of a block of the sending and of the receiving side.
FROM, TO = 16, 48
POISON = 0xA5A5A5A5A5A5A5A5


@dataclass
class HandedOver:
    """How it went."""

    #: The transport that was asked for.
    transport: str
    bytes: int
    copies: int
    #: On the wire.
    seconds: float
    #: As of `Ending.read_by`.
    read_by: list[tuple[int, str, str]]

    def __str__(self) -> str:
        rate = f", {self.bytes / self.seconds / 1e9:,.1f} GB/s" if self.seconds else ""
        moved = f"{self.bytes / (1 << 20):.0f} MiB in {self.copies} copies, every byte right{rate}"
        chosen = {(by, why) for _, by, why in self.read_by if by != self.transport}
        return moved + "".join(f" by {by}{_why(by, why)}" for by, why in sorted(chosen))


def _why(by: str, not_by: str) -> str:
    if not_by:
        return f" (not by {not_by})"
    return " (same node)" if by == "cuda" else ""


def hand_over(
    transport: str, device: str, mib: int, level: str = "error", **options: Any
) -> HandedOver:
    """Another process prefills, this one decodes, with other block sizes. Says how it went, and raises
    if it went wrong. The other one logs from `level` on, to the standard error. `options` are for the
    workers of both."""
    token = LAYERS * HEADS * WORDS * 8
    tokens = max(1, (mib << 20) // token)
    # A process with a fresh start: what CUDA and UCX hold does not survive a fork.
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    facts = (theirs, transport, device, tokens, level, options)
    process = context.Process(target=_prefill, args=facts, daemon=True)
    process.start()
    theirs.close()
    try:
        ticket, source = _receive(pipe)
        blocks = -(-tokens // TO)
        pool = _Pool(device, blocks + 1, TO)
        pool.fill(np.full(pool.words, POISON, dtype=np.uint64))
        table = [block + 1 for block in range(blocks)][::-1]
        scheduler = Scheduler("decode")
        worker = Worker(
            pool.manifest("decode"), ranks=1, memory=pool, transport=transport, **options
        )
        try:
            scheduler.publish([worker.card()])
            worker.load(
                "selfcheck",
                ticket,
                deadline=PATIENCE,
                tokens=tokens,
                source_blocks=[source],
                destination_blocks=[table],
            )
            endings = worker.endings(PATIENCE + 5)
            if not endings:
                raise RuntimeError(f"no answer within {PATIENCE + 5:.0f} s")
            (ending,) = endings
            if ending.outcome != "done":
                raise RuntimeError(ending.reason or ending.outcome)
        finally:
            worker.close()
            scheduler.close()
        wrong = int((pool.read() != _expected(TO, blocks + 1, table, tokens)).sum())
        if wrong:
            raise RuntimeError(f"{wrong} of {pool.words} words are wrong")
        pipe.send("done")
        released = _receive(pipe)
        if released != [("selfcheck", "confirmed")]:
            raise RuntimeError(f"the sender's blocks did not come back: {released}")
    finally:
        pipe.close()
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    wire = ending.seconds["wire"] + ending.seconds["post"]
    return HandedOver(transport, ending.bytes, ending.copies, wire, ending.read_by)


def _receive(pipe: Any) -> Any:
    if not pipe.poll(PATIENCE):
        raise RuntimeError(f"the other process does not answer within {PATIENCE:.0f} s")
    try:
        answer = pipe.recv()
    except EOFError:
        raise RuntimeError("the other process ended; --verbose may say why") from None
    if isinstance(answer, str):
        raise RuntimeError(answer)
    return answer


def _prefill(
    pipe: Any, transport: str, device: str, tokens: int, level: str, options: dict[str, Any]
) -> None:
    """The process that another reads from."""
    logging.basicConfig(format="%(message)s", level=logging.DEBUG)
    log_to(logging.getLogger("kvferry.prefill"), level)
    try:
        blocks = -(-tokens // FROM)
        pool = _Pool(device, blocks + 1, FROM)
        table = [block + 1 for block in range(blocks)]
        pool.fill(_expected(FROM, blocks + 1, table, tokens))
        scheduler = Scheduler("prefill")
        worker = Worker(
            pool.manifest("prefill"), ranks=1, memory=pool, transport=transport, **options
        )
        scheduler.publish([worker.card()])
        ticket = scheduler.grant("selfcheck", tokens=tokens, blocks=[table])
        pipe.send((ticket, table))
        if pipe.poll(2 * PATIENCE):
            pipe.recv()
            pipe.send(scheduler.released(PATIENCE))
        worker.close()
        scheduler.close()
    except EOFError:
        pass
    except Exception as error:
        pipe.send(str(error))


def _expected(size: int, blocks: int, table: list[int], tokens: int) -> npt.NDArray[np.uint64]:
    """A pool in which every word of a request's blocks says where it belongs, and all others are
    poison."""
    pool = np.full((LAYERS, blocks, size, HEADS * WORDS), POISON, dtype=np.uint64)
    values = np.arange(LAYERS * tokens * HEADS * WORDS, dtype=np.uint64).reshape(LAYERS, tokens, -1)
    for position, block in enumerate(table):
        part = values[:, position * size : (position + 1) * size]
        pool[:, block, : part.shape[1]] = part
    return pool.reshape(-1)


class _OnHost:
    """So many words of the host's memory."""

    def __init__(self, words: int) -> None:
        self.words = np.zeros(words, dtype=np.uint64)
        self.base = self.words.ctypes.data

    def fill(self, words: npt.NDArray[np.uint64]) -> None:
        self.words[:] = words

    def read(self) -> npt.NDArray[np.uint64]:
        return self.words


class _OnCard:
    """So many words of a GPU's."""

    def __init__(self, device: str, words: int) -> None:
        self.torch = importlib.import_module("torch")
        self.words = self.torch.zeros(words, dtype=self.torch.int64, device=device)
        self.base: int = self.words.data_ptr()

    def fill(self, words: npt.NDArray[np.uint64]) -> None:
        self.words.copy_(self.torch.from_numpy(words.view(np.int64)))
        self.torch.cuda.synchronize()

    def read(self) -> npt.NDArray[np.uint64]:
        words: npt.NDArray[np.uint64] = self.words.cpu().numpy().view(np.uint64)
        return words


class _Pool:
    """A rank's memory: layers, blocks, tokens, heads."""

    def __init__(self, device: str, blocks: int, size: int) -> None:
        self.device, self.blocks, self.size = device, blocks, size
        self.words = LAYERS * blocks * size * HEADS * WORDS
        on_host = device == "cpu"
        self.memory = _OnHost(self.words) if on_host else _OnCard(device, self.words)
        self.base, self.fill, self.read = self.memory.base, self.memory.fill, self.memory.read

    def manifest(self, engine: str) -> Manifest:
        row = HEADS * WORDS * 8
        block = self.size * row
        place: Any = "host" if self.device == "cpu" else {"gpu": int(self.device.split(":")[1])}
        pieces = [
            {
                "state": f"layers.{layer}/kv",
                "kind": 0,
                "bounds": [[0, HEADS]],
                "phase": {"modulus": 1, "held": [0, 1]},
                "view": {
                    "region": 0,
                    "offset": layer * self.blocks * block,
                    "block": block,
                    "kernel": None,
                    "entry": row,
                    "axes": [WORDS * 8],
                },
            }
            for layer in range(LAYERS)
        ]
        return Manifest(
            {
                "identity": {"model": "selfcheck"},
                "engine": engine,
                "rank": 0,
                "label": "tp0",
                "regions": [{"base": self.base, "bytes": self.words * 8, "place": place}],
                "kinds": [
                    {
                        "format": {"name": "opaque", "bytes": WORDS * 8},
                        "axes": [{"name": "head", "length": HEADS}],
                        "law": {"entries": 1, "tokens": 1, "open": 0},
                    }
                ],
                "groups": [
                    {
                        "name": "attention",
                        "blocks": self.blocks,
                        "null_block": 0,
                        "tokens_per_block": self.size,
                        "window": {"tokens": None, "chunk": 1, "extra": 0},
                        "pieces": pieces,
                        "scratch": [],
                    }
                ],
            }
        )
