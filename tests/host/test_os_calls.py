"""What only some systems have stands in one folder, and each function there does without it."""

from __future__ import annotations

import ast
import os
import signal
import socket
import sys
from pathlib import Path

import pytest

import kukri
from kukri.errors import ConfigError
from kukri.host import limits, os_calls
from kukri.terminal.serve import bound_unix_socket

PACKAGE = Path(kukri.__file__).parent
# Names that a system may lack: modules, and attributes of os, signal, socket, mmap and their likes
MODULES = {"fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "syslog", "msvcrt", "winreg"}
NAMES = {
    *(
        "fork",
        "killpg",
        "nice",
        "setpriority",
        "getpriority",
        "wait4",
        "sysconf",
        "geteuid",
        "getuid",
        "fchmod",
    ),
    *("setsid", "mkfifo", "uname", "sched_getaffinity", "sched_setaffinity", "O_NOFOLLOW", "O_DIRECTORY"),
    *("AF_UNIX", "SIGHUP", "SIGKILL", "SIGALRM", "SIGPROF", "madvise", "MADV_DONTNEED", "preexec_fn"),
}
# A program of its own that imports nothing of kukri, and limits itself
EXCEPT = {"tokenizer/sandbox.py": {"resource"}}


def used_in(path: Path) -> set[str]:
    """Return the names above that a file uses."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
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


def test_a_system_without_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a worker that does not start where its limits cannot be set."""
    monkeypatch.setitem(sys.modules, "resource", None)
    monkeypatch.delattr(os, "nice")
    limits.lower_priority(5)
    limits.limit_memory(1 << 40)
    limits.limit_cpu(1000)
    assert os_calls.peak_rss_bytes() == 0


def test_a_system_without_the_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a function whose fallback was never run."""
    for name in ("sched_getaffinity", "geteuid", "setpriority", "O_DIRECTORY", "O_NOFOLLOW"):
        monkeypatch.delattr(os, name)
    assert os_calls.allowed_cores() == os.cpu_count()
    assert os_calls.user_id() is None
    os_calls.set_priority(os.getpid(), 0)
    os_calls.sync_directory(Path("no such directory"))
    os.close(os_calls.open_carefully(Path(__file__)))


def test_a_system_without_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches a lock that is claimed to be held where there are none."""
    monkeypatch.setattr(os_calls, "HAS_LOCKS", False)
    with os_calls.locked(tmp_path / "absent") as held:
        assert held is None


def test_a_system_without_sockets_and_signals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Catches an AttributeError in place of an error that says what to leave out."""
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(ConfigError, match="--unix-socket is not supported on this system"):
        bound_unix_socket(tmp_path / "socket")
    monkeypatch.delattr(signal, "SIGHUP")
    os_calls.on_hangup(lambda: None)
    assert not hasattr(signal, "SIGHUP")
