"""Times of words: the attention of transformers' own model, through transformers' filter and time warping."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.calls.speech import Transcription
from kukri.calls.word_times import cheapest_path, smoothed, split_words, timed_words
from kukri.sound.features import HOP, log_mel
from tests.lazy_imports import lazy_imports
from tests.sound.tiny_whisper import N_ROWS, id_of, noise, save_tiny, tiny_model

with lazy_imports():
    import torch
    import transformers as tr

HEADS = [[0, 1], [2, 1]]


def frames_by_transformers(
    model: Any, features: Any, ids: list[int], n_before: int, n_frames: int, heads: list[Any]
) -> Any:
    """The frame of each token: openai-whisper's steps, of functions of transformers."""
    own = tr.models.whisper.generation_whisper
    with torch.no_grad():
        given = torch.from_numpy(features.T[None].copy()), torch.tensor([ids])
        found = model(given[0], decoder_input_ids=given[1], output_attentions=True).cross_attentions
    weights = torch.stack([found[layer][0, head] for layer, head in heads])[..., :n_frames]
    weights = weights / weights.sum(dim=-1, keepdim=True)
    deviation, mean = torch.std_mean(weights, dim=-2, keepdim=True, unbiased=False)
    weights = own._median_filter((weights - mean) / deviation, 7)
    matrix = weights.mean(dim=0)[n_before:-1]
    rows, columns = own._dynamic_time_warping(-matrix.double().numpy())
    return columns[np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)]


@pytest.mark.full(but=["stated"])
@pytest.mark.parametrize("kind", ["stated", "upper half"])
def test_times_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    """Catches another head, a key of another frame, a token that is left out, and windows at another time."""
    model = tiny_model(seed=3)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        for layer in model.model.decoder.layers:
            layer.encoder_attn.q_proj.weight.mul_(4)  # attention to few frames
    if kind == "stated":
        model.generation_config.alignment_heads = heads = HEADS
    else:
        heads = [[layer, head] for layer in (1, 2) for head in (0, 1)]
    n_times = 0
    with LLM(save_tiny(tmp_path, model), backend="cpu", kv_type="f32") as llm:
        for seconds, timestamps in ((2.3, True), (0.8, False)):
            samples = noise(seconds, 1)
            options: Any = {"language": "en", "fallback": False, "condition_on_previous_text": False}
            options["timestamps"] = timestamps
            found = llm.transcribe(samples, **options, word_times=True)
            plain = llm.transcribe(samples, **options)
            assert [one.token_ids for one in found.segments] == [one.token_ids for one in plain.segments]
            assert not any(one.words for one in plain.segments)
            n_times += check_times(llm, model, samples, found, heads)
    assert n_times > 10


def check_times(llm: LLM, model: Any, samples: Any, found: Transcription, heads: list[Any]) -> int:
    """Compares the words of each window; returns how many times there are."""
    n_frames, n_times = len(samples) // HOP, 0
    features = np.pad(log_mel(samples, n_frames, 80), ((0, 2 * N_ROWS), (0, 0)))
    before = [id_of(f"<|{name}|>") for name in ("startoftranscript", "en", "transcribe", "notimestamps")]
    for seek in {one.seek for one in found.segments}:
        segments = [one for one in found.segments if one.seek == seek]
        ids = [i for one in segments for i in one.token_ids if i < 256]
        n_rows = min(2 * N_ROWS, n_frames - seek) // 2
        given = features[seek : seek + 2 * N_ROWS], [*before, *ids, 256], 3, n_rows, heads
        times = [
            round(seek / 100 + frame / 50, 2) for frame in frames_by_transformers(model, *given).tolist()
        ]
        n_times += len(set(times))
        assert llm.speech is not None
        for one in segments:
            own = [i for i in one.token_ids if i < 256]
            wanted = timed_words(split_words(own, llm.speech._text, "en"), times)
            assert list(one.words) == wanted
            times = times[len(own) :]
            text = "".join(word.text for word in wanted)
            assert text.replace("\ufffd", "") == one.text.replace("\ufffd", "")
    return n_times


def test_the_path_and_the_median_are_those_of_transformers() -> None:
    """Catches a tie that goes another way, and another edge."""
    own, random = tr.models.whisper.generation_whisper, np.random.default_rng(0)
    for n, m in ((1, 1), (1, 9), (5, 3), (12, 40), (30, 30)):
        prices = random.integers(-3, 4, (n, m)).astype(np.float32)
        rows, columns = own._dynamic_time_warping(prices.astype(np.float64))
        jumps = np.pad(np.diff(rows), (1, 0), constant_values=1).astype(bool)
        assert cheapest_path(prices) == columns[jumps].tolist()
        patterns = random.normal(size=(2, n, m)).astype(np.float32)
        want = own._median_filter(torch.from_numpy(patterns), 7).numpy()
        np.testing.assert_array_equal(smoothed(patterns), want)


def words_of(text: str, language: str) -> list[Any]:
    """Words of a text whose tokens are bytes, at a second for each."""
    ids = list(text.encode())
    pieces = split_words(ids, lambda some: bytes(some).decode(errors="replace"), language)
    return [(word.text, word.start_s, word.end_s) for word in timed_words(pieces, range(len(ids) + 1))]


def test_words_have_their_punctuation_and_languages_without_spaces_their_characters() -> None:
    """Catches half a character, and a comma that is a word."""
    assert words_of(' Hä, "so?"', "de") == [(" Hä,", 0, 4), (' "so?"', 6, 9)]
    assert words_of("日本。", "ja") == [("日", 0, 3), ("本。", 3, 6)]
    broken = split_words([255, 32, 65], lambda some: bytes(some).decode(errors="replace"), "en")
    assert broken == [("\ufffd", 1), (" A", 2)]
    cut_off = split_words([32, 230, 156, 66, 230], lambda some: bytes(some).decode(errors="replace"), "en")
    assert sum(n for _, n in cut_off) == 5
    assert words_of("", "en") == []
