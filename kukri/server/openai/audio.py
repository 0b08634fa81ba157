"""/v1/audio/transcriptions and /v1/audio/translations: what is said in the sound of a form."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import AsyncGenerator, Generator, Sequence
from functools import partial
from threading import Lock
from typing import Annotated, Any, ClassVar, Literal

from fastapi.exceptions import RequestValidationError
from pydantic import ConfigDict, Field, ValidationError
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from kukri.calls.speech import Asked, Segment, Speech, SpeechOptions, Task, Transcription
from kukri.calls.subtitles import srt_of, vtt_of
from kukri.calls.word_times import Word
from kukri.errors import CapacityError, RequestError, UnsupportedError
from kukri.server.access import client_of
from kukri.server.answers.event_reply import EventReply
from kukri.server.answers.loading_reply import answered
from kukri.server.answers.logprobs import token_entry
from kukri.server.answers.reply import sse
from kukri.server.answers.rows import SILENCE, request_options, while_connected
from kukri.server.body import Body, Refused
from kukri.server.errors import DeadlineError
from kukri.server.models.registry import registry_of
from kukri.server.models.served_model import ServedModel
from kukri.server.openai.uploads import read_form
from kukri.sound.bounds import MAX_FILE_BYTES
from kukri.sound.files import decode_sound
from kukri.sound.languages import language_name
from kukri.sound.prompt import SoundInput

log = logging.getLogger("kukri.server")

MAX_HELD_BYTES = 1 << 30  # by the sounds of all requests
_N_DECODED = 2  # sounds that are decoded at a time


class AudioBody(Body):
    """The fields of a form besides its file: texts, which are read as numbers where numbers belong."""

    model_config = ConfigDict(strict=False)
    refused: ClassVar[Refused] = {
        "chunking_strategy": (("auto",), "sounds are heard in windows of the model's length"),
        "temperature_inc": (("0.2",), "it is 0.2"),  # whisper.cpp's
    }
    model: str | None = None
    language: str | None = None
    prompt: str | None = None
    keywords: list[str] | None = None  # words and spellings to expect
    temperature: Annotated[float, Field(ge=0, le=1)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    include: list[Literal["logprobs"]] | None = None
    stream: bool | None = None
    timestamp_granularities: list[Literal["word", "segment"]] | None = None
    user: str | None = None


class SoundRoom:
    """The memory that sounds of all requests may take, and the turns in which they are decoded."""

    def __init__(self) -> None:
        self.n_held, self.lock = 0, Lock()
        self.turns = asyncio.Semaphore(_N_DECODED)


class HeldSound:
    """What one request takes of the room: first the bytes of its file, `data`, then its samples too."""

    def __init__(self, room: SoundRoom) -> None:
        self.room, self.data = room, bytearray()
        self._n_held, self._is_closed = 0, False

    def write(self, data: bytes) -> None:
        """Takes the next bytes of the file. Raises CapacityError as `take` does."""
        self.take(len(data))
        self.data += data

    def take(self, n_bytes: int) -> None:
        """Counts further bytes. Raises CapacityError if there is no room for them, or the request is over."""
        with self.room.lock:
            if self._is_closed or self.room.n_held + n_bytes > MAX_HELD_BYTES:
                raise CapacityError("the sounds of other requests take all room for sounds: try again later")
            self.room.n_held += n_bytes
            self._n_held += n_bytes

    def close(self) -> None:
        """Gives the room back."""
        with self.room.lock:
            self.room.n_held -= self._n_held
            self._n_held, self._is_closed, self.data = 0, True, bytearray()


async def transcribe(request: Request) -> Response:
    """The response to a form with a sound: what is said in it."""
    return await _read(request, "transcribe")


async def translate(request: Request) -> Response:
    """The response to a form with a sound: what is said in it, in English."""
    return await _read(request, "translate")


async def _read(http: Request, task: Task) -> Response:
    held = HeldSound(http.app.state.sounds)
    http.scope["kukri.on_end"].append(held.close)
    most = min(registry_of(http).settings.max_upload_bytes, MAX_FILE_BYTES)
    form = await read_form(http.headers.get("content-type", ""), http.stream(), held, most)
    try:
        body = AudioBody.model_validate(form.fields)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        raise RequestValidationError([{**one, "loc": ("body", *one["loc"])} for one in found]) from None
    return await answered(body, http, partial(_answer, held=held, task=task))


async def _answer(
    served: ServedModel, body: AudioBody, http: Request, *, held: HeldSound, task: Task
) -> Response:
    speech: Speech | None = getattr(served.llm, "speech", None)
    if speech is None:
        raise RequestError.of("model", f"must be a model that hears, not {served.names[0]}")
    if body.stream and body.response_format not in ("json", "text", None):
        raise RequestError.of("stream", f"cannot be combined with the form {body.response_format}")
    times = body.timestamp_granularities or ["segment"]
    if "word" in times and body.response_format != "verbose_json":
        raise RequestError.of("response_format", "must be 'verbose_json' for the times of words")
    options = SpeechOptions(
        language=body.language or None,
        task=task,
        prompt=body.prompt or "",
        hotwords=", ".join(body.keywords or ()),
        temperature=body.temperature or 0.0,
        word_times="word" in times,
    )
    async with held.room.turns:
        steps, first = await asyncio.to_thread(_begun, speech, held, options)
    hearing = _Hearing(served, speech, body, http, steps, first)
    if body.stream:
        return EventReply(hearing.events(), served.settings.keep_alive_s)
    found = await while_connected(http, hearing.whole())
    return SILENCE if found is None else hearing.response(found, task)


def _begun(
    speech: Speech, held: HeldSound, options: SpeechOptions
) -> tuple[Generator[Asked, Sequence[int], Transcription], Asked]:
    """The steps of a sound, and the first of them. Raises RequestError, and CapacityError as `take` does."""
    try:
        samples = decode_sound(held.data)
    except UnsupportedError as error:  # how to install the decoder is for who runs the server
        log.warning("%s", error)
        raise RequestError.of("file", "must be a WAV file, because this server decodes no other") from None
    held.data = bytearray()
    held.take(2 * samples.nbytes)  # features take as much as samples
    steps = speech.transcribe(samples, options)
    return steps, next(steps)


def _next(
    steps: Generator[Asked, Sequence[int], Transcription], token_ids: Sequence[int]
) -> Asked | Transcription:
    try:
        return steps.send(token_ids)
    except StopIteration as end:
        found: Transcription = end.value
        return found


class _Hearing:
    """A sound on its way through the engine."""

    def __init__(
        self,
        served: ServedModel,
        speech: Speech,
        body: AudioBody,
        http: Request,
        steps: Generator[Asked, Sequence[int], Transcription],
        first: Asked,
    ) -> None:
        self._served, self._speech, self._body, self._http = served, speech, body, http
        self._steps, self._step = steps, first
        self._n_text = self._n_audio = self._n_generated = 0
        self._found = Transcription("", "", 0.0)  # once it is over

    async def whole(self) -> Transcription:
        """The transcription."""
        async for _ in self._segments():
            pass
        return self._found

    async def events(self) -> AsyncGenerator[bytes]:
        """The events of a stream: the text of each segment once its window is over, then the whole text."""
        has_begun = False
        async for one in self._segments():
            text = one.text if has_begun else one.text.lstrip()
            has_begun = True
            delta = {"type": "transcript.text.delta", "delta": text, **self._logprobs([one])}
            yield sse(delta).encode()
        found = self._found
        done = {"type": "transcript.text.done", "text": found.text, **self._logprobs(found.segments)}
        yield sse({**done, "usage": self._usage()}).encode()

    def response(self, found: Transcription, task: Task) -> Response:
        """The whole answer in the form that the body asks for."""
        match self._body.response_format:
            case "text":
                return PlainTextResponse(found.text + "\n")
            case "srt":
                return PlainTextResponse(srt_of(found))
            case "vtt":
                return PlainTextResponse(vtt_of(found), media_type="text/vtt")
            case "verbose_json":
                facts = {
                    "task": task,
                    "language": language_name(found.language),
                    "duration": found.duration_s,
                }
                parts: dict[str, Any] = {"text": found.text}
                times = self._body.timestamp_granularities or ["segment"]
                if "segment" in times:
                    parts["segments"] = [_segment(i, one) for i, one in enumerate(found.segments)]
                if "word" in times:
                    parts["words"] = [_word(word) for one in found.segments for word in one.words]
                usage = {"type": "duration", "seconds": math.ceil(found.duration_s)}
                return JSONResponse({**facts, **parts, "usage": usage})
        return JSONResponse({"text": found.text, **self._logprobs(found.segments), "usage": self._usage()})

    async def _segments(self) -> AsyncGenerator[Segment]:
        """The segments, once their window is over; then the transcription is in `_found`."""
        served, scope = self._served, self._http.scope
        maker, deadline_s = served.llm.engine.maker, served.settings.deadline_s
        options = request_options(served, scope, None, self._body.user)
        stops_s = None if deadline_s is None else asyncio.get_running_loop().time() + deadline_s
        step: Asked | Transcription = self._step
        sound: SoundInput | None = None
        n_found = 0
        while isinstance(step, Asked):
            (request,) = await asyncio.to_thread(
                partial(maker.make_requests, step.prompt, step.params, **options)
            )
            maker.check_fits(request)
            for listener in step.listeners:
                request.listen(listener)
            request.times.trace = scope["kukri.trace"]
            n_prompt = len(step.prompt) if step.prompt.sound is not sound else len(step.prompt.text)
            sound = step.prompt.sound  # whose other answers find it in the cache
            served.metrics.on_prompt(n_prompt)
            try:
                async with asyncio.timeout_at(stops_s):
                    await served.bridge.compute([request])
            except TimeoutError:
                raise DeadlineError(f"the answer was not finished within {deadline_s:g} s") from None
            finally:
                n_text, n_new = len(step.prompt.text), len(request.output_ids)
                self._n_text += n_text
                self._n_audio += n_prompt - n_text
                self._n_generated += n_new
                client_of(scope).meter.add(n_prompt, n_new)
                n_all = self._n_text + self._n_audio
                scope["kukri.log"].update(n_prompt_tokens=n_all, n_generated=self._n_generated)
            step = await asyncio.to_thread(_next, self._steps, request.output_ids)
            for one in step.segments[n_found:]:
                n_found += 1
                yield one
        self._found = step

    def _logprobs(self, segments: Sequence[Segment]) -> dict[str, Any]:
        """The log-probabilities of the tokens of text, if the body asks for them."""
        if "logprobs" not in (self._body.include or ()):
            return {}
        tokens = [one for each in segments for one in zip(each.token_ids, each.logprobs, strict=True)]
        texts = [(i, logprob) for i, logprob in tokens if i < self._speech.first_time]
        return {"logprobs": [token_entry(self._served.tokenizer, *one) for one in texts]}

    def _usage(self) -> dict[str, Any]:
        n_input = self._n_text + self._n_audio
        return {
            "type": "tokens",
            "input_tokens": n_input,
            "input_token_details": {"text_tokens": self._n_text, "audio_tokens": self._n_audio},
            "output_tokens": self._n_generated,
            "total_tokens": n_input + self._n_generated,
        }


def _segment(i: int, one: Segment) -> dict[str, Any]:
    """A segment as OpenAI's API writes it."""
    facts = ("seek", "text", "temperature", "avg_logprob", "compression_ratio", "no_speech_prob")
    named = {name: getattr(one, name) for name in facts}
    return {"id": i, "start": one.start_s, "end": one.end_s, "tokens": one.token_ids, **named}


def _word(word: Word) -> dict[str, Any]:
    return {"word": word.text.strip(), "start": word.start_s, "end": word.end_s}
