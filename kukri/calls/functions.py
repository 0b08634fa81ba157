"""Python functions as tools: what a model is told of them, and how its arguments become their values."""

from __future__ import annotations

import inspect
import json
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from kukri.dataclass import dataclass
from kukri.errors import RequestError

_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean", type(None): "null"}
_LISTS: tuple[Any, ...] = (list, tuple, set, frozenset, Sequence)
_MAPS: tuple[Any, ...] = (dict, Mapping)
_KINDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}")
_SECTION = re.compile(r"\n\s*(?:(?:Args|Arguments|Parameters|Returns|Raises|Yields|Examples?):|:\w+)")
_PARAM = re.compile(r":param (?:[\w\[\], |.]+ )?(?P<name>\w+):\s*(?P<text>[^\n]*(?:\n(?!\s*:)[^\n]*\S)*)")
_ARGS = re.compile(
    r"\n(?P<indent>[ ]*)(?:Args|Arguments|Parameters):[ ]*\n(?P<body>(?:(?P=indent)[ ]+.*\n?|\n)*)"
)
_ARG = re.compile(r"(?P<name>\w+)(?:\s*\([^)]*\))?:\s*(?P<text>.*)")


@dataclass(frozen=True)
class FunctionTool:
    """A function that a model may call, by its name. `parameters` is a JSON schema."""

    function: Callable[..., Any]
    name: str
    description: str
    parameters: Mapping[str, Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> FunctionTool:
        """The tool that a function's signature, type hints and docstring describe.

        Descriptions of arguments come from `Args:` or `:param name:` in the docstring, or from
        `Annotated[type, "text"]`. Raises RequestError for arguments that JSON cannot have.
        """
        name = getattr(function, "__name__", type(function).__name__)
        if not callable(function) or not _NAME.fullmatch(name):
            raise RequestError.of("tools", f"must be functions with a name, not {function!r}")
        hints = typing.get_type_hints(_hinted(function), include_extras=True)
        described = inspect.getdoc(function) or ""
        told = _argument_texts(described)
        properties: dict[str, Any] = {}
        required = []
        for parameter in inspect.signature(function).parameters.values():
            where = f"the argument {parameter.name} of the tool {name}"
            if parameter.kind not in _KINDS:
                raise RequestError(f"{where} must not be positional-only", param="tools")
            schema = schema_of(hints.get(parameter.name, Any), where)
            if parameter.name in told:
                schema = {"description": told[parameter.name], **schema}
            properties[parameter.name] = schema
            if parameter.default is parameter.empty:
                required.append(parameter.name)
        parameters = {"type": "object", "properties": properties, "required": required}
        return cls(function, name, _SECTION.split("\n" + described)[0].strip(), parameters)

    @property
    def is_async(self) -> bool:
        """True if it has to be awaited."""
        return is_awaited(self.function)

    @property
    def schema(self) -> dict[str, Any]:
        """The function as APIs describe it."""
        return {"name": self.name, "description": self.description, "parameters": self.parameters}

    def bound(self, arguments: str) -> inspect.BoundArguments:
        """The arguments of a call, JSON. Raises ValueError or TypeError, whose text says what is wrong."""
        given = json.loads(arguments)
        if not isinstance(given, dict):
            raise TypeError("the arguments must be an object")
        properties = self.parameters["properties"]
        fitted = {name: _fitted(value, properties.get(name, {})) for name, value in given.items()}
        return inspect.signature(self.function).bind(**fitted)


def result_text(value: Any) -> str:
    """What a model reads of a function's result: a text as it is, all else as JSON."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except (TypeError, ValueError, RecursionError):
        return str(value)


def schema_of(hint: Any, where: str) -> dict[str, Any]:
    """The JSON schema of a type hint. Raises RequestError, about `where`, for types that JSON has not."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return {}
    if hint in _TYPES:
        return {"type": _TYPES[hint]}
    if origin is Annotated:
        texts = [extra for extra in inner[1:] if isinstance(extra, str)]
        schema = schema_of(inner[0], where)
        return {"description": texts[0], **schema} if texts else schema
    if origin is Literal:
        return {"enum": list(inner)}
    if origin is Union or origin is types.UnionType:
        return {"anyOf": [schema_of(one, where) for one in inner]}
    if hint in _LISTS or origin in _LISTS:
        item = next((one for one in inner if one is not Ellipsis), Any)
        return {"type": "array", "items": schema_of(item, where)}
    if hint in _MAPS or origin in _MAPS:
        return {"type": "object", "additionalProperties": schema_of(inner[1], where) if inner else True}
    raise RequestError(
        f"the type {hint} of {where} is not supported: use str, int, float, bool, None, list, dict, "
        "Literal or unions of them",
        param="tools",
    )


def is_awaited(function: Any) -> bool:
    """Return whether it is an async function, or an object that is called as one."""
    below = function if inspect.isroutine(function) or not callable(function) else type(function).__call__
    return inspect.iscoroutinefunction(below)


def _hinted(function: Callable[..., Any]) -> Any:
    """The function whose hints count: that below wrappers, or the method that makes an object callable."""
    below = inspect.unwrap(function)
    return below if inspect.isroutine(below) else type(below).__call__


def _argument_texts(docstring: str) -> dict[str, str]:
    """The descriptions of arguments in a docstring, by name."""
    found = {match["name"]: " ".join(match["text"].split()) for match in _PARAM.finditer(docstring)}
    section = _ARGS.search("\n" + docstring)
    name, indent = "", None
    for line in section["body"].splitlines() if section else ():
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None and line.strip() else indent
        match = _ARG.match(line.strip()) if depth == indent else None
        if match is not None:
            name = match["name"]
            found[name] = match["text"].strip()
        elif line.strip() and name:
            found[name] = f"{found[name]} {line.strip()}".strip()
    return {name: text for name, text in found.items() if text}


def _fitted(value: Any, schema: Mapping[str, Any]) -> Any:
    """The value; a number or another value that a small model wrote as a text, as such."""
    kinds = {one.get("type") for one in schema.get("anyOf", [schema])}
    if isinstance(value, str) and kinds and not kinds & {"string", None}:
        try:
            return json.loads(value)
        except ValueError:
            return value
    return value
