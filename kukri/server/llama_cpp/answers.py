"""llama.cpp's own completions, filling in the middle included: bodies become requests, answers its JSON."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kukri.calls.choice import Choice, PartEvent, PlacedToken
from kukri.calls.image_prompts import Prompt as ImagesPrompt
from kukri.calls.image_prompts import ids_of
from kukri.dialects.answer_parser import PlainParser
from kukri.errors import RequestError
from kukri.sampling import SamplingParams
from kukri.server.answers.answer_facts import answer_facts
from kukri.server.answers.logprobs import chat_logprobs
from kukri.server.answers.reply import EVENTS, AnswerWriter, Reply, StreamForm, grown, sse, submit
from kukri.server.answers.timings import timings_of, timings_of_progress
from kukri.server.llama_cpp.schema import (
    NAMES,
    ImageData,
    ImagesText,
    LlamaBody,
    LlamaCompletionBody,
    LlamaInfillBody,
    Prompt,
)
from kukri.server.mixed_prompt import encode_mixed
from kukri.server.models.bridge import LiveCall
from kukri.server.models.served_model import ServedModel
from kukri.tokenizer import note
from kukri.tokenizer.image_marks import ImagePart

MEDIA = "<__media__>"
_NUMBERED = re.compile(r"\[img-([0-9]{1,9})\]")
LLAMA_EVENTS = StreamForm(EVENTS.content_type, EVENTS.keep_alive, lambda error: sse(error).encode())


async def complete(served: ServedModel, body: LlamaCompletionBody, http: Request) -> Response:
    """The response to /completion."""
    served.check_answers(len(body.prompts), body.n_cmpl or body.n or 1)
    limit = served.llm.engine.maker.max_context
    prompts = await asyncio.to_thread(
        lambda: [_encoded(served, prompt, body, limit) for prompt in body.prompts]
    )
    return await _reply(served, body, prompts, http, is_many=body.is_many)


async def infill(served: ServedModel, body: LlamaInfillBody, http: Request) -> Response:
    """The response to /infill. Raises RequestError if the model does not fill in the middle."""
    files = [(one.filename, one.text) for one in body.input_extra or ()]
    prompt = await served.middle_prompt(
        body.input_prefix, body.input_suffix, "input_suffix", middle=body.prompt or "", files=files
    )
    return await _reply(served, body, [prompt], http, is_many=(body.n_cmpl or body.n or 1) > 1)


def _encoded(served: ServedModel, prompt: Prompt, body: LlamaCompletionBody, limit: int) -> ImagesPrompt:
    """A prompt with its images; a text at its beginning gets BOS. Raises RequestError."""
    if body.image_data and not served.prompts.sees:
        note("image", "image_data", is_new=True)  # raises
    if isinstance(prompt, ImagesText) and prompt.multimodal_data and not served.prompts.sees:
        note("image", "prompt.multimodal_data", is_new=True)
    parts: list[int | str | ImagePart] = []
    if isinstance(prompt, ImagesText):
        data = prompt.multimodal_data or ()
        parts += _between_images(prompt.prompt_string, MEDIA, data, "prompt.multimodal_data")
    else:
        for part in [prompt] if isinstance(prompt, str) else prompt:
            is_marked = isinstance(part, str) and body.image_data
            parts += _with_image_data(str(part), body.image_data or ()) if is_marked else [part]
    pieces: list[list[int] | ImagePart] = []
    parses = body.parse_special is not False
    for is_image, run in groupby(parts, lambda part: isinstance(part, ImagePart)):
        if is_image:
            pieces += [part for part in run if isinstance(part, ImagePart)]
        else:
            texts = [part for part in run if not isinstance(part, ImagePart)]
            options: dict[str, Any] = {"parse_special": parses, "max_tokens": limit}
            pieces.append(encode_mixed(served.tokenizer, texts, continues=bool(pieces), **options))
    return served.prompts.joined(pieces)


def _between_images(text: str, mark: str, data: Sequence[str], param: str) -> list[str | ImagePart]:
    """Texts and the images between them. Raises RequestError unless there is a mark for each image."""
    texts = text.split(mark) if data else [text]
    if len(texts) - 1 != len(data):
        raise RequestError(
            f"'prompt_string' must have one {mark} per image, not {len(texts) - 1} for {len(data)} images",
            param="prompt",
        )
    found: list[str | ImagePart] = [texts[0]]
    for i, one in enumerate(data):
        found += [ImagePart({"type": "image", "data": one}, f"{param}[{i}]"), texts[i + 1]]
    return found


def _with_image_data(text: str, data: Sequence[ImageData]) -> list[str | ImagePart]:
    """Texts and the images whose numbers stand between them. Raises RequestError if one has no place."""
    by_id = {one.id: (i, one) for i, one in enumerate(data)}
    parts = _NUMBERED.split(text)
    named = [int(part) for part in parts[1::2]]
    if sorted(named) != sorted(by_id):
        raise RequestError("'prompt' must have [img-ID] once for each of 'image_data'", param="image_data")
    found: list[str | ImagePart] = [parts[0]]
    for number, after in zip(named, parts[2::2], strict=True):
        i, one = by_id[number]
        found += [ImagePart({"type": "image", "data": one.data}, f"image_data[{i}].data"), after]
    return found


async def _reply(
    served: ServedModel, body: LlamaBody, prompts: Sequence[ImagesPrompt], http: Request, *, is_many: bool
) -> Response:
    try:
        bias = await asyncio.to_thread(body.bias, served.tokenizer) if body.logit_bias else None
        sampling = body.sampling(grammar=body.form, logit_bias=bias)
        params = served.params_of(getattr(body, "model", None), sampling)
        call = await submit(served, body, prompts, params, http)
    except RequestError as error:
        error.param = NAMES.get(error.param or "", error.param)
        raise
    texts = await asyncio.to_thread(lambda: [served.tokenizer.decode(ids_of(prompt)) for prompt in prompts])
    writer = LlamaWriter(served, call, body, params, texts, is_many=is_many)
    return Reply(
        served,
        call,
        writer,
        stream=bool(body.stream),
        form=LLAMA_EVENTS,
        tells_progress=bool(body.return_progress),
    )


class LlamaWriter(AnswerWriter):
    """Writes answers as llama.cpp's server does, whole or as events: each answer's last has all facts."""

    form = LLAMA_EVENTS

    def __init__(
        self,
        served: ServedModel,
        call: LiveCall,
        body: LlamaBody,
        params: SamplingParams,
        prompts: list[str],
        *,
        is_many: bool,
    ) -> None:
        self._hides_answer = body.limit == 0
        self._indents = [IndentLimit(body.n_indent or 0) for _ in call.answers]
        choices = [
            Choice(answer, PlainParser(None if self._hides_answer else indent.push))
            for answer, indent in zip(call.answers, self._indents, strict=True)
        ]
        super().__init__(call, choices, stream=bool(body.stream), progress=body.return_progress)
        self._served, self._body, self._params, self._prompts = served, body, params, prompts
        self._is_many = is_many
        self._model = served.check_model(body.model)

    def advance(self) -> bytes:
        """Takes the new output, and ends the answers whose indent has."""
        written = super().advance()
        for answer, indent in zip(self._call.answers, self._indents, strict=True):
            if indent.is_over and answer.finish_reason is None:
                self._call.finish(answer, "length")
        return written

    def body(self) -> Any:
        """The answer, or a list of them."""
        answers = [self._picked(self._whole(i)) for i in range(len(self._call.answers))]
        return answers if self._is_many else answers[0]

    def _progressed(self, news: dict[str, int]) -> str:
        head = {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": -1}
        timings = {"timings": timings_of_progress(news)} if self._body.timings_per_token else {}
        return sse({**head, "prompt_progress": news, **timings})

    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        """The event with the text that came, and the last one if the answer has ended."""
        answer, (text, tokens), ids = self._call.answers[i], grown(events), self._new_token_ids(i)
        written = ""
        if (text or ids) and not self._hides_answer:
            chunk = {"index": i, "content": text, "tokens": ids, "stop": False, "id_slot": -1}
            chunk |= {"tokens_predicted": answer.n_tokens, "tokens_evaluated": answer.request.n_prompt}
            if self._body.n_probs:
                chunk["completion_probabilities"] = self._scores(tokens)
            if self._body.timings_per_token:
                chunk["timings"] = timings_of(answer.request)
            written = sse(chunk)
        if answer.finish_reason is not None:
            written += sse(self._picked({**self._whole(i), "content": "", "tokens": []}))
        return written

    def _scores(self, tokens: Sequence[PlacedToken]) -> list[dict[str, Any]]:
        scores = []
        for (_, token), entry in zip(tokens, chat_logprobs(self._served.tokenizer, tokens), strict=True):
            top = zip(token.top_logprobs or (), entry["top_logprobs"], strict=True)
            likeliest = [{"id": j, **one} for (j, _), one in top]
            scores.append({"id": token.id, **entry, "top_logprobs": likeliest})
        return scores

    def _whole(self, i: int) -> dict[str, Any]:
        answer, choice = self._call.answers[i], self._choices[i]
        facts = answer_facts(
            i,
            answer,
            choice.text(),
            prompt=self._prompts[i * len(self._prompts) // len(self._choices)],
            model=self._model,
            params=self._params,
            eos_ids=self._served.llm.engine.maker.eos_ids,
        )
        if self._hides_answer:
            facts |= {"tokens_predicted": 0, "tokens": []}
        if not self._body.return_tokens:
            facts["tokens"] = []
        if self._indents[i].is_over:
            facts["truncated"] = False
        if self._body.n_probs:
            facts["completion_probabilities"] = [] if self._is_stream else self._scores(choice.tokens)
        return facts  # a stream has sent the scores

    def _picked(self, answer: dict[str, Any]) -> dict[str, Any]:
        """The fields that the body asks for, under their paths."""
        wanted = self._body.response_fields
        if not wanted:
            return answer
        picked = {}
        for path in wanted:
            value: Any = answer
            for part in path.split("/"):
                value = value.get(part) if isinstance(value, dict) else None
            if value is not None:
                picked[path] = value
        return picked


class IndentLimit:
    """Passes text on up to a line, not its first, whose words come after fewer than `n` spaces or tabs.

    Holds back white space at the end, which may be the beginning of such a line. Attributes: is_over, True
    once that line has begun.
    """

    def __init__(self, n: int) -> None:
        self._n = n
        self.is_over = False
        self._held = ""  # white space that the line begins with, if it has no words yet
        self._is_first, self._has_words = True, False  # in the line so far

    def push(self, text: str) -> str:
        """The part of the text that can be shown now."""
        if not self._n or self.is_over:
            return "" if self.is_over else text
        shown = []
        text, self._held = self._held + text, ""
        for line in text.splitlines(keepends=True):
            words = line.lstrip(" \t")
            if not self._has_words:
                if not words:
                    self._held = line
                    break
                if not self._is_first and words.strip() and len(line) - len(words) < self._n:
                    self.is_over = True
                    break
            shown.append(line)
            self._has_words = line.splitlines()[0] == line  # it has no end yet
            self._is_first = self._is_first and self._has_words
        return "".join(shown)
