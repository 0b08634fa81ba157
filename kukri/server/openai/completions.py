"""/v1/completions, as evaluation programs use it: lists of prompts, `echo`, prompt log-probabilities."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from kukri.calls.choice import Choice, PartEvent, PlacedToken
from kukri.dialects.answer_parser import PlainParser
from kukri.sampling import SampledToken
from kukri.server.answers.logprobs import legacy_logprobs
from kukri.server.answers.reply import ChunkWriter, Reply, compact, grown, interp_fields, submit, usage
from kukri.server.models.bridge import LiveCall
from kukri.server.models.served_model import Chat, ServedModel
from kukri.server.schema import CompletionBody
from kukri.tokenizer import TextStream, Tokenizer

T = TypeVar("T")
_DEFAULT_MAX_TOKENS = 16  # as in OpenAI's API


async def complete(served: ServedModel, body: CompletionBody, http: Request) -> Response:
    """The response to a completion."""
    model = served.check_model(body.model)
    max_tokens = _DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens
    params = served.params_of(
        body.model,
        body.sampling(
            max_tokens=max(max_tokens, 1),  # for none at all, one is computed and not shown
            logprobs=body.logprobs,
            prompt_logprobs=_n_prompt_logprobs(body),
            grammar=body.form,
        ),
    )
    prompts = await _prompts(served, body, params.n_generated_answers)
    echoes = await asyncio.to_thread(_echoes, served.tokenizer, prompts) if body.echo else []
    shows_control = body.skip_special_tokens is False
    call = await submit(served, body, prompts, params, http, shows_control=shows_control)
    writer = CompletionWriter(served, call, body, model, prompts, echoes, hides_answer=max_tokens == 0)
    if body.verbose:
        writer.prompt_text = await asyncio.to_thread(served.tokenizer.decode, prompts[0])
    return Reply(served, call, writer, stream=bool(body.stream), tells_progress=bool(body.return_progress))


def _n_prompt_logprobs(body: CompletionBody) -> int | None:
    """The most likely tokens wanted for each token of the prompt; None for none."""
    wanted = [body.prompt_logprobs, body.logprobs if body.echo else None]
    return max((n for n in wanted if n is not None), default=None)


async def _prompts(served: ServedModel, body: CompletionBody, n_each: int) -> list[list[int]]:
    """The token ids of each prompt. Raises RequestError if they are too many for `n_each` answers to each."""
    prompt: Any = body.prompt
    if body.suffix:
        return [await served.middle_prompt(prompt, body.suffix, "suffix")]
    many = prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]
    served.check_answers(len(many), n_each)
    if not isinstance(many[0], str):
        return many
    encode, limit, parses = (
        served.tokenizer.encode,
        served.llm.engine.maker.max_context,
        body.parse_special is not False,
    )
    return await asyncio.to_thread(lambda: [encode(one, True, parses, limit) for one in many])


def _echoes(tokenizer: Tokenizer, prompts: list[list[int]]) -> list[tuple[str, list[int]]]:
    """The text of each prompt, and where that of each of its tokens starts."""
    echoes = []
    for prompt in prompts:
        stream, pieces, starts, n = TextStream(tokenizer, skip_special=False), [], [], 0
        for token_id in prompt:
            starts.append(n)
            pieces.append(stream.push(token_id))
            n += len(pieces[-1])
        echoes.append(("".join([*pieces, stream.flush()]), starts))
    return echoes


class CompletionWriter(ChunkWriter):
    """Writes text completions, whole or as chunks, which have one form."""

    def __init__(
        self,
        served: ServedModel,
        call: LiveCall,
        body: CompletionBody,
        model: str,
        prompts: list[list[int]],
        echoes: list[tuple[str, list[int]]],
        *,
        hides_answer: bool,
    ) -> None:
        shown = None if hides_answer else str
        chat = Chat(call, [Choice(answer, PlainParser(shown)) for answer in call.answers])
        super().__init__(served, chat, body, model, kind="text_completion", id_kind="cmpl")
        self._body, self._prompts, self._echoes, self._hides_answer = body, prompts, echoes, hides_answer

    def body(self) -> dict[str, Any]:
        """The completion: of each prompt, the n best answers in its order."""
        n, n_each = self._body.n or 1, len(self._call.answers) // len(self._prompts)
        choices: list[dict[str, Any]] = []
        for first in range(0, len(self._call.answers), n_each):
            ranked = list(range(first, first + n_each))
            if n_each > n:
                ranked.sort(key=lambda i: -self._call.answers[i].cumulative_logprob)
            for i in ranked[:n]:
                answer = self._choices[i]
                choices.append(self._choice(i, len(choices), answer.text(), answer.tokens, is_first=True))
        facts = {"usage": self._usage(), **self._timings(), **self._verbose(0)}
        return {**self._head, "choices": choices, **facts}

    def _news(self, i: int, events: Sequence[PartEvent]) -> str:
        text, tokens = grown(events)
        is_first = not self._is_begun[i]
        has_more = text or tokens or self._choices[i].is_over or self._call.readouts[i]
        if not (has_more or (is_first and self._body.echo)):
            return ""
        self._is_begun[i] = True
        return self._event(compact(self._choice(i, i, text, tokens, is_first=is_first)))

    def _of_prompt(self, each: list[T], i: int) -> T:
        """Return the entry of a list with one entry a prompt that belongs to the prompt of answer `i`."""
        return each[i * len(each) // len(self._call.answers)]

    def _echo(self, i: int) -> tuple[str, list[PlacedToken]]:
        """The prompt's text, and its tokens with their log-probabilities if they are requested."""
        prompt, (text, starts) = self._of_prompt(self._prompts, i), self._of_prompt(self._echoes, i)
        if self._body.logprobs is None:
            return text, []
        first = SampledToken(prompt[0])  # nothing comes before it that could tell how likely it is
        tokens = [first, *self._call.answers[i].request.answer.prompt_logprobs]
        return text, list(zip(starts, tokens, strict=True))

    def _choice(
        self, i: int, index: int, text: str, tokens: Sequence[PlacedToken], *, is_first: bool
    ) -> dict[str, Any]:
        """An answer, or the news of it; the first have the prompt if that is echoed."""
        if self._body.echo:
            n_before = len(self._of_prompt(self._echoes, i)[0])
            tokens = [(n_before + start, token) for start, token in tokens]
            if is_first:
                echo, echoed = self._echo(i)
                text, tokens = echo + text, [*echoed, *tokens]
        n_top, logprobs = self._body.logprobs, None
        if n_top is not None:
            as_ids = bool(self._body.return_tokens_as_token_ids)
            logprobs = legacy_logprobs(self._served.tokenizer, tokens, n_top, as_ids=as_ids)
        reason = self._call.answers[i].finish_reason
        if self._hides_answer and reason is not None:
            reason = "length"
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}
        return {**choice, **self._vllm_fields(i, is_first), **interp_fields(self._call, i)}

    def _vllm_fields(self, i: int, is_first: bool) -> dict[str, Any]:
        """The fields that vLLM has beyond OpenAI's, if they are requested."""
        fields: dict[str, Any] = {}
        if self._body.return_token_ids:
            fields["token_ids"] = [] if self._hides_answer else self._new_token_ids(i)
            fields["prompt_token_ids"] = self._of_prompt(self._prompts, i) if is_first else None
        if self._body.prompt_logprobs is not None:
            fields["prompt_logprobs"] = self._prompt_scores(i, self._body.prompt_logprobs)
        return fields

    def _usage(self) -> dict[str, Any]:
        counts = usage(self._call, 0)
        if self._hides_answer:
            counts["completion_tokens"], counts["total_tokens"] = 0, counts["prompt_tokens"]
        return counts
