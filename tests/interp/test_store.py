"""Stores of activations: what is in them, and how they continue."""

from __future__ import annotations

import json

import numpy as np
import pytest
import safetensors.numpy
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError, FormatError, HookError
from kukri.interp.store import ActivationStore, write_store
from tests.tiny_gguf import write_tiny

TEXTS = ["Once upon a time there was a fox. " * 3, "And a crow.", "A" * 70]
NAMES = ["resid_post0", "blocks.1.attn.hook_z"]
FULL = ["blocks.0.hook_resid_post", "blocks.1.attn.hook_z"]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return write_tiny(tmp_path_factory.mktemp("store") / "tiny.gguf")


@pytest.fixture(scope="module")
def llm(path):
    with LLM(path, backend="reference") as opened:
        yield opened


def write(llm, folder, **options):
    return write_store(llm, TEXTS, NAMES, folder, **{"context": 32, "shard_bytes": 20_000, **options})


def test_a_store_holds_the_activations(llm, tmp_path):
    """Rows of another token or position, padding that is stored, windows lost at the end of a shard."""
    seen = []
    report = write(llm, tmp_path / "s", progress=lambda done, total: seen.append((done, total)))
    n_tokens = sum(len(llm.tokenizer.encode(text)) for text in TEXTS)
    assert report.n_tokens == n_tokens
    assert report.n_shards == report.n_written == len(seen) > 1
    assert seen[-1] == (n_tokens, n_tokens)
    store = ActivationStore(tmp_path / "s")
    assert store.names == FULL
    shards = [safetensors.numpy.load_file(one) for one in store.shards]
    assert {array.dtype.name for array in shards[0].values()} == {"float16", "int32"}
    whole = {name: np.concatenate([shard[name] for shard in shards]) for name in shards[0]}
    at = 0
    for text in TEXTS:
        ids = np.array(llm.tokenizer.encode(text))
        for start in range(0, len(ids), 32):
            window = ids[start : start + 32]
            _, cache = llm.run_with_cache(window, names=NAMES)
            rows = slice(at, at + len(window))
            np.testing.assert_array_equal(whole["tokens"][rows], window)
            np.testing.assert_array_equal(whole["positions"][rows], np.arange(len(window)))
            for name in FULL:
                expected = cache[name][0].reshape(len(window), -1)
                np.testing.assert_allclose(whole[name][rows], expected, atol=2e-3, rtol=2e-3)
            at += len(window)
    assert at == n_tokens
    batches = list(store.batches(FULL[0], 16))
    assert {batch.shape for batch in batches} == {(16, 64)}
    assert len(batches) == n_tokens // 16
    np.testing.assert_array_equal(np.concatenate(batches), whole[FULL[0]][: 16 * len(batches)])
    mixed = np.concatenate(list(store.batches(FULL[0], 1, seed=1)))
    assert not np.array_equal(mixed, whole[FULL[0]])
    np.testing.assert_array_equal(np.sort(mixed, axis=0), np.sort(whole[FULL[0]].astype(np.float32), axis=0))


def test_a_store_continues_where_it_stopped(llm, tmp_path):
    """Shards that are computed twice, or belong to other texts."""
    folder = tmp_path / "s"
    report = write(llm, folder, shuffle=5)
    contents = {one.name: one.read_bytes() for one in folder.iterdir()}
    gone = sorted(folder.glob("*.safetensors"))[1]
    gone.unlink()
    again = write(llm, folder, shuffle=5)
    assert (again.n_written, again.n_shards) == (1, report.n_shards)
    assert {one.name: one.read_bytes() for one in folder.iterdir()} == contents
    plain = write(llm, tmp_path / "plain")
    first, second = (ActivationStore(one) for one in (folder, tmp_path / "plain"))
    rows = [np.concatenate(list(store.batches(FULL[1], 1))) for store in (first, second)]
    assert not np.array_equal(*rows)
    np.testing.assert_array_equal(*[np.sort(one, axis=0) for one in rows])
    assert plain.n_tokens == report.n_tokens
    for options in ({"shuffle": 6}, {"context": 16}):
        with pytest.raises(ConfigError, match="other texts or options"):
            write(llm, folder, **{"shuffle": 5, **options})


def test_wrong_stores_are_refused(llm, tmp_path):
    """A pattern in rows of tokens, an empty text, a directory of something else."""
    with pytest.raises(ConfigError, match="no row for each token"):
        write_store(llm, TEXTS, ["pattern0"], tmp_path / "a")
    with pytest.raises(HookError, match="was not found"):
        write_store(llm, TEXTS, ["resid_post7"], tmp_path / "a")
    with pytest.raises(ConfigError, match="the texts must not be empty"):
        write_store(llm, [], NAMES, tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(FormatError):
        ActivationStore(tmp_path)
    (tmp_path / "store.json").write_text("{}")
    with pytest.raises(FormatError, match="must be a store of activations"):
        ActivationStore(tmp_path)


def test_the_command(path, tmp_path):
    """Options that are lost, JSON lines read as text."""
    source = tmp_path / "texts.jsonl"
    source.write_text("\n".join(json.dumps({"text": text}) for text in TEXTS))
    command = [
        "activations",
        str(source),
        "-m",
        str(path),
        "--backend",
        "reference",
        "--out",
        str(tmp_path / "o"),
    ]
    command += ["--names", NAMES[0], "--names", NAMES[1], "--context", "32", "--shard-size", "20KB"]
    result = CliRunner().invoke(app, [*command, "--json"])
    assert result.exit_code == 0, result.output
    report = json.loads(result.output)
    assert report["names"] == FULL
    assert report["n_written"] == report["n_shards"] > 1
    again = CliRunner().invoke(app, command)
    assert "; 0 of them new" in again.output
    source.write_text("[1]")
    assert CliRunner().invoke(app, command).exit_code == 2
    assert CliRunner().invoke(app, command[:4]).exit_code == 2
