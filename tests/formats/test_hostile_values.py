"""Any value under any key of any file: read, or refused by one error of kukri's that names the file."""

from __future__ import annotations

import itertools
import json
import math
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri.errors import ConfigError, FormatError, KukriError, MissingKernelError, UnsupportedError, reading
from kukri.formats.adapters import read_adapter
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.config import NEUTRAL, READ, model_config, unknown_keys
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.gguf.writer import write_gguf
from kukri.formats.headers import read_headers
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.formats.imatrix import ImportanceMatrix, read_imatrix, write_imatrix
from kukri.formats.sampling_advice import gguf_advice
from kukri.formats.sentence_transformers import gguf_embedding
from kukri.interp.features.control_vectors import ControlVector
from kukri.interp.features.readers import Probe, SparseAutoencoder
from kukri.models import load_model
from kukri.models.keys import Keys
from kukri.quant.types import QUANT_TYPES
from kukri.terminal.convert import convert_model
from kukri.tokenizer import Tokenizer, load_tokenizer
from tests.models.lora_files import random_updates, write_gguf_adapter, write_peft
from tests.models.tiny_encoders import save as save_encoder
from tests.stopwatch import within
from tests.test_llm_safetensors import make

DEEP: Any = []
for _ in range(400):
    DEEP = [DEEP]
