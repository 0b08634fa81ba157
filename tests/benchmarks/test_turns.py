"""peers and neighbour: the order of measurements, and the reports. Engines are replaced by scripted ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import neighbour, peers, turns
from benchmarks.harness import run
from kukri.errors import ConfigError


class FakeWorker:
    """Measures 100, 200, 300 … tokens/s for kukri and 50, 50, 50 … for the other; notes every call."""

    calls: ClassVar[list[tuple[str, str, int]]] = []
    process_id = os.getpid()

    def __init__(
        self, engine: str, path: Any, n_threads: int, context_tokens: int, kv_type: str = "f16"
    ) -> None:
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

    def decode_tokens_per_s(self, n_tokens: int, depth: int = 0) -> float:
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
    monkeypatch.setattr(turns, "SETTLE_S", 0.0)
    monkeypatch.setattr(peers, "import_llama_cpp", lambda: None)
    monkeypatch.setattr(neighbour, "installed_engines", lambda: ("kukri", "llama-cpp-python"))
    return found


@pytest.mark.full
def test_peers_take_turns(calls: list[tuple[str, str, int]], smollm2_path: Path) -> None:
    """Would catch one engine always going first, warm-up counted, or a ratio turned round."""
    report = peers.compare(str(smollm2_path), 2, 3, [7], 5)
    decode = report.tests["tg5"]["llama-cpp-python"]
    assert decode.sides == {
        "kukri": (200.0, 300.0, 400.0),
        "llama-cpp-python": (50.0, 50.0, 50.0),
    }
    assert decode.ratios == (4.0, 6.0, 8.0)
    assert decode.median_ratio == 6.0
    assert report.versions == {"kukri": "1", "llama-cpp-python": "1"}
    decodes = [engine for engine, test, n in calls if (test, n) == ("tg", 5)]
    a, b = "kukri", "llama-cpp-python"
    assert decodes == [a, b, b, a, a, b, a, b]  # the bandwidth, read in turns with them, is the third
    assert [n for _, test, n in calls if test == "pp"] == [7] * 8
    assert [test for _, test, _ in calls[-2:]] == ["closed", "closed"]


@pytest.mark.full
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
    assert report["tests"]["pp3"]["llama-cpp-python"]["ratios"] == [4.0]
    assert report["n_threads"] == 1
    assert (len(printed.out.splitlines()) == 1) is as_json
    assert ("tg2: round 1 of 1" in printed.err) is not as_json


def test_peers_without_llama_cpp_say_how_to_install_it(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Would catch a traceback where the extra is missing."""
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    monkeypatch.setattr(sys, "argv", ["peers"])
    with pytest.raises(SystemExit) as ended:
        run(peers.main)
    assert ended.value.code == 2
    assert capsys.readouterr().err == (
        "error: llama-cpp-python is not installed: run `pip install --group bench`\n"
    )


def test_lengths_beyond_the_context_are_refused(calls: object, smollm2_path: Path) -> None:
    """Would catch a run that fails in the middle, after minutes."""
    with pytest.raises(ConfigError, match="do not fit into the model's context of 8192"):
        peers.compare(str(smollm2_path), 1, 1, [9000], 5)


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
    report = neighbour.disturb(str(smollm2_path), 2, 2, 5, 9, busy=(1, 2))
    kukri = report.tests["tg5@1"]["kukri"]
    assert kukri.sides == {"busy": (400.0, 600.0), "quiet": (300.0, 500.0)}  # the first pair warmed up
    assert kukri.ratios == (4 / 3, 1.2)
    assert report.tests["tg5@1"]["llama-cpp-python"].median_ratio == 1.0
    assert report.tests["pp9@1"]["kukri"].sides == kukri.sides
    assert {n for _, test, n in calls if test == "pp"} == {9}
    assert list(report.tests) == ["tg5@1", "pp9@1", "tg5@2", "pp9@2"]
    assert len(started) == 12 + 2 * 12
    assert all(process.poll() is not None for process in started)


def test_neighbour_runs_without_llama_cpp(
    calls: object, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch the peer being needed for kukri's own figure."""
    monkeypatch.setattr(neighbour, "installed_engines", lambda: ("kukri",))
    monkeypatch.setattr(neighbour, "_START_S", 0.0)
    assert list(neighbour.disturb(str(smollm2_path), 1, 1, 2, 2).tests["tg2@1"]) == ["kukri"]
