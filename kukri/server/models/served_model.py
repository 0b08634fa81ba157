"""A served model: from a checked request to a call of the engine."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from starlette.types import Scope

from kukri import __version__
from kukri.calls.answer import Answer
from kukri.calls.choice import Choice
from kukri.calls.image_prompts import ImagePrompts
from kukri.calls.turn import Turn
from kukri.config import EngineConfig
from kukri.dialects.answer_parser import AnswerBeginning
from kukri.engine import EngineLoop, RequestMaker
from kukri.engine import Request as EngineRequest
from kukri.errors import CapacityError, ContextLengthError, RequestError
from kukri.interp import Session
from kukri.interp.interventions.request_taps import InterventionTaps
from kukri.opening.model_options import ModelOptions
from kukri.sampling import Grammar, SamplingParams, resolve_texts
from kukri.server.access import INTERP
from kukri.server.chat.grammar_check import GrammarCheck
from kukri.server.chat.image_urls import ImageReader
from kukri.server.chat.loosening import Functions, loosened, without_schemas
from kukri.server.chat.prompts import ChatPrompts
from kukri.server.chat.request import ChatRequest
from kukri.server.keys import Client
from kukri.server.metrics import Metrics, ModelMetrics
from kukri.server.models.bridge import Bridge, LiveCall, LoopMaker
from kukri.server.preset import Preset
from kukri.server.settings import ServerSettings
from kukri.tasks.embedding import TextEncoder
from kukri.tokenizer import ChatTemplate, FillInMiddle, Tokenizer
from kukri.vision.image import ImagePrompt

log = logging.getLogger("kukri.server")


class HasMaker(Protocol):
    """An engine here, or what stands for engines elsewhere."""

    @property
    def maker(self) -> RequestMaker:
        """Makes the requests."""


class OpenModel(Protocol):
    """The parts of an `LLM` that a server uses; the engines of another open model may be elsewhere."""

    options: ModelOptions
    path: Path
    engine_config: EngineConfig
    tokenizer: Tokenizer
    default_params: SamplingParams
    text_encoder: TextEncoder

    @property
    def memory_bytes(self) -> int:
        """Memory of its weights and KV cache in this process."""

    @property
    def engine(self) -> HasMaker:
        """Has what makes its requests."""

    @property
    def chat_template(self) -> ChatTemplate:
        """The chat template of the model."""

    def close(self) -> None:
        """Ends what belongs to it."""


class Chat(NamedTuple):
    """A chat in the queue, and its answers as they grow."""

    call: LiveCall
    choices: list[Choice]


class ServedModel:
    """A loaded model, its engine and the rules of this server. Belongs to the event loop.

    `names` are those that requests may use; the first is the one that answers carry. `make_loop` makes
    the loop that runs the requests.
    """

    def __init__(
        self,
        llm: OpenModel,
        settings: ServerSettings,
        names: Sequence[str],
        metrics: Metrics,
        make_loop: LoopMaker = EngineLoop,
        *,
        presets: Sequence[Preset] = (),
    ) -> None:
        self.rename(names, presets)
        self.llm, self.settings, self.tokenizer = llm, settings, llm.tokenizer
        self.prompts = ChatPrompts(
            llm.chat_template,
            llm.tokenizer,
            llm.engine.maker.max_context,
            ImagePrompts(llm.tokenizer, getattr(llm, "image_processor", None)),
            ImageReader(fetches=settings.fetches_images).read,
            llm.engine.maker.check_generates,
        )
        self.grammars = GrammarCheck(llm.tokenizer)
        self.metrics = ModelMetrics(metrics, names[0])
        self.bridge = Bridge(
            lambda deliver: make_loop(llm.engine, deliver, max_waiting=settings.max_waiting),
            self.metrics,
            settings.stream_interval,
        )
        self.fingerprint = f"kukri-{__version__}"

    def rename(self, names: Sequence[str], presets: Sequence[Preset]) -> None:
        """Takes other names and presets from now on."""
        self.names = names
        self._presets = {preset.name: preset for preset in presets}

    async def close(self, timeout_s: float | None) -> None:
        """Waits for the running requests and ends what belongs to the model, but not the model itself."""
        await self.bridge.stop(timeout_s)
        await self.grammars.close()

    @property
    def session(self) -> Session:
        """Steers the model and reads its activations. Raises RequestError if its engine is elsewhere."""
        session: Session | None = getattr(self.llm, "interp", None)
        if session is None:
            raise RequestError("interventions and activations are not supported for models on replicas")
        return session

    def check_model(self, name: str | None) -> str:
        """The name that an answer carries: the one given, or the model's first."""
        known = (*self.names, *self.llm.engine.maker.adapter_names)
        return name if name is not None and name in known else self.names[0]

    def adapter_of(self, model: str | None, adapter: str | None = None) -> str | None:
        """The adapter of a request: the one that it names as such, or as its model; None for none."""
        plain = None if model is None else model.removesuffix(":latest")
        found = next((name for name in (model, plain) if name in self.llm.engine.maker.adapter_names), None)
        preset = self.preset_of(model)
        found = preset.adapter if found is None and preset is not None else found
        return found if adapter is None else adapter

    def preset_of(self, model: str | None) -> Preset | None:
        """The preset that a request names as its model."""
        return None if model is None else self._presets.get(model.removesuffix(":latest"))

    def params_of(self, model: str | None, sampling: Mapping[str, Any]) -> SamplingParams:
        """The parameters of a plain prompt: what its client set, on top of the preset that it names."""
        preset = self.preset_of(model)
        return self.params(sampling if preset is None else preset.under(sampling))

    def _with_preset(self, request: ChatRequest) -> ChatRequest:
        preset = self.preset_of(request.model)
        return request if preset is None else request.with_preset(preset)

    async def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = False,
        max_tokens: int | None = None,
    ) -> list[int]:
        """The token ids of a plain prompt; options are those of `Tokenizer.encode`."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special, parse_special, max_tokens)

    async def open(self, request: ChatRequest, scope: Scope) -> Chat:
        """Queues a chat. Raises RequestError, in the client's names of fields, and CapacityError."""
        request = self._with_preset(request)
        try:
            prompt = await self.prompts.of(request)
            turn = Turn(
                self.prompts, prompt, request.toolbox(self.prompts.dialect), may_reason=request.may_reason
            )
            if turn.toolbox is not None:
                grammar = await self._call_grammar(turn, turn.toolbox.functions)
            else:
                grammar = request.grammar and turn.with_reasoning(request.grammar)
            limit = self.prompts.reasoning_limit(request.thinking_budget, turn.prompt_ids)
            sampling = self.within_context(request, len(prompt))
            params = self.params({**sampling, "grammar": grammar, "reasoning_limit": limit})
            call = await self.submit(
                [prompt],
                params,
                scope,
                user=request.user,
                priority=request.priority,
                adapter=self.adapter_of(request.model, request.adapter),
                interventions=request.interventions,
                marks=None if request.shows_control else turn.marks,
                beginning=turn.beginning,
            )
        except RequestError as error:
            raise request.error(error) from None
        keep = self.bridge.loop.keep
        return Chat(
            call,
            [turn.choice(answer, self._on_missed, partial(keep, answer.request)) for answer in call.answers],
        )

    async def _call_grammar(self, turn: Turn, functions: Functions) -> Grammar | None:
        """The grammar of calls, None for none. A schema that cannot be enforced is loosened."""

        async def checked(functions: Functions) -> Grammar | None:
            grammar = turn.call_grammar(functions)
            if grammar is not None:
                await self.grammars.check(grammar)
            return grammar

        with suppress(RequestError):
            return await checked(functions)
        with suppress(RequestError):
            return await checked(await loosened(functions, self.grammars.check))
        return await checked(without_schemas(functions))

    def _on_missed(self, marks: Sequence[str]) -> None:
        """Tells of what looks like tool calls and could not be read."""
        log.warning(
            "an answer of %s has %s, but no tool call could be parsed, so it is shown as text",
            self.names[0],
            " and ".join(dict.fromkeys(marks)),
        )
        self.metrics.on_missed_calls(len(marks))

    async def middle_prompt(
        self,
        prefix: str,
        suffix: str,
        param: str,
        *,
        middle: str = "",
        files: Sequence[tuple[str, str]] = (),
    ) -> list[int]:
        """The prompt for the text between two others, which begins with `middle`.

        Raises RequestError, for the field `param`, if the model does not fill in the middle.
        """
        tokens = FillInMiddle.of(self.tokenizer)
        if tokens is None:
            message = f"{param!r} is not supported: the model does not fill in the middle"
            raise RequestError(message, param=param, code="unsupported_parameter")
        limit = self.llm.engine.maker.max_context
        return await asyncio.to_thread(
            tokens.prompt, prefix, suffix, middle=middle, files=files, max_tokens=limit
        )

    async def n_prompt_tokens(self, request: ChatRequest) -> int:
        """Counts the tokens of a chat's prompt. Raises RequestError, in the client's names of fields."""
        try:
            return len(await self.prompts.of(self._with_preset(request)))
        except RequestError as error:
            raise request.error(error) from None

    @staticmethod
    def within_context(request: ChatRequest, n_prompt: int) -> dict[str, Any]:
        """The request's sampling parameters, limited to the context that it may use.

        Raises ContextLengthError if the prompt leaves no room there: a prompt is never cut.
        """
        sampling, limit = dict(request.sampling), request.max_context
        if limit is not None:
            if n_prompt >= limit:
                raise ContextLengthError(n_prompt, limit)
            most = sampling.get("max_tokens")
            sampling["max_tokens"] = limit - n_prompt if most is None else min(most, limit - n_prompt)
        return sampling

    def params(self, sampling: Mapping[str, Any]) -> SamplingParams:
        """The fields that a client set, on top of the model's defaults."""
        return self.llm.default_params.replace(**sampling)

    def check_answers(self, n_prompts: int, n_each: int) -> None:
        """Raises RequestError if a request asks for more answers than the queue holds."""
        n_answers, most = n_prompts * n_each, self.settings.max_waiting
        if n_answers > most:
            raise RequestError(
                f"the request asks for {n_answers} answers, but the queue must hold at most {most} "
                f"(--max-waiting): send fewer {'prompts' if n_prompts > 1 else 'choices'}",
                param="prompt" if n_prompts > 1 else "n",
            )

    async def submit(
        self,
        prompts: Sequence[Sequence[int] | ImagePrompt],
        params: SamplingParams,
        scope: Scope,
        *,
        user: str | None = None,
        priority: int | None = None,
        adapter: str | None = None,
        interventions: Sequence[Mapping[str, Any]] = (),
        marks: Sequence[str] | None = (),
        beginning: Callable[[], AnswerBeginning] | None = None,
    ) -> LiveCall:
        """Queues the requests of all prompts and returns the call that waits for them.

        Special tokens among `marks` stay in the text; None keeps all. `beginning` makes what tells an answer
        from its reasoning, after which stop strings count. Raises CapacityError, and RequestError
        whose `param` is `prompt`, `max_tokens`, `adapter` or a field of SamplingParams.
        """
        self.check_answers(len(prompts), params.n_generated_answers)
        longest, most = max(map(len, prompts)), self.llm.engine.maker.max_context
        if longest > most:  # before anything else is computed for it
            raise ContextLengthError(longest, most)
        if interventions:
            INTERP.check(self.settings, scope, "interventions")
        if isinstance(params.grammar, Grammar):
            await self.grammars.check(params.grammar)
        client: Client = scope["kukri.client"]
        urgency = client.priority(priority)

        def make() -> tuple[list[EngineRequest], list[InterventionTaps]]:
            resolved = resolve_texts(params, self.tokenizer)
            made: list[EngineRequest] = []
            taps: list[InterventionTaps] = []
            for prompt in prompts:
                some = self.llm.engine.maker.make_requests(
                    prompt,
                    resolved,
                    priority=urgency,
                    client=client.queue(user),
                    prefix_scope=client.prefix_scope,
                    adapter=adapter,
                )
                if interventions:
                    max_bytes = self.settings.max_activation_bytes // len(prompts)
                    taps += self.session.intervene(some, interventions, max_bytes)
                made += some
            return made, taps

        try:
            requests, taps = await asyncio.to_thread(make)
            for request in requests:
                self.llm.engine.maker.check_fits(request)
        except CapacityError as error:  # not even alone: trying later does not help
            raise RequestError(str(error), param="max_tokens") from None
        except ContextLengthError as error:
            error.param = "prompt"
            raise
        for request in requests:
            request.times.trace = scope["kukri.trace"]
        ids = self.tokenizer.vocabulary.id_of
        shown = self.tokenizer.special_ids
        if marks is not None:
            shown = frozenset(ids[mark] for mark in marks if mark in ids)
        answers = [
            Answer(r, i, self.tokenizer, continues=True, shown=shown, beginning=beginning and beginning())
            for i, r in enumerate(requests)
        ]
        call = LiveCall(self.bridge, answers, len(prompts), scope["kukri.id"], taps, client.meter)
        self.bridge.submit(call, self.settings.deadline_s)
        return call
