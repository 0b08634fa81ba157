"""Transcription: which prompts a sound becomes, window by window, and what its answers say."""

from __future__ import annotations

import re
import zlib
from collections.abc import Generator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypedDict, get_args

import numpy as np

from kukri.calls.word_times import AlignmentListener, Word, split_words, timed_words
from kukri.dataclass import dataclass, field, fields
from kukri.errors import FormatError, RequestError, brief, close_matches
from kukri.formats.json_files import read_json
from kukri.sampling import SamplingParams
from kukri.sound.bounds import RATE
from kukri.sound.features import HOP, log_mel
from kukri.sound.prompt import SoundInput, SoundPrompt
from kukri.sound.rules import FirstLook, TextRules

if TYPE_CHECKING:
    from kukri.config import ModelConfig
    from kukri.kernels.arrays import FloatArray
    from kukri.tokenizer import Tokenizer

Task = Literal["transcribe", "translate"]
_LANGUAGE = re.compile(r"<\|([a-z]{2,3})\|>")
_TIMES_PER_S = 50  # timestamps
# The defaults of OpenAI's package. A window whose text is less likely than this (nats a token) is skipped if
# it is silent with more than this probability. Otherwise it is tried again at the next temperature, as is a
# text that repeats itself, so that it becomes this many times smaller. After a text of a higher temperature
# than the last number here, the next window is not told what was said.
_UNLIKELY, _SILENT, _REPETITIVE, _WARM = -1.0, 0.6, 2.4, 0.5
_WARMER = 0.2  # from a temperature to the next


