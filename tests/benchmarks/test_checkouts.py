"""Two checkouts alternating: which package each side runs, and which way ratios go."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import checkouts, turns
from kukri.errors import ConfigError, KukriError

# A package that takes its command's place: its bench reports 10 times the number in the file next to it.
_FAKE = """
import json, pathlib, sys
n = float(pathlib.Path(__file__).with_name("n").read_text())
if sys.argv[1] == "bench":
    speed = {"mean": 10 * n}
    speeds = {"prefill_tokens_per_s": speed, "decode_tokens_per_s": speed}
    print(json.dumps(speeds | {"engine_overhead": n / 100}))
"""
# Its 16 streams of 64 tokens take 1/n of a second.
_FAKE_OFFLINE = """
import pathlib
class Kukri:
    def __init__(self, *args, **options): pass
    def batch_decode_s(self, n_streams, n_prompt, n_tokens):
        return 1 / float(pathlib.Path(__file__).parent.with_name("n").read_text())
    def close(self): pass
"""


def fake_checkout(path: Path, n: float) -> Path:
    (path / "kukri" / "bench").mkdir(parents=True)
    for name, text in (("cli.py", ""), ("__init__.py", ""), ("__main__.py", _FAKE), ("n", str(n))):
        (path / "kukri" / name).write_text(text)
    (path / "kukri" / "bench" / "offline.py").write_text(_FAKE_OFFLINE)
    return path


def test_each_side_runs_its_own_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a checkout measured against itself, and ratios upside down."""
    monkeypatch.setattr(turns, "SETTLE_S", 0)
    monkeypatch.setattr(checkouts, "_HERE", fake_checkout(tmp_path / "here", 3))
    there = fake_checkout(tmp_path / "there", 2)
    report = checkouts.measure(there, Path("m.gguf"), 1, n_prompt=1, n_generate=1, rounds=1)
    for name in ("prefill, tokens/s", "decode, tokens/s"):
        assert report.tests[name].sides == {"here": (30.0,), "there": (20.0,)}
        assert report.tests[name].median_ratio == 1.5
    assert report.tests["engine overhead, % of a step"].sides["here"] == (3.0,)
    assert report.tests["16 streams, tokens/s"].sides == {"here": (3024.0,), "there": (2016.0,)}
    assert report.tests["kukri run, s"].median("there") > 0


def test_what_is_no_checkout_is_refused(tmp_path: Path) -> None:
    """Would catch a comparison with whatever kukri is installed."""
    with pytest.raises(ConfigError, match="no checkout of kukri"):
        checkouts.measure(tmp_path, Path("m.gguf"), 1, n_prompt=1, n_generate=1, rounds=1)


def test_a_failing_checkout_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch rates of a side that did not run."""
    monkeypatch.setattr(turns, "SETTLE_S", 0)
    broken = fake_checkout(tmp_path / "here", 1)
    (broken / "kukri" / "__main__.py").write_text("import sys\nif 'bench' in sys.argv: sys.exit('no model')")
    monkeypatch.setattr(checkouts, "_HERE", broken)
    with pytest.raises(KukriError, match="no model"):
        checkouts.measure(
            fake_checkout(tmp_path / "there", 2), Path("m.gguf"), 1, n_prompt=1, n_generate=1, rounds=1
        )
