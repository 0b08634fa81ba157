"""Which layers a rule names, and the RoPE of those with a window: for both formats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.errors import UnsupportedError
from kukri.models import Architecture


def is_nth(layer: int, interval: int) -> bool:
    """True for each layer at the end of `interval` layers; 0: for none."""
    return interval > 0 and layer % interval == interval - 1


def every_nth_full(n_layers: int, interval: int, architecture: Architecture) -> list[bool]:
    """Which layers have a window: all but one of each `interval`, the last or the first; 0: all."""
    return [not is_nth(i - architecture.is_full_first, interval) for i in range(n_layers)]


def one_sided(window: int) -> int:
    """Tokens that an encoder's token sees on each side, itself among them, by the window of both sides."""
    return window // 2 + 1


def with_local_rope(layers: Sequence[LayerConfig], rope: RopeConfig) -> tuple[LayerConfig, ...]:
    """The layers, those with a window rotating by `rope`."""
    return tuple(replace(layer, rope=rope) if layer.window else layer for layer in layers)


def local_rope(config: ModelConfig, architecture: Architecture) -> RopeConfig | None:
    """The RoPE of layers with a window, if the architecture's files state it and there are any.

    Raises UnsupportedError if layers rotate in ways for which no file has a key.
    """
    ropes = {layer.rope for layer in config.layers if layer.window} if architecture.local_rope else set()
    others = {layer.rope for layer in config.layers if not (architecture.local_rope and layer.window)}
    local = ropes.pop() if len(ropes) == 1 else None
    local_head = next((layer.d_head for layer in config.layers if layer.window), None)
    if (
        ropes
        or others - {None}
        or (local and local.scaling is not None)
        or (local and local.rotary_dim not in (config.rope.rotary_dim, local_head))
    ):
        raise UnsupportedError(f"files of {architecture.name} have no key for RoPE in only some layers")
    return local
