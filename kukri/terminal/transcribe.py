"""`kukri transcribe`: sound files to texts, subtitles or JSON."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kukri.calls.speech import Task, Transcription
from kukri.calls.subtitles import srt_of, vtt_of
from kukri.calls.transcribe import read_sound
from kukri.errors import ConfigError, RequestError, UnsupportedError
from kukri.llm import LLM
from kukri.sound.bounds import MAX_FILE_BYTES
from kukri.terminal.options import TranscribeOptions
from kukri.terminal.output import allow_any_text, write_text
from kukri.terminal.progress import loading_bar

_AT_ONCE = 16  # files in a batch, after which their texts are written


def transcribe_files(
    files: Sequence[str], model: str | None, options: TranscribeOptions, loading: dict[str, Any]
) -> None:
    """Write what is said in each file to standard output, or to a file in the directory `options.out`.

    A file that cannot be read is reported at the end. Raises ConfigError without a model, without
    files, or if a target exists, and RequestError at the end if a file was not read.
    """
    if model is None:
        raise ConfigError("a model is required: name a Whisper directory before the files")
    if not files:
        raise RequestError("a FILE is required: name sound files, or - for standard input", param="files")
    write, suffix = _FORMS[options.format]
    if options.out is None and len(files) > 1 and suffix in (".srt", ".vtt"):
        raise ConfigError(f"--out is required for the {options.format} of several files")
    targets = {file: _target(file, options.out, suffix) for file in dict.fromkeys(files)}
    if options.out is not None and len(set(targets.values())) < len(targets):
        raise ConfigError("files of one name in several directories cannot be combined with --out")
    failed: list[str] = []
    with loading_bar() as progress:
        llm = LLM(model, progress=progress, **loading)
    with llm:
        for file, found in _transcribed(llm, files, options, failed):
            text, target = write(found, file), targets[file]
            if target is None:
                allow_any_text()
                write_text(f"{file}: {text}" if len(files) > 1 and suffix == ".txt" else text)
                sys.stdout.flush()
            else:
                with target.open("x", encoding="utf-8", newline="\n") as stream:
                    stream.write(text)
    if failed:
        raise RequestError("; ".join(failed), param="files")


def _target(file: str, directory: Path | None, suffix: str) -> Path | None:
    """The file to write, if there is a directory for it. Raises ConfigError if it exists."""
    if directory is None:
        return None
    target = directory / f"{'stdin' if file == '-' else Path(file).stem}{suffix}"
    if target.exists():
        raise ConfigError(f"the file '{target}' must not exist: remove it, or choose another --out")
    directory.mkdir(parents=True, exist_ok=True)
    return target


def _transcribed(
    llm: LLM, files: Sequence[str], options: TranscribeOptions, failed: list[str]
) -> Iterator[tuple[str, Transcription]]:
    """Yields what is said in each file that can be read; adds what is wrong with the others to `failed`."""
    task: Task = "translate" if options.translate else "transcribe"
    for begin in range(0, len(files), _AT_ONCE):
        sounds: dict[str, Any] = {}
        for file in files[begin : begin + _AT_ONCE]:
            try:
                data = sys.stdin.buffer.read(MAX_FILE_BYTES + 1) if file == "-" else file
                sounds[file] = read_sound(data)
            except (RequestError, UnsupportedError) as error:
                failed.append(f"{file}: {error}")
        found = llm.transcribe(
            list(sounds.values()),
            language=options.language,
            task=task,
            prompt=options.prompt or "",
            hotwords=options.hotwords or "",
            word_times=options.word_times,
        )
        yield from zip(sounds, found)


def _text(found: Transcription, file: str) -> str:
    return found.text + "\n"


def _json(found: Transcription, file: str) -> str:
    return json.dumps({"file": file, **asdict(found)}, ensure_ascii=False) + "\n"


_FORMS: dict[str, tuple[Callable[[Transcription, str], str], str]] = {
    "text": (_text, ".txt"),
    "json": (_json, ".json"),
    "srt": (lambda found, _: srt_of(found), ".srt"),
    "vtt": (lambda found, _: vtt_of(found), ".vtt"),
}
