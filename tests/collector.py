"""A collector of traces on loopback, as OpenTelemetry's is: it keeps the spans that come."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class SeenSpan:
    """A span as it was sent. Times in seconds since 1970."""

    name: str
    trace_id: str
    id: str
    parent: str
    start_s: float
    end_s: float
    facts: dict[str, Any]
    has_failed: bool
    service: str


class Collector:
    """Attributes: url, spans."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.spans: list[SeenSpan] = []

    def beneath(self, parent: SeenSpan) -> list[SeenSpan]:
        """In the order of their beginnings."""
        return sorted((one for one in self.spans if one.parent == parent.id), key=lambda one: one.start_s)

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            service = _facts(resource.resource.attributes)["service.name"]
            for span in (span for scope in resource.scope_spans for span in scope.spans):
                ids = (span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex())
                times = (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9)
                facts, has_failed = _facts(span.attributes), span.status.code == span.status.STATUS_CODE_ERROR
                self.spans.append(SeenSpan(span.name, *ids, *times, facts, has_failed, service))


def _facts(attributes: Any) -> dict[str, Any]:
    return {one.key: _value(one.value) for one in attributes}


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    found = getattr(value, kind)
    return [_value(one) for one in found.values] if kind == "array_value" else found


@contextmanager
def collecting() -> Iterator[Collector]:
    """A collector that listens within the `with` block."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.path == "/v1/traces":
                collector.take(body)
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    collector = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield collector
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
