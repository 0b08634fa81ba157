"""Replicas, machines and the server's neighbors killed amid streams and a batch: nothing may be lost.

`python -m benchmarks.kills [MODEL]`, with the extra `ray`. Two machines of Ray on this one have a replica
each, behind `kukri cluster serve`. Each round has twelve streams, greedy and seeded, and a batch of
`--lines` lines at a time; in their middle something is killed:

    replica      the process of the replica on the second machine
    neighbor     that of the replica on the server's own machine
    controller   Ray Serve's controller, next to the server
    machine      all processes of the second machine; another one comes
    stopped      nothing: the replica on the second machine stands still (SIGSTOP)

Every text is compared with that of a round in which nothing was killed. The kinds take turns, and each round
is printed when it ends, so that a run that is cut short has shown something of each.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from time import perf_counter
from typing import Any

import httpx

from benchmarks.clusters import CONTROLLER, ClusterServer, Machines, processes, wait_for

_N_STREAMS = 12
_LEAST_EVENTS = 12  # events of the streams, and
_LEAST_LINES = 5  # lines of the batch, before something is killed


@dataclass(frozen=True)
class Work:
    """The work of a round. `stream_tokens` and `line_tokens` are those of an answer."""

    n_lines: int
    stream_tokens: int
    line_tokens: int


@dataclass(frozen=True)
class Answers:
    """The answers of a round: texts of the streams, and (custom_id, text) of the batch's lines in order."""

    streams: list[str]
    lines: list[tuple[str, str]]


@dataclass
class Counts:
    """Rounds, and their answers that were lost, came twice or differed."""

    n_rounds: int = 0
    n_lost: int = 0
    n_doubled: int = 0
    n_different: int = 0

    @property
    def n_wrong(self) -> int:
        """All of them."""
        return self.n_lost + self.n_doubled + self.n_different

    def add(self, found: tuple[int, int, int]) -> None:
        """Adds the `differences` of a round."""
        self.n_rounds += 1
        self.n_lost += found[0]
        self.n_doubled += found[1]
        self.n_different += found[2]

    def __str__(self) -> str:
        rounds = "round" if self.n_rounds == 1 else "rounds"
        wrong = f"{self.n_lost} lost, {self.n_doubled} doubled, {self.n_different} different"
        return f"{self.n_rounds} {rounds}: {wrong}"


def main() -> None:
    """Kills each of them some times. Exits with status 1 if an answer was lost, doubled or different."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--times", type=int, default=10)
    parser.add_argument("--lines", type=int, default=500)
    parser.add_argument("--stream-tokens", type=int, default=200)
    parser.add_argument("--line-tokens", type=int, default=8)
    parser.add_argument("--what", default="replica,neighbor,controller,machine,stopped")
    arguments = parser.parse_args()
    work = Work(arguments.lines, arguments.stream_tokens, arguments.line_tokens)
    kinds = arguments.what.split(",")
    counts = {what: Counts() for what in kinds}
    with tempfile.TemporaryDirectory() as folder:
        victims = Victims(arguments.model, Path(folder))
        try:
            started_s = perf_counter()
            undisturbed = round_of(victims.server, work)
            print(f"undisturbed in {perf_counter() - started_s:.0f} s", flush=True)
            for what in arguments.times * kinds:
                started_s = perf_counter()
                found = round_of(victims.server, work, victims.killing(what))
                counts[what].add(differences(found, undisturbed))
                round_s = perf_counter() - started_s
                victims.restore()
                restore_s = perf_counter() - started_s - round_s
                print(
                    f"{what:11} {counts[what]}; {round_s:.0f} s, {restore_s:.0f} until all is back",
                    flush=True,
                )
        finally:
            victims.close()
    n_answers = _N_STREAMS + work.n_lines
    for what, count in counts.items():
        print(f"{what:11} {count} of {count.n_rounds * n_answers:,} answers")
    n_wrong = sum(count.n_wrong for count in counts.values())
    raise SystemExit(1 if n_wrong else 0)


class Victims:
    """Two machines with a replica each, and the server in front of them. Attributes: server."""

    def __init__(self, model: str | Path, folder: Path) -> None:
        self._machines = Machines(2)
        self._stopped: list[int] = []
        self._is_short = False  # True if a machine lacks memory or disk
        try:
            options = ("--address", self._machines.address, "--batch-dir", str(folder))
            self.server = ClusterServer(model, *options)
        except BaseException:
            self._machines.close()
            raise

    def killing(self, what: str) -> Callable[[], None]:
        """The function that kills what is named so."""
        return {
            "replica": lambda: os.kill(self._replica(is_first=False), SIGKILL),
            "neighbor": lambda: os.kill(self._replica(is_first=True), SIGKILL),
            "controller": lambda: os.kill(self._controllers()[0], SIGKILL),
            "machine": self._remove_machine,
            "stopped": self._stop_replica,
        }[what]

    def restore(self) -> None:
        """Waits until there are two machines with a replica each again."""
        for pid in self._stopped:
            os.kill(pid, SIGKILL)
        self._stopped.clear()
        if self._is_short:
            self._machines.add()
            self._is_short = False
        wait_for(lambda: bool(self._controllers()), 300)
        self.server.wait_for_replicas(2)
        wait_for(lambda: len(self.server.pids()) == 2, 300)

    def close(self) -> None:
        """Ends all of it."""
        try:
            self.server.stop()
        finally:
            self._machines.close()

    def _replica(self, *, is_first: bool) -> int:
        return next(pid for pid in self.server.pids() if self._machines.is_first(pid) == is_first)

    def _controllers(self) -> list[int]:
        """Serve's controller, on the first machine; none while it is started again."""
        return [pid for pid in processes(CONTROLLER) if self._machines.is_first(pid)]

    def _remove_machine(self) -> None:
        self._is_short = True
        self._machines.remove()

    def _stop_replica(self) -> None:
        self._stopped.append(self._replica(is_first=False))
        os.kill(self._stopped[-1], SIGSTOP)