HOSTILE: list[Any] = [
    *(None, True, False, 0, -1, 1, 3, 2**31 - 1, 2**63, -(2**63), 10**300),
    *(0.0, -0.5, 1e308, -1e308, 5e-324, math.nan, math.inf),
    *("", "x", "\ud800", "\0", "../../x", "9" * 20_000),
    *([], [0], [-1, 2**63], [None], ["x"], [[]], {}, {"a": 1}, {"rope_type": 7}, DEEP),
]
# a GGUF file's values, as its reader gives them
STORED: list[Any] = [
    *(True, False, 0, -1, 1, 3, 2**31 - 1, 2**63, 2**64 - 1, 0.0, -0.5, 1e308, 5e-324, math.nan, math.inf),
    *("", "x", "\0", "../../x", "9" * 20_000, [], ["x"], [""] * 5),
    *(np.array(values, dtype) for values in ([], [0], [1, 1, 1, 1], [2, 4, 2, 4]) for dtype in ("i4", "u8")),
    *(np.array([value] * 4, "f8") for value in (math.nan, 1e308, -1.0)),
    np.array([True] * 4),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of values in JSON, of the first three of a long list or object."""
    if path:
        yield path
    if isinstance(value, dict | list):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        for key, item in items[: 3 if len(items) > 100 else None]:
            yield from places(item, (*path, key))


def replaced(value: Any, path: tuple[Any, ...], hostile: Any) -> Any:
    """A copy with another value at a place."""
    if not path:
        return hostile
    made = dict(value) if isinstance(value, dict) else list(value)
    made[path[0]] = replaced(made[path[0]], path[1:], hostile)
    return made


def attempt(read: Callable[[], Any], path: Path, what: str) -> None:
    """Fails for anything but an answer or one line of kukri's that names the file, within two seconds."""
    found: KukriError | None = None
    with within(2, what):
        try:
            read()
        except KukriError as error:
            found = error
        except BaseException as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {str(error)[:200]}") from error
    if found is not None:
        text = str(found)
        assert str(path) in text, f"{what}: {text}"
        assert "\n" not in text, what
        assert len(text) < 1000, what


@pytest.fixture(params=[150, pytest.param(1 << 30, marks=pytest.mark.slow)], ids=["some", "all"])
def n_cases(request: pytest.FixtureRequest) -> int:
    """The most values that a test attempts."""
    return int(request.param)


def some(cases: list[Any], n_cases: int) -> list[Any]:
    """A sample of cases, another for each file."""
    return random.Random(len(cases)).sample(cases, min(n_cases, len(cases)))


def attempt_json(
    file: Path, read: Callable[[], Any], root: Path, n_cases: int, more: tuple[str, ...] = ()
) -> None:
    """Attempts hostile values at the places of a file, and under keys that it lacks."""
    text = file.read_text()
    contents = json.loads(text)
    if isinstance(contents, dict):
        contents |= dict.fromkeys(more, 0)
    try:
        for path, hostile in some([(p, h) for p in places(contents) for h in HOSTILE], n_cases):
            file.write_text(json.dumps(replaced(contents, path, hostile)))
            attempt(read, root, f"{file.name} {path} {str(hostile)[:60]}")
    finally:
        file.write_text(text)


def opened(path: Path) -> None:
    """Opens a model as the engine does, down to the weights and a text."""
    with open_checkpoint(path) as checkpoint:
        load_model(checkpoint.weights(checkpoint.config), checkpoint.config)
        load_tokenizer(checkpoint.tokenizer).encode("Hello", add_special=True)
    read_headers(path)


KINDS = ("llama", "phi3-longrope", "gpt_oss", "lfm2-adjusted", "qwen3_5_text", "gemma3_text-pattern")
KINDS += ("gemma4_text", "gemma4_moe_text")
KINDS += ("granitemoehybrid", "olmo3-yarn", "smollm3")
MODULES = {"Transformer": "", "Pooling": "1", "Dense": "2", "Normalize": "3"}
ENCODER_FILES = {
    "modules.json": [{"type": f"x.{kind}", "path": path} for kind, path in MODULES.items()],
    "1/config.json": {"pooling_mode": "mean", "include_prompt": True},
    "2/config.json": {"in_features": 64, "out_features": 4, "bias": False, "activation_function": "Tanh"},
    "config_sentence_transformers.json": {"prompts": {"query": "q: "}, "default_prompt_name": "query"},
    "sentence_bert_config.json": {"max_seq_length": 12},
}


@pytest.mark.full(but=["some-llama", "some-qwen3_5_text"])
@pytest.mark.parametrize("kind", KINDS)
def test_config_json(kind: str, tmp_path: Path, n_cases: int) -> None:
    """Division by zero, an overflow, a TypeError for a config.json from anywhere."""
    directory, _ = make(tmp_path / "hf", kind)
    attempt_json(directory / "config.json", lambda: opened(directory), directory, n_cases, ("rope_scaling",))


@pytest.mark.full
def test_files_beside_config_json(tmp_path: Path, n_cases: int) -> None:
    """The same in a tokenizer's files and in generation_config.json; a panic of the tokenizer library."""
    directory, _ = make(tmp_path / "hf", "llama", max_shard_size="100KB")
    (directory / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        attempt_json(directory / name, lambda: opened(directory), directory, n_cases)
    for name in ("generation_config.json", "model.safetensors.index.json"):
        attempt_json(directory / name, lambda: opened(directory), directory, n_cases)


@pytest.mark.full
def test_an_encoders_files(tmp_path: Path, n_cases: int) -> None:
    """The same in sentence-transformers' files."""
    save_encoder(tmp_path, "bert")
    for name, contents in ENCODER_FILES.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(json.dumps(contents))
    arrays = {"linear.weight": np.ones((4, 64), np.float32)}
    (tmp_path / "2/model.safetensors").write_bytes(safetensors_bytes(arrays))
    opened(tmp_path)
    for name in ("config.json", *ENCODER_FILES):
        attempt_json(tmp_path / name, lambda: opened(tmp_path), tmp_path, n_cases)


@pytest.mark.full(but=["some-llama"])
@pytest.mark.representative(2)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_of_gguf_files(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, n_cases: int) -> None:
    """The same under each key of a GGUF file."""
    path = tmp_path / "model.gguf"
    convert_model(make(tmp_path / "hf", kind)[0], path, None, dry_run=False, as_json=True)
    with GGUFFile(path) as file:
        keys = {key: file.metadata[key] for key in file.metadata}
        lacking = {f"{keys['general.architecture']}.{key}": 0 for key in READ | {*NEUTRAL}}
        own = ["tokenizer.ggml.kukri.lstrip", "tokenizer.ggml.kukri.prepends_once", "kukri.embedding"]
        lacking |= dict.fromkeys([*own, "general.sampling.top_k"], 0)
        keys = {**lacking, "tokenizer.ggml.scores": 0, "tokenizer.ggml.pre": "qwen2"} | keys
        del keys["general.name"]

        def read() -> None:
            config = model_config(file)
            unknown_keys(file)
            gguf_advice(file.metadata)
            gguf_embedding(file, config.architecture)
            load_model(GGUFWeights(file, config), config)
            tokenizer = Tokenizer.from_gguf(file)
            tokenizer.decode(tokenizer.encode("Hello", add_special=True, parse_special=True))

        for key, hostile in some([(key, value) for key in keys for value in STORED], 3 * n_cases):
            stated = {k: v for k, v in keys.items() if k not in lacking or k == key}
            monkeypatch.setattr(file, "metadata", {**stated, key: hostile})
            attempt(read, path, f"{key} {str(hostile)[:60]}")


COUNTS = (-1, 2**31 - 1, 2**63, 10**300)


@pytest.mark.full
def test_no_number_takes_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that a count of layers, tokens or experts decides before the file is looked at."""
    directory, _ = make(tmp_path / "hf", "llama")
    path = tmp_path / "model.gguf"
    convert_model(directory, path, None, dry_run=False, as_json=True)
    text = (directory / "config.json").read_text()
    stated = json.loads(text)
    numbers = [key for key, value in stated.items() if type(value) is int]
    assert {"num_hidden_layers", "vocab_size", "hidden_size"} <= {*numbers}
    with GGUFFile(path) as file:
        keys = {key: file.metadata[key] for key in file.metadata}

        def of_gguf(key: str, count: int) -> None:
            monkeypatch.setattr(file, "metadata", {**keys, key: count})
            config = model_config(file)
            load_model(GGUFWeights(file, config), config)
            Tokenizer.from_gguf(file)

        def of_json(key: str, count: int) -> None:
            (directory / "config.json").write_text(json.dumps({**stated, key: count}))
            opened(directory)

        cases = [(of_gguf, key) for key, value in keys.items() if type(value) is int]
        cases += [(of_json, key) for key in numbers]
        assert len(cases) > 20
        for (read, key), count in itertools.product(cases, COUNTS):
            tracemalloc.start()
            attempt(lambda read=read, key=key, count=count: read(key, count), tmp_path, f"{key} {count}")
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 32 << 20, (key, count)


def test_settings_of_adapters(tmp_path: Path, n_cases: int) -> None:
    """The same in an adapter's settings, as PEFT has them and as GGUF does."""
    directory, theirs = make(tmp_path / "hf", "llama")
    updates = random_updates(theirs, ("q_proj",))
    adapter = write_peft(tmp_path / "adapter", updates)
    with open_checkpoint(directory) as checkpoint:
        model = load_model(checkpoint.weights(checkpoint.config), checkpoint.config)
    attempt_json(adapter / "adapter_config.json", lambda: read_adapter(adapter, model), tmp_path, n_cases)
    names = ("general__type", "general__architecture", "adapter__type", "adapter__lora__alpha")
    for name in names:
        for hostile in STORED:
            if isinstance(hostile, list | str) or (isinstance(hostile, int) and hostile >= 0):
                path = write_gguf_adapter(tmp_path / "a.gguf", updates, 16, **{name: hostile})
                attempt(lambda path=path: read_adapter(path, model), path, f"{name} {str(hostile)[:60]}")


def test_headers_of_safetensors(tmp_path: Path, n_cases: int) -> None:
    """The same in the header of a safetensors file: of weights, a probe and an autoencoder."""
    path = tmp_path / "p.safetensors"
    arrays = {"weight": np.ones((2, 8), np.float32), "bias": np.ones(2, np.float32)}
    data = safetensors_bytes(arrays, {"hook_name": "blocks.0.hook_resid_post", "labels": '["a", "b"]'})
    n = int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8 : 8 + n]), data[8 + n :]
    for place, hostile in some([(p, h) for p in places(header) for h in HOSTILE], 3 * n_cases):
        text = json.dumps(replaced(header, place, hostile)).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + body)
        attempt(lambda: Probe.load(path), path, f"{place} {str(hostile)[:60]}")


