"""Split GGUF models: parts that the `gguf` package writes are the same model as one file."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from kukri import LLM
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.repos import RepoName, choose
from tests.tiny_gguf import write_tiny


def split(source: Path, directory: Path, **limits: int) -> list[Path]:
    """A GGUF file's model as the package splits it."""
    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(directory / "m.gguf", "llama", **limits)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name == "general.architecture":
            continue
        item_type = field.types[-1] if field.types[0] is gguf.GGUFValueType.ARRAY else None
        if item_type is None or len(field.contents()):
            writer.add_key_value(field.name, field.contents(), field.types[0], item_type)
    finish(writer, reader)
    return sorted(directory.glob("*.gguf"))


def finish(writer: gguf.GGUFWriter, reader: gguf.GGUFReader) -> None:
    """Writes the keys that the writer has, and the reader's tensors."""
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("whole") / "tiny.gguf", weight_type="Q8_0")


@pytest.fixture(scope="module")
def made(whole: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    parts = split(whole, tmp_path_factory.mktemp("parts"), split_max_tensors=7)
    assert [path.name for path in parts] == [f"m-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    return parts


@pytest.fixture
def parts(made: list[Path], tmp_path: Path) -> list[Path]:
    """Copies to damage."""
    return [Path(shutil.copy(path, tmp_path)) for path in made]


@pytest.mark.parametrize(
    "limits",
    [
        {"split_max_tensors": 7},
        {"split_max_size": 40_000},
        {"split_max_tensors": 7, "small_first_shard": True},
    ],
    ids=str,
)
def test_a_split_model_gives_the_single_files_logits(whole: Path, tmp_path: Path, limits: Any) -> None:
    """Tensors of another part's offset, keys of the wrong part, a first part without tensors."""
    parts = split(whole, tmp_path, **limits)
    assert len(parts) > 2
    with LLM(whole, backend="reference") as llm:
        want = llm.logits(list(range(20)))
    for opened in (parts[0], parts[-1]):
        with LLM(opened, backend="reference") as llm:
            assert llm.path == opened
            np.testing.assert_array_equal(llm.logits(list(range(20))), want)


def test_any_part_opens_all(made: list[Path], whole: Path) -> None:
    """A part opened alone, or a tensor blamed on a file that does not hold it."""
    single = GGUFFile(whole)
    for path in made:
        with GGUFFile(path) as model:
            assert (model.path, model.files) == (made[0], tuple(made))
            assert model.tensors.keys() == single.tensors.keys()
            for name in model.tensors:
                np.testing.assert_array_equal(model.data(name), single.data(name))
            last = gguf.GGUFReader(made[-1]).tensors[-1].name
            assert model.file_of(last) == made[-1]
    with pytest.raises(FormatError, match="closed"):
        model.data("token_embd.weight")


def _missing(parts: list[Path]) -> None:
    parts[1].unlink()


def _renamed(parts: list[Path]) -> None:
    parts[0].rename(parts[0].with_name("model.gguf"))


def _joined(parts: list[Path]) -> None:
    parts[0].with_name("model.gguf").write_bytes(b"".join(part.read_bytes() for part in parts))


def _swapped(parts: list[Path]) -> None:
    spare = parts[0].with_name("spare")
    parts[1].rename(spare)
    parts[2].rename(parts[1])
    spare.rename(parts[2])


def _cut(parts: list[Path]) -> None:
    os.truncate(parts[2], parts[2].stat().st_size - 100)


def _of_another(key: str, type_id: int, value: Any) -> Callable[[list[Path]], None]:
    """Rewrites the second part with another value of a key, or an added one."""

    def change(parts: list[Path]) -> None:
        reader = gguf.GGUFReader(parts[1])
        keys = {f.name: (f.contents(), f.types[0]) for f in reader.fields.values() if "GGUF." not in f.name}
        keys[key] = (value, gguf.GGUFValueType(type_id))
        writer = gguf.GGUFWriter(parts[1].with_name("new"), "llama")
        if key != "general.architecture":
            writer.kv_data[0].pop("general.architecture")
        for name, (contents, kind) in keys.items():
            writer.kv_data[0].pop(name, None)
            writer.add_key_value(name, contents, kind)
        finish(writer, reader)
        parts[1].with_name("new").rename(parts[1])

    return change


def _doubled(parts: list[Path]) -> None:
    """The third part is the second again, with its number."""
    shutil.copy(parts[1], parts[2])
    renumber = _of_another("split.no", 2, 2)
    renumber([parts[0], parts[2]])


@pytest.mark.parametrize(
    ("damage", "opened", "message"),
    [
        (_missing, 0, r"m-00002-of-00003\.gguf is missing: the model is split into 3 files"),
        (_missing, 2, r"m-00002-of-00003\.gguf is missing"),
        (_renamed, None, r"model\.gguf is one of 3 parts .* must be named like name-00001-of-00003\.gguf"),
        (_renamed, 1, r"m-00001-of-00003\.gguf is missing"),
        (_joined, None, r"model\.gguf, byte \d+: holds another GGUF file .*`llama-gguf-split --merge`"),
        (_swapped, 0, r"m-00002-of-00003\.gguf: key 'split\.no' is 2 where part 2 of this model has 1"),
        (_cut, 0, r"m-00003-of-00003\.gguf, .*do not fit into a file"),
        (_of_another("split.count", 2, 4), 0, r"00002-of-00003\.gguf: key 'split\.count' is 4"),
        (_of_another("split.tensors.count", 5, 9), 0, r"00002-of.*'split\.tensors\.count' is 9 .* has 20"),
        (_of_another("split.no", 8, "1"), 0, r"00002-of-00003\.gguf: key 'split\.no' is '1', not a whole"),
        (
            _of_another("general.architecture", 8, "qwen2"), 0,
            r"00002-of-00003\.gguf is of another model than m-00001-of-00003\.gguf: .*general\.arch",
        ),
        (_doubled, 0, r"00003-of-00003\.gguf, tensor 'blk\..* is in m-00002-of-00003\.gguf too"),
    ],
)  # fmt: skip
def test_parts_that_make_no_model(parts: list[Path], damage: Any, opened: int | None, message: str) -> None:
    """A model with a layer of another one, or a traceback; each is one line that names the file."""
    damage(parts)
    path = parts[0].with_name("model.gguf") if opened is None else parts[opened]
    with pytest.raises(FormatError, match=message) as caught:
        LLM(path)
    assert "\n" not in str(caught.value)


def test_a_wrong_number_of_tensors(whole: Path, tmp_path: Path) -> None:
    """A part that lost a tensor on its way, found only when a layer asks for it."""
    parts = split(whole, tmp_path, split_max_tensors=7)
    for path in parts:
        data = path.read_bytes()
        at = data.index(b"split.tensors.count") + len(b"split.tensors.count") + 4
        path.write_bytes(data[:at] + (21).to_bytes(4, "little") + data[at + 4 :])
    with pytest.raises(FormatError, match=r"is 21, but the 3 parts hold 20"):
        GGUFFile(parts[0])


def test_a_hub_name_is_all_parts() -> None:
    """A part of a model fetched alone, two splits taken for one, or half a model taken for all."""
    four = [f"q4/m-Q4_K_M-{i:05}-of-00002.gguf" for i in (1, 2)]
    eight = [f"q8/m-Q8_0-{i:05}-of-00003.gguf" for i in (1, 2, 3)]
    assert choose(RepoName("o/r", choice="Q4_K_M"), eight + four) == four
    assert choose(RepoName("o/r", choice="m-Q8_0-00002-of-00003.gguf"), eight + four) == eight
    with pytest.raises(UnsupportedError, match="several models: choose one of o/r:Q4_K_M, o/r:Q8_0"):
        choose(RepoName("o/r"), eight + four)
    with pytest.raises(UnsupportedError, match=r"incomplete: its part q8/m-Q8_0-00001-of-00003\.gguf was"):
        choose(RepoName("o/r", choice="Q8_0"), eight[1:] + four)
