"""/v1/audio/transcriptions and /translations, by OpenAI's client: the texts of `LLM.transcribe`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.calls.subtitles import srt_of, vtt_of
from kukri.errors import CapacityError
from kukri.server.answers.event_reply import EventReply
from kukri.server.openai import audio
from kukri.sound.bounds import RATE
from kukri.sound.files import read_sound_file
from tests.lazy_imports import lazy_imports
from tests.server.answer_forms import check_chunks
from tests.server.live_server import MODEL, Served, serving
from tests.sound.encoded import encoded
from tests.sound.tiny_whisper import save_noise, save_tiny, tiny_model
from tests.tiny_gguf import write_tiny

with lazy_imports():
    import openai

PATH = "/v1/audio/transcriptions"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = save_tiny(tmp_path_factory.mktemp("whisper"), tiny_model())  # type: ignore[no-untyped-call]
    with LLM(path, max_requests=8) as opened:
        yield opened


@pytest.fixture(scope="module")
def server(llm: LLM) -> Iterator[Served]:
    with serving(llm) as served:
        yield served


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound of several windows."""
    return save_noise(tmp_path_factory.mktemp("sounds") / "secret-name.wav", 3, 2.2)


def is_free(server: Served) -> bool:
    """Whether no request of the server holds a sound or runs."""
    return not server.served.bridge.is_busy and server.app.state.sounds.n_held == 0


@pytest.mark.representative(4)
def test_each_form_has_what_the_library_says(llm: LLM, server: Served, sound: Path, caplog: Any) -> None:
    """Catches a field that is dropped, a form of another text, and a sound or its text in the log."""
    asked: Any = {"language": "de", "prompt": "Ada", "temperature": 0.2}
    want = llm.transcribe(sound, **asked, hotwords="kukri, Lovelace")
    plain = llm.transcribe(sound, **asked)
    assert want.text != plain.text
    with caplog.at_level(logging.DEBUG), sound.open("rb") as file:
        api = server.client.audio.transcriptions
        keywords = {"extra_body": {"keywords": ["kukri", "Lovelace"]}}
        given: Any = {"model": MODEL, **asked, **keywords}
        found = {
            form: api.create(file=sound, response_format=form, **given) for form in ("text", "srt", "vtt")
        }
        verbose = api.create(
            file=file, response_format="verbose_json", timestamp_granularities=["segment"], **given
        )
        counted = api.create(file=sound, include=["logprobs"], **given)
        stream = api.create(file=sound, stream=True, include=["logprobs"], **given)
        events = list(stream)
    assert found == {"text": want.text + "\n", "srt": srt_of(want), "vtt": vtt_of(want)}
    assert (verbose.text, verbose.language, verbose.duration) == (want.text, "german", 2.2)
    pairs = {"start": "start_s", "end": "end_s", "text": "text", "seek": "seek", "temperature": "temperature"}
    pairs |= {name: name for name in ("avg_logprob", "compression_ratio", "no_speech_prob")}
    assert len(want.segments) > 2
    for ours, theirs in zip(verbose.segments, want.segments, strict=True):
        assert {one: getattr(ours, one) for one in pairs} == {
            one: getattr(theirs, name) for one, name in pairs.items()
        }
        assert ours.tokens == list(theirs.token_ids)
    assert counted.text == want.text
    assert llm.speech is not None
    pairs_of_tokens = [one for each in want.segments for one in zip(each.token_ids, each.logprobs)]
    of_text = [logprob for i, logprob in pairs_of_tokens if i < llm.speech.first_time]
    assert [one.logprob for one in counted.logprobs] == of_text
    usage = counted.usage
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens
    n_windows = len({one.seek for one in want.segments})
    assert usage.input_token_details.audio_tokens >= n_windows * llm.config.n_sound
    with server.http() as http:  # as whisper.cpp's README asks its server
        data = {"temperature": "0.2", "temperature_inc": "0.2", "response_format": "json", "language": "de"}
        answer = http.post("/inference", files={"file": sound.read_bytes()}, data=data).json()
    assert answer["text"] == llm.transcribe(sound, language="de", temperature=0.2).text
    *deltas, done = events
    assert {one.type for one in deltas} == {"transcript.text.delta"}
    assert "".join(one.delta for one in deltas).strip() == done.text == want.text
    assert done.usage.total_tokens == usage.total_tokens
    assert [one.logprob for delta in deltas for one in delta.logprobs] == of_text
    assert "secret-name" not in caplog.text
    assert want.segments[0].text not in caplog.text
    assert "n_generated" in str([vars(one) for one in caplog.records])


