"""Tokenizer keys that a converter writes: the same ids as the tokenizer.json they come from."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as HFTokenizer

from kukri.errors import UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.tokenizer import Tokenizer, load_tokenizer
from kukri.tokenizer.gguf_writer import tokenizer_metadata
from kukri.tokenizer.huggingface_writer import tokenizer_files
from kukri.tokenizer.pretokenizers import PRE_TOKENIZERS
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import save as save_encoder
from tests.stopwatch import within
from tests.tokenizer.hard_texts import HARD_TEXTS
from tests.tokenizer.test_huggingface_reader import byte_level, files, plain_ids, prepending, save, whole
from tests.tokenizer.tiny_tokenizers import CORPUS, sentencepiece_metadata, train_sentencepiece

with lazy_imports():
    import transformers as tr
    from transformers.tokenization_utils_base import generate_merges


def read_back(metadata: dict[str, Any], path: Path) -> Tokenizer:
    """The tokenizer of a file with these keys, which the `gguf` package must read too."""
    write_gguf(path, {"general.architecture": "llama", **metadata}, {})
    fields = gguf.GGUFReader(path).fields
    assert len(fields["tokenizer.ggml.tokens"].contents()) == len(metadata["tokenizer.ggml.tokens"])
    with GGUFFile(path) as file:
        return Tokenizer.from_gguf(file)


def assert_same(ours: Tokenizer, theirs: Tokenizer) -> None:
    for text in [*HARD_TEXTS, *CORPUS[:20], "<s>a</s> <|im_end|>b"]:
        for options in ({}, {"add_special": True}):
            ids = theirs.encode(text, **options)
            assert ours.encode(text, **options) == ids
            assert ours.decode(ids) == theirs.decode(ids)
    assert ours.special_ids == theirs.special_ids
    assert ours.eos_ids >= theirs.eos_ids  # readers of GGUF know more ends by their text
    assert (ours.bos_id, ours.eos_token, ours.add_bos) == (theirs.bos_id, theirs.eos_token, theirs.add_bos)


def sentencepiece_json() -> HFTokenizer:
    """A SentencePiece model as transformers converts it: a merge for each way to cut a token in two."""
    trained = train_sentencepiece()
    pieces = [(trained.id_to_piece(i), trained.get_score(i)) for i in range(trained.get_piece_size())]
    vocabulary = {piece: i for i, (piece, _) in enumerate(pieces)}
    cuts = [
        (-score, vocabulary[piece[:k]], vocabulary[piece[k:]], piece[:k], piece[k:])
        for piece, score in pieces
        for k in range(1, len(piece))
        if piece[:k] in vocabulary and piece[k:] in vocabulary and trained.is_byte(vocabulary[piece]) is False
    ]
    merges = [(left, right) for *_, left, right in sorted(cuts)]
    made = HFTokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens(["<unk>", "<s>", "</s>", "<|im_end|>"])
    return made


def gemma_model() -> sentencepiece.SentencePieceProcessor:
    """A SentencePiece model with Gemma's settings: no space in front, runs of white space as tokens."""
    return train_sentencepiece(
        add_dummy_prefix=False,
        user_defined_symbols=[*("▁" * n for n in range(2, 9)), "\n\n", "\n\n\n", "<h1>"],
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        **{"pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3},
        **{"eos_piece": "<eos>", "bos_piece": "<bos>"},
    )


def gemma_json(trained: sentencepiece.SentencePieceProcessor) -> HFTokenizer:
    """The same model as Gemma's tokenizer.json has it: byte fallback, ▁ for spaces, BOS in front."""
    pieces = {trained.id_to_piece(i): i for i in range(trained.get_piece_size())}
    scores = {piece: trained.get_score(i) for piece, i in pieces.items()}
    special = [piece for piece, i in pieces.items() if trained.is_control(i) or trained.is_unknown(i)]
    merges = generate_merges(pieces, scores, skip_tokens=special)
    made = HFTokenizer(
        models.BPE(vocab=pieces, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(special)
    defined = [piece for piece in pieces if piece.startswith(("▁▁", "\n\n", "<h1>"))]
    made.add_tokens([AddedToken(piece, normalized=False, special=False) for piece in defined])
    made.post_processor = processors.TemplateProcessing("<bos> $A", "<bos> $A $B", [("<bos>", 2)])
    return made


def test_gemmas_tokenizer_in_both_formats(tmp_path: Path) -> None:
    """A space in front of the text, runs of spaces cut otherwise, merges refused for user-defined tokens."""
    trained = gemma_model()
    tokenizer = gemma_json(trained)
    settings = {"eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    theirs = tr.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **settings)
    theirs.save_pretrained(tmp_path / "hf")
    source = files(tmp_path / "hf", eos_token_id=[1])
    ours, metadata = load_tokenizer(source), tokenizer_metadata(source)
    from_gguf = read_back(metadata, tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        written = HFTokenizer.from_str(tokenizer_files(file)["tokenizer.json"])
    back = tr.PreTrainedTokenizerFast(tokenizer_object=written, **settings)
    assert metadata["tokenizer.ggml.add_space_prefix"] is False
    assert {"  ", "   "} <= set(metadata["tokenizer.ggml.tokens"])
    for text in [*HARD_TEXTS, "a<h1>b  c", "def f():\n    return  1\n\n\n"]:
        ids = ours.encode(text)
        clean = whole(text)
        assert ids == plain_ids(theirs, text) == plain_ids(back, text), text
        assert from_gguf.encode(text) == trained.encode(clean), text
        assert from_gguf.encode(text, add_special=True) == [2, *ids], text
        assert ours.decode(ids) == from_gguf.decode(ids) == clean.replace("▁", " ")
    turn = "<bos><start_of_turn>user\nHi<end_of_turn>\n"
    assert (
        from_gguf.encode_marked(turn)
        == ours.encode_marked(turn)
        == theirs.encode(turn, add_special_tokens=False)
        == back.encode(turn, add_special_tokens=False)
    )
    assert trained.piece_to_id("<end_of_turn>") in from_gguf.eos_ids


def test_merges_that_scores_cannot_say_are_written(tmp_path: Path) -> None:
    """Gemma 4's tokenizer.json refused, or scores written for merges that they do not imply."""
    contents = json.loads(gemma_json(gemma_model()).to_str())
    merges = contents["model"]["merges"]
    contents["model"]["merges"] = [
        m for i, m in enumerate(merges) if "▁▁" in "".join(m) or (i % 3 and "\n" not in "".join(m))
    ]
    tr.PreTrainedTokenizerFast(
        tokenizer_object=HFTokenizer.from_str(json.dumps(contents)), eos_token="<eos>", bos_token="<bos>"
    ).save_pretrained(tmp_path / "hf")
    source = files(tmp_path / "hf", eos_token_id=[1])
    metadata = tokenizer_metadata(source)
    assert metadata["tokenizer.ggml.model"] == "gemma4"
    ours, from_gguf = load_tokenizer(source), read_back(metadata, tmp_path / "m.gguf")
    for text in [*HARD_TEXTS, "a<h1>b  c", "def f():\n    return  1\n\n\n"]:
        assert from_gguf.encode(text, add_special=True) == ours.encode(text, add_special=True), text


def test_gemma_4s_tokenizer_with_merges(tmp_path: Path) -> None:
    """A kind of tokenizer refused, scores taken for merges, line ends joined with what surrounds them."""
    trained = gemma_model()
    merges = [f"{a} {b}" for a, b in json.loads(gemma_json(trained).to_str())["model"]["merges"]]
    n = trained.get_piece_size()
    stated = {
        **sentencepiece_metadata(trained, scores=[-1000.0] * n, merges=merges, model="gemma4"),
        **{"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": True},
    }
    read, whole_model = read_back(stated, tmp_path / "m.gguf"), gemma_json(trained)
    for text in [*HARD_TEXTS, "a\n\nb  c\n"]:
        clean = whole(text)
        assert read.decode(read.encode(clean)) == clean.replace("▁", " ")
        if "\n" not in clean:
            want = whole_model.encode(clean, add_special_tokens=False).ids
            assert read.encode(clean) == want, text


def without_nfc() -> HFTokenizer:
    """The byte-level tokenizer with a way of cutting text that GGUF has a name for."""
    return HFTokenizer.from_str(json.dumps({**json.loads(byte_level().to_str()), "normalizer": None}))


@pytest.mark.parametrize("make", [without_nfc, sentencepiece_json])
def test_ids_are_those_of_tokenizer_json(make: Any, tmp_path: Path) -> None:
    """Tokens under other ids, merges in another order, ends of text lost, a space before the text or none."""
    directory = save(tmp_path / "hf", make())
    source = files(directory)
    assert_same(read_back(tokenizer_metadata(source), tmp_path / "m.gguf"), load_tokenizer(source))


def test_a_way_of_cutting_text_that_has_no_name_is_refused(tmp_path: Path) -> None:
    """The next best name, with which text is cut otherwise: Llama 3's words, but in NFC."""
    with pytest.raises(UnsupportedError, match=": this tokenizer's way of splitting text into words is not"):
        tokenizer_metadata(files(save(tmp_path / "hf", byte_level())))


@pytest.mark.parametrize("is_reached", [True, False])
def test_words_taken_whole_where_merges_lead_to_them(is_reached: bool, tmp_path: Path) -> None:
    """gpt-oss refused, whose merges lead to each token; a token that no merges lead to cut by readers."""
    made = without_nfc()
    made.pre_tokenizer = PRE_TOKENIZERS["gpt-4o"].build()
    contents = json.loads(made.to_str())
    contents["model"]["ignore_merges"] = True
    if not is_reached:
        contents["model"]["vocab"]["zzz"] = 1199
    source = files(save(tmp_path / "hf", HFTokenizer.from_str(json.dumps(contents))), n_vocab=1200)
    if is_reached:
        assert_same(read_back(tokenizer_metadata(source), tmp_path / "m.gguf"), load_tokenizer(source))
    else:
        with pytest.raises(UnsupportedError, match="is not supported in GGUF"):
            tokenizer_metadata(source)


def test_many_merges_and_user_defined_tokens_take_no_longer(tmp_path: Path) -> None:
    """Gemma 3's half a million merges held against a new set of its 6,000 user-defined tokens each."""
    settings = {"eos_token": "<eos>", "bos_token": "<bos>", "unk_token": "<unk>"}
    made = tr.PreTrainedTokenizerFast(tokenizer_object=gemma_json(gemma_model()), **settings)
    made.save_pretrained(tmp_path / "hf")
    source = files(tmp_path / "hf", eos_token_id=[1])
    contents = source.tokenizer
    extra = [f"<unused{i}>" for i in range(6000)]
    n = source.n_vocab
    contents["added_tokens"] += [
        {"id": n + i, "content": token, "special": False, "normalized": False}
        | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        for i, token in enumerate(extra)
    ]
    source = replace(source, tokenizer=contents, n_vocab=n + len(extra))
    with within(5):  # 0.1 s here, and an hour where the set was made for each
        tokenizer_metadata(source)


def test_a_word_that_ends_a_text_is_refused(tmp_path: Path) -> None:
    """A word that a reader takes out of all text because it also ends an answer."""
    source = files(save(tmp_path / "hf", without_nfc()), eos_token_id=2)
    with pytest.raises(UnsupportedError, match="'#' must not end a text and be an ordinary word too"):
        tokenizer_metadata(source)


def test_merges_that_scores_cannot_say_are_refused(tmp_path: Path) -> None:
    """A file that cuts words otherwise, for readers merge whatever two tokens make a third."""
    directory = save(tmp_path / "hf", prepending())
    with pytest.raises(UnsupportedError, match=": these merges are not supported in GGUF, which requires"):
        tokenizer_metadata(files(directory, eos_token_id=2))


@pytest.mark.parametrize("name", list(PRE_TOKENIZERS))
def test_every_pre_tokenizer_is_found_by_what_it_does(name: str, tmp_path: Path) -> None:
    """Two that the texts do not tell apart; one that is not found at all."""
    rules = PRE_TOKENIZERS[name]
    made = HFTokenizer(models.BPE(ignore_merges=rules.ignore_merges))
    made.pre_tokenizer, made.decoder = rules.build(), decoders.ByteLevel()
    if rules.nfc:
        made.normalizer = normalizers.NFC()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(CORPUS[:5], trainer)
    made.add_special_tokens(["<s>", "<|im_end|>"])
    contents = json.loads(made.to_str())
    contents["model"]["ignore_merges"] = rules.ignore_merges
    directory = save(tmp_path / "hf", HFTokenizer.from_str(json.dumps(contents)))
    found = tokenizer_metadata(files(directory))["tokenizer.ggml.pre"]
    known = PRE_TOKENIZERS[found]
    assert (known.patterns, known.nfc, known.ignore_merges) == (
        rules.patterns,
        rules.nfc,
        rules.ignore_merges,
    )


SPACED = [
    "x <|a|>\n ab",
    "x<|a|>y",
    " <|a|> <|a|>",
    "a <tool>\n b",
    "a<tool>b <TOOL> c",
    "<|a|> the cat <tool> ",
]


def once_prefixed() -> HFTokenizer:
    """A SentencePiece tokenizer as Mistral 0.3 has it: a space at the start of the text alone."""
    contents = json.loads(sentencepiece_json().to_str())
    first = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    return HFTokenizer.from_str(json.dumps({**contents, "normalizer": None, "pre_tokenizer": first}))


@pytest.mark.parametrize("make", [without_nfc, sentencepiece_json, once_prefixed])
@pytest.mark.parametrize("flags", [[], ["lstrip"], ["rstrip"], ["single_word"], ["lstrip", "normalized"]])
def test_added_tokens_take_the_same_spaces(make: Any, flags: list[str], tmp_path: Path) -> None:
    """lstrip, rstrip, single_word or normalized lost in the GGUF, or on the way back to a directory."""
    made, given = make(), dict.fromkeys(flags, True)
    made.add_special_tokens([AddedToken("<|a|>", **{**given, "normalized": False})])
    made.add_tokens([AddedToken("<tool>", **{"normalized": False, **given})])
    source = files(save(tmp_path / "hf", made), n_vocab=1200)
    ours = read_back(tokenizer_metadata(source), tmp_path / "m.gguf")
    with GGUFFile(tmp_path / "m.gguf") as file:
        again = HFTokenizer.from_str(tokenizer_files(file)["tokenizer.json"])
    for text in SPACED:
        ids = made.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, parse_special=True) == ids, text
        assert again.encode(text, add_special_tokens=False).ids == ids, text


@pytest.mark.parametrize("make", [without_nfc, sentencepiece_json])
@pytest.mark.parametrize("strips", [True, False])
def test_a_leading_space_is_dropped_as_the_decoder_says(make: Any, strips: bool, tmp_path: Path) -> None:
    """A space at the beginning of an answer that the GGUF drops or keeps otherwise."""
    made = make()
    steps = [decoders.ByteLevel()]
    if make is sentencepiece_json:
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    source = files(save(tmp_path / "hf", made))
    ours = read_back(tokenizer_metadata(source), tmp_path / "m.gguf")
    for text in (" a b", "a b"):
        ids = made.encode(text, add_special_tokens=False).ids
        assert load_tokenizer(source).decode(ids) == ours.decode(ids) == made.decode(ids)


def test_added_words_of_word_piece_are_found(tmp_path: Path) -> None:
    """A word that was added to BERT cut into pieces by the GGUF."""
    save_encoder(tmp_path, "bert")
    theirs = tr.AutoTokenizer.from_pretrained(tmp_path)
    theirs.add_tokens(["<E1>"])
    theirs.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        source = replace(checkpoint.tokenizer, n_vocab=len(theirs))
    ours = read_back(tokenizer_metadata(source), tmp_path / "m.gguf")
    for text in ("the <E1> cat", "the<e1>cat"):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False)


@pytest.mark.parametrize(
    "steps",
    [
        [decoders.Replace("a", "b"), decoders.ByteFallback(), decoders.Fuse()],
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)],
        [decoders.Replace("▁", " "), decoders.Strip(" ", 1, 0), decoders.Fuse()],
        [decoders.BPEDecoder("</w>")],
    ],
)
def test_steps_of_a_decoder_that_change_the_text_are_refused(steps: list[Any], tmp_path: Path) -> None:
    """A step that is passed over, so that answers have other text than transformers gives."""
    made = sentencepiece_json()
    made.decoder = decoders.Sequence(steps)
    with pytest.raises(UnsupportedError, match=r"the decoder's step .* is not supported"):
        load_tokenizer(files(save(tmp_path / "hf", made)))


def test_an_added_token_that_a_file_cannot_say_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    """A flag that no key carries: the file would cut texts otherwise."""
    made = without_nfc()
    made.add_tokens([AddedToken("<tool>", lstrip=True, normalized=False)])
    source = files(save(tmp_path / "hf", made), n_vocab=1200)
    monkeypatch.setattr("kukri.tokenizer.gguf_writer._flags", lambda *_, **__: {})
    with pytest.raises(UnsupportedError, match="added token '<tool>' is not supported in GGUF"):
        tokenizer_metadata(source)
