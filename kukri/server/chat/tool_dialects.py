"""The forms in which model families write tool calls, and the grammar of such calls.

A `ToolDialect` is chosen by a model's chat template and special tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kukri.sampling.grammar import json_rule, lark_string

CODE, CODE_END = "<code>", "</code>"


@dataclass(frozen=True)
class ToolDialect:
    """The form in which a model family writes tool calls.

    A call is a JSON object behind `opener` and `bracket`, and before `closer`; between calls there may be
    `separators`. With `begins_bare` a text that begins with { is a call too. With `names_first` the object is
    the arguments alone, behind the name.
    """

    name: str
    opener: str
    closer: str = ""
    bracket: str = ""
    separators: str = ""
    arguments_key: str = "arguments"
    begins_bare: bool = False
    names_first: bool = False
    reads_code: bool = False  # <code>name(key=value)</code> is a call too
    id_length: int | None = None  # that the template insists on
    is_generic: bool = False  # the template knows no tools: the system prompt shows them

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts that may be special tokens and have to be seen."""
        return self.opener, self.closer, "[ARGS]", "[CALL_ID]"

    def written(self, calls: Sequence[tuple[str, Mapping[str, Any]]]) -> str:
        """Names and arguments as a model with an opener and a closer writes them."""
        if self.reads_code:
            lines = [
                f"{name}({', '.join(f'{key}={value!r}' for key, value in given.items())})\n"
                for name, given in calls
            ]
            return f"{CODE}\n{''.join(lines)}{CODE_END}"
        objects = [
            json.dumps({"name": name, self.arguments_key: given}, ensure_ascii=False) for name, given in calls
        ]
        return "\n".join(f"{self.opener}\n{text}\n{self.closer}" for text in objects)


HERMES = ToolDialect("hermes", "<tool_call>", "</tool_call>")
LLAMA_3 = ToolDialect(
    "llama3", "<|python_tag|>", separators=";,", arguments_key="parameters", begins_bare=True
)
MISTRAL = ToolDialect("mistral", "[TOOL_CALLS]", bracket="[", separators="],", id_length=9)
MISTRAL_NAMES = ToolDialect("mistral", "[TOOL_CALLS]", names_first=True, id_length=9)


GENERIC = ToolDialect("generic", "<tool_call>", "</tool_call>", is_generic=True)  # always with a grammar
_INTRODUCTION = """\
You can call functions. Each line between <tools> and </tools> describes one of them:
<tools>
{tools}
</tools>
Call a function by writing its name and its arguments as JSON, like this:
<tool_call>
{{"name": "NAME", "arguments": {{"PARAMETER": "VALUE"}}}}
</tool_call>
The results come between <tool_response> and </tool_response>."""


def introduction(tools: Sequence[Mapping[str, Any]]) -> str:
    """The part of a system prompt that shows tools and the form `GENERIC` to a model without one."""
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    return _INTRODUCTION.format(tools="\n".join(lines))


def dialect_of(template: str | None, tokens: Mapping[str, int]) -> ToolDialect | None:
    """The dialect of a model with this chat template and these tokens; None if it has none of its own."""
    if template is None or not re.search(r"\btools\b", template):
        return None
    if MISTRAL.opener in template or MISTRAL.opener in tokens:
        return MISTRAL_NAMES if "[ARGS]" in template else MISTRAL
    if HERMES.opener in template:
        return HERMES
    if LLAMA_3.opener in tokens or '"parameters": ' in template:
        return LLAMA_3
    return None


def call_grammar(
    dialect: ToolDialect,
    tools: Sequence[Mapping[str, Any]],
    tokens: Mapping[str, int],
    special_ids: frozenset[int],
    *,
    many: bool,
    required: bool,
) -> str:
    """Calls of these functions, in Lark's syntax: one, or with `many` one or more.

    Unless they are `required`, text may stand in their place and, but for llama3's, before them.
    """

    def mark(text: str) -> str:
        token_id = tokens.get(text, -1)
        return f"<[{token_id}]>" if token_id in special_ids else lark_string(text)

    rules, names = [], []
    for i, tool in enumerate(tools):
        names.append(f"call_{i}")
        if dialect.names_first:
            head, tail = f"{lark_string(tool['name'])} {mark('[ARGS]')}", ""
        else:
            begin = json.dumps({"name": tool["name"]})[:-1] + f', "{dialect.arguments_key}": '
            head, tail = lark_string(begin), '"}"'
        rules.append(f"call_{i}: {head} arguments_{i} {tail}")
        rules.append(f"arguments_{i}: {json_rule(tool.get('parameters') or {'type': 'object'})}")
    opener = mark(dialect.opener)
    if dialect.begins_bare:
        first, more = "call", '"; " call'
    elif dialect.names_first:
        first = more = f"{opener} call"
    elif dialect.bracket:
        first, more = f'{opener} "[" call', '", " call'
    else:
        first = f'{opener} "\\n" call "\\n" {mark(dialect.closer)}'
        more = f'"\\n" {first}'
    calls = first + (f" ({more})*" if many else "") + (' "]"' if dialect.bracket else "")
    start = ["start: calls"]
    if not required and dialect.begins_bare:
        start = ["start: calls | TEXT", r"TEXT: /([^{](.|\n)*)?/"]
    elif not required and opener.startswith("<["):
        start = ["start: TEXT calls?", r"TEXT: /(.|\n)*/"]
    elif not required:
        calls = calls.removeprefix(opener)
        start = ["start: (before calls)? TEXT", f"before[lazy]: TEXT {opener}", r"TEXT: /(.|\n)*/"]
    return "\n".join([*start, f"calls: {calls}", f"call: {' | '.join(names)}", *rules])
