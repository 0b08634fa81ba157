"""Recipes: which type each tensor gets, by patterns that users write.

A recipe is a map, in JSON or YAML, from patterns of tensor names, GGUF's or Hugging Face's, to what is done
with the tensors:

    base: Q4_K_M                      # a mix for tensors without a pattern; without it they are kept
    'self_attn\\.[qk]_proj': Q6_K
    ffn_down: {type: Q5_K, layers: '0-3, 28-31'}
    token_embd: keep                  # as it is in the source
    '^blk\\.(\\d+)\\.ln': {rename: 'blk.\\1.attn_norm'}

Of several patterns that match, the last counts. A pattern that matches nothing is an error. Besides `base` a
recipe may state `activations: per-token`, which files keep for their Q4_0 matrices (`kukri.quant.per_token`),
and `about`, a line of description. `kukri quantize --list-recipes` shows the recipes in the folder recipes/.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kukri.dataclass import dataclass
from kukri.errors import ConfigError
from kukri.quant.blocks import WRITTEN
from kukri.quant.mixes import ALIASES, MIXES, Shapes, mix_types
from kukri.quant.per_token import PER_TOKEN
from kukri.quant.types import QUANT_TYPES, QuantType, fitting_type

SHIPPED = Path(__file__).with_name("recipes")
_FACTS = ("base", "activations", "about")  # keys that are not patterns


@dataclass(frozen=True)
class Rule:
    """A rule for tensors whose name has the pattern. `type` None keeps them unchanged."""

    pattern: re.Pattern[str]
    type: QuantType | None
    layers: frozenset[int] | None = None  # None: tensors of all layers and outside the layers
    rename: str | None = None  # GGUF's name for them, \\1 and so on being the pattern's groups

    def matches(self, name: str, other_name: str) -> bool:
        """True for a tensor of this GGUF name, or of this Hugging Face name."""
        if self.layers is not None:
            layer = re.match(r"blk\.(\d+)\.", name)
            if layer is None or int(layer[1]) not in self.layers:
                return False
        return any(self.pattern.search(text) for text in (name, other_name))


@dataclass(frozen=True)
class Recipe:
    """A mix, or None to keep types unchanged, and rules, of which the last that matches counts."""

    base: str | None
    rules: tuple[Rule, ...] = ()
    per_token: bool = False  # activations of Q4_0 matrices with one scale a token
    about: str = ""


def mix_named(name: str) -> str:
    """The mix of that name, in any case, or of its alias. Raises ConfigError for an unknown name."""
    mix = ALIASES.get(name.upper(), name.upper())
    if mix not in MIXES:
        raise ConfigError(
            f"the type {name!r} is not supported: use a recipe (.json or .yaml), or one of "
            f"{', '.join((*MIXES, *shipped_recipes()))}"
        )
    return mix


def shipped_recipes() -> list[str]:
    """Names of the recipes that come with kukri."""
    return sorted(path.stem for path in SHIPPED.glob("*.json"))


def recipe_named(name: str) -> Recipe:
    """The recipe in a .json, .yaml or .yml file, a shipped one, or a mix. Raises ConfigError for others."""
    path = Path(name)
    if path.suffix not in (".json", ".yaml", ".yml"):
        if name.lower() not in shipped_recipes():
            return Recipe(mix_named(name))
        path = SHIPPED / f"{name.lower()}.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {getattr(error, 'strerror', error)}") from None
    pairs = _json_pairs(text, path) if path.suffix == ".json" else _yaml_pairs(text, path)
    keys = [key for key, _ in pairs]
    if again := [key for i, key in enumerate(keys) if key in keys[:i]]:
        raise ConfigError(f"{path}: {again[0]!r} must appear once")
    base, activations, about = (dict(pairs).get(key) for key in _FACTS)
    if base is not None and not isinstance(base, str):
        raise ConfigError(f"{path}: 'base' must name a mix, not {base!r}")
    if activations not in (None, PER_TOKEN):
        raise ConfigError(f"{path}: 'activations' must be {PER_TOKEN!r}, not {activations!r}")
    rules = tuple(_rule(key, value, path) for key, value in pairs if key not in _FACTS)
    return Recipe(
        None if base is None else mix_named(base), rules, activations == PER_TOKEN, str(about or "")
    )


def _json_pairs(text: str, path: Path) -> list[tuple[Any, Any]]:
    def keep(pairs: list[tuple[str, Any]]) -> Any:
        return _Pairs(pairs)

    try:
        made = json.loads(text, object_pairs_hook=keep)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} must be JSON: {error}") from None
    if not isinstance(made, _Pairs):
        raise ConfigError(f"{path} must hold a map from patterns to types")
    return [(key, dict(value) if isinstance(value, _Pairs) else value) for key, value in made]


class _Pairs(list[tuple[str, Any]]):
    """The pairs of a JSON object in order, told apart from a JSON list."""


def _yaml_pairs(text: str, path: Path) -> list[tuple[Any, Any]]:
    import yaml

    try:
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        made = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{path} must be YAML: {' '.join(str(error).split())}") from None
    if not isinstance(made, dict) or not isinstance(node, yaml.MappingNode):
        raise ConfigError(f"{path} must hold a map from patterns to types")
    values = list(made.values())
    if len(values) != len(node.value):
        keys = [key.value for key, _ in node.value]
        raise ConfigError(
            f"{path}: {next(k for i, k in enumerate(keys) if k in keys[:i])!r} must appear once"
        )
    return list(made.items())


def _rule(key: Any, value: Any, path: Path) -> Rule:
    def error(message: str) -> ConfigError:
        return ConfigError(f"{path}: {key!r} {message}")

    facts = value if isinstance(value, dict) else {"type": value}
    if unknown := set(facts) - {"type", "layers", "rename"}:
        raise error(f"must have only type, layers and rename, not {min(map(repr, unknown))}")
    try:
        pattern = re.compile(key)
    except (re.error, TypeError) as wrong:
        raise error(f"must be a pattern: {wrong}") from None
    kind, rename = facts.get("type", "keep"), facts.get("rename")
    if not isinstance(kind, str) or (kind != "keep" and kind.upper() not in WRITTEN):
        raise error(f"must ask for keep or one of {', '.join(WRITTEN)}, not {kind!r}")
    if rename is not None and not isinstance(rename, str):
        raise error(f"must have a text as new name, not {rename!r}")
    type = None if kind == "keep" else QUANT_TYPES[kind.upper()]
    return Rule(pattern, type, _layers(facts.get("layers"), error), rename)


def _layers(stated: Any, error: Any) -> frozenset[int] | None:
    """`0-3, 28` or a list of numbers as a set."""
    if stated is None:
        return None
    ranges = [str(part).strip() for part in (stated if isinstance(stated, list) else str(stated).split(","))]
    layers: set[int] = set()
    for part in ranges:
        match = re.fullmatch(r"(\d{1,4})(?:\s*-\s*(\d{1,4}))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise error(f"must have layers like 0-3, 28, not {part!r}")
        layers.update(range(int(match[1]), int(match[2] or match[1]) + 1))
    return frozenset(layers)


def apply_recipe(
    recipe: Recipe, shapes: Shapes, queries_per_key: int, other_names: Mapping[str, str]
) -> tuple[dict[str, QuantType], dict[str, str]]:
    """Return the new types and the new names of the tensors that change, by GGUF name.

    `other_names` are Hugging Face's. Types are only for matrices, with stand-ins as in a mix. Raises
    ConfigError for a pattern that matches nothing it could change.
    """
    types = mix_types(recipe.base, shapes, queries_per_key) if recipe.base else {}
    renames: dict[str, str] = {}
    for rule in recipe.rules:
        matched = [name for name in shapes if rule.matches(name, other_names.get(name, ""))]
        if rule.rename is None:
            matched = [name for name in matched if len(shapes[name]) > 1]
        if not matched:
            raise ConfigError(f"the pattern {rule.pattern.pattern!r} must match a tensor that it can change")
        for name in matched:
            if rule.rename is not None:
                renames[name] = _renamed(rule, name, other_names.get(name, ""))
            if len(shapes[name]) > 1:
                types.pop(name, None)
                if rule.type is not None:
                    types[name] = fitting_type(rule.type, shapes[name][-1]) or QUANT_TYPES["F16"]
    return types, renames


def _renamed(rule: Rule, name: str, other_name: str) -> str:
    match = rule.pattern.search(name) or rule.pattern.search(other_name)
    assert match is not None
    assert rule.rename is not None
    try:
        return match.expand(rule.rename)
    except (re.error, IndexError) as error:
        raise ConfigError(f"{rule.rename!r} of {rule.pattern.pattern!r} cannot be used: {error}") from None
