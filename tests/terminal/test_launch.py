"""`kukri launch`: settings of agents, and the server that they share."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from kukri.cli import app
from kukri.errors import ConfigError
from kukri.host.os_calls import lock_file
from kukri.terminal.agents import AGENTS, FILLED, agent_of
from kukri.terminal.idle_exit import IdleExit
from kukri.terminal.launched_server import serve_command
from tests.terminal.pty_process import Terminal

FACTS = {name: f"<{name}>" for name in FILLED}
VARIABLES = tuple(
    part for name in ("url", "key", "model") for part in ("--env", f"{name.upper()}={{{name}}}")
)
# a program in the place of an agent, which says what it was given
TELL = "import os, sys; print('|'.join([*map(os.environ.get, ('URL', 'KEY', 'MODEL')), *sys.argv[1:]]))"


def call(*arguments: str):
    return CliRunner().invoke(app, ["launch", *arguments])


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory of a user who never launched anything."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("KUKRI_PREFIX_DIR", str(tmp_path / "prefixes"))
    return tmp_path / "state/kukri/launch"


# --- settings of agents


@pytest.mark.parametrize("name", AGENTS)
def test_no_agent_gets_the_key_in_its_arguments(name):
    """Catches a key that `ps` shows to every user, and a name in braces that nobody fills in."""
    row = AGENTS[name]
    assert "{key}" not in " ".join(row.arguments)
    assert re.fullmatch(r"[0-9]+(\.[0-9]+)+", row.version)
    filled = row.filled(FACTS)
    texts = [*filled.arguments, *filled.files, *filled.files.values(), *map(str, filled.environment.values())]
    assert not re.search(r"\{(\w+)\}", " ".join(texts))
    assert "<url>" in " ".join(texts)


def test_settings_in_json_and_toml_can_be_read():
    """Catches a comma or a brace too many in settings that are written as text."""
    import tomllib

    facts = FACTS | {"context": "8192", "answer": "1024"}
    settings = json.loads(AGENTS["opencode"].filled(facts).environment["OPENCODE_CONFIG_CONTENT"])
    assert settings["provider"]["kukri"]["models"] == {
        "<model>": {"limit": {"context": 8192, "output": 1024}}
    }
    assert settings["model"] == "kukri/<model>"
    cline = AGENTS["cline"].filled(facts).files["cline/settings/providers.json"]
    assert "<key>" in json.dumps(json.loads(cline))
    codex = AGENTS["codex"].filled(facts).arguments
    assert codex[::2] == ("-c",) * (len(codex) // 2)
    found = tomllib.loads("\n".join(codex[1::2]))
    assert found["model_providers"]["kukri"]["base_url"] == "<url>/v1"
    assert found["model_context_window"] == 8192


def test_variables_of_the_command_line_come_last():
    """Catches a variable of a row that cannot be changed, and a program that is refused with --env."""
    row = agent_of("claude", ["ANTHROPIC_MODEL=other", "A=b=c {url}"])
    assert row.environment["ANTHROPIC_MODEL"] == "other"
    assert row.filled(FACTS).environment["A"] == "b=c <url>"
    assert agent_of("some-program", ["A=1"]).program == "some-program"
    with pytest.raises(ConfigError, match="did you mean codex"):
        agent_of("cody", [])
    with pytest.raises(ConfigError, match="--env 'A' must be NAME=VALUE"):
        agent_of("codex", ["A"])


def test_print_shows_commands_and_no_key(state):
    """Catches --print that starts something, writes a file, or shows what a shell reads otherwise."""
    done = call("codex", "--print", "-m", "my model.gguf", "--serve", "--threads 1", "--", "exec", "a b")
    assert done.exit_code == 0, done.output
    server, agent = (shlex.split(line) for line in done.stdout.splitlines() if not line.startswith("#"))
    assert server[:3] == ["kukri", "serve", "my model.gguf"]
    assert server[-2:] == ["--threads", "1"]
    assert agent[:2] == ["KUKRI_API_KEY=KEY", "codex"]
    assert agent[-2:] == ["exec", "a b"]
    assert not state.exists()
    printed = call("claude", "--print", "--url", "http://127.0.0.1:9/v1").stdout
    assert "serve" not in printed
    assert "env -u ANTHROPIC_API_KEY ANTHROPIC_BASE_URL=http://127.0.0.1:9 " in printed


def test_an_agent_that_is_missing_gets_its_installation(state, monkeypatch, tmp_path):
    """Catches a server that is started for nobody."""
    monkeypatch.setenv("PATH", str(tmp_path))
    done = call("codex")
    assert (done.exit_code, done.stderr) == (
        2,
        "error: the program 'codex' was not found: run `npm install -g @openai/codex`\n",
    )
    assert not state.exists()
    assert "to install: npm install -g @openai/codex" in call().stdout


def test_the_options_of_the_server_are_options(state):
    """Catches an option in the table of `launch` that `kukri serve` does not have, or reads otherwise."""
    from tests.terminal.test_serve_options import parsed

    serving, loading = parsed(*serve_command(None, ["--kv-type", "f16", "--in-use", "x"])[4:])
    assert (serving.port, serving.any_model, serving.idle_exit_s) == (0, True, "30m")
    assert loading.kv_type == "f16"


# --- a server that is told to end


def test_a_server_ends_when_it_is_idle(tmp_path):
    """Catches an end under an answer or an agent, and an agent that gets a server which is about to end."""
    clock, users = SimpleNamespace(s=0.0), tmp_path / "users"
    model = SimpleNamespace(is_idle=True)
    settings = SimpleNamespace(idle_exit_s=10.0, in_use=users)
    idle = IdleExit(SimpleNamespace(entries=[model]), settings, lambda: clock.s)

    def after(seconds: float, n_requests: int) -> bool:
        clock.s += seconds
        return idle.is_over(n_requests)

    assert not after(9, 0)
    assert not after(2, 1)  # a request came
    model.is_idle = False
    assert not after(60, 1)  # and is answered
    model.is_idle = True
    kept = lock_file(users, is_shared=True)
    assert not after(11, 1)
    assert not after(9, 1)
    os.close(kept)
    assert not after(9, 1)
    assert not after(0.5, 1)
    assert after(1, 1)
    assert lock_file(users, is_shared=True, wait=False) is None
    settings.idle_exit_s = None
    assert not IdleExit(SimpleNamespace(entries=[model]), settings, lambda: 1e9).is_over(0)


# --- a server that runs


class Models(BaseHTTPRequestHandler):
    """Lists a model to who has the key."""

    def do_GET(self) -> None:
        is_known = self.headers["Authorization"] == "Bearer secret"
        body = json.dumps({"data": [{"id": "tiny", "max_model_len": 512}]}).encode()
        self.send_response(200 if is_known else 401)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def listed() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), Models)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/v1"
    server.shutdown()
    server.server_close()


def launched(*arguments: str, code: str = TELL) -> subprocess.Popen[str]:
    """A launch of Python as the agent."""
    agent = [sys.executable, *VARIABLES, *arguments[: arguments.index("--")], "--", "-c", code]
    agent += arguments[arguments.index("--") + 1 :]
    return subprocess.Popen(
        [sys.executable, "-m", "kukri", "launch", *agent],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.representative(1)
def test_an_agent_takes_the_place_of_the_command(listed, state, monkeypatch):
    """Catches streams, arguments or a status that are changed on their way, and files without need."""
    monkeypatch.setenv("KUKRI_API_KEY", "secret,another")
    process = launched("--url", listed, "--", "x", code=TELL + "; print(input(), os.getpid()); sys.exit(7)")
    said, errors = process.communicate("typed\n", timeout=30)
    assert (process.returncode, errors) == (7, "")
    assert said == f"{listed.removesuffix('/v1')}|secret|tiny|x\ntyped {process.pid}\n"
    assert not state.exists()


def test_a_server_that_cannot_be_used_is_an_error(listed, state, monkeypatch, tmp_path):
    """Catches an agent that starts without a model, or with one that is too small for its instructions."""
    program = tmp_path / "codex"
    program.write_text("")
    program.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path))
    url = ("--url", listed)
    assert "status 401" in call("codex", *url).stderr
    assert "the model 'b' was not found" in call("codex", *url, "--api-key", "secret", "-m", "b").stderr
    assert '--serve "\'" must be' in call("codex", "--serve", "'").stderr
    assert "no server answers" in call("codex", "--url", "http://127.0.0.1:9").stderr
    said = call("codex", *url, "--api-key", "secret").stderr
    assert re.search(r"the context of 'tiny' must be at least \d+ tokens for codex, not 512", said)
    assert not state.exists()


# --- the user's own configuration


@pytest.mark.parametrize("old", [None, {"theme": "dark"}, {"env": {"A": "1", "ANTHROPIC_MODEL": "opus"}}])
def test_own_settings_are_added_and_taken_back(old, listed, state, monkeypatch, tmp_path):
    """Catches a user's setting that is lost, a backup that is overwritten, and a key that others may read."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".claude/settings.json"
    if old is not None:
        file.parent.mkdir()
        file.write_text(json.dumps(old))
    install = ("claude", "--install", "--url", listed, "--api-key", "secret")
    assert call(*install).exit_code == 0
    added = json.loads(file.read_text())
    assert added["env"].items() >= {**(old or {}).get("env", {}), "ANTHROPIC_MODEL": "tiny"}.items()
    assert added["env"]["ANTHROPIC_AUTH_TOKEN"] == "secret"
    assert file.stat().st_mode & 0o777 == 0o600
    assert "must not be overwritten" in call(*install).stderr
    assert json.loads(file.read_text()) == added
    file.write_text(json.dumps({**added, "later": 1, "env": {**added["env"], "B": "2"}}))
    assert call("claude", "--uninstall").exit_code == 0
    env = {**(old or {}).get("env", {}), "B": "2"}
    assert json.loads(file.read_text()) == {**(old or {}), "later": 1, "env": env}
    assert [one.name for one in file.parent.iterdir()] == ["settings.json"]


