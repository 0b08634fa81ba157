"""Repositories on the Hugging Face hub: their names, which of their files make a model, and fetching those.

`huggingface_hub` does the fetching, so its cache and its settings (HF_ENDPOINT, HF_TOKEN, HF_HOME,
HF_HUB_OFFLINE) hold. It is imported when a repository is needed, and not before.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Event, Thread
from typing import Any

from kukri.dataclass import dataclass, replace
from kukri.errors import DownloadError, FormatError, UnsupportedError, brief_list
from kukri.formats.gguf.reader import gguf_start
from kukri.formats.gguf.split import fitting_mmproj, is_mmproj, part_name, part_of
from kukri.formats.known_models import KNOWN_MODELS
from kukri.host.files import replace_file, stays_inside, write_text

# progress(done_bytes, total_bytes): called now and then during a download; the total is 0 if nobody knows it
Progress = Callable[[int, int], None]
SHORT_NAMES = {model.name: model.repo for model in KNOWN_MODELS}

_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"
_NAME = re.compile(
    rf"(?P<prefix>hf:(?://)?|https://(?:huggingface\.co|hf\.co)/)?(?P<repo>{_PART}/{_PART})/?"
    rf"(?:@(?P<revision>[\w./-]+))?(?::(?P<choice>[\w./-]+))?"
)
_TEXT_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "chat_template.jinja", "chat_template.json"),
    *("preprocessor_config.json", "processor_config.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json", "artifact.metadata"),
)
_MODULE_FILE = re.compile(r"\d+_\w+/(?:config\.json|model\.safetensors)")  # files of sentence-transformers
_SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
_MAX_LISTED = 12
_LOOK_S = 0.5  # between two looks at how much has come
_HEADER_BYTES = 1 << 20  # fetched first of a file whose header is wanted
_MOST_HEADER_BYTES = 1 << 26
_TIMEOUT_S = 30.0
# the weight types that Ollama and llama.cpp prefer, and then the nearest types
_USUAL = ("Q4_K_M", "Q4_K_S", "Q4_K", "IQ4_NL", "IQ4_XS", "Q4_1", "Q4_0", "Q5_K_M", "Q5_K_S", "Q6_K", "Q8_0")


@dataclass(frozen=True)
class RepoName:
    """A repository `org/name`, at a branch, tag or commit; `choice` is a weight type or a file of it."""

    repo: str
    revision: str = "main"
    choice: str | None = None

    def __str__(self) -> str:
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.choice}" if self.choice else "")


def untagged(text: str, known: Iterable[str] = SHORT_NAMES) -> str:
    """Return the known name that a name in Ollama's form stands for, as `qwen3:0.6b` does, else the text."""
    name, _, tag = text.partition(":")
    ends = f"-{tag}"
    found = (one for one in known if one.endswith(ends) and _plain(one.removesuffix(ends)) == _plain(name))
    return next(found, text) if tag else text


def _plain(name: str) -> str:
    return name.replace("-", "")


def parse_name(text: str) -> RepoName | None:
    """The repository that a string names: a short name, `org/repo`, `org/repo:Q4_K_M`, `hf:…`; or None."""
    match = _NAME.fullmatch(SHORT_NAMES.get(untagged(text), text))
    if match is None or match["revision"] == "sha256":  # a mistyped digest
        return None
    # without a prefix, what ends like a file is a file that is not there
    if match["prefix"] is None and match["choice"] is None and text.endswith((".gguf", ".safetensors")):
        return None
    return RepoName(match["repo"], match["revision"] or "main", match["choice"])


def fetch(name: RepoName, progress: Progress | None = None) -> Path:
    """The .gguf file, or the directory with safetensors, of a repository, downloaded if not cached.

    The hub lists the repository's files; if it cannot be reached, those in the cache are used. `progress` is
    called on a thread of its own.
    Raises UnsupportedError when the files leave no choice or several, DownloadError when they cannot be had.
    """
    sizes, commit = _list_files(name, with_sizes=progress is not None)
    chosen = choose(name, sizes)
    absent = [file for file in chosen if not _place(name, file, commit).is_file()]
    with _watched(cache_folder(name) / "blobs", sum(sizes[file] for file in absent), progress):
        paths = [_download(name, file, commit) for file in chosen]
    return paths[0] if chosen[0].endswith(".gguf") else paths[0].parent


