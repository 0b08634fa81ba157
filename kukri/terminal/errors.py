"""Exit codes and messages of commands: one line for an error, none for Ctrl-C or a closed pipe."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Any

import typer
from typer.core import TyperGroup

from kukri.errors import KukriError, printable
from kukri.terminal.command import LightParams

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


# the commands under the headings of `kukri --help`
HEADINGS = {
    "Answer and serve": ("run", "chat", "serve", "launch", "batch", "ps", "cluster", "stage"),
    "Vectors and activations": ("embed", "rerank", "transcribe", "activations", "circuit", "plot"),
    "Models": ("pull", "list", "rm", "show", "inspect", "fit"),
    "Files": ("convert", "quantize", "imatrix", "tune-recipe", "merge"),
    "Measure": ("bench", "perplexity", "compare", "doctor"),
}


class ErrorReportingGroup(LightParams, TyperGroup):
    """A command group that turns its commands' exceptions into a line on stderr and an exit code."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """Write the commands by their purpose."""
        listed = self.list_commands(ctx)
        width = formatter.width - 6 - max(map(len, listed), default=0)
        for heading, names in HEADINGS.items():
            found = [(name, self.get_command(ctx, name)) for name in names if name in listed]
            rows = [(name, one.get_short_help_str(width)) for name, one in found if one is not None]
            if rows:
                with formatter.section(heading):
                    formatter.write_dl(rows)

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Reads the arguments; `kukri help COMMAND` is `kukri COMMAND --help`."""
        return super().parse_args(ctx, [*args[1:], "--help"] if args[:1] == ["help"] else args)

    def main(self, *arguments: Any, **options: Any) -> Any:
        """Runs the command line, and flushes stdout while an error of that can still be reported."""
        try:
            try:
                return super().main(*arguments, **options)
            finally:
                sys.stdout.flush()
        except BrokenPipeError:
            sys.exit(_give_up_stdout(EXIT_BROKEN_PIPE))
        except OSError as error:
            if isinstance(error, KukriError):  # with its traceback, which --debug asks for
                raise
            sys.exit(_report_os_error(error))

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. An error exits with 2 and one line, or with its traceback under --debug."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            raise typer.Exit(_give_up_stdout(EXIT_BROKEN_PIPE)) from None
        except (KukriError, OSError) as error:
            if ctx.params.get("debug"):
                raise
            if not isinstance(error, KukriError):
                raise typer.Exit(_report_os_error(error)) from None
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise typer.Exit(EXIT_ERROR) from None


def check_streams() -> None:
    """Ends the program with a line if standard output is closed; text for a closed stderr is dropped."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process lives)
    if sys.stdout is None:
        print("error: standard output is closed: send it to a file, or to /dev/null", file=sys.stderr)
        sys.exit(EXIT_ERROR)


class BenchGroup(LightParams, TyperGroup):
    """The group of `kukri bench`, whose first argument may be a model instead of a command."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Parses the arguments, with a leading model as --model."""
        if args and not args[0].startswith("-") and args[0] not in self.commands:
            args = ["--model", *args]
        return super().parse_args(ctx, args)


def _report_os_error(error: OSError) -> int:
    """Prints an error of the system, such as a full disk, on one line; returns the exit code."""
    where = "cannot write the output" if error.filename is None else str(error.filename)
    print(f"error: {printable(where)}: {error.strerror or one_line(error)}", file=sys.stderr)
    return _give_up_stdout(EXIT_ERROR)


def _give_up_stdout(exit_code: int) -> int:
    """Drops the text that stdout still buffers and cannot write, and returns `exit_code`.

    Python would try again at its end and report an ignored exception.
    """
    with suppress(OSError, ValueError):
        sys.stdout.flush()
        return exit_code
    with suppress(OSError, ValueError, AttributeError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return exit_code


def one_line(error: BaseException) -> str:
    """The error's text on one line, safe to print anywhere."""
    return printable(" ".join(str(error).split()) or type(error).__name__)
