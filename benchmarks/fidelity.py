"""Rounding error against the model's own arithmetic: `python -m benchmarks.fidelity`.

The judge is transformers in float32 on the same weights, dequantized from the same file. Over the tokens of
some prose, the mean of KL(transformers || kukri) is the cost of rounding: activations in int8, keys and
values in fp16. llama.cpp is measured the same way in the same run, if it is installed. The reference backend,
here with a cache in float32 too, rounds nothing: its largest difference of a logit tells model from rounding.

`-n 8192 --sources --no-reference` compares over a long context: programs of Python's standard library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from sysconfig import get_path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np

from benchmarks.harness import Experiment, Say, Table, model_path, run, silent
from benchmarks.llama_cpp import LlamaCpp, import_llama_cpp
from kukri import LLM
from kukri.config import ModelConfig
from kukri.errors import ConfigError, UnsupportedError
from kukri.evaluate.divergence import divergence
from kukri.evaluate.text import read_text
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.tensor_names import hf_name
from kukri.formats.gguf.weights import GGUFWeights
from kukri.kernels import reference as reference_backend
from kukri.kernels.arrays import FloatArray
from kukri.quant.blocks import dequantize
from kukri.tokenizer import Tokenizer

_JUDGES = {"llama": "Llama", "qwen2": "Qwen2"}  # transformers' classes by architecture
_MODULES = ("argparse", "typing", "statistics")  # of which even another version has enough


def python_sources() -> str:
    """Some 80,000 tokens of programs: sources of Python's standard library, of the version that runs."""
    return "".join(Path(get_path("stdlib"), f"{name}.py").read_text("utf-8") for name in _MODULES)


@dataclass(frozen=True)
class Distance:
    """One engine against transformers over all tokens. KL divergences in nats."""

    mean_kl: float
    max_kl: float
    same_top: float  # share of tokens after which both find the same token likeliest
    max_logit_difference: float


@dataclass(frozen=True)
class FidelityReport:
    """The report of `python -m benchmarks.fidelity`. `llama_cpp` is None if it is not installed."""

    model: str
    n_tokens: int
    kukri: Distance
    kukri_q8_0_cache: Distance
    kukri_q4_cache: Distance
    reference_q4_cache: Distance | None
    reference_q4_cache_unrotated: Distance | None
    kukri_reference: Distance | None
    llama_cpp: Distance | None


def compare(
    model: str | None, text: str, n_tokens: int, n_threads: int, *, with_reference: bool, say: Say = silent
) -> FidelityReport:
    """Compares on the first `n_tokens` tokens of `text`.

    Raises UnsupportedError without transformers, ConfigError on a text that is too short.
    """
    transformers, torch = _judge_modules()
    path = model_path(model, n_tokens)
    ids = Tokenizer.from_gguf(path).encode(text)
    if len(ids) < n_tokens:
        raise ConfigError(f"the text has {len(ids)} tokens and {n_tokens} are asked for: ask for fewer")
    ids = ids[:n_tokens]
    say("transformers, float32")
    judge = _judge_logits(transformers, torch, path, ids, n_threads)
    say("llama-cpp-python")
    llama_cpp = _llama_cpp_logits(path, ids, n_threads)
    say("kukri")
    kukri = distance(judge, _kukri_logits(path, ids, n_threads))
    say("kukri, q8_0 cache")
    q8_0_cache = distance(judge, _kukri_logits(path, ids, n_threads, "q8_0"))
    say("kukri, q4 cache")
    q4_cache = distance(judge, _kukri_logits(path, ids, n_threads, "q4"))
    reference = rotated = unrotated = None
    if with_reference:
        say("kukri's reference backend")
        reference = distance(judge, _reference_logits(path, ids))
        say("kukri's reference backend, q4 cache")
        rotated = distance(judge, _reference_logits(path, ids, "q4"))
        say("kukri's reference backend, q4 cache without rotation")
        with patch.object(reference_backend, "rotate_heads", lambda heads: heads):
            unrotated = distance(judge, _reference_logits(path, ids, "q4"))
    peer = None if llama_cpp is None else distance(judge, llama_cpp)
    return FidelityReport(
        str(path), n_tokens, kukri, q8_0_cache, q4_cache, rotated, unrotated, reference, peer
    )


def distance(judge: FloatArray, other: FloatArray) -> Distance:
    """The distance of `other` from `judge`, logits float32 [T, V] of the same tokens."""
    found = divergence(judge, other, np.zeros(len(judge), np.int64))
    difference = max(float(np.abs(a - b).max()) for a, b in zip(judge, other, strict=True))
    return Distance(float(found.kl.mean()), float(found.kl.max()), float(found.same_top.mean()), difference)


def _judge_modules() -> tuple[Any, Any]:
    try:
        return import_module("transformers"), import_module("torch")
    except ImportError as error:
        raise UnsupportedError(
            f"{error.name} is not installed: run `pip install -e '.[test]'`, which has it"
        ) from None