def alternatives(name: RepoName) -> list[RepoName]:
    """The names of a repository's models that differ in their weight type, or the name if there is one model.

    First comes a cached one, else the type that Ollama and llama.cpp take, then smaller ones and larger ones.
    Raises UnsupportedError if several models differ in more, and DownloadError.
    """
    sizes, commit = _list_files(name, with_sizes=True)
    models = {
        first: sum(sizes[file] for file in files)
        for first, files in _gguf_models(sorted(sizes)).items()
        if name.choice is None or any(_fits(file, name.choice) for file in files)
    }
    kinds = {_kind(first) for first in models}
    if len(models) < 2 or None in kinds or len(kinds) < len(models) or "config.json" in sizes:
        choose(name, sizes)
        return [name]
    ordered = sorted(models, key=lambda file: -models[file])
    usual = [file for kind in _USUAL for file in ordered if (_kind(file) or "").upper() == kind]
    usual += ordered
    cached = [file for file in usual if _place(name, file, commit).is_file()]
    first = ordered.index([*cached, *usual][0])
    return [replace(name, choice=file) for file in (*ordered[first:], *reversed(ordered[:first]))]


def fetch_headers(name: RepoName, folder: Path) -> Path:
    """The .gguf file or the directory of a repository's model, in a folder, without weights.

    Files of the cache are taken as they are. Of others the beginning is fetched, and a hole stands for the
    weights. Raises what `fetch` raises.
    """
    sizes, commit = _list_files(name, with_sizes=True)
    chosen = choose(name, sizes)
    paths = [_place(name, file, commit) for file in chosen]
    if not all(path.is_file() for path in paths):
        paths = [folder / file for file in chosen]
        for file, path in zip(chosen, paths, strict=True):
            if not is_mmproj(file) and not path.name.startswith("tokenizer"):
                path.parent.mkdir(parents=True, exist_ok=True)
                _fetch_header(name, file, commit, path, sizes[file])
    return paths[0] if chosen[0].endswith(".gguf") else paths[0].parent


def _fetch_header(name: RepoName, file: str, commit: str, path: Path, n_bytes: int) -> None:
    """Writes the beginning of a file up to the weights, and a hole for the rest."""
    from kukri.formats.huggingface.safetensors import safetensors_start

    start = {".gguf": gguf_start, ".safetensors": safetensors_start}.get(path.suffix)
    n_read = min(_MOST_HEADER_BYTES if start is None else _HEADER_BYTES, n_bytes)
    while True:
        with path.open("wb") as written:
            written.write(_beginning(name, file, commit, n_read))
            written.truncate(n_bytes)
        with suppress(FormatError):  # it runs into the hole
            if start is None or start(path) <= n_read:
                return
        if n_read >= min(n_bytes, _MOST_HEADER_BYTES):
            raise DownloadError(f"{name} is damaged at the hub: {file} must be a file of weights")
        n_read = min(4 * n_read, n_bytes)


def _beginning(name: RepoName, file: str, commit: str, n_bytes: int) -> bytes:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        build_hf_headers,
        get_session,
        hf_raise_for_status,
    )

    url, content = hf_hub_url(name.repo, file, revision=commit), bytearray()
    headers = {**build_hf_headers(), "Range": f"bytes=0-{max(n_bytes, 1) - 1}", "Accept-Encoding": "identity"}
    session: Any = get_session()
    is_httpx = hasattr(session, "stream")  # since huggingface_hub 1.0
    get = partial(session.stream, "GET") if is_httpx else partial(session.get, stream=True)
    try:
        with get(url, headers=headers, timeout=_TIMEOUT_S) as got:
            hf_raise_for_status(got)
            for part in got.iter_bytes() if is_httpx else got.iter_content(1 << 16):
                content += part
                if len(content) >= n_bytes:  # a hub that ignores ranges would send all
                    break
    except Exception as error:  # huggingface_hub lets errors of its HTTP library through
        raise _explained(name, error) from None
    return bytes(content[:n_bytes])


