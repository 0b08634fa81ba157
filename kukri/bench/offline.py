"""Speed of one request: the numbers of `kukri bench`.

As in llama-bench, pp512 reads a prompt of 512 random ids and tg128 generates 128 tokens from an empty cache;
mean and deviation over 5 after a warm-up. Unlike there, scheduling, sampling and text are timed too.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from kukri.bench import card
from kukri.bench.card import (
    MachineCard,
    ModelCard,
    ceiling_tokens_per_s,
    machine_card,
    model_card,
)
from kukri.errors import ConfigError
from kukri.formats import hub
from kukri.kernels import choose_backend
from kukri.kernels.backend import Logits
from kukri.kernels.cpu.features import usable_cores
from kukri.kernels.step import ForwardBatch
from kukri.kernels.taps import Hook
from kukri.machine import peak_rss_bytes
from kukri.sampling import SamplingParams

if TYPE_CHECKING:
    from rich.console import Console

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
        engine, n_vocab = self.llm.engine, self.llm.config.n_vocab
        params = SamplingParams(temperature=0, max_tokens=n_tokens, ignore_eos=True)
        prompts = self._random.integers(0, n_vocab, (n_streams, n_prompt))
        requests = [engine.make_request(prompt, params) for prompt in prompts]
        n_prompts_left = n_streams
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
        return spent_s * n_streams * (n_tokens - 1) / n_counted

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
    device: str | None  # of PyTorch
    backend: str
    quantize: str | None  # what a directory's matrices were packed to
    rope_scaling: str | None  # as the user asked
    rope_factor: float | None
    n_prompt: int
    n_generate: int
    load_s: float  # compiling kernels included, if they were not in the cache
    prefill_tokens_per_s: Measured
    decode_tokens_per_s: Measured
    first_token_ms: Measured  # of a prompt of FIRST_TOKEN_PROMPT tokens
    ceiling_tokens_per_s: float  # by the machine's bandwidth, measured between the samples of decoding
    share_of_ceiling: float  # that decoding reached
    engine_overhead: float  # share of a decode step outside the model's forward
    peak_rss_bytes: int


def run_bench(
    model: str | None,
    *,
    n_threads: int | None = None,
    device: str | None = None,
    backend: str | None = None,
    quantize: str | None = None,
    rope_scaling: str | None = None,
    rope_factor: float | None = None,
    n_prompt: int = 512,
    n_generate: int = 128,
    repetitions: int = 5,
    json_only: bool = False,
) -> None:
    """Prints the cards, measures, and prints the results; the last line is one JSON object, the BenchReport.

    With `json_only` that line is all. Raises ConfigError on counts below 1.
    """
    from rich.console import Console

    for name, value in (("n_prompt", n_prompt), ("n_generate", n_generate), ("repetitions", repetitions)):
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if n_threads is not None and n_threads < 1:
        raise ConfigError(f"n_threads must be at least 1, not {n_threads}")
    backend, found = choose_backend(backend, device)
    console = Console(quiet=json_only, highlight=False)
    path = hub.resolve(model)
    if quantize is not None and not path.is_dir():
        raise ConfigError(f"{path} is packed already: quantize is for safetensors directories")
    threads = n_threads or usable_cores()
    facts = model_card(path, quantize)
    with _spinner(console, "measuring memory bandwidth"):
        machine = machine_card(threads)
    if found is not None:
        machine = _on_device(machine, str(found))
    _print_cards(console, machine, facts)
    options = {
        "device": found,
        "backend": backend,
        "quantize": quantize,
        "rope_scaling": rope_scaling,
        "rope_factor": rope_factor,
    }
    report = _measure(console, machine, facts, options, n_prompt, n_generate, repetitions)
    _print_results(console, report)
    print(json.dumps(asdict(report)))


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


def _measure(
    console: Console,
    machine: MachineCard,
    model: ModelCard,
    options: dict[str, Any],
    n_prompt: int,
    n_generate: int,
    repetitions: int,
) -> BenchReport:
    context = max(n_prompt, FIRST_TOKEN_PROMPT, n_generate + 1)
    started = time.perf_counter()
    with _spinner(console, "loading the model; the first time, its kernels are compiled"):
        kukri = Kukri(model.path, machine.n_threads, context, **options)
    load_s = time.perf_counter() - started
    read_gb_per_s: list[float] = []

    def decode_speed() -> float:
        # what a shared machine reads differs from minute to minute
        if machine.device is None:
            read_gb_per_s.append(card.read_bandwidth_of_a_fresh_process(machine.n_threads))
        return n_generate / kukri.decode_s(n_generate)

    with _spinner(console, f"measuring pp{n_prompt}, tg{n_generate} and the first token") as say:
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
        **options,
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


@contextmanager
def _spinner(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """Shows a status line within the `with` block; yields a function that changes it."""
    if console.quiet:
        yield lambda text: None
        return
    with console.status(text) as status:
        yield status.update


def _print_cards(console: Console, machine: MachineCard, model: ModelCard) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    types = ", ".join(f"{name} {_megabytes(size)}" for name, size in model.bytes_by_type.items())
    _print_table(
        console,
        "machine",
        ("cpu", f"{machine.cpu}, {machine.n_cores} cores usable, {machine.n_threads} threads used"),
        ("features", " ".join(machine.features)),
        *([("device", machine.device)] if machine.device else []),
        ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
        ("read bandwidth", f"{machine.read_gb_per_s:.1f} GB/s measured"),
        ("system", machine.system),
        ("versions", versions),
    )
    _print_table(
        console,
        "model",
        ("name", f"{model.name} ({model.architecture}, {model.n_layers} layers)"),
        ("file", f"{model.path} ({_megabytes(model.file_bytes)})"),
        ("parameters", f"{model.n_parameters:,}"),
        ("weights", types),
        ("read per token", f"{_megabytes(model.bytes_per_token)} of weights"),
        *(
            [("states", f"{_megabytes(model.state_bytes)} read and written per token")]
            if model.state_bytes
            else []
        ),
        ("cache per token", f"{model.kv_bytes_per_token:,} bytes"),
        ("ceiling", f"{ceiling_tokens_per_s(machine, model):.0f} tokens/s = bandwidth / read per token"),
    )


def _print_results(console: Console, report: BenchReport) -> None:
    prefill, decode, first = report.prefill_tokens_per_s, report.decode_tokens_per_s, report.first_token_ms
    _print_table(
        console,
        "results",
        (f"pp{report.n_prompt}", f"{prefill.mean:.1f} ± {prefill.deviation:.1f} tokens/s"),
        (f"tg{report.n_generate}", f"{decode.mean:.1f} ± {decode.deviation:.1f} tokens/s"),
        ("of the ceiling", f"{report.share_of_ceiling:.0%} of {report.ceiling_tokens_per_s:.0f} tokens/s"),
        ("first token", f"{first.mean:.1f} ± {first.deviation:.1f} ms, {FIRST_TOKEN_PROMPT}-token prompt"),
        ("engine overhead", f"{report.engine_overhead:.1%} of a decode step"),
        ("peak memory", f"{_megabytes(report.peak_rss_bytes)} resident"),
        ("load", f"{report.load_s:.2f} s"),
    )


def _print_table(console: Console, title: str, *rows: tuple[str, str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in rows:
        table.add_row(Text(name, style="cyan"), Text(value))
    console.print(table)
    console.print()


def _megabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e6:.1f} MB"
