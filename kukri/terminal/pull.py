"""`kukri pull`: a model into the cache."""

from __future__ import annotations

import json

from kukri.formats import hub


def pull_model(name: str | None, *, verify: bool, as_json: bool) -> None:
    """Fetches a known model if need be and prints where it is."""
    path = hub.pull(name, verify=verify)
    if as_json:
        files = path.rglob("*") if path.is_dir() else [path]
        n_bytes = sum(file.stat().st_size for file in files if file.is_file())
        facts = {"name": name or hub.DEFAULT_MODEL, "path": str(path), "n_bytes": n_bytes}
        print(json.dumps(facts, ensure_ascii=False))
    else:
        print(path)
