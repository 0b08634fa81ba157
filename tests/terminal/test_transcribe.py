"""`kukri transcribe`: forms of the output, files that cannot be read, and targets that exist."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kukri import LLM
from kukri.calls.speech import Segment, Transcription
from kukri.calls.subtitles import srt_of, vtt_of
from kukri.cli import app
from tests.sound.tiny_whisper import save_noise, save_tiny, tiny_model

FOUND = Transcription(
    "One. Two --> three.",
    "en",
    3700.0,
    (
        Segment(0.0, 1.25, " One.", (1,), (-0.1,), 0, 0.0, -0.1, 0.8, 0.0),
        Segment(61.999, 3661.5, " Two -->\n\n three.", (2,), (-0.2,), 6000, 0.0, -0.2, 0.8, 0.0),
    ),
)


def test_subtitles_have_times_and_no_empty_lines() -> None:
    """Catches hours that are lost, a comma in WebVTT, and a text that ends its own cue."""
    assert srt_of(FOUND) == (
        "1\n00:00:00,000 --> 00:00:01,250\nOne.\n\n2\n00:01:01,999 --> 01:01:01,500\nTwo -> three.\n"
    )
    assert vtt_of(FOUND) == (
        "WEBVTT\n\n00:00:00.000 --> 00:00:01.250\nOne.\n\n00:01:01.999 --> 01:01:01.500\nTwo -> three.\n"
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("whisper"), tiny_model())


def said(*arguments: str | Path, stdin: bytes | None = None) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["transcribe", *map(str, arguments)], input=stdin)
    return done.exit_code, done.stdout, done.stderr


@pytest.mark.representative(3)
def test_files_become_texts_and_a_broken_one_stops_no_other(model: Path, tmp_path: Path) -> None:
    """Catches a text of another file, an answer that `LLM.transcribe` does not give, and a lost error."""
    first, second = save_noise(tmp_path / "a.wav", 1), save_noise(tmp_path / "b.wav", 2)
    broken = tmp_path / "c.mp3"
    broken.write_bytes(b"no sound")
    with LLM(model) as llm:
        wanted = [llm.transcribe(path) for path in (first, second)]
    tokens = [[list(one.token_ids) for one in each.segments] for each in wanted]
    assert tokens[0] != tokens[1]
    code, out, err = said(model, first, broken, second, "--json")
    assert code == 2
    made = [json.loads(line) for line in out.splitlines()]
    assert [[one["token_ids"] for one in each["segments"]] for each in made] == tokens
    assert [each["text"] for each in made] == [each.text for each in wanted]
    assert "c.mp3" in err
    assert "must be a sound file" in err
    code, out, _ = said("-m", model, "-", stdin=first.read_bytes())
    assert (code, out) == (0, wanted[0].text + "\n")


@pytest.mark.full
def test_no_file_is_overwritten(model: Path, tmp_path: Path) -> None:
    """Catches a target that exists, before anything is transcribed."""
    path, out = save_noise(tmp_path / "a.wav", 1), tmp_path / "texts"
    assert said(model, path, "-f", "vtt", "-o", out)[0] == 0
    written = (out / "a.vtt").read_text()
    assert written.startswith("WEBVTT\n")
    code, _, err = said(model, path, "-f", "vtt", "-o", out)
    assert code == 2
    assert "must not exist" in err
    assert (out / "a.vtt").read_text() == written
    assert "--out" in said(model, path, path, "-f", "srt")[2]
    (tmp_path / "other").mkdir()
    other = save_noise(tmp_path / "other" / "a.wav", 2)
    assert "cannot be combined" in said(model, path, other, "-o", tmp_path / "both")[2]
    assert "model is required" in said(path)[2]


@pytest.mark.full
def test_words_are_cues(model: Path, tmp_path: Path) -> None:
    """Catches an option that is lost, and words of half a cue."""
    path = save_noise(tmp_path / "a.wav", 1)
    made = json.loads(said(model, path, "--word-times", "--json")[1])
    words = [word for one in made["segments"] for word in one["words"]]
    text = "".join(word["text"] for word in words).strip()
    assert text.replace("\ufffd", "") == made["text"].replace("\ufffd", "")  # bytes that are no text
    cues = said(model, path, "--word-times", "-f", "srt")[1]
    assert cues.count("-->") == len(words)
    assert cues.startswith(f"1\n00:00:0{words[0]['start_s']:.3f}".replace(".", ","))
