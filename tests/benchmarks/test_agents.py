"""The benchmark of coding agents: its tasks, its settings of clients, and the proxy that records them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from benchmarks.agent_clients import CLIENTS
from benchmarks.agents import TASKS, attempt, chosen
from benchmarks.recording_proxy import RecordingProxy
from kukri import LLM
from kukri.errors import ConfigError
from tests.server.live_server import MODEL, serving

SAID = {"find a text": "In south.txt.", "run a command": "It prints 57,987."}


def test_a_task_is_done_only_by_doing_it(tmp_path: Path) -> None:
    """Catches a check that passes for an agent that did nothing, or fails for one that did it."""
    for task in TASKS:
        directory = tmp_path / task.name
        directory.mkdir()
        for name, text in task.files.items():
            (directory / name).write_text(text)
        assert not task.is_done(directory, task.prompt if task.name in SAID else "Done."), task.name
        (directory / "hello.txt").write_text("kukri\n")
        (directory / "add.py").write_text("def add(a, b):\n    return a + b\n")
        assert task.is_done(directory, SAID.get(task.name, "")), task.name
    assert (
        "57987"
        in subprocess.run(
            [sys.executable, "-c", TASKS[3].files["report.py"]], capture_output=True, text=True
        ).stdout
    )


@pytest.mark.full
def test_a_client_is_run_and_its_requests_recorded(smollm2_path: Path, tmp_path: Path) -> None:
    """Catches requests that pass the proxy by, statuses that are not seen, and tools' results not counted."""
    program = tmp_path / "bin" / "client"
    program.parent.mkdir()
    body = {"model": MODEL, "max_tokens": 4, "tools": [], "stream": True}
    body["messages"] = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": "x"},
    ]
    send = "u.Request(url + '/chat/completions', body, {'content-type': 'application/json'})"
    program.write_text(
        f"#!{sys.executable}\nimport json, os, urllib.request as u\nurl = os.environ['OPENAI_BASE_URL']\n"
        f"body = json.dumps({body!r}).encode()\nu.urlopen({send}).read()\n"
        "try:\n    u.urlopen(url + '/nothing')\nexcept OSError:\n    print('in south.txt')\n"
    )
    program.chmod(0o755)
    (client,) = chosen("qwen-code")
    with LLM(smollm2_path, max_context=512) as llm, serving(llm) as server:
        outcome, said, exchanges = attempt(client, program, TASKS[2], 1, tmp_path / "home", server.url, 60)
    assert (outcome.n_requests, outcome.refused, outcome.n_results) == (2, {"/v1/nothing": 404}, 1), said
    assert outcome.is_done
    assert 0 < (outcome.first_token_s or 0) < outcome.seconds
    assert [one.status for one in exchanges] == [200, 404]


def test_unknown_clients_are_refused() -> None:
    """Catches a misspelt name that measures nothing."""
    assert chosen(None) == CLIENTS
    with pytest.raises(ConfigError, match="--clients"):
        chosen("codex,cursor")


def test_the_proxy_passes_everything_on(tmp_path: Path) -> None:
    """Catches a header, a query or a body that changes on its way."""
    with serving(None, []) as server:
        proxy = RecordingProxy(server.url)
        try:
            assert httpx.get(f"{proxy.url}/health?x=1").text == httpx.get(f"{server.url}/health").text
            assert proxy.exchanges[0].path == "/health?x=1"
        finally:
            proxy.close()
