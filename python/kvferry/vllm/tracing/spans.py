"""Spans of requests, made with OpenTelemetry, which is imported only when a span is to be made.

A request's spans hang below the context that came with it: in the headers, as vLLM passes them on, in its
parameters, or in what P has put into those. Where nobody gave it any, both engines draw the same trace from the
name that the router gave to the request.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Mapping
from typing import Any

from ..params import KEY, stem

#: The key of a context in `kv_transfer_params`, and in our part of them.
PARENT = "traceparent"


class Tracer:
    """Makes spans with OpenTelemetry, apart from those that vLLM makes."""

    def __init__(self, engine: str, exporter: Any, *, at_once: bool = False) -> None:
        """`at_once` is for exporters that cannot be slow."""
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor
        from opentelemetry.sdk.trace.id_generator import IdGenerator

        class Ids(IdGenerator):
            """Trace ids that two engines agree on without a word, and ids of spans that they never share:
            vLLM seeds Python's own generator, which OpenTelemetry draws from, alike in all engines."""

            trace = 0

            def generate_trace_id(self) -> int:
                return self.trace or secrets.randbits(128) or 1

            def generate_span_id(self) -> int:
                return secrets.randbits(64) or 1

        self._ids = Ids()
        named = "OTEL_SERVICE_NAME" in os.environ or "service.name=" in os.environ.get(
            "OTEL_RESOURCE_ATTRIBUTES", ""
        )
        facts = {"kvferry.engine": engine} | ({} if named else {"service.name": "kvferry"})
        self._provider = TracerProvider(resource=Resource.create(facts), id_generator=self._ids)
        processor = SimpleSpanProcessor if at_once else BatchSpanProcessor
        self._provider.add_span_processor(processor(exporter))
        self._tracer = self._provider.get_tracer("kvferry")

    @classmethod
    def to(cls, engine: str, where: str) -> Tracer:
        """Sends spans to a collector, by the protocol that vLLM sends its own by."""
        try:
            if os.environ.get("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "grpc") == "grpc":
                from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter as Grpc

                return cls(engine, Grpc(endpoint=where, insecure=not where.startswith("https:")))
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter as Http

            return cls(engine, Http(endpoint=where))
        except ImportError as error:
            raise ValueError(
                f"the option 'trace' of kv_connector_extra_config sends traces to {where}, but OpenTelemetry "
                f"is not installed here ({error}); install opentelemetry-sdk and opentelemetry-exporter-otlp, "
                "or leave the option out"
            ) from None

    def root(self, name: str, request: Any, at: int, facts: Mapping[str, Any]) -> Any:
        """The span of a request on this engine, below whatever context came with it."""
        from opentelemetry.trace import Link, get_current_span

        params = request.kv_transfer_params or {}
        ours = params.get(KEY)
        given = _context(getattr(request, "trace_headers", None)) or _context(params)
        other = _context(ours) if isinstance(ours, dict) else None
        # An own trace of the reader is kept; that it continues the other engine's is then said by a link.
        links = [Link(get_current_span(other).get_span_context())] if given and other else []
        self._ids.trace = _trace_of(request.request_id)
        try:
            return self._tracer.start_span(
                name, given or other or _nothing(), start_time=at, attributes=known(facts), links=links
            )
        finally:
            self._ids.trace = 0

    def child(
        self, parent: Any, name: str, start: int, end: int, facts: Mapping[str, Any], error: str | None = None
    ) -> Any:
        """A part of another span, which is over."""
        from opentelemetry.trace import set_span_in_context

        # Clocks of several processes: nothing ends before it has begun.
        start = min(start, end)
        context = set_span_in_context(parent)
        span = self._tracer.start_span(name, context, start_time=start, attributes=known(facts))
        self.end(span, end, error)
        return span

    def end(self, span: Any, at: int, error: str | None = None) -> None:
        from opentelemetry.trace import Status, StatusCode

        if error is not None:
            span.set_status(Status(StatusCode.ERROR, error))
        span.end(at)

    def close(self) -> None:
        """Sends what is left."""
        self._provider.shutdown()


def _context(carrier: Mapping[str, Any] | None) -> Any:
    """The context in headers or parameters; None if there is none, or none that makes sense."""
    from opentelemetry.trace import get_current_span
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    told = {name: carrier.get(name) for name in (PARENT, "tracestate")} if carrier else {}
    if not isinstance(told.get(PARENT), str):
        return None
    if not isinstance(told["tracestate"], str):
        del told["tracestate"]
    # What an embedding process traces is no parent of a request's.
    context = TraceContextTextMapPropagator().extract(told, _nothing())
    return context if get_current_span(context).get_span_context().is_valid else None


def _nothing() -> Any:
    from opentelemetry.context import Context

    return Context()


def _trace_of(request: str) -> int:
    """For a request without a context: the same on every engine that the router has sent it to."""
    return int.from_bytes(hashlib.sha256(f"kvferry {stem(request)}".encode()).digest()[:16], "big")


def known(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Facts as attributes of a span; those that are not known are left out."""
    return {f"kvferry.{name}": value for name, value in facts.items() if value not in (None, "")}


def traceparent(span: Any) -> str:
    """A span as a parent of others."""
    context = span.get_span_context()
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags & 1:02x}"
