"""Whisper: rows, logits and greedy answers next to transformers' on random models, alone and in a batch."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, AsyncLLM
from kukri.calls.speech import SpeechOptions
from kukri.errors import RequestError, UnsupportedError
from kukri.sound.bounds import RATE
from kukri.sound.features import log_mel
from kukri.sound.languages import language_name
from kukri.sound.prompt import SoundInput, SoundPrompt
from tests.lazy_imports import lazy_imports
from tests.sound.tiny_whisper import (
    CONTROLS,
    LANGUAGES,
    N_BYTES,
    N_ROWS,
    N_VOCAB,
    TIMES,
    id_of,
    noise,
    save_tiny,
    tiny_model,
)
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

with lazy_imports():
    import torch
    import transformers as tr

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bands": {"num_mel_bins": 128, "decoder_layers": 1},
    "odd": {"d_model": 72, "encoder_attention_heads": 2, "decoder_attention_heads": 3, "decoder_ffn_dim": 88},
    "whole-pages": {"max_source_positions": 48, "encoder_layers": 1},
}


def saved(directory: Path, **changes: Any) -> tuple[Path, Any]:
    model = tiny_model(**changes)
    return save_tiny(directory, model), model


def extractor(n_bands=80):
    return tr.WhisperFeatureExtractor(feature_size=n_bands, chunk_length=1)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return saved(tmp_path_factory.mktemp("whisper"))


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Any]) -> Iterator[LLM]:
    with LLM(pair[0], backend="cpu", max_requests=16, n_threads=2) as opened:
        yield opened


@pytest.mark.full(but=["80"])
@pytest.mark.parametrize("n_bands", [80, 128])
def test_features_are_those_of_transformers(n_bands: int) -> None:
    for seconds in (1, 0.999, 0.3, 1 / RATE):
        samples = noise(seconds)
        theirs = extractor(n_bands)(samples, sampling_rate=RATE, return_tensors="np").input_features[0].T
        np.testing.assert_allclose(
            log_mel(samples, 100, n_bands), theirs, rtol=0, atol=1e-4
        )  # theirs: float32


@pytest.mark.full(but=["cpu-*-odd", "reference-*-whole-pages"])
@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize(("backend", "limit"), [("reference", 1e-4), ("cpu", 2e-3)])
def test_logits_are_those_of_transformers(kind: str, backend: Any, limit: float, tmp_path: Path) -> None:
    """Catches swapped frames, positions from another place, keys of the padding, and a bias of keys."""
    path, theirs = saved(tmp_path, **OPTIONS[kind])
    config = theirs.config
    shape = (2 * config.max_source_positions, config.num_mel_bins)
    features = np.random.default_rng(1).normal(0, 0.5, shape).astype(np.float32)
    text = [257, 258, *range(60, 80)]
    with torch.no_grad():
        tensors = torch.from_numpy(features.T[None].copy()), torch.tensor([text])
        want = theirs(tensors[0], decoder_input_ids=tensors[1]).logits[0].numpy()
    with LLM(path, backend=backend) as llm:
        sound = SoundInput(features, llm.config.n_sound, bytes(32))
        request = llm.engine.maker.make_output_request(
            SoundPrompt.of(sound, text), "logits", first_row=llm.config.n_sound
        )
        (found,) = llm.calls.compute([request])
    assert want.std() > 0.5
    np.testing.assert_allclose(found, want, rtol=0, atol=limit)


@pytest.mark.full
@pytest.mark.parametrize("timestamps", [False, True])
def test_greedy_answers_are_those_of_transformers(timestamps: bool, tmp_path: Path) -> None:
    """Catches rules of timestamps and suppressed tokens that differ, and windows of other samples."""
    theirs = tiny_model()
    if not timestamps:  # which would be no text
        theirs.generation_config.suppress_tokens += [*map(id_of, TIMES)]
    path = save_tiny(tmp_path, theirs)
    sounds = [noise(seconds, seed) for seed, seconds in enumerate((1, 0.7, 0.4))]
    with LLM(path, backend="reference", max_requests=4) as llm:
        found = llm.transcribe(sounds, language="de", timestamps=timestamps, fallback=False)
    for samples, ours in zip(sounds, found):
        given = extractor()(samples, sampling_rate=RATE, return_tensors="pt").input_features
        want = theirs.generate(
            given, language="de", task="transcribe", return_timestamps=timestamps, do_sample=False,
            num_beams=1, return_dict_in_generate=True,
        )  # fmt: skip
        ids = [i for i in want["sequences"][0].tolist() if i not in map(id_of, CONTROLS)]
        first = ours.segments[0].token_ids
        assert len(first) > 2
        assert list(first) == ids[: len(first)]
        texts = [i for segment in ours.segments for i in segment.token_ids if i < 256]
        assert texts == [i for i in ids if i < 256][: len(texts)]  # theirs goes on, into the silence


@pytest.mark.full
@pytest.mark.parametrize("condition", [False, True])
def test_long_sounds_are_those_of_transformers(condition: bool, pair: Any, tmp_path: Path) -> None:
    """Catches a window that begins elsewhere, previous text that is lost, and likelihoods of other tokens."""
    samples = noise(3.3, 2)
    given = extractor()(
        samples, sampling_rate=RATE, return_tensors="pt", truncation=False, padding="longest",
        return_attention_mask=True,
    )  # fmt: skip
    never = {"logprob_threshold": -100.0, "no_speech_threshold": 1.1, "compression_ratio_threshold": 1e9}
    want = pair[1].generate(
        given.input_features, attention_mask=given.attention_mask, language="de", task="transcribe",
        return_timestamps=True, temperature=(0.0,), condition_on_prev_tokens=condition, return_segments=True,
        return_dict_in_generate=True, output_scores=True, **never,
    )["segments"][0]  # fmt: skip
    with LLM(pair[0], backend="reference") as llm:
        options: Any = {"language": "de", "fallback": False, "condition_on_previous_text": condition}
        found = llm.transcribe(samples, **options).segments
    assert len({one.seek for one in found}) >= 4
    assert len(found) == len(want)
    for ours, theirs in zip(found, want):
        n = len(ours.token_ids)  # theirs has the beginning of the next segment, or the end, too
        assert list(ours.token_ids) == theirs["tokens"].tolist()[:n]
        assert ours.start_s == pytest.approx(min(float(theirs["start"]), 3.3), abs=1e-6)
        scores = torch.stack(list(theirs["result"]["scores"])).log_softmax(-1).numpy()
        at = theirs["idxs"][0] - (len(theirs["result"]["sequences"]) - len(scores))
        want_logprobs = scores[range(at, at + n), list(ours.token_ids)]
        np.testing.assert_allclose(ours.logprobs, want_logprobs, rtol=0, atol=1e-3)


def driven(
    llm: LLM, options: SpeechOptions, windows: list[tuple[str, float, float]]
) -> tuple[Any, list[Any]]:
    """The transcription of windows, and of each try its temperature and the text that it was told.

    A window has its text, the temperature from which on the model is sure of it, and how silent it is.
    """
    assert llm.speech is not None
    under_way, tries, left = llm.speech.transcribe(noise(len(windows)), options), [], iter(windows)
    asked = next(under_way)
    try:
        while True:
            prompt, (process,) = np.array(asked.prompt.token_ids), asked.params.logits_processors
            logits = np.zeros(N_VOCAB, np.float32)
            if asked.params.max_tokens == 1:  # the look at a window
                text, sure_from, silent = next(left)
                logits[id_of("<|nospeech|>")] = np.log((silent + 1e-9) / (1 - silent) * (N_VOCAB - 1))
                process(prompt, logits)
                asked = under_way.send([0])
                continue
            told = [i for i in asked.prompt.token_ids[asked.prompt.sound.n_tokens :] if i < N_BYTES]
            tries.append((asked.params.temperature, llm.tokenizer.decode(told)))
            own = llm.tokenizer.encode(text)
            ids = [id_of("<|0.00|>"), *own, id_of("<|1.00|>"), id_of("<|endoftext|>")]
            for i, chosen in enumerate(ids):
                sure = np.zeros_like(logits)
                sure[chosen] = 30 if asked.params.temperature >= sure_from else 0
                process(np.array([*prompt, *ids[:i]]), sure)
            asked = under_way.send(ids)
    except StopIteration as end:
        return end.value, tries


def test_a_poor_text_is_tried_again(llm: LLM) -> None:
    """Catches a text of unlikely or repeated words that stays, silence that is tried again, and the text of a
    high temperature as context. The limits are those of OpenAI's package."""
    options = SpeechOptions(language="en", prompt="Ada", hotwords="Kukri")
    repeated = "so " * 30
    windows = [(" one", 0.0, 0.9), (" two", 0.4, 0.5), (" hm", 9.0, 0.7), (repeated, 0.0, 0), (" end", 0, 0)]
    found, tries = driven(llm, options, windows)
    assert tries[:5] == [
        (0.0, " Kukri Ada"),
        (0.0, " Kukri Ada one"),
        (0.2, " Kukri Ada one"),
        (0.4, " Kukri Ada one"),
        (0.0, " Kukri Ada one two"),  # silent and unlikely: it is left out
    ]
    assert tries[5:] == [(t / 5, " Kukri Ada one two") for t in range(6)] + [(0.0, " Kukri")]
    assert found.text == f"one two{repeated} end"
    assert [one.temperature for one in found.segments] == [0.0, 0.4, 1.0, 0.0]
    assert [one.seek for one in found.segments] == [0, 100, 300, 400]
    assert found.segments[2].compression_ratio > 2.4 > found.segments[3].compression_ratio
    assert found.segments[0].no_speech_prob == pytest.approx(0.9, abs=1e-3)
    once = replace(options, fallback=False, condition_on_previous_text=False, hotwords="")
    assert driven(llm, once, windows)[1] == [(0.0, " Ada"), *[(0.0, "")] * 4]


