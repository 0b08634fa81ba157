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
    from kukri.calls.decide import Decision
    from kukri.calls.results import Chunk, Output, Result, ToolCall, Usage
    from kukri.engine import Timings
    from kukri.interp.cache import ActivationCache
    from kukri.interp.interventions.intervention import Intervention
    from kukri.llm import LLM, load
    from kukri.opening.model_options import ModelOptions
    from kukri.sampling import Grammar, SampledToken, SamplingOptions, SamplingParams
    from kukri.tasks import Label, Span, TokenLabel
    from kukri.tasks.embedding import Ranked
    from kukri.tokenizer import Tokenizer
    from kukri.vision.image import ImagePrompt

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "ActivationCache",
    "AsyncLLM",
    "Chunk",
    "Decision",
    "Grammar",
    "ImagePrompt",
    "Intervention",
    "Label",
    "ModelOptions",
    "Output",
    "Ranked",
    "Result",
    "SampledToken",
    "SamplingOptions",
    "SamplingParams",
    "Span",
    "Timings",
    "TokenLabel",
    "Tokenizer",
    "ToolCall",
    "Usage",
    "__version__",
    "errors",
    "load",
]

_HOMES = {
    "LLM": "kukri.llm",
    "ActivationCache": "kukri.interp.cache",
    "AsyncLLM": "kukri.async_llm",
    "Chunk": "kukri.calls.results",
    "Decision": "kukri.calls.decide",
    "Grammar": "kukri.sampling",
    "ImagePrompt": "kukri.vision.image",
    "Intervention": "kukri.interp.interventions.intervention",
    "Label": "kukri.tasks",
    "ModelOptions": "kukri.opening.model_options",
    "Output": "kukri.calls.results",
    "Ranked": "kukri.tasks.embedding",
    "Result": "kukri.calls.results",
    "SampledToken": "kukri.sampling",
    "SamplingOptions": "kukri.sampling",
    "SamplingParams": "kukri.sampling",
    "Span": "kukri.tasks",
    "Timings": "kukri.engine",
    "TokenLabel": "kukri.tasks",
    "Tokenizer": "kukri.tokenizer",
    "ToolCall": "kukri.calls.results",
    "Usage": "kukri.calls.results",
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