def is_offline() -> bool:
    """True if HF_HUB_OFFLINE forbids asking the hub."""
    from huggingface_hub import constants

    return constants.HF_HUB_OFFLINE


@contextmanager
def _watched(folder: Path, n_bytes: int, progress: Progress | None) -> Iterator[None]:
    """Within the block `progress` is told how much has come into a folder, where `n_bytes` are to come.

    Looking there serves every version of huggingface_hub, whichever way it downloads.
    """
    if progress is None:
        yield
        return
    before, is_over = _folder_bytes(folder), Event()

    def watch() -> None:
        while not is_over.wait(_LOOK_S):
            n_come = max(0, _folder_bytes(folder) - before)
            progress(min(n_come, n_bytes) if n_bytes else n_come, n_bytes)

    thread = Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _folder_bytes(folder: Path) -> int:
    with suppress(OSError):
        return sum(file.stat().st_size for file in folder.iterdir())
    return 0


def choose(name: RepoName, files: Iterable[str]) -> list[str]:
    """The files to fetch, the first of them the one to open or config.json. Raises UnsupportedError.

    A GGUF model comes with its encoder of images, if there is one in its folder.
    """
    files = sorted(files)
    if name.choice is None and "config.json" in files:
        weights = ["model.safetensors"] if "model.safetensors" in files else _sharded(files)
        if weights:
            modules = filter(_MODULE_FILE.fullmatch, files) if "modules.json" in files else ()
            return [*(file for file in _TEXT_FILES if file in files), *modules, *weights]
    models = _gguf_models(files)
    if not models:
        raise UnsupportedError(f"a supported .gguf file or model.safetensors was not found in {name.repo}")
    fitting = [
        first
        for first, parts in models.items()
        if name.choice is None or any(_fits(part, name.choice) for part in parts)
    ]
    if len(fitting) == 1:
        folder, slash, model = fitting[0].rpartition("/")
        neighbors = [file.removeprefix(folder + slash) for file in files if file.rpartition("/")[0] == folder]
        encoder = fitting_mmproj(model, neighbors)
        return [*_complete(name, models[fitting[0]]), *([folder + slash + encoder] if encoder else [])]
    problem = "holds several models" if fitting else f"has no {name.choice}"
    raise UnsupportedError(f"{name} {problem}: choose one of {_choices(name, fitting or list(models))}")


def _complete(name: RepoName, files: list[str]) -> list[str]:
    """The files of a model, all of them there. Raises UnsupportedError if parts of a split one are not."""
    split = part_of(files[0])
    if split is not None:
        stem, _, count = split
        wanted = (part_name(stem, number, count) for number in range(1, count + 1))
        absent = next((file for file in wanted if file not in files), None)
        if absent is not None:
            raise UnsupportedError(f"{name} is incomplete: its part {absent} was not found")
    return files


def _sharded(files: list[str]) -> list[str]:
    index = "model.safetensors.index.json"
    return [index, *filter(_SHARD.fullmatch, files)] if index in files else []


def _gguf_models(files: list[str]) -> dict[str, list[str]]:
    """First file -> all files of each GGUF model; projectors for images are not models."""
    models: dict[str, list[str]] = {}
    for file in files:
        if file.endswith(".gguf") and not is_mmproj(file):
            split = part_of(file)
            models.setdefault(part_name(split[0], 1, split[2]) if split else file, []).append(file)
    return models


def _fits(file: str, choice: str) -> bool:
    """True if the choice is the file's name, or stands in it between separators: Q4_K is not in Q4_K_M."""
    if choice.endswith(".gguf"):
        return choice in (file, file.rpartition("/")[2])
    return re.search(rf"(?:^|[-./]){re.escape(choice)}(?=[-./])", file, re.IGNORECASE) is not None


def _choices(name: RepoName, files: list[str]) -> str:
    """The possible names after the colon: the weight type if it tells the files apart, else the file."""
    kinds = [_kind(file) for file in files]
    shown = [
        kind if kind and kinds.count(kind) == 1 else file.rpartition("/")[2]
        for kind, file in zip(kinds, files, strict=True)
    ]
    return brief_list([f"{name.repo}:{choice}" for choice in shown], _MAX_LISTED)


