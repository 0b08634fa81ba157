"""Replicas on Ray that are killed: `pytest -n0 -m ray tests/scale`, with the extra `ray-test`.

One Ray serves all tests of the file: a raylet takes seconds to start.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_gguf import tiny_config, write_tiny

pytestmark = pytest.mark.ray
ray = pytest.importorskip("ray")
httpx = pytest.importorskip("httpx")

N_TOKENS = 1500
STARTS = 3  # Ray gives its processes 30 s to start, which a busy machine may need more of


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_config(max_context=2048))


class Server:
    """`kukri cluster serve` in a process of its own."""

    def __init__(self, path: Path, *options: str) -> None:
        command = [sys.executable, "-m", "kukri", "cluster", "serve", str(path), "--replicas", "2"]
        command += ["--threads", "1", "--port", "0", "--alias", "tiny", "--drain", "5", *options]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        self.url = ""
        threading.Thread(target=self._read, daemon=True).start()
        wait_for(lambda: self.url or self.process.poll() is not None, 120)
        assert self.url, "".join(self.lines)
        self.http = httpx.Client(base_url=self.url, timeout=120)
        wait_for(lambda: len(self.replicas()) == 2, 60)

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line)
            found = re.search(r"on (http://127.0.0.1:\d+)/v1", line)
            if found:
                self.url = found[1]

    def replicas(self) -> list[str]:
        """The names of the replicas that the front knows."""
        text = self.http.get("/metrics").text
        return re.findall(r'kukri_kv_pages\{model="tiny",replica="(\w+)"\}', text)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            assert self.process.wait(60) == 0, "".join(self.lines[-20:])
        finally:
            self.process.kill()


@pytest.fixture(scope="module")
def server(path: Path) -> Iterator[Server]:
    for left in reversed(range(STARTS)):
        try:
            made = Server(path)
            break
        except AssertionError:
            if not left:
                raise
    yield made
    made.stop()


def replica_pids() -> list[int]:
    """The processes of replicas, by what Ray calls them."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if (
                entry.name.isdigit()
                and b"ServeReplica:kukri:KukriReplica" in (entry / "cmdline").read_bytes()
            ):
                found.append(int(entry.name))
    return sorted(found)


def wait_for(is_true: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it never came true"
        time.sleep(0.05)


def body(i: int) -> dict[str, Any]:
    sampling = {"temperature": 0} if i % 3 == 0 else {"seed": i, "temperature": 0.8 + i / 20}
    return {"model": "tiny", "prompt": f"stream {i}", "max_tokens": N_TOKENS, "ignore_eos": True, **sampling}


async def streamed(client: Any, i: int, counts: list[int]) -> str:
    """The text of a stream; `counts` are the events so far."""
    text = ""
    async with client.stream("POST", "/v1/completions", json={**body(i), "stream": True}) as response:
        assert response.status_code == 200
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                text += event["choices"][0]["text"]
                counts[i] += 1
    return text


async def twelve_streams(server: Server, kill: Any = None) -> list[str]:
    """The texts of twelve streams at a time, amid which `kill` is called."""
    counts = [0] * 12
    async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
        work = [asyncio.create_task(streamed(client, i, counts)) for i in range(12)]
        if kill is not None:
            while sum(counts) < 24:
                await asyncio.sleep(0.005)
            kill()
        return list(await asyncio.gather(*work))


def test_streams_go_on_when_replicas_are_killed(server: Server) -> None:
    """Ten times a replica of two is killed amid twelve streams: none may break, none may differ."""

    expected = asyncio.run(twelve_streams(server))
    assert len(set(expected)) == 12
    for _ in range(10):
        killed = twelve_streams(server, lambda: os.kill(replica_pids()[0], signal.SIGKILL))
        assert asyncio.run(killed) == expected
        wait_for(lambda: len(server.replicas()) == 2, 60)


def test_openai_clients_work_unchanged(server: Server) -> None:
    """Catches routes that are missing or answer otherwise behind replicas."""
    openai = pytest.importorskip("openai")
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    assert [model.id for model in client.models.list()] == ["tiny"]
    messages = [{"role": "user", "content": "Hi"}]
    chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=8, temperature=0)
    parts = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=8, temperature=0, stream=True
    )
    assert "".join(part.choices[0].delta.content or "" for part in parts) == chat.choices[0].message.content
    assert len(client.embeddings.create(model="tiny", input=["a", "b"]).data) == 2
    with pytest.raises(openai.BadRequestError):
        client.completions.create(model="tiny", prompt="x", temperature=-1)


def test_cluster_status_lists_the_replicas(server: Server) -> None:
    command = [sys.executable, "-m", "kukri", "cluster", "status", "--url", server.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert sorted(json.loads(done.stdout)) == sorted(server.replicas())


def test_a_batch_loses_and_doubles_nothing(path: Path, tmp_path: Path) -> None:
    """Replicas are killed, then the whole run, amid 200 lines: the next run has each once, in order."""
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    with source.open("w") as file:
        for i in range(200):
            one = {"model": "tiny", "prompt": f"line {i}", "max_tokens": 200, "ignore_eos": True, "seed": i}
            line = {"custom_id": f"id-{i}", "method": "POST", "url": "/v1/completions", "body": one}
            file.write(json.dumps(line) + "\n")
    command = [sys.executable, "-m", "kukri", "batch", str(path), str(source), str(target), "--alias", "tiny"]
    plain = tmp_path / "plain.jsonl"
    subprocess.run([*command[:-3], str(plain), "--alias", "tiny", "--threads", "1"], check=True)
    part = tmp_path / "out.jsonl.part"

    def n_done() -> int:
        return part.read_bytes().count(b"\n") if part.exists() else 0

    before = set(replica_pids())
    run = subprocess.Popen([*command, "--ray", "--replicas", "2", "--threads", "1"], start_new_session=True)
    try:
        for n in (20, 60):
            wait_for(lambda n=n: n_done() >= n, 120)
            os.kill(next(pid for pid in replica_pids() if pid not in before), signal.SIGKILL)
        wait_for(lambda: n_done() >= 100, 120)
    finally:
        os.killpg(run.pid, signal.SIGKILL)
        run.wait()
    assert not target.exists()
    n_before = n_done()
    done = subprocess.run(
        [*command, "--ray", "--replicas", "2", "--threads", "1", "--json"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["n_done_before"] >= n_before - 1
    found = [json.loads(line) for line in target.read_text().splitlines()]
    wanted = [json.loads(line) for line in plain.read_text().splitlines()]
    assert [line["custom_id"] for line in found] == [f"id-{i}" for i in range(200)]
    texts = [[line["response"]["body"]["choices"][0]["text"] for line in lines] for lines in (found, wanted)]
    assert texts[0] == texts[1]


def test_streams_go_on_when_a_machine_is_gone(path: Path) -> None:
    """Two machines with a replica each: one is taken away amid twelve streams."""
    from ray.cluster_utils import Cluster

    node = {"num_cpus": 1, "object_store_memory": 100 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**node, "include_dashboard": False})
    other = cluster.add_node(**node)
    try:
        server = Server(path, "--address", cluster.address)
        try:
            expected = asyncio.run(twelve_streams(server))
            gone = twelve_streams(server, lambda: cluster.remove_node(other, allow_graceful=False))
            assert asyncio.run(gone) == expected
        finally:
            server.stop()
    finally:
        cluster.shutdown()
