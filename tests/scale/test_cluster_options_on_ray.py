"""Options of `kukri cluster serve` that its replicas carry out: `--stages` and `--traces`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from kukri import LLM
from kukri.config import LayerConfig
from tests.collector import Collector, collecting
from tests.tiny_gguf import tiny_config, write_tiny

pytestmark = pytest.mark.ray
pytest.importorskip("ray")
pytest.importorskip("opentelemetry.sdk")

from benchmarks.clusters import ClusterServer, Machines, wait_for  # noqa: E402

SAMPLING = {"max_tokens": 40, "ignore_eos": True, "seed": 3}
PROMPTS = ["one", "two", "three"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    config = replace(tiny_config(512), n_layers=4, layers=(LayerConfig(),) * 4)
    return str(write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", config, weight_type="Q8_0"))


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    made = Machines(1, n_cpus=4)
    yield made
    made.close()


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def check_answers(server: ClusterServer, path: str) -> None:
    """The answers must be those of one process."""
    with LLM(path, n_threads=1) as llm:
        wanted = [one.text for one in llm.generate(PROMPTS, **SAMPLING)]
    body = {"model": "tiny", "prompt": PROMPTS, **SAMPLING}
    choices = server.http.post("/v1/completions", json=body).raise_for_status().json()["choices"]
    assert [one["text"] for one in choices] == wanted


@pytest.mark.parametrize("stages", ["2", "ray:2"])
def test_replicas_are_cut_into_stages(
    machines: Machines, path: str, collector: Collector, stages: str
) -> None:
    """Catches replicas that ignore the stages, and ones that do not start within an actor of Ray."""
    options = ("--stages", stages, "--traces", collector.url, "--address", machines.address)
    server = ClusterServer(path, *options, n_replicas=1)
    try:
        check_answers(server, path)
        wait_for(lambda: "decode" in {span.name for span in collector.spans}, 30)
    finally:
        server.stop()
    assert all(
        span.facts["kukri.stages.compute_s"] > 0
        for span in collector.spans
        if span.name in ("prefill", "decode")
    )


def test_a_request_on_a_replica_is_traced(machines: Machines, path: str, collector: Collector) -> None:
    """Catches a URL that does not reach the replicas, and spans that are lost when they end."""
    server = ClusterServer(path, "--traces", collector.url, "--address", machines.address)
    try:
        check_answers(server, path)
        names = set(server.replicas())
    finally:
        server.stop()
    (root,) = (span for span in collector.spans if not span.parent)
    runs = [span for span in collector.beneath(root) if span.name == "replica"]
    assert len(runs) == len(PROMPTS)
    assert {span.facts["kukri.replica"] for span in runs} <= names
    for run in runs:
        assert [part.name for part in collector.beneath(run)] == ["queue", "prefill", "decode"]


def test_replicas_that_do_not_start_say_why(machines: Machines, tmp_path: Path) -> None:
    """Catches a traceback of Ray's that leaves out the reason."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF and nothing more")
    command = [sys.executable, "-m", "kukri", "cluster", "serve", str(path), "--address", machines.address]
    done = subprocess.run([*command, "--threads", "1", "--port", "0"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "error: the replicas do not start: kukri.errors." in done.stderr
    assert "broken.gguf" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
