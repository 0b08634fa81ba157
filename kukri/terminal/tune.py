"""`kukri tune-recipe`: a type for each tensor, by its loss."""

from __future__ import annotations

import json
from pathlib import Path

from kukri.errors import ConfigError
from kukri.evaluate.text import read_text
from kukri.evaluate.tuning import Tuned, recipe_of, tune
from kukri.formats import hub
from kukri.host.files import write_text
from kukri.opening.option_fields import size_bytes
from kukri.quant.blocks import WRITTEN
from kukri.quant.types import QUANT_TYPES, QuantType
from kukri.terminal.evaluate import type_list
from kukri.terminal.files import check_parent, writing
from kukri.terminal.options import TuneOptions
from kukri.terminal.output import n_bytes_text
from kukri.terminal.progress import progress_bar
from kukri.terminal.tables import print_facts, print_table


def write_tuned_recipe(model: str | None, options: TuneOptions, *, as_json: bool) -> None:
    """Measures a model's tensors and writes the recipe that fits them into a size."""
    target = options.output
    if target.suffix not in (".json", ".yaml", ".yml"):
        raise ConfigError(f"a recipe must be a .yaml or .json file, not {target.name}")
    check_parent(target)
    wanted, words = size_bytes(options.size, "--size"), read_text(options.text)
    chosen = [_type(name) for name in type_list(options.types)]
    path = hub.resolve(model)
    with progress_bar(1000) as advance:
        made = tune(
            path,
            words,
            wanted,
            chosen,
            max_tokens=options.max_tokens,
            n_threads=options.n_threads,
            on_trial=lambda i, n: advance(1000 * (i + 1) // n - 1000 * i // n, "trying tensors"),
        )
    recipe = recipe_of(made.types)
    _write(target, recipe)
    if as_json:
        facts = {"path": str(target), "n_bytes": made.n_bytes, "recipe": recipe, "measured": made.measured}
        print(json.dumps(facts))
        return
    print_facts([("wrote", str(target)), ("weights", n_bytes_text(made.n_bytes))])
    print_table("types by kind of tensor", ["tensor", "types", "KL of one alone"], _rows(made))


def _type(name: str) -> QuantType:
    type = QUANT_TYPES.get(name.upper())
    if type is None or type.name not in WRITTEN or type.name == "Q8_K":
        raise ConfigError(f"the type {name!r} is not supported: use {', '.join(WRITTEN)}")
    return type


def _write(target: Path, recipe: dict[str, str]) -> None:
    import yaml

    text = (
        json.dumps(recipe, indent=2) if target.suffix == ".json" else yaml.safe_dump(recipe, sort_keys=False)
    )
    with writing(target):
        write_text(target, text + "\n" * (not text.endswith("\n")))


def _rows(made: Tuned) -> list[list[str]]:
    kinds: dict[str, list[str]] = {}
    for name in made.types:
        kinds.setdefault(name.split(".", 2)[-1] if name.startswith("blk.") else name, []).append(name)
    rows = []
    for kind, names in kinds.items():
        counts: dict[str, int] = {}
        for name in names:
            counts[made.types[name].name] = counts.get(made.types[name].name, 0) + 1
        losses = [made.measured[name] for name in names]
        text = ", ".join(f"{n} {type}" for type, n in sorted(counts.items()))
        rows.append([kind, text, f"{min(losses):.6f} to {max(losses):.6f}"])
    return rows
