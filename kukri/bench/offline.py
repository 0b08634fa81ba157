"""Speed of one request: the numbers of `kukri bench`.

As in llama-bench, pp512 reads a prompt of 512 random ids and tg128 generates 128 tokens from an empty cache;
mean and deviation over 5 after a warm-up. Unlike there, scheduling, sampling and text are timed too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from statistics import fmean, stdev
from typing import Any

import numpy as np

from kukri.bench import card
from kukri.bench.card import (
    MachineCard,
    ModelCard,
    ceiling_tokens_per_s,
    machine_card,
    model_card,
)
from kukri.dataclass import dataclass, replace
from kukri.errors import ConfigError
from kukri.formats import hub
from kukri.host.hardware import peak_rss_bytes
from kukri.kernels.arrays import IntArray
from kukri.kernels.backend import Logits
from kukri.kernels.cpu.compile.features import usable_cores
from kukri.kernels.step import ForwardBatch
from kukri.kernels.taps import Hook
from kukri.sampling import SamplingParams

ASKED = ("device", "backend", "quantize", "rope_scaling", "rope_factor")  # options of LLM in a report
_ROUGH_S = 3.0
FIRST_TOKEN_PROMPT = 128  # tokens of the prompt that first-token latency is measured with


class Kukri:
    """A loaded model that is timed on random token ids: requests of up to `context_tokens`.

    `options` are LLM's. Attributes: llm.
    """

    name = "kukri"

    def __init__(
        self,
        path: str | os.PathLike[str],
        n_threads: int | None,
        context_tokens: int,
        **options: Any,
    ) -> None:
        from kukri import LLM

        # gains of speculation depend on the text: benchmarks.speculation measures them
        options = {"speculation": "off", **options}
        self.llm = LLM(os.fspath(path), n_threads=n_threads, max_context=context_tokens, **options)
        self._random = np.random.default_rng(0)

    def prefill_s(self, n_tokens: int) -> float:
        """Seconds from a prompt of random ids to its first token."""
        return self._generate_s(n_tokens, 1)

    def decode_s(self, n_tokens: int) -> float:
        """Seconds to generate `n_tokens`, as many steps, after a prompt of one random id."""
        return self._generate_s(1, n_tokens)

    def batch_decode_s(self, n_streams: int, n_prompt: int, n_tokens: int) -> float:
        """Seconds in which all streams generate all but their first of `n_tokens`, after their prompts."""
        prompts = self._random.integers(0, self.llm.config.n_vocab, (n_streams, n_prompt), np.int32)
        return self.prompts_decode_s(prompts, n_tokens)

    def prompts_decode_s(self, prompts: IntArray, n_tokens: int) -> float:
        """The same for streams whose prompts, int [streams, tokens], are given."""
        engine = self.llm.engine
        params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
        requests = [engine.maker.make_request(prompt, params) for prompt in prompts]
        n_prompts_left = len(requests)
        for request in requests:
            engine.add_request(request)
        while n_prompts_left:
            n_prompts_left = sum(not request.n_generated for request in requests)
            if n_prompts_left:
                engine.step()
        n_before = sum(request.n_generated for request in requests)
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        spent_s = time.perf_counter() - started
        n_counted = sum(request.n_generated for request in requests) - n_before
        return spent_s * len(requests) * (n_tokens - 1) / n_counted

    def engine_overhead(self, n_tokens: int) -> float:
        """The share of a decode step that is not the model's forward: scheduling, sampling, text."""
        runner = self.llm.engine.runner
        plain, spent_s = runner.plain, 0.0

        def timed(batch: ForwardBatch, on_tap: Hook | None) -> Logits:
            nonlocal spent_s
            started = time.perf_counter()
            logits = plain.program(batch, on_tap)
            spent_s += time.perf_counter() - started
            return logits

        runner.plain = plain._replace(program=timed)  # type: ignore[arg-type]
        try:
            total_s = self.decode_s(n_tokens)
        finally:
            runner.plain = plain
        return 1.0 - spent_s / total_s

    def rough_speed(self, say: Callable[[str], None]) -> dict[str, float]:
        """Tokens per second of prompts and answers, each measured once in about _ROUGH_S after a warm-up."""
        speeds = {}
        for name, measure, least, most in (
            ("prefill_tokens_per_s", self.prefill_s, 32, 512),
            ("decode_tokens_per_s", self.decode_s, 4, 128),
        ):
            say(f"measuring {name.partition('_')[0]}")
            n_tokens = max(least, min(most, int(least * _ROUGH_S / measure(least))))
            speeds[name] = n_tokens / measure(n_tokens)
        return speeds

    def versions(self) -> dict[str, str]:
        """The versions of the software that runs."""
        from kukri import __version__

        return {"kukri": __version__}

    def close(self) -> None:
        """Releases the model."""
        self.llm.close()

    def _generate_s(self, n_prompt: int, n_new: int) -> float:
        ids = self._random.integers(0, self.llm.config.n_vocab, n_prompt).tolist()
        started = time.perf_counter()
        self.llm.generate(ids, SamplingParams(temperature=0, max_tokens=n_new, ignore_eos=True))
        return time.perf_counter() - started


