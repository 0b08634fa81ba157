"""Recipes made by measuring: the bytes go where they save most, and the file is what was promised."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError
from kukri.evaluate.compare import compare
from kukri.evaluate.text import prose, text_windows
from kukri.evaluate.tuning import Choice, allocate, recipe_of, tune
from kukri.formats.gguf.reader import GGUFFile
from kukri.quant.recipes import apply_recipe, recipe_named
from kukri.quant.types import QUANT_TYPES
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

Q4, Q8 = QUANT_TYPES["Q4_0"], QUANT_TYPES["Q8_0"]


def test_allocation_is_as_good_as_trying_everything() -> None:
    """A step taken for its loss and not for its bytes; bytes left that would have helped."""
    rng = np.random.default_rng(0)
    for _ in range(30):
        choices = {}
        for name in "abcde":
            losses = np.sort(rng.random(4))[::-1] ** 3
            choices[name] = [Choice(Q4, 10 * (i + 1), float(loss)) for i, loss in enumerate(losses)]
        budget = int(rng.integers(50, 200))
        found = allocate(choices, budget)
        assert sum(choice.n_bytes for choice in found.values()) <= budget
        best = min(
            sum(choice.loss for choice in combination)
            for combination in itertools.product(*choices.values())
            if sum(choice.n_bytes for choice in combination) <= budget
        )
        # greedy on the hull is at most one step short
        step = max(a.loss - b.loss for options in choices.values() for a, b in itertools.pairwise(options))
        assert sum(choice.loss for choice in found.values()) <= best + step
    with pytest.raises(ConfigError, match="at least 1 bytes larger"):
        allocate(choices, 49)


def test_recipes_say_what_was_chosen(tmp_path: Path) -> None:
    """A layer that a pattern misses, or that two match: 1 and 11."""
    shapes = {f"blk.{i}.attn_q.weight": (64, 64) for i in range(12)} | {"token_embd.weight": (99, 64)}
    types = {name: (Q8 if "1" in name else Q4) for name in shapes}
    for name in ("r.json", "r.yaml"):
        path = tmp_path / name
        path.write_text(json.dumps(recipe_of(types)))
        assert apply_recipe(recipe_named(str(path)), shapes, 1, {})[0] == types


def test_a_tensor_that_matters_gets_the_bytes(tmp_path: Path) -> None:
    """Losses measured on the wrong tensor, or on none: here all but one block do next to nothing."""
    arrays = random_arrays(tiny_config())
    for name in ("model.layers.0.mlp.down_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        arrays[name] *= 1e-4
    path = write_tiny(tmp_path / "m.gguf", tiny_config(), arrays)
    made = tune(path, prose()[:200], 70_000, [Q4, Q8], max_tokens=64, n_threads=1)
    silent = [kl for name, kl in made.measured.items() if name.startswith("blk.0.")]
    heard = [kl for name, kl in made.measured.items() if name.startswith("blk.1.")]
    assert max(silent) < 0.1 * max(heard)
    assert made.n_bytes <= 70_000
    assert {made.types[name] for name in made.types if "blk.0.ffn" in name} == {Q4}
    assert made.types["blk.1.ffn_down.weight"] == Q8


@pytest.mark.full
def test_the_command(tmp_path: Path) -> None:
    """A recipe that makes a file of another size, or a worse one than the same type everywhere."""
    source, text = write_tiny(tmp_path / "m.gguf", tiny_config()), tmp_path / "text.txt"
    text.write_text(prose()[:400])
    recipe, tuned, uniform = tmp_path / "r.yaml", tmp_path / "tuned.gguf", tmp_path / "uniform.gguf"

    def call(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    plan = json.loads(call("quantize", str(source), str(uniform), "Q5_0", "--json"))
    options = [
        "--text",
        str(text),
        "--types",
        "Q4_0,Q5_0,Q8_0",
        "--tokens",
        "120",
        "-o",
        str(recipe),
        "--json",
    ]
    made = json.loads(call("tune-recipe", str(source), "--size", str(plan["n_bytes"]), *options))
    assert made["n_bytes"] <= plan["n_bytes"]
    written = json.loads(call("quantize", str(source), str(tuned), str(recipe), "--json"))
    assert written["n_bytes"] == made["n_bytes"]
    with GGUFFile(tuned) as file:
        assert len({tensor.type.name for tensor in file.tensors.values()}) > 2
    held_out = prose()[2000:3000]
    with (
        LLM(source, max_context=128) as exact,
        LLM(tuned, max_context=128) as a,
        LLM(uniform, max_context=128) as b,
    ):
        cut = text_windows(exact.tokenizer, held_out, 128, 64)
        assert compare(exact, a, cut).kl_mean < compare(exact, b, cut).kl_mean
    done = CliRunner().invoke(app, ["tune-recipe", str(source), "--size", "1KB", *options])
    assert done.exit_code == 2
    assert "bytes larger, even for the smallest types" in done.stderr
