"""The memory that a model takes, and the options that are chosen for the memory that is there."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.config import EngineConfig, RopeConfig
from kukri.engine import Engine
from kukri.errors import ConfigError, DownloadError
from kukri.formats import repos
from kukri.formats.headers import read_headers
from kukri.host.hardware import available_bytes
from kukri.kernels import cpu, make_backend
from kukri.opening import memory
from kukri.opening.loading import read_weights
from kukri.opening.memory import estimate, fitted, table_of_choices
from kukri.opening.model_options import ModelOptions
from tests.engine.test_kv_size import write as write_system
from tests.fake_hub import COMMIT, Hub, running
from tests.models.made_models import make
from tests.models.written_models import write
from tests.test_llm_safetensors import make as make_directory
from tests.tiny_gguf import tiny_config, write_tiny

KiB, MiB = 1 << 10, 1 << 20
# heads are whole blocks of q8_0
LONG = replace(tiny_config(1 << 20), n_heads=2, n_kv_heads=1, d_head=32, rope=RopeConfig(10000.0, 32))


@pytest.fixture
def limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets the memory that a control group of version 1 or 2 leaves to this process."""

    def limit(n_bytes: int, version: int = 2) -> None:
        folder, limit_name, usage_name, group = (
            ("", "memory.max", "memory.current", "0::/")
            if version == 2
            else ("memory/", "memory.limit_in_bytes", "memory.usage_in_bytes", "4:memory:/")
        )
        files = {
            "proc/self/cgroup": f"{group}\n",
            "proc/meminfo": "MemAvailable: 99999999 kB\n",
            f"sys/fs/cgroup/{folder}{limit_name}": f"{n_bytes + MiB}\n",
            f"sys/fs/cgroup/{folder}{usage_name}": f"{MiB}\n",
        }
        found = partial(available_bytes, write_system(tmp_path / f"system{version}", files))
        monkeypatch.setattr(memory, "available_bytes", found)
        monkeypatch.setattr(cpu, "available_bytes", found)

    return limit


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory of float weights whose rows are whole blocks of every type, with a tokenizer."""
    return make_directory(tmp_path_factory.mktemp("floats"), "llama", "bfloat16")[0]


def packed_bytes(backend: Any) -> int:
    """Bytes of all tiles, but for rows that only fill the last tile."""
    packed = [*backend._packed.values(), *backend._packed_experts.values()]
    return sum(one.tiles.nbytes * one.n_rows // (one.n_row_tiles * 16) for one in packed)


def check(path: Path, options: ModelOptions) -> None:
    """Compares the estimate with an engine's tiles, rows of embeddings, vectors and cache."""
    backend = make_backend("cpu", n_threads=1)
    _, model = read_weights(path, options)
    engine = Engine(model, backend, EngineConfig(max_requests=1, kv_type=options.kv_type or "f16"))
    found = estimate(read_headers(path), options)
    rows = [
        p.n_bytes
        for p in model.parameters
        if len(p.shape) == 1 or "embed_tokens.weight" in p.name or options.quantize is not None
    ]
    assert found.weight_bytes == packed_bytes(backend) + sum(rows)
    assert engine.runner.cache.n_bytes == found.cost.n_bytes(found.cost.wanted(1, found.context))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
def test_weights_and_keys_take_what_the_engine_takes(kv_type: Any, tmp_path: Path) -> None:
    """Catches a tied embedding that is counted once, and pages of another size than the engine's."""
    path = write_tiny(tmp_path / "tiny.gguf", replace(LONG, max_context=1000), weight_type="Q8_0")
    check(path, ModelOptions(model=str(path), kv_type=kv_type))


def test_so_do_heads_of_any_width(tmp_path: Path) -> None:
    """Catches an estimate by the model's heads where the CPU's cache has wider ones."""
    odd = replace(LONG, max_context=100, d_head=20, rope=RopeConfig(10000.0, 20))
    path = write_tiny(tmp_path / "odd.gguf", odd)
    check(path, ModelOptions(model=str(path)))


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "weight_type"),
    [("llama", "Q8_0"), ("gemma3_text", "F16"), ("qwen3_moe", "Q8_0"), ("gemma4_text", "F32")],
)
def test_so_do_experts_windows_and_tables_of_layers(name: str, weight_type: str, tmp_path: Path) -> None:
    """Catches an embedding or a layer's table that is counted twice or not at all, and experts left out."""
    _, config, source = make(name)
    path = write(tmp_path / "m.gguf", name, config, source, weight_type)
    check(path, ModelOptions(model=str(path)))


