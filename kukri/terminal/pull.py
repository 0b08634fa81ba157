"""`kukri pull`: a model into the cache."""

from __future__ import annotations

import json
from typing import Any

from kukri.formats import hub
from kukri.formats.digests import model_digest, split_digest


def pull_model(name: str | None, *, verify: bool, as_json: bool, with_digest: bool = False) -> None:
    """Fetches a known model if need be and prints where it is, or its name with its digest."""
    path = hub.pull(name, verify=verify)
    plain, _ = split_digest(name or hub.DEFAULT_MODEL)
    digest = model_digest(path) if with_digest else None
    if as_json:
        files = path.rglob("*") if path.is_dir() else [path]
        n_bytes = sum(file.stat().st_size for file in files if file.is_file())
        facts: dict[str, Any] = {"name": plain, "path": str(path), "n_bytes": n_bytes}
        print(json.dumps(facts | ({"digest": f"sha256:{digest}"} if digest else {}), ensure_ascii=False))
    elif digest:
        print(f"{plain}@sha256:{digest}")
    else:
        print(path)
