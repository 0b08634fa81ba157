"""The cached models: listed, found, removed."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kukri.cli import app
from kukri.errors import UnsupportedError
from kukri.formats import hub
from kukri.formats.model_cache import cached_models, cached_path, remove
from tests.tiny_gguf import write_tiny

COMMIT = "0123456789" * 4


@pytest.fixture
def caches(cache_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A known model and a repository with two GGUF files, one in a blob as huggingface_hub stores it."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    default = hub.MODELS[hub.DEFAULT_MODEL].path
    default.parent.mkdir(parents=True)
    write_tiny(default)
    folder = tmp_path / "hub" / "models--org--tiny"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    (folder / "blobs").mkdir()
    write_tiny(folder / "blobs" / "abc")
    (snapshot / "tiny-Q8_0.gguf").symlink_to(Path("..", "..", "blobs", "abc"))
    write_tiny(snapshot / "tiny-F16.gguf")
    return folder


def test_cached_models_are_listed(caches: Path) -> None:
    """Catches a model that takes disk space and is not shown, or a link's size taken for the file's."""
    found = {model.name: model for model in cached_models()}
    assert list(found) == [hub.DEFAULT_MODEL, "org/tiny:tiny-F16.gguf", "org/tiny:tiny-Q8_0.gguf"]
    sizes = {model.n_bytes for model in found.values()}
    assert sizes == {(caches / "blobs" / "abc").stat().st_size}


def test_shards_are_one_model_of_the_newest_ones_time(caches: Path) -> None:
    """Catches a model that is shown as older than its last shard, or smaller than all shards."""
    for i in (1, 2):
        shard = caches / "snapshots" / COMMIT / f"model-0000{i}-of-00002.safetensors"
        shard.write_bytes(bytes(i))
        os.utime(shard, (0, 1000 * i))
    (found,) = (model for model in cached_models() if model.name == "org/tiny")
    assert (found.n_bytes, found.modified_s) == (3, 2000)


def test_names_lead_to_cached_files(caches: Path) -> None:
    """Catches a listed name that show or rm does not take, and a download for a question."""
    for model in cached_models():
        assert cached_path(model.name).resolve() == model.path.resolve()
    assert cached_path("org/tiny:Q8_0").name == "tiny-Q8_0.gguf"
    for name in ("org/other", "smollm3-3b", "nowhere"):
        with pytest.raises(UnsupportedError, match="was not found in the cache"):
            cached_path(name)


def test_removing_frees_what_was_listed(caches: Path, tmp_path: Path) -> None:
    """Catches a blob left behind, another model's file removed, or a path that a person meant to keep."""
    n_bytes = (caches / "blobs" / "abc").stat().st_size
    assert remove("org/tiny:Q8_0") == n_bytes
    assert not (caches / "blobs" / "abc").exists()
    assert [model.name for model in cached_models()] == [hub.DEFAULT_MODEL, "org/tiny:tiny-F16.gguf"]
    with pytest.raises(UnsupportedError, match="was not found in the cache"):
        remove("org/tiny:Q8_0")
    assert remove("org/tiny") > 0
    assert not caches.exists()
    own = write_tiny(tmp_path / "own.gguf")
    for name in (str(own), "..", "../hub", ""):
        with pytest.raises(UnsupportedError, match="was not found in the cache"):
            remove(name)
    assert own.exists()


@pytest.mark.full
def test_the_commands(caches: Path) -> None:
    """Catches output that does not name what it did."""

    def call(*arguments: str, code: int = 0) -> str:
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == code, done.output
        return done.output

    assert "org/tiny:tiny-F16.gguf" in call("list")
    assert "qwen3-0.6b" in call("list", "--known")
    assert "lfm1.0" in call("list", "--all")
    assert len(json.loads(call("list", "--json"))["models"]) == 3
    assert json.loads(call("show", "org/tiny:F16", "--json"))["n_parameters"] > 0
    assert "modules" not in call("show", "-m", "org/tiny:F16")
    assert "was not found in the cache" in call("show", "org/gone", code=2)
    assert "removed org/tiny:F16" in call("rm", "org/tiny:F16")
    assert "MODEL is required" in call("rm", code=2)
    assert "cached models" in call("list")
