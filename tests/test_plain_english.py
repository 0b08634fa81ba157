"""The English of the package: error messages, log lines and help texts; docstrings, comments and docs."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import kukri

PACKAGE = Path(kukri.__file__).parent
SPEAKERS = {"warn", "warning", "error", "info", "exception", "Option", "Argument", "refused"}
# What people wrote here before, and what they meant.
ACCENTS = {
    r"\b[Bb]ehind\b": "after",
    r"\b[Bb]eside\b": "besides, alongside or next to",
    r"\b(is|are|was|were) none\b(?! (loaded|of|here))": "is not one",
    r"\b([Gg]oes|[Gg]o|went|[Gg]oing) on\b": "continue",
    r"\banew\b": "again",
    r"\bfor ever\b": "forever",
    r"\ban own\b": "one of its own",
    r"\bby turns\b": "alternating",
    r"\bat the earliest\b": "at least … later",
    r"\bso many\b(?! that)": "`n_tokens` tokens, by the number's name",
}
ACCENT = re.compile("|".join(ACCENTS))
# a comment without its noun, and a docstring that begins with a pronoun or without its noun
FRAGMENT = re.compile(r"#:? of\b")
PRONOUN = re.compile(r"(Of|It|Its|They|Their|That|Those|These)\b")
# servers stand behind others, files are left behind, and "None if there is none" is English
ALLOWED = re.compile(
    r"\bbehind (one server|trusted|Serve's)|\bleft behind|\bthere (is|are|was|were) none\b"
    r"|`\d{4}-\d\d-\d\d-[\w-]+`"  # names of entries of the log
)
# Errors whose text tells callers what a subject must be, or that it is not supported, was not found …
FOR_CALLERS = re.compile(r"(Request|Config|Unsupported|NotFound|Forbidden|Hook|MissingKernel)Error$")
VERB = re.compile(
    r"\b(must|cannot|requires?|(is|are) required|(is|are) (not )?supported|(does|do) not support"
    r"|(was|were) not found|(is|are) disabled|already|failed)\b"
)
# a name as code has it: in quotes, in backticks, in brackets after a flag, or before one
CODE = re.compile(r"`[^`]*`|\([a-z_]+(, [a-z_]+)*\)|\b[a-z_]+ \(--[a-z-]+\)")
BARE_NAME = re.compile(
    r"(?<![\w'\"./([=<@$%…-])[a-z][a-z0-9]*(?:_[a-z][a-z0-9]*)+(?![\w'\"(=/:\]…-])(?!\.\w)"
)
NO_SENTENCE = re.compile(
    r"\bkukri (runs|reads|knows|applies|does|has)\b|\bthat of\b|\bthose (that|of)\b|\bthere (is|are) no\b"
    r"|\btakes no\b|\bneeds?\b|\b(is|are) no\b|\balone\b"
)
# what happened, for which there is no other verb, and how to install a package
EXCEPTIONS = re.compile(
    r"is damaged$| raised …: …$|the file is newer, or damaged$|: choose one of …$|, or leave it out$"
    r"|^…delete some| answered|^kernels were not compiled|pip install"
)


def nodes_of(source: str) -> list[ast.AST]:
    """Each node of a source's tree."""
    return [*ast.walk(ast.parse(source))]


