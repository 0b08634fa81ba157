"""A fault in each place that is one request's own: it fails, with its traceback in the log, and no other."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from kukri import LLM
from kukri.engine import Request
from kukri.engine.lookup_drafts import LookupDrafts
from kukri.server.chat.prompts import ChatPrompts
from kukri.server.models import served_model
from kukri.server.openai.completions import CompletionWriter
from tests.server.bodies import check_error, events
from tests.server.live_server import CHAT, TEXT, Served, serving
from tests.tiny_gguf import write_tiny

N = 10
BAD = 666  # the seed of the request with the fault


class PanicException(BaseException):
    """As a library in Rust raises it: no Exception."""


def failing(*_: Any, **__: Any) -> Any:
    """What a fault calls."""
    raise ZeroDivisionError("a fault")


def after(n: int, method: Callable[..., Any], fault: BaseException) -> Callable[..., Any]:
    """The method, which raises from its n-th call on."""
    calls = iter(range(10**6))

    def call(*given: Any, **options: Any) -> Any:
        if next(calls) >= n:
            raise fault
        return method(*given, **options)

    return call


def in_sampler(name: str, fault: BaseException) -> Callable[[Request], None]:
    """Makes a method of a request's sampler fail at its fourth token."""

    def break_it(request: Request) -> None:
        request.sampler.is_plain = False
        setattr(request.sampler, name, after(3, getattr(request.sampler, name), fault))

    return break_it


def in_grammar(name: str, fault: BaseException) -> Callable[[Request], None]:
    """Gives the request a grammar that allows all, and fails at its fourth token."""

    class Matcher:
        import numpy as np

        allowed = np.full(10, -1, np.int32)

        def update(self) -> str:
            return ""

        def take(self, _: int) -> None: ...

    def break_it(request: Request) -> None:
        request.sampler.is_plain, request.sampler._matcher = False, Matcher()
        setattr(request.sampler._matcher, name, after(3, getattr(request.sampler._matcher, name), fault))

    return break_it


class Taps:
    """Taps of a request that fail."""

    names, captures, has_unread = frozenset({"blocks.0.hook_resid_post"}), (), False

    def __call__(self, *_: Any) -> None:
        raise ZeroDivisionError("a fault in a hook")


def in_taps(request: Request) -> None:
    """Lets the request listen."""
    request.taps = Taps()


def in_drafts(request: Request) -> None:
    """Makes the source of its drafts fail."""
    request.drafts.follow = failing  # type: ignore[method-assign]


IN_ENGINE = {
    "sampler.prepare": in_sampler("prepare", OverflowError("too large to convert to C long")),
    "sampler.process": in_sampler("process", MemoryError()),
    "sampler.finish": in_sampler("finish", TypeError("a fault")),
    "grammar.update": in_grammar("update", PanicException("the automaton panicked")),
    "grammar.take": in_grammar("take", PanicException("the automaton panicked")),
    "hook": in_taps,
}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, Served]]:
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")
    with LLM(path, max_requests=N + 2) as llm, serving(llm) as server:
        yield llm, server


def ask(server: Served, seed: int, stream: bool) -> Any:
    """An answer of 40 tokens at random, and whether it is one."""
    body = {"prompt": [seed % 100 + 1, 5, 7], "seed": seed, "temperature": 1, "max_tokens": 40}
    with server.http() as http:
        response = http.post(TEXT, json={**body, "ignore_eos": True, "stream": stream})
    if not stream or response.status_code != 200:
        return response, response.json().get("choices")
    parts = list(events(response))
    return response, "error" not in parts[-1] and "".join(part["choices"][0]["text"] for part in parts)


def neighbours(server: Served, bad: bool | None) -> tuple[list[Any], Any]:
    """The answers of ten requests, and besides them the response to a bad one, a stream or not."""
    with ThreadPoolExecutor(N + 1) as pool:
        good = [pool.submit(ask, server, i, i % 2 == 0) for i in range(N)]
        bad_one = pool.submit(ask, server, BAD, bad) if bad is not None else None
        return [one.result()[1] for one in good], bad_one and bad_one.result()


@pytest.fixture(scope="module")
def expected(site: tuple[LLM, Served]) -> list[Any]:
    """The answers without a fault."""
    answers, _ = neighbours(site[1], None)
    assert all(answers)
    assert len({json.dumps(one) for one in answers}) == N
    return answers


