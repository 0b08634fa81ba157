"""Interpretability at speed: `python -m benchmarks.interp`, or some of it: `--parts crowd quiet`.

- `sweep`: patches of resid_pre by layer and position, and captures of one layer, next to TransformerLens on
  the same weights, dequantized for it in float32, with as many threads, alternating. Cells are compared, too.
  TransformerLens is no dependency: `pip install --group interp-test`.
- `crowd`: streams of which some are captured and some steered, next to as many that nobody listens to; the
  others' tokens are compared with those that they have alone.
- `features`: streams of which some are read by a random transcoder, on threads of their own as in the
  server, next to as many that nobody reads; the others' tokens are compared as well.
- `quiet`: an engine whose hooks are gone, next to one that never had any.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.adapters import decode_tokens_per_s, prefill_tokens_per_s
from benchmarks.circuits import random_transcoders
from benchmarks.fidelity import judge_model
from benchmarks.harness import Comparison, Experiment, Say, Table, model_path, run
from benchmarks.turns import in_turns
from kukri import LLM
from kukri.engine import Request
from kukri.errors import KukriError, UnsupportedError
from kukri.interp import ControlVector, patching
from kukri.sampling import SamplingParams

CLEAN = "When Mary and John went to the new store, John gave a drink to"
CORRUPT = "When Mary and John went to the new store, Mary gave a drink to"
PARTS = ("sweep", "crowd", "features", "quiet")
_PREFILL, _BATCH = 128, 8  # tokens of a text that is captured, and texts
_STREAMS, _CAPTURED, _STEERED = 16, 4, 2  # requests in a crowd, and how many of them are captured and steered
_READ, _FEATURES, _ACTIVE = 4, 16_384, 32  # streams that are read, by so many features, active for a token
_PROMPT, _NEW, _LONG = 32, 48, 192  # tokens of a stream
_CONTEXT = 1024


@dataclass(frozen=True)
class SweepReport:
    """Medians of the rounds. Seconds are of wall time; `cpu` of the process."""

    n_cells: int
    sweep_s: float
    sweep_cpu_s: float
    transformer_lens_sweep_s: float
    transformer_lens_sweep_cpu_s: float
    sweep_ratio: float
    sweep_cpu_ratio: float
    max_difference: float  # between cells, as a logit difference
    capture_tokens_per_s: float
    capture_with_logits_tokens_per_s: float
    prefill_tokens_per_s: float
    transformer_lens_capture_tokens_per_s: float


@dataclass(frozen=True)
class CrowdReport:
    """Generated tokens of all streams per second, and per second of processor time."""

    n_streams: int
    n_captured: int
    n_steered: int
    steered_layers: int
    wall: Comparison
    processor: Comparison
    others_as_alone: bool  # the tokens of the streams that nobody listens to


@dataclass(frozen=True)
class FeaturesReport:
    """Generated tokens of all streams per second, and per second of processor time. `wall` and `processor`
    are of the largest of all features, `named` of a few that are named.
    """

    n_streams: int
    n_read: int
    n_features: int
    wall: Comparison
    processor: Comparison
    named: Comparison
    others_as_alone: bool


@dataclass(frozen=True)
class QuietReport:
    """Tokens/s of one stream and of a prompt, and processor seconds of each."""

    decode: Comparison
    prefill: Comparison
    decode_cpu: Comparison
    prefill_cpu: Comparison


@dataclass(frozen=True)
class InterpReport:
    """The parts that were measured."""

    model: str
    n_threads: int
    sweep: SweepReport | None
    crowd: CrowdReport | None
    features: FeaturesReport | None
    quiet: QuietReport | None


def _timed(call: Callable[[], Any]) -> tuple[float, float, Any]:
    """(wall seconds, processor seconds, result)."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = call()
    return time.perf_counter() - wall, time.process_time() - cpu, result


