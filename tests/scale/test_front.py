"""A server in front of replicas that come, go and die."""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from benchmarks.simulation import Engine, Load, StepCosts, simulate
from kukri import LLM
from kukri.errors import RequestError
from kukri.opening.model_options import ModelOptions
from kukri.scale.front_model import RemoteRequestMaker
from kukri.server.app import create_app
from kukri.server.asgi_client import post
from kukri.server.settings import ServerSettings
from kukri.stages.greeting import HELLO_BYTES
from kukri.vision.image import ImageInput
from tests.scale.clusters import LocalCluster, cluster, until
from tests.tiny_gguf import tiny_config, write_tiny

PATH = "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
          "required": ["a", "b"], "additionalProperties": False}  # fmt: skip
LONG = {"max_tokens": 600, "ignore_eos": True}
BODIES: list[dict[str, Any]] = [
    {"prompt": "greedy", "temperature": 0, **LONG},
    {"prompt": "seeded", "seed": 1, **LONG},
    {"prompt": "filters", "seed": 2, "top_p": 0.9, "top_k": 50, **LONG},
    {"prompt": "xtc", "seed": 3, "xtc_probability": 0.5, "xtc_threshold": 0.02, **LONG},
    {"prompt": "mirostat", "seed": 4, "mirostat": 2, "mirostat_tau": 4.0, **LONG},
    {"prompt": "penalties", "seed": 5, "repetition_penalty": 1.2, "frequency_penalty": 0.1, **LONG},
    {"prompt": "log-probabilities", "seed": 6, "logprobs": 2, **LONG},
    {"prompt": "two answers", "seed": 7, "n": 2, **LONG},
    {"prompt": "stop", "seed": 8, "stop": ["ab", "b!"], **LONG},
    {"prompt": "regex", "seed": 9, "structured_outputs": {"regex": "[a-z]{500,600}!"}, "max_tokens": 700},
    {"prompt": ["several", "prompts"], "seed": 10, **LONG},
    {"prompt": "long prompt " * 20, "seed": 11, "prompt_logprobs": 1, "max_tokens": 300, "ignore_eos": True},
]  # fmt: skip


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> ModelOptions:
    path = write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_config(max_context=1024))
    return ModelOptions(model=str(path), n_threads=1, max_requests=8)


def plain(body: Any) -> Any:
    """A response without what differs from one to the next."""
    usage = {name: body["usage"][name] for name in ("prompt_tokens", "completion_tokens")}
    return {"choices": body["choices"], "usage": usage} if "choices" in body else body


@pytest.fixture(scope="module")
def expected(options: ModelOptions) -> list[Any]:
    return answers_alone(options)


def answers_alone(options: ModelOptions) -> list[Any]:
    """The answers of a server on its own."""

    async def answers() -> list[Any]:
        with LLM(**vars(options)) as llm:
            app = create_app(llm, ServerSettings(("tiny",), has_page=False))
            async with app.router.lifespan_context(app):
                return [await post(app, PATH, {"model": "tiny", **body}) for body in BODIES]

    found = asyncio.run(answers())
    assert [one.status for one in found] == [200] * len(BODIES), [one.body for one in found]
    return [plain(one.body) for one in found]


async def ask(made: LocalCluster, bodies: list[dict[str, Any]]) -> list[Any]:
    return await asyncio.gather(*(post(made.app, PATH, {"model": "tiny", **body}) for body in bodies))


@pytest.mark.representative(2)
def test_replicas_answer_as_one_engine_does(options: ModelOptions, expected: list[Any]) -> None:
    """Catches fields that get lost between front and replica."""

    async def check() -> None:
        async with cluster(options, 2) as made:
            found = await ask(made, BODIES)
            assert [plain(one.body) for one in found] == expected
            n_tokens = sum(body["usage"]["completion_tokens"] for body in expected)
            await until(lambda: made.loop.status().n_generated >= n_tokens)
            assert all(one.n_generated for one in made.loop.statuses().values()), "one did nothing"
            assert made.loop.status().n_running == 0

    asyncio.run(check())


@pytest.mark.full
def test_a_replica_that_dies_costs_its_clients_nothing(options: ModelOptions, expected: list[Any]) -> None:
    """Catches answers that end, begin again or continue with other tokens when their replica dies."""

    async def check() -> None:
        async with cluster(options, 2) as made:
            work = asyncio.create_task(ask(made, BODIES))
            for n_tokens in (100, 1000):
                await until(lambda n=n_tokens: made.loop.n_generated > n)  # type: ignore[misc]
                await until(lambda: not any(live.is_suspect for live in made.loop._live.values()))
                await made.kill(next(iter(made.replicas)))
                await made.add()
            found = await work
            assert made.loop.n_retries > 3, "nothing was running when the replicas died"
            assert [plain(one.body) for one in found] == expected

    asyncio.run(check())


