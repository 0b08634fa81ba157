"""Wrong model files through the public door: one line that names the file, the tensor or key, the fault."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import FormatError, KukriError, UnsupportedError, UnusedTensorError
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import make
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

with lazy_imports():
    import torch
    from safetensors.torch import load_file, save_file

Q, DOWN = "model.layers.1.self_attn.q_proj", "model.layers.2.mlp.down_proj"
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("sharded"), "llama", max_shard_size="200KB")[0]


@pytest.fixture(scope="module")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(kind: str) -> Path:
        if kind not in made:
            made[kind] = make(tmp_path_factory.mktemp(kind), kind)[0]
        return made[kind]

    return get


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    contents = json.loads(path.read_text())
    change(contents)
    path.write_text(json.dumps(contents))


def config(**keys: Any) -> Damage:
    return lambda directory: edit(directory / "config.json", lambda stated: stated.update(keys))


def shard_of(directory: Path, name: str) -> Path:
    if not (directory / INDEX).exists():
        return directory / "model.safetensors"
    index = json.loads((directory / INDEX).read_text())["weight_map"]
    return directory / index.get(name, min(index.values()))


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Damage:
    """Puts another tensor in the place of one, or none, in the index too; a new name is added."""

    def damage(directory: Path) -> None:
        path = shard_of(directory, name)
        tensors = load_file(path)
        new = change(tensors.pop(name, torch.ones(1)))
        if new is not None:
            tensors[name] = new.contiguous()
        save_file(tensors, path)
        if (directory / INDEX).exists():
            index = directory / INDEX
            edit(index, lambda i: i["weight_map"].pop(name, None))
            if new is not None:
                edit(index, lambda i: i["weight_map"].update({name: path.name}))

    return damage


def removed(name: str) -> Damage:
    return tensor(name, lambda old: None)


def absent_shard(directory: Path) -> None:
    shard_of(directory, f"{DOWN}.weight").unlink()


def cut_shard(directory: Path) -> None:
    path = shard_of(directory, f"{DOWN}.weight")
    os.truncate(path, path.stat().st_size - 1)


def cut_header(directory: Path) -> None:
    os.truncate(shard_of(directory, f"{DOWN}.weight"), 40)


def misplaced(directory: Path) -> None:
    other = sorted(directory.glob("*.safetensors"))[0].name
    assert other != shard_of(directory, f"{DOWN}.weight").name
    edit(directory / INDEX, lambda index: index["weight_map"].update({f"{DOWN}.weight": other}))


ROPE = {"rope_type": "ntk-by-parts", "rope_theta": 1e4, "factor": 2.0}
IN_SHARDS: dict[str, tuple[Damage, type[KukriError], str]] = {
    "shape": (
        tensor(f"{Q}.weight", lambda old: old[:-1]), FormatError,
        rf"model-0000\d-of.*, byte \d+, tensor '{Q}\.weight' has shape \(63, 64\) where .* \(64, 64\)",
    ),
    "turned": (tensor(f"{DOWN}.weight", lambda old: old.T), FormatError, r"\(96, 64\) where .*\(64, 96\)"),
    "dimensions": (
        tensor(f"{Q}.weight", lambda old: old[None]), FormatError, r"has shape \(1, 64, 64\) where",
    ),
    "missing": (removed(f"{Q}.weight"), FormatError, rf"tensor '{Q}\.weight' is missing"),
    "missing norm": (removed("model.norm.weight"), FormatError, r"tensor 'model\.norm\.weight' is missing"),
    "extra": (
        tensor("model.layers.1.mlp.third_proj.weight", lambda old: old), UnusedTensorError,
        r"no layer of llama takes: 'model\.layers\.1\.mlp\.third_proj\.weight'; check 'model_type' in",
    ),
    "absent shard": (
        absent_shard, FormatError,
        r"\.index\.json names the shard 'model-0000\d-of-\d+\.safetensors', which was not found: fetch",
    ),
    "misplaced": (misplaced, FormatError, r"index\.json, tensor '.*\.weight': .* places it in model-00001"),
    "cut shard": (cut_shard, FormatError, r"model-0000\d-of-\d+\.safetensors, .*tensor .* is cut short"),
    "cut header": (cut_header, FormatError, r"model-0000\d-of.*, byte 0: is cut short: a header of"),
    "architecture": (
        config(model_type="gptj"), UnsupportedError,
        r"config\.json: 'model_type' 'gptj' is not supported: use afmoe, .*bert, .*llama, ",
    ),
    "no architecture": (config(model_type=None), UnsupportedError, "'model_type' None is not supported"),
    "scaling": (
        config(rope_parameters=ROPE), UnsupportedError,
        r"key 'rope_parameters' has 'rope_type' 'ntk-by-parts': only default, linear, dynamic, yarn",
    ),
    "old scaling": (
        config(rope_parameters=None, rope_scaling={"type": "su", "factor": 2.0}), UnsupportedError,
        r"key 'rope_scaling' has 'rope_type' 'su': only",
    ),
    "two scalings": (
        config(rope_scaling={"type": "yarn", "factor": 4.0}), FormatError,
        r"key 'rope_parameters' and 'rope_scaling' disagree: keep the one that is right",
    ),
    "promised bias": (
        config(attention_bias=True), FormatError,
        r"\.bias' is missing, but key 'attention_bias' of config\.json is true: correct the one",
    ),
    "promised bias of the mlp": (
        config(mlp_bias=True), FormatError, r"mlp\.\w+\.bias' is missing, but key 'mlp_bias' .* is true",
    ),
    "bias not promised": (
        tensor(f"{Q}.bias", lambda old: torch.ones(64)), FormatError,
        rf"tensor '{Q}\.bias' is there, but key 'attention_bias' of config\.json is false: correct",
    ),
}  # fmt: skip


def refused(path: Path, error: type[KukriError], message: str) -> None:
    with pytest.raises(error, match=message) as caught:
        LLM(path)
    assert "\n" not in str(caught.value)
    done = CliRunner().invoke(app, ["run", "--raw", "hi", "-m", str(path)])
    assert done.exit_code == 2
    assert done.stderr.count("\n") == 1
    assert str(caught.value).splitlines()[0][:60] in done.stderr


@pytest.mark.full(only=["dimensions"])
@pytest.mark.parametrize("case", IN_SHARDS)
def test_a_wrong_directory(case: str, sharded: Path, tmp_path: Path) -> None:
    """A traceback, a model that runs all the same, or a line that does not say what and where."""
    damage, error, message = IN_SHARDS[case]
    directory = Path(shutil.copytree(sharded, tmp_path / "model"))
    damage(directory)
    refused(directory, error, message)


@pytest.mark.parametrize(
    ("kind", "damage", "message"),
    [
        ("llama-biases", config(attention_bias=False), r"\.bias' is there, but key 'attention_bias' .*fal"),
        ("llama-biases", config(mlp_bias=False), r"mlp\.\w+\.bias' is there, but key 'mlp_bias' .*false"),
        ("llama-biases", removed(f"{Q}.bias"), rf"'{Q}\.bias' is missing, but .*'attention_bias' .*true"),
        ("qwen2", removed(f"{Q}.bias"), rf"'{Q}\.bias' is missing, but every qwen2 has it"),
        ("qwen3", config(attention_bias=True), r"\.bias' is missing, but key 'attention_bias'"),
        ("smollm3", config(mlp_bias=True), r"\.bias' is missing, but key 'mlp_bias'"),
        ("mistral", tensor(f"{Q}.bias", lambda old: torch.ones(64)), rf"'{Q}\.bias' is there, but no mis"),
        ("phi", removed("model.layers.2.mlp.fc1.bias"), r"mlp\.fc1\.bias' is missing, but every phi has it"),
    ],
)  # fmt: skip
def test_biases_and_the_keys_that_promise_them(
    kind: str, damage: Damage, message: str, kinds: Callable[[str], Path], tmp_path: Path
) -> None:
    """A bias left out of the sum in silence, where key and tensors disagree."""
    directory = Path(shutil.copytree(kinds(kind), tmp_path / "model"))
    damage(directory)
    refused(directory, FormatError, message)


def test_an_absent_key_counts_as_false(kinds: Callable[[str], Path], tmp_path: Path) -> None:
    """Biases taken from an old llama file whose config.json says nothing of them."""
    directory = Path(shutil.copytree(kinds("llama-biases"), tmp_path / "model"))
    edit(
        directory / "config.json", lambda stated: [stated.pop(key) for key in ("attention_bias", "mlp_bias")]
    )
    refused(
        directory, FormatError, r"is there, but key '\w+_bias' of config\.json is absent, which means false"
    )


def gguf(change: Callable[[dict[str, np.ndarray]], Any] = lambda arrays: None, **keys: Any) -> Damage:
    def write(path: Path) -> None:
        arrays = random_arrays(tiny_config())
        change(arrays)
        write_tiny(path, arrays=arrays, **keys)

    return write


def cut_file(path: Path) -> None:
    write_tiny(path)
    os.truncate(path, path.stat().st_size - 64)


def other_architecture(arch: str) -> Damage:
    def write(path: Path) -> None:
        """The same keys under another prefix."""
        write_tiny(path)
        data = path.read_bytes().replace(b"llama", arch.encode())
        assert len(arch) == 5
        path.write_bytes(data)

    return write


W = "model.layers.1.self_attn.q_proj.weight"
GGUF: dict[str, tuple[Damage, type[KukriError], str]] = {
    "shape": (
        gguf(lambda a: a.update({W: np.ones((48, 64), np.float32)})), FormatError,
        r"model\.gguf, byte \d+, tensor 'blk\.1\.attn_q\.weight' has shape \(48, 64\) where .* \(64, 64\)",
    ),
    "missing": (gguf(lambda a: a.pop(W)), FormatError, r"tensor 'blk\.1\.attn_q\.weight' is missing"),
    "architecture": (gguf(general__architecture="mamba"), UnsupportedError, "'mamba' is not supported"),
    "cut": (cut_file, FormatError, r"model\.gguf, byte \d+, tensor .* bytes do not fit into a file of"),
    "scaling": (
        gguf(llama__rope__scaling__type="ntk", llama__rope__scaling__factor=2.0), UnsupportedError,
        r"key 'llama\.rope\.scaling\.type' is 'ntk': only none, linear, dynamic and yarn",
    ),
    "bias in one layer": (
        gguf(lambda a: a.update({W.replace("weight", "bias"): np.ones(64, np.float32)})), FormatError,
        r"tensor 'blk\.0\.attn_q\.bias' is missing, but 'blk\.1\.attn_q\.bias' is there",
    ),
    "no biases": (
        other_architecture("qwen2"), FormatError, r"'blk\.0\.attn_q\.bias' is missing, but this arch",
    ),
    "no head norms": (
        other_architecture("qwen3"), FormatError, r"tensor 'blk\.0\.attn_q_norm\.weight' is missing",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GGUF)
def test_a_wrong_gguf_file(case: str, tmp_path: Path) -> None:
    """The same in the other format."""
    damage, error, message = GGUF[case]
    damage(tmp_path / "model.gguf")
    refused(tmp_path / "model.gguf", error, message)


def test_the_undamaged_run(sharded: Path, kinds: Callable[[str], Path], tmp_path: Path) -> None:
    """Tests that pass because nothing runs at all."""
    write_tiny(tmp_path / "model.gguf")
    for path in (sharded, kinds("llama-biases"), kinds("qwen2"), kinds("phi"), tmp_path / "model.gguf"):
        with LLM(path, backend="reference") as llm:
            assert llm.generate("hi", max_tokens=1).token_ids