def transformer_lens_bridge(path: Path, n_threads: int) -> Any:
    """TransformerLens' TransformerBridge of a file's weights in float32."""
    try:
        bridges = import_module("transformer_lens.model_bridge")
    except ImportError as error:
        raise UnsupportedError(f"{error.name} is not installed: pip install transformer-lens") from None
    transformers, torch = import_module("transformers"), import_module("torch")
    tokenizers = import_module("tokenizers")
    hf = judge_model(transformers, torch, path)
    torch.set_num_threads(n_threads)
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        words = tokenizers.models.WordLevel({"<s>": 0}, unk_token="<s>")  # only ids are given
        special = {"bos_token": "<s>", "eos_token": "<s>", "pad_token": "<s>"}
        tokenizer = tokenizers.Tokenizer(words)
        transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
        return bridges.TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def measure_sweep(path: Path, n_threads: int, n_layers: int, rounds: int, say: Say) -> SweepReport:
    """Measures sweeps and captures. `n_layers` limits the layers that are patched, taken evenly."""
    torch = import_module("torch")
    bridge = transformer_lens_bridge(path, n_threads)
    with LLM(path, n_threads=n_threads, max_context=_CONTEXT) as llm, torch.no_grad():
        clean, corrupt = llm.tokenizer.encode(CLEAN), llm.tokenizer.encode(CORRUPT)
        answers = [llm.tokenizer.encode(" Mary")[0], llm.tokenizer.encode(" John")[0]]
        layers = (
            np.linspace(0, llm.config.n_layers - 1, min(n_layers, llm.config.n_layers)).round().astype(int)
        )
        n_cells = len(layers) * len(clean)
        theirs = torch.tensor([corrupt])
        _, their_clean = bridge.run_with_cache(torch.tensor([clean]))

        def metric(logits: Any) -> float:
            return float(logits[0, -1, answers[0]] - logits[0, -1, answers[1]])

        def sweep() -> Any:
            _, cache = llm.run_with_cache(
                clean, names=lambda n: n.endswith("hook_resid_pre"), return_type=None
            )
            return patching.get_act_patch_resid_pre(
                llm, corrupt, cache, metric, logits="last", layers=layers.tolist()
            )

        def their_sweep() -> Any:
            found = np.empty((len(layers), len(clean)), np.float32)
            for i, layer in enumerate(layers):
                name = f"blocks.{layer}.hook_resid_pre"
                for pos in range(len(clean)):

                    def patch(value: Any, hook: Any, pos: int = pos, name: str = name) -> Any:
                        value[:, pos] = their_clean[name][:, pos]
                        return value

                    found[i, pos] = metric(bridge.run_with_hooks(theirs, fwd_hooks=[(name, patch)]))
            return found

        texts = np.random.default_rng(0).integers(0, llm.config.n_vocab, (_BATCH, _PREFILL))
        name = f"blocks.{llm.config.n_layers // 2}.hook_resid_post"

        def capture(return_type: Any) -> Any:
            return llm.run_with_cache(texts, names=name, return_type=return_type)[1][name]

        def their_capture() -> Any:
            return bridge.run_with_cache(torch.from_numpy(texts), names_filter=name)[1][name]

        def prefill() -> Any:
            return llm.generate([[*map(int, text)] for text in texts], max_tokens=1, temperature=0)

        sweep(), capture(None), capture("logits"), prefill()  # programs are compiled, weights packed
        rows: list[list[float]] = []
        difference = 0.0
        for i in range(rounds):
            say(f"round {i + 1} of {rounds}")
            wall, cpu, ours = _timed(sweep)
            their_wall, their_cpu, expected = _timed(their_sweep)
            texts = np.random.default_rng(i + 1).integers(0, llm.config.n_vocab, (_BATCH, _PREFILL))
            speeds = [
                texts.size / _timed(call)[0]
                for call in (lambda: capture(None), lambda: capture("logits"), prefill, their_capture)
            ]
            difference = max(difference, float(np.abs(ours - expected).max()))
            rows.append([wall, cpu, their_wall, their_cpu, their_wall / wall, their_cpu / cpu, *speeds])
        wall, cpu, their_wall, their_cpu, ratio, cpu_ratio, *speeds = np.median(
            np.array(rows), axis=0
        ).tolist()
    return SweepReport(
        n_cells, wall, cpu, their_wall, their_cpu, ratio, cpu_ratio, difference,
        speeds[0], speeds[1], speeds[2], speeds[3],
    )  # fmt: skip


