"""Opens a model for a stage, which computes some of its layers for an engine in another process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kukri.engine.model_identity import weights_identity
from kukri.errors import StageError
from kukri.formats import hub
from kukri.kernels import choose_backend, make_backend
from kukri.opening.loading import read_weights
from kukri.opening.model_options import ModelOptions
from kukri.stages.server import StageModel, StageOptions


def read_stage_model(given: Mapping[str, Any], own: StageOptions) -> StageModel:
    """See kukri.stages.server.ReadModel."""
    try:
        options = ModelOptions(**given)
    except (TypeError, ValueError) as error:
        raise StageError(f"the engine's options cannot be used: {error}") from None
    path = hub.resolve(options.model)
    config, model = read_weights(path, options)
    name, device = choose_backend(options.backend, own.device or options.device)
    backend = make_backend(name, own.n_threads or options.n_threads, device)
    return StageModel(model, backend, weights_identity(path, config, options.quantize))