@dataclass(frozen=True)
class Measured:
    """Repetitions of one measurement; `deviation` is the sample standard deviation."""

    mean: float
    deviation: float
    samples: tuple[float, ...]


@dataclass(frozen=True)
class BenchReport:
    """The results of `kukri bench`. Rates in tokens per second; shares from 0 to 1."""

    machine: MachineCard
    model: ModelCard
    n_threads: int
    device: str | None  # PyTorch's name for it
    backend: str
    quantize: str | None  # the weight type of a directory's packed matrices
    rope_scaling: str | None  # as the user asked
    rope_factor: float | None
    n_prompt: int
    n_generate: int
    load_s: float  # compiling kernels included, if they were not in the cache
    prefill_tokens_per_s: Measured
    decode_tokens_per_s: Measured
    first_token_ms: Measured  # for a prompt of FIRST_TOKEN_PROMPT tokens
    ceiling_tokens_per_s: float  # by the machine's bandwidth, measured between the samples of decoding
    share_of_ceiling: float  # the part of it that decoding reached
    engine_overhead: float  # share of a decode step outside the model's forward
    peak_rss_bytes: int


def cards(
    model: str | None, n_threads: int | None, device: str | None, quantize: str | None
) -> tuple[MachineCard, ModelCard]:
    """The facts of the machine, or of a device of PyTorch, and of a model. Raises ConfigError.

    `quantize` is the type that a directory's matrices are packed to.
    """
    path = hub.resolve(model)
    if quantize is not None and not path.is_dir():
        raise ConfigError(f"{path} must be a safetensors directory to be quantized, but is packed already")
    facts = model_card(path, quantize)
    machine = machine_card(n_threads or usable_cores())
    return (machine if device is None else _on_device(machine, device)), facts


def _on_device(machine: MachineCard, name: str) -> MachineCard:
    """The machine's card with the bandwidth of a device."""
    from kukri.kernels.pytorch import devices

    device = devices.find_device(name)
    versions = {**machine.versions, "torch": devices.version()}
    return replace(
        machine,
        versions=versions,
        device=devices.device_name(device),
        read_gb_per_s=devices.read_gb_per_s(device),
    )


def measure_speed(
    machine: MachineCard,
    model: ModelCard,
    options: Mapping[str, Any],
    n_prompt: int,
    n_generate: int,
    repetitions: int,
    say: Callable[[str], None],
) -> BenchReport:
    """Measures a model, opened with `options` of LLM; `say` is told what is done next."""
    context = max(n_prompt, FIRST_TOKEN_PROMPT, n_generate + 1)
    say("loading the model; the first time, its kernels are compiled")
    started = time.perf_counter()
    kukri = Kukri(model.path, machine.n_threads, context, **options)
    load_s = time.perf_counter() - started
    read_gb_per_s: list[float] = []

    def decode_speed() -> float:
        # the rate at which a shared machine reads differs from minute to minute
        if machine.device is None:
            read_gb_per_s.append(card.read_bandwidth_of_a_fresh_process(machine.n_threads))
        return n_generate / kukri.decode_s(n_generate)

    prefill = _repeated(lambda: n_prompt / kukri.prefill_s(n_prompt), repetitions, say, f"pp{n_prompt}")
    decode = _repeated(decode_speed, repetitions, say, f"tg{n_generate}")
    first = _repeated(lambda: 1e3 * kukri.prefill_s(FIRST_TOKEN_PROMPT), repetitions, say, "first token")
    overhead = _repeated(lambda: kukri.engine_overhead(n_generate), repetitions, say, "engine overhead")
    kukri.close()
    if read_gb_per_s:
        machine = replace(machine, read_gb_per_s=fmean(read_gb_per_s[1:]))  # without the warm-up's
    ceiling = ceiling_tokens_per_s(machine, model)
    return BenchReport(
        machine=machine,
        model=model,
        n_threads=machine.n_threads,
        **{name: options[name] for name in ASKED},
        n_prompt=n_prompt,
        n_generate=n_generate,
        load_s=load_s,
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
        first_token_ms=first,
        ceiling_tokens_per_s=ceiling,
        share_of_ceiling=decode.mean / ceiling,
        engine_overhead=sorted(overhead.samples)[repetitions // 2],
        peak_rss_bytes=peak_rss_bytes(),
    )


def _repeated(measure: Callable[[], float], n: int, say: Callable[[str], None], what: str) -> Measured:
    """`n` measurements after one that warms up and is thrown away."""
    samples = []
    for i in range(n + 1):
        say(f"measuring {what}: {f'{i} of {n}' if i else 'warm-up'}")
        samples.append(measure())
    kept = tuple(samples[1:])
    return Measured(fmean(kept), stdev(kept) if n > 1 else 0.0, kept)
