"""Each technique's gain on this machine: a table, a chart, and the page docs/ablation.md.

`python -m benchmarks.ablate [-m MODEL] [--only NAME] [--page docs/ablation.md]`; --help lists the rest.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from benchmarks.ablation.techniques import TECHNIQUES, AblationReport, ablate, chosen, n_rounds
from benchmarks.ablation.trial import Row, Sizes
from kukri.errors import ConfigError, printable
from kukri.kernels.cpu.compile.features import usable_cores
from kukri.terminal.command import expanded, option
from kukri.terminal.errors import ErrorReportingGroup
from kukri.terminal.files import writing
from kukri.terminal.output import n_bytes_text
from kukri.terminal.plots import require_plots
from kukri.terminal.progress import progress_bar
from kukri.terminal.tables import print_facts, print_table

_COLUMNS = ("without", "with", "gain", "expected")


@dataclass(frozen=True)
class Bars:
    """Ratios as bars from 1 on a logarithmic axis, from top to bottom, each kind in a color of its own.

    `marks` are ranges to compare with, which `mark_name` explains.
    """

    x_name: str
    mark_name: str
    labels: Sequence[str]
    kinds: Sequence[str]
    values: Sequence[float]
    marks: Sequence[tuple[float, float] | None]


@dataclass(eq=False, repr=False)
class AblationOptions:
    """Options of the command line."""

    model: str | None = option("Model. [default: the default model]", "--model", "-m", metavar="MODEL")
    only: list[str] | None = option(
        "Measure only this technique, such as kv-cache; repeatable.", metavar="NAME"
    )
    n_threads: int | None = option("Threads. [default: usable cores]", "--threads", metavar="N")
    repetitions: int = option("Rounds.", "--repetitions", "-r", default=5, metavar="N")
    plot: Path | None = option("Plot the gains as a PNG.", metavar="FILE")
    page: Path | None = option("Write a Markdown page and its chart.", metavar="FILE")


def show_ablation(
    model: str | None,
    *,
    only: Sequence[str] | None = None,
    n_threads: int | None,
    repetitions: int,
    plot: Path | None,
    page: Path | None,
    as_json: bool,
    sizes: Sizes | None = None,
) -> None:
    """Measures, prints a table, and writes the requested files; the last line is the AblationReport as JSON.

    `as_json` leaves that line alone. `page` is a Markdown file, and its chart lies next to it. Raises
    ConfigError on counts below 1 and on files that cannot be, before anything is measured.
    """
    for name, value in (("repetitions", repetitions), ("threads", n_threads)):
        if value is not None and value < 1:
            raise ConfigError(f"{name} must be at least 1, not {value}")
    if page is not None and page.suffix.lower() != ".md":
        raise ConfigError(f"the page is Markdown: call it {page.with_suffix('.md').name}, not {page.name}")
    charts = [path for path in (plot, page and page.with_suffix(".png")) if path is not None]
    for path in charts:
        require_plots(path)
    threads, sizes = n_threads or usable_cores(), sizes or Sizes()
    techniques = chosen(only or (), threads)
    with progress_bar(n_rounds(techniques, repetitions, sizes)) as advance:
        report = ablate(
            model,
            techniques,
            n_threads=threads,
            repetitions=repetitions,
            sizes=sizes,
            on_round=lambda text: advance(1, text),
        )
    for path in charts:
        save_bars(path, _bars(report))
    if page is not None:
        with writing(page):
            page.write_text(page_text(report, page.with_suffix(".png").name), encoding="utf-8")
    if not as_json:
        print_facts([("model", _model(report)), ("machine", _machine(report))])
        table = [[f"{name}: {row.measure}", *_cells(row)] for name, row in _rows(report)]
        print_table(f"medians of {repetitions} rounds", ["technique", *_COLUMNS], table)
        print()
    print(json.dumps(asdict(report)))


def page_text(report: AblationReport, chart: str) -> str:
    """The page: model and machine, the chart by its file name, the table, each measurement's description."""
    table = [[name, row.measure, *_cells(row)] for name, row in _rows(report)]
    how = [f"**{name}**: {TECHNIQUES[name].how}" for name in report.techniques]
    parts = [
        "# The gain of each technique",
        "Written by `python -m benchmarks.ablate --page docs/ablation.md`, which measures everything again.",
        f"Model: {_model(report)}.",
        f"Machine: {_machine(report)}.",
        f"Each figure is the median of {report.repetitions} rounds, in which sides take turns. A gain is the "
        "median of the rounds' ratios, above 1 where the technique is better. *Expected* is what is commonly "
        "said of a technique.",
        f"![How many times better each technique makes what is measured]({chart})",
        "\n".join(_markdown_rows(("technique", "measured", *_COLUMNS), table)),
        "## How it is measured",
        *how,
        _mix(report.sizes),
    ]
    return "\n\n".join(parts) + "\n"