def round_of(server: ClusterServer, work: Work, kill: Callable[[], None] | None = None) -> Answers:
    """The answers to twelve streams and a batch at a time, amid which `kill` is called."""
    return asyncio.run(_round(server, work, kill))


def differences(found: Answers, wanted: Answers) -> tuple[int, int, int]:
    """(answers that are lost, those that came twice, those that differ or are out of order)."""
    ids = [name for name, _ in found.lines]
    n_lost = len({name for name, _ in wanted.lines} - set(ids))
    n_doubled = len(ids) - len(set(ids))
    pairs = [*zip(found.streams, wanted.streams, strict=True), *zip(found.lines, wanted.lines, strict=False)]
    return n_lost, n_doubled, sum(one != other for one, other in pairs)


async def _round(server: ClusterServer, work: Work, kill: Callable[[], None] | None) -> Answers:
    counts = [0] * _N_STREAMS
    async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
        batch = await _submitted(client, work)
        while kill is not None and await _n_done(client, batch) < _LEAST_LINES:
            await asyncio.sleep(0.01)
        streams = [asyncio.create_task(_stream(client, work, i, counts)) for i in range(_N_STREAMS)]
        if kill is not None:
            while sum(counts) < _LEAST_EVENTS:
                await asyncio.sleep(0.01)
            n_ended = sum(task.done() for task in streams)
            assert not n_ended, f"{n_ended} streams had ended: make them longer"
            assert await _n_done(client, batch) < work.n_lines, "the batch had ended: give it more lines"
            kill()
        texts = await asyncio.gather(*streams)
        return Answers(list(texts), await _results(client, batch))


async def _stream(client: httpx.AsyncClient, work: Work, i: int, counts: list[int]) -> str:
    """The text of a stream; `counts` are the events so far."""
    sampling = {"temperature": 0} if i % 3 == 0 else {"seed": i, "temperature": 0.8 + i / 20}
    body = {"model": "tiny", "prompt": f"stream {i}", "ignore_eos": True, "stream": True, **sampling}
    text = ""
    async with client.stream(
        "POST", "/v1/completions", json={**body, "max_tokens": work.stream_tokens}
    ) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                if "error" in event:
                    return f"{text} {event['error']}"
                text += event["choices"][0]["text"]
                counts[i] += 1
    return text


async def _submitted(client: httpx.AsyncClient, work: Work) -> str:
    """The id of a batch on the server."""
    lines = []
    for i in range(work.n_lines):
        body = {"model": "tiny", "prompt": f"line {i}", "ignore_eos": True, "seed": i}
        body["max_tokens"] = work.line_tokens
        lines.append({"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": body})
    data = "\n".join(map(json.dumps, lines)).encode()
    file = await client.post("/v1/files", files={"file": ("in.jsonl", data)}, data={"purpose": "batch"})
    batch = {"input_file_id": file.json()["id"], "endpoint": "/v1/completions", "completion_window": "24h"}
    created = await client.post("/v1/batches", json=batch)
    created.raise_for_status()
    return str(created.json()["id"])


async def _n_done(client: httpx.AsyncClient, batch: str) -> int:
    return int((await _batch(client, batch))["request_counts"]["completed"])


async def _batch(client: httpx.AsyncClient, batch: str) -> dict[str, Any]:
    response = await client.get(f"/v1/batches/{batch}")
    response.raise_for_status()
    found: dict[str, Any] = response.json()
    return found


async def _results(client: httpx.AsyncClient, batch: str) -> list[tuple[str, str]]:
    while (found := await _batch(client, batch))["status"] in ("validating", "in_progress", "finalizing"):
        await asyncio.sleep(0.1)
    text = (await client.get(f"/v1/files/{found['output_file_id']}/content")).text
    lines = [json.loads(line) for line in text.splitlines()]
    return [(line["custom_id"], line["response"]["body"]["choices"][0]["text"]) for line in lines]


if __name__ == "__main__":
    main()
