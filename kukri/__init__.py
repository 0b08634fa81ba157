"""kukri runs small language models, in pure Python.

    from kukri import LLM

    llm = LLM()
    print(llm.chat([{"role": "user", "content": "Name three primary colors."}]).text)

Names load when they are used: `import kukri` alone costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kukri import errors
    from kukri.async_llm import AsyncLLM
    from kukri.calls.results import Chunk, Output, Result
    from kukri.engine import Timings
    from kukri.llm import LLM, load
    from kukri.opening.model_options import ModelOptions
    from kukri.sampling import Grammar, SampledToken, SamplingOptions, SamplingParams
    from kukri.tasks import Label, Span, TokenLabel

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "AsyncLLM",
    "Chunk",
    "Grammar",
    "Label",
    "ModelOptions",
    "Output",
    "Result",
    "SampledToken",
    "SamplingOptions",
    "SamplingParams",
    "Span",
    "Timings",
    "TokenLabel",
    "__version__",
    "errors",
    "load",
]

_HOMES = {
    "LLM": "kukri.llm",
    "AsyncLLM": "kukri.async_llm",
    "Label": "kukri.tasks",
    "Span": "kukri.tasks",
    "TokenLabel": "kukri.tasks",
    "Chunk": "kukri.calls.results",
    "ModelOptions": "kukri.opening.model_options",
    "Output": "kukri.calls.results",
    "Result": "kukri.calls.results",
    "Grammar": "kukri.sampling",
    "SampledToken": "kukri.sampling",
    "SamplingOptions": "kukri.sampling",
    "SamplingParams": "kukri.sampling",
    "Timings": "kukri.engine",
    "load": "kukri.llm",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("kukri.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'kukri' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
