"""SentencePiece's unigram tokenizers, from tokenizer.json and GGUF, against transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri.errors import FormatError, UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.tokenizer import Tokenizer, load_tokenizer
from kukri.tokenizer.gguf_writer import tokenizer_metadata
from kukri.tokenizer.huggingface_writer import tokenizer_files
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import V, charsmap, pieces, save

with lazy_imports():
    import transformers

TEXTS = [
    *("The CAT sat, on the mats!", "càts ﬁ", "日本 cat", "", " the\tcat\n\n", "sittings 123 w3", "\n"),
    *("  two   spaces  ", "thethe cat", "▁the cat", "a" * 50),
]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save(tmp_path, "xlm_roberta")
    return tmp_path


def ours(directory: Path) -> Tokenizer:
    with open_checkpoint(directory) as checkpoint:
        return load_tokenizer(checkpoint.tokenizer)


def metadata_of(directory: Path) -> dict[str, Any]:
    with open_checkpoint(directory) as checkpoint:
        return tokenizer_metadata(checkpoint.tokenizer)


def wild(charsmap: bytes, place: int, unit: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A compiled normalization with one unit of its double array replaced."""
    made = np.frombuffer(charsmap, np.uint8).copy()
    made[4 + 4 * place :][:4] = np.array([unit], "<u4").view(np.uint8)
    return made


def test_pieces_are_those_of_transformers(saved: Path) -> None:
    """A score, a normalization or a space that is lost; a special token that a text becomes."""
    theirs, made = transformers.AutoTokenizer.from_pretrained(saved), ours(saved)
    for text in TEXTS:
        assert made.encode(text, add_special=True) == theirs(text).input_ids
    assert theirs("the cat").input_ids != theirs("t h e c a t").input_ids, "the premise: there are words"
    hidden = {0, 1, 2, V - 1}
    assert not hidden & {*made.encode("<s> </s> <pad> <mask>")}
    assert made.encode("<s>the", parse_special=True)[0] == 0
    assert made.decode(made.encode("the cats sat")) == "the cats sat"
    pair = theirs("the cat", "sat").input_ids
    assert made.add_separator
    assert pair == [*made.encode("the cat", add_special=True), 2, *made.encode("sat", add_special=True)[1:]]
    ids, spans = made.encode_spans("sat", before="the cat")
    assert ids == pair
    assert [span for span in spans if span is not None] == [(0, 3)]


def test_gguf_says_the_same(saved: Path, tmp_path: Path) -> None:
    """Scores, bytes or flags of another tokenizer, in the file or on the way back."""
    want = ours(saved)
    file = write_gguf(tmp_path / "t.gguf", {"general.architecture": "bert", **metadata_of(saved)}, {})
    with GGUFFile(tmp_path / "t.gguf") as opened:
        assert opened.metadata["tokenizer.ggml.model"] == "t5"
        assert opened.metadata["tokenizer.ggml.token_type"][3] == 2
        made, files = Tokenizer.from_gguf(opened), tokenizer_files(opened)
    assert file is None
    (tmp_path / "back").mkdir()
    (tmp_path / "back" / "tokenizer.json").write_text(files["tokenizer.json"])
    (tmp_path / "back" / "tokenizer_config.json").write_text(json.dumps(files["tokenizer_config.json"]))
    back = transformers.AutoTokenizer.from_pretrained(tmp_path / "back")
    for text in TEXTS:
        ids = want.encode(text, add_special=True)
        assert made.encode(text, add_special=True) == ids
        assert back(text).input_ids == ids
    assert made.add_separator
    assert back("the", "cat").input_ids == made.encode_spans("cat", before="the")[0]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"remove_extra_whitespaces": False}, {"add_dummy_prefix": False}])
