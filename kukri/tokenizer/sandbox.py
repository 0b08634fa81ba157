"""The Jinja environment chat templates run in: a template comes with a downloaded model and is not trusted.

Jinja's sandbox keeps templates away from Python's internals. On top of it this one counts loop turns and
macro calls, and bounds numbers and texts that would grow without end. It runs in a process of its own
(`kukri.tokenizer.template_process`), whose processor time and memory the system limits, so that no filter or
comparison keeps a server busy either.

Run as a program, it reads a template and then JSON objects of variables, one in each message. It answers each
object with a letter (T text, R raised by the template, S refused, B broken, E failed on these variables) and
a text. A message is its length in 8 bytes, little-endian, and its bytes.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_STEPS = 1_000_000  # per rendering: an iteration of a loop is 1, a macro call 10
MAX_CPU_S = 0.5  # per rendering, checked with every step; real ones take milliseconds
_KILL_CPU_S = 0.8  # per rendering or compilation: the system then ends the process
_MAX_MEMORY = 1 << 29  # bytes of address space beyond the address space of an idle worker
MAX_TEXT = 10_000_000  # characters of any text, and of the whole result
_MAX_NUMBER = 1_000_000  # for widths and counts
_MAX_BITS = 10_000  # largest product or power

# filters that do as much work as a number says
_COUNTING_FILTERS = ("batch", "center", "indent", "round", "slice", "truncate", "wordwrap")
# six digits, or a width that is an argument: %*d, {:{w}}
_WIDTH = re.compile(r"\d{6,}|%[-+ #0]*(?:\d*\.)?\*|\{[^{}]*\{")


class TemplateRaised(TemplateError):
    """A template called `raise_exception`."""


class Sandbox(ImmutableSandboxedEnvironment):
    """A Jinja environment set up as transformers' `apply_chat_template` does, with bounds."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation])
        self._render = threading.local()
        self.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        self.filters["format"] = _checked_format(self.filters["format"])
        for name in _COUNTING_FILTERS:
            self.filters[name] = _checked_numbers(self.filters[name])

    def render(self, source: Any, variables: Mapping[str, Any]) -> str:
        """The text of a template compiled by this environment; raises SecurityError past a bound."""
        self._render.steps, self._render.end_s = 0, time.thread_time() + MAX_CPU_S
        return self.join_text(source.generate(variables))

    # Properties, because compiled templates then count by naming them, at a tenth of a checked call's cost.

    @property
    def loop_turn(self) -> None:
        """Counts one; raises SecurityError after too many."""
        self._count(1)

    @property
    def macro_call(self) -> None:
        """Counts one; raises SecurityError after too many."""
        self._count(10)

    def _count(self, n_steps: int) -> None:
        self._render.steps += n_steps
        if self._render.steps > MAX_STEPS:
            raise SecurityError(f"more than {MAX_STEPS} steps of loops and macros")
        if time.thread_time() > self._render.end_s:
            raise SecurityError(f"more than {MAX_CPU_S:g} s of work")

    def join_text(self, parts: Iterable[Any]) -> str:
        """The parts as one text; raises SecurityError when it is too long."""
        return "".join(self._bounded(map(str, parts)))

    def concat(self, parts: Iterable[str]) -> str:  # type: ignore[override]  # a builtin in the base class
        """Joins the output of macros and {% set %} blocks."""
        return self.join_text(parts)

    def _bounded(self, parts: Iterable[str]) -> Iterator[str]:
        n_chars = 0
        for part in parts:
            n_chars += len(part)
            if n_chars > MAX_TEXT:
                raise SecurityError(f"a text of more than {MAX_TEXT} characters")
            yield part

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        _Bounds().visit(tree)
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """The result of + * ** %; raises SecurityError when it would be huge."""
        if operator == "%" and isinstance(left, str):
            _check_widths(left)
        elif operator == "+" and isinstance(left, str) and isinstance(right, str):
            return self.join_text((left, right))
        elif operator == "**":
            _check_power(left, right)
        elif operator == "*":
            _check_product(left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Calls from templates; raises SecurityError for a huge count given to a method of a builtin type."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int | list | tuple):
            _check_numbers(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """The safe stand-in for a string's `format`; raises SecurityError on huge widths."""
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            _check_widths(value.__self__)
        return wrapper


class _Bounds(NodeTransformer):
    """Puts a count into every loop and macro, and `join_text` in place of ~.

    They are attributes of the environment, which templates can neither name nor redefine.
    """

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # turns that the loop's own `if` leaves out count too
            node.test = nodes.Or(nodes.EnvironmentAttribute("loop_turn"), node.test)
        return self._counted(node, "loop_turn")

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._counted(node, "macro_call")

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        parts = nodes.List(node.nodes, lineno=node.lineno)
        join = nodes.EnvironmentAttribute("join_text")
        return nodes.Call(join, [parts], [], None, None, lineno=node.lineno)

    def _counted(self, node: nodes.For | nodes.Macro, what: str) -> nodes.Node:
        self.generic_visit(node)
        count = nodes.ExprStmt(nodes.EnvironmentAttribute(what), lineno=node.lineno)
        node.body.insert(0, count)
        return node


class _Generation(Extension):
    """Accepts {% generation %} … {% endgeneration %}, which mark the assistant's text for training."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: object) -> NoReturn:
    raise TemplateRaised(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    _check_numbers((indent,), {})
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _checked_numbers(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)
    def checked(*args: Any, **kwargs: Any) -> Any:
        _check_numbers(args[1:], kwargs)
        return filter_(*args, **kwargs)

    return checked


def _checked_format(filter_: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(filter_)
    def checked(value: Any, *args: Any, **kwargs: Any) -> Any:
        _check_widths(str(value))
        return filter_(value, *args, **kwargs)

    return checked


def _check_numbers(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for number in (*args, *kwargs.values()):
        if isinstance(number, int) and abs(number) > _MAX_NUMBER:
            raise SecurityError(f"a count above {_MAX_NUMBER}")


def _check_widths(format: str) -> None:
    if _WIDTH.search(format):
        raise SecurityError("a format with a huge or variable width")


def _check_product(left: Any, right: Any) -> None:
    for text, count in ((left, right), (right, left)):
        if (
            isinstance(text, str | bytes | list | tuple)
            and isinstance(count, int)
            and len(text) * count > MAX_TEXT
        ):
            raise SecurityError(f"a repetition longer than {MAX_TEXT}")
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > _MAX_BITS
    ):
        raise SecurityError("a huge number")


def _check_power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * right > _MAX_BITS:
        raise SecurityError("a huge number")


def _main() -> None:
    """Answers until its input ends."""
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _limit_memory()
    run: Callable[[Mapping[str, Any]], str] | None = None
    broken = ""
    source = _read(requests)
    _set_alarm(_KILL_CPU_S)
    try:
        run = _compiled((source or b"").decode("utf-8", "surrogatepass"))
    except TemplateSyntaxError as error:
        broken = f" at line {error.lineno}: {error.message}"
    except (TemplateError, RecursionError, SyntaxError, ValueError, MemoryError) as error:
        broken = f": {_line(error)}"
    _set_alarm(0)
    while (request := _read(requests)) is not None:
        _set_alarm(_KILL_CPU_S)
        kind, text = ("B", broken) if run is None else _answer(run, request)
        answer = kind.encode() + text.encode("utf-8", "surrogatepass")
        _set_alarm(0)
        answers.write(len(answer).to_bytes(8, "little") + answer)
        answers.flush()


def _set_alarm(cpu_s: float) -> None:
    """Have SIGPROF end the process after `cpu_s` seconds of processor time; 0 switches the alarm off."""
    if sys.platform != "win32":  # there the waiting process ends this one, later
        signal.setitimer(signal.ITIMER_PROF, cpu_s)


def _compiled(source: str) -> Callable[[Mapping[str, Any]], str]:
    sandbox = Sandbox()
    template = sandbox.from_string(source)
    return lambda variables: sandbox.render(template, variables)


def _answer(run: Callable[[Mapping[str, Any]], str], request: bytes) -> tuple[str, str]:
    try:
        return "T", run(json.loads(request))
    except TemplateRaised as error:
        return "R", str(error)
    except SecurityError as error:
        return "S", _line(error)
    except Exception as error:  # whatever Python raises inside a template
        return "E", _line(error)


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _limit_memory() -> None:
    if sys.platform == "win32":
        return
    import resource

    with suppress(OSError, ValueError):  # a system without: processor time is limited all the same
        pages = int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[0])
        limit = pages * resource.getpagesize() + _MAX_MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _read(file: BinaryIO) -> bytes | None:
    header = file.read(8)
    return file.read(int.from_bytes(header, "little")) if len(header) == 8 else None


if __name__ == "__main__":
    _main()
