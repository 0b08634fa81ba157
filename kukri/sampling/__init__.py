"""Sampling of the next token: `SamplingParams` are its parameters, `RequestSampler` samples for one request.

A row of logits goes through these, those left out that would change nothing:

1. `logits_processors`, functions of the caller, edit a copy of it
2. `logit_bias` is added
3. tokens that may not come are removed: tokens that the `grammar` does not allow, `bad_words`, and before
   `min_tokens` the tokens that end the text
4. the stages of `samplers`, in the order given there; by default the order of llama.cpp's chain, which
   `kukri.kernels.sampling_stages` lists with what each stage does
5. `mirostat`, which takes the place of the filters, keeps a surprise near `mirostat_tau` bits
6. one token is drawn

So with the default order top_p and min_p look at the model's own distribution, before the temperature
flattens or sharpens it, and top_p at the distribution of the tokens top_k left. Temperature 0 takes the
largest logit after the penalties; of equals, the lowest id. Log-probabilities are taken from the raw logits,
before step 1, as vLLM reports them. A token depends only on the request's seed, history and logits, whichever
requests share the step.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kukri.sampling.defaults import default_params
    from kukri.sampling.grammar import CompiledGrammar, Grammar
    from kukri.sampling.params import ReasoningLimit, SamplingOptions, SamplingParams
    from kukri.sampling.sampler import (
        RequestSampler,
        SampledToken,
        SamplingError,
        sample_rows,
        token_logprobs,
    )
    from kukri.sampling.text_params import resolve_texts

__all__ = [
    "CompiledGrammar",
    "Grammar",
    "ReasoningLimit",
    "RequestSampler",
    "SampledToken",
    "SamplingError",
    "SamplingOptions",
    "SamplingParams",
    "default_params",
    "resolve_texts",
    "sample_rows",
    "token_logprobs",
]  # fmt: skip

_HOMES = {
    "CompiledGrammar": "grammar", "Grammar": "grammar",
    "ReasoningLimit": "params", "SamplingOptions": "params", "SamplingParams": "params",
    "RequestSampler": "sampler", "SampledToken": "sampler", "SamplingError": "sampler",
    "sample_rows": "sampler", "token_logprobs": "sampler",
    "default_params": "defaults", "resolve_texts": "text_params",
}  # fmt: skip


def __getattr__(name: str) -> Any:  # the command line reads only `params`, without NumPy
    if name not in _HOMES:
        raise AttributeError(f"module 'kukri.sampling' has no attribute {name!r}")
    found = globals()[name] = getattr(import_module(f"kukri.sampling.{_HOMES[name]}"), name)
    return found
