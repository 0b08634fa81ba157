"""Grammars, in Lark's syntax, of the calls that a dialect writes, and of the reasoning that comes before."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from kukri.dataclass import dataclass
from kukri.dialects.dialect import Dialect
from kukri.dialects.signatures import resolved, types_of
from kukri.dialects.tool_grammar import regex_of, tool_regex
from kukri.sampling.grammar import json_rule, lark_string

Reasoning = Literal["none", "possible", "open"]

logger = logging.getLogger("kukri.tools")

_TEXT = r"TEXT: /(.|\n)*/"
_KEY = r"KEY: /[A-Za-z_][A-Za-z0-9_]*/"
_SINGLE = r"SINGLE: /'([^'\\\n]|\\[^\n])*'/"  # a text as Python quotes it
# bounds of a string, enforced only in the JSON form
_BOUNDS = {"pattern", "format", "minLength", "maxLength", "const"}


@dataclass(frozen=True)
class Spelling:
    """How texts are spelled in a grammar for a model: control tokens by their ids."""

    tokens: Mapping[str, int]
    special_ids: frozenset[int]

    def is_token(self, text: str) -> bool:
        """True if the text is a control token."""
        return self.tokens.get(text, -1) in self.special_ids

    def __call__(self, text: str) -> str:
        """A text, in which there may be control tokens; "" for an empty one."""
        parts = re.split(r"(<[^<>\s]+>|\[[A-Z_/]+\])", text)
        joined: list[tuple[bool, str]] = []
        for part in filter(None, parts):
            is_token = self.is_token(part)
            if joined and not is_token and not joined[-1][0]:
                joined[-1] = False, joined[-1][1] + part
            else:
                joined.append((is_token, part))
        return " ".join(f"<[{self.tokens[part]}]>" if token else lark_string(part) for token, part in joined)

    def up_to(self, name: str, end: str) -> str:
        """A rule: any text, and the end of it."""
        if self.is_token(end):
            return f"{name}: TEXT {self(end)}"
        return f"{name}[lazy]: TEXT {lark_string(end)}"


def reasoning_grammar(dialect: Dialect, spell: Spelling, reasoning: Reasoning) -> str:
    """Return the rule `before` of an answer's reasoning with its marks; "" without reasoning."""
    if dialect.body == "harmony":
        if reasoning == "none":
            return ""
        return "\n".join([f"before: analysis* {_channel(spell, 'final')}", *_harmony_rules(spell)])
    if reasoning == "none":
        return ""
    thoughts = dialect.thoughts
    opened = f"({spell(thoughts.opener)} inside WHITE)?" if reasoning == "possible" else "inside WHITE"
    return "\n".join(
        [f"before: {opened}", spell.up_to("inside", thoughts.closer), _TEXT, r"WHITE: /\n{0,2}/"]
    )


def call_grammar(
    dialect: Dialect,
    tools: Sequence[Mapping[str, Any]],
    spell: Spelling,
    *,
    many: bool,
    required: bool,
) -> str:
    """Calls of these functions: one, or with `many` one or more.

    Unless they are `required`, text may stand in their place and, but for forms without a mark, before them.
    """
    bodies = _Bodies(dialect, spell)
    names = [bodies.add(i, tool) for i, tool in enumerate(tools)]
    rules = [f"call: {' | '.join(names)}", *bodies.rules, _TEXT, _KEY, _SINGLE]
    if dialect.body == "harmony":
        answer = "call" if required else f"(preamble? call | {_channel(spell, 'final')} TEXT)"
        preamble = f"preamble: {_channel(spell, 'commentary')} TEXT {_next_message(spell)}"
        return "\n".join([f"start: analysis* {answer}", preamble, *_harmony_rules(spell)[:-1], *rules])
    around = dialect.around
    one = f"{spell(around.open)} call {spell(around.close)}"
    more = f"({spell(around.between)} {one})*" if many else ""
    begin = around.before + around.open
    if required:
        return "\n".join([f"start: {spell(around.before)} {one} {more} {spell(around.after)}", *rules])
    if dialect.begins_bare:
        first = re.escape("{" if dialect.body == "json" else "[")
        calls = f"{spell(around.before)} {one} {more} {spell(around.after)}"
        rules.append(rf"OTHER: /([^{first}](.|\n)*)?/")
        return "\n".join([f"start: {calls} | OTHER", *rules])
    mark = dialect.openers[0]
    rest = f"{spell(begin.removeprefix(mark))} call {spell(around.close)} {more} {spell(around.after)}"
    start = f"start: (before {rest})? TEXT"
    if spell.is_token(mark):
        return "\n".join([f"start: TEXT ({spell(mark)} {rest})?", *rules])
    return "\n".join([start, spell.up_to("before", mark), *rules])


