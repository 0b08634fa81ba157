"""What only some systems have stands in one folder, and each function there does without it."""

from __future__ import annotations

import ast
import os
import re
import select
import socket
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import kukri
from kukri.errors import ConfigError
from kukri.host import limits, mapped_files, os_calls, typed_input, waiting
from kukri.terminal.serve import bound_unix_socket
from tests.host.windows import LACKING, become_windows

PACKAGE = Path(kukri.__file__).parent
# Names that a system may lack: modules, and attributes of os, signal, socket, mmap and their likes
MODULES = {
    "fcntl",
    "resource",
    "termios",
    "tty",
    "pty",
    "pwd",
    "grp",
    "syslog",
    "msvcrt",
    "winreg",
    "readline",
}
NAMES = {"getpriority", "setsid", "mkfifo", "uname", "sched_setaffinity", "SIGPROF", "madvise", "preexec_fn"}
NAMES |= {"CDLL", "windll", "mallopt", "malloc_trim"}
NAMES |= {name for names in LACKING.values() for name in names} - {"poll"}  # a method of Popen
# A program of its own that imports nothing of kukri, and limits itself
EXCEPT = {"tokenizer/sandbox.py": {"resource", "setitimer", "ITIMER_PROF"}}
# What host/files.py does as Windows allows it
FILE_CALLS = {"os.replace", "os.rename", "os.remove"}
FILE_METHODS = {"unlink", "rmtree", "write_text"}
FILE_WORDS = re.compile("|".join([*FILE_METHODS, *FILE_CALLS, "fdopen", "read_text"]))


@cache
def source_of(path: Path) -> str:
    return path.read_text("utf-8")


def used_in(path: Path) -> set[str]:
    """Return the names above that a file uses."""
    found: set[str] = set()
    source = source_of(path)
    if not any(name in source for name in (*MODULES, *NAMES)):
        return found
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom) and not (node.module or "").startswith("kukri."):
            found |= ({node.module or ""} & MODULES) | ({alias.name for alias in node.names} & NAMES)
        elif isinstance(node, ast.Attribute) and node.attr in NAMES:
            found.add(node.attr)
    return found


def test_what_a_system_may_lack_is_used_in_one_folder() -> None:
    """Catches a call that ends kukri with an AttributeError on a system where nobody tries it."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if not name.startswith("host/") and (used := used_in(path) - EXCEPT.get(name, set())):
            found[name] = used
    assert not found
    assert {"fork", "AF_UNIX", "SIGHUP", "nice"} - used_in(PACKAGE / "host/os_calls.py") == {"nice"}


def file_faults(source: str) -> list[str]:
    """Return the calls that delete, replace or write files as only some systems do, each with its line."""
    found: list[str] = []
    if not FILE_WORDS.search(source):
        return found
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        text, method = ast.unparse(node), node.func.attr
        is_plain = method == "fdopen" and "b" not in ast.unparse(node.args[1]) and "encoding" not in text
        is_plain |= method == "read_text" and not (node.args or node.keywords)
        if method in FILE_METHODS or ast.unparse(node.func) in FILE_CALLS or is_plain:
            found.append(f"{node.lineno}: {text}")
    return found


def test_files_are_handled_in_one_folder() -> None:
    """Catches a file that Windows does not delete or replace while it is read, and text of any encoding."""
    found = {
        path.relative_to(PACKAGE).as_posix(): faults
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.parent.name != "host" and (faults := file_faults(source_of(path)))
    }
    assert not found
    for call in (
        "path.unlink()",
        "os.replace(a, b)",
        "os.fdopen(1, 'w')",
        "a.read_text()",
        "a.write_text(b)",
    ):
        assert file_faults(call)


def test_a_system_without_the_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a function whose fallback was never run, and a lock that is claimed to be held."""
    become_windows(monkeypatch)
    limits.lower_priority(5)
    limits.limit_memory(1 << 40)
    limits.limit_cpu(1000)
    assert os_calls.peak_rss_bytes() == 0
    assert os_calls.allowed_cores() == os.cpu_count()
    assert os_calls.user_id() is None
    assert os_calls.cpu_s(os.getpid()) is None
    os_calls.set_priority(os.getpid(), 0)
    os_calls.sync_directory(Path("no such directory"))
    os.close(os_calls.open_carefully(Path(__file__)))
    os_calls.on_hangup(lambda: None)
    os_calls.return_large_arrays()
    os_calls.return_free_memory()
    with os_calls.locked(tmp_path / "absent") as held:
        assert held is None
    with pytest.raises(ConfigError, match="--unix-socket is not supported on this system"):
        bound_unix_socket(tmp_path / "socket")