def measure_crowd(path: Path, n_threads: int, rounds: int, say: Say) -> CrowdReport:
    """Measures a crowd that is listened to, and one that is not, in turn. Raises KukriError if a capture is
    empty.
    """
    rng = np.random.default_rng(1)
    with LLM(path, n_threads=n_threads, max_context=_CONTEXT, max_requests=_STREAMS) as llm:
        config = llm.config
        prompts = rng.integers(0, config.n_vocab, (_STREAMS, _PROMPT)).tolist()
        layers = range(config.n_layers - 1)
        vector = ControlVector({i: 0.02 * rng.standard_normal(config.d_model) for i in layers})
        llm.interp.catalog.vectors["random"] = vector
        capture = {"op": "capture", "name": f"blocks.{config.n_layers // 2}.hook_resid_post"}
        steer = {"op": "add", "control_vector": "random"}
        wanted = [[capture]] * _CAPTURED + [[steer]] * _STEERED
        others = slice(len(wanted), None)
        say("tokens alone")
        alone = [_generate(llm, [prompt])[0].output_ids for prompt in prompts[others]]
        are_equal: list[bool] = []

        def speeds(interventions: Sequence[Sequence[Any]]) -> tuple[float, float]:
            wall, cpu, requests = _timed(partial(_generate, llm, prompts, interventions))
            are_equal.append([request.output_ids for request in requests[others]] == alone)
            n_tokens = sum(request.n_generated for request in requests)
            return n_tokens / wall, n_tokens / cpu

        found = in_turns([partial(speeds, wanted), partial(speeds, [])], rounds, say)
    wall, processor = (
        Comparison.of(("with", "without"), [[side[i] for side in each] for each in found]) for i in (0, 1)
    )
    return CrowdReport(_STREAMS, _CAPTURED, _STEERED, len(layers), wall, processor, all(are_equal))


def measure_features(path: Path, n_threads: int, rounds: int, say: Say) -> FeaturesReport:
    """Measures streams of which some are read, and as many without, in turns."""
    rng = np.random.default_rng(1)
    with (
        tempfile.TemporaryDirectory() as folder,
        LLM(path, n_threads=n_threads, max_context=_CONTEXT, max_requests=_STREAMS) as llm,
    ):
        config = llm.config
        layer = config.n_layers // 2
        for name, n_active in (("random", _ACTIVE), ("relu", 0)):
            (own := Path(folder) / name).mkdir()
            llm.interp.catalog.transcoders[name] = random_transcoders(
                own, [layer], config.d_model, _FEATURES, n_active
            )
        prompts = rng.integers(0, config.n_vocab, (_STREAMS, _PROMPT)).tolist()
        read = {"op": "read", "transcoder": "random", "layer": layer, "positions": "generated"}
        say("tokens alone")
        alone = [_generate(llm, [prompt], n_tokens=_LONG)[0].output_ids for prompt in prompts]
        are_equal: list[bool] = []

        def speeds(interventions: Sequence[Sequence[Any]]) -> tuple[float, float]:
            wall, cpu, requests = _timed(partial(_generate, llm, prompts, interventions, _LONG))
            are_equal.append([request.output_ids for request in requests] == alone)
            n_tokens = sum(request.n_generated for request in requests)
            return n_tokens / wall, n_tokens / cpu

        speeds([[read]] * _READ)  # the encoder is read
        few = read | {"features": [*range(8)], "transcoder": "relu"}
        given: list[list[list[Any]]] = [[[read]] * _READ, [[few]] * _READ, []]
        found = in_turns([partial(speeds, one) for one in given], rounds, say)
    sides = ("with", "without")
    wall, processor, named = (
        Comparison.of(sides, [[each[which][i], each[2][i]] for each in found])
        for which, i in ((0, 0), (0, 1), (1, 0))
    )
    return FeaturesReport(_STREAMS, _READ, _FEATURES, wall, processor, named, all(are_equal))


def _generate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    interventions: Sequence[Sequence[Any]] = (),
    n_tokens: int = _NEW,
) -> list[Request]:
    """The requests of prompts that generate side by side, the first of them with these interventions."""
    params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
    engine = llm.engine
    engine.pool.forget()
    requests = [engine.maker.make_request(np.array(prompt, np.int32), params) for prompt in prompts]
    taps = [llm.interp.intervene([request], one) for request, one in zip(requests, interventions)]
    for request in requests:
        engine.add_request(request)
    with ThreadPoolExecutor(max(len(taps), 1)) as threads:  # which read while the engine works
        reading: list[Future[Any] | None] = [None] * len(taps)
        while engine.has_work:
            engine.step()
            for i, (request, (tap,)) in enumerate(zip(requests, taps)):
                if tap.has_unread and ((now := reading[i]) is None or now.done()):
                    reading[i] = threads.submit(tap.readouts, request)
    for request, (tap,) in zip(requests, taps):
        tap.readouts(request, is_done=True)
        if tap.captures and not any(x.size for x in tap.activations(request).values()):
            raise KukriError("nothing was captured")
    return requests


