"""`kukri bench` on tiny lengths: what it prints, not how fast anything is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.bench import card
from kukri.errors import ConfigError
from kukri.opening.model_options import option_fields
from kukri.opening.option_fields import option_facts
from kukri.terminal.bench import run_bench
from tests.test_llm_safetensors import make


@pytest.fixture(autouse=True)
def known_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "read_bandwidth_of_a_fresh_process", lambda n_threads: 47.0)


@pytest.mark.full
def test_the_report(smollm2_path: Path, capsys: Any) -> None:
    """Would catch output next to the JSON object, or a figure that does not follow from its samples."""
    run_bench(str(smollm2_path), n_threads=1, n_prompt=5, n_generate=3, repetitions=2, as_json=True)
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


@pytest.mark.full
def test_the_ceiling_is_measured_beside_decoding(
    smollm2_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Would catch a share of what the machine could read a minute ago."""
    speeds = iter([10.0, 30.0, 40.0, 50.0])  # for the card, next to the warm-up, next to the two samples
    monkeypatch.setattr(card, "read_bandwidth_of_a_fresh_process", lambda n_threads: next(speeds))
    run_bench(str(smollm2_path), n_threads=1, n_prompt=2, n_generate=2, repetitions=2, as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["machine"]["read_gb_per_s"] == 45
    assert report["ceiling_tokens_per_s"] == pytest.approx(45e9 / report["model"]["bytes_per_token"])


@pytest.mark.full
def test_cards_come_before_the_results(smollm2_path: Path, capsys: Any) -> None:
    """Would catch a ceiling printed after the fact, or a last line that is not the JSON object."""
    run_bench(str(smollm2_path), n_threads=1, n_prompt=2, n_generate=2, repetitions=1)
    out = capsys.readouterr().out
    places = [out.index(text) for text in ("machine", "134,515,008", "ceiling", "pp2", "tg2", "peak memory")]
    assert places == sorted(places)
    assert json.loads(out.splitlines()[-1])["decode_tokens_per_s"]["deviation"] == 0.0


@pytest.mark.parametrize("name", ["n_threads", "n_prompt", "n_generate", "repetitions"])
def test_counts_below_one_are_refused(name: str) -> None:
    """Would catch a division by zero after the model has been loaded."""
    with pytest.raises(ConfigError, match=f"'{name}' must be at least 1, not 0"):
        run_bench(None, **{name: 0})


def test_no_flag_of_loading_is_unknown() -> None:
    """Would catch a flag that the command shows, and that ends in a traceback."""
    loading = [name for name, one in option_fields().items() if option_facts(one).group == "any"]
    for name in loading:
        with pytest.raises(ConfigError, match="'n_prompt' must be at least 1"):
            run_bench(None, n_prompt=0, **{name: 2})
    for name in ("stages", "devices"):
        with pytest.raises(ConfigError, match=f"--{name} is not supported by `kukri bench`"):
            run_bench(None, **{name: 2})


@pytest.mark.parametrize("quantize", [None, "Q8_0", "Q4_K"])
def test_a_safetensors_directory(quantize: str | None, tmp_path: Path, capsys: Any) -> None:
    """Would catch a bench of GGUF files alone, and a ceiling from weights other than those that are read."""
    directory, _ = make(tmp_path, "llama-biases")
    run_bench(
        str(directory),
        n_threads=1,
        quantize=quantize,
        n_prompt=2,
        n_generate=2,
        repetitions=1,
        as_json=True,
    )
    report = json.loads(capsys.readouterr().out)
    assert report["quantize"] == quantize
    with LLM(directory, quantize=quantize) as llm:
        loaded = llm.model.parameters
    assert report["model"]["n_parameters"] == sum(p.n_parameters for p in loaded)
    assert report["model"]["bytes_by_type"].keys() == {p.type for p in loaded}
    embedding = next(p.n_bytes for p in loaded if "embed_tokens" in p.name)
    assert report["model"]["bytes_per_token"] == sum(p.n_bytes for p in loaded) - embedding
    assert report["decode_tokens_per_s"]["mean"] > 0


def test_a_packed_file_is_not_packed_again(smollm2_path: Path) -> None:
    """Would catch --quantize accepted and ignored."""
    with pytest.raises(ConfigError, match="is packed already"):
        run_bench(str(smollm2_path), quantize="Q8_0")
