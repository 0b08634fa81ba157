"""Replicas whose number and version change under load: `pytest -n0 -m ray tests/scale`."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kukri import LLM
from kukri.opening.model_options import ModelOptions
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")

from benchmarks.clusters import ClusterServer, Machines, wait_for  # noqa: E402

SAMPLING = {"max_tokens": 60, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_config(max_context=1024))
    return ModelOptions(model=str(path), n_threads=1, max_requests=4)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    made = Machines(1, n_cpus=6)
    yield made
    made.close()


def texts_of(options: ModelOptions) -> list[str]:
    with LLM(**vars(options)) as llm:
        return [one.text for one in llm.generate([f"text {i}" for i in range(8)], **SAMPLING)]


@contextmanager
def load(url: str, n: int) -> Iterator[list[tuple[int, int, str]]]:
    """Asks for texts, `n` at a time, within the `with` block; (text, status, answer) of each request."""
    found: list[tuple[int, int, str]] = []
    is_over = threading.Event()

    def ask(number: int) -> None:
        with httpx.Client(base_url=url, timeout=120) as client:
            while not is_over.is_set():
                body = {"model": "tiny", "prompt": f"text {number % 8}", **SAMPLING}
                response = client.post("/v1/completions", json=body)
                is_well = response.status_code == 200
                answer = response.json()["choices"][0]["text"] if is_well else response.text
                found.append((number % 8, response.status_code, answer))
                number += 1

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(n)]
    for thread in threads:
        thread.start()
    try:
        yield found
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.parametrize(
    ("ongoing", "held_back", "kv_share", "n_running", "wanted"),
    [
        ([], 0, 0.0, 0, 0),  # nobody asks
        ([3, 4], 0, 0.5, 2, 2),  # 7 / 4
        ([3, 3], 9, 0.5, 2, 4),  # 15 / 4
        ([1, 1], 0, 0.95, 2, 3),  # pages run out
        ([0], 0, 0.0, 2, 2),  # one is new, and has not told
        ([40], 40, 0.5, 1, 8),  # the most
    ],
)
def test_the_number_of_replicas(
    ongoing: list[int], held_back: int, kv_share: float, n_running: int, wanted: int
) -> None:
    """Catches replicas that go before they have told how busy they are."""
    from kukri.scale.serve import LoadPolicy

    found = {"n_ongoing": ongoing, "n_held_back": [held_back] * len(ongoing)}
    found["kv_share"] = [kv_share] * len(ongoing)
    context = SimpleNamespace(
        raw_metrics={
            name: {i: [SimpleNamespace(value=value)] for i, value in enumerate(values)}
            for name, values in found.items()
        },
        running_replicas=list(range(n_running)),
        current_num_replicas=n_running,
        total_num_requests=0,
        capacity_adjusted_min_replicas=0,
        capacity_adjusted_max_replicas=8,
    )
    assert LoadPolicy(4)(context) == (wanted, {})


def test_replicas_follow_the_load_down_to_none(machines: Machines, options: ModelOptions) -> None:
    """Catches replicas that do not come or go, and requests that are lost on the way."""
    wanted = texts_of(options)
    scaled = ("--max-replicas", "2", "--spare", "5", "--max-requests", "4", "--address", machines.address)
    server = ClusterServer(str(options.model), *scaled, n_replicas=0)
    try:
        with load(server.url, 16) as found:
            server.wait_for_replicas(2)
        assert all(one == (one[0], 200, wanted[one[0]]) for one in found), found
        server.wait_for_replicas(0)
        with load(server.url, 1) as found:
            wait_for(lambda: len(found) > 0, 60)
        assert found[0] == (0, 200, wanted[0])
    finally:
        server.stop()


@pytest.fixture
def driver(machines: Machines) -> Iterator[Callable[[Any], str]]:
    """Deploys an application of Serve behind its proxy; the URL."""
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(address=machines.address, log_to_driver=False)
    serve.shutdown()  # else it continues without a proxy, as the server above started it
    serve.start(http_options={"host": "127.0.0.1", "port": port})

    def deploy(application: Any) -> str:
        serve.run(application, name="rolled", route_prefix="/")
        return f"http://127.0.0.1:{port}"

    yield deploy
    serve.delete("rolled")
    ray.shutdown()


def test_a_new_version_is_rolled_out_under_load(
    driver: Callable[[Any], str], options: ModelOptions, tmp_path: Path
) -> None:
    """Catches requests that are lost, or answered by both models, while one replaces the other."""
    from kukri.scale.serve import ReplicaOptions, build

    config = tiny_config(max_context=1024)
    other = write_tiny(tmp_path / "tiny.gguf", config, random_arrays(config, seed=1))
    after = replace(options, model=str(other))
    before_texts, after_texts = texts_of(options), texts_of(after)
    how = ReplicaOptions(n_replicas=2, drain_s=20, cpus=1)
    url = driver(build(options, how))
    with load(url, 6) as found:
        wait_for(lambda: len(found) > 20, 60)
        n_before = len(found)
        driver(build(after, how))
        n_after = len(found)
        wait_for(lambda: len(found) > n_after + 20, 60)
    assert {status for _, status, _ in found} == {200}, [one for one in found if one[1] != 200][:3]
    assert all(answer in (before_texts[i], after_texts[i]) for i, _, answer in found)
    assert all(answer == before_texts[i] for i, _, answer in found[:n_before])
    assert found[-1][2] == after_texts[found[-1][0]]