@pytest.mark.full
def test_translations_are_a_task(llm: LLM, server: Served, sound: Path) -> None:
    """Catches a translation that is a transcription."""
    want = llm.transcribe(sound, task="translate")
    assert server.client.audio.translations.create(file=sound, model=MODEL).text == want.text
    assert llm.transcribe(sound).text != want.text


@pytest.mark.full
def test_words_have_times(llm: LLM, server: Served, sound: Path) -> None:
    """Catches words of another window, segments that nobody asked for, and times that change the text."""
    want = llm.transcribe(sound, language="de", word_times=True)
    words = [(one.text.strip(), one.start_s, one.end_s) for each in want.segments for one in each.words]
    assert len(words) > 5
    given: Any = {"model": MODEL, "language": "de", "file": sound, "response_format": "verbose_json"}
    for asked in (["word"], ["segment", "word"]):
        found = server.client.audio.transcriptions.create(**given, timestamp_granularities=asked)
        assert found.text == want.text
        assert [(one.word, one.start, one.end) for one in found.words] == words
        assert bool(found.segments) == ("segment" in asked)


@pytest.mark.full
def test_files_of_other_formats_are_heard(llm: LLM, server: Served, sound: Path) -> None:
    """Catches a face that reads WAV files alone, and samples that another format changes."""
    flac = encoded(read_sound_file(sound), "flac", "flac", RATE)
    want = llm.transcribe(sound, language="de").text
    assert llm.transcribe(flac, language="de").text == want
    given: Any = {"model": MODEL, "language": "de"}
    assert server.client.audio.transcriptions.create(file=("a.flac", flac), **given).text == want


