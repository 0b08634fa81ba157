"""Hooks on a model's taps: the callbacks that see activations by name, and may edit them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np

from kukri.errors import HookError
from kukri.kernels.arrays import FloatArray

# A hook sees (its full name, the array) and may edit the array in place or return a replacement.
Hook = Callable[[str, FloatArray], FloatArray | None]


def tap_name(name: str, layer: int | None) -> str:
    """The full hook name: `blocks.3.hook_resid_pre`, or `name` itself outside the blocks."""
    return name if layer is None else f"blocks.{layer}.{name}"


class TapListener(Protocol):
    """A hook that says which taps it needs: the one way by which a computed value is read or edited."""

    @property
    def names(self) -> frozenset[str]:
        """The full names of the taps. It may be shown others, which it leaves as they are."""

    def __call__(self, name: str, x: FloatArray) -> FloatArray | None:
        """See Hook."""


class SequenceListener(TapListener, Protocol):
    """The listener of one sequence, whose rows alone it is shown in a step with others."""

    edits: bool  # False if it only reads

    def begin(self, start: int, n_tokens: int) -> None:
        """Announces a step with `n_tokens` tokens of the sequence from `start` on."""


def in_turn(listeners: Sequence[TapListener]) -> Hook:
    """Return the hook that shows a tap to each listener, as the listeners before left it."""

    def listen(name: str, x: FloatArray) -> FloatArray:
        for listener in listeners:
            replacement = listener(name, x)
            x = x if replacement is None else replacement
        return x

    return listen


def sees_logit_rows(name: str) -> bool:
    """Return True if a tap sees only the rows that give logits, not the rows of all tokens."""
    return not name.startswith("blocks.") and name != "hook_embed"


class Hooks:
    """Hooks by the full name of their tap, in the order in which they were added.

    A program is compiled for `names`, and called with this object as its `on_tap`.
    """

    def __init__(self, hooks: Mapping[str, Hook] | None = None) -> None:
        self._by_name: dict[str, tuple[Hook, ...]] = {}
        self.add(hooks or {})

    @property
    def names(self) -> frozenset[str]:
        """The taps that have a hook."""
        return frozenset(self._by_name)

    def __bool__(self) -> bool:
        """True if there is a hook."""
        return bool(self._by_name)

    def add(self, hooks: Mapping[str, Hook]) -> None:
        """Add each hook to its tap, after earlier hooks."""
        for name, hook in hooks.items():
            self._by_name[name] = (*self._by_name.get(name, ()), hook)

    def remove(self, hooks: Mapping[str, Hook]) -> None:
        """Undoes an `add` with the same argument."""
        for name, hook in hooks.items():
            left = list(self._by_name.pop(name))
            left.remove(hook)
            if left:
                self._by_name[name] = tuple(left)

    def __call__(self, name: str, x: FloatArray) -> FloatArray:
        """x [rows, width] as the hooks of a tap leave it: edited in place, or another array.

        An array without rows (no logits are wanted amid a prompt) is not shown to them. Raises HookError
        naming the hook that raised, or returned anything but float32 of the same shape.
        """
        for hook in self._by_name.get(name, ()) if len(x) else ():
            x = _call(hook, name, x)
        return x


def _call(hook: Hook, name: str, x: FloatArray) -> FloatArray:
    try:
        replacement = hook(name, x.view())  # reshaped or resized, it leaves x as it is
    except Exception as error:
        raise HookError(f"the hook on {name} raised {type(error).__name__}: {error}") from error
    if replacement is None:
        return x
    if not isinstance(replacement, np.ndarray):
        raise HookError(f"the hook on {name} must return an array or None, not {type(replacement).__name__}")
    if replacement.shape != x.shape or replacement.dtype != np.float32:
        raise HookError(
            f"the hook on {name} must return float32 {x.shape}, not {replacement.dtype} {replacement.shape}"
        )
    return replacement
