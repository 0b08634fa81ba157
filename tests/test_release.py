"""What a release needs: one file of facts, which every other file tells, and no index before there is one."""

from __future__ import annotations

import re
import runpy
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RELEASE: dict[str, Any] = runpy.run_path(str(ROOT / "packaging" / "release.py"))
NOTHING = {"repository": "", "index_name": "", "authors": []}
FACTS = {
    "repository": "https://host.invalid/k",
    "index_name": "other-name",
    "authors": [{"name": "A. Person", "email": "a@host.invalid"}, {"name": "B. Person"}],
}


def test_the_files_tell_what_the_release_file_says() -> None:
    """Catches an address or a name that was changed in one file alone."""
    for path, text in RELEASE["written"](RELEASE["read_facts"]()).items():
        assert (ROOT / path).read_text("utf-8") == text, f"{path}: run python packaging/release.py"


def test_each_fact_arrives() -> None:
    """Catches a release whose files still say URL, or name a package that is another's."""
    texts = RELEASE["written"](FACTS)
    for path in RELEASE["CLONED"]:
        assert "git clone https://host.invalid/k" in texts[path], path
    project = tomllib.loads(texts["pyproject.toml"])["project"]
    assert project["name"] == "other-name"
    assert "kukri[" not in str(project["optional-dependencies"])
    assert 'DISTRIBUTION = "other-name"' in texts["kukri/host/installed.py"]
    assert "  - name: A. Person\n  - name: B. Person\n" in texts["CITATION.cff"]
    assert "repository-code: https://host.invalid/k\n" in texts["CITATION.cff"]
    fields = RELEASE["project_fields"](FACTS)
    assert fields["authors"] == FACTS["authors"]
    assert fields["urls"]["Source"] == FACTS["repository"]


def test_a_release_lacks_what_is_empty() -> None:
    """Catches a release under a name that nobody registered, and a tag of another version."""
    found = RELEASE["lacking"](NOTHING, "v9.9.9")
    for name in NOTHING:
        assert f"packaging/release.toml has no {name}" in found
    assert any("the tag v9.9.9 is not" in one for one in found)
    assert RELEASE["project_fields"](NOTHING) == {}  # or texts would name a package of the index


@pytest.mark.skipif(all(RELEASE["read_facts"]().values()), reason="the facts of a release are known")
def test_no_release_is_built_without_facts() -> None:
    """Catches a release that starts to build, and fails at its end or not at all."""
    done = subprocess.run([ROOT / ".ci" / "release"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "packaging/release.toml has no index_name" in done.stderr
    assert not done.stdout


def test_no_text_names_a_package_of_the_index_before_a_release() -> None:
    """Catches advice to run the code of whoever took kukri's name; kukri/host/installed.py knows better."""
    if RELEASE["read_facts"]()["index_name"]:
        return
    folders = ("kukri", "docs", "examples", "benchmarks", "packaging", ".github")
    files = [
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".yml", ".yaml", ".toml", ".js", ".html", ".service")
    ]
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for path in (*files, *ROOT.glob("*.md"))
        if "log" not in path.parts and path.name != "installed.py"
        for line in path.read_text("utf-8").splitlines()
        if re.search(r"\b(pip|pipx|uv|uvx)\b[^`]*\b(install|add)\b [^`./]*\bkukri(\[|['\"`\s]|$)", line)
    ]
    assert not found
