"""`Preset`: a name for a served model with a system message, parameters, first messages and an adapter."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kukri.dataclass import dataclass, field, replace


@dataclass(frozen=True)
class Preset:
    """What requests get that name it as their model; what they say themselves comes first.

    `sampling` are fields of SamplingParams, `messages` are told before the conversation, `max_context` is in
    tokens.
    """

    name: str
    system: str | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    messages: tuple[Mapping[str, str], ...] = ()
    adapter: str | None = None
    max_context: int | None = None

    def over(self, base: Preset) -> Preset:
        """This preset with what it says nothing of taken from the one that it was made from."""
        return replace(
            self,
            system=base.system if self.system is None else self.system,
            sampling={**base.sampling, **self.sampling},
            messages=self.messages or base.messages,
            adapter=base.adapter if self.adapter is None else self.adapter,
            max_context=base.max_context if self.max_context is None else self.max_context,
        )

    def under(self, sampling: Mapping[str, Any]) -> dict[str, Any]:
        """A client's parameters, with the preset's where it says nothing."""
        return {**sampling, **{n: v for n, v in self.sampling.items() if sampling.get(n) is None}}
