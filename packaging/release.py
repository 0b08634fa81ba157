"""Writes what release.toml says into every file that tells it: `python packaging/release.py`.

With `--ready [TAG]` it writes nothing, and fails if a release lacks anything: a value of release.toml, a file
that was not written since, or the version in the changelog and the tag. tests/test_release.py fails while a
file is not what this writes.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CLONED = (
    "README.md",
    "CONTRIBUTING.md",
    "docs/install.md",
    "docs/howto/behind-nginx.md",
    "docs/tutorials/first-chat.md",
)
_SOURCE_NAME = "kukri"


def read_facts(path: Path = ROOT / "packaging" / "release.toml") -> dict[str, Any]:
    """Return the values of release.toml: repository, index_name and authors, which may be empty."""
    return tomllib.loads(path.read_text("utf-8"))


def version() -> str:
    """Return kukri's version, which stands in `kukri/__init__.py`."""
    found = re.search(r'^__version__ = "(.*)"$', (ROOT / "kukri" / "__init__.py").read_text("utf-8"), re.M)
    assert found
    return found[1]


def project_fields(facts: dict[str, Any]) -> dict[str, Any]:
    """Return `authors` and `urls` of the project's metadata; neither before they are known."""
    place, fields = facts["repository"], {}
    if facts["authors"]:
        fields["authors"] = facts["authors"]
    if place and facts["index_name"]:  # kukri/host/installed.py takes these addresses as a sign of a release
        fields["urls"] = {"Source": place, "Issues": f"{place}/issues", "Changelog": f"{place}/releases"}
    return fields


def written(facts: dict[str, Any]) -> dict[str, str]:
    """Return each file that tells one of the facts, by path below the root, as it has to be."""
    name = facts["index_name"] or _SOURCE_NAME
    texts = {path: (ROOT / path).read_text("utf-8") for path in CLONED}
    for path, text in texts.items():
        texts[path] = re.sub(r"git clone \S+", f"git clone {facts['repository'] or 'URL'}", text)

    project = (ROOT / "pyproject.toml").read_text("utf-8")
    own_name = re.search(r'^name = "(.*)"$', project, re.M)
    assert own_name
    project = project.replace(f'"{own_name[1]}[', f'"{name}[')
    texts["pyproject.toml"] = project.replace(own_name[0], f'name = "{name}"', 1)

    path = "kukri/host/installed.py"
    text = (ROOT / path).read_text("utf-8")
    texts[path] = re.sub(r'^DISTRIBUTION = ".*?"', f'DISTRIBUTION = "{name}"', text, flags=re.M)

    people = [one["name"] for one in facts["authors"]] or ["The kukri maintainers"]
    text = (ROOT / "CITATION.cff").read_text("utf-8")
    text = re.sub(r"^(  - name: .*\n)+", "".join(f"  - name: {one}\n" for one in people), text, flags=re.M)
    text = re.sub(r"^version: .*$", f"version: {version()}", text, flags=re.M)
    text = re.sub(r"^repository-code: .*\n", "", text, flags=re.M)
    code = f"repository-code: {facts['repository']}\n" if facts["repository"] else ""
    texts["CITATION.cff"] = text.replace("license: ", f"{code}license: ", 1)
    return texts


def lacking(facts: dict[str, Any], tag: str) -> list[str]:
    """Return what a release lacks, a sentence each; `tag` is empty for a trial without a tag."""
    found = [f"packaging/release.toml has no {name}" for name, value in facts.items() if not value]
    for path, text in written(facts).items():
        if (ROOT / path).read_text("utf-8") != text:
            found.append(f"{path} is old: run python packaging/release.py")
    if not re.search(rf"^## {re.escape(version())} ", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.M):
        found.append(f"CHANGELOG.md has no heading for {version()} with a date")
    if tag and tag != f"v{version()}":
        found.append(f"the tag {tag} is not v{version()}, the version in kukri/__init__.py")
    return found


def main() -> None:
    """Write the files, or say what a release lacks."""
    facts = read_facts()
    if sys.argv[1:2] == ["--ready"]:
        sys.exit("\n".join(lacking(facts, "".join(sys.argv[2:]))) or None)
    for path, text in written(facts).items():
        (ROOT / path).write_text(text, "utf-8", newline="\n")


if __name__ == "__main__":
    main()
