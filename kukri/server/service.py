"""A served model: from a checked request to a call of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from starlette.types import Scope

from kukri import __version__
from kukri.answer import Answer
from kukri.engine import Request as EngineRequest
from kukri.errors import CapacityError, ContextLengthError, RequestError
from kukri.llm import LLM
from kukri.sampling import Grammar, SamplingParams, resolve_texts, with_overrides
from kukri.server.bridge import Bridge, Call
from kukri.server.chat_request import ChatRequest
from kukri.server.choice import Choice
from kukri.server.grammar_check import GrammarCheck
from kukri.server.metrics import Metrics, ModelMetrics
from kukri.server.prompts import ChatPrompts
from kukri.server.settings import ServerSettings
from kukri.server.tools import Toolbox


class Chat(NamedTuple):
    """A chat in the queue, and its answers as they grow."""

    call: Call
    choices: list[Choice]


class Service:
    """A loaded model, its engine and the rules of this server. Belongs to the event loop.

    `names` are those that requests may use; the first is the one that answers carry.
    """

    def __init__(self, llm: LLM, settings: ServerSettings, names: Sequence[str], metrics: Metrics) -> None:
        self.llm, self.settings, self.names, self.tokenizer = llm, settings, names, llm.tokenizer
        self.prompts = ChatPrompts(llm.chat_template, llm.tokenizer, llm.engine.max_context)
        self.grammars = GrammarCheck(llm.tokenizer)
        self.metrics = ModelMetrics(metrics, names[0])
        self.bridge = Bridge(llm.engine, self.metrics, max_waiting=settings.max_waiting)
        self.fingerprint = f"kukri-{__version__}"

    async def close(self, timeout_s: float | None) -> None:
        """Waits for the running requests and ends what belongs to the model, but not the model itself."""
        await self.bridge.stop(timeout_s)
        await self.grammars.close()

    def check_model(self, name: str | None) -> str:
        """The name that an answer carries: the one given, or the model's first."""
        return name if name is not None and name in self.names else self.names[0]

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
        try:
            toolbox = Toolbox.of(request, self.prompts.dialect)
            prompt = await self.prompts.of(request)
            grammar = request.grammar
            if toolbox is not None:
                vocabulary = self.tokenizer.vocabulary
                grammar = toolbox.grammar(vocabulary.id_of, vocabulary.special_ids)
            if grammar is not None:
                grammar = self.prompts.with_reasoning(grammar, prompt, request)
            limit = self.prompts.reasoning_limit(request.thinking_budget, prompt)
            sampling = self.within_context(request, len(prompt))
            params = self.params({**sampling, "grammar": grammar, "reasoning_limit": limit})
            call = await self.submit(
                [prompt],
                params,
                scope,
                user=request.user,
                priority=request.priority,
                marks=toolbox.dialect.marks if toolbox is not None else (),
            )
        except RequestError as error:
            raise request.error(error) from None
        is_inside = self.prompts.ends_in_reasoning(prompt)
        return Chat(call, [Choice(answer, inside=is_inside, toolbox=toolbox) for answer in call.answers])

    @staticmethod
    def within_context(request: ChatRequest, n_prompt: int) -> dict[str, Any]:
        """The request's sampling parameters, whose answer ends where its own limit of the context does.

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
        return with_overrides(self.llm.default_params, sampling)

    async def submit(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        scope: Scope,
        *,
        user: str | None,
        priority: int | None,
        marks: Sequence[str] = (),
    ) -> Call:
        """Queues the requests of all prompts and returns the call that waits for them.

        Special tokens among `marks` stay in the text. Raises CapacityError, and RequestError whose `param` is
        `prompt`, `max_tokens` or a field of SamplingParams.
        """
        n_answers = len(prompts) * params.n_generated_answers
        if n_answers > self.settings.max_waiting:
            raise RequestError(
                f"{n_answers} answers requested at once, and the queue holds {self.settings.max_waiting}: "
                "send fewer prompts",
                param="prompt",
            )
        if isinstance(params.grammar, Grammar):
            await self.grammars.check(params.grammar)
        client = f"{scope['kukri.client']}/{user or ''}"

        def make() -> list[EngineRequest]:
            resolved = resolve_texts(params, self.tokenizer)
            return [
                request
                for prompt in prompts
                for request in self.llm.engine.make_requests(
                    prompt, resolved, priority=priority or 0, client=client
                )
            ]

        try:
            requests = await asyncio.to_thread(make)
            for request in requests:
                self.llm.engine.scheduler.check_fits(request)
        except CapacityError as error:  # not even alone: trying later is no help
            raise RequestError(str(error), param="max_tokens") from None
        except ContextLengthError as error:
            error.param = "prompt"
            raise
        ids = self.tokenizer.vocabulary.id_of
        shown = frozenset(ids[mark] for mark in marks if mark in ids)
        answers = [Answer(r, i, self.tokenizer, continues=True, shown=shown) for i, r in enumerate(requests)]
        call = Call(self.bridge, answers, len(prompts), scope["kukri.id"])
        self.bridge.submit(call, self.settings.deadline_s)
        return call