def _kind(file: str) -> str | None:
    found = re.findall(r"(?<=[-./])(?:I?Q\d\w*|B?F16|F32)(?=[-./])", file, re.IGNORECASE)
    return found[-1] if found else None


def _list_files(name: RepoName, *, with_sizes: bool) -> tuple[Mapping[str, int], str]:
    """Every file of the repository with its bytes, 0 if unknown, and the commit.

    They come from the cache if the hub cannot be reached.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=with_sizes)
    except Exception as error:  # huggingface_hub lets errors of its HTTP library through
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else 503
        if status < 500:
            raise _explained(name, error) from None
        commit = cached_commit(name)
        if commit is None:
            raise _explained(name, error) from None
        return dict.fromkeys(files_in(cache_folder(name) / "snapshots" / commit), 0), commit
    sizes = {one.rfilename: one.size or 0 for one in info.siblings or []}
    safe = {file: n_bytes for file, n_bytes in sizes.items() if stays_inside(file)}
    return safe, info.sha or name.revision


def files_in(snapshot: Path) -> list[str]:
    """The files of a cached commit, by their paths in the repository."""
    return [path.relative_to(snapshot).as_posix() for path in snapshot.rglob("*") if path.is_file()]


def cache_folder(name: RepoName) -> Path:
    """The folder of a repository in huggingface_hub's cache, there or not."""
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"


def _place(name: RepoName, file: str, commit: str) -> Path:
    """Where the cache has a file of a commit, if it has it."""
    return cache_folder(name) / "snapshots" / commit / file


def cached_commit(name: RepoName) -> str | None:
    """The commit that the cache last saw the revision at, if it holds that."""
    folder = cache_folder(name)
    try:
        commit = (folder / "refs" / name.revision).read_text("utf-8").strip()
    except OSError:
        commit = name.revision
    is_commit = re.fullmatch(r"[0-9a-f]{40}", commit) is not None
    return commit if is_commit and (folder / "snapshots" / commit).is_dir() else None


def _download(name: RepoName, file: str, commit: str) -> Path:
    from huggingface_hub import hf_hub_download

    cached = _place(name, file, commit)
    if cached.is_file():
        return cached
    try:
        path = Path(hf_hub_download(name.repo, file, revision=commit))
    except Exception as error:  # huggingface_hub lets errors of its HTTP library through
        raise _explained(name, error) from None
    _remember(name, commit)
    return path


def _remember(name: RepoName, commit: str) -> None:
    """Notes the branch's commit in the cache, as `huggingface_hub` does, to be found without the hub."""
    if name.revision != commit and re.fullmatch(r"[\w.-]+", name.revision):
        ref = cache_folder(name) / "refs" / name.revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        fresh = ref.with_name(f".{ref.name}.{os.getpid()}")
        write_text(fresh, commit)
        replace_file(fresh, ref)  # another process may be reading it


def _explained(name: RepoName, error: Exception) -> DownloadError:
    """The error as one line that says what to do."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub, reason = constants.ENDPOINT, " ".join(str(error).split())[:200] or type(error).__name__
    if isinstance(error, GatedRepoError):
        return DownloadError(
            f"{name.repo} is gated: accept its terms at {hub}/{name.repo}, then run `hf auth login` "
            "or set HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return DownloadError(
            f"the repository {name.repo} or its file was not found at {hub}, or is private: check the "
            "name, or run `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, RevisionNotFoundError):
        return DownloadError(f"the revision {name.revision!r} of {name.repo} was not found")
    if isinstance(error, EntryNotFoundError):
        return DownloadError(f"{name.repo} is incomplete at {hub}: {reason}")
    if isinstance(error, HfHubHTTPError):
        return DownloadError(f"{hub} refused to give {name.repo} ({reason}): try again later")
    offline = os.environ.get("HF_HUB_OFFLINE")
    way_out = "unset HF_HUB_OFFLINE" if offline else "check the network and HF_ENDPOINT"
    return DownloadError(
        f"cannot fetch {name.repo} from {hub} and it is not in the cache ({reason}): {way_out}, "
        "or give the path of a model"
    )
