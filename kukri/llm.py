"""The offline face: text in, text out.

Token ids become text here and nowhere below: control tokens are not shown, a character is never cut in half,
and stop strings are matched on the text.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from types import TracebackType
from typing import Any, Literal, cast, overload

from kukri import tasks
from kukri.config import EngineConfig, ModelConfig, Speculation
from kukri.engine import Engine, Request, RequestState, Timings
from kukri.errors import ConfigError, FormatError, HookError, KukriError, RequestError, UnsupportedError
from kukri.formats import hub
from kukri.formats.checkpoint import open_checkpoint
from kukri.kernels import make_backend
from kukri.kernels.types import FloatArray, Hook
from kukri.models import Forward, Model, load_model, tap_names
from kukri.models.rope import with_scaling
from kukri.sampling import SampledToken, SamplingParams, resolve_texts
from kukri.tasks import Label, Span, TokenLabel
from kukri.tokenizer import ChatTemplate, StopStrings, TextStream, Tokenizer, load_tokenizer

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
class Result:
    """A finished answer.

    `token_ids` are all tokens generated, one that ended the answer included; `text` leaves control tokens and
    a stop string out. `finish_reason` is "length", or "stop" for an end of text, a stop id or a stop string,
    and `stop_reason` is the id or the string. `logprobs` has an entry for each token, where asked for.
    """

    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stop_reason: int | str | None
    logprobs: list[SampledToken] | None
    prompt_token_ids: list[int]
    timings: Timings


@dataclass(frozen=True)
class Chunk:
    """The next piece of an answer, and the tokens since the last; the last chunk carries the `result`."""

    text: str
    token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    result: Result | None = None


class LLM:
    """A model loaded from a file, ready to generate. For one thread at a time.

    `model` is a known name, the path of a .gguf file or of a directory with safetensors, or None for the
    default model; a known name is fetched when it is not in the cache. `quantize`, "Q8_0", "Q4_K" …, packs a
    directory's matrices while they are loaded. `max_context` (tokens) limits prompt and answer together, None
    for the model's own limit; `n_threads` None takes the cores this process may use; a prompt is read in
    steps of `max_step_tokens`. Up to `max_requests` prompts of a list are answered side by side, in a cache
    with room for as many contexts, or of `kv_bytes`, in float16 or q8_0. `rope_scaling`, "linear", "dynamic"
    or "yarn", stretches the model's context `rope_factor` times. `speculation` computes guesses beside a
    token, which changes none, unless a request says otherwise: "ngram" looks them up in the text, "draft"
    asks `draft_model`, a small model of the same tokens; "off" does without.

    Attributes: path, config (of the file), engine_config, tokenizer, model, engine.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_context: int | None = None,
        n_threads: int | None = None,
        backend: Literal["cpu", "reference"] = "cpu",
        max_step_tokens: int = 512,
        max_requests: int = 1,
        kv_bytes: int | None = None,
        kv_type: Literal["f16", "q8_0"] = "f16",
        quantize: str | None = None,
        rope_scaling: str | None = None,
        rope_factor: float | None = None,
        speculation: Speculation | None = None,
        draft_model: str | os.PathLike[str] | None = None,
    ) -> None:
        self.engine_config = EngineConfig(
            backend=backend,
            max_context=max_context,
            max_requests=max_requests,
            max_step_tokens=max_step_tokens,
            kv_bytes=kv_bytes,
            kv_type=kv_type,
            speculation=speculation or ("ngram" if draft_model is None else "draft"),
            n_threads=n_threads,
        )
        self.path = hub.resolve(model)
        with open_checkpoint(self.path, quantize) as checkpoint:
            self.config = _stretched(checkpoint.config, rope_scaling, rope_factor)
            self.tokenizer = load_tokenizer(checkpoint.tokenizer)
            if self.tokenizer.n_vocab != self.config.n_vocab:
                raise FormatError(
                    f"{self.tokenizer.n_vocab} tokens for {self.config.n_vocab} rows of the embedding",
                    path=self.path,
                )
            used = _within(self.config, max_context)
            self.model: Model = load_model(checkpoint.weights(used), used)
        self._backend = make_backend(backend, n_threads)
        self.model.bind(self._backend)
        self._engine: Engine | None = None  # a head for a task has no use for one
        self._is_open = True
        if self.config.head.kind == "language_model":
            self._engine = Engine(
                self.model,
                self._backend,
                self.engine_config,
                eos_ids=self.tokenizer.eos_ids,
                draft_model=None if draft_model is None else _draft_model(draft_model, self.tokenizer),
            )
        self._answers: dict[int, _Answer] = {}  # those under way, by request id

    @overload
    def generate(self, prompt: Prompt, params: SamplingParams | None = None, **overrides: Any) -> Result: ...

    @overload
    def generate(
        self, prompt: list[str] | list[list[int]], params: SamplingParams | None = None, **overrides: Any
    ) -> list[Result]: ...

    def generate(
        self, prompt: Any, params: SamplingParams | None = None, **overrides: Any
    ) -> Result | list[Result]:
        """The Result that continues a prompt, text or token ids; for a list of prompts, a list of Results.

        `overrides` are fields of SamplingParams, set on top of `params`. A text gets the tokens that the
        model wants around a text; control tokens spelled out in it stay text. Raises RequestError on anything
        wrong with a prompt or the parameters, before a token is computed.
        """
        checked = resolve_texts(_params(params, overrides), self.tokenizer)
        many = _is_many(prompt)
        answers = [self._answer(self._encode(p), checked) for p in (prompt if many else [prompt])]
        results = self._run(answers)
        return results if many else results[0]

    def chat(
        self, messages: Sequence[Message], params: SamplingParams | None = None, **overrides: Any
    ) -> Result:
        """The model's answer to a conversation: messages of `role` and `content`, by its own chat template.

        Control tokens come from the template alone: in the contents they stay text.
        """
        checked = _params(params, overrides)
        return self._run([self._answer(self._encode_chat(messages), checked)])[0]

    def stream(
        self, prompt: Prompt | Sequence[Message], params: SamplingParams | None = None, **overrides: Any
    ) -> Iterator[Chunk]:
        """The Chunks of the answer to a prompt or to messages, as they come.

        The request is checked at once and starts with the first chunk; closing the iterator ends it.
        """
        checked = _params(params, overrides)
        if _is_chat(prompt):
            ids: Any = self._encode_chat(cast("Sequence[Message]", prompt))
        else:
            ids = self._encode(prompt)
        return self._chunks(self._answer(ids, checked))

    def logits(self, token_ids: Sequence[int]) -> FloatArray:
        """Logits float32 [T, V]: row t is about the token after `token_ids[: t + 1]`."""
        return self.engine.logits(token_ids)

    def answer(
        self, question: str, context: str, *, top_k: int = 1, max_answer_tokens: int = 15
    ) -> list[Span]:
        """The `top_k` spans of the context that most probably answer the question, the best first.

        For checkpoints of `...ForQuestionAnswering`; others raise UnsupportedError.
        """
        self._check_open()
        return tasks.answer(
            self.model,
            self.tokenizer,
            question,
            context,
            top_k=top_k,
            max_answer_tokens=max_answer_tokens,
        )

    def classify(self, text: str) -> list[Label]:
        """Every label of a text with its score, the best first; for `...ForSequenceClassification`."""
        self._check_open()
        return tasks.classify(self.model, self.tokenizer, text)

    def classify_tokens(self, text: str) -> list[TokenLabel]:
        """A label for each token of a text, with its place; for `...ForTokenClassification`."""
        self._check_open()
        return tasks.classify_tokens(self.model, self.tokenizer, text)

    def embed(
        self, texts: str | Sequence[str], *, pooling: tasks.Pooling = "mean", normalize: bool = True
    ) -> FloatArray:
        """A vector for each text, float32 [n, D], or [D] for a single text; any checkpoint has them.

        `pooling` is the mean over all tokens, the last or the first ("cls"), of what the last norm gives.
        `normalize` makes vectors of length 1.
        """
        self._check_open()
        if not isinstance(texts, Sequence):
            raise RequestError(
                f"texts must be str or a list of them, not {type(texts).__name__}", param="texts"
            )
        many = [texts] if isinstance(texts, str) else texts
        vectors = tasks.embed(self.embedder, self.tokenizer, many, pooling=pooling, normalize=normalize)
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
        self._check_open()
        listening = dict(hooks)
        listened: list[Forward | Engine] = [self.model.bound]
        if self._engine is not None:
            listened.append(self._engine)
        for runner in listened:
            runner.add_hooks(listening)
        try:
            yield
        finally:
            for runner in listened:
                runner.remove_hooks(listening)

    @cached_property
    def hook_names(self) -> tuple[str, ...]:
        """Every name that a hook may listen on, in the order of a step."""
        return tuple(tap_names(self.model))

    @cached_property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; using it raises RequestError where the file has none."""
        tokenizer = self.tokenizer
        return ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    @cached_property
    def embedder(self) -> tasks.Embedder:
        """What makes embeddings, a piece at a time; for whoever runs the engine on a thread of its own."""
        return tasks.Embedder(self.model)

    @property
    def engine(self) -> Engine:
        """The engine below. Raises KukriError after `close`, UnsupportedError where the head is no LM's."""
        self._check_open()
        self._check_generates()
        assert self._engine is not None, "an open LLM of a language model has an engine"
        return self._engine

    def close(self) -> None:
        """Ends what is still under way, the backend's threads too. The LLM cannot be used any more."""
        for answer in list(self._answers.values()):
            self._drop(answer)
        self._engine, self._is_open = None, False
        self.__dict__.pop("embedder", None)  # its caches
        self.model.bind(None)
        close = getattr(self._backend, "close", None)
        if close is not None:
            close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if not self._is_open:
            raise KukriError("this LLM is closed: load the model again")

    def _check_generates(self) -> None:
        kind = self.config.head.kind
        if kind != "language_model":
            head = "no head" if kind == "none" else f"a head for {kind.replace('_', ' ')}"
            raise UnsupportedError(
                f"{self.path} has {head} and generates no text: use {_USES[kind]} or model.forward()"
            )

    def _encode(self, prompt: Any) -> Any:
        """The token ids of a text; anything else is for the engine to check."""
        return self.tokenizer.encode(prompt, add_special=True) if isinstance(prompt, str) else prompt

    def _encode_chat(self, messages: Sequence[Message]) -> list[int]:
        self._check_generates()  # before a template is missed that has no use
        return self.chat_template.encode(self.tokenizer, messages, add_generation_prompt=True)

    def _answer(self, prompt_ids: Any, params: SamplingParams) -> _Answer:
        params = resolve_texts(params, self.tokenizer)
        return _Answer(self.engine.make_request(prompt_ids, params), self.tokenizer)

    def _run(self, answers: list[_Answer]) -> list[Result]:
        try:
            for answer in answers:
                self._start(answer)
            return [self._finished(answer) for answer in answers]
        finally:
            for answer in answers:
                self._drop(answer)

    def _finished(self, answer: _Answer) -> Result:
        while answer.result is None:
            self._step(answer)
        return answer.result

    def _chunks(self, answer: _Answer) -> Iterator[Chunk]:
        try:
            self._start(answer)
            chunk: Chunk | None = None
            while chunk is None or chunk.result is None:
                if answer.result is None:  # else another stream's steps have finished it
                    self._step(answer)
                chunk = answer.take_chunk()
                if chunk is not None:
                    yield chunk
        finally:
            self._drop(answer)

    def _start(self, answer: _Answer) -> None:
        self.engine.add_request(answer.request)
        self._answers[answer.request.id] = answer

    def _drop(self, answer: _Answer) -> None:
        """Forgets an answer, and ends it where it is not."""
        if self._answers.pop(answer.request.id, None) is not None and self._engine is not None:
            self._engine.abort(answer.request)

    def _step(self, answer: _Answer) -> None:
        """Runs one step for all that is under way. Raises the error that ended `answer`, if one did."""
        engine = self.engine
        for request, token, finish_reason in engine.step():
            owner = self._answers.get(request.id)
            if owner is not None and token is not None and owner.result is None:
                stop = owner.push(token.id, finish_reason)
                if stop is not None:
                    engine.finish(request, "stop", stop)
                if stop is not None or finish_reason is not None:
                    owner.end(stop)
        if answer.result is None and answer.request.state is RequestState.FINISHED:
            raise answer.request.error or KukriError(f"request {answer.request.id} was aborted")


