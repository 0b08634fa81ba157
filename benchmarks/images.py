"""Seconds to encode a picture, kukri and libmtmd alternating: `python -m benchmarks.images`.

The encoders have true dimensions and random weights (F16), before random texts, in GGUF files that both read;
kukri runs them as the files have them. libmtmd comes with llama-cpp-python; without it kukri is timed alone.
The first token after a new picture and a question is timed in the same way; then of kukri alone, that of its
second turn, and the time between tokens of eight streams while pictures are encoded.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np

from benchmarks.harness import Comparison, Experiment, run
from benchmarks.llama_mtmd import LibMtmd
from benchmarks.make_model import DEVIATION, SHAPES, Shape, make_model
from benchmarks.turns import in_turns
from kukri import LLM, SamplingParams
from kukri.engine import Engine, Request
from kukri.errors import UnsupportedError
from kukri.formats.gguf.mmproj_writer import write_encoder
from kukri.formats.huggingface.vision import vision_config, vision_family
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.kernels.weight_handles import Weight
from kukri.models.weights import NoWeights
from kukri.quant.types import QUANT_TYPES
from kukri.vision.image import ImageInput, ImagePrompt, ImageSpan
from kukri.vision.processors import image_processor

_N_STREAMS, _N_TOKENS = 8, 16
_BEFORE, _AFTER = list(range(100, 140)), list(range(200, 280))  # tokens of a question
_SIGLIP = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 3072}
_QWEN = {"depth": 24, "hidden_size": 1024, "num_heads": 16, "intermediate_size": 4096, "patch_size": 16}


@dataclass(frozen=True)
class Pair:
    """An encoder by the keys of its checkpoint, a text before it, and the keys that the text has more."""

    text: Shape
    config: Mapping[str, Any]
    processor: Mapping[str, Any]
    keys: Mapping[str, Any]


PAIRS = {
    "smolvlm-256m": Pair(
        SHAPES["smollm2-135m"],
        {
            "model_type": "idefics3",
            "vision_config": {**_SIGLIP, "image_size": 512, "patch_size": 16},
            "scale_factor": 4,
        },
        {
            "image_processor_type": "Idefics3",
            **{"size": {"longest_edge": 512}, "max_image_size": {"longest_edge": 512}},
        },
        {},
    ),
    "qwen3-vl-2b": Pair(
        Shape("qwen3vl", 2048, 6144, 4, 16, 8, 128, 32768, 8192, 5e6),  # 4 of 28 layers
        {
            "model_type": "qwen3_vl",
            "vision_config": {**_QWEN, "deepstack_visual_indexes": [5, 11, 17]},
        },
        {
            "image_processor_type": "Qwen2VL",
            **{"patch_size": 16, "min_pixels": 8192, "max_pixels": 1 << 22},
        },
        {
            "qwen3vl.rope.dimension_sections": np.array([24, 20, 20, 0], np.int32),
            "qwen3vl.n_deepstack_layers": 3,
        },
    ),
}


class RandomWeights(NoWeights):
    """A `WeightSource` of random F16 matrices, and vectors of ones."""

    def __init__(self) -> None:
        super().__init__(1 << 30)
        self._random = np.random.default_rng(0)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        """See WeightSource.matrix."""
        numbers = DEVIATION * self._random.standard_normal(shape, np.float32)
        return Weight(numbers.astype(np.float16).view(np.uint8), QUANT_TYPES["F16"], shape, name)

    def vector(self, name: str, size: int) -> FloatArray:
        """See WeightSource.vector."""
        return np.full(size, 0 if name.endswith("bias") else 1, np.float32)

    def has(self, name: str) -> bool:
        """Biases, and one matrix of q, k and v where the family has one."""
        return name.endswith((".bias", ".qkv.weight"))


@dataclass(frozen=True)
class ImagesReport:
    """The report of `python -m benchmarks.images`: seconds, and ratios libmtmd / kukri."""

    model: str
    n_threads: int
    encode: Comparison | list[float]
    first_token: Comparison | list[float]
    first_s: float
    second_turn_s: float
    between_tokens_ms: dict[str, float]


def main() -> None:
    """Measures and reports."""
    experiment = Experiment(
        "images", "Seconds to encode a picture, alternating with libmtmd.", with_model=False
    )
    experiment.count("-r", "--rounds", 3, "rounds")
    experiment.options.add_argument("--shape", choices=PAIRS, default="smolvlm-256m", help="which encoder")
    given = experiment.parse()
    seen = np.random.default_rng(1).integers(0, 256, (4, 512, 512, 3), np.uint8)
    new = (np.roll(seen[0], i, axis=0) for i in range(1, 1 << 30))
    with (
        _files(PAIRS[given.shape]) as (text, mmproj),
        LLM(text, mmproj=mmproj, n_threads=given.threads, max_requests=_N_STREAMS + 1) as llm,
    ):
        sides = [lambda: _encode_s(llm, seen[0])]
        firsts = [lambda: _first_s(llm, next(new))]
        try:
            other = LibMtmd(text, mmproj, given.threads)
            sides.append(lambda: _seconds(lambda: other.rows(seen[0])))
            firsts.append(lambda: _seconds(lambda: other.first_token(seen[0], _BEFORE, _AFTER)))
        except UnsupportedError as error:
            experiment.say(str(error))
        rounds = in_turns(sides, given.rounds, experiment.say)
        first_rounds = in_turns(firsts, given.rounds, experiment.say)
        turns = [_turns(llm, picture) for picture in seen[1:3]]
        gaps = _gaps(llm, seen[3])
    first, second = (median(times) for times in zip(*turns))
    between = {"median": 1e3 * median(gaps), "p99": 1e3 * float(np.quantile(gaps, 0.99))}
    (encode, encode_words), (first_token, first_words) = map(_compared, (rounds, first_rounds))
    report = ImagesReport(given.shape, given.threads, encode, first_token, first, second, between)
    lines = [
        f"encoded in {encode_words}",
        f"first token in {first_words}",
        f"its second turn: {second:.3f} s, {second / first:.1%} of {first:.2f} s",
        f"between tokens of {_N_STREAMS} streams: {between['median']:.0f} ms, p99 {between['p99']:.0f} ms",
    ]
    experiment.show(report, *lines)


def _compared(rounds: Sequence[Sequence[float]]) -> tuple[Comparison | list[float], str]:
    """kukri's seconds and libmtmd's, round by round, or kukri's alone; and in words."""
    values = [values[0] for values in rounds]
    if len(rounds[0]) == 1:
        return values, f"{median(values):.2f} s"
    both = Comparison.of(("libmtmd", "kukri"), [(b, a) for a, b in rounds])
    return both, f"{median(values):.2f} s, {both.median_ratio:.2f} times as fast as libmtmd"


