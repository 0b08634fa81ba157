"""Offline generation: text in, text out, from any number of threads.

Token ids become text in `kukri.answer` and nowhere below; models are opened in `kukri.loading`.
"""

from __future__ import annotations

import difflib
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, Unpack, cast, overload

import numpy as np

from kukri import tasks
from kukri.answer import Answer
from kukri.config import Speculation
from kukri.engine import Engine, Request, RequestState, Timings
from kukri.engine.turns import EngineTurns
from kukri.errors import HookError, KukriError, RequestError, UnsupportedError
from kukri.kernels.types import FloatArray, Hook
from kukri.loading import ModelOptions, Progress, open_model
from kukri.models import Forward, tap_names
from kukri.sampling import SampledToken, SamplingOptions, SamplingParams, resolve_texts, with_overrides
from kukri.tasks import Label, Span, TokenLabel
from kukri.tokenizer import ChatTemplate, Tokenizer

_USES = {
    "question_answering": "answer()",
    "sequence_classification": "classify()",
    "token_classification": "classify_tokens()",
    "none": "embed()",
}
Message = Mapping[str, Any]
Prompt = str | Sequence[int]
FinishReason = Literal["stop", "length"]


@dataclass(frozen=True)
class Output:
    """One of the answers to a prompt.

    `token_ids` are all tokens generated, one that ended the answer included; `text` leaves control tokens and
    a stop string out. `finish_reason` is "length", or "stop" for an end of text, a stop id or a stop string,
    and `stop_reason` is the id or the string. `logprobs` has an entry for each token, if requested, and
    `cumulative_logprob` (nats) their sum; it is there for `best_of` too.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[SampledToken] | None
    cumulative_logprob: float | None
    timings: Timings

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        return f"Output({self.index}, {_summary(self)})"


@dataclass(frozen=True)
class Result:
    """The finished answer to a prompt; with `n` or `best_of` the first of several, all of them in `outputs`.

    The fields up to `logprobs` are those of `outputs[0]`, as `Output` has them. `outputs` are in the order of
    their seeds, or with `best_of` the most probable first. `prompt_logprobs`, if requested, has an entry for
    each token of the prompt, of which the first has no log-probability.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[SampledToken] | None
    prompt_token_ids: list[int]
    timings: Timings
    prompt_logprobs: list[SampledToken] | None = None
    outputs: tuple[Output, ...] = ()

    def __str__(self) -> str:
        return self.text

    def __repr__(self) -> str:
        others = f", {len(self.outputs)} outputs" if len(self.outputs) > 1 else ""
        return f"Result({_summary(self)}{others})"