def test_own_settings_that_cannot_be_changed(listed, state, monkeypatch, tmp_path):
    """Catches a file with comments that loses them, and a file that nobody had and stays."""
    monkeypatch.setenv("HOME", str(tmp_path))
    file = tmp_path / ".config/opencode/opencode.json"
    file.parent.mkdir(parents=True)
    file.write_text("{} // mine")
    install = ("opencode", "--install", "--url", listed, "--api-key", "secret")
    assert "must be JSON without comments" in call(*install).stderr
    assert file.read_text() == "{} // mine"
    file.unlink()
    assert call(*install).exit_code == 0
    assert json.loads(file.read_text())["model"] == "kukri/tiny"
    assert call("opencode", "--uninstall").exit_code == 0
    assert list(file.parent.iterdir()) == []
    assert "was not found" in call("opencode", "--uninstall").stderr
    assert "--url is required" in call("opencode", "--install").stderr
    assert "--install is not supported for codex" in call("codex", "--install").stderr


# --- a server that is started


def served_by(state: Path) -> list[int]:
    """The processes of servers that were launched with this state."""
    found = []
    for process in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            words = (process / "cmdline").read_bytes().split(b"\0")
            if str(state / "key").encode() in words and b"serve" in words:
                found.append(int(process.name))
    return found


