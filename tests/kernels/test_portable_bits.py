"""The portable backend gives equal bits under every lowering that this host can run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from benchmarks.make_model import SHAPES, make_model
from kukri.errors import ShapeError
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.quant.mixes import MIXES
from tests.kernels.test_cpu_lowerings import runnable
from tests.models.tiny_models import IN_GGUF, make, write

PROGRAM = Path(__file__).with_name("logits_hashes.py")
SOME = [("llama", "Q8_0"), ("qwen3_5_text", "F32")]
SOME_MIXES = ["Q4_K_M"]


def hashes(paths: list[Path], level: str | None) -> dict[str, str]:
    """By file; None is the host's own level."""
    env = {k: v for k, v in os.environ.items() if k != "KUKRI_CPU"} | ({"KUKRI_CPU": level} if level else {})
    command = [sys.executable, str(PROGRAM), *map(str, paths)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    return found


def files(folder: Path, models: list[tuple[str, str]], mixes: list[str]) -> list[Path]:
    """Tiny models of these architectures and weight types, and one of each mix."""
    paths = []
    for name, weight_type in models:
        _, config, source = make(name, weight_type=weight_type)
        with suppress(ShapeError):  # some have rows that are no whole blocks
            paths.append(write(folder / f"{name}-{weight_type}.gguf", name, config, source, weight_type))
    for mix in mixes:
        paths.append(folder / f"mix-{mix}.gguf")
        make_model(paths[-1], SHAPES["tiny"], mix, mix)
    return paths


def test_avx2_gives_the_bits_of_the_host(tmp_path: Path) -> None:
    """Catches logits that two processors compute from other terms: an answer that one cannot continue."""
    if "avx2" not in [level.name for level in runnable()] or not cpu_target().has_int8_dot:
        pytest.skip("this host has no other lowering")
    paths = files(tmp_path, SOME, SOME_MIXES)
    assert hashes(paths, "avx2") == hashes(paths, None)


@pytest.mark.slow
@pytest.mark.parametrize("level", [level.name for level in runnable()])
def test_every_model_has_the_bits_of_the_host(level: str, tmp_path: Path) -> None:
    """Catches an architecture or a weight type whose bits depend on the processor."""
    models = [(name, weight_type) for name in IN_GGUF for weight_type in ("F32", "Q8_0")]
    paths = files(tmp_path, models, list(MIXES))
    assert len(paths) > len(IN_GGUF) + len(MIXES), "the premise"
    assert hashes(paths, level) == hashes(paths, None)
