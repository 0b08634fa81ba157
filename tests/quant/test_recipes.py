"""Recipes: which rule counts, what is refused, and files made by them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from benchmarks.make_model import SHAPES, tensor_shapes
from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError, UnsupportedError
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.tensor_names import hf_name
from kukri.quant.mixes import MIXES, file_type, mix_types
from kukri.quant.per_token import ACTIVATIONS_KEY
from kukri.quant.recipes import apply_recipe, recipe_named, shipped_recipes
from kukri.quant.types import QUANT_TYPES
from kukri.terminal.convert import convert_model
from tests.tiny_gguf import tiny_config, write_tiny

SHAPES_3B = tensor_shapes(SHAPES["smollm3-3b"])
HF_NAMES = {name: hf_name(name) for name in SHAPES_3B}


def applied(path: Path, recipe: Any) -> dict[str, str]:
    """Types by name, of a recipe given as JSON and as YAML, which must agree."""
    found = []
    for file, text in (
        (path / "r.json", json.dumps(recipe)),
        (path / "r.yaml", yaml.safe_dump(recipe, sort_keys=False)),
    ):
        file.write_text(text)
        types, renames = apply_recipe(recipe_named(str(file)), SHAPES_3B, 4, HF_NAMES)
        assert not renames
        found.append({name: type.name for name, type in types.items()})
    assert found[0] == found[1]
    return found[0]


@pytest.mark.parametrize("mix", [*MIXES, "q4_k_m", "Q4_K"])
def test_a_mix_is_a_recipe(mix: str) -> None:
    """A shipped name that is another mix than it says."""
    types, _ = apply_recipe(recipe_named(mix), SHAPES_3B, 4, HF_NAMES)
    assert types == mix_types({"Q4_K": "Q4_K_M"}.get(mix, mix.upper()), SHAPES_3B, 4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [("w8a8", "Q8_0"), ("w4a8", "Q4_0"), ("W4A8_per_token", "Q4_0"), ("q4_k_m_q8_attention", "Q8_0")],
)
def test_recipes_that_ship(name: str, kind: str) -> None:
    """A shipped recipe unknown, of other weights than its name says, or without a line for people."""
    recipe = recipe_named(name)
    types, _ = apply_recipe(recipe, SHAPES_3B, 4, HF_NAMES)
    assert types["blk.3.attn_q.weight"].name == kind
    assert recipe.per_token == name.endswith("per_token")


def test_all_that_ship_are_listed() -> None:
    """A file that is no recipe, or that the list leaves out."""
    done = CliRunner().invoke(app, ["quantize", "--list-recipes"])
    assert done.exit_code == 0
    names = [line.split()[0] for line in done.stdout.splitlines()]
    assert names == shipped_recipes()
    assert {"w4a8", "w8a8", "q4_k_m", "q5_k_m", "w4a8_per_token"} <= set(names)
    for name in names:
        assert apply_recipe(recipe_named(name), SHAPES_3B, 4, HF_NAMES)[0]
        assert recipe_named(name).about in done.stdout
        assert recipe_named(name).about


def test_the_file_type_says_what_most_weights_are(tmp_path: Path) -> None:
    """A file made without a mix that still calls itself F32, or that lies where GGUF has no number."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    for recipe, number in (
        ({"blk": "Q8_0"}, 7),
        ({"blk": "Q8_0", "ffn_|attn_output": "Q4_1"}, 3),
        ({"token_embd": "Q8_0"}, 0),
        ({"base": "Q5_0", "ffn_": "Q8_0"}, 8),
        ({"weight$": "Q8_1"}, None),
    ):
        (tmp_path / "r.json").write_text(json.dumps(recipe))
        if number is None:
            with pytest.raises(ConfigError, match=r"must ask for keep or one of .*, not 'Q8_1'"):
                recipe_named(str(tmp_path / "r.json"))
            continue
        convert_model(source, tmp_path / "m.gguf", str(tmp_path / "r.json"), dry_run=False, as_json=True)
        with GGUFFile(tmp_path / "m.gguf") as file:
            assert file.metadata["general.file_type"] == number
    shapes = {"a": (2, 256), "b": (4, 256), "c": (9,)}
    types = {"a": QUANT_TYPES["Q4_0"], "b": QUANT_TYPES["Q4_K"], "c": QUANT_TYPES["F32"]}
    assert file_type(types, shapes) == MIXES["Q4_K_M"][1]
    assert file_type({**types, "b": QUANT_TYPES["Q8_K"]}, shapes) is None


