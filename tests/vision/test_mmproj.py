"""Encoders of images in GGUF files of their own: written, found and read as those of directories."""

from __future__ import annotations

import math
import re
import tracemalloc
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from benchmarks.pictures import picture
from kukri import LLM
from kukri.config import EmbeddingConfig
from kukri.errors import ConfigError, FormatError, KukriError, UnsupportedError, UnusedTensorError
from kukri.formats.checkpoint import Checkpoint, _with_mmproj, open_checkpoint
from kukri.formats.gguf import mmproj_names
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.split import find_mmproj
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.gguf.writer import write_gguf
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.stopwatch import within
from tests.vision.tiny_checkpoints import FAMILIES, save_with_processor
from tests.vision.tiny_vision import (
    IMAGE_TOKEN,
    image,
    our_logits,
    our_tokens,
    prompt,
    relative,
    their_inputs,
    their_tokens,
)

with lazy_imports():
    import torch

BOUND = 3e-3  # of the CPU
IN_GGUF = [name for name in FAMILIES if name != "lfm3_vl"]  # which the gguf package has no names for


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name == "gemma4-whole")) for name in IN_GGUF],
)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Path]:
    """A family's name, transformers' model, and the folder of `hf`, `tiny.gguf` and `mmproj-tiny.gguf`."""
    folder = tmp_path_factory.mktemp(request.param)
    (folder / "hf").mkdir()
    theirs = save_with_processor(folder / "hf", request.param)
    convert_model(folder / "hf", folder / "tiny.gguf", "F32", dry_run=False, as_json=True)
    return request.param, theirs, folder


@pytest.fixture(scope="module")
def run(pair: tuple[str, Any, Path]) -> Iterator[tuple[str, Any, LLM, Path]]:
    """As `pair`, with kukri's model of the GGUF files."""
    name, theirs, folder = pair
    with LLM(folder / "tiny.gguf", n_threads=1, max_requests=2) as llm:
        yield name, theirs, llm, folder


@pytest.mark.full(only=["qwen3_5", "gemma4"])
def test_logits_and_tokens_are_transformers_own(run: tuple[str, Any, LLM, Path]) -> None:
    """Catches a tensor under another's name, rows or colours in another order, a lost offset or section."""
    name, theirs, llm, _ = run
    asked = prompt(name, "ab", image(name, 2, 3), "cd", image(name, 1, 4), "what?")
    answer = our_tokens(llm.engine, asked, 12)
    with torch.no_grad():
        want = theirs(**their_inputs(name, asked)).logits[0].numpy()
        assert their_tokens(theirs, name, asked, answer) == answer
    assert relative(our_logits(llm.engine, asked), want) < BOUND


def test_encoder_and_processor_are_those_of_the_directory(run: tuple[str, Any, LLM, Path]) -> None:
    """Catches a key that is read or written in another sense, so that pictures come in another size."""
    name, _, llm, folder = run
    with LLM(folder / "hf", backend="reference") as other:
        ours, want = llm.vision.vision_config, other.vision.vision_config
        made, read = llm.image_processor, other.image_processor
    # float32 in the file, and so in the table that makes pixels
    np.testing.assert_array_equal(made.scale.table(), read.scale.table())
    assert replace(made, scale=read.scale) == read
    if name in ("qwen2_5_vl", "qwen3_5", "qwen3_vl"):
        assert ours == want
    assert (ours.family, ours.merge, ours.image_token_id) == (want.family, want.merge, IMAGE_TOKEN)


def test_names_and_keys_are_those_of_the_gguf_package(pair: tuple[str, Any, Path]) -> None:
    """Catches a name or key that llama.cpp does not look for."""
    name, _, folder = pair
    if name == "gemma4-unified":
        pytest.skip("gguf 0.19 lacks this family: test_libmtmd_makes_the_same_rows reads its names")
    constants = gguf.constants
    known = {
        constants.TENSOR_NAMES[tensor]
        for tensor in constants.MODEL_TENSORS[constants.MODEL_ARCH.MMPROJ]
        if tensor.name.startswith("V_")
    }
    with GGUFFile(folder / "mmproj-tiny.gguf") as file:
        for name in file.tensors:
            stem = re.sub(r"(?:\.weight|\.bias)?(?:\.1)?$|\.(?:in|out)put_(?:min|max)$", "", name)
            assert stem in {each.format(bid=i) for each in known for i in range(4)}, name
        vision = constants.Keys.ClipVision
        groups = (constants.Keys.Clip, vision, vision.Attention, vision.Projector, constants.Keys.General)
        keys = {value for group in groups for value in vars(group).values() if isinstance(value, str)}
        assert set(file.metadata) <= keys
        projectors = {v for v in vars(constants.VisionProjectorType).values() if isinstance(v, str)}
        assert file.metadata["clip.projector_type"] in projectors


