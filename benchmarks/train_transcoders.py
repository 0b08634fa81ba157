"""Trains small transcoders of a model: `python -m benchmarks.train_transcoders DIR`. Needs PyTorch.

A transcoder with a skip connection for each layer's MLP, on texts that the model writes itself, so that
nothing is downloaded. Much smaller than published ones, and good enough to test what is made with them:
`python -m benchmarks.circuits --transcoders DIR`. Layers that DIR has already are kept.

Features are ReLU's, made sparse by a penalty that is raised and lowered until about as many are active as
asked for: a graph predicts these better than TopK's (`--topk`), of which small changes swap two.

They learn what an MLP writes, and how its output changes with its input: a graph predicts the second.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Table, model_path, run
from kukri import LLM
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.kernels.arrays import FloatArray

_CONTEXT = 128
_LAYERS_AT_ONCE = 3  # whose activations are in memory
_TEXTS_AT_ONCE = 16
_BATCH = 1024  # tokens
_HELD_OUT = 0.1  # share of the tokens
_PENALTY, _PENALTY_STEP = 1e-3, 1.02  # of active features: at first, and its factor in a step
_MOVED = 0.1  # of the way from an input to another token's, to see how the output answers
_OUTLIER = 10.0  # medians of the outputs' norm, above which a token is left out
_OPENERS = (
    "The history of", "In biology,", "Once upon a time", "def ", "The president of", "A recent study",
    "Dear", "The capital of", "How to", "In mathematics,", "She said that", "The best way to", "Water is",
    "In the year", "import ", "The company", "Question:", "He went to the store and", "Music", "The river",
)  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """How well a layer's transcoder does on tokens that it was not trained on: shares of the variance of the
    MLP's outputs that it explains, and that the skip connection explains alone; the same of answers, which
    are changes of the output by a move of the input; features never active, and those active for a token.
    """

    layer: int
    explained: float
    by_skip: float
    answers: float
    answers_by_skip: float
    dead: float
    active: float


@dataclass(frozen=True)
class Seen:
    """What a layer's MLP read and wrote, moves of its inputs, and the changes of its outputs: [tokens, D]."""

    inputs: FloatArray
    outputs: FloatArray
    moves: FloatArray
    answers: FloatArray


def write_texts(llm: LLM, n_tokens: int) -> list[list[int]]:
    """Token ids of texts that the model writes, at temperature 1."""
    texts: list[list[int]] = []
    seed = 0
    while sum(map(len, texts)) < n_tokens:
        begun = [llm.tokenizer.encode(opener) for opener in _OPENERS]
        done = llm.generate(begun, max_tokens=_CONTEXT - 16, temperature=1.0, seed=seed, ignore_eos=True)
        texts += [[*ids, *result.token_ids] for ids, result in zip(begun, done)]
        seed += len(begun)
    return texts


def activations(llm: LLM, texts: Sequence[list[int]], layers: Sequence[int]) -> dict[int, Seen]:
    """What each layer's MLP does with the tokens of the texts, without the first of each."""
    found: dict[int, list[tuple[FloatArray, ...]]] = {layer: [] for layer in layers}
    reads, writes = [f"blocks.{i}.mlp.hook_in" for i in layers], [f"blocks.{i}.hook_mlp_out" for i in layers]
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        some = texts[start : start + _TEXTS_AT_ONCE]
        _, cache = llm.run_with_cache(some, names=[*reads, *writes], return_type=None)
        moves = {read: _MOVED * (np.roll(cache[read], 1, axis=0) - cache[read]) for read in reads}
        hooks = [(read, _replace_by(cache[read] + moves[read])) for read in reads]
        _, moved = llm.run_with_cache(some, names=writes, fwd_hooks=hooks, return_type=None)
        kept = np.arange(cache.tokens.shape[1]) < cache.lengths[:, None]
        kept[:, 0] = False
        for layer, read, write in zip(layers, reads, writes):
            parts = cache[read], cache[write], moves[read], moved[write] - cache[write]
            found[layer].append(tuple(part[kept] for part in parts))
    return {layer: Seen(*map(np.concatenate, zip(*parts))) for layer, parts in found.items()}


