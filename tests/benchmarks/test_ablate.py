"""`python -m benchmarks.ablate` with tiny sizes: that each side does what it says, not how fast."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from benchmarks import turns
from benchmarks.ablate import app, page_text, show_ablation
from benchmarks.ablation import attention, cache, mix
from benchmarks.ablation import techniques as ablation
from benchmarks.ablation.techniques import TECHNIQUES, ablate, chosen, n_rounds
from benchmarks.ablation.trial import Sizes, Trial, random_ids, row
from kukri import LLM
from kukri.bench import card
from kukri.errors import ConfigError
from kukri.formats.headers import read_headers
from kukri.kernels.cache import KVLayer
from kukri.kernels.paged_kv import PagedKV
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import Weight
from kukri.quant.types import QUANT_TYPES
from tests.test_cli import assert_one_line_error
from tests.tiny_gguf import tiny_config, write_tiny

SMALL = Sizes(
    context=128,
    generations=((5, 3), (40, 2)),
    n_prompt=20,
    n_generate=4,
    n_requests=6,
    n_streams=3,
    mix_prompt=(2, 60),
    mix_answer=(2, 20),
    shared_prompt=100,
    own_prompt=3,
    attention=(80, 100),
)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(card, "read_bandwidth_of_a_fresh_process", lambda n_threads: 47.0)
    monkeypatch.setattr(turns, "SETTLE_S", 0.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("ablate") / "tiny.gguf", tiny_config(128), weight_type="Q8_0")


@pytest.fixture
def small(model: Path) -> Iterator[Trial]:
    config = read_headers(model).config
    assert config is not None
    made = Trial(card.model_card(model), config, 2, 2, SMALL, lambda text: None)
    yield made
    made.close()


@pytest.fixture(scope="module")
def report(model: Path) -> ablation.AblationReport:
    """All techniques, two rounds each; what `on_round` heard is checked here, as it is gone afterwards."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(card, "read_bandwidth_of_a_fresh_process", lambda n_threads: 47.0)
        patch.setattr(turns, "SETTLE_S", 0.0)
        heard: list[str] = []
        techniques = chosen([], 2)
        found = ablate(str(model), techniques, n_threads=2, repetitions=2, sizes=SMALL, on_round=heard.append)
        assert len(heard) == n_rounds(techniques, 2, SMALL)
    return found


def test_every_technique_has_rows(report: ablation.AblationReport) -> None:
    """Would catch a technique that gives nothing, and figures that do not follow from one another."""
    assert list(report.techniques) == list(TECHNIQUES)
    assert [len(rows) for rows in report.techniques.values()] == [2, 6, 2, 2, 5, 1, 4, 2]
    for rows in report.techniques.values():
        for found in rows:
            assert found.off > 0
            assert found.on > 0
            assert found.unit in ("s", "tokens/s", "bytes")
            assert len(found.gains) in (1, 2)
            assert min(found.gains) <= found.gain <= max(found.gains)


def test_a_gain_above_one_is_better() -> None:
    """Would catch ratios upside down, and a ratio of medians in place of the median of ratios."""
    times = row("", "s", [(10.0, 1.0), (2.0, 1.0), (9.0, 3.0)])
    assert (times.off, times.on, times.gains, times.gain) == (9.0, 1.0, (10.0, 2.0, 3.0), 3.0)
    rates = row("", "tokens/s", [(1.0, 10.0), (1.0, 2.0), (3.0, 9.0)])
    assert (rates.off, rates.on, rates.gains, rates.gain) == (1.0, 9.0, (10.0, 2.0, 3.0), 3.0)
    assert row("", "bytes", [(4, 1)]).gain == 4


def test_rounds_take_turns(small: Trial) -> None:
    """Would catch a warm-up that counts, and a side that always goes first."""
    calls: list[str] = []

    def measure(name: str) -> int:
        calls.append(name)
        return len(calls)

    rounds = small.in_turns("", lambda: measure("a"), lambda: measure("b"))
    assert calls == ["a", "b", "b", "a", "a", "b"]
    assert rounds == [(4, 3), (5, 6)]


def test_generating_without_the_cache_gives_the_same_tokens(small: Trial) -> None:
    """Would catch a side that computes something else, or less than the whole text."""
    engine = small.engine
    prompt = random_ids(engine, 30, np.random.default_rng(5))
    n_before = engine.scheduler.n_computed
    want = cache.generate(engine, prompt, 6)
    n_with = engine.scheduler.n_computed - n_before
    assert cache.generate_without_cache(engine, prompt, 6) == want
    assert n_with == 30 + 5
    assert engine.scheduler.n_computed - n_before - n_with == sum(30 + i for i in range(6))