def test_settings_of_autoencoders(tmp_path: Path, n_cases: int) -> None:
    """The same in SAELens' cfg.json."""
    arrays = {"W_enc": (8, 16), "b_enc": (16,), "W_dec": (16, 8), "b_dec": (8,)}
    made = {name: np.ones(shape, np.float32) for name, shape in arrays.items()}
    (tmp_path / "sae_weights.safetensors").write_bytes(safetensors_bytes(made))
    facts = {"architecture": "topk", "hook_name": "blocks.0.hook_resid_post", "k": 4, "d_in": 8}
    facts |= {"normalize_activations": "none", "apply_b_dec_to_input": True, "metadata": {"hook_name": "x"}}
    (tmp_path / "cfg.json").write_text(json.dumps(facts))
    SparseAutoencoder.load(tmp_path)
    attempt_json(tmp_path / "cfg.json", lambda: SparseAutoencoder.load(tmp_path), tmp_path, n_cases)


def test_importance_matrices_and_control_vectors(tmp_path: Path) -> None:
    """The same in GGUF files that hold no model, and in imatrix's older form, cut at each byte."""
    path = tmp_path / "imatrix.gguf"
    sums = {"blk.0.attn_q.weight": np.ones(8, np.float32)}
    for n_chunks, counts in ((2**31, 1.0), (0, 0.0), (1, math.nan), (1, math.inf), (1, -1.0), (1, 5e-324)):
        write_imatrix(path, ImportanceMatrix(sums, dict.fromkeys(sums, counts), ("x",), n_chunks))
        attempt(lambda: read_imatrix(path), path, f"{n_chunks} {counts}")
    name = b"blk.0.attn_q.weight"
    old = struct.pack(f"<ii{len(name)}sii2f", 1, len(name), name, 3, 2, 1.0, 2.0) + struct.pack("<ii", 3, 0)
    old_path = tmp_path / "imatrix.dat"
    for i in range(len(old)):
        for data in (old[:i], old[:i] + b"\xff" * 4 + old[i + 4 :], old[:i] + bytes(4) + old[i + 4 :]):
            old_path.write_bytes(data)
            attempt(lambda: read_imatrix(old_path), old_path, f"byte {i}")
    f32 = QUANT_TYPES["F32"]
    vector = tmp_path / "vector.gguf"
    for number in ("1", "", "-1", "99999999999", "\u0664"):
        for shape in ((8,), (2, 4), (1, 1, 1, 8)):
            tensors = {f"direction.{number}": (f32, np.full(8, np.nan, np.float32), shape)}
            write_gguf(vector, {"general.architecture": "controlvector"}, tensors)
            attempt(lambda: ControlVector.load(vector), vector, f"{number} {shape}")


