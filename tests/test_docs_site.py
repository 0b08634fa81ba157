"""The documentation's site: every page has its place. `mkdocs build --strict` checks the rest (.ci/docs)."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from kukri.models.registry import Architectures

ROOT = Path(__file__).parents[1]
ADDED = {"index.md", "api.md", "changelog.md", "contributing.md", "reporting.md"}  # by packaging/site.py


def pages(nav: Any) -> list[str]:
    """The files of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages(entry)]


def test_every_page_is_in_the_navigation_once() -> None:
    """Catches a page that nobody finds, and a name in the navigation that is gone."""
    found = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    docs = ROOT / "docs"
    written = {str(path.relative_to(docs)) for path in docs.rglob("*.md")}
    assert sorted(found) == sorted(written | ADDED)


def test_no_page_is_long() -> None:
    """Catches a page that grows until nobody reads it."""
    docs = ROOT / "docs"
    sizes = {
        path.relative_to(docs).as_posix(): len(path.read_text("utf-8").split()) for path in docs.rglob("*.md")
    }
    assert not {name: n_words for name, n_words in sizes.items() if n_words > 1500}


def test_forty_questions_have_their_answers() -> None:
    """Catches a reader who is sent to a page that says nothing of it, or that has no place."""
    text = (ROOT / "docs" / "questions.md").read_text("utf-8")
    row = re.compile(r"^- (.+\?) \[.+\]\((.+?)(?:#.*)?\): (.+)$", re.M)
    readers = [row.findall(section) for section in text.split("\n## ")[1:]]
    assert [len(questions) for questions in readers] == [10, 10, 10, 10]
    named = set(pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])) | {"../CONTRIBUTING.md"}
    wrong = [
        f"{question}: {page} has no {words}"
        for question, page, words in (one for questions in readers for one in questions)
        if page not in named or words.strip("`") not in (ROOT / "docs" / page).read_text("utf-8")
    ]
    assert not wrong, "\n".join(wrong)


_ANCHOR = re.compile(r"[^\w\- ]")


