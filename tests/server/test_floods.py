"""Every field of every API out of all bounds: no answer is a server's error, and none takes long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from operator import itemgetter
from typing import Any

import httpx
import pytest

from kukri import LLM
from tests.server.floods import Flood, Floods
from tests.server.live_server import TEXT, Served, serving
from tests.stopwatch import keeps
from tests.tiny_gguf import write_tiny

MOST_S = 1.0


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A tiny model behind every route; bodies may be so large that nothing hides behind 413."""
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf")
    options: dict[str, Any] = {"max_body_bytes": 64 << 20, "max_waiting": 16, "has_interp": True}
    options |= {"batch_dir": tmp_path_factory.mktemp("batches")}
    with LLM(path, max_requests=8) as llm:
        llm.tokenizer.chat_template = "{% for one in messages %}{{ one.content }}{% endfor %}"
        with serving(llm, **options) as server:
            yield server


def send(http: httpx.Client, flood: Flood) -> tuple[int, float]:
    """The status of a flood's answer, and the seconds that the server took for it.

    These are the wall time or the process's CPU time, whichever is less: a busy machine makes the one long,
    and threads that look out for work the other. What other processes do for the server is in the first.
    """
    data = flood.data
    started_s, used_s = time.perf_counter(), time.process_time()
    response = http.post(flood.path, content=data, headers={"content-type": flood.content_type})
    return response.status_code, min(time.perf_counter() - started_s, time.process_time() - used_s)


def check(server: Served, what: str, *, with_repeats: bool) -> int:
    """Sends all floods of a sort, and after them a plain request; returns their number."""
    n, wrong = 0, []
    with server.http() as http:
        plain = {"prompt": [1, 5], "max_tokens": 2, "temperature": 0}
        expected = http.post(TEXT, json=plain).json()["choices"]
        floods = Floods(http.get("/openapi.json").json()).all(with_repeats=with_repeats)
        for flood in (one for one in floods if one.what == what):
            status, seconds = send(http, flood)
            for _ in range(2):  # on a busy machine once may be late, by what others do meanwhile
                if seconds > MOST_S:
                    status, seconds = min(send(http, flood), (status, seconds), key=itemgetter(1))
            n += 1
            if status >= 500 or not keeps(seconds, MOST_S):
                wrong.append(f"{flood.path} {flood.place} {flood.kind}: {status}, {seconds:.2f} s")
        assert not wrong, "\n".join(wrong)
        assert http.post(TEXT, json=plain).json()["choices"] == expected
    return n


@pytest.mark.full(but=["number-500"])
@pytest.mark.representative(8)
@pytest.mark.parametrize(("what", "at_least"), [("number", 500), ("list", 150), ("text", 100)])
def test_no_field_can_be_flooded(site: Served, what: str, at_least: int) -> None:
    """Catches a number that overflows, a list that is read to its end, a text that is searched forever."""
    assert check(site, what, with_repeats=False) > at_least


@pytest.mark.slow
@pytest.mark.parametrize("what", ["number", "list", "text"])
def test_no_field_of_any_path_can_be_flooded(site: Served, what: str) -> None:
    """The same of each path, whether or not another has the same field, with more kinds of wrong items."""
    assert check(site, what, with_repeats=True) > 500