ERRORS = [ZeroDivisionError("x"), KeyError("a\nb"), RecursionError(), MemoryError(), struct.error("y")]


class PanicException(BaseException):
    """As `tokenizers` raises it."""


@pytest.mark.parametrize("error", [*ERRORS, PanicException("range end 2\nout of range")], ids=repr)
def test_whatever_is_raised_while_reading_is_one_error(error: BaseException, tmp_path: Path) -> None:
    """An exception of Python's or a library's that reaches the user raw."""
    keys = Keys({"size": 3}, tmp_path)
    want = rf"^{tmp_path}: key 'size', or one before it, holds something.*{type(error).__name__}"
    keys.whole("size")
    with pytest.raises(FormatError, match=want) as caught, keys.reading():
        raise error
    assert "\n" not in str(caught.value)


def test_errors_of_our_own_stay_what_they_are(tmp_path: Path) -> None:
    """An error that loses its kind or names its file twice; Ctrl+C taken for a broken file."""
    for path in (tmp_path, None):
        with pytest.raises(UnsupportedError, match=rf"^{tmp_path}: says why$"), reading(path):
            raise UnsupportedError(f"{tmp_path}: says why")
    with pytest.raises(MissingKernelError, match=rf"^{tmp_path}: says why$"), reading(tmp_path):
        raise MissingKernelError("says why")
    with pytest.raises(FormatError, match=rf"^{tmp_path}: makes no sense$"), reading(tmp_path):
        raise ConfigError("makes no sense")
    with pytest.raises(KeyboardInterrupt), reading(tmp_path):
        raise KeyboardInterrupt
