"""Writes the pages of commands in docs/reference from their help, and a model's options in configuration.md.

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
from kukri.opening.option_fields import flag_of, option_facts
from kukri.terminal.errors import HEADINGS

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
MARKS = ("<!-- options of a model -->\n", "<!-- end -->\n")
_WIDTH = 80
PAGES = {  # in this order, because a command names what commands before it describe
    "cli.md": ("Commands that answer", ("run", "chat", "embed", "rerank", "transcribe")),
    "cli-serve.md": ("Commands that serve", ("serve", "launch", "batch", "ps", "cluster", "stage")),
    "cli-models.md": ("Commands for models and research", ()),  # all others
}
_HEAD = """
What `kukri COMMAND --help` prints, but that an argument or option of several commands stands at the first.
*--threads to --mmproj* are these two and all that the first command lists between them.
`kukri --install-completion` has the shell complete commands and options.
An error exits with the status 2; [errors](errors.md#on-the-command-line) has its form and the other statuses.

More commands [serve](cli-serve.md), and [work on models](cli-models.md).
[`packaging/cli_reference.py`](../../packaging/cli_reference.py) writes these pages.
"""
_LATER_HEAD = "\n[Commands that answer](cli.md) says how to read this page.\n"
# an argument or option of a help text with the lines that describe it, and a heading without any
_ENTRY = re.compile(r"^  (?:-|[A-Z]+ +[A-Z]).*\n(?:   .*\n)*", re.M)
_NAME = re.compile(r"--[\w-]+|[A-Z]+")
_EMPTY = re.compile(r"^(?:Arguments|Options):\n\n?(?!  )", re.M)
_BELOW = re.compile(r"^Commands:\n(?:  .*\n)+", re.M)  # a group's own commands, which the page describes next
_MIN_RANGE = 3  # options that follow each other are named by the first and the last of them


def cli_pages() -> dict[str, str]:
    """The pages of all commands by their names, commands in the order of `kukri --help`."""
    group: Any = typer.main.get_command(app)
    top = group.context_class(group, info_name="kukri", terminal_width=_WIDTH)
    described: dict[str, dict[str, str]] = {}
    named = [name for _, names in PAGES.values() for name in names]
    others = [name for names in HEADINGS.values() for name in names if name not in named]
    pages: dict[str, str] = {}
    for page, (title, names) in PAGES.items():
        sections = [f"# {title}\n{_LATER_HEAD if pages else _HEAD}"]
        helps = (one for name in names or others for one in _helps(group.commands[name], name, top))
        for path, text in helps:
            sections.append(f"## {path}\n\n```\n{_shortened(path, text, described)}```\n")
        pages[page] = "\n".join(sections)
    return pages


def _shortened(path: str, text: str, described: dict[str, dict[str, str]]) -> str:
    """The help of a command that names what commands before it describe, and describes the rest.

    `described` has each command's own entries, names by the words of their help; this command's are added.
    """
    found: dict[str, list[str]] = {}  # names by the command that describes them

    def kept(entry: re.Match[str]) -> str:
        name, words = _NAME.findall(entry[0])[0], " ".join(entry[0].split())
        for command, entries in described.items():
            if words in entries:
                found.setdefault(command, []).append(name)
                return ""
        own[words] = name
        return entry[0]

    own: dict[str, str] = {}
    text = _EMPTY.sub("", _BELOW.sub("", _ENTRY.sub(kept, text)))
    described[path] = own
    lines = []
    for command, names in found.items():
        if shown := _in_ranges(names, list(described[command].values())):
            lines.append(f"As in {command}: {', '.join(shown)}")
    wrapped = [
        textwrap.fill(line, _WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        for line in lines
    ]
    return text.rstrip("\n") + "\n" + "".join(f"\n{line}\n" for line in wrapped)


def _in_ranges(names: list[str], order: list[str]) -> list[str]:
    """The names in the order of the command that describes them, without --help; "A to B" for many."""
    rows: list[list[str]] = [[]]
    for name in order:
        if name in names and name != "--help":
            rows[-1].append(name)
        elif rows[-1]:
            rows.append([])
    short = (row if len(row) < _MIN_RANGE else [f"{row[0]} to {row[-1]}"] for row in rows)
    return [name for row in short for name in row]


def _helps(command: Any, name: str, parent: Any) -> Iterator[tuple[str, str]]:
    """The path and the help of a command and of those below it."""
    context = command.context_class(command, info_name=name, parent=parent, terminal_width=_WIDTH)
    text = "\n".join(line.rstrip() for line in _help(command, context).splitlines())
    yield context.command_path, f"{text}\n"
    for below, one in getattr(command, "commands", {}).items():
        yield from _helps(one, below, context)


def _help(command: Any, context: Any) -> str:
    """Return the help of a command, with arguments as every version of typer should print them."""
    rows: dict[str, list[tuple[str, str]]] = {"argument": [], "option": []}
    usage = ["[OPTIONS]"]
    for one in command.get_params(context):
        if not (record := one.get_help_record(context)):  # hidden
            continue
        names, text = record
        if one.param_type_name == "argument":
            name = one.metavar or one.name.upper()
            repeats = "..." if one.nargs < 0 else ""
            usage.append((name if one.required else f"[{name}]") + repeats)
            names = name + repeats
        rows[one.param_type_name].append((names, text))
    usage.append(getattr(command, "subcommand_metavar", ""))
    formatter = context.make_formatter()
    formatter.write_usage(context.command_path, " ".join(usage))
    command.format_help_text(context, formatter)
    for kind, named in rows.items():
        if named:
            with formatter.section(f"{kind.capitalize()}s"):
                formatter.write_dl(named)
    return str(formatter.getvalue())


def configuration_page(page: str) -> str:
    """The page of the configuration file, with its list of a model's options as they are declared."""
    before, marked = page.split(MARKS[0])
    return before + MARKS[0] + _option_list() + MARKS[1] + marked.split(MARKS[1])[1]


def _option_list() -> str:
    flags: dict[bool, list[str]] = {False: [], True: []}  # by whether an option takes names and paths
    for one in option_fields().values():
        if flag := flag_of(one):
            flags[option_facts(one).repeats].append(f"`{flag.removeprefix('--')}`")
    tables = 'and, as a table `{name = "path"}`,'
    return f"{', '.join(flags[False])}\n\n{tables} {', '.join(flags[True])}.\n"


def main() -> None:
    """Writes all pages."""
    configuration = REFERENCE / "configuration.md"
    for name, text in cli_pages().items():
        (REFERENCE / name).write_text(text, encoding="utf-8")
    configuration.write_text(configuration_page(configuration.read_text("utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
