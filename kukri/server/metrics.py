"""Prometheus metrics: latency, load, KV-cache use."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from kukri.engine.loop import EngineStatus
from kukri.server.keys import KeyRing

# () -> the counts of each model's engines, by its name and theirs; none of a model that is not loaded
Statuses = Callable[[], Mapping[str, Mapping[str, EngineStatus]]]
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
_TOKEN_SECONDS = (0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)


class Metrics:
    """Histograms and counters of one server, in a registry of their own; times as clients see them."""

    content_type = CONTENT_TYPE_LATEST

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            return Histogram(f"kukri_{name}", text, ["model"], registry=self.registry, buckets=buckets)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"kukri_{name}", text, labels, registry=self.registry)

        self.first_token = histogram("time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self.inter_token = _TokenTimes()
        self.registry.register(self.inter_token)
        self.end_to_end = histogram("end_to_end_seconds", "Arrival to the last token.", _SECONDS)
        self.queue = histogram("queue_seconds", "Arrival to the first step.", _SECONDS)
        self.load = histogram("model_load_seconds", "Loading of a model.", _SECONDS)
        self.ends = counter("requests", "Answers that ended, by reason.", "model", "reason")
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of accepted requests.", "model")
        self.unloads = counter("model_unloads", "Models unloaded, by reason.", "model", "reason")
        self.missed_calls = counter(
            "unparsed_tool_calls", "Tool calls in answers that could not be parsed.", "model"
        )
        self._keys = CollectorRegistry()
        self._responses = counter("http_responses", "HTTP responses.", "path", "status")

    def watch_engines(self, status: Statuses) -> None:
        """Adds the engines' own counts, read at each scrape."""
        self.registry.register(_EngineCollector(status))

    def on_response(self, path: str, status: int) -> None:
        """Counts a response; `path` is a route's, so that clients cannot make up new ones."""
        self._responses.labels(path, str(status)).inc()

    def watch_keys(self, keys: KeyRing) -> None:
        """Adds the counts of each API key, read at each scrape."""
        self._keys.register(_KeyCollector(keys))

    def text(self, *, with_keys: bool = True) -> bytes:
        """Everything in Prometheus's text format; what single keys have used only `with_keys`."""
        return generate_latest(self.registry) + (generate_latest(self._keys) if with_keys else b"")


class _KeyCollector(Collector):
    """The tokens of each API key, by its name: as many series as there are names."""

    def __init__(self, keys: KeyRing) -> None:
        self._keys = keys

    def collect(self) -> Iterator[Metric]:
        prompt = CounterMetricFamily("kukri_key_prompt_tokens", "Prompt tokens of a key.", labels=["key"])
        answer = CounterMetricFamily(
            "kukri_key_generated_tokens", "Tokens generated for a key.", labels=["key"]
        )
        counts: dict[str, tuple[int, int]] = {}
        for client in self._keys.clients:
            n_prompt, n_generated = counts.get(client.name, (0, 0))
            meter = client.meter
            counts[client.name] = n_prompt + meter.n_prompt, n_generated + meter.n_generated
        for name, (n_prompt, n_generated) in counts.items():
            prompt.add_metric([name.removeprefix("key ")], n_prompt)
            answer.add_metric([name.removeprefix("key ")], n_generated)
        yield from (prompt, answer)


class _TokenTimes(Collector):
    """A histogram of the times between tokens, which counts equal ones at once: those of a step mostly are.

    prometheus_client's own takes one at a time, each under two locks.
    """

    def __init__(self) -> None:
        self._counts: dict[str, list[int]] = {}  # in each bucket, by model
        self._sums_s: dict[str, float] = {}

    def begin(self, model: str) -> None:
        """Shows a model from now on; one that was there keeps its counts."""
        self._counts.setdefault(model, [0] * (len(_TOKEN_SECONDS) + 1))
        self._sums_s.setdefault(model, 0.0)

    def add(self, model: str, gap_s: float, n: int) -> None:
        """Counts a time that `n` tokens have."""
        self._counts[model][bisect_left(_TOKEN_SECONDS, gap_s)] += n
        self._sums_s[model] += gap_s * n

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(
            "kukri_inter_token_seconds", "Time between tokens of an answer.", labels=["model"]
        )
        bounds = [*map(str, _TOKEN_SECONDS), "+Inf"]
        for model, counts in self._counts.items():
            family.add_metric(
                [model], list(zip(bounds, accumulate(counts), strict=True)), self._sums_s[model]
            )
        yield family


