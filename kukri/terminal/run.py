"""`kukri run`: one prompt, one answer."""

from __future__ import annotations

import json
import os
import re
import stat
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kukri.calls import MAX_ROUNDS
from kukri.calls.results import Chunk, Result
from kukri.calls.system_message import DEFAULT_SYSTEM, opening
from kukri.errors import RequestError
from kukri.formats import hub
from kukri.formats.digests import split_digest
from kukri.llm import LLM
from kukri.sampling import Grammar, SamplingParams
from kukri.terminal.answer_writer import AnswerWriter
from kukri.terminal.command import given as given_options
from kukri.terminal.options import FormOptions, ModelName, ToolOptions
from kukri.terminal.output import allow_any_text, describe_timings, say, timings_as_dict
from kukri.terminal.progress import loading_bar
from kukri.tokenizer.template_process import start_early

MAX_TOKENS = 512


def answer_or_chat(
    named: ModelName,
    prompt: str | None,
    form: FormOptions,
    tools: ToolOptions,
    *,
    system: str,
    sampling: dict[str, Any],
    loading: dict[str, Any],
    interventions: Sequence[Mapping[str, Any]],
    **options: Any,
) -> None:
    """Answers the prompt as `answer_prompt` does; chats if a model alone is named, by a person at a terminal.

    `options` are as in `answer_prompt`; a chat has none.
    """
    is_chat = False
    if prompt is None and named.model is not None:
        if not is_model(named.model):
            named.model, prompt = None, named.model
        else:
            asks = any(options[name] for name in ("as_json", "raw", "with_stats", "images"))
            asks = asks or bool(given_options(form))
            is_chat = is_typed() and not asks and not tools.tool
    shared: dict[str, Any] = {
        "model": named.name,
        "system": system,
        "sampling": sampling,
        "loading": loading,
        "interventions": interventions,
    }
    if is_chat:
        from kukri.terminal.chat import talk

        talk(**shared, hides_reasoning=options["hides_reasoning"])
        return
    grammar = None
    if given_options(form):
        from kukri.terminal.answer_form import answer_form

        grammar = answer_form(form)
    if tools.tool:
        if options["raw"] or grammar is not None:
            other = "--raw" if grammar is None else grammar.param
            raise RequestError(f"--tool cannot be combined with {other}", param="tools")
        from kukri.terminal.function_files import functions_of

        options["functions"] = functions_of(tools.tool, asks=not tools.yes)
        options["max_rounds"] = tools.max_rounds
    answer_prompt(prompt, grammar=grammar, **shared, **options)


def answer_prompt(
    prompt: str | None,
    *,
    model: str | None,
    system: str,
    raw: bool,
    images: Sequence[Path] = (),
    parse_special: bool = True,
    grammar: Grammar | None = None,
    functions: Sequence[Callable[..., Any]] = (),
    max_rounds: int = MAX_ROUNDS,
    sampling: dict[str, Any],
    loading: dict[str, Any],
    interventions: Sequence[Mapping[str, Any]] = (),
    as_json: bool,
    with_stats: bool,
    hides_reasoning: bool = False,
) -> None:
    """Prints the answer to `prompt` and piped text, streamed or as one JSON object.

    `sampling` are fields of SamplingParams over the model's defaults, `loading` are options of LLM; of
    several adapters the first is used. With `raw`, control tokens in the text count unless `parse_special`
    is False. `grammar` is the form of the answer; `functions` are tools, called in `max_rounds` rounds at
    most. Reasoning is shown on a terminal alone, and not with `hides_reasoning`. `images` are files, before
    the text. `interventions` are those of `LLM.generate`. Errors of the request are raised before the model
    is loaded, errors of the grammar's source before a token is computed.
    """
    given = {"max_tokens": MAX_TOKENS, **sampling}
    SamplingParams(**given, grammar=grammar)
    text = _full_prompt(prompt)
    if raw and images:
        raise RequestError("--image cannot be combined with --raw", param="image")
    for image in images:
        if not image.is_file():
            raise RequestError(f"{str(image)!r} (--image) was not found", param="image")
    if raw and system not in ("", DEFAULT_SYSTEM):
        raise RequestError("--system cannot be combined with --raw", param="system")
    if not raw:
        start_early()
    with loading_bar() as progress:
        llm = LLM(model, progress=progress, fit=True, **loading)
    with llm:
        llm.calls.check_generates()  # before a template is missed that has no use
        if not raw and llm.chat_template.source is None:
            if system not in ("", DEFAULT_SYSTEM):
                raise RequestError("--system requires a chat template, which the model does not have")
            if images:
                raise RequestError(
                    "--image requires a chat template, which the model does not have", param="image"
                )
            say("the model has no chat template and continues the text, as with --raw")
            raw = True
        if grammar is not None:
            from kukri.terminal.answer_form import compiled_in_time

            given["grammar"] = compiled_in_time(grammar, llm.tokenizer)
        params = llm.default_params.replace(**given)
        request: Any = text if parse_special else llm.tokenizer.encode(text, add_special=True)
        if not raw:
            shown = [{"type": "image", "image": image, "param": f"--image {image}"} for image in images]
            content = [*shown, {"type": "text", "text": text}] if shown else text
            request = [*opening(llm.chat_template, system), {"role": "user", "content": content}]
        adapter = next(iter(llm.adapters), None)
        asked: dict[str, Any] = {"adapter": adapter, "interventions": interventions}
        if functions and raw:
            raise RequestError(
                "--tool requires a chat template, which the model does not have", param="tools"
            )
        if not raw:
            asked |= {"tools": functions, "max_rounds": max_rounds}
        if as_json:
            result = (llm.generate if raw else llm.chat)(request, params, **asked)
            print(json.dumps(_as_dict(llm, text, result), ensure_ascii=False))
        else:
            result = _stream(llm.stream(request, params, **asked), shows_reasoning=not hides_reasoning)
    if grammar is not None and result.finish_reason == "length":
        n_tokens = len(result.token_ids)
        say(f"the answer was cut off after {n_tokens} tokens: raise --max-tokens")
    if with_stats:
        say(describe_timings(result.timings))


