"""The calls under way on one engine: prompts become requests, steps become chunks and results.

`LLM` and `AsyncLLM` are two faces of this. Threads share it: one at a time holds the turn and steps the
engine for all (`kukri.engine.turns`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from kukri.calls.answer import Answer
from kukri.calls.image_prompts import ImagePrompts, image_tokens
from kukri.calls.results import Chunk, FinishReason, Output, Result, ToolCall, Usage
from kukri.calls.turn import Turn
from kukri.engine import Engine, Request
from kukri.engine.turns import EngineTurns
from kukri.errors import KukriError, RequestError, UnsupportedError, close_matches, failure_of
from kukri.kernels.arrays import FloatArray
from kukri.models.spans import SpanPrompt
from kukri.opening.loading import LoadedModel
from kukri.sampling import SampledToken, SamplingParams, resolve_texts
from kukri.tokenizer import ChatTemplate, Tokenizer

_USES = {
    "question_answering": "extract()",
    "sequence_classification": "classify()",
    "token_classification": "classify_tokens()",
    "none": "embed()",
}
Message = Mapping[str, Any]
Prompt = str | Sequence[int] | SpanPrompt
if TYPE_CHECKING:
    from kukri.dialects.model_dialect import ModelDialect
    from kukri.interp.interventions.request_taps import InterventionTaps, Readout

    # makes the new requests for a prompt do what interventions say
    Intervene = Callable[[Sequence[Request]], list[InterventionTaps]]


class EngineCalls:
    """Every call under way on the engine of one loaded model. `turns` decides which thread steps it.

    With `keeps_raw` answers to messages are text alone, as they were generated.
    """

    def __init__(self, loaded: LoadedModel, *, keeps_raw: bool = False) -> None:
        self.tokenizer = loaded.tokenizer
        self._path, self._head, self._default_params = loaded.path, loaded.config.head, loaded.default_params
        self.keeps_raw = keeps_raw
        self._engine: Engine | None = loaded.engine  # None once closed
        self.image_prompts = ImagePrompts(loaded.tokenizer, loaded.image_processor)
        self.turns = EngineTurns(self._step)
        self._running: dict[int, tuple[Answer, Call]] = {}  # by request id; for the holder of the turn
        self._batches: list[_OutputBatch] = []  # for the holder of the turn

    @property
    def engine(self) -> Engine:
        """The engine. Raises KukriError after `close`."""
        if self._engine is None:
            raise closed_error()
        return self._engine

    @property
    def is_open(self) -> bool:
        """True until `close`."""
        return self._engine is not None

    @cached_property
    def dialect(self) -> ModelDialect:
        """How the model writes conversations, reasoning and calls."""
        from kukri.dialects.model_dialect import ModelDialect

        return ModelDialect(self.chat_template, self.tokenizer)

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; using it raises RequestError if the file has none."""
        tokenizer = self.tokenizer
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    def for_prompts(
        self,
        prompt: Any,
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
        adapter: str | None = None,
        intervene: Intervene | None = None,
    ) -> list[Call]:
        """A call for a prompt, or for each of a list of them."""
        checked = resolve_texts(self.params(params, overrides), self.tokenizer)
        prompts = prompt if is_many(prompt) else [prompt]
        return [self.call(one, checked, adapter, intervene) for one in prompts]

    def call(
        self,
        prompt: Any,
        params: SamplingParams,
        adapter: str | None = None,
        intervene: Intervene | None = None,
        *,
        streams: bool = False,
        turn: Turn | None = None,
    ) -> Call:
        """A call for one prompt, checked and not started. Its answer is text as it was generated, or with the
        `turn` of a conversation told apart.
        """
        if streams and is_many(prompt):
            raise RequestError.of("prompt", "must be one prompt or one conversation: stream each by itself")
        prompt_ids, params = self._encode(prompt), resolve_texts(params, self.tokenizer)
        self.check_generates()
        if streams and params.n_generated_answers > params.n:
            raise RequestError.of("best_of", "cannot be combined with streaming")
        engine = self.engine
        requests = engine.maker.make_requests(prompt_ids, params, adapter=adapter)
        engine.maker.check_fits(requests[0])
        taps = [] if intervene is None else intervene(requests)
        return Call(requests, params, self.tokenizer, taps, streams=streams, turn=turn)

    def run(self, calls: list[Call]) -> list[Result]:
        """The result of each call, in order. Raises the error that ended one."""
        try:
            self._start(calls)
            return [self._finished(call) for call in calls]
        finally:
            self._drop(calls)

    def _finished(self, call: Call) -> Result:
        self.turns.wait(lambda: call.is_done)
        return call.result_or_error()

    def chunks(self, call: Call) -> Iterator[Chunk]:
        """The chunks of a stream, started with the first. Raises the error that ended it."""
        try:
            self._start([call])
            chunk: Chunk | None = None
            while chunk is None or chunk.result is None:
                self.turns.wait(lambda: call.is_done or bool(call.chunks))
                if not call.chunks:
                    call.result_or_error()  # raises: a result comes with a chunk
                yield (chunk := call.chunks.popleft())
        finally:
            self._drop([call])

    def compute(self, requests: list[Request]) -> list[FloatArray]:
        """Runs requests for rows of output, and gives the rows of each. Raises the error that ended one."""
        batch = _OutputBatch(requests)
        try:
            self.turns.submit(lambda: self._add_batch(batch))
            self.turns.wait(lambda: batch.is_done)
        finally:
            if not batch.is_done:
                self.turns.submit(lambda: self._end_batch(batch))
        return batch.rows_or_error()

    def close(self) -> None:
        """Ends all calls under way, with an error; within `alone`. Every later use raises KukriError."""
        for _, call in self._running.values():
            call.fail(closed_error())
        self.end([call for _, call in self._running.values()])
        for batch in self._batches:
            batch.error = batch.error or closed_error()
            self._end_batch(batch)
        if self._engine is not None:
            self._engine.close()
        self._engine = None

    def _start(self, calls: list[Call]) -> None:
        """Queues the calls' requests before the next step."""
        self.turns.submit(lambda: self.add(calls))

    def _drop(self, calls: list[Call]) -> None:
        """Aborts, before the next step, the requests of calls whose caller has gone."""
        left = [call for call in calls if call.result is None]
        if left:
            self.turns.submit(lambda: self.end(left))

    def check_generates(self) -> None:
        """Raises UnsupportedError if the head is not a language model's."""
        kind = self._head.kind
        if kind != "language_model":
            head = "no head" if kind == "none" else f"a head for {kind.replace('_', ' ')}"
            raise UnsupportedError(
                f"{self._path} has {head} and does not support generation: use {_USES[kind]} or "
                "model.forward()"
            )

    def params(self, params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
        """The caller's parameters, or the model's defaults, with the overrides set on top."""
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError.of("params", f"must be SamplingParams, not {type(params).__name__}")
        names = [f.name for f in fields(SamplingParams)]
        for name in overrides:
            if name not in names:
                raise RequestError.of(name, f"is not supported{close_matches(name, names)}")
        if params is None:
            return self._default_params.replace(**overrides)
        return replace(params, **overrides) if overrides else params

    def _encode(self, prompt: Any) -> Any:
        """The token ids of a text; anything else is for the engine to check."""
        if is_chat(prompt):
            raise RequestError.of("prompt", "must be a text, not messages: pass them to chat()")
        is_text = isinstance(prompt, str)
        return self.tokenizer.encode(prompt, add_special=True, parse_special=True) if is_text else prompt

    def answer_prompt(self, prompt: Any) -> Any:
        """The token ids of a prompt after which the answer itself comes, without reasoning before it."""
        self.check_generates()
        if not is_chat(prompt):
            return self._encode(prompt)
        return self.image_prompts.prompt(
            prompt, lambda told, images: self.dialect.answer_prompt_ids(told, images=images)
        )

    def chat_prompt(self, messages: Sequence[Message]) -> Any:
        """The token ids of a conversation by the chat template, or its prompt with images."""
        self.check_messages(messages)
        return self.image_prompts.prompt(
            messages, lambda told, images: self.dialect.prompt_ids(told, {}, None, images=images)
        )

    def check_messages(self, messages: Sequence[Message]) -> None:
        """Raises RequestError if these are no messages, or the model answers none."""
        self.check_generates()  # before a template is missed that has no use
        is_list = isinstance(messages, Sequence) and not isinstance(messages, str)
        if not is_list or not all(isinstance(one, Mapping) for one in messages):
            raise RequestError.of("messages", "must be a list of messages: pass a text to generate()")

    # The methods below belong to the thread that holds the turn.

    def add(self, calls: list[Call]) -> None:
        """Queues the calls' requests."""
        for call in calls:
            if self._engine is None:
                call.fail(closed_error())
                continue
            try:
                for answer in call.answers:
                    self._engine.add_request(answer.request)
                    self._running[answer.request.id] = answer, call
            except Exception as error:  # this call fails: the thread that runs the step may wait for another
                self.end([call])
                call.fail(failure_of("queueing the request", error))

    def _add_batch(self, batch: _OutputBatch) -> None:
        if self._engine is None:
            batch.error = closed_error()
            return
        self._batches.append(batch)
        for request in batch.requests:
            try:
                self._engine.add_request(request)
            except Exception as error:
                batch.error = failure_of("queueing the request", error)
                self._end_batch(batch)
                return

    def _end_batch(self, batch: _OutputBatch) -> None:
        for request in batch.requests:
            if self._engine is not None:
                self._engine.abort(request)

    def end(self, calls: list[Call]) -> None:
        """Aborts the calls' requests."""
        for call in calls:
            for answer in call.answers:
                if self._running.pop(answer.request.id, None) is not None and self._engine is not None:
                    self._engine.abort(answer.request)

    def _step(self) -> None:
        """Runs one step and gives each call its tokens, or the error that ended it."""
        engine = self._engine
        assert engine is not None, "close() leaves nothing to wait for"
        try:
            outputs = engine.step()
        except BaseException as error:
            if not self._fail_ended(error) or not isinstance(error, Exception):
                raise
            return
        if self._batches:
            self._batches = [batch for batch in self._batches if not batch.is_done]
        if not outputs:
            self._fail_ended()
            return
        touched: dict[Answer, Call] = {}
        for request, token, finish_reason in outputs:
            answer, call = self._running.get(request.id, (None, None))
            if answer is None or call is None:  # ended by a stop string earlier in the step
                continue
            try:
                stop = answer.push(token, finish_reason)
            except BaseException as error:
                self._break_off(call, error)
                continue
            if stop is not None and finish_reason is None:
                engine.finish(request, "stop", stop)
            if answer.finish_reason is not None:
                del self._running[request.id]
            if call.streams or answer.finish_reason is not None:
                touched[answer] = call
        for answer, call in touched.items():
            try:
                call.advance(answer)
            except BaseException as error:
                self._break_off(call, error)

    def _break_off(self, call: Call, error: BaseException) -> None:
        """End a call by an error in its text; the other calls continue."""
        failure = failure_of("the text of the answer", error)
        self.end([call])
        call.fail(failure)

    def _fail_ended(self, error: BaseException | None = None) -> bool:
        """Fails the calls whose requests ended without an output, by `error` if given; False if none did."""
        has_work = self._engine is not None and self._engine.has_work
        ended = [
            (answer, call)
            for answer, call in self._running.values()
            if answer.request.has_ended or not has_work
        ]
        for answer, call in ended:
            del self._running[answer.request.id]
            call.fail((error if isinstance(error, Exception) else None) or _ending_of(answer.request))
        done = [batch for batch in self._batches if batch.is_done]
        for batch in done:
            self._batches.remove(batch)
            batch.error = batch.error or (error if isinstance(error, Exception) else None)
        return bool(ended or done)


class Call:
    """The answers to one prompt, filled by the thread that holds the turn and read by the one that called.

    If it `streams`, each step's text is a chunk. With a `turn` the answers have parts.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        params: SamplingParams,
        tokenizer: Tokenizer,
        taps: Sequence[InterventionTaps] = (),
        *,
        streams: bool,
        turn: Turn | None = None,
    ) -> None:
        ids, marks = tokenizer.vocabulary.id_of, () if turn is None else turn.marks
        shown = frozenset(ids[mark] for mark in marks if mark in ids)
        self.answers = [
            Answer(request, i, tokenizer, shown=shown, beginning=None if turn is None else turn.beginning())
            for i, request in enumerate(requests)
        ]
        self._choices = None if turn is None else [turn.choice(answer) for answer in self.answers]
        self._tokenizer = tokenizer
        self.chunks: deque[Chunk] = deque()  # chunks of a stream that are not read yet
        self.result: Result | None = None
        self.error: Exception | None = None
        self.on_change: Callable[[], None] = _ignore  # called after a change; quick, and must not raise
        self._params, self.streams, self._taps = params, streams, taps
        self._readouts: list[Readout] = []
        self._written: list[list[_Written]] = [[] for _ in requests]
        self._n_tokens_taken = [0] * len(requests)
        self._outputs: dict[int, Output] = {}

    @property
    def requests(self) -> list[Request]:
        """The request of each answer."""
        return [answer.request for answer in self.answers]

    @property
    def is_done(self) -> bool:
        """True once there is a result or an error."""
        return self.result is not None or self.error is not None

    def result_or_error(self) -> Result:
        """Returns the result. Raises the error that ended the call."""
        if self.error is not None:
            raise self.error
        assert self.result is not None, "the call is done"
        return self.result

    def advance(self, answer: Answer) -> None:
        """Handles what was added to an answer that is streamed, or has ended: its next chunk, its output."""
        if answer.finish_reason in ("abort", "error"):
            self.fail(_ending_of(answer.request))
            return
        is_ended = answer.finish_reason is not None
        written = self._take(answer)
        result = None
        if is_ended:
            self._outputs[answer.index] = self._output(answer)
        readouts = self._read(answer, is_ended)
        if len(self._outputs) == len(self.answers):
            try:
                result = self._result()
            except KukriError as error:  # activations that are larger than allowed
                self.fail(error)
                return
        if self.streams and (any(written) or is_ended or readouts):
            self.chunks.append(self._chunk(answer, written, result, readouts))
        self.result = result  # last: a reader takes it for the end
        self.on_change()

    def fail(self, error: Exception) -> None:
        """Ends the call with an error, unless one has ended it already."""
        self.error = self.error or error
        self.on_change()

    def _read(self, answer: Answer, is_ended: bool) -> list[Readout]:
        """Return the readings of tokens since the last time, of a single answer, as the session sees to."""
        if not self._taps or not self._taps[0].has_unread:
            return []
        found = self._taps[0].readouts(answer.request, is_done=is_ended)
        self._readouts += found
        return found

    def _take(self, answer: Answer) -> _Written:
        """Takes what the answer has gained since the last time, and adds it to the answer's parts."""
        if self._choices is None:
            new = _Written(answer.take_text())
        else:
            events = self._choices[answer.index].advance()
            text, reasoning = (
                "".join(event.text for event in events if event.part.kind == kind)
                for kind in ("text", "reasoning")
            )
            calls = [event for event in events if event.part.kind == "call"]
            ended = [event.part for event in calls if event.what == "closed"]
            new = _Written(
                text, reasoning, tuple(ToolCall(c.call_id, c.name, c.text) for c in ended), bool(calls)
            )
        self._written[answer.index].append(new)
        return new

    def _reason(self, answer: Answer) -> FinishReason | None:
        """Why an answer ended; None while it has not."""
        ends = answer if self._choices is None else self._choices[answer.index]
        return cast("FinishReason | None", ends.finish_reason)

    def _chunk(
        self, answer: Answer, written: _Written, result: Result | None, readouts: list[Readout]
    ) -> Chunk:
        request, i = answer.request, answer.index
        first, stop = request.n_prompt + self._n_tokens_taken[i], request.n_prompt + answer.n_tokens
        self._n_tokens_taken[i] = answer.n_tokens
        ids = request.sequence.tokens[first:stop].tolist()
        reason = self._reason(answer)
        return Chunk(written.text, ids, reason, result, i, readouts, written.reasoning, written.tool_calls)

    def _output(self, answer: Answer) -> Output:
        request, params, parts = answer.request, self._params, self._written[answer.index]
        request.cut(answer.n_tokens)
        has_logprobs = params.logprobs is not None or params.n_generated_answers > params.n
        return Output(
            index=answer.index,
            text="".join(written.text for written in parts),
            reasoning="".join(written.reasoning for written in parts),
            tool_calls=tuple(call for written in parts for call in written.tool_calls),
            token_ids=request.output_ids,
            finish_reason=cast("FinishReason", self._reason(answer)),
            stop_reason=request.answer.stop_reason if answer.stop_string is None else answer.stop_string,
            logprobs=None if params.logprobs is None else request.answer.sampled,
            cumulative_logprob=request.answer.cumulative_logprob if has_logprobs else None,
            timings=request.timings,
            raw_text=self._tokenizer.decode(request.output_ids),
        )

    def _result(self) -> Result:
        outputs = [self._outputs[i] for i in range(len(self.answers))]
        n = self._params.n
        if len(outputs) > n:
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        best, request = outputs[0], self.answers[0].request
        prompt_ids: list[int] = request.prompt.tolist()
        scores = self._params.prompt_logprobs
        return Result(
            text=best.text,
            token_ids=best.token_ids,
            finish_reason=best.finish_reason,
            stop_reason=best.stop_reason,
            logprobs=best.logprobs,
            prompt_token_ids=prompt_ids,
            timings=best.timings,
            prompt_logprobs=None
            if scores is None
            else [SampledToken(prompt_ids[0]), *request.answer.prompt_logprobs],
            outputs=tuple(replace(output, index=i) for i, output in enumerate(outputs[:n])),
            activations=self._taps[0].activations(request) if self._taps and self._taps[0].captures else None,
            readouts=self._readouts,
            image_tokens=image_tokens(request),
            reasoning=best.reasoning,
            tool_calls=best.tool_calls,
            raw_text=best.raw_text,
            usage=Usage(
                prompt_tokens=request.n_prompt,
                cached_tokens=request.sequence.n_prefix_hit,
                completion_tokens=sum(answer.n_tokens for answer in self.answers),
                reasoning_tokens=sum(choice.n_reasoning for choice in self._choices or ()),
            ),
        )


class _Written(NamedTuple):
    """A stretch of an answer, by its parts; `tool_calls` are the calls that ended in it.

    `calls` is True if a call began, grew or ended, so that a stream can be closed within a call.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    calls: bool = False


class _OutputBatch:
    """Requests for rows of output that one call waits for."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.error: Exception | None = None
        self._left = list(requests)

    @property
    def is_done(self) -> bool:
        """True once every request has ended, or one could not be queued."""
        while self._left and self._left[-1].has_ended:
            self._left.pop()
        return not self._left or self.error is not None

    def rows_or_error(self) -> list[FloatArray]:
        """Returns each request's rows. Raises the error that ended one."""
        if self.error is not None:
            raise self.error
        rows: list[FloatArray] = []
        for request in self.requests:
            if request.answer.finish_reason != "stop" or request.answer.rows is None:
                raise _ending_of(request)
            rows.append(request.answer.rows)
        return rows


def _ignore() -> None:
    pass


def _ending_of(request: Request) -> KukriError:
    """The error that ended a request."""
    if request.answer.error is not None and str(request.answer.error):
        return request.answer.error
    return KukriError(f"request {request.id} was aborted")


def closed_error() -> KukriError:
    """The error of calls on a closed LLM."""
    return KukriError("this LLM is closed: open another")


def is_many(prompt: Any) -> bool:
    """True if it is a list of prompts: the first entry of one prompt is a token id."""
    return _first_is(prompt, (str, Sequence, SpanPrompt))


def is_chat(prompt: Any) -> bool:
    """True if it is a conversation: a list of messages."""
    return _first_is(prompt, Mapping)


def _first_is(prompt: Any, kind: Any) -> bool:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], kind)
