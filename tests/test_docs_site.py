"""The documentation's site: every page has its place. `mkdocs build --strict` checks the rest (.ci/docs)."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
ADDED = {"index.md", "api.md", "changelog.md", "contributing.md"}  # by packaging/site.py


def pages(nav: Any) -> list[str]:
    """The files of a navigation, in order."""
    if isinstance(nav, str):
        return [nav]
    entries = nav.values() if isinstance(nav, dict) else nav
    return [page for entry in entries for page in pages(entry)]


def test_every_page_is_in_the_navigation_once() -> None:
    """Catches a page that nobody finds, and a name in the navigation that is gone."""
    found = pages(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    written = {path.name for path in (ROOT / "docs").glob("*.md")}
    assert sorted(found) == sorted(written | ADDED)


def test_every_entry_of_the_log_is_in_its_index_once() -> None:
    """Catches an experiment that nobody finds, and a line of the index whose entry is gone."""
    index = (ROOT / "docs" / "log" / "README.md").read_text()
    listed = re.findall(r"^- \[.*\]\((\d{4}-\d\d-\d\d-[\w-]+\.md)\)$", index, flags=re.MULTILINE)
    written = {path.name for path in (ROOT / "docs" / "log").glob("*.md")} - {"README.md"}
    assert sorted(listed) == sorted(written)
    dates = [name[:10] for name in listed]
    assert dates == sorted(dates, reverse=True)
