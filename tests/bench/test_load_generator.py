"""`kukri bench serve` against servers whose delays, counts and failures are known."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri.bench.endpoint import Answer
from kukri.bench.latency import LoadPoint, is_good, load_point, read_objective, spread
from kukri.bench.load import LoadOptions, measure_load
from kukri.bench.prompts import WORDS, file_prompts, random_prompts
from kukri.cli import app
from kukri.errors import ConfigError, KukriError
from kukri.host.installed import needs_package
from tests.bench.fake_api import FakeAPI, chunk, fake_api, usage

WAIT_S, GAP_S = 0.3, 0.1
TOLERANCE_S = 0.03  # between what one thread sent and another read, at the median
TIMEOUT_S = 1.5  # where an answer is to come at once or never
OVERHEAD = 9  # tokens that the fake template adds


async def speak(exchange, wait_s=WAIT_S, gap_s=GAP_S, n=5):
    """An answer of `n` tokens: the role at once, then chunks with known pauses, then usage."""
    await exchange.begin()
    await exchange.raw(b"%x\r\n%s\r\n" % (len(chunk("")), chunk("")))
    n = min(n, exchange.body["max_tokens"])
    for i in range(n):
        await asyncio.sleep(gap_s if i else wait_s)
        await exchange.send(chunk(f" {i}"))
    await exchange.end(chunk(reason="stop"), usage(exchange.n_words + OVERHEAD, n), b"data: [DONE]\n\n")


async def be_quick(exchange):
    await speak(exchange, wait_s=0.0, gap_s=0.0)


def measure(url: str, loads=(1,), progress=lambda amount, text: None, **options) -> tuple[LoadPoint, ...]:
    given = {"n_requests": 4, "n_prompt": 20, "max_tokens": 8, "timeout_s": 10.0, "n_warm_up": 0, "seed": 3}
    return measure_load(LoadOptions(url=url, loads=loads, **(given | options)), progress).points


def call(*arguments: str):
    return CliRunner().invoke(app, ["bench", "serve", *arguments])


def seen(api: FakeAPI, point: LoadPoint) -> list:
    """The exchanges of a load, without those that came before it."""
    return api.exchanges[-point.n_requests :]


# --- figures


def test_times_are_those_of_the_server():
    """Catches a first token that is the role, gaps of the wrong chunks, and a TPOT over all tokens."""
    with fake_api(speak) as (url, api):
        (point,) = measure(url, loads=(2,), n_requests=6)
        sent = [exchange.sent_s[:5] for exchange in seen(api, point)]
        came = [exchange.came_s for exchange in seen(api, point)]
    first = [times[0] - start for times, start in zip(sent, came)]
    gaps = [b - a for times in sent for a, b in pairwise(times)]
    whole = [times[-1] - start for times, start in zip(sent, came)]
    per_token = [(times[-1] - times[0]) / 4 for times in sent]
    for found, expected_s in (
        (point.ttft_ms, first),
        (point.itl_ms, gaps),
        (point.e2e_ms, whole),
        (point.tpot_ms, per_token),
    ):
        assert found.median / 1e3 == pytest.approx(statistics.median(expected_s), abs=TOLERANCE_S)
    assert point.ttft_ms.median >= 1e3 * WAIT_S
    assert point.itl_ms.median >= 1e3 * (GAP_S - 0.002)
    assert point.n_answered == 6
    assert point.n_generated_tokens == 30
    assert point.requests_per_s == pytest.approx(6 / point.seconds)
    assert point.generated_tokens_per_s == pytest.approx(30 / point.seconds)
    assert point.prompt_tokens_per_s == pytest.approx(6 * 20 / point.seconds)
    assert 0 < point.client_cpu < 1


def test_an_event_may_come_in_pieces_or_with_others():
    """Catches a parser that takes what one read brings for one event."""

    async def behave(exchange):
        await exchange.begin()
        event = chunk("a")
        await exchange.send(b": a comment\r\n\r\nevent: x\r\nid: 1\r\n" + event[:17])
        await asyncio.sleep(0.02)
        await exchange.send(event[17:-2])
        await asyncio.sleep(0.02)
        await exchange.send(b"\r\n\r\n" + chunk("b") + chunk("c", reason="stop").replace(b"data: ", b"data:"))
        await exchange.end(usage(20, 3))

    with fake_api(behave) as (url, _):
        (point,) = measure(url, n_requests=1)
    assert point.errors == {}
    assert point.n_generated_tokens == 3
    assert point.ttft_ms.mean > 35
    assert point.itl_ms.mean < 5, "b and c came in the read that ended a"


def test_texts_of_every_kind_are_text():
    """Catches thoughts, calls or completions that are taken for silence."""
    answer = Answer()
    deltas = ({"role": "assistant", "content": ""}, {"reasoning_content": "Hm"}, {"tool_calls": [{}]})
    for now_s, delta in enumerate(deltas, 1):
        answer.take(json.dumps({"choices": [{"delta": delta}]}).encode(), float(now_s))
    answer.take(b'{"choices": [{"text": "x"}]}', 4.0)
    assert (answer.ttft_s, answer.gaps_s) == (2.0, [1.0, 1.0])
    answer.take(b'{"choices": [{"text": "", "finish_reason": "stop"}]}', 9.0)
    assert answer.e2e_s == 9.0
    assert answer.n_tokens == 3, "without usage, chunks are counted"
    answer.take(b'{"usage": {"completion_tokens": 8, "prompt_tokens": -1}, "choices": null}', 10.0)
    assert (answer.n_tokens, answer.n_prompt, answer.e2e_s) == (8, None, 9.0)
    assert answer.tpot_s == 1.0
    answer.take(b'{"usage": {"completion_tokens": 1%s}, "choices": null}' % (400 * b"0"), 10.0)
    assert answer.tpot_s == 3.5, "a number that no float holds is not a count"


def test_percentiles_are_numpys():
    """Catches nearest ranks, and a standard of ours."""
    random = np.random.default_rng(0)
    for n in (1, 2, 99, 100, 101):
        values = random.lognormal(size=n)
        found = spread(values.tolist())
        assert found.mean == pytest.approx(1e3 * statistics.fmean(values))
        assert found.median == pytest.approx(1e3 * statistics.median(values))
        assert found.p99 == pytest.approx(1e3 * np.quantile(values, 0.99))
    assert spread([0.0, 1.0]).p99 == pytest.approx(990)
    assert spread([]) is None


def test_goodput_counts_answers_within_every_limit():
    """Catches limits that are joined by or, seconds for milliseconds, and failures that count as good."""
    answers = [
        Answer(ttft_s=0.4, e2e_s=1.0, n_generated=13),
        Answer(ttft_s=0.6, e2e_s=1.0, n_generated=13),
        Answer(ttft_s=0.4, e2e_s=2.0, n_generated=13),
        Answer(ttft_s=0.4, e2e_s=0.4, n_generated=1),
        Answer(error="timeout"),
    ]
    objective = read_objective("ttft:500, tpot:50.5")
    assert [is_good(answer, objective) for answer in answers[:4]] == [True, False, False, True]
    options = {"max_in_flight": 1, "late_s": [], "client_cpu_s": 0.0}
    point = load_point(1.0, 2.0, answers, objective, **options)
    assert point.goodput_per_s == 1.0
    assert (point.n_requests, point.n_answered, point.errors) == (5, 4, {"timeout": 1})
    assert load_point(1.0, 2.0, answers, {}, **options).goodput_per_s is None
    assert load_point(1.0, 2.0, answers[4:], {}, **options).ttft_ms is None
    for wrong in ("ttft", "ttft:", "ttft:0", "ttft:nan", "speed:3", "ttft:1;tpot:2"):
        with pytest.raises(ConfigError, match="--slo"):
            read_objective(wrong)


# --- loads


def test_an_open_loop_waits_for_nobody():
    """Catches arrivals that wait for answers, or that are no Poisson process of the seed."""
    for may_retry in (True, True, False):  # a pause of a busy machine is no fault of the load's
        try:
            check_open_loop(n=30, rate=30.0)
            return
        except AssertionError:
            if not may_retry:
                raise


def check_open_loop(n, rate):
    with fake_api(lambda exchange: speak(exchange, wait_s=0.6, n=1)) as (url, api):
        (point,) = measure(url, loads=(rate,), loop="open", n_requests=n, seed=11)
        came = [exchange.came_s for exchange in seen(api, point)]
    due = np.cumsum(np.random.default_rng(11).exponential(1 / rate, n))
    late = np.array(came) - due
    assert float(np.median(np.abs(late - np.median(late)))) < 0.03  # regular arrivals have 0.057
    # The server sees a request some time after the client counts it.
    assert 10 < api.n_most <= point.max_in_flight < api.n_most + 8
    assert point.n_answered == n
    assert 0 <= point.late_p99_ms < 300
    assert point.seconds > due[-1] + 0.6


def test_a_closed_loop_keeps_its_number():
    """Catches one client too few or too many, and requests beyond the number asked for."""
    with fake_api(lambda exchange: speak(exchange, wait_s=0.1, gap_s=0.0)) as (url, api):
        points = measure(url, loads=(1, 3), n_requests=9)
        assert [point.max_in_flight for point in points] == [1, 3]
        assert api.n_most == 3
        assert [point.n_requests for point in points] == [9, 9]
        assert points[1].requests_per_s > 1.5 * points[0].requests_per_s
        prompts = {exchange.body["messages"][0]["content"] for exchange in api.exchanges}
        assert len(prompts) == len(api.exchanges), "a prompt that comes twice is read from a prefix cache"


def test_a_duration_ends_a_load():
    """Catches a load without an end, and answers under way that are not waited for."""
    ticks = []
    with fake_api(lambda exchange: speak(exchange, wait_s=0.1, gap_s=0.0)) as (url, _):
        (closed,) = measure(url, loads=(2,), n_requests=None, duration_s=0.45)
        (opened,) = measure(
            url, loads=(40,), loop="open", n_requests=None, duration_s=1.2,
            progress=lambda amount, text: ticks.append(amount),
        )  # fmt: skip
    assert 2 <= closed.n_answered == closed.n_requests <= 10
    assert closed.seconds > 0.45
    assert 25 < opened.n_answered == opened.n_requests < 75
    assert 1 <= sum(ticks) <= 2, "seconds are told of"


def test_prompts_have_the_length_asked_for():
    """Catches lengths that leave the template out, or trust in one token a word."""
    with fake_api(be_quick) as (url, _):
        (point,) = measure(url, n_prompt=64)
        assert point.n_prompt_tokens == 4 * 64
        with pytest.raises(ConfigError, match=f"at least {OVERHEAD + 1} tokens here, one word"):
            measure(url, n_prompt=5)

    async def count_double(exchange):
        await exchange.begin()
        await exchange.end(chunk("a"), chunk(reason="stop"), usage(2 * exchange.n_words + 3, 1))

    with fake_api(count_double) as (url, _):
        (point,) = measure(url, n_prompt=101)
        assert point.n_prompt_tokens == 4 * 101

    async def count_nothing(exchange):
        await exchange.begin()
        await exchange.end(chunk("a"), chunk("b"), chunk(reason="stop"))

    with fake_api(count_nothing) as (url, api):
        (point,) = measure(url, n_prompt=33)
        assert seen(api, point)[0].n_words == 33
        assert (point.n_prompt_tokens, point.n_generated_tokens, point.has_usage) == (0, 8, False)
    assert len(set(WORDS)) == len(WORDS) > 100
    assert next(random_prompts(7, 1)) == next(random_prompts(7, 1)) != next(random_prompts(7, 2))


def test_a_request_says_what_was_asked(tmp_path):
    """Catches options that do not reach the server, and a key that does not or that is shown."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "One"}\n\n"Two"\n{"messages": [{"role": "user", "content": "3"}], "max_tokens": 2}'
    )
    extra = '{"temperature": null, "top_k": 5}'
    with fake_api(be_quick) as (url, api):
        done = call(
            "--url", f"{url}/", "--api-key", "secret", "--prompts", str(file), "--concurrency", "1",
            "-n", "3", "--ignore-eos", "--extra-body", extra, "--max-tokens", "7", "--warm-up", "0", "--json",
        )  # fmt: skip
        assert done.exit_code == 0, done.output
        bodies = [exchange.body for exchange in api.exchanges]
        assert {exchange.path for exchange in api.exchanges} == {"/v1/chat/completions"}
        assert {exchange.headers["authorization"] for exchange in api.exchanges} == {"Bearer secret"}
        assert [body.pop("messages")[0]["content"] for body in bodies] == ["One", "Two", "3"]
        assert [body.pop("max_tokens") for body in bodies] == [7, 7, 2]
        rest = {"model": "first", "stream": True, "stream_options": {"include_usage": True}, "top_k": 5}
        assert bodies == [{**rest, "ignore_eos": True}] * 3
        assert "secret" not in done.output
        options = {"kind": "completions", "model": "second", "n_requests": 1}
        measure(url, **options)
        assert api.exchanges[-1].path == "/v1/completions"
        assert api.exchanges[-1].body["model"] == "second"
        assert isinstance(api.exchanges[-1].body["prompt"], str)


