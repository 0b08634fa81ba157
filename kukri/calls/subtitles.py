"""Transcriptions as subtitles: SubRip and WebVTT."""

from __future__ import annotations

from kukri.calls.speech import Segment, Transcription
from kukri.calls.word_times import Word


def srt_of(found: Transcription) -> str:
    """Return the segments as SubRip, or their words if these have times."""
    cues = (
        f"{i}\n{_time(one.start_s, ',')} --> {_time(one.end_s, ',')}\n{_line(one.text)}\n"
        for i, one in enumerate(_cues(found), 1)
    )
    return "\n".join(cues)


def vtt_of(found: Transcription) -> str:
    """Return the segments as WebVTT, or their words if these have times."""
    cues = (
        f"{_time(one.start_s, '.')} --> {_time(one.end_s, '.')}\n{_line(one.text)}\n" for one in _cues(found)
    )
    return "\n".join(["WEBVTT\n", *cues])


def _cues(found: Transcription) -> list[Segment | Word]:
    return [cue for segment in found.segments for cue in segment.words or (segment,)]


def _line(text: str) -> str:
    """A cue's text, in which no line is empty and no arrow ends the cue."""
    return " ".join(text.split()).replace("-->", "->")


def _time(seconds: float, mark: str) -> str:
    minutes, thousandths = divmod(round(seconds * 1000), 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{thousandths // 1000:02}{mark}{thousandths % 1000:03}"
