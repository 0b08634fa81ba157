"""Trains small transcoders of a model: `python -m benchmarks.train_transcoders DIR`. Needs PyTorch.

A transcoder with a skip connection for each layer's MLP, on texts that the model writes itself, so that
nothing is downloaded. Much smaller than published ones, and good enough to test what is made with them:
`python -m benchmarks.circuits --transcoders DIR`. Layers that DIR has already are kept.

Features are ReLU's, made sparse by a penalty that is raised and lowered until about as many are active as
asked for: a graph predicts these better than TopK's (`--topk`), of which small changes swap two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Experiment, Table, model_path, run
from kukri import LLM
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.kernels.arrays import FloatArray

_CONTEXT = 128
_LAYERS_AT_ONCE = 5  # whose activations are in memory
_TEXTS_AT_ONCE = 16
_BATCH = 1024  # tokens
_HELD_OUT = 0.1  # share of the tokens
_PENALTY, _PENALTY_STEP = 1e-3, 1.02  # of active features: at first, and its factor in a step
_OUTLIER = 10.0  # medians of the outputs' norm, above which a token is left out
_OPENERS = (
    "The history of", "In biology,", "Once upon a time", "def ", "The president of", "A recent study",
    "Dear", "The capital of", "How to", "In mathematics,", "She said that", "The best way to", "Water is",
    "In the year", "import ", "The company", "Question:", "He went to the store and", "Music", "The river",
)  # fmt: skip


@dataclass(frozen=True)
class Fit:
    """How well a layer's transcoder does on tokens that it was not trained on: shares of the variance of the
    MLP's outputs that it explains, and that the skip connection explains alone; features never active, and
    those active for a token.
    """

    layer: int
    explained: float
    by_skip: float
    dead: float
    active: float


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


def activations(
    llm: LLM, texts: Sequence[list[int]], layers: Sequence[int]
) -> dict[int, tuple[FloatArray, FloatArray]]:
    """What each layer's MLP reads and writes, [tokens, D] each, without the first token of each text."""
    found: dict[int, list[tuple[FloatArray, FloatArray]]] = {layer: [] for layer in layers}
    names = [f"blocks.{i}.{name}" for i in layers for name in ("mlp.hook_in", "hook_mlp_out")]
    for start in range(0, len(texts), _TEXTS_AT_ONCE):
        _, cache = llm.run_with_cache(texts[start : start + _TEXTS_AT_ONCE], names=names, return_type=None)
        kept = np.arange(cache.tokens.shape[1]) < cache.lengths[:, None]
        kept[:, 0] = False
        for layer in layers:
            pair = cache[f"blocks.{layer}.mlp.hook_in"], cache[f"blocks.{layer}.hook_mlp_out"]
            found[layer].append((pair[0][kept], pair[1][kept]))
    return {layer: tuple(map(np.concatenate, zip(*parts))) for layer, parts in found.items()}  # type: ignore[misc]


def train(
    x: FloatArray, y: FloatArray, layer: int, n_features: int, k: int, n_epochs: int, is_topk: bool
) -> tuple[dict[str, FloatArray], Fit]:
    """The arrays of a transcoder of inputs x and outputs y [tokens, D], and how well it does.

    About `k` features are active for a token, or with `is_topk` exactly so many.
    """
    import torch

    generator = torch.Generator().manual_seed(layer)
    norms = np.linalg.norm(y, axis=1)
    kept = norms < _OUTLIER * np.median(norms)
    inputs, outputs = torch.from_numpy(x[kept]), torch.from_numpy(y[kept])
    order = torch.randperm(len(inputs), generator=generator)
    inputs, outputs = inputs[order], outputs[order]
    n_test, width = int(_HELD_OUT * len(inputs)), x.shape[1]
    test, train_x, train_y = (inputs[:n_test], outputs[:n_test]), inputs[n_test:], outputs[n_test:]
    mean_x, mean_y = train_x.mean(0), train_y.mean(0)
    a, b = train_x - mean_x, train_y - mean_y
    ridge = 1e-3 * a.pow(2).sum() / width * torch.eye(width)
    skip = torch.linalg.solve(a.T @ a + ridge, a.T @ b)  # [D in, D out]
    scale = (b - a @ skip).pow(2).mean().sqrt()
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
    n_steps = n_epochs * (len(train_x) // _BATCH)
    optimizer = torch.optim.Adam(parts.values(), lr=2e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / n_steps)
    penalty, limit = _PENALTY, k if is_topk else None
    for indices in _batches(len(train_x), n_epochs, generator):
        given, features = _output(parts, train_x[indices], limit)
        loss = (given - train_y[indices] / scale).pow(2).mean()
        if not is_topk:
            loss = loss + penalty * (features * parts["W_dec"].norm(dim=1)).sum(1).mean()
            is_dense = (features > 0).sum() > k * len(indices)
            penalty *= _PENALTY_STEP if is_dense else 1 / _PENALTY_STEP
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        given, features = _output(parts, test[0], limit)
        total = (test[1] - test[1].mean(0)).pow(2).sum()
        missed = (given * scale - test[1]).pow(2).sum()
        missed_by_skip = ((test[0] - mean_x) @ skip + mean_y - test[1]).pow(2).sum()
        dead = (features == 0).all(0).float().mean()
        active = (features > 0).float().sum(1).mean()
        for name in ("W_dec", "b_dec", "W_skip"):
            parts[name] *= scale
    arrays = {name: part.detach().numpy().astype(np.float16) for name, part in parts.items()}
    arrays["W_skip"] = np.ascontiguousarray(arrays["W_skip"].T)  # as SAELens saves it: [D out, D in]
    explained, by_skip = (float(1 - one / total) for one in (missed, missed_by_skip))
    return arrays, Fit(layer, explained, by_skip, float(dead), float(active))


def _output(parts: dict[str, Any], x: Any, k: int | None) -> tuple[Any, Any]:
    """(outputs, features) of inputs x; the k largest features alone, or all."""
    import torch

    features = torch.relu(x @ parts["W_enc"] + parts["b_enc"])
    if k is not None:
        top = features.topk(k, dim=1)
        features = torch.zeros_like(features).scatter(1, top.indices, top.values)
    return features @ parts["W_dec"] + parts["b_dec"] + x @ parts["W_skip"], features


def _batches(n: int, n_epochs: int, generator: Any) -> Iterator[Any]:
    import torch

    for _ in range(n_epochs):
        order = torch.randperm(n, generator=generator)
        for start in range(0, n - _BATCH + 1, _BATCH):
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
            for layer, (x, y) in activations(llm, texts, together).items():
                started_s = time.perf_counter()
                arrays, fit = train(x, y, layer, given.features, given.active, given.epochs, given.topk)
                save(given.folder / f"layer_{layer}", arrays, fit, given.active if given.topk else None)
                fits.append(fit)
                took_s = time.perf_counter() - started_s
                experiment.say(f"layer {layer}: {fit.explained:.3f} explained, {took_s:.0f} s")
    rows = [
        [str(f.layer), *(f"{share:.3f}" for share in (f.explained, f.by_skip, f.dead)), f"{f.active:.1f}"]
        for f in fits
    ]
    header = ("layer", "explained", "by the skip alone", "dead", "active")
    table = Table("transcoders, on held-out tokens", header, rows)
    experiment.show({"layers": [vars(fit) for fit in fits]}, table)


if __name__ == "__main__":
    run(main)
