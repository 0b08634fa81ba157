"""Lenses: facts that files of both formats state, each one row that reads and writes either format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from math import isclose
from typing import Any, Literal

import numpy as np

from kukri.config import LayerConfig, ModelConfig
from kukri.dataclass import dataclass, replace
from kukri.errors import UnsupportedError
from kukri.models.keys import Keys

Format = Literal["gguf", "hf"]
NOPE_KEY = "attention.nope_layers"  # kukri's own in GGUF: a list of the layers without RoPE
WINDOW_KEYS: dict[Format, str] = {"gguf": "attention.sliding_window", "hf": "sliding_window"}


class Lens:
    """One fact of an architecture (`Architecture.lenses`)."""

    def keys(self, form: Format) -> Set[str]:
        """The keys that it reads."""
        return frozenset()

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        """Sets fields of a `ModelConfig` to be. Raises FormatError and UnsupportedError naming a key."""

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        """Sets the keys of a file. Raises UnsupportedError for what no key says."""


@dataclass(frozen=True)
class Number(Lens):
    """A number: its field in `ModelConfig` (`mixture.tolerance` is in a part of it), and its keys.

    `load` makes ours of config.json's, given the other fields, and `store` config.json's of ours. A GGUF file
    has ours under its key, or config.json's if both are `alike`. With "" GGUF has no key and means `usual`,
    config.json's number; with None other things of a GGUF file say it.
    """

    field: str
    hf: str
    gguf: str | None = None
    usual: float | None = None
    kind: type = float
    most: float = 1e4
    load: Callable[[Any, Mapping[str, Any]], Any] = lambda value, facts: value
    store: Callable[[Any, ModelConfig], Any] = lambda value, config: value
    alike: bool = False

    def keys(self, form: Format) -> Set[str]:
        return {key for key in (self.hf if form == "hf" else self.gguf,) if key}

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        if form == "hf" or self.alike:
            (key,) = self.keys(form)
            if self.kind is bool:
                stated: float = keys.flag(key)
            else:
                stated = keys.whole(key) if self.kind is int else keys.positive(key, most=self.most)
            value = self.load(stated, facts)
        elif self.gguf is None:
            return
        else:
            usual = None if self.usual is None else self.load(self.usual, facts)
            value = keys.positive(self.gguf, usual, most=self.most) if self.gguf else usual
        part, _, field = self.field.rpartition(".")
        facts |= {part: replace(facts[part], **{field: value})} if part else {field: value}

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        ours: Any = config
        for name in self.field.split("."):
            ours = getattr(ours, name)
        if form == "hf" or self.alike:
            keys |= dict.fromkeys(self.keys(form), self.store(ours, config))
        elif self.gguf:
            keys[self.gguf] = float(ours)
        elif self.usual is not None and not isclose(self.store(ours, config), self.usual, rel_tol=1e-5):
            raise UnsupportedError(f"a {self.hf} other than {self.usual:g} is not supported in GGUF")


@dataclass(frozen=True)
class Rotating(Lens):
    """Which layers rotate, by a rule, which may only hold in `forms`, and in files that state a window.

    kukri's key in GGUF says it only where it says something else.
    """

    rule: Callable[[LayerConfig], bool]
    needs_window: bool = False
    forms: tuple[Format, ...] = ("gguf", "hf")

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        if form in self.forms and (not self.needs_window or keys.value(WINDOW_KEYS[form])):
            set_rotating(facts, map(self.rule, facts["layers"]))

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        holds = not self.needs_window or any(layer.window for layer in config.layers)
        if form == "gguf" and holds:
            state_rotating(config, keys, map(self.rule, config.layers))


def set_rotating(facts: dict[str, Any], rotating: Iterable[bool]) -> None:
    """Set which layers rotate, in the fields of a `ModelConfig` to be."""
    layers = zip(facts["layers"], rotating, strict=True)
    facts["layers"] = tuple(replace(layer, use_rope=rotates) for layer, rotates in layers)


def state_rotating(config: ModelConfig, keys: dict[str, Any], usual: Iterable[bool]) -> None:
    """Set kukri's key in a GGUF file that lists the layers without RoPE.

    The key is left out if a reader takes the layers that rotate to be the `usual` ones. An empty list says
    that all rotate.
    """
    rotating = [layer.use_rope for layer in config.layers]
    keys.pop(NOPE_KEY, None)
    if rotating != [*usual]:
        keys[NOPE_KEY] = np.array([i for i, rotates in enumerate(rotating) if not rotates], np.int32)


@dataclass(frozen=True)
class Stated(Lens):
    """A key that says nothing here, and that other readers of a format want."""

    form: Format
    key: str
    value: Any

    def write(self, config: ModelConfig, form: Format, keys: dict[str, Any]) -> None:
        if form == self.form:
            keys.setdefault(self.key, self.value)


class Fixed(Stated):
    """A key that must hold this, or be absent or null, and that other readers want."""

    def keys(self, form: Format) -> Set[str]:
        return {self.key} if form == self.form else frozenset()

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        if form == self.form and keys.value(self.key) is not None:
            keys.expect(self.key, self.value)


@dataclass(frozen=True)
class Given(Lens):
    """A field that is the same in every model of an architecture, whatever its files say."""

    field: str
    value: Any

    def read(self, keys: Keys, form: Format, facts: dict[str, Any]) -> None:
        facts[self.field] = self.value


ROTATING_WINDOWS = Rotating(lambda layer: bool(layer.window))
