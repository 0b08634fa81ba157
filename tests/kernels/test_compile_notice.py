"""What a first run says while kernels are compiled."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from kukri.kernels.cpu.compile import compile_notice
from kukri.kernels.cpu.compile.compile_notice import CompileNotice


@pytest.mark.parametrize(("n_free", "says"), [(1 << 30, ", once"), (0, "at every start: .*KUKRI_CACHE_DIR")])
def test_a_cache_that_keeps_nothing_is_told(
    n_free: int,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Catches a machine that compiles at every start and is told each time that this happens once."""
    monkeypatch.setenv("KUKRI_CACHE_DIR", str(tmp_path / "not" / "there"))
    monkeypatch.setattr(compile_notice, "disk_usage", lambda folder: SimpleNamespace(free=n_free))
    monkeypatch.setattr(CompileNotice, "_is_told", False)
    CompileNotice(1)._begin()
    assert re.search(says, capsys.readouterr().err)