def test_the_second_request_finds_its_prefix_on_one_side_alone(small: Trial) -> None:
    """Would catch a prefix known from a round before, or cached where it must not be."""
    engine, computed = small.engine, []

    def counted(measure: Any) -> int:
        n_before = engine.scheduler.n_computed
        measure()
        computed.append(engine.scheduler.n_computed - n_before)
        return 1

    small.in_turns = lambda what, *measures: [  # type: ignore[method-assign]
        tuple(counted(measure) for measure in measures) for _ in range(2)
    ]
    list(cache.prefix_cache(small))
    assert computed == [206, 206 - 96] * 2  # 6 pages of 16 of the 100 tokens in common
    assert engine.pool.n_cached == 0
    assert not engine.allocator.caches_prefixes


def test_grouped_queries_are_what_the_engine_allocates(small: Trial, model: Path) -> None:
    """Would catch bytes of other layers, heads or number types than those of the engine's cache."""
    larger, own = cache.grouped_queries(small)
    assert larger.gain == 4
    assert larger.on == 2 * 2 * 36 * 4 * 128 * 128  # keys and values, float16, layers, heads, size, tokens
    assert own.gain == 2
    with LLM(model, max_context=128, max_requests=1) as llm:
        assert own.on == llm.engine.runner.cache.n_bytes


def test_held_pages_are_enough_and_all_needed(small: Trial, model: Path) -> None:
    """Would catch pages counted after a request gave them back, or those of no request."""
    engine = small.engine
    requests = mix.mixed_requests(engine, SMALL)
    lengths = [(r.n_prompt, r.params.max_tokens) for r in requests]
    assert lengths == [(r.n_prompt, r.params.max_tokens) for r in mix.mixed_requests(engine, SMALL)]
    assert all(2 <= n_prompt <= 60 and 2 <= n_new <= 20 for n_prompt, n_new in lengths)
    with mix.watched(engine) as held:
        mix.serve(engine, [requests])
    assert held.pages <= held.own < held.whole == 3 * 8
    page_bytes = engine.runner.cache.n_bytes // engine.pool.n_pages
    for n_pages, is_enough in ((held.pages, True), (held.pages - 1, False)):
        with LLM(model, max_context=128, max_requests=3, kv_bytes=n_pages * page_bytes) as llm:
            llm.engine.allocator.caches_prefixes = False
            mix.serve(llm.engine, [mix.mixed_requests(llm.engine, SMALL)])
            assert (llm.engine.scheduler.n_preemptions == 0) is is_enough


def test_groups_end_before_the_next_begin(small: Trial) -> None:
    """Would catch requests that run side by side where they are said to come one after another."""
    for group, expected in ((1, 1), (2, 2), (6, 3)):
        requests = mix.mixed_requests(small.engine, SMALL)
        mix.serve(small.engine, [requests[i : i + group] for i in range(0, 6, group)])
        most = max(
            sum(r.times.started_s <= other.times.started_s <= r.times.last_token_s for r in requests)
            for other in requests
        )
        assert most == expected
        assert all(len(r.output_ids) == r.params.max_tokens for r in requests)


