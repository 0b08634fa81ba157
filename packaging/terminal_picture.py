"""Draws docs/terminal.svg: a few commands and what they print here. Needs the default model."""

from __future__ import annotations

import io
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

COMMANDS = (
    ["kukri", "run", "What is the capital of France?", "--seed", "1", "--stats"],
    ["kukri", "run", "Write a short poem about rain.", "--seed", "2", "-n", "64"],
    ["kukri", "list"],
)


def main() -> None:
    """Runs the commands and saves the picture."""
    console = Console(record=True, width=108, quiet=False, file=io.StringIO())
    for command in COMMANDS:
        words = " ".join(f'"{word}"' if " " in word else word for word in command)
        console.print(Text.assemble(("$ ", "bold green"), (words, "bold")))
        arguments = [sys.executable, "-m", *command]
        done = subprocess.run(arguments, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
        console.print(Text(done.stdout.rstrip()))
        if done.stderr.strip():
            console.print(Text(done.stderr.rstrip(), style="dim"))
        console.print()
    target = Path(__file__).parent.parent / "docs" / "terminal.svg"
    target.write_text(console.export_svg(title="kukri"), encoding="utf-8")


if __name__ == "__main__":
    main()
