"""How this kukri was installed, for texts that tell how to install what it lacks."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

DISTRIBUTION = "kukri"  # the name that pip knows; packaging/release.py writes it
_ROOT = Path(__file__).parents[2]


def needs_package(what: str, package: str | None, *extras: str) -> str:
    """Return the text of an error: `what` needs a package, which extras of kukri install."""
    return f"{what} needs the package {package}: run `{install_command(*extras)}`"


def install_command(*extras: str) -> str:
    """Return the command that adds extras to this kukri: from the directory, file or index it came from.

    Without such a place it names the packages of the extras. kukri's own name is only looked up on an index
    by who has a release from there: before a release, anybody could have taken the name.
    """
    from importlib import metadata  # both are slow to import, and a start does not need them
    from urllib.request import url2pathname

    wanted = f"[{','.join(extras)}]"
    try:
        found = metadata.distribution(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return f'pip install "{_ROOT}{wanted}"'
    origin: dict[str, Any] = json.loads(found.read_text("direct_url.json") or "{}")
    url = str(origin.get("url", ""))
    path = Path(url2pathname(url.removeprefix("file://"))) if url.startswith("file://") else None
    if path is not None and path.exists():
        return f'pip install {"-e " * bool(origin.get("dir_info", {}).get("editable"))}"{path}{wanted}"'
    if url and path is None:
        vcs = origin.get("vcs_info", {})
        place = f"{vcs['vcs']}+{url}@{vcs['commit_id']}" if vcs else url
        return f'pip install "{DISTRIBUTION}{wanted} @ {place}"'
    if not url and found.metadata.get_all("Project-URL"):  # packaging/release.toml was filled in: a release
        return f'pip install "{DISTRIBUTION}{wanted}"'
    named = re.compile(f"extra == ['\"]({'|'.join(extras)})['\"]")
    parts = [one.partition(";") for one in found.requires or []]
    packages = dict.fromkeys(f'"{package.strip()}"' for package, _, marker in parts if named.search(marker))
    return f"pip install {' '.join(packages)}"
