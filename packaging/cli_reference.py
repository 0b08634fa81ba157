"""Writes docs/reference/cli.md from the commands' help, and the options of a model in configuration.md.

`python packaging/cli_reference.py`; tests/test_docs_site.py fails while a page is not what this writes.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer.main

from kukri.cli import app
from kukri.opening.model_options import option_fields
from kukri.opening.option_fields import choices, flag_of, option_facts
from kukri.terminal.errors import HEADINGS

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
MARKS = ("<!-- options of a model -->\n", "<!-- end -->\n")
_WIDTH = 80
_HEAD = """# Commands

What `kukri COMMAND --help` prints, but that an option of several commands is described at the first of them.
`kukri --install-completion` has the shell complete commands and options.
An error exits with the status 2; [errors](errors.md#on-the-command-line) has its form and the other statuses.
This page is written by [`packaging/cli_reference.py`](../../packaging/cli_reference.py).
"""
# an option of a help text with the lines that describe it
_ENTRY = re.compile(r"^  -.*\n(?:   .*\n)*", re.M)


def cli_page() -> str:
    """The page of all commands, under the headings of `kukri --help`."""
    group: Any = typer.main.get_command(app)
    top = group.context_class(group, info_name="kukri", terminal_width=_WIDTH)
    sections = [_HEAD]
    described: dict[str, str] = {}  # the command at which an option is described, by the words of its help
    for heading, names in HEADINGS.items():
        sections.append(f"## {heading}\n")
        for name in names:
            for path, text in _helps(group.commands[name], name, top):
                sections.append(f"### {path}\n\n```\n{_shortened(path, text, described)}```\n")
    return "\n".join(sections)


def _shortened(path: str, text: str, described: dict[str, str]) -> str:
    """The help of a command that names options of commands before it, and describes the rest."""
    as_in: dict[str, list[str]] = {}

    def kept(entry: re.Match[str]) -> str:
        first = described.setdefault(" ".join(entry[0].split()), path)
        if first == path:
            return entry[0]
        if (name := re.findall(r"--[\w-]+", entry[0])[0]) != "--help":
            as_in.setdefault(first, []).append(name)
        return ""

    own = _ENTRY.sub(kept, text)
    lines = [f"As in {first}: {', '.join(names)}" for first, names in as_in.items()]
    wrapped = [
        textwrap.fill(line, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    ]
    return own + "".join(f"\n{line}\n" for line in wrapped)


def _helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """The path and the help of a command and of those below it."""
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=_WIDTH)
    text = "\n".join(line.rstrip() for line in command.get_help(context).splitlines())
    yield context.command_path, f"{text}\n"
    for below, one in getattr(command, "commands", {}).items():
        yield from _helps(one, below, context)


def configuration_page(page: str) -> str:
    """The page of the configuration file, with its table of a model's options as they are declared."""
    before, marked = page.split(MARKS[0])
    return before + MARKS[0] + _option_table() + MARKS[1] + marked.split(MARKS[1])[1]


def _option_table() -> str:
    rows = ["| key | values | |", "| --- | --- | --- |"]
    for one in option_fields().values():
        if flag := flag_of(one):
            names = ", ".join(choices(one)) or option_facts(one).metavar or "true, false"
            values = 'a table, `{name = "path"}`' if option_facts(one).repeats else names
            rows.append(f"| `{flag.removeprefix('--')}` | {values} | {option_facts(one).help} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    """Writes both pages."""
    configuration = REFERENCE / "configuration.md"
    (REFERENCE / "cli.md").write_text(cli_page(), encoding="utf-8")
    configuration.write_text(configuration_page(configuration.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
