"""Traces of requests that run on replicas."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kukri.opening.model_options import ModelOptions
from kukri.server.asgi_client import post
from tests.collector import collecting
from tests.scale.clusters import cluster, until
from tests.tiny_gguf import tiny_config, write_tiny


@pytest.mark.full
def test_a_trace_continues_in_the_replicas(tmp_path: Path) -> None:
    """Catches a trace that ends at the front, and a replica that died which nobody sees."""
    pytest.importorskip("opentelemetry.sdk")
    path = write_tiny(tmp_path / "tiny.gguf", tiny_config(max_context=1024))
    options = ModelOptions(model=str(path), n_threads=1, max_requests=8)
    body = {"model": "tiny", "prompt": "once", "seed": 3, "max_tokens": 900, "ignore_eos": True}

    async def check(url: str) -> None:
        async with cluster(options, 1, traces=url) as made:
            work = asyncio.create_task(post(made.app, "/v1/completions", body))
            await until(lambda: made.loop.n_generated > 20)
            await made.kill("replica-1")
            await made.add()
            assert (await work).status == 200

    with collecting() as collector:
        asyncio.run(check(collector.url))
    (root,) = (span for span in collector.spans if not span.parent)
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    queue, first, again, second = collector.beneath(root)
    names = [span.name for span in (queue, first, again, second)]
    assert names == ["queue", "replica", "queue", "replica"]
    assert (first.facts["kukri.replica"], second.facts["kukri.replica"]) == ("replica-1", "replica-2")
    assert (first.has_failed, second.has_failed) == (True, False)
    assert again.start_s >= first.start_s
    assert second.end_s <= root.end_s
    for span in (first, second):
        parts = collector.beneath(span)
        assert [part.name for part in parts] == ["queue", "prefill", "decode"]
        assert all(span.start_s <= part.start_s <= part.end_s for part in parts)
    assert sum(span.facts["gen_ai.usage.output_tokens"] for span in (first, second)) == 900
    assert collector.beneath(second)[-1].facts["gen_ai.usage.output_tokens"] == 900