def changed(source: Path, target: Path, keys: dict[str, Any], tensors: dict[str, Any] | None = None) -> Path:
    """A copy of a GGUF file with other keys and tensors; None takes one away."""
    with GGUFFile(source) as file:
        metadata = {**{key: file.metadata[key] for key in file.metadata}, **keys}
        kept = {n: (t.type, file.data(n).copy(), t.shape) for n, t in file.tensors.items()}
        kept = {n: t for n, t in {**kept, **(tensors or {})}.items() if t is not None}
        write_gguf(target, {key: value for key, value in metadata.items() if value is not None}, kept)
    return target


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "the text's own keys": (
        {"general.architecture": "llama"},
        "must hold an encoder of images: give an mmproj file",
    ),
    "another width": ({"clip.vision.projection_dim": 4096}, "projection_dim.*is 4096"),
    "an unknown family": ({"clip.projector_type": "minicpmv"}, "projector_type.*'minicpmv'"),
    "no family": ({"clip.projector_type": None}, "projector_type.*missing"),
    "another activation": ({"clip.use_gelu": None}, "use_gelu"),
    "no layers stated": ({"clip.vision.block_count": None}, "block_count.*missing"),
    "endless layers": ({"clip.vision.block_count": 2**31 - 1}, "block_count.*must be from"),
    "more layers than there are": ({"clip.vision.block_count": 9}, "v.blk.3.*missing"),
    "endless heads": ({"clip.vision.attention.head_count": 2**31 - 1}, "num_attention_heads"),
    "endless tiles": ({"clip.vision.image_size": 2**31 - 8}, "image_size"),
    "larger tiles": ({"clip.vision.image_size": 64}, "position_embd.*shape"),
    "wider patches": ({"clip.vision.patch_size": 16}, "shape"),
    "no patches": ({"clip.vision.patch_size": 0}, "patch_size.*must be from"),
    "endless width": ({"clip.vision.embedding_length": 2**31 - 1}, "hidden_size.*must be from"),
    "endless merging": ({"clip.vision.projector.scale_factor": 2**31 - 1}, "scale_factor"),
    "no epsilon": ({"clip.vision.attention.layer_norm_epsilon": float("nan")}, "layer_norm_epsilon"),
    "two colours": ({"clip.vision.image_mean": [0.5, 0.5]}, "image_mean"),
    "words for colours": ({"clip.vision.image_std": "white"}, "image_std"),
}


@pytest.fixture(scope="module")
def idefics3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a GGUF model that sees."""
    folder = tmp_path_factory.mktemp("idefics3")
    (folder / "hf").mkdir()
    save_with_processor(folder / "hf", "idefics3")
    convert_model(folder / "hf", folder / "tiny.gguf", "F32", dry_run=False, as_json=True)
    return folder


@pytest.mark.parametrize("case", WRONG)
def test_a_broken_file_is_refused(case: str, idefics3: Path, tmp_path: Path) -> None:
    """Catches a number of a hostile file that decides how much memory is taken, or is believed."""
    keys, message = WRONG[case]
    path = changed(idefics3 / "mmproj-tiny.gguf", tmp_path / "mmproj.gguf", keys)
    with pytest.raises(KukriError, match=message):
        LLM(idefics3 / "tiny.gguf", mmproj=path, backend="reference")


HUGE_OR_NONE = (-1, 0, 1, 3, 2**31 - 1, 2**63, 2**64 - 1, math.nan, math.inf, 1e308, "", [], [-1, 2**63])


@pytest.mark.parametrize("value", HUGE_OR_NONE, ids=str)
def test_no_field_takes_memory_or_ends_the_process(
    value: Any, idefics3: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a field of the encoder's that is believed: memory by a number, a kernel beyond its array."""
    with GGUFFile(idefics3 / "mmproj-tiny.gguf") as file, GGUFFile(idefics3 / "tiny.gguf") as text:
        stated = {key: file.metadata[key] for key in file.metadata}
        opened = Checkpoint(
            text.path, model_config(text), text, partial(GGUFWeights, text), {}, EmbeddingConfig()
        )
        said = []
        for key in stated:
            monkeypatch.setattr(file, "metadata", {**stated, key: value})
            tracemalloc.start()
            try:
                with within(2, key):
                    seeing = _with_mmproj(opened, text, file, is_named=True)
                    processor = seeing.image_processor()
                    assert processor is not None
                    made = processor.prepare(picture(40, 50))
                    seeing.load_vision()
                    assert made.n_tokens >= 1
            except KukriError as error:
                said.append(str(error))
            finally:
                _, peak = tracemalloc.get_traced_memory()
                tracemalloc.stop()
            assert peak < 64 << 20, key
    assert said
    assert not [text for text in said if "\n" in text]


