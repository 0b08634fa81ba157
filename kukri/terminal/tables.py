"""Facts and tables as plain lines, never cut to a width, for readers and programs alike.

Cells may come from a hostile file, so their control characters are spelled out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kukri.errors import printable


def print_facts(facts: Sequence[tuple[str, str]]) -> None:
    """Prints a line for each (name, value), values below each other."""
    width = max(12, *(len(name) for name, _ in facts)) + 2
    for name, value in facts:
        print(f"{name:<{width}}{printable(value)}")


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Prints a title, then columns as wide as they need: the first to the left, the others to the right."""
    cells = [list(columns), *([printable(cell) for cell in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = [
        "  ".join(
            [
                row[0].ljust(widths[0]),
                *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
            ]
        )
        for row in cells
    ]
    lines.insert(1, "-" * len(lines[0]))
    print(f"\n{title}", *lines, sep="\n")
