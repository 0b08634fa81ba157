"""What the programs `python -m kukri.bench.*` share: options, one-line errors, tables."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

from kukri.errors import ConfigError, KukriError
from kukri.formats import hub


def parser(program: str, description: str, *, with_model: bool = True) -> argparse.ArgumentParser:
    """A parser with the options that programs have: the model (mostly), threads and --json."""
    options = argparse.ArgumentParser(prog=f"python -m kukri.bench.{program}", description=description)
    if with_model:
        options.add_argument(
            "-m", "--model", help="a known name or the path of a .gguf file (the default model)"
        )
    options.add_argument("-t", "--threads", type=positive, help="threads (the cores this process may use)")
    options.add_argument("--json", action="store_true", help="print only the JSON object")
    return options


def positive(text: str) -> int:
    """An option's integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer, at least 1, not {text!r}")
    return value


def run(main: Callable[[], None]) -> None:
    """Runs a program; an error of ours is one line on stderr and status 2, Ctrl-C status 130."""
    try:
        main()
    except KukriError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def model_path(model: str | None, n_tokens: int) -> Path:
    """The file of a model. Raises ConfigError where its context is shorter than `n_tokens`."""
    from kukri.formats.config_gguf import model_config
    from kukri.formats.gguf import GGUFFile

    path = hub.resolve(model)
    with GGUFFile(path) as file:
        limit = model_config(file).max_context
    if n_tokens > limit:
        raise ConfigError(f"{n_tokens} tokens do not fit into the model's context of {limit}: ask for fewer")
    return path


def served_url(stderr: IO[str]) -> str:
    """Where a `kukri serve` process listens, without a path; it may tell first that it compiles kernels.

    `stderr`: the process's. Raises KukriError, with what it said, where it ends instead.
    """
    said = []
    for line in stderr:
        if found := re.search(r"http://\S+:\d+", line):
            return found[0]
        said.append(line)
    raise KukriError(f"the server did not start: {''.join(said).strip()}")


def print_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints a table under its title, numbers to the right."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    console.print(title)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(header):
        table.add_column(name, justify="right" if i else "left")
    for row in rows:
        table.add_row(*row)
    console.print(table)


def say(text: str, *, silent: bool) -> None:
    """Prints a line of progress to stderr."""
    if not silent:
        print(text, file=sys.stderr, flush=True)
