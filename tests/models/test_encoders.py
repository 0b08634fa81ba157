"""Every encoder against transformers on tiny random models: hidden states, heads, batches, both backends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import ContextLengthError, FormatError, KukriError, RequestError, UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels import make_backend
from kukri.models import ARCHITECTURES
from kukri.models.jina_bert_v2 import alibi
from kukri.models.mpnet import REACH, buckets
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import CONTEXT, ENCODERS, N_LAYERS, V, hf_states, load, save
from tests.models.tiny_llama import Driver, random_ids

with lazy_imports():
    import torch

    from tests.models.jina_class import slopes

IDS = [max(i, 2) for i in random_ids(37, V)]  # no padding, which XLM-RoBERTa has no position for
TOLERANCES = {"reference": 1e-4, "cpu": 2e-3, "torch": 1e-4}  # float16 keys and values on the CPU
TEXTS = ["the cat sat on the mat.", "a", "cats, sitting! " * 9, "", "the mat"]
IN_GGUF = [name for name in ENCODERS if ARCHITECTURES[name].in_gguf]
STREAMS = dict.fromkeys(ENCODERS, "hook_resid_post")  # the tap of what transformers calls hidden states


@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
@pytest.mark.parametrize("name", ENCODERS)
def test_hidden_states_match_transformers_layer_by_layer(name: str, backend: str, tmp_path: Path) -> None:
    """Any mistake of an architecture: names, norms before or after, activation, mask, positions."""
    hf = save(tmp_path, name)
    model = load(tmp_path)
    wanted = hf_states(hf, IDS)
    states: dict[str, np.ndarray] = {}
    names = [f"blocks.{i}.{STREAMS[name]}" for i in range(N_LAYERS)]
    made = make_backend(backend)  # type: ignore[arg-type]
    try:
        hooks: dict[str, list[Any]] = {n: [lambda n, x: states.update({n: x.copy()})] for n in names}
        kv_type = made.exact_kv_type
        got = Driver(model, made, hooks, kv_type=kv_type).run(IDS, [len(IDS)])
    finally:
        getattr(made, "close", lambda: None)()
    assert len(wanted) == N_LAYERS + 1
    for tap, state in zip(names, wanted[1 : -1 if name == "modernbert" else None]):
        np.testing.assert_allclose(states[tap], state, atol=TOLERANCES[backend] * np.abs(state).max(), rtol=0)
    np.testing.assert_allclose(got, wanted[-1], atol=TOLERANCES[backend] * np.abs(got).max(), rtol=0)
    changed = [*IDS[:-1], (IDS[-1] + 1) % V]  # the premise: the first token sees the last one
    assert np.abs(hf_states(hf, changed)[-1][0] - wanted[-1][0]).max() > 1e-3


def wanted_vectors(hf: Any, llm: LLM, texts: list[str], pooling: str) -> np.ndarray:
    rows = []
    for text in texts:
        state = hf_states(hf, llm.tokenizer.encode(text, add_special=True))[-1]
        row = {"mean": state.mean(0), "cls": state[0], "last": state[-1]}[pooling]
        rows.append(row / np.linalg.norm(row))
    return np.array(rows)


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
@pytest.mark.parametrize("name", ENCODERS)
def test_texts_in_a_batch_are_those_alone_to_the_bit(name: str, pooling: Any, tmp_path: Path) -> None:
    """Attention that reaches a neighbour in the step, and sums whose order depends on the batch."""
    hf = save(tmp_path, name)
    with LLM(tmp_path, n_threads=2) as llm:
        together = llm.embed(TEXTS, pooling=pooling)
        np.testing.assert_allclose(together, wanted_vectors(hf, llm, TEXTS, pooling), atol=2e-3, rtol=0)
        alone = np.array([llm.embed(text, pooling=pooling) for text in TEXTS])
        np.testing.assert_array_equal(together, alone)
        assert llm.engine.allocator.n_prefix_hit == 0
        llm.engine.check_integrity()
    with LLM(tmp_path, n_threads=1, max_requests=3, max_step_tokens=16) as llm:
        np.testing.assert_array_equal(llm.embed(TEXTS * 3, pooling=pooling), np.tile(together, (3, 1)))
        llm.engine.check_integrity()


@pytest.mark.parametrize("name", ENCODERS)
def test_a_cross_encoder_scores_pairs_as_transformers(name: str, tmp_path: Path) -> None:
    """Token types of the second text, the pooler, and documents that lose their places."""
    hf = save(tmp_path, name, "ForSequenceClassification", num_labels=1)
    documents = ["the mat", "cats", "a cat sat on a mat, sitting"]
    with LLM(tmp_path, n_threads=1) as llm:
        encoder = llm.text_encoder
        wanted = []
        for document in documents:
            ids = encoder.encode_pairs("cat?", [document]).ids[0]
            types = encoder.token_types(ids)
            more = {} if types is None else {"token_type_ids": torch.tensor(types[None]).long()}
            with torch.no_grad():
                wanted.append(float(torch.sigmoid(hf(torch.tensor([ids]), **more).logits[0, 0])))
        found = llm.rerank("cat?", documents)
        assert [one.index for one in found] == sorted(range(3), key=lambda i: -wanted[i])
        np.testing.assert_allclose([one.score for one in found], sorted(wanted, reverse=True), atol=2e-3)
        assert llm.rerank("cat?", documents, top_n=2) == found[:2]
        with torch.no_grad():
            alone = hf(torch.tensor([llm.tokenizer.encode("the cat", add_special=True)])).logits[0, 0]
        assert llm.classify("the cat")[0].score == pytest.approx(float(torch.sigmoid(alone)), abs=2e-3)
        with pytest.raises(RequestError, match="top_n"):
            llm.rerank("cat?", documents, top_n=0)


def test_distances_have_the_buckets_of_mpnet() -> None:
    """A boundary of a logarithm, and distances that the tiny model's texts are too short for."""
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    ahead = np.arange(-600, 600)
    wanted = MPNetEncoder.relative_position_bucket(torch.from_numpy(ahead)).numpy()
    np.testing.assert_array_equal(buckets(ahead), wanted)
    assert len(set(wanted[600 - REACH :][: 2 * REACH])) == len(set(wanted)) == 31


