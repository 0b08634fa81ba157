"""llama.cpp's own completions, filling in the middle included: bodies become requests, answers its JSON."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from kukri.calls.answer import Answer
from kukri.errors import KukriError, RequestError
from kukri.sampling import SamplingParams
from kukri.server.errors import error_body
from kukri.server.llama_cpp.indent import IndentLimit
from kukri.server.llama_cpp.schema import (
    NAMES,
    LlamaBody,
    LlamaCompletionBody,
    LlamaInfillBody,
    MarkedText,
    Prompt,
)
from kukri.server.models.bridge import LiveCall
from kukri.server.models.served_model import ServedModel
from kukri.server.openai.completions import submit
from kukri.server.openai.logprobs import chat_logprobs
from kukri.server.progress import PromptProgress
from kukri.server.reply import EVENTS, Reply, StreamForm
from kukri.server.sampling_fields import FACTS
from kukri.server.timings import timings_of
from kukri.tokenizer import Tokenizer


def _event(content: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


LLAMA_EVENTS = StreamForm(EVENTS.content_type, EVENTS.keep_alive, _event)


async def complete(served: ServedModel, body: LlamaCompletionBody, http: Request) -> Response:
    """The response to /completion."""
    served.check_answers(len(body.prompts), body.n_cmpl or body.n or 1)
    limit = served.llm.engine.max_context
    prompts = await asyncio.to_thread(
        lambda: [
            _encoded(served.tokenizer, prompt, limit, body.parse_special is not False)
            for prompt in body.prompts
        ]
    )
    return await _reply(served, body, prompts, http, is_many=body.is_many)


async def infill(served: ServedModel, body: LlamaInfillBody, http: Request) -> Response:
    """The response to /infill. Raises RequestError if the model does not fill in the middle."""
    files = [(one.filename, one.text) for one in body.input_extra or ()]
    prompt = await served.middle_prompt(
        body.input_prefix, body.input_suffix, "input_suffix", middle=body.prompt or "", files=files
    )
    return await _reply(served, body, [prompt], http, is_many=(body.n_cmpl or body.n or 1) > 1)


def _encoded(tokenizer: Tokenizer, prompt: Prompt, limit: int, parse_special: bool) -> list[int]:
    """The token ids of a prompt; a text at its beginning gets BOS."""
    parts = [prompt] if isinstance(prompt, str) else prompt
    if isinstance(parts, MarkedText):
        parts = [parts.prompt_string]
    ids: list[int] = []
    for i, part in enumerate(parts):
        if isinstance(part, int):
            ids.append(part)
        else:
            encode = tokenizer.encode_inside if i else partial(tokenizer.encode, add_special=True)
            ids += encode(part, parse_special=parse_special, max_tokens=limit)
    return ids


async def _reply(
    served: ServedModel, body: LlamaBody, prompts: list[list[int]], http: Request, *, is_many: bool
) -> Response:
    try:
        bias = await asyncio.to_thread(body.bias, served.tokenizer) if body.logit_bias else None
        sampling = body.sampling(grammar=body.form, logit_bias=bias)
        params = served.params(sampling)
        call = await submit(served, body, prompts, params, http)
    except RequestError as error:
        error.param = NAMES.get(error.param or "", error.param)
        raise
    texts = await asyncio.to_thread(lambda: [served.tokenizer.decode(prompt) for prompt in prompts])
    writer = LlamaWriter(served, call, body, params, texts, is_many=is_many)
    return Reply(
        served,
        call,
        writer,
        stream=bool(body.stream),
        form=LLAMA_EVENTS,
        tells_progress=bool(body.return_progress),
    )


class LlamaWriter:
    """Writes answers as llama.cpp's server does, whole or as events: each answer's last has all facts."""

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
        self._prompts = prompts
        self._served, self._call, self._body, self._params = served, call, body, params
        self._is_many = is_many
        self._progress = PromptProgress(call.answers[0].request) if body.return_progress else None
        self._model = served.check_model(body.model)
        n = len(call.answers)
        self._texts = [""] * n
        self._indents = [IndentLimit(body.n_indent or 0) for _ in range(n)]
        self._n_sent, self._n_ids_sent = [0] * n, [0] * n
        self._scores: list[list[dict[str, Any]]] = [[] for _ in range(n)]
        self._is_ended = [False] * n

    def advance(self) -> bytes:
        """Handles an update; returns its events if the answer is a stream."""
        events = self._reading() if self._body.stream else b""
        for i, answer in enumerate(self._call.answers):
            if self._is_ended[i] or not (answer.n_tokens or answer.finish_reason):
                continue
            self._take(i, answer)
            if self._body.stream:
                events += self._news(i, answer)
            self._is_ended[i] = answer.finish_reason is not None
        return events

    def end(self) -> bytes:
        """Nothing: the last event of each answer has been written."""
        return b""

    def fail(self, error: KukriError) -> bytes:
        """An event with the error."""
        return _event(error_body(str(error), 500))

    def body(self) -> Any:
        """The answer, or a list of them."""
        answers = [self._picked(self._whole(i)) for i in range(len(self._call.answers))]
        return answers if self._is_many else answers[0]

    def _reading(self) -> bytes:
        """Events with the progress of the first prompt, if they are requested."""
        news = self._progress.news() if self._progress is not None else ()
        head = {"index": 0, "content": "", "tokens": [], "stop": False, "id_slot": -1}
        return b"".join(_event({**head, "prompt_progress": one}) for one in news)

    def _take(self, i: int, answer: Answer) -> None:
        text, tokens = answer.take_text(), answer.take_tokens()
        if self._body.limit == 0:
            return
        self._texts[i] += self._indents[i].push(text)
        if self._indents[i].is_over:
            self._call.finish(answer, "length")
        for (_, token), entry in zip(
            tokens, chat_logprobs(self._served.tokenizer, [token for _, token in tokens]), strict=True
        ):
            top = token.top_logprobs or ()
            likeliest = [{"id": j, **one} for (j, _), one in zip(top, entry["top_logprobs"], strict=True)]
            self._scores[i].append({"id": token.id, **entry, "top_logprobs": likeliest})

    def _news(self, i: int, answer: Answer) -> bytes:
        """The event with the text that came, and the last one if the answer has ended."""
        text, ids = self._texts[i][self._n_sent[i] :], self._ids(i)
        self._n_sent[i], self._n_ids_sent[i] = len(self._texts[i]), self._n_ids_sent[i] + len(ids)
        events = b""
        if text or ids:
            scores, self._scores[i] = self._scores[i], []
            chunk = {"index": i, "content": text, "tokens": ids, "stop": False, "id_slot": -1}
            chunk |= {"tokens_predicted": answer.n_tokens, "tokens_evaluated": answer.request.n_prompt}
            if self._body.n_probs:
                chunk["completion_probabilities"] = scores
            if self._body.timings_per_token:
                chunk["timings"] = timings_of(answer.request)
            events += _event(chunk)
        if answer.finish_reason is not None:
            events += _event(self._picked({**self._whole(i), "content": "", "tokens": []}))
        return events

    def _ids(self, i: int) -> list[int]:
        """The token ids that a stream has not sent."""
        request, n_sent = self._call.answers[i].request, self._n_ids_sent[i]
        n = 0 if self._body.limit == 0 else self._call.answers[i].n_tokens
        ids: list[int] = request.tokens[request.n_prompt + n_sent : request.n_prompt + n].tolist()
        return ids

    def _whole(self, i: int) -> dict[str, Any]:
        answer, request = self._call.answers[i], self._call.answers[i].request
        limit = self._params.max_tokens
        is_cut = answer.finish_reason == "length" and (limit is None or answer.n_tokens < limit)
        is_cut = is_cut and not self._indents[i].is_over
        scores = {"completion_probabilities": self._scores[i]} if self._body.n_probs else {}
        return {
            "index": i,
            "content": self._texts[i],
            "tokens": self._ids(i) if self._body.return_tokens else [],
            **scores,
            "id_slot": -1,
            "stop": True,
            "model": self._model,
            "tokens_predicted": 0 if self._body.limit == 0 else answer.n_tokens,
            "tokens_evaluated": request.n_prompt,
            "generation_settings": settings_of(self._params),
            "prompt": self._prompts[i * len(self._prompts) // len(self._texts)],
            "has_new_line": "\n" in self._texts[i],
            "truncated": is_cut,
            "stop_type": _stop_type(answer),
            "stopping_word": answer.stop_string or "",
            "tokens_cached": request.n_prefix_hit,
            "timings": timings_of(request),
        }

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


def settings_of(params: SamplingParams) -> dict[str, Any]:
    """Sampling parameters by llama.cpp's names; a seed of -1 is another one each time."""
    settings = {
        facts.llama_cpp: getattr(params, name) for name, facts in FACTS.items() if facts.llama_cpp is not None
    }
    limit = -1 if params.max_tokens is None else params.max_tokens
    return settings | {
        "n_predict": limit,
        "max_tokens": limit,
        "seed": -1 if params.seed is None else params.seed,
        "stop": list(params.stop_strings),
        "n_probs": params.logprobs or 0,
        "samplers": ["typ_p" if name == "typical_p" else name for name in params.samplers],
    }


def _stop_type(answer: Answer) -> str:
    if answer.stop_string is not None:
        return "word"
    return "limit" if answer.finish_reason == "length" else "eos"