class ModelMetrics:
    """The part of a server's metrics that one model counts."""

    def __init__(self, metrics: Metrics, model: str) -> None:
        self._model, self._ends = model, metrics.ends
        self._first_token = metrics.first_token.labels(model)
        self._inter_token = metrics.inter_token
        self._inter_token.begin(model)
        self._end_to_end, self._queue = metrics.end_to_end.labels(model), metrics.queue.labels(model)
        self._prompt_tokens = metrics.prompt_tokens.labels(model)
        self._missed_calls = metrics.missed_calls.labels(model)

    def on_prompt(self, n_tokens: int) -> None:
        """Counts the tokens of a prompt, or of texts to embed."""
        self._prompt_tokens.inc(n_tokens)

    def on_missed_calls(self, n: int) -> None:
        """Counts what looked like tool calls and could not be read."""
        self._missed_calls.inc(n)

    def on_first_token(self, ttft_s: float, queue_s: float) -> None:
        """Counts the first token of an answer: the times since its arrival, and in the queue."""
        self._first_token.observe(ttft_s)
        self._queue.observe(queue_s)

    def on_tokens(self, gap_s: float, n: int) -> None:
        """Counts `n` further tokens, each with the time since the one before it."""
        self._inter_token.add(self._model, gap_s, n)

    def on_end(self, duration_s: float, reasons: Iterable[str]) -> None:
        """Counts a call that is over, and why each of its answers ended."""
        self._end_to_end.observe(duration_s)
        for reason in reasons:
            self._ends.labels(self._model, reason).inc()


# name -> (help, field of EngineStatus)
_GAUGES = {
    "running_requests": ("Requests that are running.", "n_running"),
    "waiting_requests": ("Requests in the queue.", "n_waiting"),
    "kv_pages": ("Pages of the KV cache.", "n_pages"),
    "kv_pages_held": ("Pages that requests hold.", "n_pages_held"),
    "kv_pages_cached": ("Pages that keep the beginning of a prompt for others.", "n_pages_cached"),
}
_COUNTERS = {
    "preemptions": ("Times that a request was preempted.", "n_preemptions"),
    "prefix_hit_tokens": ("Prompt tokens found in the cache.", "n_prefix_hit"),
    "prefix_restored_tokens": ("Prompt tokens read from saved prefixes.", "n_restored"),
    "computed_tokens": ("Tokens computed, of prompts and answers.", "n_computed"),
    "drafted_tokens": ("Draft tokens that were computed.", "n_drafted"),
    "accepted_tokens": ("Draft tokens that were accepted.", "n_accepted"),
    "generated_tokens": ("Tokens generated.", "n_generated"),
    "steps": ("Steps of the engine.", "n_steps"),
    "step_seconds": ("Time in these steps.", "busy_s"),
}


class _EngineCollector(Collector):
    """The engines' counts at the time of a scrape; those of a model restart each time it is loaded.

    Engines with names have them in a label `replica`.
    """

    def __init__(self, status: Statuses) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        models = self._status()
        engines = [(model, name, status) for model, found in models.items() for name, status in found.items()]
        labels = ["model", "replica"] if any(name for _, name, _ in engines) else ["model"]
        state = GaugeMetricFamily("kukri_model_loaded", "Whether a model is loaded.", labels=["model"])
        for model in models:
            state.add_metric([model], float(bool(models[model])))
        yield state
        families = ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS))
        for kind, table in families:
            for name, (text, field) in table.items():
                family = kind(f"kukri_{name}", text, labels=labels)
                for model, replica, status in engines:
                    family.add_metric([model, replica][: len(labels)], getattr(status, field))
                yield family
