"""The harness of the experiments: rounds, ratios, workers, servers."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from benchmarks import turns
from benchmarks.harness import Comparison, Worker, installed_engines, served_url
from kukri.errors import KukriError


def test_a_comparison_is_of_rounds_not_of_medians() -> None:
    """Would catch the ratio of two medians, which mixes rounds, or sides swapped in the table."""
    found = Comparison.of(("a", "b"), [(1.0, 2.0), (6.0, 3.0), (9.0, 9.0)])
    assert found.sides == {"a": (1.0, 6.0, 9.0), "b": (2.0, 3.0, 9.0)}
    assert found.ratios == (0.5, 2.0, 1.0)
    assert (found.median("a"), found.median("b"), found.median_ratio) == (6.0, 3.0, 1.0)
    assert found.table("t").rows[-1] == ["median", "6.0", "3.0", "1.00"]


def test_rounds_take_turns_and_the_first_warms_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch one side always going first, results in the order of calls, or the warm-up counted."""
    monkeypatch.setattr(turns, "SETTLE_S", 0.0)
    calls: list[str] = []
    said: list[str] = []

    def measure(name: str) -> str:
        calls.append(name)
        return f"{name}{calls.count(name)}"

    found = turns.in_turns([lambda: measure("a"), lambda: measure("b"), lambda: measure("c")], 2, said.append)
    assert found == [("a2", "b2", "c2"), ("a3", "b3", "c3")]
    assert "".join(calls) == "abcbcacab"
    assert said == ["warming up", "round 1 of 2", "round 2 of 2"]
    assert turns.in_turns([lambda: measure("a")], 1, said.append, [lambda: measure("w")]) == [("a4",)]
    assert "".join(calls) == "abcbcacabwa"


def test_engines_without_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch an optional peer that is needed."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    assert installed_engines() == ("kukri",)


def test_a_server_is_found_after_what_else_it_says() -> None:
    """Catches a bench that gives up where the server compiles its kernels first."""
    said = ["kukri: compiling kernels\n", "serving a on http://127.0.0.1:4321/v1, a page at …\n", "more\n"]
    stderr = io.StringIO("".join(said))
    assert served_url(stderr) == "http://127.0.0.1:4321"
    assert stderr.read() == "more\n"
    with pytest.raises(KukriError, match="no such file"):
        served_url(io.StringIO("error: no such file\n"))


@pytest.mark.full
def test_a_worker_measures_and_ends(smollm2_path: Path) -> None:
    """Would catch prints of an engine that garble the answers, or a process left behind."""
    with Worker("kukri", smollm2_path, 1, 64) as worker:
        worker.ready()
        assert worker.prefill_tokens_per_s(8) > 0
        assert worker.decode_tokens_per_s(2) > 0
        assert "kukri" in worker.versions()
        with pytest.raises(KukriError, match="context holds 64"):
            worker.prefill_tokens_per_s(65)
        assert worker.decode_tokens_per_s(2) > 0
    assert worker._process.returncode == 0


def test_a_worker_passes_its_error_on() -> None:
    """Would catch a missing file reported as a broken pipe."""
    with Worker("kukri", "nowhere.gguf", 1, 64) as worker, pytest.raises(KukriError, match="nowhere"):
        worker.ready()
