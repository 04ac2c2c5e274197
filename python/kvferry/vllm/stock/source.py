"""P runs vLLM's stock NixlConnector: D's scheduler asks it how its memory lies, keeps its blocks alive while
requests wait, and tells it when they have been read.

Such a P keeps no lease that could be asked about. It frees a request's blocks when it is told that they were
read, or when it has heard nothing of the request for a while; so what D reads is fenced by D's own clock alone.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

from ..._core import Bell, Scheduler
from ..._errors import Error
from ..describe import specs
from ..groups import Groups, first_seen
from ..logs import logger
from ..params import KEY, Offer, needed
from . import wire
from .wire import Introduction, Place

#: Shares of P's lease. It keeps blocks for two thirds after it last heard of them: for how much an engine that reads
#: them relies on that, and how often it is told meanwhile.
RELIED_ON, BEAT = 1 / 2, 1 / 6
#: Engines that are asked at once, each by a thread: requests name them.
ASKED = 32
#: Seconds after which an engine that no request came from is forgotten.
FORGOTTEN = 3600.0
#: What is counted, for the metrics.
COUNTS = {
    "loads_unconfirmed": "Requests that were read from an engine without kvferry (vLLM's own NixlConnector): used "
    "without a confirmation that their blocks were still theirs, and without audits.",
    "stock_unreachable": "Engines without kvferry that could not be reached or understood when a request came from "
    "them.",
}


@dataclass
class _Engine:
    """An engine with the stock connector, in one of its lives."""

    place: Place
    introduction: Introduction | None = None
    #: NIXL's names for its ranks.
    names: list[str] = field(default_factory=list)
    #: Why it cannot be used.
    failed: str | None = None
    asking: bool = False
    #: When a request last came from it.
    used: float = field(default_factory=time.monotonic)
    #: The workers know of it.
    introduced: bool = False
    #: Requests whose blocks it keeps for this engine.
    kept: set[str] = field(default_factory=set)
    #: Those that were given up before it could be told.
    owed: set[str] = field(default_factory=set)


class Stock:
    """The engines without kvferry that requests come from. It has the calls of the agent's scheduler that a
    ticket is given to (`hold`, `reading`, `settle`, `abandon`, `lost`)."""

    def __init__(self, agent: Scheduler, groups: Groups, lease: float) -> None:
        self.agent, self.groups, self.lease = agent, groups, lease
        self.counts = dict.fromkeys(COUNTS, 0)
        self._lock = threading.Lock()
        self._engines: dict[Place, _Engine] = {}
        self._introductions: list[Introduction] = []
        self._bell: Bell | None = None
        self._stop = threading.Event()
        self._heart: threading.Thread | None = None

    def read(self, params: dict[str, Any]) -> Offer | None:
        """What the stock connector hands over; None for other parameters. Raises `ValueError` for what can be
        of no use."""
        if not is_stock(params):
            return None
        place = Place(
            needed(params, "remote_host", "remote_host"),
            needed(params, "remote_port", "remote_port"),
            needed(params, "remote_engine_id", "remote_engine_id"),
            needed(params, "tp_size", "tp_size"),
        )
        for name, what in (("pp_size", "pipeline stages"), ("dcp_size", "context parallelism")):
            if (params.get(name) or 1) != 1:
                raise ValueError(
                    f"an engine without kvferry is not read with {what} ('{name}' is {params[name]}, and must "
                    "be 1): use FerryConnector there, too"
                )
        if params.get("transfer_mode", "pull") != "pull":
            raise ValueError(
                f"the other engine writes ('transfer_mode' is {params['transfer_mode']!r}), and an engine with "
                "kvferry reads: use NixlConnector or FerryConnector there"
            )
        # Each rank counts once when it starts (from version 15 on; those before never register again).
        if (params.get("remote_registration_generation") or 0) > place.tp:
            raise ValueError(
                "the other engine has registered its memory anew, as after sleep ('remote_registration_generation' is "
                f"{params['remote_registration_generation']}, with {place.tp} ranks): start it anew, or use FerryConnector "
                "there, too"
            )
        ticket = {
            "engine": place.engine,
            "address": place.address,
            "request": needed(params, "remote_request_id", "remote_request_id"),
            "nonce": "0" * 16,
            "term_ms": int(self.lease * 1000),
            "tp": place.tp,
        }
        tokens = needed(params, "remote_num_tokens", "remote_num_tokens")
        blocks = needed(params, "remote_block_ids", "remote_block_ids")
        return Offer(ticket, tokens, blocks, None)

    def hold(self, ticket: dict[str, Any]) -> None:
        """Keeps blocks alive from now on, and gets to know their engine."""
        with self._lock:
            engine = self._engines.setdefault(Place.of(ticket), _Engine(Place.of(ticket)))
            engine.used = time.monotonic()
            engine.kept.add(ticket["request"])
            known = engine.introduction is not None
            if not known:
                self._ask(engine)
            if self._heart is None:
                self._heart = threading.Thread(target=self._beat, name="kvferry-stock", daemon=True)
                self._heart.start()
        if known:
            self._ring(engine, _heartbeat([ticket["request"]]))

    def lost(self, ticket: dict[str, Any]) -> str | None:
        """Why the blocks cannot be had, if so."""
        engine = self._engines.get(Place.of(ticket))
        return None if engine is None else engine.failed

    def complete(self, offer: Offer) -> Offer | None:
        """The same with the position that each table starts with. None: its engine has not answered yet. Raises
        `ValueError` where its tables cannot be of use."""
        engine = self._engines.get(Place.of(offer.ticket))
        if engine is None or engine.introduction is None:
            return None
        return replace(offer, first=self._first(engine.introduction, offer))

    def usable(self, offer: Offer, tokens: int) -> bool:
        """Whether P still has all that the token after so many looks at. P keeps its windows for the token after
        all of the prompt; D computes the last of the prompt again, which may look at one that P has given up."""
        engine = self._engines.get(Place.of(offer.ticket))
        if engine is None or engine.introduction is None or offer.first is None:
            return True
        for group, (ids, first) in enumerate(zip(offer.blocks, offer.first, strict=True)):
            if self.groups.recurrent[group]:
                continue
            seen = min(first_seen(one, tokens) for one in specs.all_specs(self.groups.specs[group]))
            needed = seen // engine.introduction.block
            if needed * engine.introduction.block < tokens and (
                needed < first or (needed - first < len(ids) and ids[needed - first] == 0)
            ):
                return False
        return True

    def reading(self, ticket: dict[str, Any]) -> tuple[dict[str, Any], float]:
        """The workers are about to read: the ticket for them, and for how many seconds what they read is good."""
        engine = self._engines[Place.of(ticket)]
        assert engine.introduction is not None
        if not engine.introduced:
            engine.introduced = True
            self._introductions.append(engine.introduction)
        self._ring(engine, _heartbeat([ticket["request"]]))
        self.counts["loads_unconfirmed"] += 1
        return ticket | {"incarnation": engine.introduction.incarnation}, self.lease * RELIED_ON

    def introductions(self) -> list[Introduction]:
        """The engines that the workers do not know yet."""
        new, self._introductions = self._introductions, []
        return new

    def settle(self, ticket: dict[str, Any]) -> None:
        """All ranks have read: P may free the blocks."""
        self._release(ticket)

    def abandon(self, ticket: dict[str, Any], failed: bool = False) -> None:
        """They are not wanted any more. After a load that failed its engine is asked anew: it may have another
        life."""
        self._release(ticket)
        engine = self._engines.get(Place.of(ticket))
        if failed and engine is not None:
            with self._lock:
                if not engine.kept:
                    self._forget(engine)

    def close(self) -> None:
        self._stop.set()

    def _first(self, introduction: Introduction, offer: Offer) -> list[int]:
        if len(offer.blocks) != len(self.groups.specs):
            raise ValueError(
                f"'remote_block_ids' has {len(offer.blocks)} tables, but this engine groups its layers into "
                f"{len(self.groups.specs)}: an engine without kvferry must group them in the same way"
            )
        needed = -(-offer.tokens // introduction.block)
        first = []
        for group, (spec, ids) in enumerate(zip(self.groups.specs, offer.blocks, strict=True)):
            if self.groups.recurrent[group]:
                first.append(0)
                continue
            clipped = specs.is_clipped(spec)
            if len(ids) < needed and not clipped:
                raise ValueError(
                    f"table {group} of 'remote_block_ids' has {len(ids)} blocks of {introduction.block} tokens, "
                    f"but 'remote_num_tokens' is {offer.tokens}"
                )
            # The last ones, of as many as its tokens take.
            first.append(max(0, needed - len(ids)) if clipped else 0)
        return first

    def _ask(self, engine: _Engine) -> None:
        """In a thread of its own: it may be far away, or gone."""
        if engine.asking:
            return
        if sum(one.asking for one in self._engines.values()) >= ASKED:
            engine.failed = f"{ASKED} other engines are being asked already, and have not answered yet"
            return
        engine.asking, engine.failed = True, None
        thread = threading.Thread(
            target=self._meet, args=(engine,), name="kvferry-stock-ask", daemon=True
        )
        thread.start()

    def _meet(self, engine: _Engine) -> None:
        try:
            # Its name may stand for another address from one moment to the next.
            address, *_ = self.agent.foreign(engine.place.address.removeprefix("nixl://"))
            introduction = wire.ask(engine.place, address)
            with self._lock:
                self._bell = self._bell or Bell()
                bell = self._bell
            names = [bell.meet(rank.agent_metadata) for rank in introduction.ranks()]
        except (Error, OSError, ValueError) as error:
            with self._lock:
                engine.failed, engine.asking = str(error), False
                engine.owed.clear()
            self.counts["stock_unreachable"] += 1
            logger.warning("kvferry: cannot use the engine at %s: %s", engine.place.address, error)
            return
        logger.warning(
            "kvferry: %s runs vLLM's stock NixlConnector. Its blocks are read, but it cannot be asked whether "
            "they were still the request's own: no confirmation, no audits, no reading while it computes. Use "
            "FerryConnector there as soon as you can",
            engine.place.address,
        )
        with self._lock:
            engine.introduction, engine.names, engine.asking = introduction, names, False
            kept, owed = sorted(engine.kept), sorted(engine.owed)
            engine.owed.clear()
        if kept:
            self._ring(engine, _heartbeat(kept))
        for request in owed:
            self._ring(engine, _read(request))

    def _release(self, ticket: dict[str, Any]) -> None:
        engine = self._engines.get(Place.of(ticket))
        if engine is None:
            return
        with self._lock:
            engine.kept.discard(ticket["request"])
            if engine.introduction is None:
                if engine.asking:
                    engine.owed.add(ticket["request"])
                elif not engine.kept:
                    # It cannot be reached: the next request asks again.
                    del self._engines[engine.place]
                return
        self._ring(engine, _read(ticket["request"]))

    def _ring(self, engine: _Engine, message: bytes) -> None:
        for name in engine.names:
            try:
                assert self._bell is not None
                self._bell.ring(name, message)
            except Error as error:
                # It keeps the blocks until its own time is up.
                logger.warning("kvferry: cannot notify the engine at %s: %s", engine.place.address, error)

    def _forget(self, engine: _Engine) -> None:
        self._engines.pop(engine.place, None)
        for name in engine.names:
            assert self._bell is not None
            self._bell.forget(name)
        engine.names = []

    def _beat(self) -> None:
        while not self._stop.wait(self.lease * BEAT):
            with self._lock:
                engines = [(engine, sorted(engine.kept)) for engine in self._engines.values()]
            for engine, kept in engines:
                if kept:
                    self._ring(engine, _heartbeat(kept))
                elif time.monotonic() - engine.used > FORGOTTEN:
                    with self._lock:
                        if not engine.kept and not engine.asking:
                            self._forget(engine)


def layout(vllm_config: Any) -> str | None:
    """The layout of a cache that vLLM's own connector asks for. Engines with it do not pack what is read from them, and
    where both sides have the same layout, nothing has to be: runs are as long as blocks."""
    try:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl import NixlConnector
    except ImportError:
        # A version of vLLM that has not been tried, which is said by its number later.
        return None
    made: str | None = NixlConnector.get_required_kvcache_layout(vllm_config)
    return made


def is_stock(params: dict[str, Any]) -> bool:
    """Whether parameters are of the stock connector, and not of another one, nor kvferry's own without the part that
    a router has lost."""
    theirs = "dcp_size" in params and params.get("remote_request_id") is not None
    return theirs and params.get(KEY) is None and bool(params.get("remote_block_ids"))


def _heartbeat(requests: list[str]) -> bytes:
    return f"HB:{','.join(requests)}".encode()


def _read(request: str) -> bytes:
    # Each rank of P waits for as many of these as the message says. All ranks here are done.
    return f"{request}:1".encode()
