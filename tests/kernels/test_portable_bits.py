"""The portable backend gives the recorded bits under every lowering that this host can run.

`python -m tests.kernels.test_portable_bits` records them again, by the host's own lowering: after a change of
bits that is meant. Weights are NumPy's, seeded by a tensor's name, whatever torch draws; their hash is
recorded too, so that other weights are not taken for other bits.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import pytest

from benchmarks.make_model import SHAPES, make_model, tensor_shapes
from kukri.errors import ShapeError
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels import make_backend
from kukri.kernels.cpu.compile.features import cpu_target
from kukri.quant.mixes import MIXES
from kukri.quant.types import PACKED, QUANT_TYPES
from tests.kernels.test_cpu_lowerings import runnable
from tests.models.made_models import make
from tests.models.tiny_models import IN_GGUF
from tests.models.written_models import write
from tests.random_blocks import random_rows

PROGRAM = Path(__file__).with_name("logits_hashes.py")
RECORDED = Path(__file__).with_name("recorded_hashes.json")
SOME = ["llama-Q8_0", "qwen3_5_text-F32", "Q4_K_M"]
UNWRITTEN = [type.name for type in PACKED if type.name not in MIXES and type.ggml_id >= 0]
EVERY = [*(f"{name}-{type}" for name in IN_GGUF for type in ("F32", "Q8_0")), *MIXES, *UNWRITTEN]


def logits_hashes(paths: list[Path], level: str | None) -> dict[str, str]:
    """By name; None is the host's own level."""
    env = {k: v for k, v in os.environ.items() if k != "KUKRI_CPU"} | ({"KUKRI_CPU": level} if level else {})
    command = [sys.executable, str(PROGRAM), *map(str, paths)]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, str] = json.loads(done.stdout)
    assert found["arithmetic"] == make_backend("portable", 1).arithmetic
    return {path.stem: found[str(path)] for path in paths}


def files(folder: Path, names: list[str]) -> list[Path]:
    """Tiny models: an architecture and a weight type, or a mix, or a type that no mix is made of."""
    paths = []
    for name in names:
        path = folder / f"{name}.gguf"
        architecture, _, weight_type = name.rpartition("-")
        if architecture:
            _, config, source = make(architecture)
            source.arrays = {key: drawn(key, array) for key, array in source.arrays.items()}
            with suppress(ShapeError):  # some have rows that are no whole blocks
                write(path, architecture, config, source, weight_type)
        elif name in MIXES:
            make_model(path, SHAPES["tiny"], name, name)
        else:
            make_model(path, SHAPES["tiny"], "F32", name)
            retype(path, name)
        paths += [path] * path.exists()
    return paths


def drawn(key: str, array: np.ndarray) -> np.ndarray:
    """Weights in place of an array's; RandomState's numbers never change."""
    normal = np.random.RandomState(crc32(key.encode())).standard_normal(array.shape).astype(np.float32)
    middle = 1 if "norm" in key and not key.endswith("bias") else 0
    return middle + (0.3 if array.ndim == 1 else 0.15) * normal


def retype(path: Path, name: str) -> None:
    """Gives the matrices of a file random blocks of a type."""
    with GGUFFile(path) as file:
        metadata = dict(file.metadata)
    rng, tensors = np.random.default_rng(0), dict[str, Any]()
    for tensor, dims in tensor_shapes(SHAPES["tiny"]).items():
        is_vector = len(dims) == 1
        data = np.ones(dims, np.float32) if is_vector else random_rows(rng, name, dims)
        tensors[tensor] = (QUANT_TYPES["F32" if is_vector else name], data, dims)
    path.unlink()
    write_gguf(path, metadata, tensors)


def weights_hash(path: Path) -> str:
    """A hash of a file's tensors."""
    digest = sha256()
    with GGUFFile(path) as file:
        for name in sorted(file.tensors):
            digest.update(name.encode() + file.data(name).tobytes())
    return digest.hexdigest()[:16]


def check(paths: list[Path], level: str | None) -> None:
    """Compares with what was recorded."""
    recorded = json.loads(RECORDED.read_text())
    for path in paths:
        assert weights_hash(path) == recorded[path.stem][0], f"{path.stem} has other weights: record it again"
    found = logits_hashes(paths, level)
    assert found == {name: recorded[name][1] for name in found}


@pytest.fixture(scope="module")
def some(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return files(tmp_path_factory.mktemp("some"), SOME)


@pytest.mark.representative(12)
def test_logits_have_the_recorded_bits(some: list[Path]) -> None:
    """Catches a change of bits that was not meant: an answer that another version cannot continue."""
    check(some, None)


@pytest.mark.representative(12)
def test_avx2_gives_the_recorded_bits(some: list[Path]) -> None:
    """Catches logits that two processors compute from other terms: an answer that one cannot continue."""
    if "avx2" not in [level.name for level in runnable()] or not cpu_target().has_int8_dot:
        pytest.skip("this host has no other lowering")
    check(some, "avx2")


@pytest.mark.slow
@pytest.mark.parametrize("level", [None, *(level.name for level in runnable())])
def test_every_model_has_the_recorded_bits(level: str | None, tmp_path: Path) -> None:
    """Catches an architecture or a weight type whose bits depend on the processor, or were changed."""
    check(files(tmp_path, EVERY), level)


def test_every_model_is_recorded() -> None:
    """Catches an architecture or a type that was added and not recorded."""
    recorded = set(json.loads(RECORDED.read_text()))
    assert {name for name in EVERY if "-" not in name} <= recorded
    assert {f"{name}-F32" for name in IN_GGUF} <= recorded <= set(EVERY)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = files(Path(folder), EVERY)
        hashes = logits_hashes(made, None)
        recorded = {path.stem: [weights_hash(path), hashes[path.stem]] for path in made}
    RECORDED.write_text(json.dumps(recorded, indent=0) + "\n")
