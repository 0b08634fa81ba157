"""Makes what drafts for a model: each kind of draft model by the code that runs it."""

from __future__ import annotations

from kukri.config import EngineConfig
from kukri.engine.assistant_drafts import AssistantModel
from kukri.engine.draft_model import DraftModel
from kukri.engine.next_token_drafts import EagleModel, NextTokenDraftModel
from kukri.engine.runner import Runner
from kukri.engine.text_drafts import TextDraftModel
from kukri.errors import ConfigError
from kukri.kernels.backend import Backend
from kukri.kernels.cache import has_states
from kukri.kernels.step import StepLimits
from kukri.models import Model
from kukri.models.assistant import Assistant
from kukri.models.eagle3 import Eagle3
from kukri.models.next_token import NextTokenLayer
from kukri.tokenizer.translation import Translation


def make_draft_model(
    small: Model,
    runner: Runner,
    backend: Backend,
    config: EngineConfig,
    sizes: tuple[int, int, int],
    translation: Translation | None,
) -> DraftModel | AssistantModel:
    """What drafts for the larger model of `runner` by a smaller one, or by a part of its own.

    `sizes`: tokens of a context, pages of a sequence, and pages of a cache of its own. `translation`: from
    the larger model's tokens, for a model that has others. Raises ConfigError if the small model has
    recurrent layers.
    """
    if has_states(small.cache_layout):
        raise ConfigError(
            "a model with recurrent layers cannot be the draft model (--draft-model): "
            "after a rejected draft it has no state to continue from"
        )
    (max_context, max_pages, n_pages), n = sizes, config.max_requests
    relative_cost = small.n_parameters / runner.model.n_parameters
    if isinstance(small, Assistant):
        return AssistantModel(small, runner, StepLimits(n, n, n, max_pages), relative_cost)
    if translation is not None:  # it may take more tokens for the same text
        own_sizes = 2 * max_context, n_pages, small.config.n_vocab
        return TextDraftModel(translation, small, backend, config, *own_sizes, relative_cost)
    others = config, max_context, n_pages, runner.model.config.n_vocab, relative_cost
    for kind, made in ((NextTokenLayer, NextTokenDraftModel), (Eagle3, EagleModel)):
        if isinstance(small, kind):
            return made(small, backend, *others)
    return DraftModel(small, backend, *others)
