"""Transcription: which prompts a sound becomes, window by window, and what its answers say."""

from __future__ import annotations

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypedDict, get_args

import numpy as np

from kukri.errors import FormatError, RequestError, brief, close_matches
from kukri.formats.json_files import read_json
from kukri.sampling import SampledToken, SamplingParams
from kukri.sound.features import HOP, RATE, log_mel
from kukri.sound.prompt import SoundInput, SoundPrompt
from kukri.sound.rules import FirstLook, TextRules

if TYPE_CHECKING:
    from kukri.config import ModelConfig
    from kukri.kernels.arrays import FloatArray
    from kukri.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TIMES_PER_S = 50  # timestamps
# A window is skipped if it is silent with more than this probability and its text is less likely than this.
_SILENT, _UNLIKELY = 0.6, -1.0


@dataclass(frozen=True)
class Segment:
    """A stretch of speech: its text, from `start_s` to `end_s`, in seconds of the sound."""

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    avg_logprob: float  # nats a token in its window
    no_speech_prob: float  # in its window


@dataclass(frozen=True)
class Transcription:
    """What was said in a sound of `duration_s` seconds; `language` is "" if the model knows only English."""

    text: str
    language: str
    duration_s: float
    segments: tuple[Segment, ...] = ()

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True)
class SpeechOptions:
    """How a sound is transcribed.

    `language` is its code, such as "en"; None detects it. `task` "translate" writes English. With `prompt`
    words come likelier, or in that spelling. `timestamps` divide the text into segments, and a sound longer
    than a window needs them.
    """

    language: str | None = None
    task: Task = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    timestamps: bool = True

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> SpeechOptions:
        """The options of these names. Raises RequestError on a name that is no option."""
        names = [one.name for one in fields(cls)]
        for name in given:
            if name not in names:
                raise RequestError.of(name, f"is not supported{close_matches(name, names)}")
        return cls(**given)


class SpeechKeywords(TypedDict, total=False):
    """The fields of `SpeechOptions` as keyword arguments."""

    language: str | None
    task: Task
    prompt: str
    temperature: float
    timestamps: bool


class Answer(Protocol):
    """What is read of the answer to a prompt."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens, the end among them."""

    @property
    def logprobs(self) -> Sequence[SampledToken] | None:
        """What is known of each token, if it was asked for."""


class Asked(NamedTuple):
    """A prompt, and the parameters of its answer."""

    prompt: SoundPrompt
    params: SamplingParams


