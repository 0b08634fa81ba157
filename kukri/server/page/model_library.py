"""The page's library: the models of this server, and the known ones that it could download."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from kukri.dataclass import dataclass, replace
from kukri.errors import KukriError
from kukri.formats import hub
from kukri.formats.headers import read_headers
from kukri.formats.known_models import KNOWN_MODELS, machine_gb
from kukri.host.os_calls import memory_bytes
from kukri.server.models.entry import ModelEntry

_GB = 1e9


@dataclass(frozen=True)
class Shelved:
    """A model of the library: the name to use or download it by, what it is good for, and facts of it."""

    name: str
    good_for: str
    facts: tuple[str, ...]
    needs_gb: int  # memory of the smallest usual machine that runs it as it is downloaded
    is_too_large: bool  # for this machine
    can_chat: bool = True


def models_here(entries: Iterable[ModelEntry]) -> list[Shelved]:
    """The models on this machine, each once, whatever names it has. Reads the headers of their files."""
    good_for = {name: known.good_for for known in KNOWN_MODELS for name in (known.name, known.repo)}
    by_path: dict[Path, Shelved] = {}
    for entry in entries:
        try:
            path = entry.path
            n_bytes = read_headers(path).file_bytes
        except (KukriError, OSError, ValueError):
            continue
        chats = entry.can_chat()
        facts = () if chats else ("not for chats",)
        shelved = _shelved(entry.name, good_for.get(entry.name, ""), n_bytes, "on disk", *facts)
        by_path.setdefault(path, replace(shelved, can_chat=chats))
    return list(by_path.values())


def models_to_download(entries: Iterable[ModelEntry]) -> list[Shelved]:
    """The known models that are not on this machine: those from PyPI, then by the memory they need."""
    here = {name for entry in entries for name in entry.names}
    packaged = [
        _shelved(spec.name, spec.description, spec.wheel_bytes, "to download")
        for spec in hub.MODELS.values()
        if spec.name not in here
    ]
    known = [
        _shelved(
            one.name,
            one.good_for,
            _GB * one.n_gb,
            "to download",
            f"{one.n_billion:g}B parameters",
            one.licence,
        )
        for one in KNOWN_MODELS
        if here.isdisjoint((one.name, one.repo))
    ]
    return [*packaged, *sorted(known, key=lambda model: model.needs_gb)]


def _shelved(name: str, good_for: str, n_bytes: float, where: str, *facts: str) -> Shelved:
    needs_gb = machine_gb(n_bytes / _GB)
    sizes = f"{needs_gb} GB of memory", f"{n_bytes / _GB:.1f} GB {where}"
    return Shelved(name, good_for, (*sizes, *facts), needs_gb, n_bytes > memory_bytes())