def test_pieces_are_those_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    """Another normalization, way with spaces, score or unknown text than SentencePiece's own."""
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = [line for page in Path("docs").glob("*.md") for line in page.read_text().split("\n") if line]
    trained = sentencepiece.SentencePieceTrainer
    (tmp_path / "lines.txt").write_text("\n".join(line[:900] for line in lines))
    trained.train(
        input=str(tmp_path / "lines.txt"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=2000,
        pad_id=3,
        **options,
    )
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "m.model"))
    n = theirs.vocab_size()
    spec = fields((tmp_path / "m.model").read_bytes())[3][0]  # NormalizerSpec
    types = [2 if theirs.is_unknown(i) else 3 if theirs.is_control(i) else 1 for i in range(n)]
    metadata = {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": [theirs.id_to_piece(i) for i in range(n)],
        "tokenizer.ggml.scores": np.array([theirs.get_score(i) for i in range(n)], np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.precompiled_charsmap": np.frombuffer(fields(spec)[2][0], np.uint8),
        "tokenizer.ggml.unknown_token_id": theirs.unk_id(),
        "tokenizer.ggml.bos_token_id": theirs.bos_id(),
        "tokenizer.ggml.eos_token_id": theirs.eos_id(),
        "tokenizer.ggml.add_space_prefix": options.get("add_dummy_prefix", True),
        "tokenizer.ggml.remove_extra_whitespaces": options.get("remove_extra_whitespaces", True),
    }
    made = Tokenizer.from_metadata(metadata)
    for text in (*TEXTS, *lines, "ﬁ ½ Ⅷ　wide\u00a0space\u200b e\u0301"):
        assert made.encode(text) == theirs.encode(text), text


def fields(message: bytes) -> dict[int, list[bytes]]:
    """The fields of a protobuf message that are bytes, by their numbers."""
    found: dict[int, list[bytes]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
            if byte < 128:
                return value

    while at < len(message):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            varint()
        elif kind == 2:
            size = varint()
            found.setdefault(number, []).append(message[at : at + size])
            at += size
        else:
            at += {1: 8, 5: 4}[kind]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda model: model.update(unk_id=None), "'unk_id' must be the number of a piece, not None"),
        (lambda model: model.update(unk_id=V), "'unk_id' must be the number of a piece"),
        (lambda model: model.update(vocab=[]), "must have a vocabulary"),
        (lambda model: model["vocab"].append(["x"]), "must have pieces that are a text and a score, not"),
        (
            lambda model: model["vocab"].append(["the", None]),
            "must have pieces that are a text and a score, not",
        ),
        (lambda model: model["vocab"].insert(9, model["vocab"][10]), "must have each piece once"),
        (
            lambda model: model["vocab"].extend([f"x{i}", 0.0] for i in range(9)),
            f"must have an id below the model's {V}",
        ),
        (lambda model: model.update(type="Other"), "is not supported: use BPE, WordPiece or Unigram"),
    ],
)
def test_broken_files(saved: Path, change: Callable[[Any], None], message: str) -> None:
    """A piece under another's number, or an error of the library's."""
    path = saved / "tokenizer.json"
    stated = json.loads(path.read_text())
    change(stated["model"])
    path.write_text(json.dumps(stated))
    with pytest.raises((FormatError, UnsupportedError), match=message):
        ours(saved)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("scores", None, "one finite number for each token"),
        ("scores", np.full(V, np.nan, np.float32), "one finite number for each token"),
        ("scores", np.zeros(V - 1, np.float32), "one finite number for each token"),
        ("precompiled_charsmap", np.zeros(4, np.float32), "must be an array of bytes"),
        ("precompiled_charsmap", np.full(3, 255, np.uint8), "normalization is broken"),
        ("precompiled_charsmap", np.frombuffer(charsmap({"à": "a"})[:600], np.uint8), "is broken"),
        ("precompiled_charsmap", wild(charsmap({"à": "a"}), 0, 1 << 31 - 1), "is broken"),
        ("precompiled_charsmap", wild(charsmap({"à": "é"}), 768, 1 << 31 | 1), "is broken"),
        ("unknown_token_id", V, "unknown_token_id"),
        ("add_sep_token", 1, "add_sep_token must be a boolean"),
    ],
)
def test_broken_gguf_keys(saved: Path, key: str, value: Any, message: str) -> None:
    """A vocabulary that is believed without its scores."""
    metadata = metadata_of(saved) | {f"tokenizer.ggml.{key}": value}
    with pytest.raises(FormatError, match=message):
        Tokenizer.from_metadata({k: v for k, v in metadata.items() if v is not None})


def test_the_spaces_of_converted_sentencepiece_models(saved: Path, tmp_path: Path) -> None:
    """A file of transformers' SpmConverter, as BGE-M3's and T5's, that is refused or read as another."""
    path = saved / "tokenizer.json"
    stated = json.loads(path.read_text())
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"}
    strip = {"type": "Strip", "strip_left": False, "strip_right": True}
    steps = [stated["normalizer"], strip, spaces]
    stated["normalizer"] = {"type": "Sequence", "normalizers": steps}
    stated["pre_tokenizer"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
        "split": True,
    }
    path.write_text(json.dumps(stated))
    made = Tokenizer.from_metadata(metadata_of(saved))
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
    for text in TEXTS:
        assert made.encode(text, add_special=True) == ours(saved).encode(text, add_special=True)
        assert made.encode(text, add_special=True) == theirs(text).input_ids


def test_spaces_that_gguf_cannot_say_are_refused(tmp_path: Path) -> None:
    """A conversion whose readers cut texts in other places: white space that no normalization replaces."""
    save(tmp_path, "xlm_roberta")
    pieces(tmp_path)
    path = tmp_path / "tokenizer.json"
    stated = json.loads(path.read_text())
    stated["normalizer"] = None
    path.write_text(json.dumps(stated))
    with pytest.raises(UnsupportedError, match=": this tokenizer's treatment of spaces is not supported in"):
        metadata_of(tmp_path)
