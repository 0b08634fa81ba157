"""`kukri bench serve` as a process of its own against a real server."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from tests.server.live_server import MODEL, Served


def bench(served: Served, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "kukri", "bench", "serve", "--url", f"{served.url}/v1", "--json"]
    done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def metrics(served: Served) -> dict[str, float]:
    with served.http() as http:
        text = http.get("/metrics").text
    return {
        name: float(value) for name, value in re.findall(r"^(kukri_\w+)\{[^}]*\} (\S+)$", text, re.MULTILINE)
    }


@pytest.mark.full
def test_client_and_server_measure_the_same(served, tmp_path):
    """Catches times and counts that are not those of the server: its own histograms say what they were."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'"{n} things about the number {n}"\n' for n in range(7)))
    before = metrics(served)
    options = ("--prompts", str(prompts), "--warm-up", "0", "-n", "7", "--concurrency", "3")
    report = bench(served, *options, "--ignore-eos", "--max-tokens", "12", "--endpoint", "completions")
    delta = {name: value - before.get(name, 0.0) for name, value in metrics(served).items()}
    (point,) = report["points"]
    assert report["model"] == MODEL
    assert (point["n_answered"], point["errors"], point["max_in_flight"]) == (7, {}, 3)
    assert point["n_generated_tokens"] == delta["kukri_generated_tokens_total"] == 7 * 12
    assert point["n_prompt_tokens"] == delta["kukri_prompt_tokens_total"] > 0
    for ours, theirs in (("ttft_ms", "kukri_time_to_first_token"), ("e2e_ms", "kukri_end_to_end")):
        assert delta[f"{theirs}_seconds_count"] == 7
        server_ms = 1e3 * delta[f"{theirs}_seconds_sum"] / 7
        assert server_ms - 50 < point[ours]["mean"] < server_ms * 1.5 + 250
    assert point["tpot_ms"]["median"] * 11 < point["e2e_ms"]["p99"]


@pytest.mark.full
def test_random_prompts_at_a_rate(served):
    """Catches a length that is not that of the model's own template and tokens."""
    options = ("--rate", "20", "-n", "4", "-p", "80", "-g", "4", "--seed", "5", "--slo", "e2e:60000")
    (point,) = bench(served, *options)["points"]
    assert point["errors"] == {}
    assert point["n_prompt_tokens"] == 4 * 80
    assert point["goodput_per_s"] == point["requests_per_s"] > 0
