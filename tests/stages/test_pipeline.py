"""A model cut into stages: the same tokens as in one process, what is refused, and stages that die."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.config import LayerConfig
from kukri.errors import ConfigError, StageError, UnsupportedError
from kukri.kernels.weight_handles import LowRank, Weight
from kukri.models import Adapter
from kukri.models.trace import Trace
from kukri.quant.types import QUANT_TYPES
from kukri.stages.backend import StagedBackend
from tests.tiny_gguf import tiny_config, write_tiny

OPTIONS: dict[str, Any] = {"max_context": 256, "max_requests": 4, "n_threads": 1, "max_step_tokens": 48}
TOKEN = "a token that only these tests know"


@pytest.fixture(scope="module")
def tiny_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = replace(tiny_config(256), n_layers=4, layers=(LayerConfig(),) * 4)
    return write_tiny(tmp_path_factory.mktemp("stages") / "tiny.gguf", config, weight_type="Q8_0")


@pytest.fixture(scope="module")
def staged(tiny_path: Path) -> Iterator[LLM]:
    with LLM(tiny_path, stages=2, **OPTIONS) as llm:
        yield llm


@pytest.fixture(scope="module")
def addresses() -> Iterator[list[str]]:
    """Two stages that wait for engines, as on other machines."""
    environment = {**os.environ, "KUKRI_STAGE_TOKEN": TOKEN}
    command = [sys.executable, "-m", "kukri", "stage", "--listen", "127.0.0.1:0", "--threads", "1"]
    started = [
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) for _ in range(2)
    ]
    try:
        yield [process.stdout.readline().strip() for process in started if process.stdout is not None]
    finally:
        for process in started:
            process.kill()
            process.communicate()


def pipeline_of(llm: LLM) -> Any:
    backend = llm._backend
    assert isinstance(backend, StagedBackend), "the model is cut"
    return backend.pipeline


def answers(llm: LLM) -> list[str]:
    """Texts of greedy and sampled requests: a crowd, a known prefix, drafts that are accepted."""
    crowd = [f"number {i} of them, and what follows {'so ' * i}" for i in range(6)]
    common = {"max_tokens": 20, "ignore_eos": True}
    results = llm.generate(crowd, temperature=0, **common)
    results += llm.generate([*crowd, crowd[0] + " and more"], temperature=0.9, seed=5, **common)
    results.append(llm.generate("abcabcabcabc" * 6, temperature=0, **common))
    results.append(llm.generate("abcabcabcabc" * 6, temperature=0, prompt_logprobs=1, **common))
    llm.engine.check_integrity()
    return [result.text for result in results]


@pytest.fixture(scope="module")
def expected(tiny_path: Path) -> list[str]:
    with LLM(tiny_path, **OPTIONS) as llm:
        return answers(llm)


def test_two_processes_give_the_tokens_of_one(staged: LLM, expected: list[str]) -> None:
    """Catches layers left out or computed twice, pages or states of another stage, rows in another order."""
    assert [len(layers) for layers in staged._backend.cut] == [2, 2]
    assert answers(staged) == expected
    assert staged.engine.allocator.n_prefix_hit > 0
    assert staged.engine.scheduler.n_accepted > 0


def test_logits_and_embeddings_are_those_of_one(staged: LLM, tiny_path: Path) -> None:
    """Catches programs other than that for tokens which end at the wrong layer."""
    with LLM(tiny_path, **OPTIONS) as llm:
        assert (llm.logits([5, 6, 7]) == staged.logits([5, 6, 7])).all()
        assert (llm.embed("some text") == staged.embed("some text")).all()


@pytest.mark.full
def test_several_steps_are_under_way(
    addresses: list[str], tiny_path: Path, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches steps that overwrite each other's inputs, activations of another step, changes to caches out of
    order, a stage that serves no second engine.
    """
    monkeypatch.setenv("KUKRI_STAGE_TOKEN", TOKEN)
    for n_pages in (64, 20):  # the second with preemptions
        with LLM(tiny_path, stages=addresses, kv_bytes=n_pages * 16384, **OPTIONS) as llm:
            assert llm.engine.config.max_in_flight == 3
            assert len(llm._backend.cut) == 3
            assert answers(llm) == expected


@pytest.mark.full
def test_devices_of_pytorch(tiny_path: Path) -> None:
    """Catches devices that are not those of their stages, activations that share memory with another step."""
    pytest.importorskip("torch")
    texts = []
    for devices in ((), ("cpu", "cpu")):
        with LLM(tiny_path, backend="torch", devices=devices, **OPTIONS) as llm:
            assert llm.engine.config.max_in_flight == max(len(devices), 1)
            # one at a time: PyTorch's products depend on the batch
            results = [llm.generate(f"number {i}", max_tokens=12, temperature=0.8, seed=i) for i in range(3)]
            texts.append([result.token_ids for result in results])
    assert texts[0] == texts[1]


