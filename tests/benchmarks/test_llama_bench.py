"""llama-bench programs as peers, with a script in place of one."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import harness, peers, turns
from benchmarks.harness import run
from benchmarks.llama_bench import LlamaBench
from kukri.errors import ConfigError, KukriError

_SCRIPT = """#!{python} -S
import json, sys
given = sys.argv[1:]
with open({log!r}, "a") as log:
    print(json.dumps(given), file=log)
if given == ["--help"]:
    print("usage: llama-bench\\n  -pg <pp,tg>\\n" + {extra!r})
    sys.exit()
{body}
"""
_ANSWERS = 'print("a line of log\\n", json.dumps([{"build_commit": "abc", "avg_ts": 50.0}]), sep="")'


def fake(folder: Path, body: str = _ANSWERS, extra: str = "  -d <n>") -> Path:
    """A llama-bench that notes its arguments in `folder`/log."""
    program = folder / "llama-bench"
    log = str(folder / "log")
    program.write_text(_SCRIPT.format(python=sys.executable, log=log, body=body, extra=extra))
    program.chmod(0o755)
    return program


def noted(folder: Path) -> list[list[str]]:
    return [json.loads(line) for line in (folder / "log").read_text().splitlines()]


@pytest.mark.parametrize(
    ("extra", "at_depth"),
    [("  -d <n>", ["-p", "0", "-n", "5", "-d", "99"]), ("  -gp <p>", ["-p", "0", "-n", "0", "-gp", "99,5"])],
)
def test_a_program_is_asked_for_each_test(tmp_path: Path, extra: str, at_depth: list[str]) -> None:
    """Would catch a generation that is timed with its prompt, other threads, or ik_llama.cpp's own option."""
    bench = LlamaBench("ik", str(fake(tmp_path, extra=extra)), "m.gguf", 3, "q8_0")
    found = bench.prefill_tokens_per_s(7), bench.decode_tokens_per_s(5), bench.decode_tokens_per_s(5, 99)
    assert found == (50.0, 50.0, 50.0)
    assert bench.versions() == {"ik": "abc"}
    common = ["-m", "m.gguf", "-t", "3", "-ctk", "q8_0", "-ctv", "q8_0"]
    once = ["-r", "1", "-o", "json"]
    tests = (["-p", "7", "-n", "0"], ["-p", "0", "-n", "5"], at_depth)
    assert noted(tmp_path) == [["--help"], *([*common, *test, *once] for test in tests)]


@pytest.mark.full
def test_peers_take_a_program_beside_the_engines(
    tmp_path: Path, smollm2_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Would catch a peer left out of the rounds, a wrong ratio, or llama-cpp-python needed."""
    monkeypatch.setattr(turns, "SETTLE_S", 0.0)
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    speeds = {"prefill_tokens_per_s": 100.0, "decode_tokens_per_s": 75.0}
    for name, speed in speeds.items():
        monkeypatch.setattr(harness.Worker, name, lambda self, *numbers, speed=speed: speed)
    arguments = ["-r", "2", "-p", "3", "4", "-n", "2", "--depth", "0", "6", "-t", "1"]
    program = str(fake(tmp_path))
    monkeypatch.setattr(
        sys, "argv", ["peers", "-m", str(smollm2_path), *arguments, "--engine", "ik", program]
    )
    peers.main()
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    ratios = {test: by_peer["ik"]["ratios"] for test, by_peer in report["tests"].items()}
    assert ratios == {"pp3": [2.0] * 2, "pp4": [2.0] * 2, "tg2": [1.5] * 2, "tg2@d6": [1.5] * 2}
    assert report["versions"]["ik"] == "abc"
    assert len(noted(tmp_path)) == 1 + 4 * 3
    median = next(line for line in printed.splitlines() if line.startswith("median"))
    assert median.split() == ["median", "100.0", "50.0", "2.00"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ('print("no model", file=sys.stderr); sys.exit(3)', "ended with status 3: no model"),
        ('print("nothing"); print("here")', "printed no result: here"),
        ('print("[{}]")', "printed no result"),
        ('print("[]")', "printed no result"),
    ],
)
def test_a_program_that_fails_says_how(tmp_path: Path, body: str, message: str) -> None:
    """Would catch a traceback instead of the program's own last line."""
    bench = LlamaBench("ik", str(fake(tmp_path, body)), "m.gguf", 1)
    with pytest.raises(KukriError, match=message):
        bench.prefill_tokens_per_s(1)


def test_what_is_no_llama_bench_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, smollm2_path: Path
) -> None:
    """Would catch a run that fails after the other engines were loaded and measured."""
    with pytest.raises(ConfigError, match="is not a program"):
        LlamaBench("ik", str(tmp_path), "m.gguf", 1)
    other = fake(tmp_path)
    other.write_text(f"#!{sys.executable} -S\nprint('usage: something else')\n")
    with pytest.raises(ConfigError, match="does not look like llama-bench's"):
        LlamaBench("ik", str(other), "m.gguf", 1)
    other.write_text("#!/nowhere/python\n")
    with pytest.raises(ConfigError, match="can't be run"):
        LlamaBench("ik", str(other), "m.gguf", 1)
    monkeypatch.setattr(sys, "argv", ["peers", "-m", str(smollm2_path), "--engine", "ik", "nowhere"])
    with pytest.raises(SystemExit) as ended:
        run(peers.main)
    assert ended.value.code == 2
    assert "nowhere is not a program" in capsys.readouterr().err
