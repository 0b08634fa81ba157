"""The harness of the experiments: options, engines in turns, medians of ratios, tables and one JSON line.

An experiment parses its options with `Experiment`, measures with `in_turns` and reports with `show`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import IO, Any

from benchmarks.child import Child
from benchmarks.llama_cpp import import_llama_cpp
from kukri.errors import ConfigError, KukriError, UnsupportedError
from kukri.formats import hub
from kukri.kernels.cpu.compile.features import usable_cores

ENGINES = ("kukri", "llama-cpp-python")
Say = Callable[[str], None]  # takes a line of progress


@dataclass(frozen=True)
class Table:
    """A table of results; the first column is text, the others are aligned to the right."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Comparison:
    """Values of two sides, round by round, and the ratios first / second."""

    sides: dict[str, tuple[float, ...]]
    ratios: tuple[float, ...]
    median_ratio: float

    @classmethod
    def of(cls, names: tuple[str, str], rounds: Sequence[Sequence[float]]) -> Comparison:
        """Compares two named sides, of which each round has a value."""
        first, second = (tuple(values) for values in zip(*rounds, strict=True))
        ratios = tuple(a / b for a, b in zip(first, second, strict=True))
        return cls(dict(zip(names, (first, second), strict=True)), ratios, median(ratios))

    def median(self, side: str) -> float:
        """The median of one side's values."""
        return median(self.sides[side])

    def table(self, title: str) -> Table:
        """The rounds, and the medians below them."""
        rows = [
            [str(i), *(f"{value:.1f}" for value in values), f"{ratio:.2f}"]
            for i, (*values, ratio) in enumerate(zip(*self.sides.values(), self.ratios, strict=True), 1)
        ]
        medians = [f"{median(values):.1f}" for values in self.sides.values()]
        return Table(
            title, ["round", *self.sides, "ratio"], [*rows, ["median", *medians, f"{self.median_ratio:.2f}"]]
        )


class Experiment:
    """The command line of one experiment: `options` to add to, progress on stderr, the report on stdout."""

    def __init__(self, name: str, description: str, *, with_model: bool = True) -> None:
        self.options = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
        if with_model:
            self.options.add_argument("-m", "--model", help="a known name or a .gguf file (default model)")
        self.options.add_argument("-t", "--threads", type=positive, help="threads (all usable cores)")
        self.options.add_argument("--json", action="store_true", help="print the JSON line alone")
        self._is_silent = False

    def count(self, short: str, long: str, default: int, help: str) -> None:
        """Adds an option that takes an integer of at least 1."""
        self.options.add_argument(
            short, long, type=positive, default=default, help=f"{help} ({default})", metavar="N"
        )

    def parse(self) -> Any:
        """The options given; `threads` is the number of usable cores unless given."""
        given = self.options.parse_args()
        given.threads = given.threads or usable_cores()
        self._is_silent = given.json
        return given

    def say(self, text: str) -> None:
        """Prints a line of progress to stderr, unless --json limits the output to the report."""
        if not self._is_silent:
            print(text, file=sys.stderr, flush=True)

    def show(self, report: Any, *tables: Table | str) -> None:
        """Prints tables and lines of text, then the report, a dataclass or a dict, as one JSON line."""
        if not self._is_silent:
            for table in tables:
                if isinstance(table, str):
                    print(f"{table}\n")
                else:
                    _print_table(table)
        print(json.dumps(report if isinstance(report, dict) else asdict(report)))


def silent(text: str) -> None:
    """Progress without a reader."""


def run(main: Callable[[], None]) -> None:
    """Runs an experiment; a KukriError is one line on stderr and status 2, Ctrl-C status 130."""
    try:
        main()
    except KukriError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def positive(text: str) -> int:
    """An option's integer of at least 1."""
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be an integer, at least 1, not {text!r}")
    return value


