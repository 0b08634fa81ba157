"""Traces of requests: their spans at a collector, and nothing at all without one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.engine.traces import open_traces
from kukri.errors import ConfigError, UnsupportedError
from kukri.server.settings import ServerSettings
from tests.collector import Collector, SeenSpan, collecting
from tests.server.live_server import serving
from tests.tiny_gguf import tiny_config, write_tiny

SHORT = {"model": "smol", "prompt": "x", "max_tokens": 2}
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_config(max_context=512))


@pytest.fixture
def collector() -> Collector:
    pytest.importorskip("opentelemetry.sdk")
    with collecting() as found:
        yield found


def check_order(spans: list[SeenSpan], parent: SeenSpan) -> None:
    """Each begins when the one before ends, all within their parent."""
    assert parent.start_s <= spans[0].start_s
    assert spans[-1].end_s <= parent.end_s
    for before, after in pairwise(spans):
        assert before.start_s <= before.end_s
        assert abs(before.end_s - after.start_s) < 1e-5


def test_a_request_is_a_trace(collector: Collector, tiny_path: Path) -> None:
    """Catches spans that begin a trace of their own, times of another clock, answers without spans."""
    body = {"model": "smol", "prompt": "hello", "max_tokens": 7, "ignore_eos": True, "n": 2, "temperature": 1}
    with LLM(tiny_path, n_threads=1) as llm, serving(llm, traces=collector.url) as server:
        began_s = time.time()
        with server.http(headers={"traceparent": CLIENT}) as http:
            assert http.post("/v1/completions", json=body).status_code == 200
            assert http.post("/v1/embeddings", json={"model": "smol", "input": ["a", "b"]}).status_code == 200
            assert http.get("/health").status_code == 200
            assert http.post("/v1/completions", json={**SHORT, "temperature": -1}).status_code == 400
        ended_s = time.time()
    roots = [span for span in collector.spans if span.parent == CLIENT.split("-")[2]]
    assert [root.name for root in roots] == [
        "POST /v1/completions",
        "POST /v1/embeddings",
        "POST /v1/completions",
    ]
    assert {span.trace_id for span in collector.spans} == {CLIENT.split("-")[1]}
    assert {span.service for span in collector.spans} == {"kukri"}
    assert [root.facts["http.response.status_code"] for root in roots] == [200, 200, 400]
    answered, embedded, refused = roots
    spans = collector.beneath(answered)
    assert sorted(span.name for span in spans) == ["decode", "decode", "prefill", "prefill", "queue", "queue"]
    for name in ("prefill", "decode"):
        for span in spans:
            if span.name == name:
                tokens = span.facts[
                    "gen_ai.usage." + ("input" if name == "prefill" else "output") + "_tokens"
                ]
                assert tokens == (len(llm.tokenizer.encode("hello")) if name == "prefill" else 7)
    assert began_s <= answered.start_s <= answered.end_s <= ended_s
    assert [span.name for span in collector.beneath(embedded)].count("prefill") == 2
    assert not collector.beneath(refused)


def test_a_stream_that_is_cut_is_traced_to_its_end(collector: Collector, tiny_path: Path) -> None:
    """Catches requests whose client left, or whose text ended, that leave no spans."""
    body = {
        "model": "smol",
        "prompt": "hello",
        "max_tokens": 500,
        "ignore_eos": True,
        "seed": 1,
        "stream": True,
    }
    with LLM(tiny_path, n_threads=1) as llm:
        text = llm.generate("hello", max_tokens=40, seed=1, ignore_eos=True).text
        stopped = {**body, "stream": False, "stop": [text[10:14]]}
        with serving(llm, traces=collector.url) as server, server.http() as http:
            response = http.send(http.build_request("POST", "/v1/completions", json=body), stream=True)
            next(response.iter_lines())
            response.close()
            server.wait_until(lambda: not server.pages_used())
            assert http.post("/v1/completions", json=stopped).status_code == 200
    roots = [span for span in collector.spans if not span.parent]
    reasons = []
    for root in sorted(roots, key=lambda one: one.start_s):
        spans = collector.beneath(root)
        assert [span.name for span in spans] == ["queue", "prefill", "decode"]
        check_order(spans, root)
        reasons += spans[-1].facts["gen_ai.response.finish_reasons"]
    assert reasons == ["abort", "stop"]


@pytest.mark.full
def test_the_time_of_stages_is_traced(collector: Collector, tiny_path: Path) -> None:
    """Catches times that are not those of the request's own steps, or of the wrong half of its time."""
    body = {**SHORT, "prompt": "hello " * 9, "max_tokens": 30, "ignore_eos": True}
    url = collector.url
    with LLM(tiny_path, stages=2) as llm, serving(llm, traces=url) as server, server.http() as http:
        assert [http.post("/v1/completions", json=body).status_code for _ in range(2)] == [200, 200]
    spans = [span for span in collector.spans if span.name in ("prefill", "decode")]
    assert len(spans) == 4
    for span in spans:
        elapsed_s, computed_s = span.facts["kukri.stages.elapsed_s"], span.facts["kukri.stages.compute_s"]
        assert 0 < computed_s < elapsed_s < span.end_s - span.start_s


def test_a_collector_that_is_away_harms_nobody(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches requests that wait for the collector, or fail with it."""
    exporters = pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    export, is_answered = exporters.OTLPSpanExporter.export, threading.Event()

    def late(*arguments: Any) -> Any:
        is_answered.wait(20)
        return export(*arguments)

    monkeypatch.setattr(exporters.OTLPSpanExporter, "export", late)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "2")  # seconds that the last spans are tried for
    url = "http://127.0.0.1:9"
    with LLM(tiny_path, n_threads=1) as llm, serving(llm, traces=url) as server, server.http() as http:
        started_s = time.monotonic()
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        assert http.post("/v1/completions", json=SHORT).status_code == 200
        assert time.monotonic() - started_s < 10
        is_answered.set()


def test_the_environment_may_name_the_collector(
    collector: Collector, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches OpenTelemetry's own variables ignored."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
    monkeypatch.setenv("OTEL_SERVICE_NAME", "answers")
    with LLM(tiny_path, n_threads=1) as llm, serving(llm) as server, server.http() as http:
        assert http.post("/v1/completions", json=SHORT).status_code == 200
    assert {span.service for span in collector.spans} == {"answers"}
    for name, value in (("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")):
        with monkeypatch.context() as patched:
            patched.setenv(name, value)
            assert open_traces(None) is None


@pytest.mark.full
def test_nothing_is_imported_without_traces() -> None:
    """Catches a server that pays for traces which nobody asked for."""
    script = (
        "import sys; from kukri.server.app import create_app; from kukri.engine.traces import open_traces; "
        "assert open_traces(None) is None; heavy = ('opentelemetry.sdk', 'opentelemetry.exporter'); "
        "print([name for name in sys.modules if name.startswith(heavy)])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_wrong_collectors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a typing error that shows as traces which never come."""
    for url in ("collector:4318", "", "grpc://host:4317"):
        with pytest.raises(ConfigError, match="URL such as"):
            ServerSettings(traces=url)
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(UnsupportedError, match=r"needs the package opentelemetry.*: run `pip install "):
        open_traces("http://127.0.0.1:4318")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4318")
    assert open_traces(None) is None
