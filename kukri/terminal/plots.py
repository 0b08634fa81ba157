"""Charts as PNG files, with matplotlib where it is installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kukri.errors import ConfigError, UnsupportedError


@dataclass(frozen=True)
class Chart:
    """Points, joined by a line in the order of x, with a label each where `labels` has them."""

    x_name: str
    y_name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    log: bool = False  # the y axis
    from_zero: bool = False


def require_plots(path: Path) -> None:
    """Raises UnsupportedError without matplotlib, ConfigError where `path` cannot become a PNG."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError("matplotlib is not installed: run `pip install 'kukri[plots]'`") from None
    if path.suffix.lower() != ".png":
        raise ConfigError(f"a plot is a PNG: call it {path.with_suffix('.png').name}, not {path.name}")
    if not path.parent.is_dir():
        raise ConfigError(f"there is no directory {path.parent}")


def save_chart(path: Path, chart: Chart) -> None:
    """Writes a chart. Raises ConfigError where the file cannot be written."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    order = sorted(range(len(chart.points)), key=lambda i: chart.points[i])
    axes.plot([chart.points[i][0] for i in order], [chart.points[i][1] for i in order], marker="o")
    for label, point in zip(chart.labels, chart.points, strict=bool(chart.labels)):
        axes.annotate(label, point, xytext=(5, 5), textcoords="offset points")
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    if chart.log and all(y > 0 for _, y in chart.points):
        axes.set_yscale("log")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None
