"""Default sampling parameters: a checkpoint's own advice, or kukri's defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kukri.errors import RequestError
from kukri.sampling.params import SamplingParams

logger = logging.getLogger("kukri.sampling")

# For a model that advises nothing. Measured on SmolLM2-135M-Instruct: docs/log, 2026-11-22.
OWN_DEFAULTS: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}

# The fields that switch each stage on, and their values that switch it off.
_OFF: dict[str, dict[str, float]] = {
    "penalties": {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0},
    "dry": {"dry_multiplier": 0.0},
    "top_n_sigma": {"top_n_sigma": 0.0},
    "top_k": {"top_k": 0},
    "typical_p": {"typical_p": 1.0},
    "top_p": {"top_p": 1.0},
    "min_p": {"min_p": 0.0},
    "xtc": {"xtc_probability": 0.0},
    "temperature": {"temperature": 1.0, "dynatemp_range": 0.0},
}
_BESIDE_MIROSTAT = ("penalties", "dry", "temperature")


def default_params(advice: Mapping[str, Any]) -> SamplingParams:
    """The parameters that a checkpoint advises, by field of SamplingParams; OWN_DEFAULTS if it advises none.

    Values that cannot be are left out, with a warning: no request fails for a file's advice.
    """
    params, n_taken = SamplingParams(), 0
    for name, value in sorted(advice.items(), key=lambda item: item[0] == "mirostat"):
        try:
            params = with_overrides(params, {name: value})
            n_taken += 1
        except RequestError as error:
            logger.warning("the model's advice on sampling is left out: %s", error)
    return params if n_taken else SamplingParams(**OWN_DEFAULTS)


def with_overrides(defaults: SamplingParams, given: Mapping[str, Any]) -> SamplingParams:
    """`defaults` with the fields that are given.

    A given `mirostat` or `samplers` switches off the default stages that it rules out. Raises RequestError on
    values that do not work, as SamplingParams does.
    """
    ruled_out: set[str] = set()
    if given.get("mirostat"):
        ruled_out = _OFF.keys() - _BESIDE_MIROSTAT
    samplers = given.get("samplers")
    if isinstance(samplers, list | tuple):
        ruled_out |= _OFF.keys() - set(samplers)
    off = {name: value for stage in ruled_out for name, value in _OFF[stage].items()}
    return replace(defaults, **off | dict(given)) if given else defaults