@pytest.mark.full
def test_a_server_without_the_decoder_says_so(
    server: Served, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Catches an error of the server, and its directories in an answer to a client."""
    monkeypatch.setattr("kukri.sound.files.find_spec", lambda name: None)
    with caplog.at_level(logging.WARNING), server.http() as http:
        answer = http.post(PATH, files={"file": b"fLaC" + bytes(100)}, data={"model": MODEL})
    assert answer.status_code == 400
    assert "must be a WAV file" in answer.text
    assert "pip install" in caplog.text
    assert "pip install" not in answer.text


BAD: list[tuple[dict[str, Any], str]] = [
    ({"file": b"no sound"}, "'file' must be a sound file"),
    ({"file": b""}, "'file' must not be empty"),
    ({"response_format": "diarized_json"}, "'response_format' must be"),
    ({"timestamp_granularities[]": ["segment", "word"]}, "'response_format' must be 'verbose_json'"),
    ({"timestamp_granularities[]": "letter"}, "'timestamp_granularities[0]' must be"),
    ({"temperature": "1e9"}, "'temperature' must be at most 1"),
    ({"temperature": "nan"}, "'temperature' must be a number"),
    ({"language": "xx"}, "'language' must be one of de, en, fr"),
    ({"include[]": ["everything"]}, "'include[0]' must be"),
    ({"stream": "true", "response_format": "srt"}, "'stream' cannot be combined"),
    ({"nothing": "1"}, "'nothing' is not supported"),
    ({"keywords[]": ["a"] * 40}, "at most 32 fields"),
    ({"prompt": "a" * 5000}, "'prompt' must be at most 4096 bytes"),
    ({"model": "other"}, "was not found"),
]


def test_wrong_forms_name_the_cause_and_hurt_nobody(llm: LLM, server: Served, sound: Path) -> None:
    """Catches a 500, a field that is taken for another, and a sound that stays in memory after its error."""
    with server.http() as http:
        for fields, message in BAD:
            file = fields.get("file", sound.read_bytes())
            data = {"model": MODEL, **{name: value for name, value in fields.items() if name != "file"}}
            refused = http.post(PATH, files={"file": ("a.mp3", file)}, data=data)
            assert refused.status_code in (400, 404), refused.text
            assert message in refused.json()["error"]["message"]
        assert "multipart/form-data" in http.post(PATH, json={"model": MODEL}).text
        assert "'file' is required" in http.post(PATH, data={}, files={"other": b"1"}).text
    server.wait_until(lambda: is_free(server))


@pytest.mark.full
def test_other_models_hear_nothing(tmp_path: Path, sound: Path) -> None:
    """Catches a server's error, and an English text that is made up."""
    with (
        LLM(write_tiny(tmp_path / "tiny.gguf")) as llm,
        serving(llm) as server,
        pytest.raises(openai.BadRequestError, match="a model that hears"),
    ):
        server.client.audio.transcriptions.create(file=sound, model=MODEL)


@pytest.mark.full
def test_a_sound_may_be_larger_than_a_body_up_to_its_own_bounds(
    llm: LLM, sound: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a sound that --max-body bounds, one that nothing bounds, and room that is not given back."""
    n = len(sound.read_bytes())
    cases: list[tuple[dict[str, Any], int, int]] = [
        ({"max_upload_bytes": n}, 1 << 30, 200),
        ({"max_upload_bytes": n - 1}, 1 << 30, 400),
        ({"max_upload_bytes": 1000}, 1 << 30, 413 if n > (1 << 17) + 1000 else 400),
        ({}, n - 1, 503),  # for the bytes
        ({}, 2 * n, 503),  # for the samples
    ]
    for settings, held, status in cases:
        monkeypatch.setattr(audio, "MAX_HELD_BYTES", held)
        with serving(llm, max_body_bytes=2000, **settings) as server, server.http() as http:
            answer = http.post(PATH, files={"file": sound.read_bytes()}, data={"model": MODEL})
            assert answer.status_code == status, answer.text
            server.wait_until(partial(is_free, server))


@pytest.mark.full
def test_who_leaves_or_is_late_ends_the_work(llm: LLM, server: Served, tmp_path: Path) -> None:
    """Catches a sound of an hour that is heard for nobody."""
    long = save_noise(tmp_path / "a.wav", 1, 60.0)
    form: dict[str, Any] = {"files": {"file": long.read_bytes()}, "data": {"model": MODEL, "stream": "true"}}
    with server.http() as http, http.stream("POST", PATH, **form) as answer:
        assert next(text for text in answer.iter_text() if "transcript.text.delta" in text)
    server.wait_until(lambda: is_free(server))
    with serving(llm, deadline_s=0.2) as late, late.http() as http:
        assert "deadline_exceeded" in http.post(PATH, files=form["files"], data={"model": MODEL}).text
        streamed = http.post(PATH, **form).text
        assert "not finished within 0.2 s" in streamed
        assert streamed.endswith("[DONE]\n\n")
        late.wait_until(lambda: is_free(late))


@pytest.mark.full
def test_streams_have_the_form_of_their_chunks(server: Served, sound: Path) -> None:
    """Catches an event that the document does not describe."""
    form = {"model": MODEL, "stream": "true", "include[]": "logprobs"}
    with server.http() as http:
        text = http.post(PATH, files={"file": sound.read_bytes()}, data=form).text
    assert check_chunks("POST", PATH, text) > 2


def test_a_silent_stream_is_kept_alive() -> None:
    """Catches a connection that a proxy closes, an error that breaks the stream, and work for nobody."""
    sent: list[bytes] = []
    silence, closed = asyncio.Event(), asyncio.Event()

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))
        if sent[-1].startswith(b":"):
            silence.set()

    async def events() -> AsyncGenerator[bytes]:
        yield b"data: 1\n\n"
        await silence.wait()
        raise CapacityError("too many")

    async def endless() -> AsyncGenerator[bytes]:
        try:
            await asyncio.Event().wait()
            yield b""
        finally:
            closed.set()

    async def stays() -> Any:
        await asyncio.Event().wait()

    async def leaves() -> Any:
        return {"type": "http.disconnect"}

    async def run() -> None:
        await EventReply(events(), 0.001)({"type": "http"}, stays, send)
        await EventReply(endless(), 60.0)({"type": "http"}, leaves, send)
        assert closed.is_set()

    asyncio.run(asyncio.wait_for(run(), 30))
    assert sent[1] == b"data: 1\n\n"
    assert any(b"too many" in one for one in sent)
