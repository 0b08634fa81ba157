"""kukri runs small language models, in pure Python.

    from kukri import LLM

    llm = LLM()
    print(llm.chat([{"role": "user", "content": "Name three primary colors."}]).text)

Names load when they are used: `import kukri` alone costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `as` makes the names public for type checkers
    from kukri import errors as errors
    from kukri.async_llm import AsyncLLM as AsyncLLM
    from kukri.calls.decide import Decision as Decision
    from kukri.calls.results import Chunk as Chunk
    from kukri.calls.results import Output as Output
    from kukri.calls.results import Result as Result
    from kukri.calls.results import ToolCall as ToolCall
    from kukri.calls.results import Usage as Usage
    from kukri.calls.speech import Transcription as Transcription
    from kukri.engine import Timings as Timings
    from kukri.interp.cache import ActivationCache as ActivationCache
    from kukri.interp.gradients.circuits import AttributionGraph as AttributionGraph
    from kukri.interp.interventions.intervention import Intervention as Intervention
    from kukri.interp.interventions.request_taps import Readout as Readout
    from kukri.llm import LLM as LLM
    from kukri.llm import load as load
    from kukri.opening.model_options import ModelOptions as ModelOptions
    from kukri.sampling import Grammar as Grammar
    from kukri.sampling import SampledToken as SampledToken
    from kukri.sampling import SamplingOptions as SamplingOptions
    from kukri.sampling import SamplingParams as SamplingParams
    from kukri.tasks import Label as Label
    from kukri.tasks import Span as Span
    from kukri.tasks import TokenLabel as TokenLabel
    from kukri.tasks.embedding import Ranked as Ranked
    from kukri.tokenizer import Tokenizer as Tokenizer
    from kukri.vision.image import ImagePrompt as ImagePrompt

__version__ = "0.1.0"

_HOMES = {
    "LLM": "kukri.llm",
    "ActivationCache": "kukri.interp.cache",
    "AsyncLLM": "kukri.async_llm",
    "AttributionGraph": "kukri.interp.gradients.circuits",
    "Chunk": "kukri.calls.results",
    "Decision": "kukri.calls.decide",
    "Grammar": "kukri.sampling",
    "ImagePrompt": "kukri.vision.image",
    "Intervention": "kukri.interp.interventions.intervention",
    "Label": "kukri.tasks",
    "ModelOptions": "kukri.opening.model_options",
    "Output": "kukri.calls.results",
    "Ranked": "kukri.tasks.embedding",
    "Readout": "kukri.interp.interventions.request_taps",
    "Result": "kukri.calls.results",
    "SampledToken": "kukri.sampling",
    "SamplingOptions": "kukri.sampling",
    "SamplingParams": "kukri.sampling",
    "Span": "kukri.tasks",
    "Timings": "kukri.engine",
    "TokenLabel": "kukri.tasks",
    "Tokenizer": "kukri.tokenizer",
    "ToolCall": "kukri.calls.results",
    "Transcription": "kukri.calls.speech",
    "Usage": "kukri.calls.results",
    "load": "kukri.llm",
}
__all__ = [*sorted(_HOMES), "__version__", "errors"]


def __getattr__(name: str) -> Any:
    if name == "errors":
        return import_module("kukri.errors")
    if name not in _HOMES:
        raise AttributeError(f"module 'kukri' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
