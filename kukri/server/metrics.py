"""Prometheus metrics: latency, load, KV-cache use."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kukri.engine.loop import EngineStatus

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Histograms and counters of one server, in a registry of their own; times as clients see them."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, model: str) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            h = Histogram(f"kukri_{name}", text, ["model"], registry=self.registry, buckets=buckets)
            return h.labels(model)

        self._first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._inter_token = histogram("inter_token_seconds", "Between tokens of an answer.", _TOKEN_SECONDS)
        self._end_to_end = histogram("end_to_end_seconds", "Arrival to the last token.", _SECONDS)
        self._queue = histogram("queue_seconds", "Arrival to the first step.", _SECONDS)
        self._ends = Counter(
            "kukri_requests", "Answers that ended, by reason.", ["model", "reason"], registry=self.registry
        )
        self._responses = Counter(
            "kukri_http_responses", "HTTP responses.", ["path", "status"], registry=self.registry
        )
        prompt_tokens = Counter(
            "kukri_prompt_tokens",
            "Prompt tokens of requests that were taken.",
            ["model"],
            registry=self.registry,
        )
        self._prompt_tokens = prompt_tokens.labels(model)
        self._model = model

    def watch_engine(self, status: Callable[[], EngineStatus]) -> None:
        """Adds the engine's own counts, read at each scrape."""
        self.registry.register(_EngineCollector(status, self._model))

    def on_prompt(self, n_tokens: int) -> None:
        """Counts the tokens of a prompt, or of texts to embed."""
        self._prompt_tokens.inc(n_tokens)

    def on_first_token(self, ttft_s: float, queue_s: float) -> None:
        """Counts the first token of an answer: the times since its arrival, and in the queue."""
        self._first_token.observe(ttft_s)
        self._queue.observe(queue_s)

    def on_token(self, gap_s: float) -> None:
        """Counts a further token, and the time since the one before it."""
        self._inter_token.observe(gap_s)

    def on_end(self, duration_s: float, reasons: Iterable[str]) -> None:
        """Counts a call that is over, and why each of its answers ended."""
        self._end_to_end.observe(duration_s)
        for reason in reasons:
            self._ends.labels(self._model, reason).inc()

    def on_response(self, path: str, status: int) -> None:
        """Counts a response; `path` is a route's, so that clients cannot make up new ones."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's counts at the time of a scrape."""

    def __init__(self, status: Callable[[], EngineStatus], model: str) -> None:
        self._status, self._model = status, model

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        gauges: dict[str, tuple[str, float]] = {
            "running_requests": ("Requests that are running.", status.n_running),
            "waiting_requests": ("Requests in the queue.", status.n_waiting),
            "kv_pages": ("Pages of the KV cache.", status.n_pages),
            "kv_pages_held": ("Pages that requests hold.", status.n_pages_held),
            "kv_pages_cached": (
                "Pages that hold the beginning of a prompt, for others.",
                status.n_pages_cached,
            ),
        }
        counters: dict[str, tuple[str, float]] = {
            "preemptions": ("Times that a request was preempted.", status.n_preemptions),
            "prefix_hit_tokens": ("Prompt tokens found in the cache.", status.n_prefix_hit),
            "computed_tokens": ("Tokens computed, of prompts and answers.", status.n_computed),
            "drafted_tokens": ("Draft tokens that were computed.", status.n_drafted),
            "accepted_tokens": ("Draft tokens that were accepted.", status.n_accepted),
            "generated_tokens": ("Tokens generated.", status.n_generated),
            "steps": ("Steps of the engine.", status.n_steps),
            "step_seconds": ("Time in these steps.", status.busy_s),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(f"kukri_{name}", text, labels=["model"])
            gauge.add_metric([self._model], value)
            yield gauge
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(f"kukri_{name}", text, labels=["model"])
            counter.add_metric([self._model], value)
            yield counter
