"""One trace for each request that is handed over: from when P hears of it to D's first token.

Both sides of an engine are here once more, with the times of what they do; without the option `trace` none of
this runs, and OpenTelemetry is not even imported. The workers tell the scheduler's process when each rank did
what, and spans are made there, after the fact.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..._core import Ending
from ..logs import logger
from ..messages import Moved, Orders
from ..metrics import Stats
from ..options import Options
from ..params import KEY
from ..scheduler.decode import is_rejected
from ..scheduler.side import SchedulerSide
from ..worker.side import WorkerSide
from .spans import PARENT, Tracer, known, traceparent

#: The parts of a load on one rank: the moments at which each begins and ends well.
PARTS = {
    "kvferry.load.handshake": ("began", "known"),
    "kvferry.load.queue": ("known", "admitted"),
    "kvferry.load.read": ("reads", "arrived"),
    "kvferry.load.audit": ("arrived", "audited"),
    "kvferry.load.confirm": ("audited", "confirmed"),
}


def endpoint(vllm_config: Any, options: Options) -> str | None:
    """Where spans are sent to; None: requests are not traced."""
    if options.trace == "off":
        return None
    if options.trace != "auto":
        return options.trace
    theirs = getattr(vllm_config, "observability_config", None)
    return getattr(theirs, "otlp_traces_endpoint", None)


def sides(vllm_config: Any, options: Options) -> tuple[type[SchedulerSide], type[WorkerSide]]:
    """What an engine is made of, with or without traces."""
    if endpoint(vllm_config, options) is None:
        return SchedulerSide, WorkerSide
    return TracedScheduler, TracedWorker


@dataclass
class Given:
    """A request on P, from when it comes until its blocks are free."""

    span: Any
    arrived: int
    granted: int | None = None
    tokens: int = 0
    #: What readers did: what, who, when.
    notes: list[tuple[str, str, int]] = field(default_factory=list)


@dataclass
class Taken:
    """A request on D, from when it comes until its first token."""

    span: Any
    request: Any
    arrived: int
    #: vLLM's scheduler has asked about it, the other engine was far enough, it has blocks.
    asked: int | None = None
    ready: int | None = None
    allocated: int | None = None
    waited: bool = False
    #: The workers' last word, and the first step.
    heard: int | None = None
    scheduled: int | None = None
    loads: list[dict[str, Any]] = field(default_factory=list)
    lost: str | None = None


class TracedScheduler(SchedulerSide):
    """The scheduler's side, with a trace of every request."""

    def __init__(
        self, vllm_config: Any, kv_cache_config: Any, options: Options, tracer: Tracer | None = None
    ) -> None:
        self.engine = str(vllm_config.kv_transfer_config.engine_id)
        where = endpoint(vllm_config, options)
        # Before anything listens: what is missing is said at once.
        self.tracer = tracer or Tracer.to(self.engine, str(where))
        super().__init__(vllm_config, kv_cache_config, options)
        self.agent.watch()
        self.given: dict[str, Given] = {}
        self.taken: dict[str, Taken] = {}
        logger.info("kvferry: requests are traced, and the traces sent to %s", where)

    def on_new_request(self, request: Any) -> None:
        at, name = time.time_ns(), request.request_id
        super().on_new_request(request)
        facts = {"request": name, "engine": self.engine}
        if name in self.prefill.prefilling:
            span = self.tracer.root("kvferry.prefill", request, at, facts)
            self.given[name] = Given(span, at)
            self._say(name, span)
        wanted = self.decode.wanted.get(name)
        if wanted is not None:
            ticket = wanted.ticket or {}
            facts["peer.engine"] = ticket.get("engine") or (wanted.follows or {}).get("engine")
            facts["peer.request"] = ticket.get("request")
            span = self.tracer.root("kvferry.decode", request, at, facts)
            self.taken[name] = Taken(span, request, at)
            self._say(name, span)
        elif (request.kv_transfer_params or {}).get("do_remote_prefill") and not is_rejected(request):
            span = self.tracer.root("kvferry.decode", request, at, facts | {"outcome": "computed here"})
            self.tracer.end(span, at, "the transfer parameters cannot be used")

    def _say(self, name: str, span: Any) -> None:
        logger.debug("kvferry: %s is traced as %s", name, traceparent(span))

    # P

    def finished(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._leave(request)
        kept, params = super().finished(request, block_ids)
        given = self.given.get(request.request_id)
        if given is None:
            return kept, params
        given.granted = time.time_ns()
        self.tracer.child(given.span, "kvferry.prefill.compute", given.arrived, given.granted, {})
        if params is None:
            del self.given[request.request_id]
            self._end(given.span, "not kept", given.granted)
        else:
            ours = params.get(KEY)
            given.tokens = params.get("remote_num_tokens", 0)
            if isinstance(ours, dict):
                # So that D's spans join this trace, whether or not the router passes headers on.
                ours[PARENT] = traceparent(given.span)
        return kept, params

    def released(self) -> dict[str, str]:
        self._take_notes()
        released = super().released()
        now = time.time_ns()
        for name, why in released.items():
            given = self.given.pop(name, None)
            if given is None:
                continue
            # Nobody having asked in time is the one end that is nobody's wish.
            error = "nobody has read it in time" if why == "expired" else None
            facts = {"tokens": given.tokens, "outcome": why}
            self._lease(given, given.granted or now, now, facts, error)
            given.span.set_attributes(known(facts))
            self._end(given.span, why, now, error)
        return released

    def _take_notes(self) -> None:
        for name, did, who, seconds in self.agent.notes():
            if given := self.given.get(name):
                given.notes.append((did, who, int(seconds * 1e9)))

    def _lease(self, given: Given, granted: int, now: int, facts: Mapping[str, Any], error: str | None) -> None:
        child = self.tracer.child
        lease = child(given.span, "kvferry.prefill.lease", granted, now, facts, error)
        for did, who, at in given.notes:
            if did == "followed":
                child(given.span, "kvferry.prefill.followed", at, max(at, granted), {"peer": who})
            else:
                child(lease, "kvferry.prefill.read", granted, at, {"peer": who})

    # D

    def matched(self, request: Any, computed: int) -> tuple[int | None, bool]:
        count, any_ = super().matched(request, computed)
        taken = self.taken.get(request.request_id)
        if taken is not None and taken.allocated is None:
            now = time.time_ns()
            taken.asked = taken.asked or now
            if count is None:
                taken.waited = True
            else:
                taken.ready = taken.ready or now
        return count, any_

    def allocated(self, request: Any, blocks: Any, external: int) -> None:
        name = request.request_id
        wanted, taken = self.decode.wanted.get(name), self.taken.get(name)
        super().allocated(request, blocks, external)
        if taken is None or wanted is None or taken.allocated is not None:
            return
        taken.allocated, taken.lost = time.time_ns(), wanted.lost
        ticket = wanted.ticket or {}
        facts = {"peer.engine": ticket.get("engine"), "peer.request": ticket.get("request")}
        facts |= {"peer.address": ticket.get("address"), "tokens": external, "tokens.held": wanted.computed}
        taken.span.set_attributes(known(facts))
        if external == 0:
            # Everything is here already, or nothing is to be had.
            del self.taken[name]
            self._parts(taken)
            self._end(taken.span, "not needed", taken.allocated)

    def orders(self, scheduled: Mapping[str, int]) -> Orders:
        orders = super().orders(scheduled)
        now = time.time_ns()
        for load in orders.loads:
            if taken := self.taken.get(load["request"]):
                orders.traces[load["request"]] = traceparent(taken.span)
        if self.taken:
            for name in scheduled:
                taken = self.taken.get(name)
                if taken is not None and taken.heard is not None:
                    taken.scheduled = taken.scheduled or now
        return orders

    def loaded(self, loads: Mapping[str, list[dict[str, Any]]]) -> None:
        for name, ranks in loads.items():
            if taken := self.taken.get(name):
                taken.loads += ranks

    def ended(self, request: str, failed: bool, seconds: float) -> None:
        super().ended(request, failed, seconds)
        taken = self.taken.get(request)
        if taken is None:
            return
        taken.heard = time.time_ns()
        if failed:
            del self.taken[request]
            bad = [load for load in taken.loads if load["outcome"] != "done"]
            outcome = bad[0]["outcome"] if bad else "lost" if taken.lost else "failed"
            reason = bad[0]["reason"] if bad else taken.lost or "the workers could not load it"
            self._parts(taken)
            given_up = outcome == "aborted"
            self._end(taken.span, outcome, taken.heard, None if given_up else reason)
            if not given_up:
                logger.info("kvferry: %s was not loaded; its trace is %s", request, traceparent(taken.span))

    def stats(self) -> Stats:
        # vLLM asks for these whenever it has taken in what a step has brought, first tokens among it.
        for name, taken in list(self.taken.items()):
            if taken.scheduled is not None and taken.request.num_output_tokens > 0:
                self._first_token(name, taken)
        return super().stats()

    def _first_token(self, name: str, taken: Taken) -> None:
        del self.taken[name]
        now = time.time_ns()
        self._parts(taken)
        if taken.heard is not None and taken.scheduled is not None:
            self.tracer.child(taken.span, "kvferry.decode.schedule", taken.heard, taken.scheduled, {})
            self.tracer.child(taken.span, "kvferry.decode.first_step", taken.scheduled, now, {})
        self._end(taken.span, "done", now)

    def _leave(self, request: Any) -> None:
        """vLLM has done with a request: with its first token, or before."""
        name = request.request_id
        taken = self.taken.get(name)
        if taken is None or (taken.allocated is not None and taken.heard is None):
            # What is being loaded ends when the workers say so.
            return
        if taken.scheduled is not None and request.num_output_tokens > 0:
            self._first_token(name, taken)
            return
        del self.taken[name]
        self._parts(taken)
        self._end(taken.span, "aborted", time.time_ns())

    def _parts(self, taken: Taken) -> None:
        """What came before the first step."""
        if not taken.span.is_recording():
            return
        child = self.tracer.child
        if taken.asked is not None:
            child(taken.span, "kvferry.decode.queue", taken.arrived, taken.asked, {})
        if taken.asked is not None and taken.waited:
            until = taken.ready or time.time_ns()
            child(taken.span, "kvferry.decode.wait", taken.asked, until, {})
        if taken.ready is not None and taken.allocated is not None:
            child(taken.span, "kvferry.decode.allocate", taken.ready, taken.allocated, {})
        moments = [load["moments"] for load in taken.loads if load["moments"]]
        if moments and taken.allocated is not None:
            began = int(min(each["began"] for each in moments) * 1e9)
            child(taken.span, "kvferry.decode.order", taken.allocated, began, {})
        for load in taken.loads:
            self._load(taken.span, load)
        if moments and taken.heard is not None:
            ended = int(max(each["ended"] for each in moments) * 1e9)
            child(taken.span, "kvferry.decode.report", ended, taken.heard, {})

    def _load(self, parent: Any, load: dict[str, Any]) -> None:
        """What one rank did."""
        at = {name: int(seconds * 1e9) for name, seconds in load["moments"].items()}
        error = None if load["outcome"] in ("done", "aborted") else load["reason"] or load["kind"]
        start = at.get("began", time.time_ns())
        end = at.get("ended", start)
        facts = {name: load[name] for name in ("rank", "outcome", "kind", "transport", "bytes", "copies")}
        facts["lowering"] = "+".join(load["lowerings"])
        span = self.tracer.child(parent, "kvferry.load", start, end, facts, error)
        for name, (begins, ends) in PARTS.items():
            if begins not in at:
                continue
            facts = {"rank": load["rank"]}
            if name == "kvferry.load.read":
                facts |= {f"seconds.{phase}": load["seconds"][phase] for phase in ("plan", "post", "wire")}
            over = ends in at
            self.tracer.child(span, name, at[begins], at.get(ends, end), facts, None if over else error)

    def _end(self, span: Any, outcome: str, at: int, error: str | None = None) -> None:
        span.set_attribute("kvferry.outcome", outcome)
        self.tracer.end(span, at, error)

    def close(self) -> None:
        super().close()
        now = time.time_ns()
        spans = [given.span for given in self.given.values()]
        for span in spans + [taken.span for taken in self.taken.values()]:
            self._end(span, "engine ended", now, "the engine has ended")
        self.given, self.taken = {}, {}
        self.tracer.close()


class TracedWorker(WorkerSide):
    """A worker's side, which tells the scheduler when it did what."""

    def __init__(self, vllm_config: Any, kv_cache_config: Any, options: Options) -> None:
        super().__init__(vllm_config, kv_cache_config, options)
        #: The traces of requests that load, and what is to be told of those that have ended.
        self.traces: dict[str, str] = {}
        self.done: dict[str, list[dict[str, Any]]] = {}

    def obey(self, orders: Orders) -> None:
        self.traces |= orders.traces
        super().obey(orders)

    def count(self, ending: Ending) -> None:
        super().count(ending)
        if parent := self.traces.pop(ending.request, None):
            trace = parent.split("-")[1]
            # Prometheus takes 128 characters in all, names included.
            self.ended[-1]["exemplar"] = {"trace_id": trace, "request": ending.request[-72:]}
        self._tell(ending.request, ending.outcome, ending.kind, ending.reason, ending)

    def refuse(self, request: str, why: str) -> None:
        super().refuse(request, why)
        self.traces.pop(request, None)
        self._tell(request, "aborted" if why == "cancelled" else "failed", why, why, None)

    def _tell(self, request: str, outcome: str, kind: str, reason: str, ending: Ending | None) -> None:
        self.done.setdefault(request, []).append(
            {
                "rank": self.rank,
                "transport": self.transport,
                "outcome": outcome,
                "kind": kind,
                "reason": reason,
                "bytes": ending.bytes if ending else 0,
                "copies": ending.copies if ending else 0,
                "lowerings": ending.lowerings if ending else [],
                "moments": ending.moments if ending else {},
                "seconds": ending.seconds if ending else {},
            }
        )

    def told(self) -> Moved | None:
        moved, done = super().told(), self.done
        if done:
            self.done = {}
            moved = moved or Moved({})
            moved.loads = done
        return moved