def template(node: ast.expr) -> str:
    """The text of a string or an f-string, with … for each value; '' for anything else."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    values = node.values if isinstance(node, ast.JoinedStr) else []
    return "".join(
        str(part.value)
        if isinstance(part, ast.Constant)
        else "'…'"
        if isinstance(part, ast.FormattedValue) and part.conversion == ord("r")
        else "…"
        for part in values
    )


def raised(call: ast.Call) -> tuple[str, str]:
    """The class and the template of an error; of RequestError.of(field, problem) too."""
    function = call.func
    name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
    if name == "of" and isinstance(function, ast.Attribute) and len(call.args) > 1:
        return getattr(function.value, "id", ""), f"'…' {template(call.args[1])}"
    return name, template(call.args[0]) if name.endswith("Error") else ""


def misshapen(nodes: Iterable[ast.AST]) -> list[str]:
    """Errors whose text has no verb of the rule, a name without quotes, two colons, or no plain words."""
    found = []
    for node in nodes:
        if not (isinstance(node, ast.Call) and node.args):
            continue
        name, text = raised(node)
        if " " not in text or EXCEPTIONS.search(text):
            continue
        param = next(
            (k.value.value for k in node.keywords if k.arg == "param" and hasattr(k.value, "value")), ""
        )
        has_verb_in_value = text.endswith("…") and len(text.split()) <= 6
        bare = BARE_NAME.search(CODE.sub("", text))
        if FOR_CALLERS.search(name) and not (VERB.search(text) or has_verb_in_value):
            found.append(f"line {node.lineno}: {text!r} (say what must be, is required, is not supported …)")
        if bare or (param and re.match(rf"{re.escape(str(param))} (?!')", text)):
            found.append(f"line {node.lineno}: {text!r} (put {bare[0] if bare else param} in quotes)")
        if wrong := NO_SENTENCE.search(text):
            found.append(f"line {node.lineno}: {text!r} (say {wrong[0]!r} otherwise)")
        if len(re.findall(r'(?<!"): (?!…$)', re.sub(r"^…[^:]*: ", "", text))) > 1:
            found.append(f"line {node.lineno}: {text!r} (one cause and one remedy: one colon)")
    return found


@pytest.mark.parametrize(
    "source",
    [
        'raise RequestError("top_n must be at least 1", param="top_n")',
        'raise RequestError("mode must be all", param="mode")',
        'raise RequestError("this goes with another max_tokens, which must be")',
        'raise RequestError("give one of them")',
        'raise RequestError.of("top_n", f"is {n} and negative, not at least 1, here")',
        'raise UnsupportedError(f"is {kind}: kukri runs nothing else, and it must")',
        'raise FormatError(f"has the shape of {name}, not that of a matrix")',
        "raise ConfigError(\"'a' is not supported: it is deprecated: use 'b'\")",
    ],
)
def test_a_text_without_the_form_is_found(source: str) -> None:
    """Would catch a check that looks at nothing, or takes everything for an exception."""
    assert misshapen(nodes_of(source))
    assert not misshapen(nodes_of("RequestError(f\"'top_n' must be at least 1, not {n!r}\", param='top_n')"))


def spoken(nodes: Iterable[ast.AST]) -> Iterator[tuple[int, str]]:
    """(line, text) of each string in a `raise`, in a call that raises or logs, and after `help=`."""
    for node in nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            roots: list[ast.AST] = [node.exc]
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            roots = [k.value for k in node.keywords if k.arg == "help"]
            roots += [node] if name in SPEAKERS or name.endswith("Error") else []
        else:
            continue
        for root in roots:
            for part in ast.walk(root):
                if isinstance(part, ast.Constant) and isinstance(part.value, str):
                    yield part.lineno, part.value


def accents(nodes: Iterable[ast.AST]) -> list[str]:
    """What a native speaker would put differently, with its line and a better word."""
    return [
        f"line {line}: {text!r} (say {better})"
        for line, text in spoken(nodes)
        for accent, better in ACCENTS.items()
        if re.search(accent, text)
    ]


@pytest.mark.parametrize(
    "source",
    [
        'raise ConfigError(f"a model of {n} layers takes no draft model and is none")',
        'log.warning("the state behind token %d is lost", n)',
        'typer.Option("--x", help="The file beside the model.")',
        'failed.append(KukriError("an answer cannot go on"))',
    ],
)
def test_accents_are_found(source: str) -> None:
    """Would catch a check that looks at nothing."""
    assert accents(nodes_of(source))


@pytest.mark.representative(4)
def test_what_users_read_has_a_form_and_no_accent() -> None:
    """Catches a field without quotes, "kukri runs X alone", and what is understood at a second look only."""
    found = []
    for file in sorted(PACKAGE.rglob("*.py")):
        nodes = nodes_of(file.read_text(encoding="utf-8"))
        found += [f"{file.relative_to(PACKAGE)}, {one}" for one in (*accents(nodes), *misshapen(nodes))]
    assert not found, "\n".join(found)


def written(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each comment, with its #, and of each docstring.

    Tokens take seconds, so comments are looked for only if what follows a # somewhere is at fault.
    """
    hashes = (line[match.start() :] for line in source.splitlines() for match in re.finditer("#", line))
    if any(map(is_at_fault, hashes)):
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string
    for node in ast.walk(ast.parse(source)):
        has_one = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if has_one and (text := ast.get_docstring(node)):
            yield getattr(node, "lineno", 1), text


def is_at_fault(text: str) -> bool:
    """True if a native speaker would put a comment or docstring differently."""
    return bool(
        FRAGMENT.match(text)
        or PRONOUN.match(text)
        or (ACCENT.search(text) and ACCENT.search(ALLOWED.sub("", text)))
    )


def faults(source: str) -> list[str]:
    """Comments and docstrings that a native speaker would put differently, with their lines."""
    return [f"line {line}: {text!r}" for line, text in written(source) if is_at_fault(text)]


@pytest.mark.parametrize(
    "source",
    [
        "N = 4  # of a page",
        'def f():\n    """Those that are left."""',
        'def f():\n    """The state behind a token."""',
        "x = 1  # a step that goes on",
        'def f(n):\n    """The bytes of so many pages."""',
        "x = 1  # Behind a token the state is saved.",
    ],
)
def test_faults_are_found(source: str) -> None:
    """Would catch a check that reads neither comments nor docstrings, or allows everything."""
    assert faults(source)
    assert not faults('"""None if there is none: files are left behind."""')


@pytest.mark.representative(3)
def test_docstrings_and_comments_are_plain() -> None:
    """Catches "# of a page", of which a reader must guess what, and docstrings without their noun."""
    found = [
        f"{file.relative_to(PACKAGE)}, {one}"
        for file in sorted(PACKAGE.rglob("*.py"))
        for one in faults(file.read_text(encoding="utf-8"))
    ]
    assert not found, "\n".join(found)


def test_docs_have_no_accent() -> None:
    """Catches an accent that readers of the pages stumble over."""
    root = PACKAGE.parent
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    plain = [accent for accent in ACCENTS if "ehind" not in accent]  # a server may stand there
    found = [
        f"{page.relative_to(root)}, line {n}: {match[0]!r}"
        for page in pages
        for n, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1)
        for accent in plain
        if (match := re.search(accent, ALLOWED.sub("", line)))
    ]
    assert not found, "\n".join(found)
