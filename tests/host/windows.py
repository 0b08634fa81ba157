"""This system as Windows is: names are lacking, and a file that is open cannot be deleted."""

from __future__ import annotations

import mmap
import os
import select
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

# What typeshed says that Windows lacks, of what kukri uses
LACKING: dict[Any, tuple[str, ...]] = {
    os: (
        *(
            "fork",
            "getppid",
            "killpg",
            "nice",
            "setpriority",
            "wait4",
            "sysconf",
            "geteuid",
            "getuid",
            "fchmod",
        ),
        *("sched_getaffinity", "O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_DIRECTORY", "PRIO_PROCESS"),
    ),
    signal: ("SIGHUP", "SIGKILL", "SIGALRM", "setitimer", "ITIMER_PROF"),
    socket: ("AF_UNIX", "MSG_DONTWAIT"),
    select: ("poll", "POLLIN", "POLLOUT", "POLLRDHUP"),
    mmap: ("MAP_PRIVATE", "MAP_ANONYMOUS", "PROT_READ", "PROT_WRITE", "PROT_EXEC", "MADV_DONTNEED"),
}
MODULES = ("fcntl", "resource", "termios", "readline")


def become_windows(patch: pytest.MonkeyPatch) -> None:
    """Take away, until the patch is undone, what Windows lacks."""
    patch.setattr(sys, "platform", "win32")
    for module, names in LACKING.items():
        for name in names:
            patch.delattr(module, name)
    for module in MODULES:
        patch.setitem(sys.modules, module, None)


def keep_open_files(patch: pytest.MonkeyPatch) -> None:
    """Refuse, as Windows does, to replace, rename or delete a file that this process has open or mapped."""

    def refuse(call: Any, n_paths: int) -> Any:
        def called(*paths: Any, **options: Any) -> Any:
            folder = options.get("dir_fd")
            for path in paths[:n_paths]:
                full = Path(f"/proc/self/fd/{folder}").resolve() / path if folder is not None else Path(path)
                if is_open(full.parent.resolve() / full.name):
                    raise InUseError(13, "it is being used by another process", os.fspath(path))
            return call(*paths, **options)

        return called

    for name, n_paths in (("replace", 2), ("rename", 2), ("unlink", 1), ("remove", 1), ("rmdir", 1)):
        patch.setattr(os, name, refuse(getattr(os, name), n_paths))


class InUseError(PermissionError):
    """The error of Windows for a file that is open."""

    winerror = 32


def is_open(path: Path) -> bool:
    """Return whether this process has a file open or mapped, or one below a directory."""
    found = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if is_link(fd)]
    maps = Path("/proc/self/maps").read_text("utf-8").splitlines()
    found += [line.split(maxsplit=5)[5] for line in maps if line.count("/")]
    return any(one == str(path) or (one.startswith(f"{path}/") and path.is_dir()) for one in found)


def is_link(fd: str) -> bool:
    """Return whether a descriptor is still open and leads to a file: listing them opened one."""
    return os.path.islink(f"/proc/self/fd/{fd}")