@pytest.mark.full
def test_sixteen_sounds_at_once_have_the_bits_of_each_alone(llm: LLM) -> None:
    """Also catches places of one sound in another's, and answers that depend on what was kept."""
    sounds = [noise(0.3 + 0.04 * i, seed=i) for i in range(16)]
    together = llm.transcribe(sounds)
    n_encoded = llm.engine.encodings.n_encoded
    again = [llm.transcribe(one) for one in sounds]
    assert llm.engine.encodings.n_encoded == n_encoded
    assert together == again
    assert len({each.text for each in together}) > 8
    llm.engine.check_integrity()


@pytest.mark.full
@pytest.mark.parametrize("kv_type", ["q8_0", "q4"])
def test_answers_about_one_sound_share_its_pages(kv_type: Any, tmp_path: Path) -> None:
    """Catches work entries that a sequence shares beyond the sound, and rotated keys of the sound alone."""
    path, _ = saved(tmp_path, max_source_positions=150)
    sound = SoundInput.of(log_mel(noise(3), 300, 80), 160)
    prompts: Any = [SoundPrompt.of(sound, [257, 258 + i, 300]) for i in range(3)]
    options: Any = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True, "logprobs": 3}
    answers = {}
    for backend in ("cpu", "reference"):
        with LLM(path, backend=backend, kv_type=kv_type, max_requests=4, speculation="off") as llm:
            alone = [llm.generate(prompt, **options) for prompt in prompts]
            llm.engine.allocator.forget()
            together = llm.generate(prompts, **options)
            assert [one.logprobs for one in together] == [one.logprobs for one in alone]
            assert llm.engine.encodings.n_encoded == 1
            answers[backend] = [one.logprobs[0].logprob for one in alone]
    np.testing.assert_allclose(answers["cpu"], answers["reference"], rtol=0, atol=0.02)