def _channel(spell: Spelling, name: str) -> str:
    return f"{spell('<|channel|>')} {lark_string(name)} {spell('<|message|>')}"


def _next_message(spell: Spelling) -> str:
    return f'{spell("<|end|>")} {spell("<|start|>")} "assistant"'


def _harmony_rules(spell: Spelling) -> list[str]:
    return [f"analysis: {_channel(spell, 'analysis')} TEXT {_next_message(spell)}", _TEXT]


class _Bodies:
    """Rules of the bodies of calls: `call_0` for the first tool, and so on."""

    def __init__(self, dialect: Dialect, spell: Spelling) -> None:
        self.rules: list[str] = []
        self._dialect, self._spell = dialect, spell
        self._write: Callable[[int, str, Mapping[str, Any]], str] = {
            "json": self._json, "named": self._named, "harmony": self._harmony, "tagged": self._tagged,
            "keys": self._keys, "python": self._python, "gemma": self._gemma,
        }[dialect.body]  # fmt: skip

    def add(self, i: int, tool: Mapping[str, Any]) -> str:
        """Add the rules of a tool, and return the name of the tool's rule."""
        schema = tool.get("parameters") or {"type": "object"}
        self._own, self._number = self._own_grammar(tool), i
        self.rules.append(f"call_{i}: {self._write(i, tool['name'], schema)}")
        return f"call_{i}"

    def _own_grammar(self, tool: Mapping[str, Any]) -> str:
        """The regular expression of a tool's one text; "" if it has no grammar that can be enforced."""
        if not tool.get("grammar"):
            return ""
        in_json = self._dialect.body not in ("tagged", "keys", "gemma")
        try:
            return tool_regex(tool["grammar"], in_json=in_json)
        except ValueError as error:
            logger.warning("the grammar of the tool %s is told and not enforced: %s", tool["name"], error)
            return ""

    def _arguments(self, i: int, schema: Mapping[str, Any]) -> str:
        body = json_rule(schema, lenient=True)
        if self._own:
            (key,) = schema["properties"]
            begin, end = json.dumps({key: "|"}).split("|")
            body = f"{lark_string(begin)} {self._own_text(i, end)}"
        self.rules.append(f"arguments_{i}: {body}")
        return f"arguments_{i}"

    def _own_text(self, i: int, end: str) -> str:
        """A terminal: a text of the tool's grammar, and what ends it."""
        self.rules.append(f"OWN_{i}: /{self._own}{regex_of(end)}/")
        return f"OWN_{i}"

    def _json(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        begin = json.dumps({"name": name})[:-1] + f', "{self._dialect.arguments_key}": '
        return f'{lark_string(begin)} {self._arguments(i, schema)} "}}"'

    def _named(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        around = self._dialect.around
        head = self._spell(f"{around.head}{name}{around.neck}")
        return f"{head} {self._arguments(i, schema)} {self._spell(around.tail)}"

    def _harmony(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        head = self._spell("<|channel|>"), lark_string(f"commentary to=functions.{name}")
        tail = self._spell("<|constrain|>"), '"json"', self._spell("<|message|>")
        return f'{" ".join(head)} " "? {" ".join(tail)} {self._arguments(i, schema)}'

    def _tagged(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        edge = self._dialect.around.edge

        def parameter(key: str, value: Any, rule: str) -> str:
            return self._parameter(f"<parameter={key}>{edge}", f"{edge}</parameter>\n", value, schema, rule)

        free = f'"<parameter=" KEY {lark_string(">" + edge)} free_{i}'
        self.rules.append(self._spell.up_to(f"free_{i}", f"{edge}</parameter>\n"))
        head = lark_string(f"<function={name}>\n")
        return f'{head} {self._list(i, schema, parameter, free, "")} "</function>"'

    def _keys(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        def parameter(key: str, value: Any, rule: str) -> str:
            begin = f"<arg_key>{key}</arg_key>\n<arg_value>"
            return self._parameter(begin, "</arg_value>\n", value, schema, rule)

        free = f'"<arg_key>" KEY "</arg_key>\\n<arg_value>" free_{i}'
        self.rules.append(self._spell.up_to(f"free_{i}", "</arg_value>\n"))
        return " ".join([lark_string(f"{name}\n"), self._list(i, schema, parameter, free, "")])

    def _parameter(self, begin: str, end: str, value: Any, root: Mapping[str, Any], rule: str) -> str:
        """A parameter between texts: a text is free, or one of the texts listed; anything else is JSON."""
        types, head = types_of(value, root), lark_string(begin)
        if self._own:
            return f"{head} {self._own_text(self._number, end)}"
        if types and "string" not in types:
            return f"{head} {self._value(value, root, rule)} {lark_string(end)}"
        texts = _choices(value, root)
        if texts:
            return f"{head} ({' | '.join(map(lark_string, texts))}) {lark_string(end)}"
        self.rules.append(self._spell.up_to(rule, end))
        return f"{head} {rule}"

    def _python(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        def parameter(key: str, value: Any, rule: str) -> str:
            head, types = lark_string(f"{key}="), types_of(value, schema)
            if self._own:
                return f"{head} {lark_string(chr(34))} {self._own_text(i, chr(34))}"
            if types == {"boolean"}:
                return f'{head} ("True" | "False")'
            if types == {"string"} and (texts := _choices(value, schema)):
                spelled = [lark_string(quoted) for text in texts for quoted in (json.dumps(text), repr(text))]
                return f"{head} ({' | '.join(dict.fromkeys(spelled))})"
            single = " | SINGLE" if types == {"string"} and not _BOUNDS & set(resolved(value, schema)) else ""
            return f"{head} ({self._value(value, schema, rule)}{single})"

        self.rules.append(f"free_{i}: {json_rule({}, lenient=True)}")
        free = f'KEY "=" free_{i}'
        return f'{lark_string(f"{name}(")} {self._list(i, schema, parameter, free, ", ")} ")"'

    def _gemma(self, i: int, name: str, schema: Mapping[str, Any]) -> str:
        quote = self._dialect.around.edge
        text = f"{self._spell(quote)} quoted"
        if not any(rule.startswith("quoted") for rule in self.rules):
            self.rules += [
                self._spell.up_to("quoted", quote),
                'any_pair: KEY ":" any_value',
                f"scalar: {json_rule({'type': ['number', 'boolean', 'null']})}",
                f'any_value: {text} | scalar | "[" (any_value ("," any_value)*)? "]"'
                ' | "{" (any_pair ("," any_pair)*)? "}"',
            ]

        def parameter(key: str, value: Any, rule: str) -> str:
            types, texts = types_of(value, schema), _choices(value, schema)
            head = lark_string(f"{key}:")
            if self._own:
                return f"{head} {self._spell(quote)} {self._own_text(i, '')} {self._spell(quote)}"
            if types == {"string"}:
                choices = " | ".join(self._spell(f"{quote}{text_}{quote}") for text_ in texts)
                return f"{head} ({choices or text})"
            if types and types <= {"number", "integer", "boolean", "null"}:
                return f"{head} {self._value(value, schema, rule)}"
            return f"{head} any_value"

        begin = lark_string(f"{self._dialect.around.head}{name}{{")
        return f'{begin} {self._list(i, schema, parameter, "any_pair", ",")} "}}"'

    def _value(self, value: Any, root: Mapping[str, Any], rule: str) -> str:
        """A value as JSON, with the definitions that it may refer to."""
        schema = dict(value) if isinstance(value, Mapping) else {}
        schema |= {key: root[key] for key in ("$defs", "definitions") if key in root}
        self.rules.append(f"{rule}: {json_rule(schema, lenient=True)}")
        return rule

    def _list(
        self,
        i: int,
        schema: Mapping[str, Any],
        parameter: Callable[[str, Any, str], str],
        free: str,
        separator: str,
    ) -> str:
        """Parameters in the schema's order, the optional ones or not; any, each as `free`, if it has none."""
        properties = schema.get("properties")
        between = lark_string(separator) if separator else ""
        if not isinstance(properties, Mapping) or not properties:
            is_closed = schema.get("additionalProperties") is False
            return "" if is_closed else f"({free} ({between} {free})*)?"
        needed = schema.get("required") if isinstance(schema.get("required"), list) else []
        first = after = '""'  # the rest of an object at its beginning, and after a member
        for k, (key, value) in reversed(list(enumerate(properties.items()))):
            one = parameter(key, value, f"value_{i}_{k}")
            self.rules.append(f"one_{i}_{k}: {one}")
            self.rules += [f"first_{i}_{k}: {first}", f"after_{i}_{k}: {after}"]
            is_needed = key in (needed or ())
            first, after = (
                f"one_{i}_{k} after_{i}_{k}" + ("" if is_needed else f" | first_{i}_{k}"),
                f"{between} one_{i}_{k} after_{i}_{k}" + ("" if is_needed else f" | after_{i}_{k}"),
            )
        return f"({first})"


def _choices(value: Any, root: Mapping[str, Any]) -> list[str]:
    """The texts that a schema lists, if it lists nothing else."""
    schema = resolved(value, root)
    listed = schema.get("enum") if isinstance(schema, Mapping) else None
    if not isinstance(listed, list) or not all(isinstance(text, str) and text for text in listed):
        return []
    return listed
