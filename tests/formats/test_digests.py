"""Models that are pinned by a digest: `NAME@sha256:HEX` is compared with the files at each load."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import FormatError, UnsupportedError
from kukri.formats import hub
from kukri.formats.digests import model_digest, split_digest
from kukri.formats.model_cache import cached_path
from kukri.formats.repos import parse_name
from kukri.server.settings import default_name
from kukri.terminal.run import is_model
from kukri.terminal.served_models import configured_models
from tests.tiny_gguf import write_tiny

WRONG = "0" * 64


def sha256sum(folder: Path, *names: str) -> str:
    """The digest by the command that people have: of a file, or of the lines for several."""
    done = subprocess.run(["sha256sum", *names], cwd=folder, capture_output=True, check=True)
    if len(names) > 1:
        done = subprocess.run(["sha256sum"], input=done.stdout, capture_output=True, check=True)
    return done.stdout.decode().split()[0]


def test_a_file_is_compared_at_each_load(tmp_path: Path) -> None:
    """A file that was changed after it was pinned, and loads; a digest that is not looked at."""
    path = write_tiny(tmp_path / "m.gguf")
    pinned = f"{path}@sha256:{sha256sum(tmp_path, 'm.gguf').upper()}"
    with LLM(pinned, backend="reference") as llm:
        assert llm.path == path
    with path.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([file.read(1)[0] ^ 1]) if file.seek(-1, 2) else b"")
    with pytest.raises(FormatError, match=r"m\.gguf has the digest sha256:[0-9a-f]{64}, not sha256:"):
        LLM(pinned, backend="reference")
    with LLM(str(path), backend="reference"):
        pass


def test_a_model_of_several_files_has_the_digest_of_their_lines(tmp_path: Path) -> None:
    """A tokenizer, a part or an encoder of images that is exchanged under a pinned name."""
    directory = tmp_path / "model"
    (directory / "1_Pooling").mkdir(parents=True)
    names = ["1_Pooling/config.json", "config.json", "model.safetensors", "modules.json", "tokenizer.json"]
    for name in names:
        (directory / name).write_text(name)
    (directory / "notes.txt").write_text("not of the model")
    assert model_digest(directory) == sha256sum(directory, *names)
    before = hub.resolve(f"{directory}@sha256:{sha256sum(directory, *names)}")
    assert before == directory
    (directory / "tokenizer.json").write_text("another")
    with pytest.raises(FormatError, match="has the digest"):
        hub.resolve(f"{directory}@sha256:{sha256sum(directory, *names[:-1])}")
    for name in ("tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf", "mmproj-tiny.gguf"):
        (tmp_path / name).write_text(name)
    split = ["mmproj-tiny.gguf", "tiny-00001-of-00002.gguf", "tiny-00002-of-00002.gguf"]
    assert model_digest(tmp_path / split[1]) == sha256sum(tmp_path, *split)


def test_known_names_and_repositories_are_pinned_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name with a digest that no command knows, or that is served under the digest."""
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path))
    spec = hub.ModelSpec("tiny", "tiny-model", "1.0", "a/tiny.gguf", 5, "", 5)
    monkeypatch.setitem(hub.MODELS, "tiny", spec)
    spec.path.parent.mkdir(parents=True)
    spec.path.write_bytes(b"GGUF!")
    digest = sha256sum(spec.path.parent, spec.path.name)
    pinned = f"{spec.name}@sha256:{digest}"
    for read in (hub.resolve, hub.pull, cached_path):
        assert read(pinned) == spec.path
    for read in (hub.resolve, hub.pull):
        with pytest.raises(FormatError, match="correct the name"):
            read(f"{spec.name}@sha256:{WRONG}")
    assert hub.is_known(pinned)
    assert is_model(pinned)
    assert is_model(f"org/repo:Q4_K_M@sha256:{WRONG}")
    assert split_digest(f"org/repo@v1:Q8_0@sha256:{WRONG}") == ("org/repo@v1:Q8_0", WRONG)
    assert default_name(pinned) == spec.name
    assert default_name(f"a/b.gguf@sha256:{WRONG}") == "b"
    done = CliRunner().invoke(app, ["pull", spec.name, "--digest"])
    assert done.stdout == pinned + "\n"
    done = CliRunner().invoke(app, ["pull", pinned, "--digest", "--json"])
    assert json.loads(done.stdout)["digest"] == f"sha256:{digest}"
    (tmp_path / "kukri.toml").write_text(f'[models]\nsmall = "{pinned}"\n')
    (model,) = configured_models(tmp_path / "kukri.toml")
    assert hub.resolve(model.options.model) == spec.path


@pytest.mark.parametrize("digest", ["", "abc", WRONG + "0", "g" * 64])
def test_a_digest_that_is_none_is_named(digest: str) -> None:
    """A typing error taken for a branch called sha256."""
    name = f"org/repo@sha256:{digest}"
    assert parse_name(name) is None
    with pytest.raises(UnsupportedError, match="must be 64 hexadecimal digits"):
        hub.resolve(name)
