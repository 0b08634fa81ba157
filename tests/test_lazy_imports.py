"""Imports that wait until a test uses them."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import IMPORTED_TO_COLLECT
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import wave
    from wave import Error, Wave_read


def test_collecting_imports_no_expensive_package(request: pytest.FixtureRequest) -> None:
    """Catches an import at the top of a test module that every run of any test pays seconds for."""
    found = request.config.stash[IMPORTED_TO_COLLECT]
    assert not found, f"import them in a function or under lazy_imports(): {found}"


def test_a_name_is_imported_when_it_is_used() -> None:
    """Catches a name that is imported at once, and one that stands for something else."""
    assert "wave" not in sys.modules
    assert wave.WAVE_FORMAT_PCM == 1
    assert str(Error("a text")) == "a text"
    with pytest.raises(FileNotFoundError):
        Wave_read("absent")


def test_a_lazy_import_cannot_be_patched() -> None:
    """Catches a patch that monkeypatch would undo by removing the module's attribute."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AttributeError, match=r"'wave\.W"):
        patch.setattr(wave, "WAVE_FORMAT_PCM", 2)
