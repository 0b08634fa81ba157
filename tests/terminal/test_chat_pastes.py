"""What is pasted into `kukri chat`: on a pseudo-terminal, and in tmux as a person sees it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from ctypes.util import find_library
from pathlib import Path

import pytest

from tests.terminal.echo_chat import digest
from tests.terminal.pty_process import Terminal

SHOTS = os.environ.get("KUKRI_SHOTS")  # a directory for what the screen shows, to be looked at
PROMPT = r"\n(\x1b\[\?2004h)?> "


@pytest.fixture
def chatting(tmp_path, monkeypatch):
    """A function that starts a chat which tells what it was told."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    terminals = []

    def start(*options: str, kind: str = "xterm-256color") -> Terminal:
        terminal = Terminal("-m", "tests.terminal.echo_chat", str(tmp_path), *options, kind=kind)
        terminals.append(terminal)
        terminal.wait_for(PROMPT)
        return terminal

    yield start
    for terminal in terminals:
        terminal.close()


def told(terminal: Terminal) -> str:
    """The message that the chat tells next. It has its next prompt then, so that pastes are marked again."""
    shown = terminal.wait_for(r"\d+ told: (\".*\")\n")
    terminal.wait_for(PROMPT)
    return json.loads(re.search(r"told: (\".*\")\n$", shown)[1])


@pytest.mark.representative(3)
def test_a_paste_is_one_message(chatting, tmp_path):
    """Catches a paste sent line by line, at a prompt and during an answer, and its lines run as commands.

    Escape sequences in it are text, and the history file does not have its lines as entries.
    """
    terminal = chatting("readline")
    terminal.paste("one\ntwo\nthree\n")
    terminal.type("\n")
    assert told(terminal) == "one\ntwo\nthree"
    terminal.paste("/exit\n/reset\n")
    terminal.type(" and more\n")
    assert told(terminal) == "/exit\n/reset\n and more"
    terminal.paste("// a comment\nf()\t\\\n\x1b[A\x1b[2J\x01\x04end")
    terminal.type("\n")
    assert told(terminal) == "// a comment\nf()\t\\\n\x1b[A\x1b[2J\x01\x04end"
    terminal.paste("/system Be kind.\nBe brief.")
    terminal.type("\n")
    terminal.wait_for(r"system: Be kind\.\nBe brief\.\n(\x1b\[\?2004h)?> ")
    terminal.type("wait\n")
    terminal.wait_for("waiting")
    terminal.paste("four\n" + "x" * 5000 + "\nsix")
    assert told(terminal) == "wait"
    terminal.type("\n")
    assert told(terminal) == "four\n" + "x" * 5000 + "\nsix"
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    assert (tmp_path / "chat_history").read_text().split() == ["wait", "/exit"]


@pytest.mark.full
@pytest.mark.parametrize("editing", ["none", "dumb", "libedit"])
def test_a_paste_is_one_message_where_nothing_marks_it(chatting, monkeypatch, editing):
    """Catches the same without GNU readline, and on a terminal that cannot mark pastes."""
    if editing == "libedit":
        library = find_library("edit")
        if sys.platform != "linux" or library is None:
            pytest.skip("needs libedit")
        monkeypatch.setenv("LD_PRELOAD", library)  # Python's module takes its functions from there
    options = [] if editing == "none" else ["readline"]
    terminal = chatting(*options, kind="dumb" if editing == "dumb" else "xterm-256color")
    terminal.type("one\n\ntwo \\\n/exit\nthree")
    time.sleep(0.5)
    terminal.type(" and more\n")
    assert told(terminal) == "one\n\ntwo \\\n/exit\nthree and more"
    terminal.type("wait\n")
    terminal.wait_for("waiting")
    terminal.type("four\nfive\n")
    assert told(terminal) == "wait"
    assert told(terminal) == "four\nfive"
    terminal.type("/help\n/exit\n")
    terminal.wait_for("this list")
    assert terminal.exit_code() == 0


@pytest.mark.full
def test_a_pasted_megabyte_is_one_message(chatting, tmp_path):
    """Catches a paste that is cut, takes minutes, or fills the history file."""
    lines = "\n".join(f"{i} " + "y" * 90 for i in range(10_500))
    terminal = chatting("readline")
    terminal.paste(lines)
    terminal.type("\n")
    assert told(terminal) == digest(lines)
    terminal.paste("z" * 1_000_000)
    terminal.type("\n")
    assert told(terminal) == digest("z" * 1_000_000)
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    assert (tmp_path / "chat_history").read_text() == "/exit\n"


@pytest.mark.full
def test_a_ctrl_c_in_a_paste_drops_the_whole_paste(chatting):
    """Catches the rest of it as messages and commands, which somebody may have hidden in a text."""
    terminal = chatting("readline")
    terminal.paste("one\n\x03\n/exit\n" + "two\n" * 3000)
    terminal.wait_for(r"Ctrl-D or /exit leaves\)" + PROMPT)
    terminal.type("three\n")
    assert "1 told" in terminal.wait_for(r"told: \"three\"")


@pytest.mark.full
@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_paste_on_the_screen_of_tmux(tmp_path, monkeypatch):
    """Catches a screen in disorder after a paste, and one that is not sent when Enter is pressed."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))

    def tmux(*arguments: str, **options) -> str:
        command = ["tmux", "-S", str(tmp_path / "socket"), "-f", "/dev/null", *arguments]
        return subprocess.run(command, capture_output=True, check=True, text=True, **options).stdout

    def wait_for(text: str) -> str:
        deadline = time.monotonic() + 60
        while text not in (screen := tmux("capture-pane", "-p")):
            assert time.monotonic() < deadline, screen
            time.sleep(0.05)
        return screen

    program = [sys.executable, "-m", "tests.terminal.echo_chat", str(tmp_path), "readline"]
    tmux("new-session", "-d", "-x", "80", "-y", "24", *program)
    try:
        wait_for("\n>")
        tmux("load-buffer", "-", input="def f(x):\n    return x\n\nprint(f(1))\n")
        tmux("paste-buffer", "-p")
        screen = wait_for("print(f(1))")
        assert "told" not in screen
        tmux("send-keys", "Enter")
        screen = wait_for('1 told: "def f(x):\\n    return x\\n\\nprint(f(1))"')
        assert screen.count("told") == 1
        assert [line for line in screen.splitlines() if line.strip()][2:6] == [
            "> def f(x):",
            "    return x",
            "print(f(1))",
            '1 told: "def f(x):\\n    return x\\n\\nprint(f(1))"',
        ]
        if SHOTS:
            (Path(SHOTS) / "paste.txt").write_text(screen)
    finally:
        tmux("kill-server")
