"""`kukri batch`: answers a file of requests, many at a time, into a file of results."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from hashlib import sha256
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kukri.calls.batch_files import BatchLine, Results, files_of, read_batch
from kukri.errors import ConfigError
from kukri.terminal.files import check_parent
from kukri.terminal.output import say
from kukri.terminal.progress import progress_bar
from kukri.terminal.serve import require_web_stack
from kukri.terminal.tables import print_facts

if TYPE_CHECKING:
    from fastapi import FastAPI

    from kukri.server.settings import ServerSettings
    from kukri.terminal.options import ClusterOptions

_QUEUE = 1 << 20  # requests: those of all lines at a time, with many answers each


class Counts:
    """Requests that this run has answered, and their tokens."""

    def __init__(self) -> None:
        self.n_requests = self.n_prompt_tokens = self.n_generated = 0
        self.started_s = perf_counter()

    def add(self, body: Mapping[str, Any]) -> None:
        """Notes a response's body, empty if the request could not be made."""
        usage = body.get("usage") or {}
        self.n_requests += bool(body)
        self.n_prompt_tokens += usage.get("prompt_tokens", usage.get("input_tokens", 0))
        self.n_generated += usage.get("completion_tokens", usage.get("output_tokens", 0))


def run_batch(
    source: Path,
    target: Path,
    *,
    model: str | None,
    aliases: Sequence[str],
    loading: dict[str, Any],
    cluster: ClusterOptions | None = None,
    as_json: bool,
) -> None:
    """Answers the requests of a file that have no result yet; `loading` are options of LLM.

    With `cluster` replicas on Ray answer them. One that dies is replaced, and its requests run again.

    Checks the files before loading the model.
    """
    require_web_stack("kukri batch")
    if source.resolve() in {path.resolve() for path in files_of(target)}:
        raise ConfigError("the output, its .part and its .new must not be the input: name another file")
    check_parent(target)
    from kukri.server.settings import default_name

    name = default_name(model)
    lines = read_batch(source, name)
    results, counts = Results(target, lines, name), Counts()
    n_before = len(results)
    try:
        names = tuple(dict.fromkeys([*aliases, name]))
        opened = partial(_on_replicas, cluster, target) if cluster is not None else _on_an_engine
        _answer_all(lines, results, counts, partial(opened, model, names, loading))
    except KeyboardInterrupt:
        say(f"\n{len(results)} of {len(lines)} are done: the same command resumes from there")
        raise
    finally:
        results.close()
    results.finish()
    _report(target, len(lines), n_before, results.n_failed, counts, as_json=as_json)


def _answer_all(
    lines: Sequence[BatchLine],
    results: Results,
    counts: Counts,
    opened: Callable[[], AbstractContextManager[tuple[FastAPI, int]]],
) -> None:
    """Answers the lines without a result by `opened()`: an application, and how many it takes at a time."""
    for line in lines:  # their errors need no model
        if line.error is not None and line.id not in results:
            results.add(line.result(None))
    left = [line for line in lines if line.id not in results]
    if not left:
        return
    from kukri.server.asgi_client import AppResponse, answer_lines, post

    with opened() as (app, n_at_once), progress_bar(len(lines)) as advance:

        def ask(line: BatchLine) -> Awaitable[AppResponse]:
            return post(app, line.url, line.read_body())

        async def note(body: Any) -> None:
            counts.add(body)
            advance(1, f"{len(results)} of {len(lines)}")

        async def answer() -> None:
            async with app.router.lifespan_context(app):
                await answer_lines(left, results, n_at_once, ask, note)

        advance(len(results), "loading")
        counts.started_s = perf_counter()
        asyncio.run(answer())


@contextmanager
def _on_an_engine(
    model: str | None, names: tuple[str, ...], loading: dict[str, Any]
) -> Iterator[tuple[FastAPI, int]]:
    """Yield the application of a model, and how many requests to send at once: some wait in its queue."""
    from kukri.llm import LLM
    from kukri.server.app import create_app

    with LLM(model, **loading) as llm:
        yield create_app(llm, _settings(names)), 2 * llm.engine_config.max_requests


@contextmanager
def _on_replicas(
    cluster: ClusterOptions, target: Path, model: str | None, names: tuple[str, ...], loading: dict[str, Any]
) -> Iterator[tuple[FastAPI, int]]:
    """The application of replicas on Ray, and the requests for them at a time."""
    from kukri.opening.model_options import ModelOptions
    from kukri.terminal.cluster import replicas_on_ray, require_ray

    require_ray("kukri batch --ray")
    options = ModelOptions(model=model, **loading)
    name = f"kukri-batch-{sha256(bytes(target.resolve())).hexdigest()[:12]}"
    with replicas_on_ray(options, cluster, drain_s=1.0, application=name) as there:
        from kukri.scale.serve import server

        app = server(there.handle, there.facts, there.options, _settings(names), there.host)
        most = max(cluster.n_replicas, cluster.max_replicas or 1)
        yield app, 2 * there.facts.max_requests * most


def _settings(names: tuple[str, ...]) -> ServerSettings:
    from kukri.server.settings import ServerSettings

    return ServerSettings(names, max_body_bytes=1 << 40, max_waiting=_QUEUE, has_page=False)


def _report(
    target: Path, n_lines: int, n_before: int, n_failed: int, counts: Counts, *, as_json: bool
) -> None:
    seconds = perf_counter() - counts.started_s
    rate = counts.n_generated / seconds
    if as_json:
        facts = {
            "path": str(target),
            "n_lines": n_lines,
            "n_failed": n_failed,
            "n_done_before": n_before,
            "n_requests": counts.n_requests,
            "n_prompt_tokens": counts.n_prompt_tokens,
            "n_generated": counts.n_generated,
            "seconds": round(seconds, 3),
            "tokens_per_s": round(rate, 1),
        }
        print(json.dumps(facts))
        return
    before = f", {n_before} of them before" if n_before else ""
    speed = f"{counts.n_prompt_tokens:,} read, {counts.n_generated:,} generated in {seconds:.1f} s"
    print_facts(
        [
            ("wrote", str(target)),
            ("requests", f"{n_lines:,}{before}; {n_failed:,} with an error"),
            ("tokens", f"{speed}, {rate:,.1f} a second" if counts.n_requests else "none"),
        ]
    )
