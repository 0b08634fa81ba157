"""The keyword arguments of calls of `LLM` and `AsyncLLM`, for type checkers and editors alone.

What they do and their defaults are in the signatures and docstrings of `LLM`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kukri.calls.conversation import Approve, Tool
from kukri.interp.hooks.listening import FwdHooks, NamesFilter
from kukri.interp.interventions.intervention import Intervention
from kukri.sampling import SamplingOptions

Interventions = Sequence[Intervention | Mapping[str, Any]]


class GenerationOptions(SamplingOptions, total=False):
    """The options of `generate`."""

    adapter: str | None
    interventions: Interventions


class ChatOptions(GenerationOptions, total=False):
    """The options of `chat` and `stream`."""

    tools: Sequence[Tool]
    tool_choice: str
    approve: Approve | None
    max_rounds: int


class HookOptions(SamplingOptions, total=False):
    """The options of `generate_with_hooks`."""

    fwd_hooks: FwdHooks
    names: NamesFilter
    adapter: str | None
