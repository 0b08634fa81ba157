"""Functions of a Python file as tools of `kukri run`: each call is shown, and made after a yes."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from kukri.calls.conversation import DECLINED
from kukri.calls.functions import FunctionTool, result_text
from kukri.errors import ConfigError, printable

_SHOWN = 400  # characters of a result


def functions_of(paths: Sequence[Path], *, asks: bool) -> list[Callable[..., Any]]:
    """The public functions of Python files, which are run here; each call is shown on stderr.

    If it `asks`, a call is made after a yes on the terminal, and the model is told of a no. Raises
    ConfigError for a file that cannot be run or has no such functions, or if nobody can be asked.
    """
    if asks and not (sys.stdin is not None and sys.stdin.isatty()):
        raise ConfigError("--tool requires a terminal, to ask before each call: allow all calls with --yes")
    found: list[Callable[..., Any]] = []
    for i, path in enumerate(paths):
        functions = _public(path, f"kukri_tools_{i}")
        if not functions:
            raise ConfigError(f"--tool {path} must have public functions")
        found += [_shown(function, asks=asks) for function in functions]
    for function in found:
        FunctionTool.of(function)  # before the model is loaded
    return found


def _public(path: Path, name: str) -> list[Callable[..., Any]]:
    """The functions that a file defines, in its order, but for those that begin with _."""
    if not path.is_file():
        raise ConfigError(f"--tool {path} must be a file")
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--tool {path} must be a Python file (.py)")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # where type hints are looked up
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--tool {path} failed: {type(error).__name__}: {error}") from error
    members = vars(module).items()
    return [f for n, f in members if inspect.isfunction(f) and f.__module__ == name and not n.startswith("_")]


def _shown(function: Callable[..., Any], *, asks: bool) -> Callable[..., Any]:
    """The function, whose calls and results are written to stderr."""

    @functools.wraps(function)
    def call(*values: Any, **named: Any) -> Any:
        given = inspect.signature(function).bind(*values, **named).arguments
        texts = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in given.items()]
        print(printable(f"→ {function.__name__}({', '.join(texts)})"), file=sys.stderr)
        if asks and not _is_yes():
            return DECLINED
        try:
            result = result_text(function(*values, **named))
        except Exception as error:
            result = f"error: {type(error).__name__}: {error}"
        shown = result if len(result) <= _SHOWN else result[:_SHOWN] + "…"
        print(printable(f"← {shown}"), file=sys.stderr)
        return result

    return call


def _is_yes() -> bool:
    print("  call it? [y/N] ", end="", file=sys.stderr, flush=True)
    try:
        return input().strip().lower() in ("y", "yes")
    except EOFError:
        return False
