"""The cost of replicas: `kukri cluster serve` with one replica beside `kukri serve`, by turns.

`python -m benchmarks.replicas [MODEL]`, with the extra `ray`. Both run at once with as many threads, and the
one that is not asked sleeps. Prints the delay of the first token and the ratio of throughputs, medians of the
rounds, and the processor time of the server in front of the replica for each token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import subprocess
import sys
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import httpx

_N_TOKENS = 64
_ROUNDS = 9


def main() -> None:
    """Measures 1 and 8 streams."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--threads", default="1")
    arguments = parser.parse_args()
    options = [arguments.model, "--threads", arguments.threads, "--port", "0", "--alias", "m"]
    started = [
        subprocess.Popen(
            [sys.executable, "-m", "kukri", *command, *options], stderr=subprocess.PIPE, text=True
        )
        for command in (["serve"], ["cluster", "serve"])
    ]
    try:
        urls = [server_url(process) for process in started]
        asyncio.run(_compare(urls, started[1].pid))
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def server_url(process: subprocess.Popen[str]) -> str:
    """The address that a server shows when it is there."""
    assert process.stderr is not None, "it is a pipe"
    lines = []
    for line in process.stderr:
        lines.append(line)
        found = re.search(r"on (http://127.0.0.1:\d+)/v1", line)
        if found:
            return found[1]
    raise SystemExit("".join(lines))


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


def processor_time(pid: int) -> float:
    """The seconds of processor time that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
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
    main()
