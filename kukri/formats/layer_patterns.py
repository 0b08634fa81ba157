"""What files of either format say of their layers: patterns of them, and the RoPE of those with a window."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.errors import UnsupportedError
from kukri.models import Architecture

Pattern = Sequence[bool] | int  # a truth for each layer, or n: for all but one of each n; 0: for all


def spread(pattern: Pattern, n_layers: int, is_false_first: bool = False) -> list[bool]:
    """A pattern's truth for each layer; the one of each n that is false is the last, or the first."""
    if not isinstance(pattern, int):
        return list(pattern)
    return [not pattern or (i - is_false_first) % pattern != pattern - 1 for i in range(n_layers)]


def interval(truths: Sequence[bool], among: Iterable[int], is_false_first: bool = False) -> int | None:
    """The first of these n whose pattern the truths are."""
    truths = list(truths)
    return next((n for n in among if spread(n, len(truths), is_false_first) == truths), None)


def layers_of(
    architecture: Architecture,
    n_layers: int,
    *,
    window: int | None,
    windowed: Pattern,
    recurrent: Pattern | None,
    dense: Collection[int],
    sizes: Sequence[Mapping[str, Any]] = (),
) -> tuple[LayerConfig, ...]:
    """The layers of a model, by what a file of either format says of them.

    `window` is the size that the file states, None without one, and `windowed` which layers have it;
    `recurrent` is None if none are; the layers `dense` have an MLP where others have a mixture. `sizes` are
    fields of each layer that differ from the model's. What else a file says of layers is read by its
    architecture (`read_hf`, `read_gguf`).
    """
    if window is not None and not architecture.is_causal:
        window = one_sided(window)
    has_window = spread(windowed, n_layers, architecture.is_full_first)
    is_recurrent = [False] * n_layers if recurrent is None else spread(recurrent, n_layers)
    return tuple(
        LayerConfig(
            architecture.has_rope,
            window if has_window[i] else None,
            is_recurrent=is_recurrent[i],
            is_dense=i in dense,
            **(sizes[i] if sizes else {}),
        )
        for i in range(n_layers)
    )


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
        raise UnsupportedError(f"RoPE in only some layers is not supported by files of {architecture.name}")
    return local
