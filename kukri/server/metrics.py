"""What Prometheus may ask: how long people wait, how much is under way, how full the cache is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import perf_counter
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from kukri.answer import Answer
    from kukri.engine.loop import EngineStatus
    from kukri.server.bridge import Call

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
        self._last_token_s: dict[int, float] = {}  # by request id

    def watch_engine(self, status: Callable[[], EngineStatus]) -> None:
        """Adds the engine's own counts, read when somebody asks."""
        self.registry.register(_EngineCollector(status, self._model))

    def on_start(self, call: Call) -> None:
        """Notes that a call's requests are in the queue."""
        self.on_prompt(call.n_prompt_tokens)

    def on_prompt(self, n_tokens: int) -> None:
        """Notes tokens to be read, of texts to embed too."""
        self._prompt_tokens.inc(n_tokens)

    def on_token(self, call: Call, answer: Answer, now_s: float) -> None:
        """Notes that a token of an answer came."""
        request_id = answer.request.id
        last_s = self._last_token_s.get(request_id)
        if last_s is None:
            call.first_token_s = call.first_token_s or now_s
            self._first_token.observe(now_s - call.arrived_s)
            self._queue.observe(max(answer.request.started_s - answer.request.arrived_s, 0.0))
        else:
            self._inter_token.observe(now_s - last_s)
        self._last_token_s[request_id] = now_s

    def on_end(self, call: Call) -> None:
        """Notes that a call is over, however it ended."""
        self._end_to_end.observe(perf_counter() - call.arrived_s)
        for answer in call.answers:
            self._last_token_s.pop(answer.request.id, None)
            self._ends.labels(self._model, answer.finish_reason or "abort").inc()

    def on_response(self, path: str, status: int) -> None:
        """Notes a response; `path` is that of a route, so that strangers cannot make up new ones."""
        self._responses.labels(path, str(status)).inc()

    def text(self) -> bytes:
        """Everything in Prometheus's text format."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """The engine's counts at the moment they are asked for."""

    def __init__(self, status: Callable[[], EngineStatus], model: str) -> None:
        self._status, self._model = status, model

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        gauges: dict[str, tuple[str, float]] = {
            "running_requests": ("Requests that are computed.", status.n_running),
            "waiting_requests": ("Requests in the queue.", status.n_waiting),
            "kv_pages": ("Pages of the KV cache.", status.n_pages),
            "kv_pages_held": ("Pages that requests hold.", status.n_pages_held),
            "kv_pages_cached": (
                "Pages that hold the beginning of a prompt, for others.",
                status.n_pages_cached,
            ),
        }
        counters: dict[str, tuple[str, float]] = {
            "preemptions": ("Times that a request gave its pages up.", status.n_preemptions),
            "prefix_hit_tokens": ("Prompt tokens found in the cache.", status.n_prefix_hit),
            "computed_tokens": ("Tokens computed, of prompts and answers.", status.n_computed),
            "drafted_tokens": ("Guesses at tokens to come that were computed.", status.n_drafted),
            "accepted_tokens": ("Guesses that came true.", status.n_accepted),
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
