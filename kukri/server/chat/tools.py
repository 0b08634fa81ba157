"""The tools that one request may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

from kukri.sampling import Grammar
from kukri.server.chat.request import ChatRequest
from kukri.server.chat.tool_dialects import ToolDialect, call_grammar
from kukri.server.chat.tool_parser import ToolParser


@dataclass(frozen=True)
class Toolbox:
    """The `functions` that one request may call, and the form of its calls."""

    dialect: ToolDialect
    functions: Sequence[Mapping[str, Any]]
    many: bool  # more than one call
    required: bool  # nothing but calls
    is_strict: bool  # the arguments follow their schemas

    @classmethod
    def of(cls, request: ChatRequest, dialect: ToolDialect) -> Toolbox | None:
        """The tools of a request; None for none."""
        if not request.uses_tools:
            return None
        named = request.tool_name
        functions = [f for f in request.functions if named is None or f["name"] == named]
        return cls(
            replace(dialect, reads_code=request.calls_python),
            functions,
            many=request.parallel_tool_calls and named is None,
            required=request.tool_choice == "required",
            is_strict=dialect.is_generic or any(function.get("strict") for function in functions),
        )

    def parser(self) -> ToolParser:
        """A parser of one answer."""
        schemas = {function["name"]: function.get("parameters") or {} for function in self.functions}
        return ToolParser(
            self.dialect, {name: list(schema.get("properties") or ()) for name, schema in schemas.items()}
        )

    def grammar(self, tokens: Mapping[str, int], special_ids: frozenset[int]) -> Grammar | None:
        """The grammar of the answers; None if they are free."""
        if not (self.required or self.is_strict):
            return None
        source = call_grammar(
            self.dialect, self.functions, tokens, special_ids, many=self.many, required=self.required
        )
        return Grammar.text(source, param="tools")

    def new_id(self) -> str:
        """An id for a call."""
        return uuid4().hex[: self.dialect.id_length] if self.dialect.id_length else f"call_{uuid4().hex}"
