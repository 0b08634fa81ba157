"""The index of decisions names each entry of the log, which the repository's history holds."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = sorted((ROOT / "docs" / "decisions").glob("*.md"))
TEXT = "\n".join(page.read_text("utf-8") for page in PAGES)
# The commit that has the log as it was when it left the tree: each page that shows the command says the same.
LOG = re.findall(r"git show (\w{8}):docs/log/", TEXT)[0]
FIRST = "291730e704c4498bc4b3e316f2d1a5688816eb55"  # the project's first commit
NAMES = re.findall(r"`(\d{4}-\d\d-\d\d-[\w-]+)`$", TEXT, re.M)


def git(*words: str) -> subprocess.CompletedProcess[str]:
    """Run git in the checkout; the caller looks at the status."""
    return subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)


@pytest.fixture(scope="module")
def history() -> None:
    """Skip where there is no history to look into: in an archive, in an sdist, or in a shallow clone."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no history")
    if FIRST not in git("rev-list", "--max-parents=0", "HEAD").stdout.split():
        pytest.skip("a shallow clone or an import of the sources, which lacks the history")


@pytest.mark.usefixtures("history")
def test_every_entry_is_found_in_the_history_and_named_once() -> None:
    """Catches an entry that nobody finds again, and a name that the history does not have."""
    found = git("ls-tree", "--name-only", f"{LOG}:docs/log")
    assert found.returncode == 0, found.stderr
    entries = {name.removesuffix(".md") for name in found.stdout.split()} - {"README"}
    assert sorted(NAMES) == sorted(entries)


@pytest.mark.usefixtures("history")
def test_every_commit_that_is_named_exists() -> None:
    """Catches a commit that was amended after its line was written."""
    commits = set(re.findall(r"\b(?:show|grep -l \w+) (\w{8})\b|`([0-9a-f]{8})`", TEXT))
    for name in {LOG, *(one or other for one, other in commits)}:
        assert git("cat-file", "-e", f"{name}^{{commit}}").returncode == 0, f"there is no commit {name}"


def test_every_line_says_what_was_decided() -> None:
    """Catches a line that tells a story and no decision, or names no entry."""
    lines = [
        line for page in PAGES if page.name != "index.md" for line in page.read_text("utf-8").splitlines()
    ]
    items = [line for line in lines if line.startswith("- ")]
    form = r"- \*\*(Kept|Dropped|Measured|Not built)\*\*.*[.:] `[\w:/. -]+`\.?$"
    assert len(items) > 180
    assert not [line for line in items if not re.match(form, line)]
