"""What one request may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from kukri.sampling.grammar import Grammar
from kukri.server.tool_dialects import ToolDialect, call_grammar
from kukri.server.tool_split import ToolSplit


@dataclass(frozen=True)
class Toolbox:
    """What one request may call: `functions` as its tools have them."""

    dialect: ToolDialect
    functions: Sequence[Mapping[str, Any]]
    many: bool  # more than one call
    required: bool  # nothing but calls
    is_strict: bool  # the arguments follow their schemas

    def split(self) -> ToolSplit:
        """A split of one answer."""
        schemas = {function["name"]: function.get("parameters") or {} for function in self.functions}
        return ToolSplit(
            self.dialect, {name: list(schema.get("properties") or ()) for name, schema in schemas.items()}
        )

    def grammar(self, tokens: Mapping[str, int], special_ids: frozenset[int]) -> Grammar | None:
        """What answers have to be; None where they are free."""
        if not (self.required or self.is_strict):
            return None
        source = call_grammar(
            self.dialect, self.functions, tokens, special_ids, many=self.many, required=self.required
        )
        return Grammar.text(source, param="tools")

    def new_id(self) -> str:
        """An id for a call."""
        return uuid4().hex[: self.dialect.id_length] if self.dialect.id_length else f"call_{uuid4().hex}"
