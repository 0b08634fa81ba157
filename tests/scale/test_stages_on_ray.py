"""Stages that Ray places: on another machine, killed, and their machine taken away.

Two machines are two raylets on this one.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.config import LayerConfig
from kukri.errors import ConfigError
from tests.tiny_gguf import tiny_config, write_tiny

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")

OPTIONS: dict[str, Any] = {"n_threads": 1, "max_requests": 8}
NODE = {"num_cpus": 1, "object_store_memory": 100 << 20, "memory": 2 << 30}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(tiny_config(512), n_layers=4, layers=(LayerConfig(),) * 4)
    return write_tiny(tmp_path_factory.mktemp("stages") / "tiny.gguf", config, weight_type="Q8_0")


@pytest.fixture(scope="module")
def machines() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={**NODE, "include_dashboard": False})
    cluster.add_node(**NODE)
    ray.init(address=cluster.address, log_to_driver=False)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def answers(llm: LLM, kill: Any = None) -> list[str]:
    """The texts of eight requests at a time, greedy and sampled; after a few tokens something is killed."""
    prompts = [f"number {i}" for i in range(8)]
    common = {"max_tokens": 300, "ignore_eos": True}
    if kill is not None:
        stream = llm.stream("number 0", temperature=0, **common)
        text = "".join(next(stream).text for _ in range(20))
        kill()
        text += "".join(chunk.text for chunk in stream)
    results = llm.generate(prompts, temperature=0, **common)
    results += llm.generate(prompts, temperature=0.9, seed=3, **common)
    texts = [result.text for result in results]
    assert kill is None or text == texts[0]
    llm.engine.check_integrity()
    return texts


def whereabouts(llm: LLM) -> dict[str, Any]:
    """The node and the process of the stage."""
    from ray._private.state import actors  # the public ones need Ray's dashboard

    (actor,) = llm._backend.pipeline.source._actors
    found = actors(actor._actor_id.hex())
    return {"node": found["Address"]["NodeID"], "pid": found["Pid"]}


def test_stages_continue_elsewhere(path: Path, machines: Any) -> None:
    """Catches a stage on the engine's machine while another one is free, texts that change when the stage is
    killed or its machine goes, and stages that outlive their engine.
    """
    from kukri.scale.pipeline import RayStages

    with LLM(path, **OPTIONS) as llm:
        expected = answers(llm)
    with LLM(path, stages=RayStages(2), **OPTIONS) as llm:
        first = whereabouts(llm)
        assert first["node"] != ray.get_runtime_context().get_node_id()
        assert answers(llm) == expected
        assert answers(llm, lambda: os.kill(first["pid"], signal.SIGKILL)) == expected
        again = whereabouts(llm)
        assert again["pid"] != first["pid"]
        machines.add_node(**NODE)
        (lost,) = [node for node in machines.worker_nodes if node.node_id == again["node"]]
        assert answers(llm, lambda: machines.remove_node(lost, allow_graceful=False)) == expected
        assert whereabouts(llm)["node"] != again["node"]
    assert not ray.util.placement_group_table() or all(
        group["state"] == "REMOVED" for group in ray.util.placement_group_table().values()
    )


def test_stages_that_find_no_room_are_refused(
    path: Path, machines: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a command that waits forever, without a word."""
    from kukri.scale import pipeline

    monkeypatch.setattr(pipeline, "_PLACE_S", 2.0)
    with pytest.raises(ConfigError, match="next to this process on 2 machines"):
        LLM(path, stages=pipeline.RayStages(4), **{**OPTIONS, "n_threads": 2})
