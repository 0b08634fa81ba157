"""Heads of transformers' checkpoints: outputs, spans, labels and embeddings are transformers' own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ContextLengthError, FormatError, KukriError, RequestError, UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.models import load_model
from kukri.tasks.heads import last_token
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import TINY, byte_tokenizer

with lazy_imports():
    import torch
    import transformers as tr

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "smollm3", "phi3", "phi", "starcoder2")
QUESTIONS, TEXTS, TOKENS, BASE = (
    "ForQuestionAnswering", "ForSequenceClassification", "ForTokenClassification", "Model",
)  # fmt: skip
CLASS = {
    "llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3", "smollm3": "SmolLM3",
    "phi3": "Phi3", "phi": "Phi", "starcoder2": "Starcoder2",
}  # fmt: skip
NO_QUESTIONS = ("phi", "phi3", "starcoder2")  # which transformers has no class for
HEADS = [
    (architecture, head)
    for architecture in ARCHITECTURES
    for head in (QUESTIONS, TEXTS, TOKENS, BASE)
    if head != QUESTIONS or architecture not in NO_QUESTIONS
]
LABELS = {0: "bad", 1: "good", 2: "odd"}
# The CPU's cache is float16, which moves these outputs; the reference's is float32
TOLERANCES = {"reference": 1e-4, "cpu": 0.015}
TEXT = "Größe: the cat 🐈 sat on   the mat."
QUESTION, CONTEXT = (
    "Where is the cat?",
    "  Once, a 🐈 – the grey cat – sat on the mat in Zürich.\nThen it slept. ",
)


def test_every_class_of_transformers_is_compared() -> None:
    """Catches a class for questions that a newer transformers has."""
    assert not [name for name in NO_QUESTIONS if hasattr(tr, f"{CLASS[name]}{QUESTIONS}")]


def make(directory: Path, architecture: str, head: str, seed: int = 3, **facts: Any) -> Any:
    """A checkpoint as transformers saves it, with a tokenizer of bytes, and its model."""
    torch.manual_seed(seed)
    name = CLASS[architecture]
    common = {**TINY, "num_hidden_layers": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}
    if head in (TEXTS, TOKENS):
        common |= {"id2label": LABELS, "label2id": {label: i for i, label in LABELS.items()}}
    config = getattr(tr, f"{name}Config")(**{**common, **facts})
    model = getattr(tr, f"{name}{head}")(config).eval()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "norm" in key or "bias" in key:  # else all ones or zeros, and a mistake would not show
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return model


@pytest.fixture(params=["reference", "cpu"])
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def loaded(tmp_path: Path, backend: str) -> Iterator[Any]:
    """A function that makes a checkpoint and gives (LLM, transformers' model, its tokenizer)."""
    opened: list[LLM] = []

    def load(architecture: str, head: str, **facts: Any) -> tuple[LLM, Any, Any]:
        model = make(tmp_path, architecture, head, **facts)
        opened.append(LLM(tmp_path, backend=backend, n_threads=1))
        return opened[-1], model, tr.AutoTokenizer.from_pretrained(tmp_path)

    yield load
    for llm in opened:
        llm.close()


def outputs(model: Any, **inputs: Any) -> np.ndarray:
    """transformers' output for each token: a head's, or hidden states [B, T, width]."""
    with torch.no_grad():
        if hasattr(model, "score"):  # its own forward keeps one token of a text
            below = getattr(model, model.base_model_prefix)
            return model.score(below(**inputs).last_hidden_state).numpy()
        result = model(**inputs)
    if hasattr(result, "start_logits"):
        return torch.stack([result.start_logits, result.end_logits], -1).numpy()
    return result.last_hidden_state.numpy()


def close(got: Any, want: Any, backend: str) -> None:
    np.testing.assert_allclose(got, want, atol=TOLERANCES[backend], rtol=0)


@pytest.mark.parametrize(("architecture", "head"), HEADS)
def test_outputs_are_transformers_own(architecture: str, head: str, loaded: Any, backend: str) -> None:
    """A head that reads another layer, loses its bias or its order; names in front of tensors not known."""
    llm, model, _ = loaded(architecture, head)
    ids = np.random.default_rng(1).integers(0, 250, (2, 30))
    mask = np.ones((2, 30), np.int64)
    mask[0, :7] = 0
    want = outputs(model, input_ids=torch.tensor(ids), attention_mask=torch.tensor(mask))
    got = llm.model.forward(ids, mask)
    assert got.shape == want.shape
    close(got[mask == 1], want[mask == 1], backend)
    assert np.abs(want).std() > 0.05, "outputs too small to tell anything"
    assert llm.model.n_parameters == sum(p.numel() for p in model.parameters())


def best_spans(starts: np.ndarray, ends: np.ndarray, longest: int, k: int) -> list[tuple[float, int, int]]:
    """Every span of at most `longest` tokens, by the product of its probabilities: the k best."""
    a, b = np.exp(starts - starts.max()), np.exp(ends - ends.max())
    a, b = a / a.sum(), b / b.sum()
    every = [(float(a[i] * b[j]), i, j) for i in range(len(a)) for j in range(i, min(i + longest, len(a)))]
    return sorted(every, reverse=True)[:k]


def test_answers_are_the_best_spans(loaded: Any, backend: str) -> None:
    """Question tokens taken for context, ends before starts, offsets in bytes or of the wrong text."""
    llm, model, tokenizer = loaded("llama", QUESTIONS)
    pair = tokenizer(QUESTION, CONTEXT, return_tensors="pt", return_offsets_mapping=True)
    offsets = pair.pop("offset_mapping")[0].tolist()
    inside = [i for i, text in enumerate(pair.sequence_ids(0)) if text == 1]
    ids, spans = llm.tokenizer.encode_spans(CONTEXT, before=QUESTION)
    assert ids == pair["input_ids"][0].tolist()
    assert [spans[i] for i in inside] == [tuple(offsets[i]) for i in inside]
    logits = outputs(model, input_ids=pair["input_ids"])[0][inside].astype(np.float64)
    wanted = best_spans(logits[:, 0], logits[:, 1], 9, 5)
    got = llm.extract(QUESTION, CONTEXT, top_k=5, max_answer_tokens=9)
    assert len(got) == 5
    for span, (score, first, last) in zip(got, wanted, strict=True):
        assert abs(span.score - score) < TOLERANCES[backend] * 0.05
        assert span.text == CONTEXT[span.start : span.stop] == span.text.strip()
        if backend == "reference":
            start, stop = offsets[inside[first]][0], offsets[inside[last]][1]
            assert span.text == CONTEXT[start:stop].strip()
            assert start <= span.start <= span.stop <= stop
    one = llm.extract(QUESTION, CONTEXT)
    assert len(one) == 1
    assert one[0].score >= got[0].score
    assert len(llm.extract("?", "ab", top_k=10)) == 3  # a, b and ab


def test_a_span_is_found_where_it_was_put(loaded: Any) -> None:
    """Offsets that count bytes: after an emoji and umlauts they would lie elsewhere."""
    llm, _, _ = loaded("qwen2", QUESTIONS)
    ids, spans = llm.tokenizer.encode_spans(CONTEXT, before=QUESTION)
    at = CONTEXT.index("Zürich")
    token = next(i for i, span in enumerate(spans) if span == (at, at + 1))
    assert llm.tokenizer.decode([ids[token]]) == "Z"

    def program(*arguments: Any, **more: Any) -> np.ndarray:
        made = np.zeros((len(ids), 2), np.float32)
        made[token, 0] = made[token + 6, 1] = 30  # ü is two tokens
        return made

    llm._outputs = program  # type: ignore[method-assign]
    (span,) = llm.extract(QUESTION, CONTEXT)
    assert (span.text, span.start, span.stop) == ("Zürich", at, at + 6)
    assert span.score > 0.99


@pytest.mark.parametrize(
    ("problem", "scores"),
    [
        (None, lambda x: torch.softmax(x, -1)),
        ("single_label_classification", lambda x: torch.softmax(x, -1)),
        ("multi_label_classification", lambda x: torch.sigmoid(x)),
        ("regression", lambda x: x),
    ],
)
def test_texts_get_their_labels(problem: Any, scores: Any, loaded: Any, backend: str) -> None:
    """Labels in another order, scores of the wrong kind, the wrong token looked at."""
    llm, model, tokenizer = loaded("smollm3", TEXTS, problem_type=problem, pad_token_id=0)
    with torch.no_grad():
        want = scores(model(**tokenizer(TEXT, return_tensors="pt")).logits[0]).numpy()
    got = llm.classify(TEXT)
    assert [label.score for label in got] == sorted((label.score for label in got), reverse=True)
    by_name = {label.label: label.score for label in got}
    close([by_name[LABELS[i]] for i in range(3)], want, backend)


def test_one_label_is_a_probability(loaded: Any, backend: str) -> None:
    """A softmax over one label, which is 1 whatever the text says."""
    llm, model, tokenizer = loaded("llama", TEXTS, id2label={0: "yes"}, label2id={"yes": 0})
    with torch.no_grad():
        want = torch.sigmoid(model(**tokenizer(TEXT, return_tensors="pt")).logits[0]).numpy()
    (label,) = llm.classify(TEXT)
    assert label.label == "yes"
    close(label.score, want[0], backend)


@pytest.mark.parametrize("ids", [[5, 6, 7], [5, 9, 9], [9, 9, 9], [9, 5, 9], [5]])
def test_the_last_token_is_transformers_choice(ids: list[int]) -> None:
    """A pad, or an end of text that is the pad too, taken for the last token of a text."""
    seen = torch.tensor([ids]) != 9
    want = int((torch.arange(len(ids), dtype=torch.int32) * seen.int()).argmax(-1))
    assert last_token(ids, 9) == want
    assert last_token(ids, None) % len(ids) == len(ids) - 1


def test_tokens_get_their_labels(loaded: Any, backend: str) -> None:
    """A label next to the wrong piece of text; a label for the BOS."""
    llm, model, tokenizer = loaded("qwen3", TOKENS)
    inputs = tokenizer(TEXT, return_tensors="pt")
    want = torch.softmax(torch.tensor(outputs(model, input_ids=inputs["input_ids"]))[0], -1).numpy()[1:]
    got = llm.classify_tokens(TEXT)
    assert len(got) == len(want) == len(TEXT.encode())
    for token, probabilities in zip(got, want, strict=True):
        assert token.text == TEXT[token.start : token.stop]
        best = LABELS[int(probabilities.argmax())]
        close(token.score, probabilities.max(), backend)
        if backend == "reference" or np.ptp(np.sort(probabilities)[-2:]) > TOLERANCES["cpu"]:
            assert token.label == best
    assert [token.text for token in got[:2]] == ["G", "r"]


@pytest.mark.parametrize("pooling", ["mean", "last", "cls"])
@pytest.mark.parametrize("head", [BASE, "ForCausalLM", TOKENS])
def test_embeddings_are_the_pooled_last_hidden_states(
    head: str, pooling: Any, loaded: Any, backend: str
) -> None:
    """Pads in a mean, a last token that is a pad, a state before the norm, a vector not of length 1."""
    llm, model, tokenizer = loaded("mistral", head, sliding_window=8)
    texts = [TEXT, "a", "The capital of France is Paris. " * 4]
    below = model if head == BASE else model.model
    wanted = []
    for text in texts:
        with torch.no_grad():
            hidden = below(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        wanted.append({"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling].numpy())
    raw = llm.embed(texts, pooling=pooling, normalize=False)
    assert raw.dtype == np.float32
    close(raw, np.stack(wanted), backend)
    normal = llm.embed(texts, pooling=pooling)
    np.testing.assert_allclose(np.linalg.norm(normal, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(normal * np.linalg.norm(raw, axis=1, keepdims=True), raw, atol=1e-5)
    np.testing.assert_array_equal(llm.embed(TEXT, pooling=pooling), normal[0])
    assert llm.embed([]).shape == (0, 64)
    np.testing.assert_array_equal(llm.embed([TEXT] * 70, pooling=pooling)[-1], normal[0])


def test_a_language_model_still_generates(loaded: Any) -> None:
    """Names in front of tensors that a language model's are taken for."""
    llm, _, _ = loaded("llama", "ForCausalLM")
    assert len(llm.generate("Hi", max_tokens=3, temperature=0, ignore_eos=True).token_ids) == 3
    with pytest.raises(
        UnsupportedError, match="a model for question answering; this is a model for language modeling"
    ):
        llm.extract("a", "b")


def test_research_beside_a_request_changes_none_of_its_tokens(loaded: Any) -> None:
    """Pages, plans or buffers that a forward or an embedding shares with the requests under way."""
    llm, _, _ = loaded("mistral", "ForCausalLM", sliding_window=8)
    greedy = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
    want = llm.generate(TEXT, **greedy).token_ids
    alone = llm.model.forward([list(range(40))] * 3)
    cache, got = llm.model.new_cache(2, 64), []
    for chunk in llm.stream(TEXT, **greedy):
        got += chunk.token_ids
        llm.model.forward(np.full((2, 1), len(got)), cache=cache)
        np.testing.assert_array_equal(llm.model.forward([list(range(40))] * 3), alone)
        llm.embed(["a", TEXT])
    assert got == want
    assert cache.n_tokens > 3


def test_forward_gives_what_the_engine_gives(tmp_path: Path) -> None:
    """Two ways through the model that differ by a bit: the plan, the chunks or the cache are not the same."""
    make(tmp_path, "qwen2", "ForCausalLM")
    ids = np.random.default_rng(1).integers(0, 250, 200)
    with LLM(tmp_path, n_threads=2) as llm:
        np.testing.assert_array_equal(llm.model.forward(ids)[0], llm.logits(ids))


@pytest.mark.parametrize(
    ("head", "use"),
    [(QUESTIONS, r"extract\(\)"), (TEXTS, r"classify\(\)"), (TOKENS, "classify_tokens"), (BASE, "embed")],
)
def test_heads_generate_no_text(head: str, use: str, tmp_path: Path) -> None:
    """A token sampled from two logits, or an error that hides which method there is."""
    make(tmp_path, "llama", head)
    with LLM(tmp_path, backend="reference") as llm:
        messages = [{"role": "user", "content": "a"}]
        for call in (
            lambda: llm.generate("a"),
            lambda: llm.chat(messages),
            lambda: llm.stream("a"),
            lambda: llm.stream(messages),
            lambda: llm.logits([1]),
        ):
            with pytest.raises(UnsupportedError, match=f"does not support generation: use {use}"):
                call()
        seen: list[str] = []
        with llm.hooks({"blocks.0.hook_resid_pre": lambda name, x: seen.append(name)}):
            llm.embed("a")
        assert seen == ["blocks.0.hook_resid_pre"]
    with pytest.raises(KukriError, match="closed"):
        llm.embed("a")


@pytest.mark.parametrize(
    ("architecture", "head"), [pair for pair in HEADS if pair[0] in ("llama", "qwen2", "phi")]
)
def test_heads_are_converted(architecture: str, head: str, tmp_path: Path) -> None:
    """A GGUF file without its head, labels or what its scores mean; a head that a mix makes coarse."""
    facts = {"problem_type": "multi_label_classification", "pad_token_id": 5} if head == TEXTS else {}
    make(tmp_path / "from", architecture, head, **facts)
    for name, options in (("to", []), ("q8", ["--type", "Q8_0"])):
        command = ["convert", str(tmp_path / "from"), str(tmp_path / f"{name}.gguf"), *options]
        done = CliRunner().invoke(app, command)
        assert done.exit_code == 0, done.output
    use = {
        QUESTIONS: lambda llm: llm.extract(QUESTION, CONTEXT, top_k=3),
        TEXTS: lambda llm: llm.classify(TEXT),
        TOKENS: lambda llm: llm.classify_tokens(TEXT),
        BASE: lambda llm: llm.embed([TEXT, "a"]).tolist(),
    }[head]
    ids = np.random.default_rng(1).integers(0, 250, (1, 30))
    with (
        LLM(tmp_path / "from", backend="reference") as before,
        LLM(tmp_path / "to.gguf", backend="reference") as after,
        LLM(tmp_path / "q8.gguf", backend="reference") as coarse,
    ):
        assert after.model.config.head == before.model.config.head
        want = before.model.forward(ids)
        np.testing.assert_allclose(after.model.forward(ids), want, atol=2e-5 * np.abs(want).max())
        assert 0 < np.abs(coarse.model.forward(ids) - want).max() < 0.1 * np.abs(want).max()
        heads = [p.type for p in coarse.model.parameters if p.name in ("score.weight", "qa_outputs.weight")]
        assert heads == ([] if head == BASE else ["F32"])
        got, expected = use(after), use(before)
        if head == BASE:
            np.testing.assert_allclose(got, expected, atol=1e-4)
            return
        for one, other in zip(got, expected, strict=True):
            assert one.score == pytest.approx(other.score, abs=1e-4)
            assert replace(one, score=0) == replace(other, score=0)
    done = CliRunner().invoke(app, ["convert", str(tmp_path / "to.gguf"), str(tmp_path / "x"), "--to", "hf"])
    assert done.exit_code == 2
    assert "is not supported in safetensors: transformers names its" in done.output
    assert not (tmp_path / "x").exists()


def test_labels_alone_are_a_classification(tmp_path: Path) -> None:
    """A classifier without kukri's own keys, as llama.cpp's converter writes it, taken for something else."""
    make(tmp_path / "from", "qwen3", TEXTS)
    source, target = tmp_path / "from", tmp_path / "to.gguf"
    assert CliRunner().invoke(app, ["convert", str(source), str(target)]).exit_code == 0
    with GGUFFile(target) as file:
        theirs = {key: file.metadata[key] for key in file.metadata if ".head." not in key}
        tensors = {name: (t.type, file.data(name), t.shape) for name, t in file.tensors.items()}
        write_gguf(tmp_path / "theirs.gguf", theirs, tensors)
        write_gguf(tmp_path / "odd.gguf", {**theirs, "qwen3.head.kind": "language_model"}, tensors)
        write_gguf(tmp_path / "worse.gguf", {**theirs, "qwen3.head.problem_type": "guess"}, tensors)
        write_gguf(tmp_path / "bare.gguf", {**theirs, "qwen3.classifier.output_labels": ["a"]}, tensors)
    with LLM(tmp_path / "theirs.gguf", backend="reference") as llm:
        assert llm.model.config.head.kind == "sequence_classification"
        assert {label.label for label in llm.classify(TEXT)} == set(LABELS.values())
    for name, error, message in (
        ("odd", FormatError, "a language_model head cannot have 3 labels"),
        ("worse", UnsupportedError, "problem_type' is 'guess': only regression"),
        ("bare", FormatError, r"cls\.output\.weight.*has shape \(3, \d+\)"),
    ):
        with pytest.raises(error, match=message):
            LLM(tmp_path / f"{name}.gguf", backend="reference")


def test_wrong_arguments(tmp_path: Path) -> None:
    """One clear error each."""
    make(tmp_path, "llama", QUESTIONS)
    with LLM(tmp_path, backend="reference") as llm:
        for arguments, message in (
            ({"context": ""}, "'context' must not be empty"),
            ({"context": 5}, "must be a string, not int"),
            ({"context": "b", "top_k": 0}, "'top_k' must be at least 1"),
            ({"context": "b", "max_answer_tokens": 0}, "'max_answer_tokens' must be at least 1"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.extract("a", **arguments)
        with pytest.raises(ContextLengthError, match="has 302 tokens and the context holds 256"):
            llm.extract("a", "b" * 300)
        with pytest.raises(RequestError, match="'pooling' must be one of mean, last, cls"):
            llm.embed("a", pooling="max")
        for texts, message in (
            (5, "'texts' must be a text or a list"),
            (["a", 5], "a text must be a string, not int"),
        ):
            with pytest.raises(RequestError, match=message):
                llm.embed(texts)
        with pytest.raises(UnsupportedError, match="requires a model for sequence classification"):
            llm.classify("a")


def test_control_tokens_in_questions_and_contexts_stay_text(tmp_path: Path) -> None:
    """A user's `</s>` that ends the text."""
    make(tmp_path, "llama", QUESTIONS)
    with LLM(tmp_path, backend="reference") as llm:
        ids, _ = llm.tokenizer.encode_spans("a</s>", before="<s>b")
        assert ids.count(256) == 1
        assert 259 not in ids
        assert len(ids) == 1 + 4 + 5


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, FormatError, "id2label"),
        ({"id2label": {"0": 1}}, FormatError, "id2label"),
        ({"id2label": []}, FormatError, "id2label"),
        ({"id2label": {"0": "a"}}, FormatError, "shape"),
        ({"problem_type": "guess"}, UnsupportedError, "problem_type"),
        ({"pad_token_id": "x"}, FormatError, "pad_token_id"),
        ({"architectures": ["LlamaForCausalLM"]}, FormatError, "score.weight|lm_head"),
        ({"architectures": ["LlamaForQuestionAnswering"]}, FormatError, "qa_outputs"),
    ],
)
def test_a_config_that_does_not_fit(
    changes: dict[str, Any], error: Any, message: str, tmp_path: Path
) -> None:
    """Labels that fit no output, a head that is not there."""
    make(tmp_path, "llama", TEXTS, tie_word_embeddings=False)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=message):
        LLM(tmp_path, backend="reference")


def test_labels_default_as_in_transformers(tmp_path: Path) -> None:
    """A checkpoint without id2label refused: two labels are the default, and not written."""
    make(tmp_path, "llama", TEXTS, id2label=None, label2id=None)
    stated = json.loads((tmp_path / "config.json").read_text())
    assert "id2label" not in stated
    with LLM(tmp_path, backend="reference") as llm:
        assert {label.label for label in llm.classify("a")} == {"LABEL_0", "LABEL_1"}


def test_a_135m_model_with_a_head_for_questions_has_134_516_162_parameters(tmp_path: Path) -> None:
    """The head's matrix or bias left out of the count, or an lm_head counted that is not there."""
    config = tr.LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=49152, tie_word_embeddings=True,
    )  # fmt: skip
    with torch.device("meta"):
        model = tr.LlamaForQuestionAnswering(config)
    header, end = {}, 0
    for name, parameter in model.named_parameters():
        start, end = end, end + 2 * parameter.numel()
        header[name] = {"dtype": "BF16", "shape": list(parameter.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # zeros that take no room
    stated = config.to_dict() | {"architectures": ["LlamaForQuestionAnswering"]}
    (tmp_path / "config.json").write_text(json.dumps(stated))
    byte_tokenizer().save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        loaded = load_model(checkpoint.weights(checkpoint.config), checkpoint.config)
    assert loaded.n_parameters == 134_516_162
    assert [p.name for p in loaded.parameters[-2:]] == ["qa_outputs.weight", "qa_outputs.bias"]