def measure_quiet(path: Path, n_threads: int, rounds: int, say: Say) -> QuietReport:
    """Measures an engine whose requests had hooks, and one without, alternating."""
    options: dict[str, Any] = {"n_threads": n_threads, "max_context": _CONTEXT}
    with LLM(path, **options) as listened, LLM(path, **options) as never:
        name = f"blocks.{listened.config.n_layers // 2}.hook_resid_post"
        prompt = np.random.default_rng(3).integers(0, listened.config.n_vocab, _PROMPT)
        listened.generate_with_hooks(
            prompt.tolist(), max_tokens=8, names=[name], fwd_hooks=[(name, lambda value, hook: value * 1)]
        )
        listened.run_with_hooks(prompt, fwd_hooks=[(name, lambda value, hook: value * 1)])
        engines, sides = (listened.engine, never.engine), ("hooks gone", "never a hook")

        def measured(call: Callable[[], float]) -> tuple[float, float]:
            _, cpu, speed = _timed(call)
            return speed, cpu

        decode, prefill = (
            in_turns([partial(measured, partial(call, each, *more)) for each in engines], rounds, say)
            for call, more in ((decode_tokens_per_s, (1, ())), (prefill_tokens_per_s, (None,)))
        )
    found = [
        Comparison.of(sides, [[side[i] for side in each] for each in rows])
        for i in (0, 1)
        for rows in (decode, prefill)
    ]
    return QuietReport(*found)


def _sweep_table(report: SweepReport) -> Table:
    rows = [
        [
            "sweep, s", f"{report.sweep_s:.2f}", f"{report.transformer_lens_sweep_s:.2f}",
            f"{report.sweep_ratio:.1f}",
        ],
        [
            "sweep, processor s", f"{report.sweep_cpu_s:.2f}", f"{report.transformer_lens_sweep_cpu_s:.2f}",
            f"{report.sweep_cpu_ratio:.1f}",
        ],
        [
            "capture of one layer, tokens/s", f"{report.capture_tokens_per_s:.0f}",
            f"{report.transformer_lens_capture_tokens_per_s:.0f}",
            f"{report.capture_tokens_per_s / report.transformer_lens_capture_tokens_per_s:.1f}",
        ],
        ["capture and all logits, tokens/s", f"{report.capture_with_logits_tokens_per_s:.0f}", "", ""],
        ["prefill without a hook, tokens/s", f"{report.prefill_tokens_per_s:.0f}", "", ""],
    ]  # fmt: skip
    title = f"{report.n_cells} cells, largest difference {report.max_difference:.3f}"
    return Table(title, ["", "kukri", "TransformerLens", "ratio"], rows)


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment(
        "interp", "Measure patching sweeps, captures, and crowds in which some are heard."
    )
    experiment.options.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what to measure (all)"
    )
    experiment.count("-l", "--layers", 1000, "layers that are patched, all at most")
    experiment.count("-r", "--rounds", 3, "rounds")
    given = experiment.parse()
    path, parts, say = model_path(given.model, _CONTEXT), given.parts, experiment.say
    sweep, crowd, features, quiet = None, None, None, None
    tables: list[Table | str] = []
    if "crowd" in parts:
        crowd = measure_crowd(path, given.threads, given.rounds, say)
        title = (
            f"{_STREAMS} streams, {_CAPTURED} captured, {_STEERED} steered on {crowd.steered_layers} layers"
        )
        tables += [crowd.wall.table(f"{title}, tokens/s"), crowd.processor.table("the same per processor s")]
        tables.append(f"the others' tokens are those alone: {'yes' if crowd.others_as_alone else 'NO'}")
    if "features" in parts:
        features = measure_features(path, given.threads, given.rounds, say)
        title = f"{_STREAMS} streams, {_READ} read by {_FEATURES} features"
        tables += [features.wall.table(f"{title}, tokens/s"), features.processor.table("per processor s")]
        tables.append(features.named.table("8 features that are named, tokens/s"))
        tables.append(f"all tokens are those alone: {'yes' if features.others_as_alone else 'NO'}")
    if "quiet" in parts:
        quiet = measure_quiet(path, given.threads, given.rounds, say)
        tables.append(quiet.decode.table("decode of one stream, tokens/s"))
        tables.append(quiet.prefill.table("prefill, tokens/s"))
        for what, side in (("decode", quiet.decode_cpu), ("prefill", quiet.prefill_cpu)):
            tables.append(f"{what}, ratio of processor seconds: {side.median_ratio:.3f}")
    if "sweep" in parts:
        sweep = measure_sweep(path, given.threads, given.layers, given.rounds, say)
        tables.append(_sweep_table(sweep))
    experiment.show(InterpReport(path.name, given.threads, sweep, crowd, features, quiet), *tables)


if __name__ == "__main__":
    run(main)