@pytest.fixture
def servers(state, tiny_path, compiled_kernels) -> Iterator[Path]:
    """The directory of launches; the servers that were started there are ended."""
    yield state
    for pid in served_by(state):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_launches_share_a_server_that_outlives_them(servers, tiny_path):
    """Catches two servers for two launches, a server that dies with its agent, a dead one that is believed,
    and a key that others may read.
    """
    model = ("-m", str(tiny_path), "--serve", "--kv-type f16 --idle-exit 3s", "--")
    both = [launched(*model), launched(*model)]
    said = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    _, key, name = said[0][0].strip().split("|")
    assert name == tiny_path.stem
    assert (servers / "key").read_text() == key
    assert (servers / "key").stat().st_mode & 0o777 == 0o600
    assert servers.stat().st_mode & 0o777 == 0o700
    (log,) = servers.glob("*.log")
    assert log.read_text().count("serving ") == 1

    # Ctrl-C ends the agent alone; the server waits for an agent longer than it would be idle
    agent = "import os, time; print(os.environ['URL'], 'is up', flush=True); time.sleep(60)"
    terminal = Terminal("-m", "kukri", "launch", sys.executable, *VARIABLES, *model, "-c", agent)
    try:
        url = re.search(r"http://\S+", terminal.wait_for("is up"))[0]
        (pid,) = served_by(servers)
        time.sleep(5)
        assert launched(*model).communicate(timeout=60)[0].startswith(url)
        terminal.type("\x03")
        assert terminal.exit_code() == -signal.SIGINT
    finally:
        terminal.close()
    assert served_by(servers) == [pid]

    # an end by idleness frees the lock
    (lock,) = servers.glob("*.lock")
    deadline = time.monotonic() + 60
    while (found := lock_file(lock, wait=False)) is None:
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)
    os.close(found)
    again = launched(*model).communicate(timeout=120)[0]
    assert again.split("|")[1] == key


@pytest.mark.full
def test_a_server_that_was_killed_is_started_again(servers, tiny_path):
    """Catches a launch that waits for a server which is dead, or believes what it left."""
    model = ("-m", str(tiny_path), "--serve", "--kv-type f16", "--")
    assert launched(*model).communicate(timeout=120)[0]
    (pid,) = served_by(servers)
    os.kill(pid, signal.SIGKILL)
    said, errors = launched(*model).communicate(timeout=120)
    assert said, errors


@pytest.mark.full
def test_a_server_that_does_not_start_says_why(servers, tiny_path):
    """Catches a launch that waits for ever for a server whose options are wrong."""
    process = launched("-m", str(tiny_path), "--serve", "--max-context 1000000", "--")
    said, errors = process.communicate(timeout=60)
    assert (process.returncode, said) == (2, "")
    assert "the server for agents ended: error: 'max_context' must be at most" in errors