class _Answer:
    """A request and the text that grows from it; `result` when it is done."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self.request = request
        self.result: Result | None = None
        self._stream = TextStream(tokenizer)
        self._stops = StopStrings(request.params.stop_strings)
        self._pieces: list[str] = []
        self._n_tokens = self._n_pieces_taken = self._n_tokens_taken = 0

    def push(self, token_id: int, finish_reason: str | None) -> str | None:
        """Adds a token's text; gives the stop string that it completed."""
        self._n_tokens += 1
        if finish_reason == "stop":  # by its id: it is no part of the text
            return None
        text, stop = self._stream.push(token_id), None
        if self._n_tokens >= self.request.params.min_tokens:
            text, stop = self._stops.push(text)
        self._pieces.append(text)
        return stop

    def end(self, stop: str | None) -> None:
        """Makes the result, once the request has finished; `stop` is the stop string that ended it."""
        if stop is None:
            text, stop = self._stops.push(self._stream.flush())
            self._pieces += [text] if stop is not None else [text, self._stops.flush()]
        request = self.request
        request.cut(self._n_tokens)
        self.result = Result(
            text="".join(self._pieces),
            token_ids=request.output_ids,
            finish_reason="stop" if stop is not None else cast("FinishReason", request.finish_reason),
            stop_reason=stop if stop is not None else request.stop_reason,
            logprobs=None if request.params.logprobs is None else request.sampled,
            prompt_token_ids=request.tokens[: request.n_prompt].tolist(),
            timings=request.timings,
        )

    def take_chunk(self) -> Chunk | None:
        """What came since the last chunk; None while there is nothing to show."""
        request, result = self.request, self.result
        text = "".join(self._pieces[self._n_pieces_taken :])
        if not text and result is None:
            return None
        first = request.n_prompt + self._n_tokens_taken
        token_ids = request.tokens[first : request.n_tokens].tolist()
        self._n_pieces_taken, self._n_tokens_taken = len(self._pieces), request.n_generated
        return Chunk(text, token_ids, None if result is None else result.finish_reason, result)


