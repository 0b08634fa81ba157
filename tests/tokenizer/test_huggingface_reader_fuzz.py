"""Tokenizer files with any value in any place: read, or refused in one line."""

from __future__ import annotations

import copy
import json
import math
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kukri.errors import FormatError, KukriError, UnsupportedError
from kukri.tokenizer import load_tokenizer
from kukri.tokenizer.gguf_writer import tokenizer_metadata
from tests.tokenizer.test_huggingface_reader import KINDS, edited, files, save

JUNK: list[Any] = [
    *(None, True, 7, -1, 2**70, 1.5, math.nan, "", "x", "\ud800"),
    *([], [7], [[]], {}, {"a": 7}, [None]),
]
FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "generation_config.json")
_MAX_ITEMS = 4  # items in a list or object: vocabularies are long


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all values below one, of the first few in each list or object."""
    if path:
        yield path
    if not isinstance(value, dict | list):
        return
    items = list(value.items() if isinstance(value, dict) else enumerate(value))
    for key, item in items[: _MAX_ITEMS if len(items) > 30 else None]:  # a vocabulary, or merges
        yield from places(item, (*path, key))


def replaced(contents: Any, path: tuple[Any, ...], junk: Any) -> Any:
    """A copy with another value at a place."""
    changed = copy.deepcopy(contents)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = junk
    return changed


@pytest.mark.full(but=["metaspace"])
@pytest.mark.representative(2)
@pytest.mark.parametrize("kind", KINDS)
def test_any_value_in_any_place_is_read_or_refused(kind: str, tmp_path: Path) -> None:
    """A TypeError, or a panic of the library, for a file from anywhere."""
    directory = save(tmp_path, KINDS[kind]())
    (directory / "generation_config.json").write_text('{"eos_token_id": [2]}')
    special = {"bos_token": "<s>", "eos_token": {"content": "<|im_end|>"}}
    (directory / "special_tokens_map.json").write_text(json.dumps(special))
    texts = {name: (directory / name).read_text() for name in FILES}
    contents = {name: json.loads(text) for name, text in texts.items()}
    cases = [(name, path, junk) for name in FILES for path in places(contents[name]) for junk in JUNK]
    outcomes = [
        attempt(directory, name, replaced(contents[name], path, junk), texts[name], f"{path} {junk!r}")
        for name, path, junk in random.Random(5).sample(cases, 150)
    ]
    assert 20 < sum(outcomes) < 140


def attempt(directory: Path, name: str, contents: Any, text: str, what: str) -> bool:
    """True if the directory is read with a changed file, False if it is refused in one line."""
    (directory / name).write_text(json.dumps(contents))
    try:
        given = files(directory)
        tokenizer = load_tokenizer(given)
        tokenizer.decode(tokenizer.encode("Hello <s> wörld", add_special=True, parse_special=True))
        with suppress(UnsupportedError):  # GGUF has no name for some
            tokenizer_metadata(given)
    except KukriError as error:
        if "\n" in str(error):
            raise AssertionError(f"{name} {what}: several lines") from error
        return False
    except BaseException as error:
        raise AssertionError(f"{name} {what}: {type(error)} {error}") from error
    finally:
        (directory / name).write_text(text)
    return True


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(added_tokens=7), "'added_tokens' must be a list, not 7"),
        (lambda c: c["model"].update(merges=math.nan), "'merges' must be a list, not nan"),
        (lambda c: c["model"].update(unk_token=["a"]), r"'unk_token' must be text, not \['a'\]"),
        (lambda c: c["added_tokens"][0].update(content="\ud800"), "lone surrogates"),
    ],
    ids=range(4),
)
def test_files_that_raised_type_errors(tmp_path: Path, change: Any, message: str) -> None:
    """Values that once crossed into the library, or into a set."""
    directory = edited(save(tmp_path, KINDS["byte level"]()), change)
    with pytest.raises(FormatError, match=message):
        load_tokenizer(files(directory))
