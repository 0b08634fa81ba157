"""What a model loses on its way from one format to the other: one list, which `kukri convert` prints.

All other tensors of floats, and each key that a model reads, come back to the bit.
"""

from __future__ import annotations

from collections.abc import Callable

from kukri.config import EmbeddingConfig, ModelConfig
from kukri.dataclass import dataclass
from kukri.formats.tensor_forms import table
from kukri.models import ARCHITECTURES
from kukri.models.stored import LOG_OF_NEGATIVE


@dataclass(frozen=True)
class Loss:
    """A loss, and whether a model has it."""

    text: str
    applies: Callable[[ModelConfig, EmbeddingConfig], bool]
    to: tuple[str, ...] = ("gguf", "hf")  # the formats on the way to which it occurs


LOSSES = (
    Loss(
        "decays of recurrent layers pass through a logarithm: their last bits may differ",
        lambda config, _: any(row.hf is LOG_OF_NEGATIVE for row in table(config.architecture).values()),
    ),
    Loss(
        "weights of norms are stored as what is added to 1: bits below the lowest bit of 1 are lost",
        lambda config, _: ARCHITECTURES[config.architecture].hf_norm_offset != 0,
    ),
    Loss(
        "multipliers become a part of the matrices that they multiply, and are 1 from then on",
        lambda config, _: ARCHITECTURES[config.architecture].gguf_factors is not None,
        to=("gguf",),
    ),
    Loss(
        "the settings of embeddings (pooling, prompts, limits) are left out: copy modules.json and the files"
        " next to it from the original checkpoint",
        lambda _, embedding: embedding != EmbeddingConfig(),
        to=("hf",),
    ),
)


def losses(config: ModelConfig, embedding: EmbeddingConfig, to: str) -> list[str]:
    """What a model loses on its way to a format, "gguf" or "hf"."""
    return [loss.text for loss in LOSSES if to in loss.to and loss.applies(config, embedding)]
