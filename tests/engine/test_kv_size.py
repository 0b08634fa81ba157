"""How much memory the KV cache takes, and what becomes of a model whose context does not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM, SamplingParams
from kukri.engine.kv_size import KVCost, choose_kv_size
from kukri.errors import ConfigError
from kukri.host.hardware import available_bytes
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.reference import ReferenceBackend
from tests.tiny_gguf import tiny_config, write_tiny

MiB = 1 << 20
HUGE_CONTEXT = 1 << 22


def size(**changes: Any) -> Any:
    given = {
        "cost": KVCost(((None, 16 << 10),), 16, 512),
        "model_context": 1 << 16,
        "max_context": None,
        "max_requests": 16,
    }
    return choose_kv_size(**{**given, "kv_bytes": None, "free_bytes": 1 << 40, **changes})


def test_a_pool_of_all_contexts_if_they_fit() -> None:
    """A pool smaller than what may run, or larger than what ever can."""
    chosen = size()
    assert (chosen.n_bytes, chosen.max_context, chosen.note) == (16 << 26, 1 << 16, "")
    assert size(max_context=1000).n_bytes == 16 * 1008 << 10
    assert size(kv_bytes=1 << 30).n_bytes == 1 << 30, "a user's own size stays"


def test_less_memory_gives_a_smaller_pool_then_a_smaller_context() -> None:
    """An error, or a cache that the machine cannot hold."""
    chosen = size(free_bytes=200 * MiB)
    assert (chosen.n_bytes, chosen.max_context, chosen.note) == (140 * MiB, 1 << 16, "")
    small = size(free_bytes=10 * MiB)
    assert small.n_bytes == 7 * MiB
    assert small.max_context == 7 * 1024
    assert "7,168 of 65,536 tokens" in small.note
    assert "--kv-memory" in small.note
    own = size(kv_bytes=MiB)
    assert (own.n_bytes, own.max_context) == (MiB, 1024)
    assert own.note


@pytest.mark.parametrize(
    "given",
    [
        {"free_bytes": 10 * MiB, "max_context": 1 << 14},
        {"free_bytes": 100 << 10},
        {"free_bytes": -5 * MiB},
    ],
)
def test_what_cannot_fit_is_refused_with_the_ways_out(given: dict[str, int]) -> None:
    """An error that says no way out, or a context that was asked for and silently cut."""
    with pytest.raises(ConfigError, match=r"memory are free.*--max-context.*--kv-memory.*--max-requests"):
        size(**given)
    with pytest.raises(ConfigError, match="must hold a page of 16384: raise --kv-memory"):
        size(kv_bytes=1000)


def test_a_huge_context_opens_where_memory_is_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """`no memory for a KV cache of 72.0 GiB` for a model that runs well."""
    path = write_tiny(tmp_path / "huge.gguf", tiny_config(HUGE_CONTEXT))
    weights = path.stat().st_size
    for backend in (CpuBackend, ReferenceBackend):
        monkeypatch.setattr(backend, "free_bytes", lambda _: weights + 4 * MiB)
    with caplog.at_level(logging.INFO, "kukri.opening.loading"), LLM(path, backend="cpu", n_threads=1) as llm:
        assert llm.config.max_context == HUGE_CONTEXT
        assert 10_000 < llm.engine.max_context < HUGE_CONTEXT
        assert llm.engine.runner.cache.n_bytes <= 4 * MiB
        params = SamplingParams(temperature=0, max_tokens=None, seed=1, stop_token_ids=list(range(256)))
        assert llm.generate("hello", params).token_ids
    said = [record.getMessage() for record in caplog.records]
    assert any(text.startswith("KV cache: 0.00 GiB for") for text in said)
    assert any("4,194,304 tokens" in text and "--kv-memory" in text for text in said)
    with pytest.raises(ConfigError, match="--max-context"):
        LLM(path, backend="reference", max_context=1 << 20)


def test_loading_tells_how_far_it_is(tmp_path: Path) -> None:
    """A bar that never moves or never ends."""
    path = write_tiny(tmp_path / "tiny.gguf", weight_type="Q8_0")
    seen: list[tuple[int, int]] = []
    with LLM(path, progress=lambda done, total: seen.append((done, total))) as llm:
        total = sum(parameter.n_bytes for parameter in llm.model.parameters)
    assert seen[0] == (0, total)
    assert seen == sorted(seen)
    assert total / 2 < seen[-1][0] <= total


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 8192 kB\n", **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 * MiB),
        ({"proc/self/cgroup": "0::/\n"}, 8 * MiB),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/b/memory.max": "max\n",
                "sys/fs/cgroup/a/b/memory.current": f"{MiB}\n",
                "sys/fs/cgroup/a/memory.max": f"{5 * MiB}\n",
                "sys/fs/cgroup/a/memory.current": f"{3 * MiB}\n",
                "sys/fs/cgroup/a/memory.stat": f"anon 1\ninactive_file {MiB}\n",
            },
            3 * MiB,
        ),
        (
            {
                "proc/self/cgroup": "5:devices:/c\n4:cpu,memory:/c\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * MiB}\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{2 * MiB}\n",
                "sys/fs/cgroup/memory/c/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/c/memory.usage_in_bytes": "1\n",
            },
            2 * MiB,
        ),
        (
            {
                "proc/self/cgroup": "0::/\n",
                "sys/fs/cgroup/memory.max": f"{MiB}\n",
                "sys/fs/cgroup/memory.current": f"{2 * MiB}\n",
            },
            0,
        ),
    ],
)
def test_free_memory_is_what_the_control_groups_leave(
    tmp_path: Path, files: dict[str, str], expected: int
) -> None:
    """A container of 2 GiB that is taken for the whole machine, by either version of control groups."""
    assert available_bytes(write(tmp_path, files)) == expected


def test_this_machine_has_memory() -> None:
    """Files that are read wrongly on a real system."""
    assert 16 * MiB < available_bytes() < 1 << 50