@pytest.mark.representative(2)
def test_a_stage_that_dies_is_started_again(tiny_path: Path, expected: list[str]) -> None:
    """Catches requests that lose or repeat tokens, prefixes that only the living stages still have."""
    with LLM(tiny_path, stages=2, **OPTIONS) as llm:
        (before,) = pipeline_of(llm).source.pids
        assert answers(llm) == expected
        stream = llm.stream("tell me", max_tokens=40, temperature=0.9, seed=2, ignore_eos=True)
        texts = [next(stream).text for _ in range(5)]
        os.kill(before, signal.SIGKILL)
        texts += [chunk.text for chunk in stream]
        assert pipeline_of(llm).source.pids != [before]
        assert answers(llm) == expected
        again = llm.generate("tell me", max_tokens=40, temperature=0.9, seed=2, ignore_eos=True)
        assert "".join(texts) == again.text


@pytest.mark.full
def test_a_stage_that_dies_for_good_ends_its_requests(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches an engine that tries forever, or that is of no use once the stage is back."""
    with LLM(tiny_path, stages=2, **OPTIONS) as llm:
        pipeline = pipeline_of(llm)
        os.kill(pipeline.source.pids[0], signal.SIGKILL)
        with monkeypatch.context() as patched:
            patched.setattr(type(pipeline), "_connect", _refuse)
            with pytest.raises(StageError, match="cannot be started again: no more"):
                llm.generate("tell me", max_tokens=4)
        llm.engine.check_integrity()
        assert llm.generate("tell me", max_tokens=4, ignore_eos=True).text


def _refuse(pipeline: Any) -> None:
    raise StageError("no more")


def test_what_needs_one_process_is_refused(staged: LLM, tiny_path: Path, tmp_path: Path) -> None:
    """Catches hooks that see a part of the layers in silence."""
    with pytest.raises(UnsupportedError, match="cannot be combined with stages"):
        staged.model.forward([1, 2, 3])
    hooks = {"blocks.0.hook_resid_pre": lambda name, x: None}
    with staged.hooks(hooks), pytest.raises(UnsupportedError, match="cannot be combined with stages"):
        staged.generate("hello", max_tokens=2)
    (name, (n_out, n_in)), *_ = Trace(staged.model).multiplied.items()
    down, up = (
        Weight(np.ones(shape, np.float32).view(np.uint8), QUANT_TYPES["F32"], shape)
        for shape in ((2, n_in), (n_out, 2))
    )
    update = LowRank(down, up, 1.0)
    with pytest.raises(UnsupportedError, match="an adapter cannot be combined with stages"):
        staged.engine.load_adapter("late", Adapter(tmp_path, {name: update}))
    assert staged.engine.adapters.names == ()
    assert staged.generate("hello", max_tokens=2, ignore_eos=True).text
    for options in ({"prefix_dir": tmp_path}, {"adapters": {"a": tmp_path}}):
        with pytest.raises(ConfigError, match="cannot be combined with stages"):
            LLM(tiny_path, **{"stages": 2, **options}, **OPTIONS)
    for options in ({"devices": ["cpu", "cpu"], "stages": 3}, {"stages": 9}):
        with pytest.raises(ConfigError):
            LLM(tiny_path, **{"stages": 2, **options}, **OPTIONS)


@pytest.mark.full
def test_a_stranger_is_turned_away(
    addresses: list[str], tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a stage that reads messages before it knows who sends them, or stops listening after one."""
    host, port = addresses[0].rsplit(":", 1)
    with socket.create_connection((host, int(port)), timeout=10) as sock:
        sock.sendall(b"E" + bytes(64) + b"GET / HTTP/1.1\r\n\r\n" * 100)
        with suppress(ConnectionResetError):
            while sock.recv(4096):  # the greeting, and then the end
                pass
    monkeypatch.setenv("KUKRI_STAGE_TOKEN", "another token of some length")
    with pytest.raises(ConfigError, match="token"):
        LLM(tiny_path, stages=addresses[:1], **OPTIONS)
    monkeypatch.delenv("KUKRI_STAGE_TOKEN")
    with pytest.raises(ConfigError, match="KUKRI_STAGE_TOKEN"):
        LLM(tiny_path, stages=addresses[:1], **OPTIONS)
