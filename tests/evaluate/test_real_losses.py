"""The real SmolLM2-135M: what importance, measuring and kukri's quantizers are worth on text not tuned on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kukri.cli import app

pytestmark = pytest.mark.slow
DOCS = Path(__file__).parents[2] / "docs"


def call(*arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert done.exit_code == 0, done.output
    return done.stdout


def mean_kl(a: Path, b: Path) -> float:
    """Over the novel's opening."""
    return float(json.loads(call("compare", a, b, "--json"))["kl_mean"])


@pytest.fixture(scope="module")
def f16(smollm2_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("f16") / "f16.gguf"
    call("quantize", smollm2_path, path, "F16")
    return path


@pytest.fixture(scope="module")
def other_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prose of another kind than the novel: these documents."""
    path = tmp_path_factory.mktemp("text") / "docs.txt"
    names = (DOCS / name for name in ("numerics.md", "adding-a-model.md", "forward-and-heads.md"))
    pages = (*sorted((DOCS / "serving").iterdir()), *names)
    path.write_text("\n".join(page.read_text("utf-8") for page in pages), encoding="utf-8")
    return path


def test_importance_makes_the_loss_smaller(f16: Path, other_text: Path, tmp_path: Path) -> None:
    """Columns weighed by something else than what they are worth."""
    call("imatrix", f16, other_text, "-o", tmp_path / "i.gguf")
    call("quantize", f16, tmp_path / "plain.gguf", "IQ4_XS")
    call("quantize", f16, tmp_path / "weighed.gguf", "IQ4_XS", "--imatrix", tmp_path / "i.gguf")
    assert mean_kl(f16, tmp_path / "weighed.gguf") < 0.95 * mean_kl(f16, tmp_path / "plain.gguf")


def test_a_tuned_recipe_beats_the_uniform_mix(f16: Path, other_text: Path, tmp_path: Path) -> None:
    """Tuning that fits its text alone, or takes more bytes than the mix."""
    uniform, tuned, recipe = (tmp_path / name for name in ("u.gguf", "t.gguf", "r.yaml"))
    plan = json.loads(call("quantize", f16, uniform, "Q4_K_M", "--json"))
    call("tune-recipe", f16, "--size", plan["n_bytes"], "-o", recipe, "--text", other_text)
    made = json.loads(call("quantize", f16, tuned, recipe, "--json"))
    assert made["n_bytes"] <= plan["n_bytes"]
    assert mean_kl(f16, tuned) < mean_kl(f16, uniform)


def test_no_more_is_lost_than_by_llama_cpp(smollm2_path: Path) -> None:
    """A quantizer that got worse: 1.02 is what a wrong scale would exceed."""
    command = [sys.executable, "-m", "benchmarks.quantizers", "-m", str(smollm2_path), "--json", "-r", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for mix, pair in json.loads(done.stdout).items():
        assert pair["kl_ratio"] <= 1.02, mix
        assert pair["kukri"]["n_bytes"] == pytest.approx(pair["llama_cpp"]["n_bytes"], rel=0.01)
