"""Speeds of one request: with fewer bits a weight, with more threads."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path

from benchmarks.ablation.trial import Row, Trial, row
from kukri.bench.offline import Kukri
from kukri.formats.convert import open_gguf, with_recipe, write
from kukri.quant.recipes import Recipe, Rule
from kukri.quant.types import QUANT_TYPES

_FILE_RATIO = (4.0, 4.0)  # 16 bits to 4


def quantization(trial: Trial) -> Iterator[Row]:
    """The model as it is, as F16, and with Q4_0 in every matrix.

    4 bits are more than a quarter of 16, because a block of 32 weights has a scale too (Q4_0: 4.5 bits a
    weight) and may have a minimum (Q4_1: 5), and the embedding is kept in more bits. Writing is bound by the
    bytes that are read for each token, reading by arithmetic.
    """
    usual = next(iter(trial.card.bytes_by_type))
    with tempfile.TemporaryDirectory() as name:
        f16, q4_0 = (Path(name) / f"{type}.gguf" for type in ("F16", "Q4_0"))
        _write_as(trial.path, f16, Recipe("F16"))
        _write_as(f16, q4_0, Recipe(None, (Rule(re.compile("."), QUANT_TYPES["Q4_0"]),)))
        own = {f"the model's {usual}": trial.path} if QUANT_TYPES[usual].block_size > 1 else {}
        files = {"F16": f16, **own, "Q4_0 throughout": q4_0}
        with ExitStack() as stack:
            loaded = [stack.enter_context(closing(_loaded(trial, file))) for file in files.values()]
            rounds = trial.in_turns("quantization", *(partial(_speeds, trial, kukri) for kukri in loaded))
        f16_bytes, *others = (file.stat().st_size for file in files.values())
    for i, (name, n_bytes) in enumerate(zip([*files][1:], others, strict=True), 1):
        yield row(f"{name} for F16: file", "bytes", [(f16_bytes, n_bytes)], _FILE_RATIO)
        for j, what in enumerate(("writing", "reading")):
            yield row(f"{name} for F16: {what}", "tokens/s", [(r[0][j], r[i][j]) for r in rounds])


def threads(trial: Trial) -> Iterator[Row]:
    """Two engines on one file, with one thread and with more.

    Reading prompts is bound by arithmetic, writing by memory, whose bandwidth cores share.
    """
    with ExitStack() as stack:
        loaded = [stack.enter_context(closing(_loaded(trial, trial.path, n))) for n in (1, trial.n_threads)]
        rounds = trial.in_turns("threads", *(partial(_speeds, trial, kukri) for kukri in loaded))
    for j, what in enumerate((f"writing {trial.sizes.n_generate}", f"reading {trial.sizes.n_prompt}")):
        measure = f"{trial.n_threads} threads for 1: {what}"
        yield row(measure, "tokens/s", [(r[0][j], r[1][j]) for r in rounds])


def _loaded(trial: Trial, path: Path, n_threads: int | None = None) -> Kukri:
    context = max(trial.sizes.n_prompt, trial.sizes.n_generate) + 1
    return Kukri(path, n_threads or trial.n_threads, context)


def _speeds(trial: Trial, kukri: Kukri) -> tuple[float, float]:
    """Tokens per second of decode and of prefill."""
    n_generate, n_prompt = trial.sizes.n_generate, trial.sizes.n_prompt
    return n_generate / kukri.decode_s(n_generate), n_prompt / kukri.prefill_s(n_prompt)


def _write_as(source: Path, target: Path, recipe: Recipe) -> None:
    with open_gguf(source) as conversion:
        write(with_recipe(conversion, recipe), target, lambda step: None)
