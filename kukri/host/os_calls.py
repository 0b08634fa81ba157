"""Calls that only some operating systems have, with what is done on the others.

Modules and calls that a system may lack are used only in this folder, and in the program of
`tokenizer/sandbox.py`, which imports nothing of kukri. Windows has no affinity, locks, owners or limits of
this kind; tests take them away, and mypy checks the rest as Windows sees it, but nothing was run there.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import socket

# How a file that others might have put there is opened: no link is followed, no pipe waited for
_CAREFUL = ("O_NOFOLLOW", "O_CLOEXEC", "O_NONBLOCK", "O_BINARY")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_MMAP_BYTES = 1 << 20


def allowed_cores() -> int:
    """Cores that the process' affinity mask allows; all, if the system has none."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def memory_bytes() -> int:
    """Physical memory of the machine."""
    if sys.platform != "win32":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    status = (ctypes.c_uint64 * 8)(64)  # MEMORYSTATUSEX: its size and the load come first, then the total
    ctypes.windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status))
    return int(status[1])


def peak_rss_bytes() -> int:
    """The peak memory of this process, or of an ancestor before it started this process; 0 if unknown."""
    if sys.platform == "win32":
        return 0
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cpu_s(process_id: int) -> float | None:
    """Processor time of another process in seconds; None if unknown."""
    if sys.platform == "win32":
        return None
    try:
        fields = Path(f"/proc/{process_id}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def user_id() -> int | None:
    """The user whom this process acts for; None on systems where a file's owner and mode mean nothing."""
    return os.geteuid() if hasattr(os, "geteuid") else None


def open_carefully(path: Path) -> int:
    """Open a path for reading and return the descriptor. Raises OSError, also if the path is a link."""
    flags = sum(getattr(os, name, 0) for name in _CAREFUL)
    return os.open(path, os.O_RDONLY | flags)


@contextmanager
def locked(path: Path, *, wait: bool = True, create: bool = False) -> Iterator[bool | None]:
    """Holds the lock of a file or directory within the block; the system drops it when the process ends.

    Yields True, or False if another process has it, or None if there are no locks here. Raises OSError if the
    path cannot be opened, which `create` makes a file that only this user may read.
    """
    if sys.platform == "win32":
        yield None
        return
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC if create else os.O_RDONLY
    descriptor = os.open(path, flags, 0o600)
    try:
        yield _lock(descriptor, wait=wait)
    finally:
        os.close(descriptor)


def lock_file(path: Path, *, is_shared: bool = False, wait: bool = True) -> int | None:
    """Lock a file, which is made for this user, and return its descriptor.

    The lock is held as long as any process has the descriptor. None if another process holds the lock, or
    there are no locks here. Raises OSError.
    """
    if sys.platform == "win32":
        return None
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    if _lock(descriptor, is_shared=is_shared, wait=wait):
        return descriptor
    os.close(descriptor)
    return None


def _lock(descriptor: int, *, is_shared: bool = False, wait: bool) -> bool | None:
    """Lock an open file, and return as `locked` yields."""
    if sys.platform == "win32":
        return None
    import fcntl

    kind = fcntl.LOCK_SH if is_shared else fcntl.LOCK_EX
    try:
        fcntl.flock(descriptor, kind if wait else kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without
        return None
    return True


HAS_FORK = sys.platform != "win32"


def fork() -> int:
    """Fork this process, where `HAS_FORK`, and return the child's id, which is 0 in the child."""
    if sys.platform == "win32":
        raise OSError("fork is not supported on this system")
    return os.fork()


def set_priority(process_id: int, niceness: int) -> None:
    """Set the niceness of another process, if the system has it and the process still runs."""
    if sys.platform != "win32":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, process_id, niceness)


def end_child(process_id: int) -> float:
    """Kill a process that `fork` started, and return the processor time that it took, in seconds."""
    if sys.platform == "win32":
        raise OSError("processor time of a child is not supported on this system")
    import signal

    os.kill(process_id, signal.SIGKILL)
    used = os.wait4(process_id, 0)[2]
    return used.ru_utime + used.ru_stime


def unix_socket() -> socket.socket | None:
    """A Unix socket; None on a system without."""
    import socket

    return socket.socket(socket.AF_UNIX) if hasattr(socket, "AF_UNIX") else None


def on_hangup(act: Callable[[], None]) -> None:
    """Have SIGHUP call a function, on systems that send it; others have to start again."""
    import signal

    if hasattr(signal, "SIGHUP"):
        signal.signal(signal.SIGHUP, lambda *_: act())


def sync_directory(directory: Path) -> None:
    """Makes renames in a directory survive a power cut, if directories can be opened."""
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def kill_session(process: subprocess.Popen[bytes]) -> None:
    """Kill a process that was started in a new session, with every process that it started."""
    if sys.platform == "win32":
        process.kill()
        return
    import signal

    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


@cache
def c_library() -> ctypes.CDLL:
    """The C library, and all else that is linked into this process; it sets ctypes' errno."""
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    library.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return library


def return_large_arrays() -> None:
    """Have glibc, where it is the C library, map large arrays one by one.

    Else, after the first that is freed, it puts larger and larger ones into heaps of each thread, whose ends
    it keeps: after a few models these hold more memory than a model.
    """
    for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
        _call_glibc("mallopt", option, _MMAP_BYTES)


def return_free_memory() -> None:
    """Have glibc, where it is the C library, give its free lists back to the system."""
    _call_glibc("malloc_trim", 0)


def _call_glibc(name: str, *arguments: int) -> None:
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            getattr(c_library(), name)(*arguments)


def private_memory(n_bytes: int) -> mmap.mmap:
    """Memory of this process alone, zeroed, which `make_executable` takes."""
    if sys.platform == "win32":
        raise OSError("private memory is not supported on this system")
    return mmap.mmap(-1, n_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)


def make_executable(address: int, n_bytes: int) -> None:
    """Let memory be run, and no longer be written. Raises OSError if the system allows no such memory."""
    if sys.platform == "win32":
        raise OSError("executable memory is not supported on this system")
    if c_library().mprotect(address, n_bytes, mmap.PROT_READ | mmap.PROT_EXEC):
        raise OSError(ctypes.get_errno(), "memory cannot be made executable")
