"""A program on a pseudo-terminal: what is typed, and what it shows."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import sys
import time


class Terminal:
    """A Python process on a terminal of its own, which knows no colors unless `kind` says so."""

    def __init__(self, *arguments: str, kind: str = "dumb") -> None:
        self.shown, self.marks_pastes = "", False
        self.pid, self.fd = pty.fork()
        if self.pid == 0:  # the child: nothing here may return
            os.environ["TERM"] = kind
            os.execv(sys.executable, [sys.executable, *arguments])

    def type(self, keys: str) -> None:
        """Types as fast as the program reads, and takes what it shows meanwhile."""
        left = keys.encode()
        while left:
            shows, reads, _ = select.select([self.fd], [self.fd], [], 60)
            assert shows or reads, "neither reads nor writes"
            if shows:
                self._read()
            if reads:
                left = left[os.write(self.fd, left[:512]) :]

    def paste(self, text: str) -> None:
        """Pastes as a terminal does: between marks if the program has asked for them."""
        before, after = ("\x1b[200~", "\x1b[201~") if self.marks_pastes else ("", "")
        self.type(before + text.replace("\n", "\r") + after)

    def _read(self) -> None:
        text = os.read(self.fd, 1 << 16).decode(errors="replace").replace("\r", "")
        for asked in re.findall(r"\x1b\[\?2004([hl])", text):
            self.marks_pastes = asked == "h"
        self.shown += text

    def wait_for(self, pattern: str) -> str:
        """The output since the last wait, up to the pattern's end."""
        deadline = time.monotonic() + 60
        while (match := re.search(pattern, self.shown)) is None:
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.shown!r}"
            if not select.select([self.fd], [], [], 0.2)[0]:
                continue
            try:
                self._read()
            except OSError:  # the other end is closed
                raise AssertionError(f"ended before {pattern!r}: {self.shown!r}") from None
        seen, self.shown = self.shown[: match.end()], self.shown[match.end() :]
        return seen

    def exit_code(self) -> int:
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            if select.select([self.fd], [], [], 0.05)[0]:
                try:
                    os.read(self.fd, 1 << 16)
                except OSError:
                    break
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        while pid == 0 and time.monotonic() < deadline:
            time.sleep(0.02)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        assert pid == self.pid, "still running"
        self.pid = 0
        return os.waitstatus_to_exitcode(status)

    def close(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self.fd)
