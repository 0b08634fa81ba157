"""The times between tokens, without a server or a model."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from kukri.engine import StepOutput
from kukri.engine.spans.embedding_spans import NO_SPANS
from kukri.engine.timings import Timestamps
from kukri.sampling import SampledToken
from kukri.server.metrics import _TOKEN_SECONDS, Metrics, ModelMetrics
from kukri.server.models import bridge as bridge_module
from kukri.server.models.bridge import Bridge, LiveCall


def shown(text: bytes) -> list[str]:
    """What there is of the times between tokens, without the time at which they began."""
    lines = text.decode().splitlines()
    return [line for line in lines if "inter_token" in line and "_created" not in line]


def test_equal_times_count_as_each_of_them_would():
    """Catches a time in the wrong bucket, buckets that do not add up, and counts that a second load loses."""
    registry = CollectorRegistry()
    name, text = "kukri_inter_token_seconds", "Time between tokens of an answer."
    each = Histogram(name, text, ["model"], registry=registry, buckets=_TOKEN_SECONDS)
    metrics = Metrics()
    for model in ("a", "b", "a"):
        counted = ModelMetrics(metrics, model)
        for gap_s in (0.0, *_TOKEN_SECONDS, 0.0078125, 8.0):
            counted.on_tokens(gap_s, 4)
            for _ in range(4):
                each.labels(model).observe(gap_s)
    each.labels("c")
    ModelMetrics(metrics, "c")

    def values(text: bytes) -> list[tuple[str, float | str]]:
        pairs = (line.rsplit(" ", 1) for line in shown(text))
        return [(name, name if name[0] == "#" else round(float(value), 9)) for name, value in pairs]

    assert values(metrics.text()) == values(generate_latest(registry))


def test_a_step_counts_each_of_its_tokens(monkeypatch):
    """Catches tokens of drafts, of streams that began apart, and of a held step that are not counted."""
    found: list[tuple[float, int]] = []
    metrics: Any = SimpleNamespace(
        on_prompt=lambda n: None,
        on_first_token=lambda *_: None,
        on_tokens=lambda gap_s, n: found.append((gap_s, n)),
    )
    loop: Any = SimpleNamespace(start=lambda: None, is_stepping=True, submit=lambda requests: None)
    now_s = [0.0]
    monkeypatch.setattr(bridge_module, "perf_counter", lambda: now_s[0])
    requests: list[Any] = [
        SimpleNamespace(id=i, n_prompt=1, sequence=SimpleNamespace(spans=NO_SPANS), times=Timestamps())
        for i in range(3)
    ]

    async def steps() -> None:
        bridge = Bridge(lambda deliver: loop, metrics)
        bridge.start()
        for request in requests:
            answer: Any = SimpleNamespace(request=request, finish_reason=None, push=lambda *_: None)
            bridge.submit(LiveCall(bridge, [answer], 1, "log"), None)
        for at_s, tokens in ((1.0, "01"), (2.0, "012"), (4.0, "0122"), (8.0, "12")):
            now_s[0] = at_s
            bridge._receive([StepOutput(requests[int(i)], SampledToken(0), None) for i in tokens])

    asyncio.run(steps())
    assert found == [(1.0, 2), (2.0, 3), (0.0, 1), (4.0, 2)]