SOUND = ("a.conv1d.0.weight", "mm.a.input_projection.weight")


def test_tensors_are_all_there_and_none_is_left(idefics3: Path, tmp_path: Path) -> None:
    """Catches an encoder that runs without a part of it, or with one that nobody reads."""
    source, text = idefics3 / "mmproj-tiny.gguf", idefics3 / "tiny.gguf"
    lost = changed(source, tmp_path / "lost.gguf", {}, {"v.blk.1.ffn_up.bias": None})
    with pytest.raises(FormatError, match=r"v\.blk\.1\.ffn_up\.bias.*is missing|is missing.*ffn_up"):
        LLM(text, mmproj=lost, backend="reference")
    with GGUFFile(source) as file:
        one = file.tensors["v.post_ln.bias"]
        more = {"v.class_embd": (one.type, file.data(one.name).copy(), one.shape)}
        path = changed(source, tmp_path / "more.gguf", {}, more)
    with pytest.raises(UnusedTensorError, match=r"takes: 'v\.class_embd"):
        LLM(text, mmproj=path, backend="reference")
    of_sound = {name: (one.type, np.zeros(4 * one.shape[0], np.uint8), one.shape) for name in SOUND}
    heard = changed(source, tmp_path / "sound.gguf", {"clip.has_audio_encoder": True}, of_sound)
    with LLM(text, mmproj=heard, backend="reference") as llm:
        assert llm.image_processor is not None