def check_failed(response: Any, stream: bool) -> None:
    """The bad one's: a 500, or an event with an error."""
    if not stream or response.status_code != 200:
        check_error(response, 500)
    else:
        assert list(events(response))[-1]["error"]["type"] == "server_error"


def check_logged(caplog: pytest.LogCaptureFixture) -> None:
    """One line with a traceback, the bad one's."""
    found = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert len(found) == 1, [record.getMessage() for record in found]
    assert found[0].exc_info
    assert found[0].request_id  # type: ignore[attr-defined]


def plant(llm: LLM, monkeypatch: pytest.MonkeyPatch, fault: Callable[[Request], None]) -> None:
    """Breaks the requests with the bad seed as they are made."""
    make = llm.engine.maker.make_requests

    def make_bad(prompt: Any, params: Any, **options: Any) -> list[Request]:
        made = make(prompt, params, **options)
        for request in made if params.seed == BAD else ():
            fault(request)
        return made

    monkeypatch.setattr(llm.engine.maker, "make_requests", make_bad)


@pytest.mark.full(only=["grammar.take-False"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", IN_ENGINE)
def test_a_fault_in_the_engine_ends_its_request_alone(site, expected, place, stream, monkeypatch, caplog):
    """Catches a request that ends all that share its step, one that hangs, and a fault without a trace."""
    llm, server = site
    plant(llm, monkeypatch, IN_ENGINE[place])
    answers, (response, _) = neighbours(server, stream)
    assert answers == expected
    check_failed(response, stream)
    check_logged(caplog)
    server.wait_until(lambda: server.pages_used() == 0)
    llm.engine.check_integrity()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("place", ["text", "advance", "end"])
def test_a_fault_in_the_writing_ends_its_request_alone(site, expected, place, stream, monkeypatch, caplog):
    """Catches a request whose text or form fails and that takes the deliveries of others with it."""
    _, server = site
    if place == "text":
        made = served_model.Answer

        def answer(request: Request, *given: Any, **options: Any) -> Any:
            one = made(request, *given, **options)
            return BrokenAnswer(one) if request.params.seed == BAD else one

        class BrokenAnswer:
            def __init__(self, one: Any) -> None:
                self.__dict__["one"] = one

            def __getattr__(self, name: str) -> Any:
                return failing if name == "push" else getattr(self.one, name)

            def __setattr__(self, name: str, value: Any) -> None:
                setattr(self.one, name, value)

        monkeypatch.setattr(served_model, "Answer", answer)
    else:
        for name in ("advance",) if place == "advance" else ("end", "body"):
            right = getattr(CompletionWriter, name)

            def write(self: CompletionWriter, right: Callable[..., Any] = right) -> Any:
                return failing() if self._body.seed == BAD else right(self)

            monkeypatch.setattr(CompletionWriter, name, write)
    answers, (response, _) = neighbours(server, stream)
    assert answers == expected
    check_failed(response, stream)
    check_logged(caplog)
    server.wait_until(lambda: server.pages_used() == 0)


def test_a_fault_in_drafts_changes_no_answer(site, expected, monkeypatch, caplog):
    """Catches an answer that is lost because guessing it failed."""
    llm, server = site
    _, (_, right) = neighbours(server, False)
    plant(llm, monkeypatch, in_drafts)
    answers, (_, found) = neighbours(server, False)
    assert (answers, found) == (expected, right)
    assert [record.getMessage() for record in caplog.records if record.exc_info]
    assert LookupDrafts.follow is not failing


@pytest.mark.full
def test_a_fault_in_a_template_is_a_500_of_its_request(site, expected, monkeypatch, caplog):
    """Catches a template's fault that nobody can find in the log."""
    _, server = site

    async def broken(*_: Any, **__: Any) -> Any:
        raise PanicException("a tokenizer panicked")

    monkeypatch.setattr(ChatPrompts, "of", broken)
    with ThreadPoolExecutor(1) as pool, server.http() as http:
        bad = pool.submit(http.post, CHAT, json={"messages": [{"role": "user", "content": "a"}]})
        answers, _ = neighbours(server, None)
        check_error(bad.result(), 500)
    assert answers == expected
    check_logged(caplog)
