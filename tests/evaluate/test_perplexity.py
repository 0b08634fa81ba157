"""Perplexity and divergence against transformers' logits and plain NumPy."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from kukri import LLM
from kukri.cli import app
from kukri.errors import ConfigError
from kukri.evaluate.compare import compare
from kukri.evaluate.perplexity import perplexity
from kukri.evaluate.text import prose, text_windows, windows
from kukri.host.installed import needs_package
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import make
from tests.tiny_gguf import tiny_config, write_tiny

with lazy_imports():
    import torch

TEXT = prose()[:300]
SIZE, STRIDE, BOS = 64, 24, 256


def plain_log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - np.log(np.exp(x - x.max(1, keepdims=True)).sum(1, keepdims=True)) - x.max(1, keepdims=True)


def scored_rows(model, n_hidden: int = 0) -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Log-probabilities of the scored tokens' rows, these tokens, and the states after each block."""
    text = [*TEXT.encode()]
    letters = byte_ids(text)
    rows, targets, states, done = [], [], [], 1
    end = min(SIZE - 1, len(letters))
    while True:
        start = max(0, end - (SIZE - 1))
        ids = [BOS, *letters[start:end]]
        with torch.no_grad():
            out = model(torch.tensor([ids[:-1]]), output_hidden_states=True)
        n = end - done
        rows.append(plain_log_softmax(out.logits[0].float().numpy())[-n:])
        targets += ids[-n:]
        states.append([h[0].double().numpy() for h in out.hidden_states[1 : 1 + n_hidden]])
        done = end
        if end == len(letters):
            break
        end = min(end + STRIDE, len(letters))
    return np.concatenate(rows), np.array(targets), [np.concatenate(s) for s in zip(*states)]


def byte_ids(text: list[int]) -> list[int]:
    """The ids that a byte-level tokenizer with sorted letters gives bytes."""
    from tokenizers import pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(
        bytes(text).decode()
    )
    return [alphabet.index(letter) for word, _ in split for letter in word]


def opened(path: Path) -> LLM:
    return LLM(path, backend="reference", max_context=SIZE)


@given(
    st.integers(2, 90),
    st.integers(0, 1),
    st.integers(3, 20).flatmap(lambda n: st.tuples(st.just(n), st.integers(1, n))),
)
def test_every_token_is_scored_once(n_tokens: int, n_bos: int, sizes: tuple[int, int]) -> None:
    """A token at an edge lost or counted twice; one that sees less than it could."""
    size, stride = sizes
    ids = list(range(n_tokens))
    bos = [999] * n_bos
    found = windows(ids, bos, size, stride)
    assert [i for window in found for i in window.ids[-window.n_scored :]] == ids[1:]
    for window in found:
        first = window.ids[-window.n_scored]
        n_before = len(window.ids) - window.n_scored - n_bos
        assert n_before >= min(first, size - n_bos - stride)
        assert n_before + n_bos >= 1  # something comes before each scored token
        assert list(window.ids[:n_bos]) == bos
        assert len(window.ids) <= size


@pytest.mark.parametrize(("size", "stride", "n"), [(8, 0, 20), (8, 9, 20), (8, 4, 1), (1, 1, 20)])
def test_windows_that_say_nothing(size: int, stride: int, n: int) -> None:
    """A division by no tokens, or an endless loop."""
    with pytest.raises(ConfigError):
        windows(list(range(n)), [], size, stride)


def test_perplexity_is_that_of_transformers_logits(tmp_path: Path) -> None:
    """Rows one off their tokens, BOS left out of later windows, a wrong error bar."""
    path, model = make(tmp_path / "hf", "llama")
    log_p, targets, _ = scored_rows(model)
    nll = -log_p[np.arange(len(targets)), targets]
    with opened(path) as llm:
        found = perplexity(llm, text_windows(llm.tokenizer, TEXT, SIZE, STRIDE))
    assert found.n_tokens == len(nll) == len(TEXT.encode()) - 1
    assert found.perplexity == pytest.approx(np.exp(nll.mean()), rel=1e-4)
    # llama-perplexity's formula: sqrt((mean of squares - square of mean) / (n - 1)) * ppl
    error = np.sqrt((np.mean(nll**2) - nll.mean() ** 2) / (len(nll) - 1)) * np.exp(nll.mean())
    assert found.error == pytest.approx(error, rel=1e-3)


@pytest.mark.full
def test_comparison_is_that_of_full_logits(tmp_path: Path) -> None:
    """KL the wrong way round, quantiles of parts, signs of Δp, blocks off by one."""
    path_a, model_a = make(tmp_path / "a", "qwen2")
    path_b, model_b = make(tmp_path / "b", "qwen2")
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model_b.parameters():
            parameter.mul_(1 + 0.02 * torch.randn_like(parameter))
    model_b.save_pretrained(path_b)
    (p, targets, states_a), (q, _, states_b) = scored_rows(model_a, 3), scored_rows(model_b, 3)
    with opened(path_a) as a, opened(path_b) as b:
        found = compare(a, b, text_windows(a.tokenizer, TEXT, SIZE, STRIDE))
    kl = (np.exp(p) * (p - q)).sum(1)
    at = np.arange(len(targets)), targets
    delta, ratio = np.exp(q[at]) - np.exp(p[at]), p[at] - q[at]
    close = {"rel": 2e-3}
    assert found.kl_mean == pytest.approx(kl.mean(), **close)
    assert found.kl_median == pytest.approx(np.median(kl), **close)
    assert found.kl_p99 == pytest.approx(np.quantile(kl, 0.99), **close)
    assert found.kl_max == pytest.approx(kl.max(), **close)
    assert found.kl_error == pytest.approx(kl.std(ddof=1) / np.sqrt(len(kl)), **close)
    assert found.same_top == pytest.approx((p.argmax(1) == q.argmax(1)).mean(), abs=1.5 / len(kl))
    assert found.delta_p_mean == pytest.approx(delta.mean(), abs=1e-5)
    assert found.delta_p_rms == pytest.approx(np.sqrt((delta**2).mean()), **close)
    assert found.perplexity_ratio == pytest.approx(np.exp(ratio.mean()), rel=1e-4)
    assert found.layers is not None
    for layer, (x, y) in enumerate(zip(states_a, states_b)):
        relative = np.linalg.norm(y - x, axis=1) / np.linalg.norm(x, axis=1)
        assert found.layers[layer] == pytest.approx(np.sqrt((relative**2).mean()), **close)


