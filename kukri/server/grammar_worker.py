"""A process that compiles grammars, each in a child of its own, which is killed when its time is over.

It reads lines of JSON: first a vocabulary, then a grammar a line. Each gets a line back: null, or why the
grammar cannot be served. A child is forked with the vocabulary's automata in memory, in milliseconds.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Any

from kukri.errors import KukriError
from kukri.sampling import Grammar
from kukri.sampling.grammar import compiled

BUDGET_S = 0.75  # of one grammar
_MAX_CPU_S = 2  # of a child whose parent is gone
_MAX_BYTES = 4 << 30  # of address space
_NICENESS = 5  # streams come first


class Vocabulary:
    """The parts of a tokenizer that a grammar is compiled with."""

    def __init__(self, tokens: list[str], eos_ids: list[int], special_ids: list[int]) -> None:
        """`tokens` are bytes, as Latin-1."""
        self._tokens = [token.encode("latin-1") for token in tokens]
        self._id_of = {token: i for i, token in enumerate(self._tokens)}
        self.n_vocab = len(tokens)
        self.eos_ids, self.special_ids = frozenset(eos_ids), frozenset(special_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of a token."""
        return self._tokens[token_id]

    def encode(self, text: str) -> list[int]:
        """The ids of a text's single bytes: which ids a text has changes nothing in a grammar."""
        data = text.encode()
        return [self._id_of[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._id_of]


def failure(grammar: Grammar, vocabulary: Any) -> str | None:
    """Why a grammar cannot be served; None if it can. Its first mask is computed too."""
    try:
        error = compiled(grammar, vocabulary).matcher().update()
    except KukriError as raised:
        return str(raised)
    return str(grammar.error(error)) if error else None


def answer_within_budget(grammar: Grammar, vocabulary: Any) -> str:
    """`failure` as JSON, by a child; without a budget where the system has no fork."""
    if not hasattr(os, "fork"):
        return json.dumps(failure(grammar, vocabulary))
    import resource

    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            with suppress(ValueError, OSError):  # not every system has the limits
                resource.setrlimit(resource.RLIMIT_CPU, (_MAX_CPU_S, _MAX_CPU_S))
                resource.setrlimit(resource.RLIMIT_AS, (_MAX_BYTES, _MAX_BYTES))
            os.write(writer, json.dumps(failure(grammar, vocabulary)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    is_ready = select.select([reader], [], [], BUDGET_S)[0]
    answer = os.read(reader, 1 << 16) if is_ready else b""
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    os.close(reader)
    if answer:
        return answer.decode()
    reason = "too much memory" if is_ready else f"more than {BUDGET_S:g} s"
    return json.dumps(str(grammar.error(f"it takes {reason} to compile: make it simpler")))


def main() -> None:
    """Answers lines until stdin ends."""
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    vocabulary = Vocabulary(**json.loads(sys.stdin.readline()))
    failure(Grammar.json(), vocabulary)  # makes the automata of the vocabulary
    print("null", flush=True)
    for line in sys.stdin:
        print(answer_within_budget(Grammar(**json.loads(line)), vocabulary), flush=True)


if __name__ == "__main__":
    main()
