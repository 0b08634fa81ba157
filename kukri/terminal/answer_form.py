"""The form that an answer must have: a schema, a pattern, choices or a grammar from the command line."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

from kukri.errors import ConfigError, KukriError, RequestError
from kukri.sampling.grammar import MAX_CHARS, CompiledGrammar, Grammar, GrammarTokenizer, compiled
from kukri.terminal.options import FormOptions

COMPILE_S = 10.0  # a schema of 1 kB can keep a compiler busy for minutes


def answer_form(options: FormOptions) -> Grammar | None:
    """The grammar that the options ask for; None if they ask for none.

    Raises ConfigError if there are two, RequestError for a file that is too long or no JSON, and OSError.
    """
    given = {
        "--schema": options.schema,
        "--regex": options.regex,
        "--choice": options.choice,
        "--grammar": options.grammar,
    }
    flags = [flag for flag, value in given.items() if value]
    if len(flags) > 1:
        raise ConfigError(f"{' and '.join(flags)} cannot be combined: give one")
    if options.schema:
        return Grammar.json(_schema(options.schema), param="--schema")
    if options.regex:
        return Grammar.regex(options.regex, param="--regex")
    if options.choice:
        texts = [text.strip() for one in options.choice for text in one.split(",")]
        return Grammar.choice(texts, param="--choice")
    if options.grammar:
        return Grammar.text(_text(options.grammar, "--grammar"), param="--grammar")
    return None


def compiled_in_time(
    grammar: Grammar, tokenizer: GrammarTokenizer, limit_s: float = COMPILE_S
) -> CompiledGrammar:
    """The grammar over a tokenizer's tokens. Raises RequestError if that takes too long, or is impossible.

    A compiler that has not ended is left in a thread of its own, which ends with the process.
    """
    made: list[CompiledGrammar | KukriError] = []

    def compile() -> None:
        try:
            made.append(compiled(grammar, tokenizer))
        except KukriError as error:
            made.append(error)

    thread = threading.Thread(target=compile, name="kukri-grammar", daemon=True)
    thread.start()
    thread.join(limit_s)
    if not made:
        raise grammar.error(f"it takes more than {limit_s:g} s to compile: make it simpler")
    if isinstance(made[0], KukriError):
        raise made[0]
    return made[0]


def _schema(path: Path) -> Any:
    try:
        return json.loads(_text(path, "--schema"))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise RequestError(f"--schema {path} must be JSON: {reason}", param="schema") from None


def _text(path: Path, flag: str) -> str:
    """The text of a file, read as far as it may be long."""
    with path.expanduser().open("rb") as file:
        data = file.read(4 * MAX_CHARS + 1)
    try:
        text = data.decode()
    except UnicodeDecodeError as error:
        if len(data) <= 4 * MAX_CHARS:
            raise RequestError(
                f"{flag} {path} must be UTF-8 (byte {error.start} is not)", param=flag
            ) from None
        text = " " * (MAX_CHARS + 1)
    if len(text) > MAX_CHARS:
        raise RequestError(f"{flag} {path} must have at most {MAX_CHARS:,} characters", param=flag)
    return text
