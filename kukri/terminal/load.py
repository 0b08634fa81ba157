"""`kukri bench serve`: loads a server and shows latencies, rates and failures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, fields
from random import Random
from typing import Any

from kukri.bench.latency import MEASURES, LoadPoint, Spread, read_objective
from kukri.bench.load import LoadOptions, LoadReport, measure_load
from kukri.errors import ConfigError, KukriError, printable
from kukri.terminal.options import LoadTestOptions
from kukri.terminal.plots import Chart, require_plots, save_chart
from kukri.terminal.progress import progress_bar
from kukri.terminal.tables import print_table

_DEFAULT_CONCURRENCY, _DEFAULT_REQUESTS = "1,4,16", 100
_LATE_MS = 20.0  # from here on the client, or a busy machine, is part of the figures


def load_server(options: LoadTestOptions, *, as_json: bool) -> None:
    """Measures and prints; the last line is one JSON object, a LoadReport.

    Raises KukriError if no request at all was answered, after the counts are printed.
    """
    if options.rate is not None and options.concurrency is not None:
        raise ConfigError("--rate (open loop) and --concurrency (closed loop) cannot be combined")
    if options.plot is not None:
        require_plots(options.plot)
    values = vars(options) | {
        "loop": "closed" if options.rate is None else "open",
        "loads": _numbers(options.rate or options.concurrency or _DEFAULT_CONCURRENCY),
        "n_requests": options.n_requests or (_DEFAULT_REQUESTS if options.duration_s is None else None),
        "extra_body": _json_object(options.extra_body),
        "objective": read_objective(options.slo) if options.slo else {},
        "seed": Random().getrandbits(32) if options.seed is None else options.seed,
    }
    asked = LoadOptions(**{one.name: values[one.name] for one in fields(LoadOptions)})
    with progress_bar(asked.n_ticks) as advance:
        report = measure_load(asked, advance)
    if options.plot is not None:
        save_chart(options.plot, *_charts(report))
    if not as_json:
        _show(report)
    print(json.dumps(asdict(report)))
    if not any(point.n_answered for point in report.points):
        details = [item for point in report.points for item in point.error_details.items()]
        if not details:
            raise KukriError("no request was sent in time: raise --rate or --duration")
        raise KukriError(f"no request was answered: {': '.join(details[0])}")


def _numbers(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(item) for item in text.split(","))
    except ValueError:
        raise ConfigError(f"rates and concurrencies must be numbers such as 1,2,4, not {text!r}") from None


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        fields = json.loads(text or "{}")
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise ConfigError(f"--extra-body must be a JSON object, not {text!r}")
    return fields


def _show(report: LoadReport) -> None:
    loop = "requests/s, Poisson" if report.loop == "open" else "at a time"
    rows = [[f"{p.load:g}", *_rates(p)] for p in report.points]
    goodput = ["goodput/s"] if report.objective_ms else []
    columns = ["answered", "failed", "requests/s", *goodput, "tokens/s in", "out", "most in flight"]
    print_table(f"{report.model} on {report.url}: {report.prompts}", [loop, *columns], rows)
    rows = [[f"{p.load:g}", *(_spread(getattr(p, f"{name}_ms")) for name in MEASURES)] for p in report.points]
    print_table("ms: mean / median / p99", [loop, *(name.upper() for name in MEASURES)], rows)
    print()
    for point in report.points:
        for line in _remarks(point, report):
            print(f"{point.load:g}: {printable(line)}")


def _rates(point: LoadPoint) -> list[str]:
    return [
        str(point.n_answered),
        str(point.n_requests - point.n_answered),
        f"{point.requests_per_s:.2f}",
        *([] if point.goodput_per_s is None else [f"{point.goodput_per_s:.2f}"]),
        f"{point.prompt_tokens_per_s:,.0f}",
        f"{point.generated_tokens_per_s:,.0f}",
        str(point.max_in_flight),
    ]


def _spread(spread: Spread | None) -> str:
    return "-" if spread is None else f"{spread.mean:,.1f} / {spread.median:,.1f} / {spread.p99:,.1f}"


def _remarks(point: LoadPoint, report: LoadReport) -> list[str]:
    """Failures, and circumstances that change the meaning of the figures."""
    lines = [f"{n} x {kind}: {point.error_details[kind]}" for kind, n in point.errors.items()]
    if point.n_cached_tokens * 4 > point.n_prompt_tokens:
        lines.append(f"{point.n_cached_tokens:,} prompt tokens were in the server's prefix cache")
    if not point.has_usage and point.n_answered:
        lines.append("the server sent no usage: chunks are counted as tokens")
    if (point.late_p99_ms or 0.0) > _LATE_MS:
        lines.append(
            f"requests were sent late, p99 {point.late_p99_ms:.0f} ms: the client was the bottleneck"
        )
    return lines


def _charts(report: LoadReport) -> list[Chart]:
    x_name = "requests/s that arrive" if report.loop == "open" else "requests at a time"
    charts = []
    for name in MEASURES:
        found = [(p.load, getattr(p, f"{name}_ms")) for p in report.points]

        def line(value: Callable[[Spread], float], found: Any = found) -> list[tuple[float, float]]:
            return [(load, value(spread)) for load, spread in found if spread is not None]

        if not (points := line(lambda spread: spread.median)):
            continue
        charts.append(
            Chart(
                x_name,
                f"{name.upper()}, ms",
                points,
                name="median",
                others={"mean": line(lambda spread: spread.mean), "p99": line(lambda spread: spread.p99)},
                limit=report.objective_ms.get(name),
                from_zero=True,
            )
        )
    return charts
