"""Coding agents against a served model: `python -m benchmarks.agents`.

Each client of `benchmarks.agent_clients` is given four small tasks, in a home and directory of its own and in
a namespace without a network, and the first one a second time. Reported are: whether every request was
accepted, how many results of tools the model was sent, whether the task was done, and the time to the first
token of the first request with tools in the first and the second session. Linux alone has such namespaces.
The clients are installed from npm and PyPI into `--packages` before.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.agent_clients import CLIENTS, MODEL, Client
from benchmarks.harness import Experiment, Say, Table, model_path, output_of, run, served
from benchmarks.recording_proxy import Exchange, RecordingProxy
from kukri.errors import ConfigError, KukriError

_ISOLATED = "KUKRI_BENCHMARK_ISOLATED"  # set in the process without a network
_CONTEXT = 32768
# what the bodies of the five APIs call a tool's result
_RESULT = re.compile(rb'"role": ?"tool"|"type": ?"(?:tool_result|(?:function|custom_tool)_call_output)"')


@dataclass(frozen=True)
class Task:
    """A task: the files it begins with, what the agent is asked, and whether it is done.

    `is_done` gets the directory afterwards, and what the agent said.
    """

    name: str
    files: dict[str, str]
    prompt: str
    is_done: Callable[[Path, str], bool]


def _passes(directory: Path, said: str) -> bool:
    with tempfile.TemporaryDirectory() as fresh:  # compiled code is stale if a change keeps size and second
        command = [sys.executable, "-X", f"pycache_prefix={fresh}", "test_add.py"]
        done = subprocess.run(command, cwd=directory, capture_output=True)
    return done.returncode == 0 and "assert" in (directory / "test_add.py").read_text()


def _has_word(directory: Path, said: str) -> bool:
    path = directory / "hello.txt"
    return path.exists() and path.read_text().strip().strip("\"'`") == "kukri"


TASKS = [
    Task(
        "write a file",
        {},
        "Create a file hello.txt in the current directory that contains just the word kukri.",
        _has_word,
    ),
    Task(
        "mend a function",
        {
            "add.py": "def add(a, b):\n    return a - b\n",
            "test_add.py": "from add import add\n\nassert add(2, 3) == 5\nprint('passed')\n",
        },
        "test_add.py fails because the function in add.py is wrong. Change add.py so that "
        "`python3 test_add.py` passes.",
        _passes,
    ),
    Task(
        "find a text",
        {
            "north.txt": "Rain until noon.\n",
            "south.txt": "The harbour code is 4711.\n",
            "west.txt": "Fog in the valleys.\n",
        },
        "Which file in the current directory contains the text 'harbour code'? Search the files, and answer "
        "with the file's name.",
        lambda directory, said: "south.txt" in said,
    ),
    Task(
        "run a command",
        {"report.py": "print(17 * 3411)\n"},
        "Run the command `python3 report.py` and tell me the number that it prints.",
        lambda directory, said: "57987" in said.replace(",", ""),
    ),
]


@dataclass(frozen=True)
class Outcome:
    """What one agent did with one task."""

    client: str
    task: str
    session: int
    n_requests: int
    refused: dict[str, int]  # path -> status, of those that got no 2xx
    n_results: int  # results of tools, in the longest conversation that the model was sent
    is_done: bool
    first_token_s: float | None  # in the first request with tools
    seconds: float
    is_timeout: bool


@dataclass(frozen=True)
class AgentsReport:
    """The report of `python -m benchmarks.agents`."""

    model: str
    versions: dict[str, str]
    outcomes: tuple[Outcome, ...]


def installed(client: Client, packages: Path, say: Say) -> Path:
    """The client's program, installed if it is missing. Raises KukriError if it cannot be."""
    is_python = "==" in client.package
    folder = packages / client.name
    program = folder / ("bin" if is_python else "node_modules/.bin") / client.program
    if not program.exists():
        say(f"installing {client.package}")
        folder.mkdir(parents=True, exist_ok=True)
        if is_python:
            output_of([sys.executable, "-m", "venv", str(folder)])
            output_of([str(folder / "bin/pip"), "install", "--quiet", client.package])
        else:
            output_of(["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), client.package])
    return program


def attempt(
    client: Client, program: Path, task: Task, session: int, home: Path, url: str, timeout_s: float
) -> tuple[Outcome, str, list[Exchange]]:
    """Runs a client on a task. Returns the outcome, what the client said, and its requests."""
    proxy = RecordingProxy(url)
    directory = home / "work"  # the same each time: its path is in the prompts
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name, text in task.files.items():
        (directory / name).write_text(text)
    environment = {"HOME": str(home), "PATH": f"{program.parent}:{os.environ['PATH']}", "TERM": "dumb"}
    environment |= client.set_up(home, proxy.url)
    started_s, is_timeout = time.perf_counter(), False
    process = subprocess.Popen(
        [str(program), *client.command, task.prompt],
        cwd=directory,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        said, errors = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        is_timeout = True
        os.killpg(process.pid, signal.SIGKILL)
        said, errors = process.communicate()
    seconds = time.perf_counter() - started_s
    proxy.close()
    made = proxy.exchanges
    asked = [one for one in made if one.method == "POST" and b'"tools"' in one.body] or made
    outcome = Outcome(
        client.name,
        task.name,
        session,
        len(made),
        {one.path: one.status for one in made if not 200 <= one.status < 300 and not is_timeout},
        max((len(_RESULT.findall(one.body)) for one in made), default=0),
        task.is_done(directory, said),
        next((one.first_token_s for one in asked if one.first_token_s is not None), None),
        seconds,
        is_timeout,
    )
    return outcome, f"{said}\n--- stderr\n{errors}", made


def save(directory: Path, outcome: Outcome, said: str, exchanges: Sequence[Exchange]) -> None:
    """Writes what was said and asked, to be looked at."""
    directory.mkdir(parents=True, exist_ok=True)
    stem = f"{outcome.client}-{outcome.task.replace(' ', '-')}-{outcome.session}"
    (directory / f"{stem}.txt").write_text(said)
    with open(directory / f"{stem}.jsonl", "w", encoding="utf-8") as file:
        for one in exchanges:
            record = {"path": one.path, "status": one.status, "first_token_s": one.first_token_s}
            record |= {"total_s": one.total_s, "body": one.body.decode(errors="replace")}
            file.write(json.dumps(record | {"answer": one.answer.decode(errors="replace")}) + "\n")


def isolate() -> None:
    """Runs this program again in a namespace that has a loopback of its own and no network."""
    up = 'ip link set lo up && exec "$@"'
    program = [sys.executable, "-m", "benchmarks.agents", *sys.argv[1:]]
    os.environ[_ISOLATED] = "1"
    try:
        os.execvp("unshare", ["unshare", "--map-root-user", "--net", "sh", "-c", up, "sh", *program])
    except OSError as error:
        raise KukriError(f"no namespace without a network: {error.strerror}") from None


def chosen(names: str | None) -> list[Client]:
    """The clients of these names, with commas between them. Raises ConfigError for one that is not known."""
    known = {client.name: client for client in CLIENTS}
    wanted = names.split(",") if names else list(known)
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"there is no client {unknown[0]!r} (--clients): choose among {', '.join(known)}")
    return [known[name] for name in wanted]


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("agents", "Let coding agents do small tasks with a served model.")
    experiment.options.add_argument("--clients", help="their names, with commas between them (all)")
    experiment.count("-n", "--tasks", len(TASKS), "tasks of each")
    experiment.count("-s", "--seconds", 900, "seconds after which a client is stopped")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kukri-benchmarks/agents"
    experiment.options.add_argument("--packages", type=Path, default=cache, help=f"install here ({cache})")
    experiment.options.add_argument("--serve", default="", help="further options of kukri serve, in one text")
    experiment.options.add_argument("--save", type=Path, help="write all requests and answers to this folder")
    given = experiment.parse()
    clients = chosen(given.clients)
    folder = given.packages.absolute()
    programs = {client.name: installed(client, folder, experiment.say) for client in clients}
    if _ISOLATED not in os.environ:
        isolate()
    path, outcomes = model_path(given.model, 8192), []
    options = ["--alias", MODEL, "--any-model", "--max-requests", "4", "--threads", str(given.threads)]
    options += ["--log-level", "error", "--max-context", str(_CONTEXT), *shlex.split(given.serve)]
    with (
        served(path, *options) as (_, url),
        tempfile.TemporaryDirectory() as temporary,
    ):
        for client in clients:
            home = Path(temporary) / client.name
            sessions = [(task, 1) for task in TASKS[: given.tasks]] + [(TASKS[0], 2)]
            for task, session in sessions:
                experiment.say(f"{client.name}: {task.name}, session {session}")
                outcome, said, exchanges = attempt(
                    client, programs[client.name], task, session, home, url, given.seconds
                )
                outcomes.append(outcome)
                if given.save:
                    save(given.save, outcome, said, exchanges)
    versions = {client.name: client.package for client in clients}
    report = AgentsReport(path.name, versions, tuple(outcomes))
    header = ["client", "task", "requests", "refused", "results of tools", "done", "first token s", "s"]
    rows = [
        [
            one.client,
            one.task + (" again" if one.session > 1 else ""),
            str(one.n_requests),
            ", ".join(f"{status} {path}" for path, status in one.refused.items()) or "-",
            str(one.n_results),
            "yes" if one.is_done else "no",
            "-" if one.first_token_s is None else f"{one.first_token_s:.1f}",
            f"{one.seconds:.0f}" + ("+" if one.is_timeout else ""),
        ]
        for one in outcomes
    ]
    experiment.show(report, Table(f"agents with {report.model}", header, rows))


if __name__ == "__main__":
    run(main)
