"""`kukri bench` on tiny lengths: what it prints, not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kukri.bench import card, offline
from kukri.errors import ConfigError


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "read_bandwidth_of_a_fresh_process", lambda n_threads: 47.0)


def test_the_report(smollm2_path: Path, capsys: Any) -> None:
    """Would catch output beside the JSON object, or a figure that does not follow from its samples."""
    offline.run_bench(str(smollm2_path), n_threads=1, n_prompt=5, n_generate=3, repetitions=2, json_only=True)
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 1
    report = json.loads(printed.out)
    decode, prefill = report["decode_tokens_per_s"], report["prefill_tokens_per_s"]
    assert len(decode["samples"]) == len(prefill["samples"]) == 2
    assert decode["mean"] == pytest.approx(sum(decode["samples"]) / 2)
    assert decode["deviation"] == pytest.approx(abs(decode["samples"][0] - decode["samples"][1]) / 2**0.5)
    assert report["ceiling_tokens_per_s"] == pytest.approx(47e9 / report["model"]["bytes_per_token"])
    assert report["share_of_ceiling"] == pytest.approx(decode["mean"] / report["ceiling_tokens_per_s"])
    assert 0 <= report["engine_overhead"] < 1
    assert report["first_token_ms"]["mean"] > 0
    assert report["peak_rss_bytes"] > 50e6
    assert (report["n_prompt"], report["n_generate"], report["n_threads"]) == (5, 3, 1)


def test_cards_come_before_the_results(smollm2_path: Path, capsys: Any) -> None:
    """Would catch a ceiling printed after the fact, or a last line that is not the JSON object."""
    offline.run_bench(str(smollm2_path), n_threads=1, n_prompt=2, n_generate=2, repetitions=1)
    out = capsys.readouterr().out
    places = [out.index(text) for text in ("machine", "134,515,008", "ceiling", "pp2", "tg2", "peak memory")]
    assert places == sorted(places)
    assert json.loads(out.splitlines()[-1])["decode_tokens_per_s"]["deviation"] == 0.0


@pytest.mark.parametrize("name", ["n_threads", "n_prompt", "n_generate", "repetitions"])
def test_counts_below_one_are_refused(name: str) -> None:
    """Would catch a division by zero after the model has been loaded."""
    with pytest.raises(ConfigError, match=f"{name} must be at least 1, not 0"):
        offline.run_bench(None, **{name: 0})
