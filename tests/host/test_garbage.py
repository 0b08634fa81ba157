"""Searches for garbage while a command starts and a tokenizer is read."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from kukri.formats.gguf.reader import GGUFFile
from kukri.host.garbage import without_collections
from kukri.tokenizer import load_tokenizer

_START = """
import gc, sys
from kukri.__main__ import main
sys.argv = ["kukri", "run", "--help"]
n = sum(one["collections"] for one in gc.get_stats())
try:
    main()
except SystemExit:
    print(sum(one["collections"] for one in gc.get_stats()) - n)
"""


def test_a_command_starts_without_collections() -> None:
    """A threshold that is set when the largest modules are imported already."""
    done = subprocess.run([sys.executable, "-c", _START], capture_output=True, text=True, check=True)
    assert "--temperature" in done.stdout
    assert done.stdout.split()[-1] == "0"


def test_a_tokenizer_is_read_without_collections(smollm2_path: Path) -> None:
    """Merges that start searches through all objects of the process, seventy by Python's own threshold."""
    started = 0

    def note(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        started += phase == "start"

    with GGUFFile(smollm2_path) as file:
        gc.collect()
        gc.callbacks.append(note)
        try:
            load_tokenizer(file)
        finally:
            gc.callbacks.remove(note)
    assert started <= 1  # as it ends, for the objects that it keeps


def test_collections_continue_afterwards() -> None:
    """A collector that stays off after an error, or is switched on where it was off."""

    @without_collections()
    def fail() -> None:
        assert not gc.isenabled()
        raise KeyError

    assert gc.isenabled()
    with pytest.raises(KeyError):
        fail()
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collections():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
