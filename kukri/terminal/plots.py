"""Charts as PNG files, with matplotlib if it is installed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kukri.dataclass import dataclass, field
from kukri.errors import ConfigError, UnsupportedError
from kukri.host.installed import needs_package
from kukri.terminal.files import check_parent, writing


@dataclass(frozen=True)
class Chart:
    """Points, joined by a line in the order of x, with a label each if `labels` has them."""

    x_name: str
    y_name: str
    points: Sequence[tuple[float, float]]
    labels: Sequence[str] = ()
    log: bool = False  # the y axis
    from_zero: bool = False
    name: str = ""  # label of the points, if there are `others`
    others: Mapping[str, Sequence[tuple[float, float]]] = field(default_factory=dict)
    limit: float | None = None  # a dashed line across


def require_plots(path: Path) -> None:
    """Raises UnsupportedError without matplotlib, ConfigError if `path` cannot become a PNG."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(needs_package("a plot", "matplotlib", "plots")) from None
    if path.suffix.lower() != ".png":
        raise ConfigError(f"a plot must be a PNG: call it {path.with_suffix('.png').name}, not {path.name}")
    check_parent(path)


def save_chart(path: Path, *charts: Chart) -> None:
    """Writes charts, two a row. Raises ConfigError if the file cannot be written."""
    from matplotlib.figure import Figure

    n_columns = min(len(charts), 2)
    n_rows = -(-len(charts) // 2)
    size = (8, 5) if len(charts) == 1 else (6 * n_columns, 4 * n_rows)
    figure = Figure(figsize=size, dpi=120, layout="constrained")
    for i, chart in enumerate(charts, 1):
        _draw(figure.add_subplot(n_rows, n_columns, i), chart)
    with writing(path):
        figure.savefig(path)


def _draw(axes: Any, chart: Chart) -> None:
    for name, points in {chart.name: chart.points, **chart.others}.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=name)
    for label, point in zip(chart.labels, chart.points, strict=bool(chart.labels)):
        axes.annotate(label, point, xytext=(5, 5), textcoords="offset points")
    if chart.limit is not None:
        axes.axhline(chart.limit, linestyle="--", color="gray", label="limit")
    axes.set_xlabel(chart.x_name)
    axes.set_ylabel(chart.y_name)
    if chart.log and all(y > 0 for _, y in chart.points):
        axes.set_yscale("log")
    if chart.from_zero:
        axes.set_ylim(bottom=0)
    if chart.others:
        axes.legend()
    axes.grid(alpha=0.3)