def is_model(argument: str) -> bool:
    """True if an argument alone names a model: a file, a known or cached name, a repository of the hub."""
    return is_known_model(argument) or (not re.search(r"\s", argument) and hub.is_repository(argument))


def is_known_model(argument: str) -> bool:
    """True if an argument among others names a model: a file, a directory or a known name."""
    if hub.is_known(argument):
        return True
    argument, _ = split_digest(argument)
    try:
        path = Path(argument)
        is_file = argument.endswith(".gguf") and path.is_file()
        return is_file or (argument != "" and (path / "config.json").is_file())
    except (OSError, ValueError):  # a text that no path can be: too long, or with a NUL in it
        return False


def is_typed() -> bool:
    """True if a person sits at standard input and output."""
    return all(stream is not None and stream.isatty() for stream in (sys.stdin, sys.stdout))


def _stream(chunks: Iterator[Chunk], *, shows_reasoning: bool) -> Result:
    allow_any_text()
    result, writer = None, AnswerWriter(shows_reasoning=shows_reasoning)
    for chunk in chunks:
        writer.push(chunk)
        result = chunk.result or result
    assert result is not None, "a stream ends with its result"
    writer.end(1)
    return result


def _full_prompt(prompt: str | None) -> str:
    """The prompt argument and piped text, an empty line between them. Raises RequestError if empty."""
    piped = piped_text()
    parts = [part for part in (prompt, piped) if part is not None]
    if not parts:
        raise RequestError("a prompt is required: give one as an argument, or pipe text in", param="prompt")
    text = "\n\n".join(part for part in parts if part.strip())
    if not text:
        raise RequestError("the prompt must not be empty", param="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"the prompt must be UTF-8 (character {error.start} is not): check the terminal's encoding",
            param="prompt",
        ) from None
    return text


def piped_text() -> str | None:
    """The text of a pipe or file on stdin, without its last line end; None if stdin is neither."""
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (AttributeError, OSError, ValueError):  # no stdin at all, or not a real file
        return None
    # terminals and /dev/null are character devices: waiting for text from them would be a hang
    if stat.S_ISCHR(mode):
        return None
    data = sys.stdin.buffer.read()
    try:
        return data.decode().removesuffix("\n")
    except UnicodeDecodeError as error:
        raise RequestError(
            f"standard input must be UTF-8, but byte {data[error.start]:#04x} at offset {error.start} is "
            "not: convert it, for example with iconv",
            param="prompt",
        ) from None


def _as_dict(llm: LLM, prompt: str, result: Result) -> dict[str, Any]:
    return {
        "model": llm.config.name,
        "path": str(llm.path),
        "prompt": prompt,
        "text": result.text,
        "token_ids": result.token_ids,
        "finish_reason": result.finish_reason,
        "stop_reason": result.stop_reason,
        "n_prompt_tokens": result.timings.n_prompt_tokens,
        "n_generated": result.timings.n_generated,
        "timings": timings_as_dict(result.timings),
        **({"reasoning": result.reasoning} if result.reasoning else {}),
        **({"messages": result.messages} if len(result.messages) > 1 else {}),
        **({"image_tokens": result.image_tokens} if result.image_tokens else {}),
    }