def test_a_long_sound_continues_where_a_segment_ended(llm: LLM) -> None:
    found = llm.transcribe(noise(3.5, seed=3), language="fr")
    assert found.language == "fr"
    assert found.duration_s == 3.5
    starts = [segment.start_s for segment in found.segments]
    assert starts == sorted(starts)
    assert starts[-1] >= 1
    assert all(0 <= s.start_s <= s.end_s <= 3.5 for s in found.segments)


def test_a_language_is_detected(llm: LLM) -> None:
    assert llm.transcribe(noise(0.5)).language in LANGUAGES


@pytest.mark.parametrize(
    ("sound", "options", "message"),
    [
        (noise(0.1), {"language": "xx"}, "'language' must be one of de, en, fr"),
        (noise(0.1), {"task": "sing"}, "'task' must be transcribe or translate"),
        (noise(0.1), {"temperature": -1}, "'temperature' must be"),
        (noise(0.1), {"lang": "en"}, "'lang' is not supported"),
        (noise(2), {"timestamps": False}, "'timestamps' are required for more than 1 seconds"),
        ([np.zeros((2, 2))], {}, "'samples' must be numbers"),
        ([np.zeros(0)], {}, "'samples' must have at least one number"),
        ([np.array([0.5, np.nan])], {}, "'samples' must be finite"),
        ([np.array([1, 2])], {}, "'samples' must be floats"),
        ("/absent.wav", {}, "'sound' cannot be read"),
    ],
)
def test_what_cannot_be_transcribed_is_named(sound: Any, options: Any, message: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match=re.escape(message)):
        llm.transcribe(sound, **options)


def test_texts_need_a_sound(llm: LLM, pair: Any) -> None:
    with pytest.raises(RequestError, match="a sound is required"):
        llm.generate("Hello")
    with pytest.raises(RequestError, match="a sound is required"):
        llm.embed("Hello")
    with pytest.raises(UnsupportedError, match="forward"):
        llm.model.forward([[1, 2]])
    sound = SoundInput.of(log_mel(noise(0.2), 2 * N_ROWS, 80), llm.config.n_sound)
    with pytest.raises(RequestError, match="'sounds' must have features"):
        llm.generate(SoundPrompt.of(replace(sound, features=np.zeros((98, 80), np.float32)), [257]))


def test_other_models_hear_nothing(tmp_path: Path) -> None:
    config = tiny_config()
    path = write_tiny(tmp_path / "tiny.gguf", config, random_arrays(config))
    with (
        LLM(path, backend="reference") as llm,
        pytest.raises(UnsupportedError, match="sound is not supported"),
    ):
        llm.transcribe(noise(0.1))


def test_asyncio_gives_the_same(llm: LLM) -> None:
    """Catches a call that only the blocking face has."""

    async def transcribe() -> Any:
        return await AsyncLLM(llm).transcribe(noise(0.6), timestamps=False)

    assert asyncio.run(transcribe()) == llm.transcribe(noise(0.6), timestamps=False)


def test_languages_have_the_names_of_whisper() -> None:
    """Catches a name that is missing, and a model for English alone that names no language."""
    names = tr.models.whisper.tokenization_whisper.LANGUAGES
    assert {code: language_name(code) for code in names} == names
    assert [language_name(""), language_name("xx")] == ["english", "xx"]