@contextmanager
def _files(pair: Pair) -> Iterator[tuple[Path, Path]]:
    """The text's file and the encoder's."""
    with tempfile.TemporaryDirectory() as folder:
        text, mmproj = Path(folder) / "text.gguf", Path(folder) / "mmproj.gguf"
        make_model(text, pair.text, "Q8_0", "text", keys=pair.keys)
        family = vision_family(pair.config)
        config = vision_config(pair.config, mmproj, pair.text.d_model)
        assert family is not None
        assert config is not None
        processor = image_processor(
            {**pair.processor, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}, {}, pair.config
        )
        write_encoder(mmproj, RandomWeights(), family, config, processor, {})
        yield text, mmproj


def _seconds(work: Any) -> float:
    start_s = perf_counter()
    work()
    return perf_counter() - start_s


def _prepared(llm: LLM, picture: ByteArray) -> ImageInput:
    assert llm.image_processor is not None
    return llm.image_processor.prepare(picture)


def _encode_s(llm: LLM, picture: ByteArray) -> float:
    """Seconds to prepare and encode a picture, from nothing."""
    encodings = llm.engine.encodings
    start_s = perf_counter()
    image = _prepared(llm, picture)
    while encodings.advance(image, is_brief=False) is None:
        pass
    return perf_counter() - start_s


def _asked(llm: LLM, image: ImageInput, before: list[int], after: list[int]) -> ImagePrompt:
    run = [llm.vision.vision_config.image_token_id] * image.n_tokens
    return ImagePrompt([*before, *run, *after], (image,), (ImageSpan(len(before), image.n_tokens, 0),))


def _request(engine: Engine, asked: Any, n_tokens: int) -> Request:
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    request = engine.maker.make_request(asked, params)
    engine.add_request(request)
    return request


def _first_token_s(llm: LLM, asked: ImagePrompt) -> tuple[float, list[int]]:
    start_s = perf_counter()
    request = _request(llm.engine, asked, _N_TOKENS)
    while not request.n_generated:
        llm.engine.step()
    taken_s = perf_counter() - start_s
    while not request.has_ended:
        llm.engine.step()
    return taken_s, request.output_ids


def _first_s(llm: LLM, picture: ByteArray) -> float:
    """Seconds to prepare a new picture, and to the first token of a question about it."""
    start_s = perf_counter()
    image = _prepared(llm, picture)
    return perf_counter() - start_s + _first_token_s(llm, _asked(llm, image, _BEFORE, _AFTER))[0]


def _turns(llm: LLM, picture: ByteArray) -> tuple[float, float]:
    """Seconds to the first token of a question about a new picture, and of a second one."""
    image = _prepared(llm, picture)
    first_s, answer = _first_token_s(llm, _asked(llm, image, _BEFORE, _AFTER))
    image = _prepared(llm, picture)
    second_s, _ = _first_token_s(llm, _asked(llm, image, _BEFORE, [*_AFTER, *answer, *range(300, 320)]))
    return first_s, second_s


def _gaps(llm: LLM, picture: ByteArray) -> list[float]:
    """Seconds between the tokens of streams while a picture is encoded."""
    engine = llm.engine
    streams = [_request(engine, list(range(i, i + 32)), 400) for i in range(_N_STREAMS)]
    while not all(stream.n_generated for stream in streams):
        engine.step()
    asked = _request(engine, _asked(llm, _prepared(llm, picture), [1], [2, 3]), 1)
    gaps, counts, last_s = [], [stream.n_generated for stream in streams], [perf_counter()] * _N_STREAMS
    while not asked.n_generated and not all(stream.has_ended for stream in streams):
        engine.step()
        now_s = perf_counter()
        for i, stream in enumerate(streams):
            if stream.n_generated > counts[i]:
                gaps.append(now_s - last_s[i])
                counts[i], last_s[i] = stream.n_generated, now_s
    for stream in streams:
        engine.abort(stream)
    return gaps


if __name__ == "__main__":
    run(main)