def _model(report: AblationReport) -> str:
    model = report.model
    return (
        f"{printable(model.name)}, {model.n_parameters:,} parameters in {n_bytes_text(model.file_bytes)}, "
        f"most of them {next(iter(model.bytes_by_type))}"
    )


def _machine(report: AblationReport) -> str:
    machine = report.machine
    versions = ", ".join(f"{name} {machine.versions.get(name, '?')}" for name in ("python", "numpy", "numba"))
    return (
        f"{machine.cpu}, {machine.n_cores} cores usable, {report.n_threads} threads used, "
        f"{machine.memory_bytes / 2**30:.0f} GiB of memory, read at {machine.read_gb_per_s:.0f} GB/s; "
        f"{versions}"
    )


def _rows(report: AblationReport) -> list[tuple[str, Row]]:
    return [(name, row) for name, rows in report.techniques.items() for row in rows]


def _mix(sizes: Sizes) -> str:
    def span(bounds: tuple[int, int]) -> str:
        return f"{bounds[0]:,} to {bounds[1]:,}"

    return (
        f"**The context** is of {sizes.context:,} tokens. **The mix** is {sizes.n_requests} requests, of "
        f"which {sizes.n_streams} may run at a time: prompts of {span(sizes.mix_prompt)} tokens and answers "
        f"of {span(sizes.mix_answer)}, both drawn evenly on a logarithmic scale with a fixed seed. Prompts "
        "are random ids, sampling is greedy, and times include scheduling and sampling."
    )


def _cells(row: Row) -> list[str]:
    """The figures of a row of the table."""
    gain = f"{row.gain:.2f}" if row.gain < 10 else f"{row.gain:.1f}"
    if row.unit == "bytes":
        gain += f" ({_less(row.gain)})"
    return [_figure(row.off, row.unit), _figure(row.on, row.unit), gain, _expected(row)]


def _figure(value: float, unit: str) -> str:
    if unit == "bytes":
        return n_bytes_text(int(value))
    if unit == "s":
        return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"
    return f"{value:,.0f} {unit}"


def _less(gain: float) -> str:
    return f"{1 - 1 / gain:.0%} less" if gain >= 1 else f"{1 / gain - 1:.0%} more"


def _expected(row: Row) -> str:
    if row.expected is None:
        return ""
    low, high = row.expected
    if row.unit == "bytes":
        return _less(low)
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _markdown_rows(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [columns, ["---"] * len(columns), *rows]
    return [
        f"| {' | '.join(printable(cell).replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    ]


def _bars(report: AblationReport) -> Bars:
    named = _rows(report)
    return Bars(
        "times better",
        "expected",
        [f"{name}: {row.measure}" for name, row in named],
        ["bytes" if row.unit == "bytes" else "time" for _, row in named],
        [row.gain for _, row in named],
        [row.expected for _, row in named],
    )


def save_bars(path: Path, bars: Bars) -> None:
    """Writes a chart of bars. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure

    n_bars = len(bars.labels)
    figure = Figure(figsize=(10, 1.2 + 0.32 * n_bars), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    for i, (value, mark) in enumerate(zip(bars.values, bars.marks, strict=True)):
        if mark is not None:
            axes.plot(mark, (i, i), "|-", color="#d1711f", linewidth=3, markersize=14, zorder=3)
        right = max(value, 1, *(mark or ()))
        axes.annotate(f"{value:.3g}", (right, i), xytext=(6, 0), textcoords="offset points", va="center")
    for kind, color in zip(dict.fromkeys(bars.kinds), ("#3b78b5", "#5aa469", "#8d6cab"), strict=False):
        own = [i for i, other in enumerate(bars.kinds) if other == kind]
        axes.barh(own, [bars.values[i] - 1 for i in own], left=1, height=0.7, color=color, label=kind)
    axes.plot([], [], "|-", color="#d1711f", linewidth=3, markersize=14, label=bars.mark_name)
    axes.set_yticks(range(n_bars), bars.labels)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlim(right=2 * max((*bars.values, 1)))
    axes.invert_yaxis()
    axes.set_xlabel(bars.x_name)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    with writing(path):
        figure.savefig(path)


app = typer.Typer(cls=ErrorReportingGroup, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
@expanded
def main(*, options: AblationOptions, as_json: bool = typer.Option(False, "--json")) -> None:
    """Measure the speedup of each technique on this machine."""
    show_ablation(**vars(options), as_json=as_json)


if __name__ == "__main__":
    app()
