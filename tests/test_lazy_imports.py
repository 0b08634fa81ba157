"""Imports that wait until a test uses them."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import IMPORTED_TO_COLLECT
from tests.lazy_imports import lazy_imports


def test_collecting_imports_no_expensive_package(request: pytest.FixtureRequest) -> None:
    """Catches an import at the top of a test module that every run of any test pays seconds for."""
    found = request.config.stash[IMPORTED_TO_COLLECT]
    assert not found, f"import them in a function or under lazy_imports(): {found}"


def test_a_name_is_imported_when_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a name that is imported at once, and one that stands for something else."""
    monkeypatch.delitem(sys.modules, "poplib", raising=False)  # a client of another test may have imported it
    with lazy_imports():
        import poplib
        from poplib import POP3, error_proto
    assert "poplib" not in sys.modules
    assert poplib.POP3_PORT == 110
    assert str(error_proto("a text")) == "a text"
    with pytest.raises(ConnectionRefusedError):
        POP3("127.0.0.1", port=1)


def test_a_lazy_import_cannot_be_patched() -> None:
    """Catches a patch that monkeypatch would undo by removing the module's attribute."""
    with lazy_imports():
        import poplib
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AttributeError, match=r"'poplib\.P"):
        patch.setattr(poplib, "POP3_PORT", 2)