@pytest.mark.parametrize("n_heads", [1, 4, 6, 12])
def test_slopes_of_alibi(n_heads: int) -> None:
    """Slopes of heads that are no power of 2, in another order."""
    table = alibi(n_heads, 3).data.reshape(n_heads, 6)
    np.testing.assert_allclose(table, -np.outer(slopes(n_heads), [3, 2, 1, 0, 1, 2]), rtol=1e-6)


def test_patterns_have_biases(tmp_path: Path) -> None:
    """A pattern of scores alone, and four-dimensional masks that lose the biases in silence."""
    hf = save(tmp_path, "mpnet")
    with LLM(tmp_path, n_threads=1) as llm:
        _, cache = llm.run_with_cache(IDS)
        with torch.no_grad():
            wanted = hf(torch.tensor([IDS]), output_attentions=True).attentions
        for layer in (0, N_LAYERS - 1):
            got = cache[f"blocks.{layer}.attn.hook_pattern"][0]
            np.testing.assert_allclose(got, wanted[layer][0], atol=2e-3)
        with pytest.raises(KukriError, match="biased by distance"):
            llm.model.forward(np.array([IDS]), np.ones((1, 1, len(IDS), len(IDS)), bool))


def test_older_files_of_jina_hold_gate_and_up_apart(tmp_path: Path) -> None:
    """A file of 2024 that is refused, or whose gate is taken for what it gates."""
    save(tmp_path / "hf", "jina_bert_v2")
    convert_model(tmp_path / "hf", tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    with GGUFFile(tmp_path / "m.gguf") as file:
        stated = dict(file.metadata)
        tensors: dict[str, Any] = {}
        for name, tensor in file.tensors.items():
            parts = [name, name]
            if "ffn_up" in name:
                parts = [name.replace("ffn_up", "ffn_gate"), name]
            rows = np.split(file.data(name), 2) if "ffn_up" in name else [file.data(name)]
            for part, of_part in zip(parts, rows):
                shape = (len(of_part), *tensor.shape[1:]) if "ffn_up" in name else tensor.shape
                tensors[part] = (tensor.type, of_part.copy(), shape)
    write_gguf(tmp_path / "old.gguf", stated, tensors)
    found = []
    for path in ("m.gguf", "old.gguf"):
        with LLM(tmp_path / path, backend="reference") as llm:
            found.append(llm.embed(TEXTS))
    np.testing.assert_allclose(*found, atol=1e-6)


@pytest.mark.parametrize("head", ["ForTokenClassification", "ForQuestionAnswering"])
def test_other_heads_of_bert(head: str, tmp_path: Path) -> None:
    """A pooler that a head of tokens does not have, and a question whose types are not heard."""
    hf = save(tmp_path, "bert", head, num_labels=2)
    with LLM(tmp_path, n_threads=1, backend="reference") as llm:
        if head == "ForTokenClassification":
            ids = llm.tokenizer.encode("the cat sat", add_special=True)
            with torch.no_grad():
                wanted = hf(torch.tensor([ids])).logits[0].softmax(-1).max(-1).values[1:-1]
            found = llm.classify_tokens("the cat sat")
            np.testing.assert_allclose([one.score for one in found], wanted, atol=1e-4)
        else:
            ids, spans = llm.tokenizer.encode_spans("the cat sat", before="cat?")
            types = torch.tensor([int(i > ids.index(3)) for i in range(len(ids))])[None]
            with torch.no_grad():
                out = hf(torch.tensor([ids]), token_type_ids=types)
            start = out.start_logits[0][[s is not None for s in spans]].softmax(0)
            stop = out.end_logits[0][[s is not None for s in spans]].softmax(0)
            best = max(float(start[i] * stop[j]) for i in range(3) for j in range(i, 3))
            assert llm.extract("cat?", "the cat sat")[0].score == pytest.approx(best, abs=1e-4)


def test_word_pieces_are_those_of_transformers(tmp_path: Path) -> None:
    """Case, accents, punctuation, unknown words, and control tokens that a text must not become."""
    import transformers

    save(tmp_path, "bert")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    with LLM(tmp_path, n_threads=1, backend="reference") as llm:
        ours = llm.tokenizer
        for text in ("The CAT sat, on the mats!", "càts", "日本 cat", "", " the\tcat\n", "sittings 123 w3"):
            assert ours.encode(text, add_special=True) == theirs(text).input_ids
        assert 3 not in ours.encode("[SEP]")
        assert 2 not in ours.encode("[CLS] cat")
        assert ours.decode(ours.encode("the cats sat")) == "the cats sat"


def test_long_texts_and_generation_are_clear_errors(tmp_path: Path, caplog: Any) -> None:
    """A text that is cut in silence, or an error of the engine's where the caller is wrong."""
    hf = save(tmp_path, "bert")
    long = "the cat " * CONTEXT
    with LLM(tmp_path, n_threads=1) as llm:
        with pytest.raises(ContextLengthError):
            llm.embed(["a", long])
        cut = llm.embed(["a", long], truncate=True)
        assert "1 of 2 texts were truncated to 96 tokens" in caplog.text
        ids = llm.tokenizer.encode(long, add_special=True)
        state = hf_states(hf, [*ids[: CONTEXT - 1], ids[-1]])[-1].mean(0)
        np.testing.assert_allclose(cut[1], state / np.linalg.norm(state), atol=2e-3)
        with pytest.raises(ContextLengthError):
            llm.rerank("cat", [long])
        assert len(llm.rerank(long, [long, "a"], truncate=True)) == 2
        for call in (
            lambda: llm.generate("a"),
            lambda: llm.chat([{"role": "user", "content": "a"}]),
            lambda: llm.logits([1, 2]),
            lambda: next(llm.stream("a")),
        ):
            with pytest.raises(UnsupportedError, match=r"does not support generation: use embed\(\)"):
                call()
        with pytest.raises(RequestError, match="the prompt 'query' was not found"):
            llm.embed("a", prompt_name="query")
        with pytest.raises(RequestError, match="'dimensions' must be from 1 to 64"):
            llm.embed("a", dimensions=65)
        assert llm.embed("a", dimensions=16).shape == (16,)
        assert np.linalg.norm(llm.embed("a", dimensions=16)) == pytest.approx(1)


@pytest.mark.parametrize("keys", [{}, {"local_attention": 4, "global_attn_every_n_layers": 2}])
def test_modernbert_in_the_words_of_transformers_4(keys: dict[str, Any], tmp_path: Path) -> None:
    """Windows, their pattern and RoPE's bases as older files say them: left out, or taken by other names."""
    theta = {"global_rope_theta": 5000.0, "local_rope_theta": 300.0}
    hf = save(tmp_path, "modernbert", **keys, **theta)
    path = tmp_path / "config.json"
    stated = json.loads(path.read_text())
    assert stated["rope_parameters"]["sliding_attention"]["rope_theta"] == 300.0
    for key in ("rope_parameters", "layer_types"):
        del stated[key]
    path.write_text(json.dumps({**stated, "global_attn_every_n_layers": 3, **keys, **theta}))
    with open_checkpoint(tmp_path) as checkpoint:
        layers = checkpoint.config.layers
    n, window = keys.get("global_attn_every_n_layers", 3), keys.get("local_attention", 8)
    assert [layer.window for layer in layers] == [window // 2 + 1 if i % n else None for i in range(N_LAYERS)]
    backend = make_backend("reference")
    got = Driver(load(tmp_path), backend).run(IDS, [len(IDS)])
    np.testing.assert_allclose(got, hf_states(hf, IDS)[-1], atol=1e-4)


def test_modernbert_that_classifies_a_mean_is_refused(tmp_path: Path) -> None:
    """A cross-encoder whose scores are those of another pooling."""
    save(tmp_path, "modernbert", "ForSequenceClassification", num_labels=1, classifier_pooling="mean")
    with pytest.raises(UnsupportedError, match="classifier_pooling' is 'mean': only 'cls' is supported"):
        load(tmp_path)


def test_a_lost_bias_is_an_error(tmp_path: Path) -> None:
    """A damaged file that loads with zeros in place of a bias."""
    from safetensors.numpy import load_file, save_file

    save(tmp_path, "bert")
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["encoder.layer.1.attention.self.key.bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"1.attention.self.key.bias.*is missing"):
        load(tmp_path)


def test_forward_is_transformers_own(tmp_path: Path) -> None:
    """Rows cut over steps, padding that is seen, and a cache that an encoder cannot use."""
    hf = save(tmp_path, "bert")
    with LLM(tmp_path, n_threads=1, backend="reference") as llm:
        ids = np.array([random_ids(30, V, 1), random_ids(30, V, 2)])
        mask = np.ones_like(ids)
        mask[1, 20:] = 0
        got = llm.model.forward(ids, mask)
        np.testing.assert_allclose(got[0], hf_states(hf, ids[0])[-1], atol=1e-4)
        np.testing.assert_allclose(got[1, :20], hf_states(hf, ids[1, :20])[-1], atol=1e-4)
        cache = llm.model.new_cache(1, 64)
        llm.model.forward(ids[:1], cache=cache)
        with pytest.raises(KukriError, match="encoder"):
            llm.model.forward(ids[:1], cache=cache)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
@pytest.mark.parametrize("name", IN_GGUF)
def test_a_converted_encoder_is_the_same(name: str, head: str, tmp_path: Path) -> None:
    """Tensors, token types, pooling or word pieces that a GGUF file says in another way."""
    source = tmp_path / "source"
    save(source, name, head, **({} if head == "Model" else {"num_labels": 1}))
    (source / "1_Pooling").mkdir()
    (source / "1_Pooling" / "config.json").write_text('{"pooling_mode_cls_token": true}')
    modules = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), ("2", "2_Normalize", "Normalize")]
    listed = [{"name": n, "path": p, "type": f"sentence_transformers.models.{t}"} for n, p, t in modules]
    (source / "modules.json").write_text(json.dumps(listed))
    convert_model(source, tmp_path / "tiny.gguf", None, dry_run=False, as_json=True)
    texts = [text for text in TEXTS if text]
    with (
        LLM(source, n_threads=1, backend="reference") as first,
        LLM(tmp_path / "tiny.gguf", n_threads=1, backend="reference") as second,
    ):
        assert second.text_encoder.config.pooling == ("cls" if head == "Model" else "mean")
        for text in [*TEXTS, "càts, UNKNOWN 日本"]:
            ours, theirs = (llm.tokenizer.encode(text, add_special=True) for llm in (first, second))
            assert ours == theirs
        if head == "Model":
            np.testing.assert_array_equal(first.embed(texts), second.embed(texts))
        else:
            assert first.rerank("cat", texts) == second.rerank("cat", texts)


@pytest.mark.parametrize("head", ["Model", "ForSequenceClassification"])
def test_a_converted_encoder_keeps_its_settings(head: str, tmp_path: Path) -> None:
    """Prompts, the longest text, vectors as they are, a score without a sigmoid: each was lost."""
    source, file = tmp_path / "source", tmp_path / "m.gguf"
    save(source, "bert", head, **({} if head == "Model" else {"num_labels": 1}))
    files = {
        "modules.json": [{"path": "", "type": "a.Transformer"}, {"path": "1_Pooling", "type": "a.Pooling"}],
        "1_Pooling/config.json": {"pooling_mode_mean_tokens": True},
        "config_sentence_transformers.json": {"prompts": {"q": "the cat "}, "default_prompt_name": "q"},
        "sentence_bert_config.json": {"max_seq_length": 9},
        "config.json": json.loads((source / "config.json").read_text())
        | {"sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
    }
    (source / "1_Pooling").mkdir()
    for name, contents in files.items():
        (source / name).write_text(json.dumps(contents))
    convert_model(source, file, None, dry_run=False, as_json=True)
    with open_checkpoint(source) as first, open_checkpoint(file) as second:
        assert first.embedding == second.embedding
        assert not first.embedding.normalizes
        assert (first.embedding.score, first.embedding.max_tokens) == ("identity", 9)
    if head == "Model":
        with (
            LLM(source, n_threads=1, backend="reference") as one,
            LLM(file, n_threads=1, backend="reference") as two,
        ):
            vectors = one.embed(["the mat", "cat " * 5])
            np.testing.assert_array_equal(vectors, two.embed(["the mat", "cat " * 5]))
            assert np.abs(np.linalg.norm(vectors, axis=1) - 1).min() > 0.01, "the premise: not normalized"
            with pytest.raises(ContextLengthError):
                two.embed("cat " * 9, truncate=False)


@pytest.mark.parametrize("stated", ["[]", '{"prompts": 5}', '{"max_seq_length": -1}', "not JSON", 7])
def test_wrong_settings_of_an_embedding_in_gguf_are_named(stated: Any, tmp_path: Path) -> None:
    """A traceback, or settings taken as they come."""
    save(tmp_path / "source", "bert")
    convert_model(tmp_path / "source", tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    with GGUFFile(tmp_path / "m.gguf") as file:
        tensors = {
            name: (t.type, lambda n=name: file.data(n).copy(), t.shape) for name, t in file.tensors.items()
        }
        write_gguf(tmp_path / "b.gguf", {**file.metadata, "kukri.embedding": stated}, tensors)
    with pytest.raises(FormatError, match=r"b\.gguf"), open_checkpoint(tmp_path / "b.gguf"):
        pass


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_GGUF)
def test_llama_cpp_gives_the_same_vectors(name: str, tmp_path: Path) -> None:
    """A file that only kukri understands."""
    llama_cpp = pytest.importorskip("llama_cpp")
    save(tmp_path / "source", name)
    convert_model(tmp_path / "source", tmp_path / "m.gguf", None, dry_run=False, as_json=True)
    text = "the cat sat on the mat sitting"
    with LLM(tmp_path / "m.gguf", n_threads=1, backend="reference") as llm:
        want = llm.embed(text)
    theirs = llama_cpp.Llama(str(tmp_path / "m.gguf"), embedding=True, verbose=False, n_ctx=CONTEXT)
    np.testing.assert_allclose(theirs.embed(text, normalize=True), want, atol=2e-3)
    theirs.close()


@pytest.mark.parametrize("change", ["pooling", "module", "outside", "prompts"])
def test_wrong_files_of_sentence_transformers_are_named(change: str, tmp_path: Path) -> None:
    """A module or pooling that is left out in silence, and paths that leave the directory."""
    save(tmp_path, "bert")
    (tmp_path / "1_Pooling").mkdir()
    pooling = {"pooling_mode_max_tokens": True} if change == "pooling" else {"pooling_mode": "mean"}
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    path = "../1_Pooling" if change == "outside" else "1_Pooling"
    kind = "WeightedLayerPooling" if change == "module" else "Pooling"
    (tmp_path / "modules.json").write_text(json.dumps([{"path": path, "type": f"a.{kind}"}]))
    if change == "prompts":
        (tmp_path / "config_sentence_transformers.json").write_text('{"prompts": {"query": 5}}')
    with pytest.raises((FormatError, UnsupportedError), match=r"pooling|module|prompts"):
        LLM(tmp_path, backend="reference")