def model_path(model: str | None, n_tokens: int) -> Path:
    """The file of a model. Raises ConfigError if its context is shorter than `n_tokens`."""
    from kukri.formats.gguf.config import model_config
    from kukri.formats.gguf.reader import GGUFFile

    path = hub.resolve(model)
    with GGUFFile(path) as file:
        limit = model_config(file).max_context
    if n_tokens > limit:
        raise ConfigError(f"{n_tokens} tokens do not fit into the model's context of {limit}: ask for fewer")
    return path


def installed_engines() -> tuple[str, ...]:
    """kukri, and llama-cpp-python if it is installed."""
    try:
        import_llama_cpp()
    except UnsupportedError:
        return ENGINES[:1]
    return ENGINES


class Worker(Child):
    """An engine in a process of its own: see `benchmarks.worker`, which runs there.

    The engine serves `n_streams` requests of `context_tokens` at a time on `n_threads` threads. `kv_type` is
    that of its KV cache: f16, q8_0 or q4.
    """

    def __init__(
        self,
        engine: str,
        path: str | os.PathLike[str],
        n_threads: int,
        context_tokens: int,
        n_streams: int = 1,
        kv_type: str = "f16",
    ) -> None:
        self.engine = engine
        numbers = map(str, (n_threads, context_tokens, n_streams))
        super().__init__(engine, ["benchmarks.worker", engine, os.fspath(path), kv_type, *numbers])

    def prefill_tokens_per_s(self, n_tokens: int) -> float:
        """Tokens per second of one prompt."""
        return n_tokens / float(self.ask("prefill_s", n_tokens))

    def decode_tokens_per_s(self, n_tokens: int, depth: int = 0) -> float:
        """Tokens per second of one generation, after a prompt of `depth` tokens."""
        if depth:
            return self.batch_decode_tokens_per_s(1, depth, n_tokens + 1)
        return n_tokens / float(self.ask("decode_s", n_tokens))

    def batch_decode_tokens_per_s(self, n_streams: int, n_prompt: int, n_tokens: int) -> float:
        """Tokens per second of all of `n_streams` generations side by side, after prompts of `n_prompt`."""
        return n_streams * (n_tokens - 1) / float(self.ask("batch_decode_s", n_streams, n_prompt, n_tokens))

    def versions(self) -> dict[str, str]:
        """Names and versions of the engine."""
        return dict(self.ask("versions"))


@contextmanager
def served(path: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Runs `kukri serve` on any free port within the `with` block; yields the process and its URL.

    Raises KukriError, with the server's messages, if it does not start.
    """
    command = [sys.executable, "-m", "kukri", "serve", str(path), "--port", "0", *options]
    null = subprocess.DEVNULL
    process = subprocess.Popen(command, stdin=null, stdout=null, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        yield process, served_url(process.stderr)
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def served_url(stderr: IO[str]) -> str:
    """The URL, without a path, that a `kukri serve` process announces on `stderr`, after other messages.

    Raises KukriError, with those messages, if it announces none.
    """
    said = []
    for line in stderr:
        if found := re.search(r"http://\S+:\d+(?=/v1)", line):
            return found[0]
        said.append(line)
    raise KukriError(f"the server did not start: {''.join(said).strip()}")


def output_of(command: Sequence[str], environment: dict[str, str] | None = None) -> str:
    """Standard output of a process. Raises KukriError with the last line of its errors if it fails."""
    null = subprocess.DEVNULL
    done = subprocess.run(command, env=environment, stdin=null, capture_output=True, text=True)
    if done.returncode:
        raise KukriError(f"{command[0]} failed: {last_line(done.stderr)}")
    return done.stdout


def last_line(text: str) -> str:
    """The last line of what a program said."""
    return (text.strip().splitlines() or ["no message"])[-1]


def _print_table(table: Table) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    console = Console(highlight=False)
    console.print(table.title)
    grid = RichTable(box=None, padding=(0, 2, 0, 0))
    for i, name in enumerate(table.header):
        grid.add_column(name, justify="right" if i else "left")
    for row in table.rows:
        grid.add_row(*row)
    console.print(grid)
    console.print()
