"""The versions that CI installs, `.ci/constraints.txt`: pip refuses two versions of one package."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def _name(requirement: str) -> str:
    """Return the package's name in a requirement, as package indexes normalize it."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[=<>!~; @]", requirement, maxsplit=1)[0]).lower()


def test_every_package_has_one_version_and_every_requirement_of_the_tests_has_one():
    lines = (ROOT / ".ci" / "constraints.txt").read_text().splitlines()
    pinned = [_name(line) for line in lines if line and not line.startswith("#")]
    twice = sorted({name for name in pinned if pinned.count(name) > 1})
    assert not twice, f"in .ci/constraints.txt more than once: {twice}"

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names, waiting = set(), ["test"]
    while waiting:
        for requirement in extras[waiting.pop()]:
            if _name(requirement) == "kukri":
                waiting += re.search(r"\[(.*)\]", requirement)[1].split(",")
            else:
                names.add(_name(requirement))
    missing = sorted(names - set(pinned))
    assert not missing, f"without a version in .ci/constraints.txt: {missing}"