def _judge_logits(
    transformers: Any, torch: Any, path: Path, ids: Sequence[int], n_threads: int
) -> FloatArray:
    torch.set_num_threads(n_threads)
    model = judge_model(transformers, torch, path)
    model.set_attn_implementation("sdpa")  # without all scores in memory at once
    with torch.inference_mode():
        logits: FloatArray = model.eval()(torch.tensor([list(ids)])).logits[0].numpy()
    return logits


def judge_model(transformers: Any, torch: Any, path: Path) -> Any:
    """transformers' model of a file's weights, dequantized to float32. Raises UnsupportedError."""
    with GGUFFile(path) as file:
        config = model_config(file)
        if config.architecture not in _JUDGES:
            names = " and ".join(_JUDGES)
            raise UnsupportedError(f"architecture {config.architecture!r} is not compared: {names} are")
        state = {name: torch.from_numpy(array) for name, array in _dequantized(file, config)}
    if config.tie_embeddings:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    with torch.device("meta"):
        name = _JUDGES[config.architecture]
        model = getattr(transformers, f"{name}ForCausalLM")(_judge_config(transformers, config))
    model.load_state_dict(state, strict=True, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # no part of the state: still on meta
    return model


def _dequantized(file: GGUFFile, config: ModelConfig) -> Iterator[tuple[str, FloatArray]]:
    """Every tensor in float32 under the name that transformers gives it, q and k in its order of rows."""
    source = GGUFWeights(file, config)
    for tensor in file.tensors.values():
        name = hf_name(tensor.name)
        if len(tensor.shape) == 1:
            yield name, source.vector(name, tensor.shape[0]).copy()
        else:
            weight = source.matrix(name, (tensor.shape[0], tensor.shape[1]))
            yield name, dequantize(weight.data, weight.type).reshape(weight.shape)


def _judge_config(transformers: Any, config: ModelConfig) -> Any:
    return getattr(transformers, f"{_JUDGES[config.architecture]}Config")(
        hidden_size=config.d_model,
        intermediate_size=config.d_ffn,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.d_head,
        num_hidden_layers=config.n_layers,
        vocab_size=config.n_vocab,
        tie_word_embeddings=config.tie_embeddings,
        max_position_embeddings=config.max_context,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        rms_norm_eps=config.norm_eps,
        attn_implementation="eager",
    )


def _kukri_logits(
    path: Path, ids: Sequence[int], n_threads: int, kv_type: Literal["f16", "q8_0", "q4"] = "f16"
) -> FloatArray:
    with LLM(path, n_threads=n_threads, max_context=len(ids), kv_type=kv_type) as llm:
        return llm.logits(ids)


def _reference_logits(path: Path, ids: Sequence[int], kv_type: Literal["f32", "q4"] = "f32") -> FloatArray:
    with LLM(path, max_context=len(ids), backend="reference", kv_type=kv_type) as llm:
        return llm.logits(ids)


def _llama_cpp_logits(path: Path, ids: Sequence[int], n_threads: int) -> FloatArray | None:
    try:
        import_llama_cpp()
    except UnsupportedError:
        return None
    engine = LlamaCpp(path, n_threads, len(ids), all_logits=True)
    logits = engine.logits(list(ids))
    engine.close()
    return logits


def _row(name: str, found: Distance) -> list[str]:
    kl = [f"{found.mean_kl:.6f}", f"{found.max_kl:.5f}"]
    return [name, *kl, f"{found.same_top:.2%}", f"{found.max_logit_difference:.5f}"]


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("fidelity", "Compare kukri's probabilities with float32 transformers on prose.")
    experiment.count("-n", "--tokens", 1024, "tokens compared")
    options = experiment.options
    texts = options.add_mutually_exclusive_group()
    texts.add_argument("--text", type=Path, help="a UTF-8 file to take them from (the opening of a novel)")
    texts.add_argument("--sources", action="store_true", help="take Python's standard library instead")
    options.add_argument("--no-reference", action="store_true", help="skip the slow reference backend")
    given = experiment.parse()
    text = python_sources() if given.sources else read_text(given.text)
    with_reference = not given.no_reference
    report = compare(
        given.model, text, given.tokens, given.threads, with_reference=with_reference, say=experiment.say
    )
    found = {
        "kukri": report.kukri,
        "kukri, q8_0 cache": report.kukri_q8_0_cache,
        "kukri, q4 cache": report.kukri_q4_cache,
        "llama-cpp-python": report.llama_cpp,
        "kukri, reference": report.kukri_reference,
        "reference, q4 cache": report.reference_q4_cache,
        "the same without rotation": report.reference_q4_cache_unrotated,
    }
    rows = [_row(name, distance) for name, distance in found.items() if distance is not None]
    title = f"against transformers in float32, {report.n_tokens} tokens"
    experiment.show(report, Table(title, ["", "mean KL", "max KL", "same top", "max logit diff"], rows))


if __name__ == "__main__":
    run(main)