@pytest.mark.full
def test_a_request_that_kills_replicas_is_given_up(options: ModelOptions) -> None:
    """Catches a request that takes one replica after the other down, and innocent ones that fail with it."""
    poison = {"prompt": "poison", "max_tokens": 5, "temperature": 0}

    async def check() -> None:
        async with cluster(options, 2) as made:
            innocent = asyncio.create_task(
                ask(made, [{"prompt": f"{i}", **LONG, "seed": i} for i in range(6)])
            )
            await until(lambda: made.loop.n_generated > 100)
            made.die_of(made.model.tokenizer.encode("poison"))
            (refused,) = await ask(made, [poison])
            assert refused.status == 500
            assert "2 replicas that ran the request died" in refused.body["error"]["message"]
            assert made.n_died == 2
            await made.add()
            assert [one.status for one in await innocent] == [200] * 6

    asyncio.run(check())


@pytest.mark.full
def test_a_stuck_engine_is_left(
    options: ModelOptions, expected: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches requests that wait for a step that never ends, and a replica that gets more of them."""
    monkeypatch.setattr("kukri.engine.loop._STALL_S", 3.0)
    may_continue = threading.Event()

    async def check() -> None:
        async with cluster(options, 2) as made:
            work = asyncio.create_task(ask(made, BODIES))
            await until(lambda: made.loop.n_generated > 100)
            stuck = made.replicas["replica-1"]
            step = stuck._llm.engine.step
            monkeypatch.setattr(stuck._llm.engine, "step", lambda: [may_continue.wait(), step()][1])
            async with asyncio.timeout(60):
                assert [plain(one.body) for one in await work] == expected
            assert list(made.loop.replicas) == ["replica-2"]
            assert not stuck.is_well
            may_continue.set()
            await made.joined(2)

    try:
        asyncio.run(check())
    finally:
        may_continue.set()


def test_a_front_waits_for_replicas_and_then_for_none(options: ModelOptions) -> None:
    """Catches requests that are refused while the only replica is being replaced."""

    async def check() -> None:
        async with cluster(options, 1) as made:
            await made.kill("replica-1")
            await made.joined(0)
            work = asyncio.create_task(ask(made, BODIES[:2]))
            await asyncio.sleep(0.1)
            await made.add()
            assert [one.status for one in await work] == [200, 200]

    asyncio.run(check())


@pytest.mark.full
def test_a_draining_replica_finishes_and_gets_nothing_new(options: ModelOptions) -> None:
    """Catches requests lost, or sent to a replica that is about to go."""

    async def check() -> None:
        async with cluster(options, 2) as made:
            before = asyncio.create_task(ask(made, BODIES[:6]))
            await until(lambda: made.loop.n_generated > 100)
            leaving = made.replicas["replica-1"]
            drained = asyncio.create_task(leaving.drain(30))
            after = asyncio.create_task(ask(made, BODIES[:6]))
            await drained
            assert leaving.n_ongoing == 0
            await made.kill("replica-1")
            assert [one.status for one in [*await before, *await after]] == [200] * 12
            assert made.loop.n_retries == 0

    asyncio.run(check())


def test_another_model_may_not_join(options: ModelOptions, tmp_path: Path) -> None:
    """Catches answers that one model begins and another one ends."""
    other = write_tiny(tmp_path / "other.gguf", replace(tiny_config(max_context=1024), d_ffn=128))

    async def check() -> None:
        async with cluster(options, 1) as made:
            await made.add(model=str(other))
            await asyncio.sleep(1.5)
            assert list(made.loop.replicas) == ["replica-1"]

    asyncio.run(check())


def test_images_are_refused_for_the_true_reason() -> None:
    """Catches "the model sees no images" of one that does: it is replicas that take none."""
    maker = object.__new__(RemoteRequestMaker)
    maker.encoders = {}
    given = ImageInput(np.zeros((1, 3, 8, 8), np.float32), (0, 0), 4, bytes(32))
    with pytest.raises(RequestError, match="images are not supported with replicas"):
        maker.check_inputs([given])


def test_strangers_are_turned_away(options: ModelOptions) -> None:
    """Catches a port that takes orders from anybody, or that garbage brings down."""

    async def check() -> None:
        async with cluster(options, 1) as made:
            host, port = made.address
            for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\x00\x00\x00\x02{}", b"\x00\x00\x00\x03[1]"):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(data)
                writer.write_eof()
                assert len(await reader.read()) == HELLO_BYTES, "nothing after the hello"
                writer.close()
            assert (await ask(made, BODIES[:1]))[0].status == 200

    asyncio.run(check())


@pytest.mark.full
def test_limits_and_fairness_hold_for_all_replicas(options: ModelOptions) -> None:
    """Catches limits that each replica has, and a client who waits behind the many requests of another."""
    ended: list[str] = []

    async def ask_as(http: httpx.AsyncClient, key: str, i: int) -> int:
        body = {
            "model": "tiny",
            "prompt": f"{key} {i}",
            "temperature": 0,
            "max_tokens": 100,
            "speculation": "off",
        }
        header = {"authorization": f"Bearer {key}"}
        response = await http.post(PATH, json={**body, "ignore_eos": True}, headers=header)
        ended.append(key)
        return response.status_code

    async def check() -> None:
        async with cluster(options, 2, api_keys=("ann-key", "bob-key"), rate_limit=40) as made:
            transport = httpx.ASGITransport(app=made.app)
            async with httpx.AsyncClient(transport=transport, base_url="http://test", timeout=60) as http:
                many = [asyncio.create_task(ask_as(http, "ann-key", i)) for i in range(42)]
                await until(lambda: made.loop.n_generated > 100)
                assert await ask_as(http, "bob-key", 0) == 200
                assert ended.count("ann-key") < 36
                assert Counter(await asyncio.gather(*many)) == {200: 40, 429: 2}

    asyncio.run(check())


def test_vectors_come_from_replicas(options: ModelOptions) -> None:
    """Catches rows that lose bits on their way."""

    async def check() -> None:
        with LLM(**vars(options)) as llm:
            wanted = llm.embed(["a cat", "a dog"])
        async with cluster(options, 2) as made:
            body = {"model": "tiny", "input": ["a cat", "a dog"]}
            found = await post(made.app, "/v1/embeddings", body)
            assert found.status == 200, found.body
            vectors = np.array([one["embedding"] for one in found.body["data"]], np.float32)
            assert np.array_equal(vectors, wanted)

    asyncio.run(check())


@pytest.mark.full
def test_metrics_name_the_replicas(options: ModelOptions) -> None:
    """Catches counts of several engines under one name."""

    async def check() -> None:
        async with cluster(options, 2) as made:
            await ask(made, BODIES[:4])
            text = made.app.state.registry.metrics.text().decode()
            for i in (1, 2):
                assert f'kukri_kv_pages{{model="tiny",replica="replica-{i}"}}' in text
            dashboard = Path(__file__).parents[2].joinpath("packaging", "grafana.json").read_text()
            shown = set(re.findall(r"kukri_\w+", dashboard))
            assert len(shown) > 8
            assert {name for name in shown if name not in text} == set(), "the dashboard has unknown names"

    asyncio.run(check())


@pytest.mark.full
def test_prefixes_stay_together(tmp_path: Path) -> None:
    """8 system prompts, 40 requests each: two replicas find nearly what one does, as simulated."""
    path = write_tiny(tmp_path / "tiny.gguf", tiny_config(max_context=1024))
    options = ModelOptions(model=str(path), n_threads=1, max_requests=8)
    draw = random.Random(0)
    texts = ["".join(draw.choices("abcdefgh ", k=512)) for _ in range(8)]
    prompts = [texts[i] + f" question {i} {j}" for j in range(40) for i in range(8)]
    n_prompt = sum(map(len, prompts))

    async def hit_rate(n_replicas: int) -> float:
        n_hit = 0
        async with cluster(options, n_replicas) as made:
            for start in range(0, len(prompts), 8):  # eight at a time, as users would send them
                some = prompts[start : start + 8]
                found = await ask(made, [{"prompt": one, "max_tokens": 4, "temperature": 0} for one in some])
                assert [one.status for one in found] == [200] * 8
                n_hit += sum(one.body["usage"]["prompt_tokens_details"]["cached_tokens"] for one in found)
        return n_hit / n_prompt

    alone, two = asyncio.run(hit_rate(1)), asyncio.run(hit_rate(2))
    assert two >= 0.9 * alone > 0.8
    load = Load(rate=50.0, n_requests=320, n_prefixes=8, prefix_tokens=512, own_tokens=13, answer_tokens=4)
    engine = Engine(StepCosts(5e-5, 1e-5, 5e-6), max_requests=8, n_pages=512)
    assert simulate(engine, load, 2).hit_rate == pytest.approx(two, abs=0.05)
    in_turn = simulate(engine, load, 2, "round-robin").hit_rate
    assert in_turn < simulate(engine, load, 2).hit_rate
