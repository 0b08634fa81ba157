"""Killed processes and full disks: nothing half-written under a final name, and the next run is right.

`pytest -m slow tests/test_crashes.py` tries each 30 times. Saved prefixes and downloads have such tests
next to their other ones (tests/engine/test_saved_prefixes.py, tests/formats/test_hub.py).
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiny_gguf import tiny_config, write_tiny

TRIES = [2, pytest.param(30, marks=pytest.mark.slow)]

# each does its work over and over, and says when it begins
QUANTIZE = """
import sys
from pathlib import Path
from kukri.terminal.convert import quantized_file

def work(source, target):
    quantized_file(source, target, "Q8_0", None)
"""
CONVERT = """
import shutil, sys
from pathlib import Path
from kukri.terminal.convert import convert_to_directory
sys.stdout = sys.stderr

def work(source, target):
    shutil.rmtree(target.with_name("old"), ignore_errors=True)
    if target.exists():
        target.rename(target.with_name("old"))
    convert_to_directory(source, target, None, as_json=True)
"""
BATCH = """
import json, sys
from pathlib import Path
from kukri.calls.batch_files import Results, read_batch

def work(source, target):
    target.unlink(missing_ok=True)
    lines = read_batch(source, "m")
    results = Results(target, lines, "m")
    try:
        for line in lines:
            if line.id not in results:
                response = {"status_code": 200, "request_id": "x", "body": {"text": line.custom_id * 200}}
                results.add(line.result(response))
        results.finish()
    finally:
        results.close()
"""
FOREVER = """
print("ready", file=sys.__stdout__, flush=True)
while True:
    work(Path(sys.argv[1]), Path(sys.argv[2]))
"""
FULL_DISK = """
import random, resource
from kukri.errors import KukriError
rng = random.Random(3)
source, target = Path(sys.argv[1]), Path(sys.argv[2])
before = {path.name for path in target.parent.iterdir()}
for i in range(int(sys.argv[3])):
    # no file may grow beyond this: a write fails as it does on a full disk
    resource.setrlimit(resource.RLIMIT_FSIZE, (rng.randrange(1, int(sys.argv[4])), resource.RLIM_INFINITY))
    try:
        work(source, target)
    except KukriError as error:
        assert "cannot be written" in str(error), error
    else:
        raise AssertionError("it was written whole")
    assert not target.exists()
    left = {path.name for path in target.parent.iterdir()} - before
    assert left <= {f"{target.name}.part"}, left  # a batch's, which continues from there
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
work(source, target)
"""


def write_batch(path: Path) -> Path:
    """A batch of 40 requests."""
    line = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "a"}}
    path.write_text("".join(json.dumps({"custom_id": f"r{i}", **line}) + "\n" for i in range(40)))
    return path


@contextmanager
def at_work(program: str, *arguments: object) -> Iterator[None]:
    """A process at its work, killed at the end of the block."""
    process = subprocess.Popen(
        [sys.executable, "-c", program + FOREVER, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    yield
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()


def once(program: str, *arguments: object) -> None:
    """The same work, to its end."""
    code = program + "\nwork(Path(sys.argv[1]), Path(sys.argv[2]))"
    subprocess.run([sys.executable, "-c", code, *map(str, arguments)], check=True, stderr=subprocess.DEVNULL)


def contents(path: Path) -> dict[str, bytes]:
    """The bytes of a file, or of the files of a directory."""
    files = sorted(path.iterdir()) if path.is_dir() else [path]
    return {file.name if path.is_dir() else "": file.read_bytes() for file in files}


@pytest.fixture(params=["quantize", "convert", "batch"])
def work(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, Path]:
    """(a program, its input)."""
    if request.param == "batch":
        return BATCH, write_batch(tmp_path / "in.jsonl")
    source = write_tiny(tmp_path / "tiny.gguf", tiny_config())
    return (QUANTIZE if request.param == "quantize" else CONVERT), source


@pytest.mark.full(only=["quantize-2"])
@pytest.mark.representative(4)
@pytest.mark.parametrize("n_tries", TRIES)
def test_a_killed_process_leaves_whole_files(work: tuple[str, Path], tmp_path: Path, n_tries: int) -> None:
    """Catches a file that looks finished and is not, and a second run that trips over what the first left."""
    program, source = work
    expected = tmp_path / "expected"
    expected.mkdir()
    once(program, source, expected / "out")
    whole, rng, target = contents(expected / "out"), random.Random(n_tries), tmp_path / "results" / "out"
    target.parent.mkdir()
    for _ in range(n_tries):
        with at_work(program, source, target):
            time.sleep(rng.random() * 0.2)
        if target.exists():
            assert contents(target) == whole
    once(program, source, target)
    assert contents(target) == whole
    assert {path.name for path in target.parent.iterdir()} <= {"out", "old"}, "leftovers of killed processes"


@pytest.mark.full(only=["quantize-2", "convert-2"])
@pytest.mark.parametrize("n_tries", TRIES)
def test_a_full_disk_is_an_error_and_leaves_nothing(
    work: tuple[str, Path], tmp_path: Path, n_tries: int
) -> None:
    """Catches half a file under its final name, leftovers that fill the disk, and a traceback."""
    program, source = work
    once(program, source, tmp_path / "expected")
    whole, target = contents(tmp_path / "expected"), tmp_path / "results" / "out"
    target.parent.mkdir()
    n_bytes = max(map(len, whole.values()))
    command = [sys.executable, "-c", program + FULL_DISK, *map(str, (source, target, n_tries, n_bytes))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert contents(target) == whole
