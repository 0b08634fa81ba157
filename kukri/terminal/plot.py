"""`kukri plot`: what a model does with a prompt as a picture in a file."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kukri.errors import ConfigError
from kukri.interp import gradients, patching, plots
from kukri.interp.features.readers import FeatureReader, SparseAutoencoder
from kukri.interp.features.transcoders import Transcoders
from kukri.llm import LLM
from kukri.terminal.files import check_parent, writing
from kukri.terminal.options import PlotOptions
from kukri.terminal.progress import loading_bar

Kind = Literal["lens", "attention", "patching", "features"]


def write_plot(
    kind: Kind,
    prompt: str,
    model: str | None,
    options: PlotOptions,
    loading: dict[str, Any],
    *,
    as_json: bool,
) -> None:
    """Writes a picture of a prompt, and says where. Raises ConfigError and RequestError."""
    if options.out is None:
        raise ConfigError("-o is required: FILE.png or FILE.svg")
    check_parent(options.out)
    if not (kind == "attention" and _is_page(options.out)):
        plots.require_format(options.out)
    with loading_bar() as progress:
        llm = LLM(model, progress=progress, **loading)
    with llm, writing(options.out):
        tokens = _texts(llm, llm.interp.tokens(prompt)[0])
        _DRAWN[kind](llm, prompt, tokens, options, options.out)
    if as_json:
        print(json.dumps({"file": str(options.out), "tokens": tokens}, ensure_ascii=False))
    else:
        print(f"{options.out}: {len(tokens):,} tokens")


def _lens(llm: LLM, prompt: str, tokens: list[str], options: PlotOptions, path: Path) -> None:
    _, cache = llm.run_with_cache(
        prompt, names=lambda name: name.endswith(("hook_resid_pre", "hook_resid_post")), return_type=None
    )
    plots.logit_lens(cache, lambda token: llm.tokenizer.decode([token]), path)


def _attention(llm: LLM, prompt: str, tokens: list[str], options: PlotOptions, path: Path) -> None:
    name, title = f"blocks.{options.layer}.attn.hook_pattern", f"Layer {options.layer}"
    _, cache = llm.run_with_cache(prompt, names=[name], return_type=None)
    if _is_page(path):
        plots.attention_page(cache[name][0], tokens, path, title)
    else:
        plots.attention_heads(cache[name][0], tokens, path, title=title)


def _patching(llm: LLM, prompt: str, tokens: list[str], options: PlotOptions, path: Path) -> None:
    """Patches the stream of another prompt; the metric is the lead of this one's likeliest next token."""
    if options.against is None:
        raise ConfigError("--against is required: a second prompt with the same number of tokens")
    logits, clean = llm.run_with_cache(prompt, names=lambda name: name.endswith("hook_resid_pre"))
    corrupt, _ = llm.run_with_cache(options.against, names=())
    assert logits is not None
    assert corrupt is not None
    right, wrong = int(logits[0, -1].argmax()), int(corrupt[0, -1].argmax())
    if right == wrong:
        answer = llm.tokenizer.decode([right])
        raise ConfigError(f"--against must have another likeliest next token than {answer!r}")
    lead = gradients.logit_difference(right, wrong)
    moved = patching.get_act_patch_resid_pre(
        llm, options.against, clean, lambda x: lead(x)[0], logits="last", progress=True
    )
    first, second = _texts(llm, [right, wrong])
    plots.heat_map(
        moved - lead(corrupt)[0],
        path,
        title=f"Stream patched: change of the lead of {first!r} over {second!r}",
        x_labels=tokens,
        y_labels=[str(layer) for layer in range(len(moved))],
        y_title="before layer",
    )


def _features(llm: LLM, prompt: str, tokens: list[str], options: PlotOptions, path: Path) -> None:
    reader = _reader(options)
    _, cache = llm.run_with_cache(prompt, names=[reader.name], return_type=None)
    values = reader.features(cache[reader.name][0])
    chosen = options.feature or np.argsort(-values.max(axis=0), kind="stable")[: options.top].tolist()
    if max(chosen) >= reader.n_features:
        raise ConfigError(f"--feature must be from 0 to {reader.n_features - 1}")
    names = [str(feature) for feature in chosen]
    plots.feature_timeline(values[:, chosen], tokens, path, names=names, title=reader.name)


def _reader(options: PlotOptions) -> FeatureReader:
    if (options.sae is None) == (options.transcoders is None):
        raise ConfigError("--sae DIR is required, or --transcoders DIR with --layer N")
    if options.sae is not None:
        return SparseAutoencoder.load(options.sae)
    assert options.transcoders is not None
    transcoders = Transcoders.load(options.transcoders)
    if options.layer not in transcoders.layers:
        raise ConfigError(
            f"--layer {options.layer} was not found among the transcoders of {options.transcoders}"
        )
    reader: FeatureReader = transcoders.reader(options.layer)
    return reader


def _texts(llm: LLM, ids: Iterable[Any]) -> list[str]:
    return [llm.tokenizer.decode([token]) for token in ids]


def _is_page(path: Path) -> bool:
    return path.suffix.lower() in (".html", ".htm")


_DRAWN = {"lens": _lens, "attention": _attention, "patching": _patching, "features": _features}
