"""The cost of replicas, and their use: `python -m benchmarks.replicas [MODEL]`, with the extra `ray`.

overhead  `kukri cluster serve` with one replica next to `kukri serve`, alternating. Both run at once with as
          many threads, and the one that is not asked sleeps. Prints the delay of the first token and the
          ratio of throughputs, medians of the rounds, and the processor time of the server in front of
          the replica for each token.
hits      the share of prompt tokens found in a cache, for 8 system prompts with 40 questions each, in
          random order and four at a time: of `kukri serve`, of two of these asked in turn, and of two
          replicas behind their router; with caches that hold all system prompts, and some five of them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx

from benchmarks.harness import run, served_url

_N_TOKENS = 64
_ROUNDS = 9
_N_SYSTEM, _N_QUESTIONS = 8, 40
_AT_ONCE = 4  # questions
_CACHES = {"all": "256MiB", "five": "40MiB"}  # KV pages of a replica: 23 KB a token of the default model


def main() -> None:
    """Runs what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", default="1")
    parser.add_argument("--what", default="overhead,hits")
    arguments = parser.parse_args()
    options = [arguments.model, "--threads", arguments.threads, "--port", "0", "--alias", "m"]
    what = arguments.what.split(",")
    if "overhead" in what:
        with _servers([["serve"], ["cluster", "serve"]], options) as (urls, pids):
            asyncio.run(_compare(urls, pids[1]))
    for held, kv_memory in _CACHES.items() if "hits" in what else ():
        commands = [["serve"], ["serve"], ["cluster", "serve", "--replicas", "2"]]
        limits = ["--kv-memory", kv_memory, "--max-context", "512", "--log-level", "warning"]
        with _servers(commands, [*options, *limits]) as (urls, _):
            asyncio.run(_hits(held, urls))


@contextmanager
def _servers(
    commands: Sequence[Sequence[str]], options: Sequence[str]
) -> Iterator[tuple[list[str], list[int]]]:
    """The URLs and processes of servers that run within the `with` block."""
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "kukri", *command, *options], stderr=subprocess.PIPE, text=True
        )
        for command in commands
    ]
    try:
        yield (
            [served_url(process.stderr) for process in started if process.stderr],
            [process.pid for process in started],
        )
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


async def _compare(urls: list[str], front: int) -> None:
    for url in urls:
        await _ready(url)
        await _streams(url, 2, 0)
    for n in (1, 8):
        delays, ratios, front_s = [], [], 0.0
        for i in range(1, _ROUNDS + 1):
            order = urls if i % 2 else urls[::-1]
            before_s = processor_time(front)
            found = {url: await _streams(url, n, 100 * i) for url in order}
            front_s += processor_time(front) - before_s
            (alone_s, alone_rate), (behind_s, behind_rate) = (found[url] for url in urls)
            delays.append(behind_s - alone_s)
            ratios.append(behind_rate / alone_rate)
        print(
            f"{n} streams: first token {1e3 * median(delays):+.1f} ms, throughput {median(ratios):.2f}, "
            f"{1e6 * front_s / (_ROUNDS * n * _N_TOKENS):.0f} us of processor time in front for a token",
            flush=True,
        )


async def _hits(held: str, urls: Sequence[str]) -> None:
    """Asks one server, both servers in turn, and the replicas, each for system prompts of its own."""
    for url in urls:
        await _ready(url)
    one, in_turn, routed = [
        await _asked(asked, _prompts(seed)) for seed, asked in enumerate((urls[:1], urls[:2], urls[2:]))
    ]
    print(
        f"caches for {held} of {_N_SYSTEM} system prompts: hits of one server {one:.1%}, of two in turn "
        f"{in_turn:.1%} ({in_turn / one:.2f}), of two replicas {routed:.1%} ({routed / one:.2f})",
        flush=True,
    )


def _prompts(seed: int) -> list[str]:
    """The questions, each after its system prompt, some 306 tokens together, in random order."""
    draw = random.Random(seed)
    words = ["weather", "trains", "music", "history", "food", "travel", "sport"]
    system = [" ".join(draw.choices(words, k=300)) for _ in range(_N_SYSTEM)]
    prompts = [f"{one}\nQuestion {i}:" for one in system for i in range(_N_QUESTIONS)]
    draw.shuffle(prompts)
    return prompts


async def _asked(urls: Sequence[str], prompts: Sequence[str]) -> float:
    """The share of the tokens of prompts that were in a cache; the servers are asked in turn."""
    left = iter(enumerate(prompts))
    n_hit = n_tokens = 0

    async def ask(client: httpx.AsyncClient) -> None:
        nonlocal n_hit, n_tokens
        for i, prompt in left:
            body = {"model": "m", "prompt": prompt, "max_tokens": 4, "temperature": 0}
            answer = await client.post(f"{urls[i % len(urls)]}/v1/completions", json=body)
            usage = answer.raise_for_status().json()["usage"]
            n_hit += usage["prompt_tokens_details"]["cached_tokens"]
            n_tokens += usage["prompt_tokens"]

    async with httpx.AsyncClient(timeout=300) as client:
        await asyncio.gather(*(ask(client) for _ in range(_AT_ONCE)))
    return n_hit / n_tokens


def processor_time(pid: int) -> float:
    """The seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def _ready(url: str) -> None:
    async with httpx.AsyncClient(base_url=url) as client:
        for _ in range(600):
            answer = await client.get("/metrics")
            if "kukri_kv_pages{" in answer.text:
                return
            await asyncio.sleep(0.1)
    raise SystemExit(f"no engine at {url}")


async def _streams(url: str, n: int, first: int) -> tuple[float, float]:
    """(seconds to the first token at the median, tokens a second of all) of `n` streams at a time."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        started_s = perf_counter()
        delays = await asyncio.gather(*(_stream(client, first + i) for i in range(n)))
        return median(delays), n * _N_TOKENS / (perf_counter() - started_s)


async def _stream(client: httpx.AsyncClient, number: int) -> float:
    body: dict[str, Any] = {"model": "m", "prompt": f"The number {number} is", "max_tokens": _N_TOKENS}
    body |= {"temperature": 0, "ignore_eos": True, "stream": True, "speculation": "off"}
    started_s, delay_s = perf_counter(), 0.0
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {") and not delay_s:
                delay_s = perf_counter() - started_s
    return delay_s


if __name__ == "__main__":
    run(main)
