"""peers and neighbour: who measures when, and what the report says. Engines are replaced by scripted ones."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from kukri.bench import neighbour, peers
from kukri.bench.command import run
from kukri.bench.worker import Worker
from kukri.errors import ConfigError, KukriError, UnsupportedError


class FakeWorker:
    """Measures 100, 200, 300 … tokens/s for kukri and 50, 50, 50 … for the other; notes every call."""

    calls: ClassVar[list[tuple[str, str, int]]] = []

    def __init__(self, engine: str, path: Any, n_threads: int, context_tokens: int) -> None:
        self.engine, self.n = engine, {"pp": 0, "tg": 0}

    def __enter__(self) -> FakeWorker:
        return self

    def __exit__(self, *error: object) -> None:
        self.calls.append((self.engine, "closed", 0))

    def ready(self) -> None:
        pass

    def versions(self) -> dict[str, str]:
        return {self.engine: "1"}

    def prefill_tokens_per_s(self, n_tokens: int) -> float:
        return self._speed("pp", n_tokens)

    def decode_tokens_per_s(self, n_tokens: int) -> float:
        return self._speed("tg", n_tokens)

    def _speed(self, test: str, n_tokens: int) -> float:
        self.calls.append((self.engine, test, n_tokens))
        self.n[test] += 1
        return 100.0 * self.n[test] if self.engine == "kukri" else 50.0


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    found: list[tuple[str, str, int]] = []
    monkeypatch.setattr(FakeWorker, "calls", found)
    for module in (peers, neighbour):
        monkeypatch.setattr(module, "Worker", FakeWorker)
        monkeypatch.setattr(module, "SETTLE_S", 0.0)
        monkeypatch.setattr(module, "import_llama_cpp", lambda: None)
    return found


def test_peers_take_turns(calls: list[tuple[str, str, int]], smollm2_path: Path) -> None:
    """Would catch one engine always going first, warm-up counted, or a ratio turned round."""
    report = peers.compare(str(smollm2_path), 2, 3, 7, 5, silent=True)
    assert report.decode.kukri == (200.0, 300.0, 400.0)
    assert report.decode.llama_cpp == (50.0, 50.0, 50.0)
    assert report.decode.ratios == (4.0, 6.0, 8.0)
    assert report.decode.median_ratio == 6.0
    assert report.versions == {"kukri": "1", "llama-cpp-python": "1"}
    decodes = [engine for engine, test, n in calls if (test, n) == ("tg", 5)]
    a, b = "kukri", "llama-cpp-python"
    assert decodes == [b, a, a, b, b, a, a, b]
    assert [n for _, test, n in calls if test == "pp"] == [7] * 8
    assert [test for _, test, _ in calls[-2:]] == ["closed", "closed"]


@pytest.mark.parametrize("as_json", [True, False])
def test_peers_print_json_last(
    calls: object, smollm2_path: Path, as_json: bool, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Would catch anything after the JSON object, or before it with --json."""
    arguments = ["peers", "-m", str(smollm2_path), "-t", "1", "-r", "1", "-p", "3", "-n", "2"]
    monkeypatch.setattr(sys, "argv", arguments + ["--json"] * as_json)
    peers.main()
    printed = capsys.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report["prefill"]["ratios"] == [4.0]
    assert report["n_threads"] == 1
    assert (len(printed.out.splitlines()) == 1) is as_json
    assert ("round 1 of 1" in printed.err) is not as_json


def test_peers_without_llama_cpp_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Would catch a traceback where the extra is missing."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(sys, "argv", ["peers"])
    with pytest.raises(SystemExit) as ended:
        run(peers.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: llama-cpp-python is not installed: run `pip install 'kukri[bench]'`\n"
    )


def test_lengths_beyond_the_context_are_refused(calls: object, smollm2_path: Path) -> None:
    """Would catch a run that fails in the middle, after minutes."""
    with pytest.raises(ConfigError, match="do not fit into the model's context of 8192"):
        peers.compare(str(smollm2_path), 1, 1, 9000, 5, silent=True)


@pytest.mark.parametrize("option", [["-r", "0"], ["-t", "-1"], ["-n", "x"], ["--nothing"]])
def test_wrong_options_end_with_status_2(option: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a count of 0 that divides by zero later."""
    monkeypatch.setattr(sys, "argv", ["peers", *option])
    with pytest.raises(SystemExit) as ended:
        run(peers.main)
    assert ended.value.code == 2


def test_neighbour_pairs_quiet_and_busy(
    calls: list[tuple[str, str, int]], smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch the ratio turned round, or a neighbour that runs on."""
    monkeypatch.setattr(neighbour, "_START_S", 0.0)
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen

    def note(*arguments: Any, **options: Any) -> subprocess.Popen[bytes]:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", note)
    report = neighbour.disturb(str(smollm2_path), 2, 2, 5, silent=True)
    kukri = report.engines["kukri"]
    assert (kukri.quiet, kukri.busy) == ((200.0, 400.0), (300.0, 500.0))  # the first warmed up
    assert kukri.ratios == (1.5, 1.25)
    assert report.engines["llama-cpp-python"].median_ratio == 1.0
    assert len(started) == 4
    assert all(process.poll() is not None for process in started)


def test_neighbour_runs_without_llama_cpp(
    calls: object, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch the peer being needed for kukri's own figure."""

    def missing() -> None:
        raise UnsupportedError("llama-cpp-python is not installed")

    monkeypatch.setattr(neighbour, "import_llama_cpp", missing)
    monkeypatch.setattr(neighbour, "_START_S", 0.0)
    assert list(neighbour.disturb(str(smollm2_path), 1, 1, 2, silent=True).engines) == ["kukri"]


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