def test_a_text_is_converted_without_an_encoder_that_gguf_has_no_name_for(
    idefics3: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Catches a StopIteration in place of a sentence."""
    monkeypatch.delitem(mmproj_names.FAMILIES, "idefics3")
    convert_model(idefics3 / "hf", tmp_path / "tiny.gguf", "F32", dry_run=False, as_json=True)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]
    assert "left out: encoder 'idefics3' is not supported by GGUF" in capsys.readouterr().err


def test_an_encoder_is_no_model_and_no_directory_needs_one(idefics3: Path) -> None:
    """Catches a message that leaves a user alone with the wrong one of two files."""
    with pytest.raises(UnsupportedError, match=r"'clip'.*--mmproj"):
        LLM(idefics3 / "mmproj-tiny.gguf", backend="reference")
    with pytest.raises(ConfigError, match=r"'mmproj' \(--mmproj\) is not supported"):
        LLM(idefics3 / "hf", mmproj=idefics3 / "mmproj-tiny.gguf", backend="reference")


def test_a_file_is_found_by_its_name(tmp_path: Path) -> None:
    """Catches the encoder of another model in a folder of many, or one that is missed."""
    model = tmp_path / "SmolVLM-256M-Instruct-Q8_0.gguf"
    names = ["SmolVLM-256M-Instruct-Q8_0.gguf", "gemma-3-4b-Q4_0.gguf", "mmproj-gemma-3-4b-F16.gguf"]
    for name in names:
        (tmp_path / name).touch()
    assert find_mmproj(model) is None
    for name in ("mmproj-BF16.gguf", "mmproj-F16.gguf", "mmproj-SmolVLM-256M-Instruct-f16.gguf"):
        (tmp_path / name).touch()
        assert find_mmproj(model) == tmp_path / name
    assert find_mmproj(tmp_path / names[1]) == tmp_path / names[2]
    assert find_mmproj(tmp_path) is None


def test_another_models_encoder_next_to_a_text_model_is_left_alone(
    idefics3: Path, tmp_path: Path, caplog: Any
) -> None:
    """Catches a text model that no longer opens because of a file next to it."""
    (tmp_path / "tiny.gguf").write_bytes((idefics3 / "tiny.gguf").read_bytes())
    changed(idefics3 / "mmproj-tiny.gguf", tmp_path / "mmproj.gguf", {"clip.vision.projection_dim": 4096})
    with LLM(tmp_path / "tiny.gguf", backend="reference") as llm:
        assert llm.image_processor is None
    assert "is of another model" in caplog.text
    changed(idefics3 / "mmproj-tiny.gguf", tmp_path / "mmproj.gguf", {"clip.projector_type": "new"})
    with LLM(tmp_path / "tiny.gguf", backend="reference") as llm:
        assert llm.image_processor is None
    assert "'new'" in caplog.text


@pytest.mark.full
def test_pages_of_another_encoder_are_not_found(idefics3: Path, tmp_path: Path) -> None:
    """Catches saved prefixes with an image in them that outlive a change of the encoder alone."""
    source, text = idefics3 / "mmproj-tiny.gguf", idefics3 / "tiny.gguf"
    with GGUFFile(source) as file:
        one = file.tensors["mm.model.fc.weight"]
        other = {one.name: (one.type, (2 * file.array(one.name)).view(np.uint8), one.shape)}
        path = changed(source, tmp_path / "mmproj.gguf", {}, other)
    asked, found = prompt("idefics3", "a" * 90, image("idefics3", 2), "b" * 60), []
    for mmproj, n_encoded in ((source, 1), (path, 1), (source, 0)):
        with LLM(text, mmproj=mmproj, prefix_dir=tmp_path / "pages") as llm:
            found.append(our_tokens(llm.engine, asked, 6))
            assert llm.engine.encodings.n_encoded == n_encoded
    assert found[0] == found[2]


# height and width that neither of both resizes
SIZES = {
    **{
        "gemma3": (64, 64),
        "idefics3": (32, 32),
        "lfm2_vl": (64, 64),
        "mistral3": (48, 32),
        "llava": (48, 32),
        "lighton_ocr": (48, 32),
    },
    # whose learned places libmtmd averages where there are fewer patches than places, 7 a side
    "paddleocr_vl": (40, 32),
    **{"qwen2_5_vl": (120, 128), "qwen3_vl": (40, 24), "qwen3_5": (40, 24)},
    **{"gemma4": (192, 192), "gemma4-whole": (156, 252), "gemma4-unified": (192, 192)},
}


@pytest.mark.slow
def test_libmtmd_makes_the_same_rows(pair: tuple[str, Any, Path], tmp_path: Path) -> None:
    """Catches a file that only kukri understands: run with llama-cpp-python that has libmtmd."""
    pytest.importorskip("llama_cpp.mtmd_cpp", exc_type=Exception)
    from benchmarks.llama_mtmd import LibMtmd

    name, _, folder = pair
    keys: dict[str, Any] = {}
    if name == "qwen2_5_vl":  # the side of whose windows is a constant there
        keys = {"clip.vision.window_size": 112, "clip.vision.image_max_pixels": 1 << 16}
    if name.startswith("gemma4"):  # of which it makes 252 to 280 tokens, squares of 12 pixels here
        keys = {"clip.vision.image_max_pixels": 280 * 144}
    mmproj = changed(folder / "mmproj-tiny.gguf", tmp_path / "m.gguf", keys)
    seen = picture(*SIZES[name])
    with LLM(folder / "tiny.gguf", mmproj=mmproj, n_threads=1) as llm:
        assert llm.image_processor is not None
        made, rows = llm.image_processor.prepare(seen), None
        while rows is None:
            rows = llm.engine.encodings.advance(made, is_brief=False)
    other = LibMtmd(folder / "tiny.gguf", mmproj, 1)
    want = other.rows(seen)
    other.close()
    if name in ("llava", "mistral3"):  # with a row of [IMG_BREAK] after each row but the last
        with GGUFFile(mmproj) as file:
            ends = file.array("v.token_embd.img_break")
        is_end = (want == ends).all(axis=1)
        assert is_end.sum() == SIZES[name][0] // (4 if name == "llava" else 8) - 1
        want = want[~is_end]
    assert rows.shape == want.shape
    # its GELU is a table of float16
    assert relative(rows, want) < 0.01


def test_changed_bytes_are_refused_or_change_numbers(pair: tuple[str, Any, Path], tmp_path: Path) -> None:
    """Catches a parser's own error, or memory that a file merely claims."""
    name, _, folder = pair
    whole, random = (folder / "mmproj-tiny.gguf").read_bytes(), np.random.default_rng(len(name))
    path, n_refused = tmp_path / "mmproj.gguf", 0
    for _ in range(20):
        changed = bytearray(whole)
        for place in random.integers(0, 6000, 3):
            changed[place] = random.integers(0, 256)
        path.write_bytes(changed)
        try:
            with open_checkpoint(folder / "tiny.gguf", None, path) as checkpoint:
                checkpoint.load_vision()
        except KukriError:
            n_refused += 1
    assert n_refused > 0
