"""Models in the caches: known models in kukri's, repositories in huggingface_hub's. Nothing is downloaded."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from pathlib import Path

from kukri.dataclass import dataclass
from kukri.errors import UnsupportedError
from kukri.formats import hub
from kukri.formats.digests import split_digest
from kukri.formats.repos import (
    RepoName,
    cache_folder,
    cached_commit,
    choose,
    files_in,
    parse_name,
    untagged,
)
from kukri.host.files import remove_file, remove_tree

_FOLDER = re.compile(r"models--(?P<org>[^/]+?)--(?P<name>[^/]+)")
_WEIGHTS = (".gguf", ".safetensors")


@dataclass(frozen=True)
class CachedModel:
    """A model in a cache: the name that commands take, its file or directory, and its size."""

    name: str
    path: Path
    n_bytes: int
    modified_s: float  # since the epoch


def cached_models() -> list[CachedModel]:
    """Every model in the caches, known models first, repositories by name."""
    found = []
    for spec in hub.MODELS.values():
        with suppress(OSError):
            found.append(CachedModel(spec.name, spec.path, _size(spec.path), spec.path.stat().st_mtime))
    for folder in sorted(_hub_cache().glob("models--*")):
        match = _FOLDER.fullmatch(folder.name)
        if match is not None:
            found += _models_of(f"{match['org']}/{match['name']}", folder)
    return found


def cached_path(model: str | None) -> Path:
    """The file or directory of a cached model, or of a path. Raises UnsupportedError if it is not cached."""
    known = hub.DEFAULT_MODEL if model is None else untagged(split_digest(model)[0], hub.MODELS)
    if known in hub.MODELS:
        spec = hub.MODELS[known]
        if spec.path.exists():
            return spec.path
    elif Path(known).expanduser().exists():
        return hub.resolve(known)
    elif (repo := parse_name(known)) is not None and (commit := cached_commit(repo)) is not None:
        snapshot = cache_folder(repo) / "snapshots" / commit
        chosen = snapshot / choose(repo, files_in(snapshot))[0]
        return chosen if chosen.suffix == ".gguf" else chosen.parent
    raise _not_cached(known)


def remove(model: str) -> int:
    """Removes a model from its cache: a known name, a repository, or one `org/repo:type` of it.

    Returns the bytes freed. Raises UnsupportedError if it is not cached; a path is never removed.
    """
    model = untagged(split_digest(model)[0], hub.MODELS)
    if model in hub.MODELS:
        spec = hub.MODELS[model]
        if not spec.path.exists():
            raise _not_cached(model)
        n_bytes = _size(spec.path)
        if spec.files:
            remove_tree(spec.path)
        else:
            remove_file(spec.path)
        return n_bytes
    repo = parse_name(model)
    if repo is None or not cache_folder(repo).is_dir():
        raise _not_cached(model)
    folder = cache_folder(repo)
    if repo.choice is None:
        n_bytes = _size(folder)
        remove_tree(folder)
        return n_bytes
    return _remove_files(repo, folder)


def _remove_files(repo: RepoName, folder: Path) -> int:
    """Removes the files of one choice from every snapshot, and the blobs that they link to."""
    before = _size(folder)
    is_found = False
    for snapshot in (folder / "snapshots").iterdir():
        with suppress(UnsupportedError):
            for file in choose(repo, files_in(snapshot)):
                blob = (snapshot / file).resolve()
                remove_file(snapshot / file)
                if blob.is_relative_to(folder.resolve()):
                    remove_file(blob)
                is_found = True
    if not is_found:
        raise _not_cached(str(repo))
    return before - _size(folder)


def _models_of(name: str, folder: Path) -> list[CachedModel]:
    """The models in a repository's newest snapshot: each .gguf file, and the safetensors as one."""
    snapshots = sorted((folder / "snapshots").glob("*"), key=lambda path: path.stat().st_mtime)
    if not snapshots:
        return []
    found = []
    files = [path for path in sorted(snapshots[-1].rglob("*")) if path.is_file() and path.suffix in _WEIGHTS]
    for path in (path for path in files if path.suffix == ".gguf"):
        stat = path.stat()
        found.append(CachedModel(f"{name}:{path.name}", path, stat.st_size, stat.st_mtime))
    tensors = [path.stat() for path in files if path.suffix == ".safetensors"]
    if tensors:
        n_bytes = sum(stat.st_size for stat in tensors)
        found.append(CachedModel(name, snapshots[-1], n_bytes, max(stat.st_mtime for stat in tensors)))
    return found


def _size(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_file():
        return path.stat().st_size
    paths = (Path(root) / name for root, _, names in os.walk(path) for name in names)
    return sum(each.stat().st_size for each in paths if not each.is_symlink())


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)


def _not_cached(name: str) -> UnsupportedError:
    return UnsupportedError(
        f"{name!r} was not found in the cache: `kukri list` shows what is there, `kukri pull` fetches it"
    )
