"""The notice of compiling: when it shows, and how often."""

from __future__ import annotations

import io
import time

import pytest

from kukri.kernels import compile_notice
from kukri.kernels.compile_notice import CompileNotice


class Terminal(io.StringIO):
    """A stderr that is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_notice, "_DELAY_S", 0.02)
    monkeypatch.setattr(CompileNotice, "_is_told", False)


def compile_slowly(seconds: float) -> None:
    with CompileNotice(3) as notice:
        notice.advance()
        time.sleep(seconds)
        notice.advance()


@pytest.mark.usefixtures("fresh")
def test_a_process_says_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line for each model that a process loads."""
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    compile_slowly(0.2)
    compile_slowly(0.2)
    assert stderr.getvalue() == f"{compile_notice._TEXT}: about 10 to 30 seconds\n"


def test_a_short_wait_needs_no_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a warning of 30 seconds before a kernel that takes half of one."""
    stderr = io.StringIO()
    monkeypatch.setattr("sys.stderr", stderr)
    compile_slowly(0.0)
    assert stderr.getvalue() == ""


@pytest.mark.usefixtures("fresh")
def test_a_terminal_shows_progress_and_erases_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a line that stays above the answer, or counts nothing."""
    stderr = Terminal()
    monkeypatch.setattr("sys.stderr", stderr)
    compile_slowly(0.2)
    text = compile_notice._TEXT
    assert stderr.getvalue() == f"\r{text}: 1 of 3\r{text}: 2 of 3\r\x1b[K"


@pytest.mark.usefixtures("fresh")
def test_a_process_without_stderr_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a thread that fails in a service without standard streams."""
    monkeypatch.setattr("sys.stderr", None)
    compile_slowly(0.1)
