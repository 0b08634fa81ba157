"""`ChatTemplate`: messages to the prompt text a model was trained on, by the Jinja template in its file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from kukri.errors import FormatError, RequestError
from kukri.tokenizer.image_marks import ImageMarks
from kukri.tokenizer.messages import ROLES, Message, checked_messages, checked_tools
from kukri.tokenizer.system_messages import as_users, placed
from kukri.tokenizer.template_probes import TemplateProbes
from kukri.tokenizer.template_process import TemplateFailure, TemplateProcess
from kukri.tokenizer.tokenizer import TEXT_MARK, Tokenizer, as_text

_MAX_SOURCE = 1_000_000  # characters; real templates have some thousands
_TYPE = re.compile(r"""["']type["']|\.type\b""")  # how a template reads a part of a content


class ChatTemplate:
    """A model's chat template. `source` is None for a model without a template; `render` then raises an
    error.

    The template runs in a sandbox, in a process of its own that starts at the first `render`. A process that
    takes more than 0.8 s of processor time or 512 MiB is stopped. `bos_token` and `eos_token` are "" for a
    model without such a token.
    """

    def __init__(self, source: str | None, bos_token: str = "", eos_token: str = "") -> None:
        self.source, self.bos_token, self.eos_token = source, bos_token, eos_token

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        **kwargs: Any,
    ) -> str:
        """The prompt for a conversation in OpenAI's form.

        With `continue_final_message` it ends with the content of the last message, for the model to continue.
        `kwargs` go to the template (`enable_thinking`, ...). Content given in parts is joined by newlines,
        arguments of tool calls are parsed, the null content of a call is "" unless the template takes null.
        Raises RequestError for messages that are malformed or that the template refuses, FormatError when the
        template itself is broken. System and developer messages that
        the template has no place for go where it has one: see `kukri.tokenizer.system_messages`.
        """
        checked = self._checked(messages)
        if continue_final_message:
            return self._render_open(checked, checked_tools(tools), kwargs)
        return self._render(checked, add_generation_prompt, checked_tools(tools), kwargs)

    def takes_system_message(self) -> bool:
        """True if the template renders a system message by itself, without merging it."""
        return self._probes.shows(("system", "user"))

    def check(self, messages: Sequence[Message]) -> None:
        """Raises RequestError that names the malformed message, or its malformed part."""
        checked_messages(messages, self._roles)

    def encode(
        self,
        tokenizer: Tokenizer,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        continue_final_message: bool = False,
        max_tokens: int | None = None,
        controls: str = "",
        images: ImageMarks | None = None,
        **kwargs: Any,
    ) -> list[int]:
        """The token ids of `render`; control tokens come only from the template.

        The text of a control token inside messages, tools and `kwargs` stays text, so that a user cannot end
        a turn or begin a turn of the system; only between two `controls`, which must be secret, it counts.
        `images` are the images whose marks are in the messages. BOS is added if the model wants it and the
        template does not write it. Errors as for `render`, and ContextLengthError if a long prompt has
        certainly more than `max_tokens`.
        """
        specials = [*tokenizer.special_texts]
        if images is not None:
            specials += [text for text in images.tokens if text not in specials]

        def guard(text: str) -> str:
            if controls and controls in text:
                parts = text.split(controls)  # each second one stands between two
                return "".join(part if i % 2 else guard(part) for i, part in enumerate(parts))
            return as_text(text, specials)

        guarded_messages: list[dict[str, Any]] = _map_texts(self._checked(messages), guard)
        guarded_tools = _map_texts(checked_tools(tools), guard)
        variables = _map_texts(kwargs, guard)
        if continue_final_message:
            prompt = self._render_open(guarded_messages, guarded_tools, variables, images)
        else:
            prompt = self._render(guarded_messages, add_generation_prompt, guarded_tools, variables, images)
        if images is not None:
            prompt = images.expanded(prompt)
        return tokenizer.encode_marked(prompt, max_tokens)

    def _render_open(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        images: ImageMarks | None = None,
    ) -> str:
        """The prompt up to the end of the last message's content."""
        last = messages[-1]
        if last["role"] != "assistant" or last.get("tool_calls"):
            raise RequestError(
                "the last message must be a text of the assistant to be continued", param="messages"
            )
        end = 2 * TEXT_MARK  # a template that trims the content leaves its white space before the mark
        opened = [*messages[:-1], {**last, "content": last["content"] + end}]
        before, found, _ = self._render(opened, False, tools, kwargs, images).rpartition(end)
        if not found:
            raise RequestError("the model's chat template cannot continue the last message", param="messages")
        return before

    def _render(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
        images: ImageMarks | None = None,
    ) -> str:
        if tools is not None and "xml_tools" in (self.source or ""):
            kwargs = {"xml_tools": tools, **kwargs}  # SmolLM3's name for them
        return self._run(self._variables(messages, add_generation_prompt, tools, kwargs), images)

    def _variables(
        self,
        messages: list[dict[str, Any]],
        add_generation_prompt: bool,
        tools: list[dict[str, Any]] | None,
        kwargs: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The variables of a rendering. `kwargs` cannot replace the conversation."""
        return {
            "documents": None,
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            **kwargs,
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }

    def _run(self, variables: Mapping[str, Any], images: ImageMarks | None) -> str:
        def render(messages: list[dict[str, Any]]) -> str:
            return self._process.render({**variables, "messages": self._in_parts(messages, images)})

        try:
            return render(variables["messages"])
        except TypeError as error:
            raise RequestError(str(error), param="messages") from None
        except TemplateFailure as failure:
            others = as_users(variables["messages"]) if failure.kind in "RE" else variables["messages"]
            if others != variables["messages"]:
                with suppress(TemplateFailure):  # then the first reason is the better one
                    return render(others)
            raise _error(failure) from None

    def _in_parts(self, messages: list[dict[str, Any]], images: ImageMarks | None) -> list[dict[str, Any]]:
        """The messages with contents in parts where images are, or where the template takes nothing else.

        The order of the images is noted.
        """
        if images is None and not self._probes.wants_parts:
            return messages
        order: list[int] = []
        told = []
        for message in messages:
            content = message.get("content")
            if isinstance(content, str):
                pieces: list[str | int] = [content] if images is None else images.pieces(content)
                found = [piece for piece in pieces if isinstance(piece, int)]
                order += found
                if images is not None and found:
                    takes = self._probes.takes_image(message["role"], images.placeholder)
                    content = _parts(pieces) if takes else _with_placeholders(pieces, images.written)
                if isinstance(content, str) and self._probes.wants_parts:
                    content = _parts([content])
                message = {**message, "content": content}
            told.append(message)
        if images is not None:
            images.order = order
        return told

    def _checked(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """The messages in the form of this template, nothing of them lost. Raises RequestError."""
        checked = checked_messages(messages, self._roles)
        for message in checked:
            if message["content"] is None and not self._probes.takes_null:
                message["content"] = ""
            if message.get("tool_calls") and self._probes.joins_arguments:
                message["tool_calls"] = [_with_text_arguments(call) for call in message["tool_calls"]]
        return placed(checked, self._probes.shows)

    @cached_property
    def _probes(self) -> TemplateProbes:
        return TemplateProbes(
            lambda messages, tools: self._process.render(self._variables(messages, True, tools, {})),
            reads_parts=_TYPE.search(self.source or "") is not None,
        )

    @cached_property
    def _roles(self) -> frozenset[str]:
        """The usual roles, and every word that the template quotes, because a template may know other
        roles.
        """
        return frozenset(ROLES) | frozenset(re.findall(r"""["']([\w.-]+)["']""", self.source or ""))

    @cached_property
    def _process(self) -> TemplateProcess:
        if self.source is None:
            raise RequestError.of(
                "messages",
                "requires a chat template, which the model does not have (a base model?): send a text to "
                "continue, or give a template (--chat-template-file, 'chat_template')",
            )
        if len(self.source) > _MAX_SOURCE:
            raise FormatError(f"the model's chat template must have at most {_MAX_SOURCE} characters")
        return TemplateProcess(self.source)


def _with_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """A call with its arguments as JSON text."""
    function = call["function"]
    text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": {**function, "arguments": text}}


def _parts(pieces: Sequence[str | int]) -> list[dict[str, Any]]:
    """A content in parts."""
    return [{"type": "text", "text": one} if isinstance(one, str) else {"type": "image"} for one in pieces]


def _with_placeholders(pieces: Sequence[str | int], written: str) -> str:
    """Return the text of a content, with placeholders for images."""
    return "".join(piece if isinstance(piece, str) else written for piece in pieces)


def _error(failure: TemplateFailure) -> RequestError | FormatError:
    """The failure as an error of the request, or of the model's file."""
    if failure.kind == "R":
        return RequestError(str(failure), param="messages")
    if failure.kind == "B":
        return FormatError(f"the model's chat template is broken{failure}")
    if failure.kind == "S":
        return FormatError(f"the model's chat template does what templates must not do: {failure}")
    problem = "cannot take these messages" if failure.kind == "E" else "was stopped"
    return RequestError(f"the model's chat template {problem}: {failure}", param="messages")


def _map_texts(value: Any, change: Callable[[str], str]) -> Any:
    """A copy of JSON-like data with every text in it changed, keys included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_map_texts(key, change): _map_texts(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_texts(item, change) for item in value]
    return value
