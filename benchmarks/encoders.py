"""Sentences per second of an encoder, kukri and PyTorch alternating: `python -m benchmarks.encoders`.

Short texts of 5 to 30 common words. PyTorch's side is what sentence-transformers does: transformers' model,
texts sorted by length, batches of 32 with padding, the mean of the tokens, normalized; tokenization counts on
both sides. The smallest cosine of two vectors of a text is reported next to the speeds.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.harness import Comparison, Experiment, run
from kukri import LLM
from kukri.bench.turns import in_turns
from kukri.formats import hub
from kukri.kernels.arrays import FloatArray

_TEXT = (
    "the of and a to in is you that it he was for on are as with his they at be this have from or one had by "
    "word but not what all were we when your can said there use an each which she do how their if will up "
    "other about out many then them these so some her would make like him into time has look two more write"
)
_BATCH = 32  # sentence-transformers' default


@dataclass(frozen=True)
class EncodersReport:
    """The report of `python -m benchmarks.encoders`: texts per second, ratios kukri / torch."""

    model: str
    quantize: str | None
    n_threads: int
    n_texts: int
    smallest_cosine: float
    speeds: Comparison


def torch_encoder(path: str, n_threads: int, max_tokens: int) -> Callable[[list[str]], FloatArray]:
    """Texts to normalized vectors [n, D] by transformers and PyTorch."""
    import torch
    import transformers

    torch.set_num_threads(n_threads)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(path).eval()

    def encode(texts: list[str]) -> FloatArray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        rows: list[Any] = [None] * len(texts)
        with torch.inference_mode():
            for start in range(0, len(order), _BATCH):
                places = order[start : start + _BATCH]
                batch = tokenizer(
                    [texts[i] for i in places], return_tensors="pt", padding=True, truncation=True,
                    max_length=max_tokens,
                )  # fmt: skip
                mask = batch.attention_mask.unsqueeze(-1).float()
                mean = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
                for i, row in zip(places, torch.nn.functional.normalize(mean, dim=1).numpy(), strict=True):
                    rows[i] = row
        return np.array(rows, np.float32)

    return encode


def main() -> None:
    """Measures and reports."""
    experiment = Experiment("encoders", "Sentences per second compared with PyTorch.")
    experiment.count("-r", "--rounds", 5, "rounds")
    experiment.count("-n", "--texts", 1000, "texts")
    experiment.options.add_argument("--quantize", help="pack the weights while loading, Q8_0 for example")
    given = experiment.parse()
    random.seed(0)
    words = _TEXT.split()
    texts = [" ".join(random.choices(words, k=random.randint(5, 30))) for _ in range(given.texts)]
    path = hub.resolve(given.model or "minilm")
    with LLM(path, n_threads=given.threads, quantize=given.quantize) as llm:
        theirs = torch_encoder(str(path), given.threads, llm.text_encoder.max_tokens)
        cosine = float((llm.embed(texts[:100]) * theirs(texts[:100])).sum(1).min())

        def speed(encode: Callable[[list[str]], Any]) -> float:
            start_s = time.perf_counter()
            encode(texts)
            return len(texts) / (time.perf_counter() - start_s)

        rounds = in_turns(
            [lambda: speed(llm.embed), lambda: speed(theirs)], given.rounds, experiment.say
        )  # fmt: skip
    speeds = Comparison.of(("kukri", "torch"), rounds)
    report = EncodersReport(str(path), given.quantize, given.threads, given.texts, cosine, speeds)
    experiment.show(report, speeds.table("texts per second"), f"smallest cosine: {cosine:.6f}")


if __name__ == "__main__":
    run(main)
