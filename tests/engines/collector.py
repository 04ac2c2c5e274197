"""Where engines send their traces to in tests: a collector that speaks OTLP over HTTP, and keeps what it gets."""

import gzip
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

#: What an engine's process needs to know: how to send, and soon.
ENVIRONMENT = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf", "OTEL_BSP_SCHEDULE_DELAY": "100"}
ERROR = 2


class Collector:
    def __init__(self):
        self.spans, collected = [], self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                collected.spans += list(read(body))
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self):
        self._server.shutdown()
        self._server.server_close()

    def trace(self, id):
        """The spans of one trace, by name."""
        found = {}
        for span in self.spans:
            if span.trace == id:
                found.setdefault(span.name, []).append(span)
        return found

    def wait(self, id, *names, seconds=60):
        """The spans of a trace, as soon as those of these names are there."""
        end = time.monotonic() + seconds
        while not set(names) <= set(found := self.trace(id)):
            assert time.monotonic() < end, f"only {sorted(found)} of {sorted(names)}"
            time.sleep(0.05)
        return found


def prepare():
    """In an engine's own process, before it starts."""
    os.environ.update(ENVIRONMENT)


def read(body):
    for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
        for scope in resource.scope_spans:
            for span in scope.spans:
                yield SimpleNamespace(
                    name=span.name,
                    trace=span.trace_id.hex(),
                    id=span.span_id.hex(),
                    parent=span.parent_span_id.hex(),
                    start=span.start_time_unix_nano,
                    end=span.end_time_unix_nano,
                    failed=span.status.code == ERROR,
                    why=span.status.message,
                    facts={one.key: _value(one.value) for one in span.attributes},
                    resource={one.key: _value(one.value) for one in resource.resource.attributes},
                )


def _value(value):
    return getattr(value, value.WhichOneof("value"))