@pytest.mark.full
@pytest.mark.parametrize("quantize", [None, "Q8_0"])
def test_weights_that_are_packed_while_loading_are_there_twice(directory: Path, quantize: Any) -> None:
    """Catches an estimate of half, because the model keeps the rows next to their tiles."""
    check(directory, ModelOptions(model=str(directory), quantize=quantize))


def longest(path: Path, kv_type: Any, free_bytes: int) -> int:
    """Tokens that fit a memory, by the rule of the engine's pool."""
    found = estimate(read_headers(path), ModelOptions(model=str(path), kv_type=kv_type))
    return found.cost.longest(int(0.7 * (free_bytes - found.weight_bytes)))


@pytest.mark.parametrize("version", [1, 2])
def test_keys_are_halved_where_memory_is_short(
    version: int, limited: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a limit that is not seen, and a choice that the engine does not run with."""
    path = write_tiny(tmp_path / "tiny.gguf", LONG)
    free_bytes = 9 * MiB
    limited(free_bytes, version)
    assert longest(path, "f16", free_bytes) < 32_768 < longest(path, "q8_0", free_bytes)
    with caplog.at_level(logging.WARNING), LLM(path, fit=True, n_threads=1) as llm:
        assert llm.engine_config.kv_type == llm.options.kv_type == "q8_0"
        assert llm.engine.max_context == longest(path, "q8_0", free_bytes)
    (said,) = [record.getMessage() for record in caplog.records]
    assert f"q8_0 keys and values and {longest(path, 'q8_0', free_bytes):,} of 1,048,576 tokens" in said
    assert f"f16 hold {longest(path, 'f16', free_bytes):,} tokens" in said
    caplog.clear()
    with caplog.at_level(logging.WARNING), LLM(path, fit=True, n_threads=1, kv_type="f16") as llm:
        assert llm.engine_config.kv_type == "f16"
        assert llm.engine.max_context == longest(path, "f16", free_bytes)
    assert ["q8_0" in record.getMessage().partition(";")[0] for record in caplog.records] == [False]


def test_nothing_is_said_and_changed_where_all_fits(
    tmp_path: Path, limited: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches a line more at each start."""
    path = write_tiny(tmp_path / "tiny.gguf")
    limited(64 * MiB)
    options = ModelOptions(model=str(path), n_threads=1)
    with caplog.at_level(logging.WARNING), LLM(**vars(replace(options, fit=True))) as llm:
        assert (llm.engine_config.kv_type, llm.engine.max_context) == ("f16", 128)
        n_bytes = llm.engine.runner.cache.n_bytes
    assert not caplog.records
    with LLM(**vars(options)) as plain:
        assert plain.engine.runner.cache.n_bytes == n_bytes
    assert replace(fitted(replace(options, fit=True)), kv_type=None) == options


@pytest.mark.full
def test_weights_are_packed_where_floats_do_not_fit(directory: Path, limited: Any) -> None:
    """Catches weights that stay floats, and a user's own type that is changed."""
    options = ModelOptions(model=str(directory), fit=True)
    choices = {(one.weights, one.kv_type): one for one in table_of_choices(options)[0]}
    floats, least = choices["BF16", "f16"], choices["Q4_K", "f16"]
    assert least.found.weight_bytes < floats.found.weight_bytes
    limited(least.found.weight_bytes + int(least.kv_bytes / 0.7) + 1)
    assert fitted(options).quantize == "Q4_K"
    with pytest.raises(ConfigError, match=r"is not supported in .* because Q8_0 weights take"):
        fitted(replace(options, quantize="Q8_0"))


def test_what_does_not_fit_is_an_error_with_numbers(limited: Any, tmp_path: Path) -> None:
    """Catches a context that is cut although it was asked for, and an error that leaves one guessing."""
    path = write_tiny(tmp_path / "tiny.gguf", LONG)
    limited(9 * MiB)
    most = longest(path, "q8_0", 9 * MiB)
    wanted = ModelOptions(model=str(path), fit=True, max_context=1 << 20)
    with pytest.raises(
        ConfigError, match=rf"must be at most {most:,} for .* 0\.01 GiB of free memory"
    ) as error:
        LLM(**vars(wanted))
    assert "\n" not in str(error.value)
    assert fitted(replace(wanted, max_context=most)).kv_type == "q8_0"
    limited(KiB)
    with pytest.raises(ConfigError, match=r"is not supported in 0\.00 GiB.*F32 weights take 0\.00 GiB"):
        LLM(path, fit=True)


def test_fit_prints_the_choices_and_marks_one(limited: Any, tmp_path: Path) -> None:
    """Catches a table that does not agree with what commands take, or that a user's options do not narrow."""
    path = write_tiny(tmp_path / "tiny.gguf", LONG)
    limited(9 * MiB)

    def shown(*options: str) -> str:
        done = CliRunner().invoke(app, ["fit", str(path), *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    report = json.loads(shown("--json"))
    assert report["free_bytes"] == 9 * MiB
    (chosen,) = [one for one in report["choices"] if one["is_chosen"]]
    assert (chosen["kv_type"], chosen["context"]) == ("q8_0", longest(path, "q8_0", 9 * MiB))
    facts = {(one["kv_type"], one["context"]): one["fits"] for one in report["choices"]}
    assert facts["f16", 4096]
    assert facts["q8_0", 32_768]
    assert not facts["f16", 32_768]
    assert not facts["q8_0", 1 << 20]
    assert "* F32" in shown()
    pinned = json.loads(shown("--json", "--kv-type", "q4", "--max-context", "500"))["choices"]
    assert [(one["kv_type"], one["context"], one["is_chosen"]) for one in pinned] == [("q4", 500, True)]
    limited(KiB)
    assert "nothing fits: " in shown()


@pytest.mark.representative(2)
def test_speed_is_measured_on_request(tmp_path: Path) -> None:
    """Catches a measurement with other options than the chosen ones."""
    path = write_tiny(tmp_path / "tiny.gguf", tiny_config(2048))
    done = CliRunner().invoke(app, ["fit", str(path), "--speed", "--json", "--threads", "1"])
    speed = json.loads(done.stdout)["speed"]
    assert min(speed["prefill_tokens_per_s"], speed["decode_tokens_per_s"]) > 0


@pytest.mark.parametrize("takes_ranges", [True, False])
def test_no_more_of_a_file_is_read_than_was_asked_for(
    takes_ranges: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches gigabytes that a hub or a proxy sends because it ignores ranges, held in memory."""
    data = bytes(range(256)) * 4096
    made = Hub({"org/tiny": {"tiny.gguf": data}}, takes_ranges=takes_ranges, stall_at=200_000)
    with running(made):
        template = f"{made.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        assert repos._beginning(repos.RepoName("org/tiny"), "tiny.gguf", COMMIT, 1000) == data[:1000]
        with pytest.raises(DownloadError, match="org/tiny"):
            repos._beginning(repos.RepoName("org/tiny"), "none.gguf", COMMIT, 1000)


@pytest.mark.full
def test_a_hubs_files_are_looked_at_by_their_headers(tmp_path: Path) -> None:
    """Catches gigabytes that are fetched only to be found too large, and the largest file taken."""
    files = {}
    for kind in ("F32", "F16", "Q8_0"):
        config = replace(tiny_config(4096), n_vocab=65_536)
        files[f"tiny-{kind}.gguf"] = write_tiny(tmp_path / "m.gguf", config, weight_type=kind).read_bytes()
    made = Hub({"org/tiny-GGUF": files}, home=str(tmp_path / "hf"))
    program = [sys.executable, "-m", "kukri"]
    with running(made):
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            **{"HF_ENDPOINT": made.url, "HF_HOME": made.home, "HF_HUB_DISABLE_TELEMETRY": "1"},
        }
        told = subprocess.run(
            [*program, "fit", "org/tiny-GGUF", "--json"], env=environment, capture_output=True, text=True
        )
        report = json.loads(told.stdout)
        chosen = [one["model"] for one in report["choices"] if one["is_chosen"]]
        assert chosen == ["org/tiny-GGUF:tiny-Q8_0.gguf"]
        assert {one["weights"] for one in report["choices"]} == {"F32", "F16", "Q8_0"}
        assert made.n_bytes < sum(map(len, files.values())) // 2
        answered = subprocess.run(
            [*program, "run", "org/tiny-GGUF", "hi", "--max-tokens", "1", "--raw"],
            env=environment, capture_output=True, text=True,
        )  # fmt: skip
        assert answered.returncode == 0, answered.stderr
        assert "org/tiny-GGUF:tiny-Q8_0.gguf: Q8_0 weights are chosen" in answered.stderr