def anchors_of(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub and the site make them."""
    titles = re.findall(r"^#+ (.+)$", page, re.M)
    titles = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles]
    return {_ANCHOR.sub("", title).strip().replace(" ", "-") for title in titles}


def test_links_lead_somewhere() -> None:
    """Catches a link to a page, a section or a file that was moved, also where the site does not look."""
    wrong = []
    pages = (ROOT / "docs").rglob("*.md")
    for page in (*pages, *ROOT.glob("*.md")):
        text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.S)
        for link in re.findall(r"\]\((?!https?:|mailto:)([^)\s]+)\)", text):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            is_there = target.exists()
            if is_there and anchor and target.suffix == ".md":
                is_there = anchor in anchors_of(target.read_text("utf-8"))
            if not is_there:
                wrong.append(f"{page.relative_to(ROOT)}: {link}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.representative(1)  # imports every architecture
def test_every_architecture_is_in_the_reference_once() -> None:
    """Catches an architecture that no page names, and a row whose name in a file is another."""
    page = (ROOT / "docs" / "formats" / "architectures.md").read_text("utf-8")
    rows = re.findall(r"^\| `(\S+)` \| (?:`(\S+)`|none) \| (?!models \|).+ \|$", page, re.M)
    found = Architectures().values()
    assert sorted(set(rows)) == sorted({(a.hf_type or a.name, a.gguf if a.in_gguf else "") for a in found})
    assert len(rows) > 60


def test_the_reference_is_what_the_commands_say() -> None:
    """Catches an option that was added, removed or described again without its page."""
    written = runpy.run_path(str(ROOT / "packaging" / "cli_reference.py"))
    reference = ROOT / "docs" / "reference"
    configuration = (reference / "configuration.md").read_text("utf-8")
    remedy = "run python packaging/cli_reference.py"
    for name, page in written["cli_pages"]().items():
        assert (reference / name).read_text("utf-8") == page, remedy
    assert configuration == written["configuration_page"](configuration), remedy


@pytest.mark.representative(2)  # makes the OpenAPI document
def test_the_table_of_fields_is_what_the_server_reads() -> None:
    """Catches a field that was added, renamed or refused without its page."""
    written = runpy.run_path(str(ROOT / "packaging" / "field_reference.py"))
    for name, rewritten in written["PAGES"].items():
        page = (ROOT / "docs" / "reference" / name).read_text("utf-8")
        assert page == rewritten(page), "run python packaging/field_reference.py"


def test_every_environment_variable_is_in_the_reference() -> None:
    """Catches a KUKRI_* variable that the code reads and no page names."""
    sources = [*(ROOT / "kukri").rglob("*.py"), ROOT / "hatch_build.py"]
    read = {
        name for path in sources for name in re.findall(r"\bKUKRI_[A-Z_]+[A-Z]\b", path.read_text("utf-8"))
    }
    named = set(re.findall(r"`(KUKRI_\w+)`", (ROOT / "docs/reference/environment.md").read_text("utf-8")))
    assert read == named
    options = (ROOT / "kukri" / "terminal" / "options.py").read_text("utf-8")
    page = (ROOT / "docs/reference/environment.md").read_text("utf-8")
    assert not [name for name in re.findall(r'envvar="(\w+)"', options) if f"`{name}`" not in page]


def test_the_bounds_of_security_name_options_and_tests_that_exist() -> None:
    """Catches a bound whose option was renamed, or whose test is gone, or which has none."""
    text = "".join((ROOT / "docs" / name).read_text("utf-8") for name in ("security.md", "known-faults.md"))
    commands = "".join(path.read_text("utf-8") for path in (ROOT / "docs/reference").glob("cli*.md"))
    lines = [line for line in text.splitlines() if line.startswith("|") and "---" not in line]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    rows = [row for row in rows if row[0] != "what"]
    assert len(rows) > 30
    for what, _, option, test in rows:
        for flag in re.findall(r"--[a-z-]+", option):
            assert re.search(rf"^  {flag}\b", commands, re.M), f"{what}: no command has {flag}"
        assert test, f"{what} has no test"
        for path in re.findall(r"tests/[a-z_/]+\.py", test):
            assert (ROOT / path).exists(), f"{what}: there is no {path}"
        assert test.count("tests/") == len(re.findall(r"`tests/[a-z_/]+\.py`", test)), what
        for names, path in re.findall(r"((?:`test_\w+`(?:, | and )?)+) in `(tests/[a-z_/]+\.py)`", test):
            for name in re.findall(r"test_\w+", names):
                assert f"def {name}(" in (ROOT / path).read_text("utf-8"), f"{what}: {path} has no {name}"


def test_the_docs_name_files_that_exist() -> None:
    """Catches a page that sends a reader to a file that was moved or renamed."""
    others = {"kukri/quant/types/NAME.py", "happy.py", "convert_hf_to_gguf.py", "convert_lora_to_gguf.py"}
    others |= {"kukri/models/NAME.py", "conversion_mapping.py"}  # of transformers
    others |= {"kukri/vision/encoders/NAME.py", "kukri/engine/spans/NAME.py"}
    folders = ("kukri", "tests", "benchmarks", "examples", "packaging")
    sources = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    paths = [path.as_posix() for path in (*sources, *ROOT.glob("*.py"))]
    documents = (ROOT / "docs").rglob("*.md")
    for document in (*documents, *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md"))):
        named = re.findall(r"`(?:\.\./)*([\w/]+\.py)`", document.read_text("utf-8"))
        for name in named:
            is_there = any(path.endswith(f"/{name}") for path in paths)
            assert is_there or name in others, f"{document.name}: there is no {name}"


def test_every_class_of_errors_is_in_the_reference() -> None:
    """Catches an exception that callers meet and no page explains."""
    defined = re.findall(r"^class (\w+)\(", (ROOT / "kukri" / "errors.py").read_text("utf-8"), re.M)
    page = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
    assert not [name for name in defined if f"`{name}`" not in page]


def test_every_error_code_is_in_the_reference() -> None:
    """Catches a code that the server sends and no page explains."""
    codes = {
        code
        for path in (ROOT / "kukri").rglob("*.py")
        for code in re.findall(r'\bcode="([a-z_]+)"', path.read_text("utf-8"))
    }
    page = (ROOT / "docs" / "reference" / "errors.md").read_text("utf-8")
    assert not [code for code in sorted(codes) if f"`{code}`" not in page]
