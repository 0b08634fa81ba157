"""`kukri bench`: the speed of one request, alongside the machine's and the model's figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from kukri.bench.card import MachineCard, ModelCard, ceiling_tokens_per_s
from kukri.bench.offline import ASKED, FIRST_TOKEN_PROMPT, BenchReport, cards, measure_speed
from kukri.errors import ConfigError
from kukri.kernels import choose_backend
from kukri.terminal.output import n_bytes_text
from kukri.terminal.progress import progress_bar
from kukri.terminal.tables import print_facts

_N_MEASURES = 4  # pp, tg, the first token, the engine's overhead


def run_bench(
    model: str | None,
    *,
    n_prompt: int = 512,
    n_generate: int = 128,
    repetitions: int = 5,
    as_json: bool = False,
    **loading: Any,
) -> None:
    """Prints the cards, measures, and prints the results; the last line is one JSON object, the BenchReport.

    With `as_json` that line is all. `loading` are options of LLM. Raises ConfigError on counts below 1, and
    for a model in several processes.
    """
    n_threads = loading.pop("n_threads", None)
    counts = {
        "n_prompt": n_prompt, "n_generate": n_generate, "repetitions": repetitions, "n_threads": n_threads,
    }  # fmt: skip
    for name, value in counts.items():
        if value is not None and value < 1:
            raise ConfigError(f"{name!r} must be at least 1, not {value}")
    for name in loading.keys() & {"stages", "devices"}:
        raise ConfigError(
            f"--{name} is not supported by `kukri bench`: serve the model with it and use `kukri bench serve`"
        )
    backend, found = choose_backend(loading.get("backend"), loading.get("device"))
    options = dict.fromkeys(ASKED) | loading | {"device": found, "backend": backend}
    with progress_bar(2 + _N_MEASURES * (repetitions + 1)) as advance:
        advance(1, "measuring memory bandwidth")
        machine, facts = cards(model, n_threads, found, options["quantize"])
        if not as_json:
            _print_cards(machine, facts)
        report = measure_speed(
            machine, facts, options, n_prompt, n_generate, repetitions, lambda text: advance(1, text)
        )
    if not as_json:
        _print_results(report)
    print(json.dumps(asdict(report)))


def _print_cards(machine: MachineCard, model: ModelCard) -> None:
    versions = ", ".join(f"{name} {number}" for name, number in machine.versions.items())
    types = ", ".join(f"{name} {n_bytes_text(size)}" for name, size in model.bytes_by_type.items())
    device = [("device", machine.device)] if machine.device else []
    states = f"{n_bytes_text(model.state_bytes)} read and written per token"
    print("machine")
    print_facts(
        [
            ("cpu", f"{machine.cpu}, {machine.n_cores} cores usable, {machine.n_threads} threads used"),
            ("features", " ".join(machine.features)),
            *device,
            ("memory", f"{machine.memory_bytes / 2**30:.1f} GiB"),
            ("read bandwidth", f"{machine.read_gb_per_s:.1f} GB/s measured"),
            ("system", machine.system),
            ("versions", versions),
        ]
    )
    print("\nmodel")
    print_facts(
        [
            ("name", f"{model.name} ({model.architecture}, {model.n_layers} layers)"),
            ("file", f"{model.path} ({n_bytes_text(model.file_bytes)})"),
            ("parameters", f"{model.n_parameters:,}"),
            ("weights", types),
            ("read per token", f"{n_bytes_text(model.bytes_per_token)} of weights"),
            *([("states", states)] if model.state_bytes else []),
            ("cache per token", f"{model.kv_bytes_per_token:,} bytes"),
            ("ceiling", f"{ceiling_tokens_per_s(machine, model):.0f} tokens/s = bandwidth / read per token"),
        ]
    )


def _print_results(report: BenchReport) -> None:
    prefill, decode, first = report.prefill_tokens_per_s, report.decode_tokens_per_s, report.first_token_ms
    share = f"{report.share_of_ceiling:.0%} of {report.ceiling_tokens_per_s:.0f} tokens/s"
    first_ms = f"{first.mean:.1f} ± {first.deviation:.1f} ms, {FIRST_TOKEN_PROMPT}-token prompt"
    print("\nresults")
    print_facts(
        [
            (f"pp{report.n_prompt}", f"{prefill.mean:.1f} ± {prefill.deviation:.1f} tokens/s"),
            (f"tg{report.n_generate}", f"{decode.mean:.1f} ± {decode.deviation:.1f} tokens/s"),
            ("of the ceiling", share),
            ("first token", first_ms),
            ("engine overhead", f"{report.engine_overhead:.1%} of a decode step"),
            ("peak memory", f"{n_bytes_text(report.peak_rss_bytes)} resident"),
            ("load", f"{report.load_s:.2f} s"),
        ]
    )
    print()