def load(model: str | os.PathLike[str] | None = None, **options: Any) -> LLM:
    """An LLM, as `LLM(model, **options)` makes it."""
    return LLM(model, **options)


def _stretched(config: ModelConfig, kind: str | None, factor: float | None) -> ModelConfig:
    """The configuration with RoPE scaled as a user asks."""
    if kind is None and factor is None:
        return config
    if kind is None or factor is None:
        raise ConfigError("rope_scaling and rope_factor belong together: give both, or neither")
    return with_scaling(config, kind, factor)


def _draft_model(model: str | os.PathLike[str], tokenizer: Tokenizer) -> Model:
    """A model to guess with. Raises ConfigError where its tokens are others, or it is no language model."""
    path = hub.resolve(model)
    with open_checkpoint(path, None) as checkpoint:
        config, own = checkpoint.config, load_tokenizer(checkpoint.tokenizer)
        if config.head.kind != "language_model":
            raise ConfigError(f"{path} generates no text and cannot guess any")
        if own.vocabulary.id_of != tokenizer.vocabulary.id_of or config.n_vocab != tokenizer.n_vocab:
            raise ConfigError(f"{path} has other tokens than the model: a draft model needs the same")
        return load_model(checkpoint.weights(config), config)


def _within(config: ModelConfig, max_context: int | None) -> ModelConfig:
    """The configuration with the context that will be used, so that tables are no longer than that."""
    if max_context is None:
        return config
    if max_context > config.max_context:
        raise ConfigError(f"max_context {max_context} is more than the model's {config.max_context} tokens")
    return replace(config, max_context=max_context)


def _params(params: SamplingParams | None, overrides: Mapping[str, Any]) -> SamplingParams:
    params = SamplingParams() if params is None else params
    if not isinstance(params, SamplingParams):
        raise RequestError(f"params must be SamplingParams, not {type(params).__name__}", param="params")
    names = [f.name for f in fields(SamplingParams)]
    for name in overrides:
        if name not in names:
            raise RequestError(f"there is no parameter {name!r}{_close_matches(name, names)}", param=name)
    return replace(params, **overrides) if overrides else params


def _is_many(prompt: Any) -> bool:
    """Whether it is a list of prompts: the first entry of one prompt is a token id."""
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
