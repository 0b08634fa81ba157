"""The served model: from a checked body to a call of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from starlette.requests import Request

from kukri import __version__
from kukri.answer import Answer
from kukri.engine import Request as EngineRequest
from kukri.errors import CapacityError, ContextLengthError, RequestError
from kukri.llm import LLM
from kukri.sampling import Grammar, SamplingParams, ThoughtLimit, resolve_texts
from kukri.server.bridge import Bridge, Call
from kukri.server.errors import ModelNotFoundError
from kukri.server.metrics import Metrics
from kukri.server.reasoning import CLOSE, OPEN
from kukri.server.schema import MAX_TEMPLATE_VARIABLES, Sampling
from kukri.server.settings import ServerSettings
from kukri.server.structure import calls_in_texts
from kukri.server.tool_dialects import ToolDialect, dialect_of

# names that the template gets from elsewhere
_RESERVED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "tokenizer", "self"}
# fields of SamplingParams that bodies give in another form, or not at all
_OTHER_FORM = {
    "top_k", "logit_bias", "logprobs", "prompt_logprobs", "max_tokens", "logits_processors", "grammar",
    "thoughts", "prediction",
}  # fmt: skip
_SAME_NAME = tuple(f.name for f in fields(SamplingParams) if f.name not in _OTHER_FORM)


class Service:
    """A model, its engine and the rules of this server. Belongs to the event loop."""

    def __init__(self, llm: LLM, settings: ServerSettings) -> None:
        self.llm, self.settings = llm, settings
        self.tokenizer, self.template = llm.tokenizer, llm.chat_template
        self.dialect = dialect_of(self.template.source, self.tokenizer.vocabulary.id_of)
        self.metrics = Metrics(settings.model_names[0])
        self.bridge = Bridge(llm.engine, self.metrics, max_waiting=settings.max_waiting)
        self.metrics.watch_engine(self.bridge.loop.status)
        self.created = int(time.time())
        self.fingerprint = f"kukri-{__version__}"

    def check_model(self, name: str | None) -> str:
        """The name that an answer carries. Raises ModelNotFoundError on a name that is not served."""
        if name is not None and name not in self.settings.model_names:
            raise ModelNotFoundError(name, self.settings.model_names)
        return name or self.settings.model_names[0]

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """The token ids of a plain prompt, with the tokens that the model wants around a text."""
        return await asyncio.to_thread(self.tokenizer.encode, text, add_special=add_special)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None,
        *,
        effort: str | None = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> list[int]:
        """The token ids of a conversation; `variables` and the effort to reason go to its template."""
        given = {**self._effort(effort), **self._variables(variables)}
        messages = self._readable(messages, given)
        return await asyncio.to_thread(
            self.template.encode, self.tokenizer, messages, add_generation_prompt, tools, **given
        )

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any] | None, **options: Any
    ) -> str:
        """The text of a conversation."""
        given = self._variables(variables)
        return await asyncio.to_thread(
            self.template.render, self._readable(messages, given), **options, **given
        )

    def ends_in_thoughts(self, prompt_ids: Sequence[int]) -> bool:
        """Whether the template has begun the model's thoughts for it."""
        return self._end_of(prompt_ids).endswith(OPEN)

    def after_thoughts(self, grammar: Grammar, prompt_ids: Sequence[int], effort: str | None) -> Grammar:
        """The grammar of an answer to a prompt, before which the model may think where it knows how to.

        With the effort "none" it may not, but for thoughts that the template has begun.
        """
        end = self._end_of(prompt_ids)
        if end.endswith(OPEN):
            return replace(grammar, thoughts="open")
        knows_how = OPEN in (self.template.source or "") and not end.endswith(CLOSE)
        return replace(grammar, thoughts="possible") if knows_how and effort != "none" else grammar

    def thought_limit(self, n_tokens: int | None, prompt_ids: Sequence[int]) -> ThoughtLimit | None:
        """The limit of thoughts in the answer to a prompt. Raises RequestError where the model has none."""
        if n_tokens is None:
            return None
        ids = [self.tokenizer.vocabulary.id_of.get(tag) for tag in (OPEN, CLOSE)]
        if ids[0] is None or ids[1] is None:
            raise RequestError(
                f"the model has no tokens {OPEN} and {CLOSE} to think between",
                param="thinking_token_budget",
                code="unsupported_parameter",
            )
        return ThoughtLimit(n_tokens, ids[0], ids[1], self.ends_in_thoughts(prompt_ids))

    def _readable(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> Sequence[Mapping[str, Any]]:
        """The messages, with calls in their texts where the template would leave them out (SmolLM3's)."""
        dialect = self.dialect
        if dialect is None or not dialect.closer or "tool_calls" in (self.template.source or ""):
            return messages
        reads_code = bool(variables.get("python_tools"))
        return calls_in_texts(messages, replace(dialect, reads_code=reads_code))

    @property
    def knows_effort(self) -> bool:
        """Whether the template can be told how much to reason."""
        source = self.template.source or ""
        return "reasoning_effort" in source or "enable_thinking" in source

    def _end_of(self, prompt_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(prompt_ids[-8:]).rstrip()

    async def open_call(
        self,
        http: Request,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        body: Sampling,
        *,
        where: str,
        continues: bool = False,
        dialect: ToolDialect | None = None,
    ) -> Call:
        """Queues the requests of all prompts and gives the call that waits for them.

        `where` is the body's field that holds the prompt, for errors. Raises RequestError and CapacityError.
        """
        n_each = params.n_generated_answers
        if len(prompts) * n_each > self.settings.max_waiting:
            raise RequestError(
                f"{len(prompts) * n_each} answers asked for at once, and the queue holds "
                f"{self.settings.max_waiting}: send fewer prompts",
                param=where,
            )
        client = f"{http.scope['kukri.client']}/{body.user or ''}"

        def make() -> list[EngineRequest]:
            resolved = resolve_texts(params, self.tokenizer)
            return [
                request
                for prompt in prompts
                for request in self.llm.engine.make_requests(
                    prompt, resolved, priority=body.priority or 0, client=client
                )
            ]

        try:
            requests = await asyncio.to_thread(make)
            for request in requests:
                self.llm.engine.scheduler.check_fits(request)
        except ContextLengthError as error:
            error.param = where
            raise
        except CapacityError as error:  # not even alone: trying later is no help
            raise RequestError(str(error), param="max_tokens") from None
        ids = self.tokenizer.vocabulary.id_of
        shown = frozenset(ids[mark] for mark in (dialect.marks if dialect else ()) if mark in ids)
        answers = [
            Answer(r, i, self.tokenizer, continues=continues, shown=shown) for i, r in enumerate(requests)
        ]
        call = Call(self.bridge, answers, len(prompts), http.scope["kukri.id"])
        self.bridge.submit(call, self.settings.deadline_s)
        return call

    def params(self, body: Sampling, **others: Any) -> SamplingParams:
        """The SamplingParams of a body; `others` are those that endpoints name differently."""
        given = {name: getattr(body, name, None) for name in _SAME_NAME}
        given["top_k"] = None if body.top_k is None else max(body.top_k, 0)
        given["logit_bias"] = _token_bias(getattr(body, "logit_bias", None))
        wanted = {name: value for name, value in (given | others).items() if value is not None}
        return SamplingParams(**{"max_tokens": None, **wanted})

    def _variables(self, given: Mapping[str, Any] | None) -> dict[str, Any]:
        """Variables for the chat template; each has to be one that it reads."""
        source = self.template.source or ""
        given = given or {}
        if len(given) > MAX_TEMPLATE_VARIABLES:
            raise RequestError(f"more than {MAX_TEMPLATE_VARIABLES} variables", param="chat_template_kwargs")
        for name in given:
            if name in _RESERVED or not name.isidentifier() or name not in source:
                raise RequestError(
                    f"the model's chat template takes no variable {name[:100]!r}",
                    param=f"chat_template_kwargs.{name[:100]}",
                    code="unsupported_parameter",
                )
        return dict(given)

    def _effort(self, effort: str | None) -> dict[str, Any]:
        """What an effort to reason means to the template, where it knows any."""
        if effort is None:
            return {}
        source = self.template.source or ""
        if "reasoning_effort" in source:
            return {"reasoning_effort": effort}
        if "enable_thinking" in source:
            return {"enable_thinking": effort != "none"}
        raise RequestError(
            "the model's chat template knows no effort to reason",
            param="reasoning_effort",
            code="unsupported_parameter",
        )


def _token_bias(bias: Mapping[str, float] | None) -> dict[int, float] | None:
    if not bias:
        return None
    try:
        return {int(token_id): value for token_id, value in bias.items()}
    except ValueError:
        raise RequestError("the keys of logit_bias must be token ids", param="logit_bias") from None