@dataclass(frozen=True)
class Segment:
    """A stretch of speech: its text, from `start_s` to `end_s`, in seconds of the sound.

    `logprobs` has the natural logarithm of the probability of each token, among the tokens that the rules
    allowed. The other numbers are facts of the window: `seek` is the frame (a hundredth of a second) where it
    begins, `avg_logprob` is the mean of its tokens, and `compression_ratio` is how many times smaller zlib
    makes its text. `words` are there if the options ask for their times.
    """

    start_s: float
    end_s: float
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    seek: int
    temperature: float
    avg_logprob: float
    compression_ratio: float
    no_speech_prob: float
    words: tuple[Word, ...] = ()


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

    `language` is its code, such as "en"; None detects it. `task` "translate" writes English. `prompt` is
    taken for what was said before the sound, and `hotwords` for what was said before each window, so that
    their words come likelier, and in their spelling. A window whose text is unlikely or repeats itself is
    tried again at higher temperatures, up to 1, unless `fallback` is off. With `condition_on_previous_text`
    a window is told the text before it. `timestamps` divide the text into segments, and a sound longer than
    a window needs them. With `word_times` segments have words.
    """

    language: str | None = None
    task: Task = "transcribe"
    prompt: str = ""
    hotwords: str = ""
    temperature: float = 0.0
    fallback: bool = True
    condition_on_previous_text: bool = True
    timestamps: bool = True
    word_times: bool = False

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
    hotwords: str
    temperature: float
    fallback: bool
    condition_on_previous_text: bool
    timestamps: bool
    word_times: bool


class Asked(NamedTuple):
    """A prompt, the parameters of its answer, the segments that were found before, and who listens to it."""

    prompt: SoundPrompt
    params: SamplingParams
    segments: Sequence[Segment]
    listeners: Sequence[AlignmentListener] = ()


@dataclass(frozen=True)
class _Take:
    """A text of a window at a temperature, as tokens without the end."""

    token_ids: list[int]
    logprobs: list[float]
    temperature: float
    avg_logprob: float
    compression_ratio: float


@dataclass
class Speech:
    """How one model transcribes: its tokens, and what its files say of them.

    Tokens from `first_time` on are timestamps.
    """

    tokenizer: Tokenizer
    config: ModelConfig
    n_bands: int
    settings: Mapping[str, Any]
    languages: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        """Raises FormatError if the vocabulary lacks Whisper's tokens."""
        ids = self.tokenizer.vocabulary.id_of
        self._start, self._no_times = self._id("<|startoftranscript|>"), self._id("<|notimestamps|>")
        self.first_time = self._no_times + 1
        self._no_speech_id = ids.get("<|nospeech|>", ids.get("<|nocaptions|>"))
        found = ((match[1], i) for text, i in ids.items() if (match := _LANGUAGE.fullmatch(text)))
        self.languages = dict(found) if self.settings.get("is_multilingual", True) else {}
        self._end = min(self.tokenizer.eos_ids)
        self.n_frames = 2 * self.config.n_sound_rows
        self.n_text = self.config.max_context - self.config.n_sound

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
        if not (isinstance(options.temperature, int | float) and options.temperature >= 0):
            raise RequestError.of("temperature", "must be a number of at least 0")
        if options.task == "translate" and not self.languages:
            raise RequestError.of("task", "must be transcribe for a model that knows only English")

    def transcribe(
        self, samples: FloatArray, options: SpeechOptions
    ) -> Generator[Asked, Sequence[int], Transcription]:
        """The prompts of a sound, float32 [n] at 16 kHz, each of which is sent the tokens of its answer.

        Windows follow one another: the next begins where the last whole segment ended. Raises RequestError.
        """
        self.check(options)
        duration_s, n_frames = len(samples) / RATE, -(-len(samples) // HOP)
        if not options.timestamps and n_frames > self.n_frames:
            raise RequestError.of("timestamps", f"are required for more than {self.window_s:g} seconds")
        features = log_mel(samples, max(n_frames, self.n_frames), self.n_bands)
        language = options.language if self.languages else ""
        segments: list[Segment] = []
        if language is None:
            look = FirstLook(self.languages.values(), None)
            (found,) = yield self._look(self._window(features, 0), [], look, segments)
            language = next(name for name, i in self.languages.items() if i == found)
        said, start = self._words(options.prompt), 0
        while start < n_frames:
            sound, before = self._window(features, start), self._before(said, options)
            look = FirstLook((), self._no_speech_id)
            yield self._look(sound, before, look, segments)
            for temperature in _temperatures(options):
                text = [*before, *self._beginning(language, options)]
                rules = self._rules(sound.n_tokens + len(text), options)
                params = SamplingParams(
                    temperature=temperature,
                    seed=start,
                    max_tokens=min(self.n_text // 2, self.n_text - len(text)),
                    logits_processors=[rules],
                )
                token_ids = yield Asked(SoundPrompt.of(sound, text), params, segments)
                take = self._take(token_ids, rules.logprobs(token_ids), temperature)
                is_silent = look.no_speech > _SILENT and take.avg_logprob <= _UNLIKELY
                if is_silent or not (take.avg_logprob < _UNLIKELY or take.compression_ratio > _REPETITIVE):
                    break
            if is_silent:
                start += self.n_frames
                continue
            new, n_heard = self._segments(take, start, min(self.n_frames, n_frames - start), look.no_speech)
            if options.word_times and new:
                n_rows = max(min(self.n_frames, n_frames - start) // 2, 1)
                new = yield from self._with_words(new, sound, n_rows, language, options, segments)
            segments += new
            said += [i for segment in new for i in segment.token_ids]
            if not options.condition_on_previous_text or take.temperature > _WARM:
                said = []
            start += n_heard
        whole = "".join(segment.text for segment in segments).strip()
        return Transcription(whole, language, duration_s, tuple(segments))

    def _window(self, features: FloatArray, start: int) -> SoundInput:
        """The window of features [frames, bands] from a frame on, silence after their end."""
        window = features[start : start + self.n_frames]
        window = np.pad(window, ((0, self.n_frames - len(window)), (0, 0)))
        return SoundInput.of(window, self.config.n_sound)

    def _look(
        self, sound: SoundInput, before: Sequence[int], look: FirstLook, segments: Sequence[Segment]
    ) -> Asked:
        """The prompt by which a window is looked at, before anything of it is written."""
        params = SamplingParams(temperature=0, max_tokens=1, logits_processors=[look], ignore_eos=True)
        return Asked(SoundPrompt.of(sound, [*before, self._start]), params, segments)

    def _words(self, text: str) -> list[int]:
        return self.tokenizer.encode(" " + text.strip()) if text.strip() else []

    def _before(self, said: Sequence[int], options: SpeechOptions) -> list[int]:
        """What a window is told of the text before it: the hotwords, and as much of the rest as fits."""
        n_most = self.n_text // 2 - 1
        hotwords = self._words(options.hotwords)[:n_most]
        told = [*hotwords, *said[max(len(said) - (n_most - len(hotwords)), 0) :]]
        return [self._id("<|startofprev|>"), *told] if told else []

    def _beginning(self, language: str, options: SpeechOptions) -> list[int]:
        """The control tokens before a window's text."""
        text = [self._start]
        if language:
            text += [self.languages[language], self._id(f"<|{options.task}|>")]
        return text if options.timestamps else [*text, self._no_times]

    def _rules(self, n_prompt: int, options: SpeechOptions) -> TextRules:
        return TextRules(
            n_prompt=n_prompt,
            suppressed=self._listed("suppress_tokens"),
            not_first=self._listed("begin_suppress_tokens"),
            end_id=self._end,
            first_time=self.first_time,
            latest_start=self.settings.get("max_initial_timestamp_index"),
            writes_times=options.timestamps,
        )

    def _take(self, token_ids: Sequence[int], logprobs: list[float], temperature: float) -> _Take:
        """Return an answer with what is known of it. The end counts in the mean."""
        ids = [i for i in token_ids if i != self._end]
        data = self._text(ids).strip().encode()
        ratio = len(data) / len(zlib.compress(data))
        return _Take(ids, logprobs, temperature, sum(logprobs) / (len(ids) + 1), ratio)

    def _text(self, token_ids: Sequence[int]) -> str:
        """The text of tokens without timestamps."""
        return self.tokenizer.decode([i for i in token_ids if i < self.first_time], skip_special=True)

    def _segments(
        self, take: _Take, start: int, n_frames: int, no_speech: float
    ) -> tuple[list[Segment], int]:
        """The segments of a window from frame `start` on, and after how many frames the next window begins.

        `n_frames` of the window are sound; what was begun at its end is heard again in the next window.
        """
        first, ids = self.first_time, take.token_ids
        cuts = [i for i in range(1, len(ids)) if ids[i] >= first and ids[i - 1] >= first]
        is_cut_off = bool(cuts) and (ids[-1] < first or ids[-2] >= first)
        is_divided = bool(cuts)
        if not is_cut_off:
            cuts.append(len(ids))
        segments: list[Segment] = []
        end_s, stop_s = n_frames * HOP / RATE, 0.0
        for begin, end in zip([0, *cuts], cuts):
            own = ids[begin:end]
            times = [(i - first) / _TIMES_PER_S for i in own if i >= first]
            from_s = times[0] if is_divided else 0.0
            stop_s = times[-1] if is_divided or (times and times[-1]) else end_s
            text = self._text(own)
            if text.strip() and from_s != stop_s:
                place = [(start * HOP / RATE) + min(seconds, end_s) for seconds in (from_s, stop_s)]
                about = (take.temperature, take.avg_logprob, take.compression_ratio, no_speech)
                logprobs = tuple(take.logprobs[begin:end])
                segments.append(Segment(place[0], place[1], text, tuple(own), logprobs, start, *about))
        return segments, (round(stop_s * RATE / HOP) if is_cut_off else 0) or self.n_frames

    def _with_words(
        self,
        new: Sequence[Segment],
        sound: SoundInput,
        n_rows: int,
        language: str,
        options: SpeechOptions,
        segments: Sequence[Segment],
    ) -> Generator[Asked, Sequence[int], list[Segment]]:
        """The segments of a window with their words, by one more look at the window, with all of its text."""
        texts = [[i for i in one.token_ids if i < self._end] for one in new]
        ids = [i for text in texts for i in text]
        before = self._beginning(language, replace(options, timestamps=False))
        prompt = SoundPrompt.of(sound, [*before, *ids, self._end])
        d_head = self.config.d_head
        listener = AlignmentListener(self._alignment_heads(), d_head, sound.n_tokens, len(prompt))
        params = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
        yield Asked(prompt, params, segments, [listener])
        start_s = new[0].seek * HOP / RATE
        frames = listener.token_frames(len(before) - 1, n_rows)
        times_s = [round(start_s + frame / _TIMES_PER_S, 2) for frame in frames]
        found = []
        for one, text in zip(new, texts):
            words = timed_words(split_words(text, self._text, language), times_s)
            found.append(replace(one, words=tuple(words)))
            times_s = times_s[len(text) :]
        return found

    def _alignment_heads(self) -> list[tuple[int, int]]:
        """The heads that attend to a token's moment, pairs of layer and head, or all of the upper half."""
        n_layers, n_heads = self.config.n_layers, self.config.n_heads
        every = [(layer, head) for layer in range(n_layers) for head in range(n_heads)]
        stated = self.settings.get("alignment_heads")
        found = [pair for pair in every if isinstance(stated, list) and list(pair) in stated]
        return found or every[n_layers // 2 * n_heads :]

    def _listed(self, key: str) -> list[int]:
        """The token ids of a setting."""
        stated = self.settings.get(key) or []
        return [i for i in stated if type(i) is int and 0 <= i < self.config.n_vocab]

    def _id(self, text: str) -> int:
        found = self.tokenizer.vocabulary.id_of.get(text)
        if found is None:
            raise FormatError(f"the tokenizer must have the token {text}, of speech")
        return found


def _temperatures(options: SpeechOptions) -> list[float]:
    """The temperatures at which a window is tried, in turn."""
    n_more = int((1 - options.temperature) / _WARMER + 1e-6) if options.fallback else 0
    return [round(options.temperature + i * _WARMER, 3) for i in range(max(n_more, 0) + 1)]