def test_a_model_is_no_distance_from_itself(tmp_path: Path) -> None:
    """State that one model's steps leave in the other, or in the next window."""
    path = write_tiny(tmp_path / "m.gguf", tiny_config())
    with LLM(path, max_context=SIZE) as a, LLM(path, max_context=SIZE) as b:
        cut = text_windows(a.tokenizer, TEXT, SIZE, STRIDE)
        found = compare(a, b, cut)
        assert (found.kl_max, found.same_top, found.perplexity_ratio) == (0, 1, 1)
        assert set(found.layers or ()) == {0}
        assert perplexity(a, cut) == found.a == found.b


@pytest.mark.representative(2)
def test_the_commands(tmp_path: Path) -> None:
    """An option that is not handed on; a plot that is not one; JSON that is not."""
    a = write_tiny(tmp_path / "a.gguf", tiny_config())
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    sizes = ["--text", str(text), "--window", "64", "--stride", "24"]

    def call(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, *sizes])
        assert done.exit_code == 0, done.output
        return done.stdout

    made = json.loads(call("perplexity", str(a), "--json"))
    assert made["n_tokens"] == len(TEXT.encode()) - 1
    assert f"{made['perplexity']:.4f} ± {made['error']:.4f}" in call("perplexity", str(a))
    assert CliRunner().invoke(app, ["quantize", str(a), str(tmp_path / "b.gguf"), "Q4_0"]).exit_code == 0
    plot = tmp_path / "layers.png"
    both = [str(a), str(tmp_path / "b.gguf")]
    found = json.loads(call("compare", *both, "--json", "--plot", str(plot)))
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert f"{found['kl_mean']:.6f} ±" in call("compare", *both)
    plot = tmp_path / "types.png"
    types = json.loads(call("compare", str(a), "--types", "Q8_0,Q4_0", "--json", "--plot", str(plot)))[
        "types"
    ]
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert types["Q4_0"]["kl_mean"] == found["kl_mean"] > types["Q8_0"]["kl_mean"] > 0
    assert types["Q4_0"]["n_bytes"] < types["Q8_0"]["n_bytes"] < a.stat().st_size
    assert "Q8_0" in call("compare", str(a), "--types", "Q8_0")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["compare", "MODEL"], "a second model is required, or --types"),
        (["compare", "MODEL", "MODEL", "--types", "Q8_0"], "a second model is required, or --types"),
        (["compare", "MODEL", "--types", "Q9"], "is not supported: use a recipe (.json or .yaml), or one of"),
        (["compare", "MODEL", "--types", ","], "must name types"),
        (["compare", "MODEL", "MODEL", "--plot", "x.pdf"], "a plot must be a PNG"),
        (["perplexity", "MODEL", "--text", "nowhere.txt"], "cannot be read as UTF-8"),
        (["perplexity", "MODEL", "--window", "64", "--stride", "65"], "a stride of 65 tokens must"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    """A traceback, or a measurement of something else than was asked for."""
    model = write_tiny(tmp_path / "m.gguf", tiny_config())
    done = CliRunner().invoke(app, [str(model) if a == "MODEL" else a for a in arguments])
    assert done.exit_code == 2
    assert message in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_tokens_are_refused(tmp_path: Path) -> None:
    """Probabilities of different things compared."""
    hf, _ = make(tmp_path / "hf", "llama")
    tiny = write_tiny(tmp_path / "m.gguf", tiny_config())
    with (
        LLM(hf, max_context=64) as a,
        LLM(tiny, max_context=64) as b,
        pytest.raises(ConfigError, match="tokens"),
    ):
        compare(a, b, text_windows(a.tokenizer, TEXT, SIZE, STRIDE))


def test_plots_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An ImportError at the end of an hour's work."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    model = str(write_tiny(tmp_path / "m.gguf", tiny_config()))
    done = CliRunner().invoke(app, ["compare", model, model, "--plot", str(tmp_path / "x.png")])
    assert done.exit_code == 2
    assert needs_package("a plot", "matplotlib", "plots") in done.stderr


def test_windows_may_follow_each_other(tmp_path: Path) -> None:
    """A stride of the whole window refused, though it is the cheapest way to score a text."""
    model = write_tiny(tmp_path / "m.gguf", tiny_config())
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    options = ["--text", str(text), "--window", "32", "--stride", "32", "--json"]
    done = CliRunner().invoke(app, ["perplexity", str(model), *options])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["n_tokens"] == len(TEXT.encode()) - 1
