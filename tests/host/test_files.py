"""Files that somebody has open where Windows would keep them, names that lead out, and ends of lines."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kukri.calls.batch_files import BatchLine, Results
from kukri.formats.unfinished import unfinished
from kukri.host import files
from kukri.host.files import clear, remove_file, remove_tree, replace_file, stays_inside, write_text
from kukri.host.mapped_files import map_file
from kukri.host.private_files import write_private
from tests.host.windows import InUseError, keep_open_files

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="Linux tells what is open")


@pytest.fixture
def on_windows(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files that are open or mapped stay, and nobody waits for long."""
    monkeypatch.setattr(files, "_PATIENCE_S", 0.05)
    monkeypatch.setattr(files, "_STEP_S", 0.001)
    with monkeypatch.context() as patch:  # pytest deletes its own folders later
        patch.setattr(sys, "platform", "win32")
        keep_open_files(patch)
        yield


@pytest.mark.usefixtures("on_windows")
def test_what_is_open_stays(tmp_path: Path) -> None:
    """Catches a fake that refuses nothing, and an error that is hidden."""
    path, other, folder = tmp_path / "a", tmp_path / "b", tmp_path / "folder"
    folder.mkdir()
    for file in (path, other, folder / "c"):
        file.write_bytes(b"12")
    mapped = map_file(folder / "c", "test")
    with open(path, "rb"):
        for act in (
            lambda: remove_file(path),
            lambda: replace_file(other, path),
            lambda: replace_file(path, other),
            lambda: write_private(path, b"3"),
            lambda: remove_tree(folder),
        ):
            with pytest.raises(InUseError):
                act()
        clear(path)
        clear(folder)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a", "b", "folder"]  # nothing is left over
    assert (folder / "c").read_bytes() == b"12"  # a directory goes as a whole or stays as a whole
    del mapped
    remove_tree(folder)
    replace_file(other, path)
    remove_file(path)
    remove_file(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("on_windows")
def test_a_reader_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a cache that fails because a virus scanner, or another process, reads a file for a moment."""
    monkeypatch.setattr(files, "_PATIENCE_S", 10.0)
    path = tmp_path / "a"
    path.write_bytes(b"1")
    file = open(path, "rb")  # noqa: SIM115
    threading.Timer(0.02, file.close).start()
    write_private(path, b"2")
    assert path.read_bytes() == b"2"


@pytest.mark.usefixtures("on_windows")
def test_files_are_closed_before_they_are_replaced(tmp_path: Path) -> None:
    """Catches a batch or a conversion that Windows refuses to finish: it kept its own file open."""
    target = tmp_path / "out.jsonl"
    for _ in range(2):  # the second one finds and replaces the output of the first
        results = Results(target, [BatchLine("1", "a", "/v1/completions")], "model")
        results.add({"id": "1", "custom_id": "a", "error": None, "response": {"status_code": 200}})
        results.finish()
        with unfinished(tmp_path / "model.gguf") as path:
            path.write_bytes(b"1")
    abandoned = tmp_path / ".b.gguf.1.kukri-part"
    abandoned.touch()
    os.utime(abandoned, (0, 0))
    with unfinished(tmp_path / "model.gguf"):
        pass
    assert sorted(file.name for file in tmp_path.iterdir()) == ["model.gguf", "out.jsonl"]


def test_other_errors_are_raised_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a wait for a directory that will never be writable."""
    monkeypatch.setattr(files, "_PATIENCE_S", 1000.0)

    def refuse(*paths: object) -> None:
        raise PermissionError(errno.EACCES, "no")

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(PermissionError):
        replace_file(tmp_path / "a", tmp_path / "b")


def test_text_is_the_same_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches ends of lines and an encoding that depend on the system."""
    monkeypatch.setattr(os, "linesep", "\r\n")
    write_text(tmp_path / "a", "ä\nb\r\n")
    assert (tmp_path / "a").read_bytes() == b"\xc3\xa4\nb\r\n"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("", True),
        ("1_Pooling", True),
        ("a/b/c.d", True),
        ("console.txt", True),
        ("a..b", True),
        ("..", False),
        ("a/../../b", False),
        ("..\\b", False),
        ("/a", False),
        ("\\a", False),
        ("C:\\a", False),
        ("C:a", False),
        ("a/b:stream", False),
        ("a\0b", False),
        ("NUL", False),
        ("a/con.txt", False),
        ("COM1 .gguf", False),
    ],
)
def test_names_that_lead_out(name: str, expected: bool) -> None:
    """Catches a downloaded name that reads or writes another folder on one of the systems."""
    assert stays_inside(name) is expected
