"""A process that compiles grammars, each in a child of its own, which is killed when its time is over.

It reads lines of JSON: first a vocabulary, which it answers by a line when it is ready, then [number,
grammar] each. Each of these gets a line [number, outcome, reason] back, in the order in which they end. A
child is forked with the vocabulary's automata in memory, in milliseconds. Those that run at once have less
and less of the processor, so that many weigh little more than one, and those that take longer than most run
when nothing else does: streams come first.
"""

from __future__ import annotations

import json
import math
import os
import selectors
import sys
import time
from typing import Any, Literal

from kukri.dataclass import dataclass
from kukri.errors import KukriError
from kukri.host.limits import limit_cpu, limit_memory, lower_priority
from kukri.host.os_calls import HAS_FORK, cpu_s, end_child, fork, set_priority
from kukri.sampling import Grammar
from kukri.sampling.grammar import compiled

BUDGET_S = 0.6  # per grammar
MAX_AT_ONCE = 16
_FAIR_SHARE_S = 0.05  # processor time: with less there is no verdict
_PATIENCE_S = 5.0  # for a grammar alone on a machine that gives it less
_PAUSE_S = 0.1  # between two looks at that
_USUAL_S = 0.1  # within which most have ended
_MAX_CPU_S = 2  # for a child whose parent is gone
_MAX_BYTES = 4 << 30  # bytes of address space
_MAX_NOTES = 2000  # characters
_NICENESS, _MAX_NICENESS = 5, 12

Outcome = Literal["good", "bad", "busy"]


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

    def encode_inside(self, text: str) -> list[int]:
        """The ids of a text's single bytes: which ids a text has changes nothing in a grammar."""
        data = text.encode()
        return [self._id_of[data[i : i + 1]] for i in range(len(data)) if data[i : i + 1] in self._id_of]


def verdict(grammar: Grammar, vocabulary: Any) -> tuple[Outcome, str | None]:
    """Whether a grammar can be served, and why not, or what of it is not enforced; makes its first mask."""
    try:
        fitted = compiled(grammar, vocabulary)
        error = fitted.matcher().update()
    except KukriError as raised:
        return "bad", str(raised)
    if error:
        return "bad", str(grammar.error(error))
    return "good", "; ".join(fitted.notes)[:_MAX_NOTES] or None


@dataclass
class Child:
    """A process that compiles one grammar; `reader` is the end of the pipe that its verdict comes from."""

    number: int
    grammar: Grammar
    pid: int
    reader: int
    stops_at: float
    n_others: int  # when it started
    slows_at: float
    left_s: float = _PATIENCE_S

    @classmethod
    def start(cls, number: int, grammar: Grammar, vocabulary: Any, n_others: int) -> Child:
        """Forks it."""
        reader, writer = os.pipe()
        pid = fork()
        if pid == 0:
            try:
                lower_priority(min(_NICENESS + 2 * n_others, _MAX_NICENESS))
                limit_cpu(_MAX_CPU_S)
                limit_memory(_MAX_BYTES)
                os.write(writer, json.dumps(verdict(grammar, vocabulary)).encode())
            finally:
                os._exit(0)
        os.close(writer)
        now = time.monotonic()
        return cls(number, grammar, pid, reader, now + BUDGET_S, n_others, now + _USUAL_S)

    def slow_down(self) -> None:
        """Leaves the processor to others from now on."""
        self.slows_at = math.inf
        set_priority(self.pid, _MAX_NICENESS)

    def may_continue(self) -> bool:
        """Gives a grammar more time if it is alone and got too little of the processor; returns whether."""
        used_s = cpu_s(self.pid)
        if self.n_others or used_s is None or used_s >= _FAIR_SHARE_S or self.left_s <= 0:
            return False
        self.stops_at += _PAUSE_S
        self.left_s -= _PAUSE_S
        return True

    def end(self, is_in_time: bool) -> tuple[Outcome, str | None]:
        """Ends it: whether the grammar can be served, and why not, or what of it is not enforced."""
        found = os.read(self.reader, 1 << 16) if is_in_time else b""
        used_s = end_child(self.pid)
        os.close(self.reader)
        if found:
            outcome, reason = json.loads(found)
            return outcome, reason
        if not is_in_time and used_s < _FAIR_SHARE_S:
            return "busy", None
        limit = "too much memory" if is_in_time else f"more than {BUDGET_S:g} s"
        return "bad", str(self.grammar.error(f"it takes {limit} to compile: make it simpler"))


def tell(number: int, outcome: Outcome, reason: str | None) -> None:
    """Writes the line of one grammar."""
    print(json.dumps([number, outcome, reason]), flush=True)


def answer_lines(vocabulary: Any) -> None:
    """Answers the lines of stdin until it ends."""
    children: list[Child] = []
    left = b""
    with selectors.DefaultSelector() as ready:
        ready.register(sys.stdin.fileno(), selectors.EVENT_READ)
        while True:
            until = min((min(child.stops_at, child.slows_at) for child in children), default=None)
            wait_s = None if until is None else max(until - time.monotonic(), 0.0)
            readable = [key.fd for key, _ in ready.select(wait_s)]
            now = time.monotonic()
            for child in children.copy():
                if child.slows_at <= now:
                    child.slow_down()
                if child.reader not in readable and (child.stops_at > now or child.may_continue()):
                    continue
                children.remove(child)
                ready.unregister(child.reader)
                tell(child.number, *child.end(child.reader in readable))
            if sys.stdin.fileno() in readable:
                data = os.read(sys.stdin.fileno(), 1 << 20)
                if not data:
                    break
                *lines, left = (left + data).split(b"\n")
                for number, given in map(json.loads, lines):
                    if len(children) == MAX_AT_ONCE:
                        tell(number, "busy", None)
                        continue
                    children.append(Child.start(number, Grammar(**given), vocabulary, len(children)))
                    ready.register(children[-1].reader, selectors.EVENT_READ)
    for child in children:
        child.end(False)


def answer_in_turn(vocabulary: Any) -> None:
    """Answers one after another, without a budget, on systems without fork."""
    for number, given in map(json.loads, sys.stdin):
        tell(number, *verdict(Grammar(**given), vocabulary))


def main() -> None:
    """Reads a vocabulary, makes its automata, and answers lines until stdin ends."""
    vocabulary = Vocabulary(**json.loads(_first_line()))
    verdict(Grammar.json(), vocabulary)  # makes the automata of the vocabulary
    tell(0, "good", None)
    (answer_lines if HAS_FORK else answer_in_turn)(vocabulary)


def _first_line() -> bytes:
    """The first line of stdin, and nothing of the next: what is read here is read from the system."""
    data = b""
    while not data.endswith(b"\n"):
        more = os.read(sys.stdin.fileno(), 1 << 20)
        if not more:
            raise SystemExit(1)
        data += more
    return data


if __name__ == "__main__":
    main()
