"""The English of what users read: error messages, log lines, and help texts."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import kukri

PACKAGE = Path(kukri.__file__).parent
SPEAKERS = {"warn", "warning", "error", "info", "exception", "Option", "Argument", "refused"}
# What people wrote here before, and what they meant.
ACCENTS = {
    r"\bbehind\b": "after",
    r"\bbeside\b": "besides, alongside or next to",
    r"\b(is|are|was|were) none\b(?! (loaded|of|here))": "is not one",
    r"\b(goes|go|went|going) on\b": "continue",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"\ban own\b": "one of its own",
    r"\bby turns\b": "alternating",
    r"\bat the earliest\b": "at least … later",
}


def spoken(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each string in a `raise`, in a call that raises or logs, and after `help=`."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Raise) and node.exc is not None:
            roots: list[ast.AST] = [node.exc]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            roots = [k.value for k in node.keywords if k.arg == "help"]
            roots += [node] if name in SPEAKERS or name.endswith("Error") else []
        else:
            continue
        for root in roots:
            for part in ast.walk(root):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def accents(source: str) -> list[str]:
    """What a native speaker would put differently, with its line and a better word."""
    return [
        f"line {line}: {text!r} (say {better})"
        for line, text in spoken(source)
        for accent, better in ACCENTS.items()
        if re.search(accent, text)
    ]


@pytest.mark.parametrize(
    "source",
    [
        'raise ConfigError(f"a model of {n} layers takes no draft model and is none")',
        'log.warning("the state behind token %d is lost", n)',
        'typer.Option("--x", help="The file beside the model.")',
        'failed.append(KukriError("an answer cannot go on"))',
    ],
)
def test_accents_are_found(source: str) -> None:
    """Would catch a check that looks at nothing."""
    assert accents(source)


def test_what_users_read_has_no_accent() -> None:
    """Catches "a rejected draft, behind which", which readers understand only after a second look."""
    found = [
        f"{file.relative_to(PACKAGE)}, {one}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for one in accents(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)
