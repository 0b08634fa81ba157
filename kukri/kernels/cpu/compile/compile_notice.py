"""The notice that kernels are being compiled, which the first run on a machine waits for."""

from __future__ import annotations

import os
import sys
import threading
from shutil import disk_usage
from types import TracebackType
from typing import ClassVar, Self

from kukri.kernels.cpu.compile.kernel_cache import cache_root

_DELAY_S = 1.0  # shorter compilations need no word
_TEXT = "kukri: compiling kernels for this CPU"
_FEWEST_BYTES = 32 << 20  # that all kernels of a model need in the cache, and more


class CompileNotice:
    """Prints to stderr that `n_kernels` are being compiled, if that takes more than a second.

    A terminal shows a line of progress, erased at the end; elsewhere a process writes one line in its life.
    Use it in a `with` block and call `advance` after each kernel.
    """

    _is_told: ClassVar[bool] = False

    def __init__(self, n_kernels: int) -> None:
        self._n, self._n_done = n_kernels, 0
        self._is_shown = self._has_ended = False
        self._lock = threading.Lock()
        self._timer = threading.Timer(_DELAY_S, self._begin)
        self._timer.daemon = True

    def __enter__(self) -> Self:
        self._timer.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        with self._lock:
            self._has_ended = True
            if self._is_shown:
                self._write("\r\x1b[K")
                if not _is_kept():
                    self._write(f"kukri: kernels are compiled {_how_often()}\n")

    def advance(self) -> None:
        """Counts a compiled kernel."""
        with self._lock:
            self._n_done += 1
            if self._is_shown:
                self._write_progress()

    def _begin(self) -> None:
        with self._lock:
            if self._has_ended:
                return
            if _is_terminal():
                self._is_shown = True
                self._write_progress()
            elif not CompileNotice._is_told:
                CompileNotice._is_told = True
                self._write(f"{_TEXT}: about 10 to 30 seconds, {_how_often()}\n")

    def _write_progress(self) -> None:
        self._write(f"\r{_TEXT}: {self._n_done} of {self._n}")

    def _write(self, text: str) -> None:
        if sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()


def _how_often() -> str:
    if _is_kept():
        return "once"
    return f"at every start: {cache_root()} cannot be written or is full (set $KUKRI_CACHE_DIR to another)"


def _is_kept() -> bool:
    """True if the cache of kernels can be written and has room."""
    folder = cache_root()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return os.access(folder, os.W_OK | os.X_OK) and disk_usage(folder).free > _FEWEST_BYTES


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()
