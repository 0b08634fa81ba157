"""How a command ends: one line for an error, nothing for Ctrl-C or a closed pipe."""

from __future__ import annotations

import os
import sys
from typing import Any

import typer
from typer.core import TyperGroup

from kukri.errors import KukriError
from kukri.terminal.output import printable

EXIT_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells count
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE


class ErrorReportingGroup(TyperGroup):
    """A command group that turns what its commands raise into a line on stderr and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Runs the command. A KukriError exits with 2 and one line, or with its traceback under --debug."""
        try:
            result = super().invoke(ctx)
            sys.stdout.flush()  # so that a closed pipe shows here and not while Python shuts down
            return result
        except KukriError as error:
            if ctx.params.get("debug"):
                raise
            print(f"error: {one_line(error)}", file=sys.stderr)
            raise typer.Exit(EXIT_ERROR) from None
        except KeyboardInterrupt:
            print(file=sys.stderr)
            raise typer.Exit(EXIT_INTERRUPTED) from None
        except BrokenPipeError:
            # what is still buffered has nowhere to go
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(EXIT_BROKEN_PIPE) from None


def one_line(error: BaseException) -> str:
    """The error's text on one line, safe to print anywhere."""
    return printable(" ".join(str(error).split()) or type(error).__name__)