def _summary(answer: Output | Result) -> str:
    """The text, number of tokens and finish reason, for a repr."""
    return f"{answer.text!r}, {len(answer.token_ids)} tokens, finish_reason={answer.finish_reason!r}"


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer, and the tokens since the last; the last chunk carries the `result`.

    With `n` answers the pieces of all come in turn: `index` says whose this is, and each has a last chunk
    with its `finish_reason`.
    """

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    result: Result | None = None
    index: int = 0

    def __str__(self) -> str:
        return self.text


class LLM:
    """A model loaded from a file, ready to generate. Threads may share it: their calls run as one batch.

    `model` is a known name, the path of a .gguf file or of a directory with safetensors, or None for the
    default model; a known name is fetched when it is not in the cache. `quantize`, "Q8_0", "Q4_K" …, packs a
    directory's matrices while they are loaded. `max_context` (tokens) limits prompt and answer together, None
    for the model's own limit, or less if memory is short, which is logged as a warning; `n_threads` None
    takes the cores this process may use; a prompt is read in steps of `max_step_tokens`. Up to `max_requests`
    requests, None for 16, run side by side, in a KV cache of `kv_bytes`; None takes what as many contexts
    need, as far as memory is free. Its numbers are float16 or q8_0. `rope_scaling`, "linear", "dynamic"
    or "yarn", stretches the model's context `rope_factor` times. `speculation` computes drafts beside a
    token, which change none, unless a request says otherwise: "ngram" looks them up in the text, "draft"
    runs `draft_model`, a small model of the same tokens; "off" does without. `chat_template` is the
    source of a Jinja template to use instead of the file's. `progress(done, total)`, in bytes of weights, is
    called while these are loaded.

    Whoever waits for an answer steps the engine for all, so a slow reader of a stream delays nobody. Hooks
    see the steps of every thread. A hook or logits processor must not call its own LLM: KukriError.

    Calls without `params` sample by `default_params`: as the model's files advise (generation_config.json,
    general.sampling.* of GGUF), else by kukri's own defaults. Keyword arguments are set on top of these.

    Attributes: options, path, config (of the file), engine_config, tokenizer, model, engine, default_params.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_context: int | None = None,
        n_threads: int | None = None,
        backend: Literal["cpu", "reference"] = "cpu",
        max_step_tokens: int = 512,
        max_requests: int | None = None,
        kv_bytes: int | None = None,
        kv_type: Literal["f16", "q8_0"] = "f16",
        quantize: str | None = None,
        rope_scaling: str | None = None,
        rope_factor: float | None = None,
        speculation: Speculation | None = None,
        draft_model: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        self.options = ModelOptions(
            model=None if model is None else os.fspath(model),
            max_context=max_context,
            n_threads=n_threads,
            backend=backend,
            max_step_tokens=max_step_tokens,
            max_requests=max_requests,
            kv_bytes=kv_bytes,
            kv_type=kv_type,
            quantize=quantize,
            rope_scaling=rope_scaling,
            rope_factor=rope_factor,
            speculation=speculation,
            draft_model=None if draft_model is None else os.fspath(draft_model),
            chat_template=chat_template,
        )
        loaded = open_model(self.options, progress)
        self.path, self.config, self.engine_config = loaded.path, loaded.config, loaded.engine_config
        self.tokenizer, self.model = loaded.tokenizer, loaded.model
        self.default_params = loaded.default_params
        self._backend = loaded.backend
        self._engine: Engine | None = loaded.engine  # None once closed
        self._is_open = True
        self._turns = EngineTurns(self._step)
        self._running: dict[int, tuple[Answer, _Call]] = {}  # by request id; for the holder of the turn
        self._batches: list[_OutputBatch] = []  # for the holder of the turn

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Unpack[SamplingOptions]
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> list[Result]: ...

    def generate(
        self, prompt: Any, params: SamplingParams | None = None, **overrides: Unpack[SamplingOptions]
    ) -> Result | list[Result]:
        """The Result that continues a prompt, text or token ids; for a list of prompts, a list of Results.

        `overrides` are fields of SamplingParams, set on top of `params` or, without these, of the model's
        `default_params`. A text gets the model's tokens around it (BOS, EOS); control tokens spelled
        out in it stay text. Raises RequestError on anything wrong with a prompt or the parameters, before a
        token is computed.
        """
        results = self._run(self._prompt_calls(prompt, params, overrides))
        return results if _is_many(prompt) else results[0]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Result:
        """The model's answer to a conversation: messages of `role` and `content`, by its own chat template.

        Control tokens come from the template alone: in the contents they stay text.
        """
        return self._run([self._chat_call(messages, params, overrides)])[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """The Chunks of the answer to a prompt or to messages, as they come.

        The request is checked at once and starts with the first chunk; closing the iterator ends it. Raises
        RequestError for a `best_of` above `n`, as the best answers are known at the end.
        """
        return self._chunks(self._stream_call(prompt, params, overrides))

    def logits(self, token_ids: Sequence[int]) -> FloatArray:
        """Logits float32 [T, V]: row t is about the token after `token_ids[: t + 1]`."""
        request = self.engine.make_output_request(token_ids, "logits")
        (rows,) = self._compute([request])
        return rows

    def answer(
        self, question: str, context: str, *, top_k: int = 1, max_answer_tokens: int = 15
    ) -> list[Span]:
        """The `top_k` spans of the context that most probably answer the question, the best first.

        For checkpoints of `...ForQuestionAnswering`; others raise UnsupportedError.
        """
        self._check_open()
        return tasks.answer(
            self.model,
            self._outputs,
            self.tokenizer,
            question,
            context,
            top_k=top_k,
            max_answer_tokens=max_answer_tokens,
        )

    def classify(self, text: str) -> list[Label]:
        """Every label of a text with its score, the best first; for `...ForSequenceClassification`."""
        self._check_open()
        return tasks.classify(self.model, self._outputs, self.tokenizer, text)

    def classify_tokens(self, text: str) -> list[TokenLabel]:
        """A label for each token of a text, with its place; for `...ForTokenClassification`."""
        self._check_open()
        return tasks.classify_tokens(self.model, self._outputs, self.tokenizer, text)

    def embed(
        self, texts: str | Sequence[str], *, pooling: tasks.Pooling = "mean", normalize: bool = True
    ) -> FloatArray:
        """A vector for each text, float32 [n, D], or [D] for a single text; any checkpoint has them.

        `pooling` is the mean over all tokens, the last or the first ("cls"), of what the last norm gives.
        `normalize` makes vectors of length 1.
        """
        if not isinstance(texts, Sequence):
            raise RequestError(
                f"texts must be str or a list of them, not {type(texts).__name__}", param="texts"
            )
        many = [texts] if isinstance(texts, str) else texts
        self._check_open()
        tasks.check_pooling(pooling)
        ids = [self.tokenizer.encode(text, add_special=True) for text in many]
        requests = tasks.embedding_requests(self._open_engine(), ids, pooling)
        vectors = np.array(self._compute(requests), np.float32).reshape(-1, self.config.d_model)
        if normalize:
            vectors = tasks.normalized(vectors)
        return vectors[0] if isinstance(texts, str) else vectors

    @contextmanager
    def hooks(self, hooks: Mapping[str, Hook]) -> Iterator[None]:
        """Within the `with` block, each hook listens on its full name, such as `blocks.3.hook_resid_pre`.

        A hook is called as hook(name, array) in each step, with float32 [tokens of the step, width]; it may
        edit the array in place or return a replacement, and must copy what it wants to keep. Raises HookError
        on a name that the model does not have (`hook_names` lists them).
        """
        for name, hook in hooks.items():
            if name not in self.hook_names:
                raise HookError(f"the model has no hook {name!r}{_close_matches(name, self.hook_names)}")
            if not callable(hook):
                raise HookError(f"the hook on {name} is a {type(hook).__name__} and cannot be called")
        listening = dict(hooks)
        with self._alone():
            listened: list[Forward | Engine] = [self.model.bound]
            if self._engine is not None:
                listened.append(self._engine)
            for runner in listened:
                runner.add_hooks(listening)
        try:
            yield
        finally:
            with self._turns.alone():
                for runner in listened:
                    runner.remove_hooks(listening)

    @cached_property
    def hook_names(self) -> tuple[str, ...]:
        """Every name that a hook may listen on, in the order of a step."""
        return tuple(tap_names(self.model))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; using it raises RequestError if the file has none."""
        tokenizer = self.tokenizer
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    @property
    def engine(self) -> Engine:
        """The engine below, to be stepped by this LLM alone.

        Raises KukriError after `close`, UnsupportedError if the head is no language model's.
        """
        self._check_open()
        self._check_generates()
        return self._open_engine()

    def close(self) -> None:
        """Ends all calls under way, with an error, and the backend's threads. The LLM is of no use after."""
        with self._turns.alone():
            self._is_open = False
            for _, call in self._running.values():
                call.fail(self._closed_error())
            self._end([call for _, call in self._running.values()])
            for batch in self._batches:
                batch.error = batch.error or self._closed_error()
                self._end_batch(batch)
            self._engine = None
            self.model.bind(None)
            close = getattr(self._backend, "close", None)
            if close is not None:
                close()

    def __repr__(self) -> str:
        state = "" if self._is_open else ", closed"
        return f"LLM({str(self.path)!r}, {self.config.architecture}, {self.engine_config.backend}{state})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its options: another process opens the same model."""
        return _open, (self.options,)

    def __copy__(self) -> LLM:
        raise KukriError("an LLM is not copied: threads may share one, and kukri.load() opens another")

    def __deepcopy__(self, memo: Any) -> LLM:
        return self.__copy__()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Within the block no step runs. Raises KukriError after `close`."""
        with self._turns.alone():
            self._check_open()
            yield

    def _check_open(self) -> None:
        if not self._is_open:
            raise self._closed_error()

    @staticmethod
    def _closed_error() -> KukriError:
        return KukriError("this LLM is closed: load the model again")

    def _check_generates(self) -> None:
        kind = self.config.head.kind
        if kind != "language_model":
            head = "no head" if kind == "none" else f"a head for {kind.replace('_', ' ')}"
            raise UnsupportedError(
                f"{self.path} has {head} and generates no text: use {_USES[kind]} or model.forward()"
            )

    def _params(self, params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
        """The caller's parameters, or the model's defaults, with the overrides set on top."""
        if params is not None and not isinstance(params, SamplingParams):
            raise RequestError(f"params must be SamplingParams, not {type(params).__name__}", param="params")
        names = [f.name for f in fields(SamplingParams)]
        for name in overrides:
            if name not in names:
                raise RequestError(f"there is no parameter {name!r}{_close_matches(name, names)}", param=name)
        if params is None:
            return with_overrides(self.default_params, overrides)
        return replace(params, **overrides) if overrides else params

    def _encode(self, prompt: Any) -> Any:
        """The token ids of a text; anything else is for the engine to check."""
        if _is_chat(prompt):
            raise RequestError("these are messages, which chat() answers: a prompt is a text", param="prompt")
        return self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        self._check_generates()  # before a template is missed that has no use
        if isinstance(messages, str):
            raise RequestError(
                'messages must be a list, such as [{"role": "user", "content": "Hello"}]: generate() '
                "continues a text",
                param="messages",
            )
        return self.chat_template.encode(self.tokenizer, messages, add_generation_prompt=True)

    def _prompt_calls(
        self, prompt: Any, params: SamplingParams | None, overrides: Mapping[str, Any]
    ) -> list[_Call]:
        """A call for a prompt, or for each of a list of them."""
        checked = resolve_texts(self._params(params, overrides), self.tokenizer)
        prompts = prompt if _is_many(prompt) else [prompt]
        return [self._call(self._encode(one), checked) for one in prompts]

    def _chat_call(
        self, messages: Sequence[Message], params: SamplingParams | None, overrides: Mapping[str, Any]
    ) -> _Call:
        checked = resolve_texts(self._params(params, overrides), self.tokenizer)
        return self._call(self._encode_chat(messages), checked)

    def _stream_call(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None,
        overrides: Mapping[str, Any],
    ) -> _Call:
        checked = resolve_texts(self._params(params, overrides), self.tokenizer)
        if checked.n_generated_answers > checked.n:
            raise RequestError("best_of cannot be streamed: the best is known at the end", param="best_of")
        if _is_chat(prompt):
            ids: Any = self._encode_chat(cast("Sequence[Message]", prompt))
        else:
            ids = self._encode(prompt)
        return self._call(ids, checked, streams=True)

    def _call(self, prompt_ids: Any, params: SamplingParams, *, streams: bool = False) -> _Call:
        """A call for one prompt, checked, texts in its parameters tokenized already; not started."""
        engine = self.engine
        requests = engine.make_requests(prompt_ids, params)
        engine.scheduler.check_fits(requests[0])
        return _Call(requests, params, self.tokenizer, streams=streams)

    def _run(self, calls: list[_Call]) -> list[Result]:
        try:
            self._start(calls)
            return [self._finished(call) for call in calls]
        finally:
            self._drop(calls)

    def _finished(self, call: _Call) -> Result:
        self._turns.wait(lambda: call.is_done)
        return call.result_or_error()

    def _chunks(self, call: _Call) -> Iterator[Chunk]:
        try:
            self._start([call])
            chunk: Chunk | None = None
            while chunk is None or chunk.result is None:
                self._turns.wait(lambda: call.is_done or bool(call.chunks))
                if not call.chunks:
                    call.result_or_error()  # raises: a result comes with a chunk
                yield (chunk := call.chunks.popleft())
        finally:
            self._drop([call])

    def _compute(self, requests: list[Request]) -> list[FloatArray]:
        """Runs requests for rows of output, and gives the rows of each. Raises the error that ended one."""
        batch = _OutputBatch(requests)
        try:
            self._turns.submit(lambda: self._add_batch(batch))
            self._turns.wait(lambda: batch.is_done)
        finally:
            if not batch.is_done:
                self._turns.submit(lambda: self._end_batch(batch))
        return batch.rows_or_error()

    def _outputs(self, token_ids: list[int]) -> FloatArray:
        """The outputs of the model's head for each token: float32 [T, width]."""
        (rows,) = self._compute([self._open_engine().make_output_request(token_ids, "logits")])
        return rows

    def _open_engine(self) -> Engine:
        engine = self._engine
        if engine is None:
            raise self._closed_error()
        return engine

    def _start(self, calls: list[_Call]) -> None:
        """Queues the calls' requests before the next step."""
        self._turns.submit(lambda: self._add(calls))

    def _drop(self, calls: list[_Call]) -> None:
        """Aborts, before the next step, the requests of calls whose caller has gone."""
        left = [call for call in calls if call.result is None]
        if left:
            self._turns.submit(lambda: self._end(left))

    # The methods below belong to the thread that holds the turn.

    def _add(self, calls: list[_Call]) -> None:
        for call in calls:
            if self._engine is None:
                call.fail(self._closed_error())
                continue
            for answer in call.answers:
                self._engine.add_request(answer.request)
                self._running[answer.request.id] = answer, call

    def _add_batch(self, batch: _OutputBatch) -> None:
        if self._engine is None:
            batch.error = self._closed_error()
            return
        self._batches.append(batch)
        for request in batch.requests:
            try:
                self._engine.add_request(request)
            except KukriError as error:
                batch.error = error
                self._end_batch(batch)
                return

    def _end_batch(self, batch: _OutputBatch) -> None:
        for request in batch.requests:
            if self._engine is not None:
                self._engine.abort(request)

    def _end(self, calls: list[_Call]) -> None:
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
        self._batches = [batch for batch in self._batches if not batch.is_done]
        if not outputs:
            self._fail_ended()
            return
        touched: dict[Answer, _Call] = {}
        for request, token, finish_reason in outputs:
            answer, call = self._running.get(request.id, (None, None))
            if answer is None or call is None:  # ended by a stop string earlier in the step
                continue
            stop = answer.push(token, finish_reason)
            if stop is not None and finish_reason is None:
                engine.finish(request, "stop", stop)
            if answer.finish_reason is not None:
                del self._running[request.id]
            touched[answer] = call
        for answer, call in touched.items():
            call.advance(answer)

    def _fail_ended(self, error: BaseException | None = None) -> bool:
        """Fails the calls whose requests ended without an output, by `error` if given; False if none did."""
        has_work = self._engine is not None and self._engine.has_work
        ended = [
            (answer, call)
            for answer, call in self._running.values()
            if answer.request.state is RequestState.FINISHED or not has_work
        ]
        for answer, call in ended:
            del self._running[answer.request.id]
            call.fail((error if isinstance(error, Exception) else None) or _ending_of(answer.request))
        done = [batch for batch in self._batches if batch.is_done]
        for batch in done:
            self._batches.remove(batch)
            batch.error = batch.error or (error if isinstance(error, Exception) else None)
        return bool(ended or done)


class _OutputBatch:
    """Requests for rows of output that one call waits for."""

    def __init__(self, requests: list[Request]) -> None:
        self.requests = requests
        self.error: Exception | None = None
        self._left = list(requests)

    @property
    def is_done(self) -> bool:
        """True once every request has ended, or one could not be queued."""
        while self._left and self._left[-1].state is RequestState.FINISHED:
            self._left.pop()
        return not self._left or self.error is not None

    def rows_or_error(self) -> list[FloatArray]:
        """Returns each request's rows. Raises the error that ended one."""
        if self.error is not None:
            raise self.error
        rows: list[FloatArray] = []
        for request in self.requests:
            if request.finish_reason != "stop" or request.rows is None:
                raise _ending_of(request)
            rows.append(request.rows)
        return rows


class _Call:
    """The answers to one prompt, filled by the thread that holds the turn and read by the one that called."""

    def __init__(
        self, requests: Sequence[Request], params: SamplingParams, tokenizer: Tokenizer, *, streams: bool
    ) -> None:
        self.answers = [Answer(request, i, tokenizer) for i, request in enumerate(requests)]
        self.chunks: deque[Chunk] = deque()  # of a stream, not read yet
        self.result: Result | None = None
        self.error: Exception | None = None
        self.on_change: Callable[[], None] = _ignore  # called after a change; quick, and must not raise
        self._params, self._streams = params, streams
        self._texts = [""] * len(requests)
        self._n_tokens_taken = [0] * len(requests)
        self._outputs: dict[int, Output] = {}

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
        """Handles a step's addition to an answer: the next chunk of a stream, at the end its output."""
        if answer.finish_reason in ("abort", "error"):
            self.fail(_ending_of(answer.request))
            return
        is_ended = answer.finish_reason is not None
        if not self._streams and not is_ended:
            return
        text = answer.take_text()
        self._texts[answer.index] += text
        result = None
        if is_ended:
            self._outputs[answer.index] = self._output(answer)
            if len(self._outputs) == len(self.answers):
                result = self._result()
        if self._streams and (text or is_ended):
            self.chunks.append(self._chunk(answer, text, result))
        self.result = result  # last: a reader takes it for the end
        self.on_change()

    def fail(self, error: Exception) -> None:
        """Ends the call with an error, unless one has ended it already."""
        self.error = self.error or error
        self.on_change()

    def _chunk(self, answer: Answer, text: str, result: Result | None) -> Chunk:
        request, i = answer.request, answer.index
        first, stop = request.n_prompt + self._n_tokens_taken[i], request.n_prompt + answer.n_tokens
        self._n_tokens_taken[i] = answer.n_tokens
        reason = cast("FinishReason | None", answer.finish_reason)
        return Chunk(text, request.tokens[first:stop].tolist(), reason, result, i)

    def _output(self, answer: Answer) -> Output:
        request, params = answer.request, self._params
        request.cut(answer.n_tokens)
        has_logprobs = params.logprobs is not None or params.n_generated_answers > params.n
        return Output(
            index=answer.index,
            text=self._texts[answer.index],
            token_ids=request.output_ids,
            finish_reason=cast("FinishReason", answer.finish_reason),
            stop_reason=request.stop_reason if answer.stop_string is None else answer.stop_string,
            logprobs=None if params.logprobs is None else request.sampled,
            cumulative_logprob=request.cumulative_logprob if has_logprobs else None,
            timings=request.timings,
        )

    def _result(self) -> Result:
        outputs = [self._outputs[i] for i in range(len(self.answers))]
        n = self._params.n
        if len(outputs) > n:
            outputs.sort(key=lambda output: -(output.cumulative_logprob or 0.0))
        best, request = outputs[0], self.answers[0].request
        prompt_ids: list[int] = request.tokens[: request.n_prompt].tolist()
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
            else [SampledToken(prompt_ids[0]), *request.prompt_logprobs],
            outputs=tuple(replace(output, index=i) for i, output in enumerate(outputs[:n])),
        )


def _ignore() -> None:
    pass


def _open(options: ModelOptions) -> LLM:
    return LLM(**vars(options))


def _ending_of(request: Request) -> KukriError:
    """The error that ended a request."""
    if request.error is not None and str(request.error):
        return request.error
    return KukriError(f"request {request.id} was aborted")


def load(model: str | os.PathLike[str] | None = None, **options: Any) -> LLM:
    """Opens an LLM: the same as `LLM(model, **options)`."""
    return LLM(model, **options)


def _is_many(prompt: Any) -> bool:
    """True if it is a list of prompts: the first entry of one prompt is a token id."""
    return _first_is(prompt, (str, Sequence))


def _is_chat(prompt: Any) -> bool:
    return _first_is(prompt, Mapping)


def _first_is(prompt: Any, kind: Any) -> bool:
    if isinstance(prompt, str) or not isinstance(prompt, Sequence) or not prompt:
        return False
    return isinstance(prompt[0], kind)


def _close_matches(name: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(name), names, n=3)
    return f": did you mean {' or '.join(close)}?" if close else ""
