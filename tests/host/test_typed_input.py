"""Lines that were typed, which only their user may read."""

from __future__ import annotations

from pathlib import Path

import pytest

from kukri.host.typed_input import line_editing


@pytest.mark.parametrize("library", ["readline", "libedit"])
def test_only_its_user_may_read_the_history(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches prompts that others may read: libedit creates a file that all may, GNU readline does not."""
    readline = pytest.importorskip("readline")
    if library == "libedit":
        monkeypatch.setattr(readline, "write_history_file", lambda path: path.write_text("Hello\n"))
    history = tmp_path / "kept" / "history"
    with line_editing(history, lambda text, state: None):
        readline.add_history("Hello")
    readline.set_completer(None)
    readline.clear_history()
    assert history.stat().st_mode & 0o777 == 0o600
    assert "Hello" in history.read_text()
