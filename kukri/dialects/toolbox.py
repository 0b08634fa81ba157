"""`Toolbox`: the tools that one request may call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

from kukri.dataclass import dataclass
from kukri.dialects.call_grammar import Spelling, call_grammar
from kukri.dialects.dialect import Dialect
from kukri.dialects.signatures import Signatures
from kukri.sampling import Grammar


@dataclass(frozen=True)
class Toolbox:
    """The `functions` that one request may call, and the form of its calls."""

    dialect: Dialect
    functions: Sequence[Mapping[str, Any]]
    many: bool  # more than one call
    required: bool  # nothing but calls
    is_strict: bool  # the arguments follow their schemas

    @property
    def signatures(self) -> Signatures:
        """What a parser has to know of the functions."""
        return Signatures(self.functions)

    def grammar(self, spell: Spelling) -> Grammar | None:
        """The grammar of the answers; None if they are free."""
        if not (self.required or self.is_strict):
            return None
        source = call_grammar(self.dialect, self.functions, spell, many=self.many, required=self.required)
        return Grammar.text(source, param="tools")

    def new_id(self) -> str:
        """An id for a call."""
        return uuid4().hex[: self.dialect.id_length] if self.dialect.id_length else f"call_{uuid4().hex}"