@pytest.mark.parametrize(
    ("text", "kind", "reason"),
    [
        ("", "chat", "must have prompts, one per line, like"),
        ('"a"\n{', "chat", "line 2 must be JSON"),
        ("[" * 100_000, "chat", "line 1 must be JSON"),
        ("7", "chat", "line 1 must be a text"),
        ('{"prompt": "a", "messages": []}', "chat", "line 1 must be a text"),
        ('{"prompt": ["a"]}', "chat", "the prompt must be a text"),
        ('{"prompt": "a", "n": 2}', "chat", "'n' must be prompt, messages"),
        ('{"messages": []}', "completions", ": messages require --endpoint chat"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, kind, reason):
    """Catches a traceback, or a load that begins with half the prompts."""
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ConfigError, match=reason):
        file_prompts(file, kind)


# --- what goes wrong


async def hang(exchange):
    await asyncio.sleep(30)


async def be_malformed(exchange):
    await exchange.begin()
    await exchange.end(chunk("a"), b"data: {oops\n\n")


async def be_no_object(exchange):
    await exchange.begin()
    await exchange.end(b"data: [1]\n\n")


async def fail_inside(exchange):
    await exchange.begin()
    await exchange.end(chunk("a"), b'data: {"error": {"message": "out of pages"}}\n\n')


async def be_cut_off(exchange):
    await exchange.begin()
    await exchange.end(chunk("a"))


async def hang_up(exchange):
    await exchange.begin()
    await exchange.send(chunk("a"))
    exchange.hang_up()


async def be_whole(exchange):
    await exchange.reply(200, {"choices": [{"message": {"content": "a"}}]})


async def be_empty(exchange):
    await exchange.begin()
    await exchange.end(b"data: [DONE]\n\n")


async def never_end_a_line(exchange):
    await exchange.begin()
    while True:
        await exchange.send(b"x" * 60_000)


async def redirect(exchange):
    await exchange.raw(b"HTTP/1.1 307 X\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")


@pytest.fixture
def one_prompt(tmp_path):
    """A file: with one, no request goes before those that are measured."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('"Hello"')
    return file


def refuse(status: int, message: str):
    return lambda exchange: exchange.reply(status, {"error": {"message": message, "type": "x"}})


FAILURES = {
    "timeout": (hang, "no whole answer within 1.5 s"),
    "malformed event": (be_malformed, "{oops"),
    "malformed event (list)": (be_no_object, "[1]"),
    "malformed event (line)": (never_end_a_line, "1,048,576 bytes"),
    "error event": (fail_inside, "out of pages"),
    "cut off": (be_cut_off, "finish_reason"),
    "disconnected": (hang_up, ""),
    "no stream": (be_whole, "application/json"),
    "empty answer": (be_empty, "without text"),
    "HTTP 307": (redirect, ""),
    "HTTP 401": (refuse(401, "no such key"), "no such key"),
    "HTTP 429": (refuse(429, "too many"), "too many"),
    "HTTP 500": (refuse(500, "x\x1b[31m\ny"), ""),
}


@pytest.mark.parametrize("kind", FAILURES)
def test_a_failure_is_counted_by_its_kind(kind, one_prompt):
    """Catches failures that are lost, that end the load, or that count as answers."""
    behaviour, said = FAILURES[kind]
    turn = 0

    async def behave(exchange):
        nonlocal turn
        turn += 1
        await (behaviour(exchange) if turn % 2 == 0 else be_quick(exchange))

    with fake_api(behave) as (url, _):
        (point,) = measure(url, n_requests=4, timeout_s=TIMEOUT_S, prompts=one_prompt)
    name = kind.partition(" (")[0]
    assert point.errors == {name: 2}, point.error_details
    assert (point.n_requests, point.n_answered) == (4, 2)
    assert said in point.error_details[name]
    assert point.e2e_ms is not None


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("HTTP 401", ("no such key", "--api-key")),
        ("HTTP 429", ("too many", "ask for less")),
        ("timeout", ("1.5 s", "--timeout")),
        ("malformed event", ("oops",)),
        ("HTTP 500", ("x\\x1b[31m y",)),
    ],
)
def test_a_server_that_answers_nobody_is_one_line(kind, words):
    """Catches a traceback, or tables of nothing."""
    with fake_api(FAILURES[kind][0]) as (url, _):
        done = call("--url", url, "--timeout", str(TIMEOUT_S))
    assert done.exit_code == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"error: {url}: {kind}: ")
    assert done.stderr.count("\n") == 1
    for word in words:
        assert word in done.stderr


def test_nobody_there_is_one_line():
    """Catches a traceback as the first thing that somebody without a server sees."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{closed.getsockname()[1]}/v1"
        for arguments in ((), ("--model", "m")):
            done = call("--url", url, *arguments)
            assert (done.exit_code, done.stdout) == (2, "")
            assert done.stderr.startswith(f"error: {url}: no connection: ")
            assert "kukri serve" in done.stderr
            assert done.stderr.count("\n") == 1


def test_a_load_of_failures_is_counted_and_an_error(one_prompt):
    """Catches exit status 0 where nothing was measured, and counts that are lost with it."""
    with fake_api(lambda exchange: exchange.reply(503, {"error": "full"})) as (url, _):
        options = ("--prompts", str(one_prompt), "--warm-up", "0", "--json")
        done = call("--url", url, "-n", "3", "--concurrency", "1", *options)
    assert done.exit_code == 2
    assert json.loads(done.stdout)["points"][0]["errors"] == {"HTTP 503": 3}
    assert done.stderr == "error: no request was answered: HTTP 503: full\n"


def test_a_load_without_a_request_is_one_line(one_prompt):
    """Catches a traceback where a low rate sent nothing before the time was over."""
    with fake_api(be_quick) as (url, api):
        options = ("--prompts", str(one_prompt), "--warm-up", "0", "--seed", "0", "--json")
        done = call("--url", url, "--rate", "0.001", "--duration", "0.05", *options)
        assert api.exchanges == []
    assert done.exit_code == 2
    assert json.loads(done.stdout)["points"][0]["n_requests"] == 0
    assert done.stderr.startswith("error: no request was sent in time: ")
    assert done.stderr.count("\n") == 1


def test_bodies_may_come_in_pieces(one_prompt):
    """Catches a list of models, or a refusal, of which only the first packet is read."""

    async def in_pieces(exchange, status, body):
        data = json.dumps(body).encode()
        await exchange.raw(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n" % (status, len(data)))
        for start in range(0, len(data), 40):
            await exchange.raw(data[start : start + 40])
            await asyncio.sleep(0.01)

    models = {"data": [{"id": f"model-{i}"} for i in range(20)]}
    refusal = {"error": {"type": "rate_limit", "code": None, "param": None, "message": "too many of you"}}
    with fake_api(lambda exchange: in_pieces(exchange, 429, refusal)) as (url, api):
        api.list_models = lambda exchange: in_pieces(exchange, 200, models)
        (point,) = measure(url, n_requests=1, prompts=one_prompt)
        assert api.exchanges[0].body["model"] == "model-0"
    assert point.error_details == {"HTTP 429": "too many of you"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--rate", "1", "--concurrency", "1"), "cannot be combined"),
        (("--rate", "1,x"), "numbers such as 1,2,4"),
        (("--rate", "0"), "above 0"),
        (("--rate", "nan"), "above 0"),
        (("--concurrency", "1.5"), "whole number"),
        (("--duration", "0"), "'duration_s' must be above 0"),
        (("--timeout", "-1"), "'timeout_s' must be above 0"),
        (("--max-tokens", "0"), "'max_tokens' must be at least 1"),
        (("--extra-body", "[1]"), "--extra-body must be a JSON object"),
        (("--slo", "ttft"), "--slo must be limits in ms of"),
        (("--url", "localhost:8000"), "the URL must be like"),
        (("--url", "http://a:99999/v1"), "the URL must be like"),
        (("--api-key", "a\nb"), "API key"),
        (("--prompts", "nowhere.jsonl"), "cannot be read"),
        (("--plot", "figure.pdf"), "a plot must be a PNG"),
    ],
)
def test_options_that_make_no_sense_are_one_line(arguments, words):
    """Catches a server that is asked before an option is found to be wrong."""
    done = call(*arguments)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1


def test_without_aiohttp_it_says_how_to_get_it(tmp_path):
    """Catches a ModuleNotFoundError where the extra is not installed."""
    (tmp_path / "aiohttp.py").write_text("raise ModuleNotFoundError('no', name='aiohttp')")
    path = f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    command = [sys.executable, "-m", "kukri", "bench", "serve"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 2
    assert done.stderr == f"error: {needs_package('kukri bench serve', 'aiohttp', 'load')}\n"


# --- what is shown


@pytest.mark.full
def test_tables_a_chart_and_json_last(tmp_path):
    """Catches figures that are in the JSON alone, failures that nobody is told of, and an empty picture."""
    from matplotlib.image import imread

    n = 0

    async def behave(exchange):
        nonlocal n
        n += 1
        await (
            refuse(429, "too\x1b[2J many")(exchange) if n == 4 else speak(exchange, wait_s=0.01, gap_s=0.001)
        )

    plot = tmp_path / "load.png"
    options = ("-n", "5", "-p", "20", "--slo", "ttft:5000", "--seed", "1", "--plot", str(plot))
    with fake_api(behave) as (url, _):
        done = call("--url", url, "--concurrency", "1,2", "--warm-up", "1", *options)
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    report = json.loads(lines[-1])
    assert [point["n_answered"] for point in report["points"]] == [4, 5]
    assert report["points"][0]["errors"] == {"HTTP 429": 1}
    assert report["points"][1]["goodput_per_s"] == report["points"][1]["requests_per_s"]
    assert (report["loop"], report["model"], report["seed"]) == ("closed", "first", 1)
    assert report["objective_ms"] == {"ttft": 5000.0}
    assert report["prompts"] == "11 random words, 20 tokens"
    assert "1: 1 x HTTP 429: too\\x1b[2J many" in lines
    p = report["points"][1]["ttft_ms"]
    assert f"{p['mean']:,.1f} / {p['median']:,.1f} / {p['p99']:,.1f}" in done.stdout
    for name in ("TTFT", "TPOT", "ITL", "E2E", "goodput/s", "tokens/s in"):
        assert name in done.stdout
    picture = imread(plot)
    assert picture.shape[0] > 800
    assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 20


def test_errors_are_of_our_family():
    """Catches a KukriError that the library lets through as something else."""
    with pytest.raises(KukriError, match="no connection"):
        measure("http://127.0.0.1:9/v1")
