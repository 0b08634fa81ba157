"""Traces of requests by OpenTelemetry, which is imported only if traces are on.

A request over HTTP is a span. Beneath it each answer has the spans `queue`, `prefill` and `decode`, written
when it ends, from the times that a request keeps anyway: a step of the engine does nothing for a trace.
Between processes a trace continues by the text of W3C Trace Context, `traceparent`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from time import perf_counter, perf_counter_ns, time_ns
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from kukri.errors import ConfigError, UnsupportedError
from kukri.host.installed import needs_package

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter
    from opentelemetry.trace import Span as Recorded
    from opentelemetry.trace import Tracer

log = logging.getLogger("kukri.engine.traces")

Facts = Mapping[str, str | int | float | bool | Sequence[str]]  # attributes of a span by name
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PATH = "/v1/traces"  # OTLP's path over HTTP
_OFFSET_NS = time_ns() - perf_counter_ns()  # from the clock of requests to the clock of the day


class Traces:
    """Sends spans to a collector, in the background.

    Names of the service, samplers, headers and limits come from the environment (OTEL_SERVICE_NAME,
    OTEL_TRACES_SAMPLER, OTEL_EXPORTER_OTLP_HEADERS …).
    """

    def __init__(self, exporter: SpanExporter) -> None:
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        name = os.environ.get("OTEL_SERVICE_NAME", "kukri")
        self._provider = TracerProvider(resource=Resource.create({SERVICE_NAME: name}))
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("kukri")

    def begin(self, name: str, headers: Mapping[str, str]) -> Span:
        """The span of a request that came from outside, beneath the client's if its headers name one."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract(headers)
        return Span(self._tracer, self._tracer.start_span(name, context, SpanKind.SERVER))

    def beneath(self, traceparent: str) -> Span:
        """The span of another process, as a parent; it ends there."""
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        context = TraceContextTextMapPropagator().extract({"traceparent": traceparent})
        return Span(self._tracer, get_current_span(context))

    def close(self) -> None:
        """Send the remaining spans."""
        self._provider.shutdown()


class Span:
    """A part of a trace that takes time. Safe in several threads; times are read from `perf_counter`."""

    def __init__(self, tracer: Tracer, span: Recorded) -> None:
        self._tracer, self._span = tracer, span

    @property
    def trace_id(self) -> str:
        """The number of the trace: 32 hexadecimal digits."""
        return f"{self._span.get_span_context().trace_id:032x}"

    @property
    def traceparent(self) -> str:
        """The span as a header that the next process puts its own beneath."""
        context = self._span.get_span_context()
        return f"00-{self.trace_id}-{context.span_id:016x}-{context.trace_flags:02x}"

    def begin(self, name: str) -> Span:
        """A span beneath, from now on, whose work another process does."""
        return self._beneath(name, perf_counter(), is_remote=True)

    def record(self, name: str, start_s: float, end_s: float, facts: Facts) -> None:
        """Writes a span beneath that is over."""
        self._beneath(name, start_s).end(facts, end_s=end_s)

    def end(
        self, facts: Facts, *, name: str | None = None, error: str | None = None, end_s: float | None = None
    ) -> None:
        """Ends it, under another name if one is given, failed if there is an error."""
        from opentelemetry.trace import StatusCode

        if name is not None:
            self._span.update_name(name)
        self._span.set_attributes(facts)
        if error is not None:
            self._span.set_status(StatusCode.ERROR, error)
        self._span.end(_day_ns(perf_counter() if end_s is None else end_s))

    def _beneath(self, name: str, start_s: float, *, is_remote: bool = False) -> Span:
        from opentelemetry.trace import SpanKind, set_span_in_context

        context, kind = set_span_in_context(self._span), SpanKind.CLIENT if is_remote else SpanKind.INTERNAL
        return Span(self._tracer, self._tracer.start_span(name, context, kind, start_time=_day_ns(start_s)))


def open_traces(url: str | None) -> Traces | None:
    """Traces that go to the OTLP collector at a URL, or at the environment's; None if neither is given.

    Raises UnsupportedError if OpenTelemetry is not installed, ConfigError as `collector_url` does.
    """
    is_off = os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true"
    is_elsewhere = os.environ.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    if url is None and (is_off or is_elsewhere or not any(os.environ.get(name) for name in _ENDPOINTS)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    except ImportError as error:
        missing = needs_package("tracing", error.name, "traces")
        if url is not None:
            raise UnsupportedError(missing) from None
        log.warning("%s, or unset OTEL_EXPORTER_OTLP_ENDPOINT", missing)
        return None
    return Traces(OTLPSpanExporter(endpoint=None if url is None else collector_url(url)))


def collector_url(url: str) -> str:
    """The URL that spans are sent to: a collector's URL gets OTLP's path, as the environment's does.

    Raises ConfigError for anything else than a URL.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(f"traces must go to a URL such as http://127.0.0.1:4318, not to {url!r}")
    return url.rstrip("/") + _PATH if parts.path in ("", "/") else url


def _day_ns(time_s: float) -> int:
    return int(time_s * 1e9) + _OFFSET_NS