@pytest.mark.parametrize("n_tokens", [1, 63, 150])
def test_both_kinds_of_attention_are_right(n_tokens: int) -> None:
    """Would catch a matrix that sees the future, another head's keys, or sums of what is masked."""
    heads = attention.Heads(6, 2, 64)  # the shape that the default model's kernels have
    rows = np.random.default_rng(n_tokens).standard_normal((n_tokens, sum(heads.widths)), np.float32)
    weight = Weight(rows.view(np.uint8), QUANT_TYPES["F32"], rows.shape)
    spec = AttentionSpec(0, 6, 2, 64, 64**-0.5)

    def program(ops: Any, batch: Any) -> Any:
        q, k, v = ops.split(ops.embed(weight, batch), heads.widths)
        return ops.attention(q, k, v, spec, batch)

    paged = attention.Paged(rows, heads, 2, n_results=n_tokens)
    limits = StepLimits(n_tokens, 1, n_tokens, 10)
    want = (
        ReferenceBackend()
        .compile(program, PagedKV([KVLayer(2, 64)], 10, kv_type="f32"), limits)(paged._batch)
        .numpy()
    )
    matrix = attention.Matrix(rows, heads, 2)
    for _ in range(2):  # its buffers are used again
        np.testing.assert_allclose(matrix(), want, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(paged(), want, rtol=2e-3, atol=2e-3)  # its keys and values are float16
    matrix.close()
    paged.close()


@pytest.mark.full
def test_the_matrix_is_what_is_held(small: Trial) -> None:
    """Would catch bytes that are not measured, or those of what both sides need."""
    n_tokens = 2000
    small.sizes = replace(SMALL, attention=(n_tokens,))
    seconds, held = attention.attention(small)
    assert seconds.unit == "s"
    assert 0 <= held.off - 4 * n_tokens**2 < 8e6  # BLAS has buffers of its own
    assert held.on < 0.2 * held.off


def test_bytes_of_files_are_those_of_their_types(report: ablation.AblationReport, model: Path) -> None:
    """Would catch files of other types than the labels say."""
    rows = {found.measure: found for found in report.techniques["quantization"]}
    own, q4_0 = rows["the model's Q8_0 for F16: file"], rows["Q4_0 throughout for F16: file"]
    assert own.on == model.stat().st_size
    assert own.off == q4_0.off
    n_weights = sum(t.n_bytes * 32 // 34 for t in read_headers(model).tensors if t.type == "Q8_0")
    assert own.off - own.on == pytest.approx(n_weights * (2 - 34 / 32), abs=300)
    assert q4_0.off - q4_0.on == pytest.approx(n_weights * (2 - 18 / 32), abs=300)


def test_the_page(report: ablation.AblationReport) -> None:
    """Would catch a row, a technique or the machine left out, and sizes that read as more than they are."""
    text = page_text(report, "ablation.png")
    n_rows = sum(map(len, report.techniques.values()))
    assert sum(line.startswith("| ") for line in text.splitlines()) == n_rows + 2
    for technique in TECHNIQUES.values():
        assert f"**{technique.name}**: {technique.how}" in text
        assert technique.how
    assert "| 4.00 (75% less) | 75% less |" in text
    assert "](ablation.png)" in text
    assert report.machine.cpu in text
    assert "2 threads used" in text


@pytest.mark.full
def test_everything_that_is_written(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Would catch output next to the JSON, a chart that is not one, and a page whose chart is missing."""
    page, plot = tmp_path / "page.md", tmp_path / "gains.png"
    for as_json in (True, False):
        show_ablation(
            str(model),
            only=["grouped-queries"],
            n_threads=1,
            repetitions=1,
            plot=plot,
            page=page,
            as_json=as_json,
            sizes=SMALL,
        )
        out = capsys.readouterr().out
        assert (len(out.splitlines()) == 1) is as_json
        rows = json.loads(out.splitlines()[-1])["techniques"]["grouped-queries"]
        assert [found["gain"] for found in rows] == [4, 2]
    assert "4.00 (75% less)" in out
    assert "](page.png)" in page.read_text()
    for chart in (plot, tmp_path / "page.png"):
        assert chart.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--only", "magic"], ["no technique 'magic'", "kv-cache"]),
        (["--only", "threads", "--threads", "1"], ["threads", "--threads"]),
        (["-r", "0"], ["repetitions must be at least 1"]),
        (["--threads", "0"], ["threads must be at least 1"]),
        (["--plot", "chart.svg"], ["chart.png"]),
        (["--plot", "/nowhere/chart.png"], ["the directory /nowhere was not found"]),
        (["--page", "page.html"], ["page.md"]),
        (["--page", "/nowhere/page.md"], ["the directory /nowhere was not found"]),
        (["-m", "nowhere.gguf"], ["nowhere.gguf"]),
        ([], ["context of 128 tokens", "2048"]),
    ],
    ids=" ".join,
)
def test_what_cannot_be_is_said_at_once(model: Path, options: list[str], words: list[str]) -> None:
    """Would catch an error after minutes of measuring, a traceback, or a text that does not help."""
    given = options if "-m" in options else [*options, "-m", str(model)]
    assert_one_line_error(CliRunner().invoke(app, given), *words)


def test_a_directory_is_to_be_converted(tmp_path: Path) -> None:
    """Would catch a failure in the middle, when its file is to be written in another type."""
    (tmp_path / "config.json").write_text("{}")
    done = CliRunner().invoke(app, ["-m", str(tmp_path)])
    assert_one_line_error(done, "directory", "kukri convert")


def test_one_thread_leaves_threads_out() -> None:
    """Would catch a comparison of one thread with itself."""
    assert {t.name for t in chosen([], 2)} - {t.name for t in chosen([], 1)} == {"threads"}
    assert [t.name for t in chosen(["threads", "kv-cache"], 2)] == ["kv-cache", "threads"]
    with pytest.raises(ConfigError, match="--threads"):
        chosen(["threads"], 1)
