"""docs/adding-a-model.md quotes the files of the architecture that it adds, all of it and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "adding-a-model.md"
QUOTES = re.findall(r"^```python (\S+)\n(.*?)\n```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize(("path", "quote"), QUOTES, ids=lambda value: str(value)[:40].strip())
def test_a_quote_is_in_its_file(path: str, quote: str) -> None:
    """A page that teaches what the code no longer does."""
    assert f"\n{quote}\n" in "\n" + (ROOT / path).read_text()


def test_the_model_is_quoted_whole() -> None:
    """A page that leaves out the hard part."""
    assert len(QUOTES) > 6
    assert (
        dict(QUOTES)["kukri/models/starcoder2.py"]
        == (ROOT / "kukri/models/starcoder2.py").read_text().strip()
    )


@pytest.mark.representative(2)
def test_nothing_is_left_out() -> None:
    """A line that the architecture needs, in the package or a file that is quoted, and that is not shown."""
    quoted: dict[str, set[str]] = {}
    for path, quote in QUOTES:
        quoted.setdefault(path, set()).update(quote.splitlines())
    names = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("kukri/**/*.py")} | quoted.keys()
    for name in names:
        for line in (ROOT / name).read_text().splitlines():
            if re.search(r"starcoder2|mlp\.c_(fc|proj)", line, re.IGNORECASE):
                assert line in quoted.get(name, set()), f"{name}: {line.strip()}"


def test_links_lead_somewhere() -> None:
    """A link to a file that has moved."""
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE.read_text()):
        assert (PAGE.parent / target).exists(), target