def _replace_by(array: FloatArray) -> Callable[..., FloatArray]:
    return lambda value, hook: array


def train(
    seen: Seen, layer: int, n_features: int, k: int, n_epochs: int, is_topk: bool
) -> tuple[dict[str, FloatArray], Fit]:
    """The arrays of a transcoder of what a layer's MLP was seen to do, and how well it does.

    About `k` features are active for a token, or with `is_topk` exactly so many.
    """
    import torch

    generator = torch.Generator().manual_seed(layer)
    norms = np.linalg.norm(seen.outputs, axis=1)
    kept = np.flatnonzero(norms < _OUTLIER * np.median(norms))
    kept = kept[torch.randperm(len(kept), generator=generator).numpy()]
    n_test, width = int(_HELD_OUT * len(kept)), seen.inputs.shape[1]
    x, y, moves, answers = (
        torch.from_numpy(part[kept]) for part in (seen.inputs, seen.outputs, seen.moves, seen.answers)
    )
    mean_x, mean_y = x[n_test:].mean(0), y[n_test:].mean(0)
    a, b = x[n_test:] - mean_x, y[n_test:] - mean_y
    ridge = 1e-3 * a.pow(2).sum() / width * torch.eye(width)
    skip = torch.linalg.solve(a.T @ a + ridge, a.T @ b)  # [D in, D out]
    scale = (b - a @ skip).pow(2).mean().sqrt()
    answers_scale = (answers - moves @ skip)[n_test:].pow(2).mean().sqrt() / scale
    encoder = torch.randn(width, n_features, generator=generator) / a.pow(2).sum(1).mean().sqrt()
    parts = {
        "W_enc": encoder,
        "b_enc": -(mean_x @ encoder),
        "W_dec": torch.randn(n_features, width, generator=generator) * 0.01,
        "b_dec": (mean_y - mean_x @ skip) / scale,
        "W_skip": skip / scale,
    }
    for part in parts.values():
        part.requires_grad_()
    n_steps = n_epochs * ((len(x) - n_test) // _BATCH)
    optimizer = torch.optim.Adam(parts.values(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / n_steps)
    penalty, limit = _PENALTY, k if is_topk else None
    torch.set_float32_matmul_precision("medium")  # bfloat16 where the processor multiplies it faster
    for rows in _batches(n_test, len(x), n_epochs, generator):
        given, features = _output(parts, x[rows], limit)
        answered = _output(parts, x[rows] + moves[rows], limit)[0] - given
        loss = (given - y[rows] / scale).pow(2).mean()
        loss = loss + ((answered - answers[rows] / scale) / answers_scale).pow(2).mean()
        if not is_topk:
            loss = loss + penalty * (features * parts["W_dec"].norm(dim=1)).sum(1).mean()
            is_dense = (features > 0).sum() > k * len(rows)
            penalty *= _PENALTY_STEP if is_dense else 1 / _PENALTY_STEP
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    torch.set_float32_matmul_precision("highest")
    with torch.no_grad():
        test = slice(n_test)
        given, features = _output(parts, x[test], limit)
        answered = _output(parts, x[test] + moves[test], limit)[0] - given
        fit = Fit(
            layer,
            _explained(y[test], given * scale),
            _explained(y[test], (x[test] - mean_x) @ skip + mean_y),
            _explained(answers[test], answered * scale),
            _explained(answers[test], moves[test] @ skip),
            float((features == 0).all(0).float().mean()),
            float((features > 0).float().sum(1).mean()),
        )
        for name in ("W_dec", "b_dec", "W_skip"):
            parts[name] *= scale
    arrays = {name: part.detach().numpy().astype(np.float16) for name, part in parts.items()}
    arrays["W_skip"] = np.ascontiguousarray(arrays["W_skip"].T)  # as SAELens saves it: [D out, D in]
    return arrays, fit


def _explained(true: Any, given: Any) -> float:
    """The share of the variance of `true` [tokens, D] that `given` explains."""
    return float(1 - (given - true).pow(2).sum() / (true - true.mean(0)).pow(2).sum())


def _output(parts: dict[str, Any], x: Any, k: int | None) -> tuple[Any, Any]:
    """(outputs, features) of inputs x; the k largest features alone, or all."""
    import torch

    features = torch.relu(x @ parts["W_enc"] + parts["b_enc"])
    if k is not None:
        top = features.topk(k, dim=1)
        features = torch.zeros_like(features).scatter(1, top.indices, top.values)
    return features @ parts["W_dec"] + parts["b_dec"] + x @ parts["W_skip"], features


def _batches(first: int, stop: int, n_epochs: int, generator: Any) -> Iterator[Any]:
    """Row numbers from `first` to `stop`, each once an epoch but for what does not fill a batch."""
    import torch

    for _ in range(n_epochs):
        order = first + torch.randperm(stop - first, generator=generator)
        for start in range(0, stop - first - _BATCH + 1, _BATCH):
            yield order[start : start + _BATCH]


def save(folder: Path, arrays: dict[str, FloatArray], fit: Fit, k: int | None) -> None:
    """Writes a layer as SAELens does; TopK's with their k."""
    folder.mkdir(exist_ok=True)
    facts = {
        "architecture": "skip_transcoder",
        "activation_fn_kwargs": {} if k is None else {"k": k},
        "metadata": vars(fit),
    }
    (folder / "cfg.json").write_text(json.dumps(facts))
    (folder / "sae_weights.safetensors").write_bytes(safetensors_bytes(arrays, {}))


def main() -> None:
    """Trains what is missing, and reports how well each layer does."""
    experiment = Experiment("train_transcoders", "Trains a small transcoder of each layer.")
    experiment.options.add_argument("folder", type=Path, metavar="DIR")
    experiment.count("-n", "--tokens", 100_000, "tokens to train on")
    experiment.count("-f", "--features", 2048, "features a layer")
    experiment.count("-k", "--active", 32, "features that are active for a token")
    experiment.count("-e", "--epochs", 6, "times that each token is seen")
    experiment.options.add_argument("--topk", action="store_true", help="TopK features, not ReLU's")
    given = experiment.parse()
    import torch

    torch.set_num_threads(given.threads)
    given.folder.mkdir(parents=True, exist_ok=True)
    fits = []
    with LLM(model_path(given.model, _CONTEXT), n_threads=given.threads) as llm:
        layers = [i for i in range(llm.config.n_layers) if not (given.folder / f"layer_{i}").exists()]
        texts = write_texts(llm, given.tokens) if layers else []
        experiment.say(f"{len(texts)} texts, {sum(map(len, texts)):,} tokens")
        for first in range(0, len(layers), _LAYERS_AT_ONCE):
            together = layers[first : first + _LAYERS_AT_ONCE]
            for layer, seen in activations(llm, texts, together).items():
                started_s = time.perf_counter()
                arrays, fit = train(seen, layer, given.features, given.active, given.epochs, given.topk)
                save(given.folder / f"layer_{layer}", arrays, fit, given.active if given.topk else None)
                fits.append(fit)
                took_s = time.perf_counter() - started_s
                explained = f"{fit.explained:.3f} of outputs, {fit.answers:.3f} of answers"
                experiment.say(f"layer {layer}: explains {explained}, {took_s:.0f} s")
    rows = [
        [str(f.layer), *(f"{share:.3f}" for share in list(vars(f).values())[1:-1]), f"{f.active:.1f}"]
        for f in fits
    ]
    header = ("layer", "outputs", "by the skip alone", "answers", "by the skip alone", "dead", "active")
    table = Table("transcoders: shares explained, on held-out tokens", header, rows)
    experiment.show({"layers": [vars(fit) for fit in fits]}, table)


if __name__ == "__main__":
    run(main)