def test_a_session_is_one_process_without_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a download that goes on after Ctrl-C."""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        with monkeypatch.context() as patch:
            become_windows(patch)
            patch.setattr(process, "kill", process.terminate)  # Popen's own asks os.kill for SIGKILL
            os_calls.kill_session(process)
        assert process.wait(10) != 0


def test_a_terminal_without_line_editing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a chat that does not start where there are neither termios nor readline."""
    become_windows(monkeypatch)
    with typed_input.line_editing(tmp_path / "history", lambda text, state: None), typed_input.no_echo(0):
        assert not typed_input.has_typed(0, 0.0)
        typed_input.drop_typed(0, 0.0)
    assert typed_input.input_again("> ", "text") is None
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert not typed_input.marks_pastes()
    assert list(tmp_path.iterdir()) == []


def test_a_mapped_file_without_its_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a model that cannot be opened where pages are neither given back nor held."""
    path = tmp_path / "rows"
    path.write_bytes(bytes(range(200)))
    become_windows(monkeypatch)
    view = mapped_files.map_file(path, "test")
    mapped_files.release_pages(view)
    mapped_files.hold_pages(view)
    mapped_files.fetch_pages(view)
    assert view.tobytes() == bytes(range(200))


@pytest.mark.parametrize("has_poll", [True, False])
def test_waiting_for_sockets(monkeypatch: pytest.MonkeyPatch, has_poll: bool) -> None:
    """Catches a stage that waits forever, or takes unread bytes for a peer that has hung up."""
    (a, b), (c, d) = socket.socketpair(), socket.socketpair()
    if not has_poll:
        become_windows(monkeypatch)
    with a, c:
        assert waiting.ready([a], [], [c], 0.0) == (set(), set())
        assert waiting.ready([a], [a], [c])[1] == {a.fileno()}
        assert waiting.send_now(b, [b"12", memoryview(b"3")]) == 3
        assert waiting.ready([a, c])[0] == {a.fileno()}
        assert waiting.ready([c], [], [a], 0.15)[0] == set()  # it has not hung up: three bytes wait
        d.close()
        assert waiting.ready([a], [], [c])[0] >= {c.fileno()}
        a.setblocking(False)
        n_sent = 0
        while n := waiting.send_now(a, [bytes(1 << 16)]):
            n_sent += n
        assert n_sent >= 1 << 16
        b.close()
        with pytest.raises(OSError, match=r"reset|pipe"):
            waiting.send_now(a, [b"1"])


@pytest.mark.parametrize("has_poll", [True, False])
def test_waiting_for_a_pipe(monkeypatch: pytest.MonkeyPatch, has_poll: bool) -> None:
    """Catches a chat template that hangs, and select() of a pipe, which Windows refuses."""
    reader, writer = os.pipe()
    if not has_poll:
        become_windows(monkeypatch)
        monkeypatch.setattr(select, "select", None)
    try:
        os.write(writer, b"123")
        assert waiting.read_pipe(reader, 2, 1.0) == b"12"
        assert waiting.read_pipe(reader, 2, 1.0) == b"3"
        assert waiting.read_pipe(reader, 2, 0.01) == b""
    finally:
        os.close(writer)
    assert waiting.read_pipe(reader, 2, 1.0) == b""
    os.close(reader)