@dataclass
class Speech:
    """How one model transcribes: its tokens, and what its files say of them."""

    tokenizer: Tokenizer
    config: ModelConfig
    n_bands: int
    settings: Mapping[str, Any]
    languages: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Raises FormatError if the vocabulary lacks Whisper's tokens."""
        ids = self.tokenizer.vocabulary.id_of
        self._start, self._no_times = self._id("<|startoftranscript|>"), self._id("<|notimestamps|>")
        self._no_speech_id = ids.get("<|nospeech|>", ids.get("<|nocaptions|>"))
        found = ((match[1], i) for text, i in ids.items() if (match := _LANGUAGE.fullmatch(text)))
        self.languages = dict(found) if self.settings.get("is_multilingual", True) else {}
        self._end = min(self.tokenizer.eos_ids)
        self.n_frames = 2 * self.config.n_sound_rows

    @classmethod
    def of(cls, directory: Path, tokenizer: Tokenizer, config: ModelConfig, n_bands: int) -> Speech:
        """Return how the model in a directory transcribes. Raises FormatError."""
        path = directory / "generation_config.json"
        return cls(tokenizer, config, n_bands, read_json(path) if path.is_file() else {})

    @property
    def window_s(self) -> float:
        """Seconds of a window."""
        return self.n_frames * HOP / RATE

    def check(self, options: SpeechOptions) -> None:
        """Raises RequestError on options that this model does not take."""
        language = options.language
        if language is not None and language not in self.languages and (self.languages or language != "en"):
            known = ", ".join(sorted(self.languages)) or "en"
            raise RequestError.of("language", f"must be one of {known}, not {brief(language)}")
        if options.task not in get_args(Task):
            raise RequestError.of("task", f"must be transcribe or translate, not {brief(options.task)}")
        if options.task == "translate" and not self.languages:
            raise RequestError.of("task", "must be transcribe for a model that knows only English")

    def transcribe(
        self, samples: FloatArray, options: SpeechOptions
    ) -> Generator[Asked, Answer, Transcription]:
        """The prompts of a sound, float32 [n] at 16 kHz, each of which is sent its result.

        Windows follow one another: the next begins where the last whole segment ended. Raises RequestError.
        """
        self.check(options)
        language = "" if not self.languages else options.language
        segments: list[Segment] = []
        start, n_frames = 0, -(-len(samples) // HOP)
        if not options.timestamps and n_frames > self.n_frames:
            raise RequestError.of("timestamps", f"are required for more than {self.window_s:g} seconds")
        features = log_mel(samples, max(n_frames, self.n_frames), self.n_bands)
        while start < n_frames:
            window = features[start : start + self.n_frames]
            window = np.pad(window, ((0, self.n_frames - len(window)), (0, 0)))
            sound = SoundInput.of(window, self.config.n_sound)
            look = FirstLook(() if language is not None else self.languages.values(), self._no_speech_id)
            first = SamplingParams(temperature=0, max_tokens=1, logits_processors=[look], ignore_eos=True)
            seen = yield Asked(SoundPrompt.of(sound, [self._start]), first)
            if language is None:
                language = next(name for name, i in self.languages.items() if i == seen.token_ids[0])
            asked = self._asked(sound, language, options)
            result = yield asked
            logprob = _mean([token.logprob for token in result.logprobs or () if token.logprob is not None])
            n_left = min(self.n_frames, n_frames - start)
            about = (start * HOP / RATE, n_left * HOP / RATE, logprob, look.no_speech)
            found, n_heard = self._segments(result.token_ids, *about)
            if not (look.no_speech > _SILENT and logprob < _UNLIKELY):
                segments += found
            start += n_heard
        text = "".join(segment.text for segment in segments).strip()
        return Transcription(text, language or "", len(samples) / RATE, tuple(segments))

    def _asked(self, sound: SoundInput, language: str, options: SpeechOptions) -> Asked:
        """The prompt of a window whose language is known."""
        text = [self._start]
        if language:
            text += [self.languages[language], self._id(f"<|{options.task}|>")]
        if not options.timestamps:
            text.append(self._no_times)
        n_text = self.config.max_context - self.config.n_sound
        if options.prompt:  # as if it had been said before
            before = self.tokenizer.encode(" " + options.prompt.strip())
            text = [self._id("<|startofprev|>"), *before[-(n_text // 2 - 1) :], *text]
        rules = TextRules(
            n_prompt=sound.n_tokens + len(text),
            suppressed=self._listed("suppress_tokens"),
            not_first=self._listed("begin_suppress_tokens"),
            end_id=self._end,
            first_time=self._no_times + 1,
            latest_start=self.settings.get("max_initial_timestamp_index"),
            writes_times=options.timestamps,
        )
        params = SamplingParams(
            temperature=options.temperature,
            max_tokens=n_text - len(text),
            logits_processors=[rules],
            logprobs=0,
        )
        return Asked(SoundPrompt.of(sound, text), params)

    def _segments(
        self, token_ids: Sequence[int], start_s: float, n_s: float, logprob: float, no_speech: float
    ) -> tuple[list[Segment], int]:
        """The segments of a window's answer, and after how many frames the next window begins."""
        first, ids = self._no_times + 1, [i for i in token_ids if i != self._end]
        cuts = [i for i in range(1, len(ids)) if ids[i] >= first and ids[i - 1] >= first]
        is_cut_off = bool(cuts) and (len(ids) < 2 or ids[-1] < first or ids[-2] >= first)
        if not is_cut_off:
            cuts.append(len(ids))
        segments: list[Segment] = []
        stop = 0
        for begin, end in zip([0, *cuts], cuts):
            own = ids[begin:end]
            times = [(i - first) / _TIMES_PER_S for i in own if i >= first]
            text = self.tokenizer.decode([i for i in own if i < first], skip_special=True)
            from_s = min(times[0] if times else 0.0, n_s)
            to_s = min(times[-1] if len(times) > 1 else n_s, n_s)
            if text.strip():
                place = (start_s + from_s, start_s + max(to_s, from_s))
                segments.append(Segment(*place, text, tuple(own), logprob, no_speech))
            stop = round(to_s * RATE / HOP)
        # what was begun is heard again in the next window
        return segments, stop if is_cut_off and stop else self.n_frames

    def _listed(self, key: str) -> list[int]:
        """The token ids of a setting."""
        stated = self.settings.get(key) or []
        return [i for i in stated if type(i) is int and 0 <= i < self.config.n_vocab]

    def _id(self, text: str) -> int:
        found = self.tokenizer.vocabulary.id_of.get(text)
        if found is None:
            raise FormatError(f"the tokenizer must have the token {text}, of speech")
        return found


def _mean(numbers: Sequence[float]) -> float:
    return sum(numbers) / len(numbers) if numbers else 0.0
