"""Replicas on Ray that are killed: `pytest -n0 -m ray tests/scale`, with the extra `ray-test`.

One Ray of two machines serves most tests of the file: a raylet takes seconds to start.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_gguf import tiny_config, write_tiny

pytestmark = pytest.mark.ray
pytest.importorskip("ray")

from benchmarks.clusters import ClusterServer, replica_pids, wait_for  # noqa: E402
from benchmarks.kills import Answers, Victims, Work, differences, round_of  # noqa: E402

WORK = Work(n_lines=500, stream_tokens=3000, line_tokens=200)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model") / "tiny.gguf", tiny_config(max_context=4096))


@pytest.fixture(scope="module")
def victims(path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Victims]:
    made = Victims(path, tmp_path_factory.mktemp("batches"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def server(victims: Victims) -> ClusterServer:
    return victims.server


@pytest.fixture(scope="module")
def undisturbed(server: ClusterServer) -> Answers:
    found = round_of(server, WORK)
    assert len(set(found.streams)) == 12
    assert [name for name, _ in found.lines] == [f"id-{i}" for i in range(WORK.n_lines)]
    return found


@pytest.mark.parametrize(
    ("what", "times"), [("replica", 10), ("neighbor", 2), ("controller", 1), ("stopped", 1), ("machine", 2)]
)
def test_streams_and_batches_continue_when_something_is_killed(
    victims: Victims, undisturbed: Answers, what: str, times: int
) -> None:
    """Twelve streams and a batch at a time: none may break, none may differ, no line be lost or doubled."""
    for _ in range(times):
        found = round_of(victims.server, WORK, victims.killing(what))
        assert differences(found, undisturbed) == (0, 0, 0)
        victims.restore()


def test_openai_clients_work_unchanged(server: ClusterServer) -> None:
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


def test_cluster_status_lists_the_replicas(server: ClusterServer) -> None:
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
        assert run.poll() is None or run.poll() == -signal.SIGKILL, "the run has ended"
        return part.read_bytes().count(b"\n") if part.exists() else 0

    run = subprocess.Popen([*command, "--ray", "--replicas", "2", "--threads", "1"], start_new_session=True)
    try:
        for n in (20, 60):
            wait_for(lambda n=n: n_done() >= n, 120)  # type: ignore[misc]
            os.kill(replica_pids("batch-")[0], signal.SIGKILL)
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
