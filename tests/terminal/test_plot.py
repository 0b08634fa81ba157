"""`kukri plot`: pictures of a prompt from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from tests.tiny_gguf import write_tiny

PROMPT = "Once upon a time"


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("plot") / "tiny.gguf")


@pytest.fixture(scope="module")
def transcoders(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    with LLM(tiny, n_threads=1) as llm:
        d, n_layers = llm.config.d_model, llm.config.n_layers
    folder, rng = tmp_path_factory.mktemp("transcoders"), np.random.default_rng(0)
    for i in range(n_layers):
        shapes = {"W_enc": (20, d), "W_dec": (20, d), "b_enc": (20,), "b_dec": (d,)}
        made = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        save_file(made, folder / f"layer_{i}.safetensors")
    return folder


@pytest.mark.full
def test_each_kind_is_written(tiny: Path, transcoders: Path, tmp_path: Path) -> None:
    """Catches a kind without a file, or a picture under the name of another format."""
    for kind, name, *options in (
        ("lens", "lens.svg"),
        ("attention", "heads.png", "--layer", "1"),
        ("attention", "page.html", "--layer", "1"),
        ("features", "features.svg", "--transcoders", str(transcoders), "--layer", "1", "--top", "3"),
    ):
        out = tmp_path / name
        done = CliRunner().invoke(app, ["plot", kind, str(tiny), PROMPT, "-o", str(out), "--json", *options])
        assert done.exit_code == 0, done.output
        assert "".join(json.loads(done.stdout)["tokens"]) == PROMPT
        begins = {".svg": b"<?xml", ".png": b"\x89PNG", ".html": b"<!doctype html>"}[out.suffix]
        assert out.read_bytes().startswith(begins)
    out = tmp_path / "graph.svg"
    command = ["circuit", str(tiny), PROMPT, "--transcoders", str(transcoders), "-o", str(out)]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert out.read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lens"], "-o is required: FILE.png"),
        (["lens", "-o", "map.gif"], ".png or .svg, not map.gif"),
        (["lens", "-o", "page.html"], ".png or .svg, not page.html"),
        (["lens", "-o", "missing/map.png"], "the directory missing was not found"),
        (["patching", "-o", "map.png"], "--against is required"),
        (["patching", "-o", "map.png", "--against", PROMPT], "another likeliest next token"),
        (["features", "-o", "map.png"], "--sae DIR is required, or --transcoders DIR"),
        (["features", "-o", "map.png", "--transcoders", "T", "--layer", "9"], "--layer 9 was not found"),
        (
            ["features", "-o", "map.png", "--transcoders", "T", "--feature", "20"],
            "--feature must be from 0 to 19",
        ),
        (
            ["attention", "-o", "map.png", "--layer", "99"],
            "the hook 'blocks.99.attn.hook_pattern' was not found",
        ),
    ],
)
def test_what_is_missing_is_named(
    tiny: Path,
    transcoders: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    said: str,
) -> None:
    """Catches a traceback, or an error that does not say which option to give."""
    monkeypatch.chdir(tmp_path)
    given = [str(transcoders) if one == "T" else one for one in options[1:]]
    done = CliRunner().invoke(app, ["plot", options[0], str(tiny), PROMPT, *given])
    assert done.exit_code == 2
    assert said in done.stderr
    assert done.stderr.count("\n") == 1
    assert not list(tmp_path.iterdir())
