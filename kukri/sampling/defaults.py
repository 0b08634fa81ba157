"""Default sampling parameters: a checkpoint's own advice, or kukri's defaults."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from kukri.errors import RequestError
from kukri.sampling.params import SamplingParams

logger = logging.getLogger("kukri.sampling")

# For a model that advises nothing. Measured on SmolLM2-135M-Instruct: docs/decisions, 2026-11-22.
OWN_DEFAULTS: Mapping[str, Any] = {"temperature": 0.7, "top_p": 0.95, "min_p": 0.05}


def default_params(advice: Mapping[str, Any]) -> SamplingParams:
    """The parameters that a checkpoint advises, by field of SamplingParams; OWN_DEFAULTS if it advises none.

    Impossible values are left out, with a warning, so that no request fails because of a file's advice.
    """
    params, n_taken = SamplingParams(), 0
    for name, value in sorted(advice.items(), key=lambda item: item[0] == "mirostat"):
        try:
            params = params.replace(**{name: value})
            n_taken += 1
        except RequestError as error:
            logger.warning("the model's advice on sampling is left out: %s", error)
    return params if n_taken else SamplingParams(**OWN_DEFAULTS)
