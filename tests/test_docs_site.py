"""The documentation's site: every page has its place. `mkdocs build --strict` checks the rest (.ci/docs)."""

from __future__ import annotations

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