def test_activations_are_kept_in_the_file(tmp_path: Path) -> None:
    """int4 dynamic that runs like any Q4_0, a wish that outlives its types, or a strange one obeyed."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    logits = {}
    for name in ("w4a8", "w4a8_per_token"):
        convert_model(source, tmp_path / f"{name}.gguf", name, dry_run=False, as_json=True)
        for backend in ("cpu", "reference"):
            with LLM(tmp_path / f"{name}.gguf", backend=backend, n_threads=1) as llm:
                logits[name, backend] = llm.logits([1, 5, 9, 2])
    exact, fine, coarse = (
        logits["w4a8", "reference"], logits["w4a8", "cpu"], logits["w4a8_per_token", "cpu"],
    )  # fmt: skip
    np.testing.assert_array_equal(logits["w4a8_per_token", "reference"], exact)
    assert 0 < np.abs(fine - coarse).max() < 0.2 * np.abs(exact).max()
    assert np.abs(coarse - exact).max() < 0.2 * np.abs(exact).max()
    convert_model(tmp_path / "w4a8_per_token.gguf", tmp_path / "q8.gguf", "Q8_0", dry_run=False, as_json=True)
    with GGUFFile(tmp_path / "q8.gguf") as file:
        assert ACTIVATIONS_KEY not in file.metadata
    data = (tmp_path / "w4a8_per_token.gguf").read_bytes()
    (tmp_path / "odd.gguf").write_bytes(data.replace(b"per-token", b"per-world"))
    with pytest.raises(UnsupportedError, match=r"'kukri\.activations' must be 'per-token', not 'per-world'"):
        LLM(tmp_path / "odd.gguf")


def test_later_lines_win_and_both_kinds_of_names_match(tmp_path: Path) -> None:
    """The first rule taken for the last; Hugging Face's names not found in a GGUF file."""
    types = applied(
        tmp_path,
        {
            r"^model\.layers\.\d+\.self_attn\.": "Q6_K",
            r"attn_q\.": "q8_0",
            r"layers\.(2|3)\.self_attn\.q_proj": "Q5_0",
        },
    )
    assert set(types.values()) == {"Q6_K", "Q8_0", "Q5_0"}
    assert len(types) == 4 * 36
    assert [types[f"blk.{i}.attn_q.weight"] for i in (1, 2, 3, 4)] == ["Q8_0", "Q5_0", "Q5_0", "Q8_0"]
    assert types["blk.2.attn_output.weight"] == "Q6_K"


def test_layers_base_and_keep(tmp_path: Path) -> None:
    """A range that is one layer short or long; a tensor to keep that the mix still takes."""
    recipe = {
        "base": "q4_k_s",
        "ffn_down": {"type": "Q8_0", "layers": "0-2, 35"},
        "attn_v": {"layers": [7], "type": "keep"},
        "token_embd": "keep",
    }
    types, plain = applied(tmp_path, recipe), mix_types("Q4_K_S", SHAPES_3B, 4)
    down = {i for i in range(36) if types[f"blk.{i}.ffn_down.weight"] == "Q8_0"}
    assert down == {0, 1, 2, 35}
    assert set(plain) - set(types) == {"token_embd.weight", "blk.7.attn_v.weight"}
    assert all(
        types[name] == type.name for name, type in plain.items() if name in types and "down" not in name
    )


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"no_such_thing": "Q8_0"}, "'no_such_thing' must match a tensor"),
        ({"attn_norm": "Q8_0"}, "'attn_norm' must match a tensor that it can change"),
        ({"attn_q": {"type": "Q8_0", "layers": "36"}}, "'attn_q' must match a tensor"),
        ({"attn_q": "Q9_K"}, "'attn_q' must ask for keep or one of F32"),
        ({"attn_q": "Q4_K_M"}, "must ask for keep or one of .*, not 'Q4_K_M'"),
        ({"attn_q": 8}, "must ask for keep or one of .*, not 8"),
        ({"(": "Q8_0"}, r"'\(' must be a pattern"),
        ({"attn_q": {"kind": "Q8_0"}}, "must have only type, layers and rename, not 'kind'"),
        ({"attn_q": {"type": "Q8_0", "layers": "3-1"}}, "must have layers like 0-3, 28, not '3-1'"),
        ({"base": "Q4_Z"}, "'Q4_Z' is not supported"),
        ({"base": 4}, "'base' must name a mix"),
        ({"activations": "int8"}, "'activations' must be 'per-token', not 'int8'"),
        (["Q4_K"], "must hold a map"),
    ],
    ids=str,
)
def test_recipes_that_make_no_sense(recipe: Any, message: str, tmp_path: Path) -> None:
    """A misspelled pattern, type or key that silently does nothing."""
    for dump, name in ((json.dumps, "r.json"), (yaml.safe_dump, "r.yml")):
        (tmp_path / name).write_text(dump(recipe))
        with pytest.raises(ConfigError, match=message) as caught:
            apply_recipe(recipe_named(str(tmp_path / name)), SHAPES_3B, 4, HF_NAMES)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("r.json", '{"a": "Q8_0", "a": "Q4_0"}', "'a' must appear once"),
        ("r.yaml", "a: Q8_0\na: Q4_0\n", "'a' must appear once"),
        ("r.json", "{", "must be JSON"),
        ("r.yaml", "a: [", "must be YAML"),
        ("r.yaml", "a: !!python/object/apply:os.getcwd []", "must be YAML"),
        ("r.json", None, "cannot be read: No such file"),
    ],
)
def test_files_that_are_no_recipes(name: str, text: str | None, message: str, tmp_path: Path) -> None:
    """A traceback, code that a recipe runs, one of two lines lost."""
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        recipe_named(str(tmp_path / name))
    assert "\n" not in str(caught.value)


def test_a_file_made_by_a_recipe(tmp_path: Path) -> None:
    """A recipe that plans well and is not carried out; a new name that is not given."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    recipe = {
        "ffn_": "Q8_0",
        r"^blk\.1\.ffn_up": "F16",
        r"^blk\.(\d+)\.attn_norm": {"rename": r"blk.\1.norm"},
    }
    (tmp_path / "r.json").write_text(json.dumps(recipe))
    convert_model(source, tmp_path / "m.gguf", str(tmp_path / "r.json"), dry_run=False, as_json=True)
    with GGUFFile(source) as before, GGUFFile(tmp_path / "m.gguf") as after:
        types = {name: tensor.type.name for name, tensor in after.tensors.items()}
        assert types["blk.0.ffn_up.weight"] == "Q8_0"
        assert types["blk.1.ffn_up.weight"] == "F16"
        assert types["blk.0.attn_q.weight"] == "F32"
        assert set(types) - set(before.tensors) == {"blk.0.norm", "blk.1.norm"}
