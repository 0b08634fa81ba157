"""`kukri fit`: the weight types, contexts and KV types of a model next to the memory that is there."""

from __future__ import annotations

import json
from typing import Any

from kukri.errors import ConfigError, printable
from kukri.formats import hub
from kukri.opening.memory import Choice, can_choose, is_open_name, table_of_choices
from kukri.opening.model_options import ModelOptions
from kukri.terminal.output import n_bytes_text
from kukri.terminal.progress import loading_bar, progress_bar
from kukri.terminal.tables import print_table

_SPEED_CONTEXT = 1024  # tokens, enough for a measurement


def show_fit(model: str | None, loading: dict[str, Any], *, with_speed: bool, as_json: bool) -> None:
    """Prints the choices, marks the one that commands take and says why; `loading` are options of LLM.

    With `with_speed` the chosen one is loaded and measured. Raises KukriError if the model cannot run, or is
    to be measured and not there.
    """
    options = ModelOptions(model=model, fit=True, **loading)
    if not can_choose(options):
        raise ConfigError("--device, --devices, --stages and --backend are not supported by fit: use the CPU")
    if with_speed and is_open_name(model):
        raise ConfigError(f"the model {model!r} must be in the cache for --speed: run `kukri pull {model}`")
    rows, chosen, reason = table_of_choices(options)
    speed = _speed(chosen) if with_speed and chosen is not None else None
    if as_json:
        facts = {"model": model, "free_bytes": rows[0].free_bytes, "reason": reason, "speed": speed}
        choices = [{**_as_dict(one), "is_chosen": one == chosen} for one in rows]
        print(json.dumps({**facts, "choices": choices}, ensure_ascii=False))
        return
    table = [
        [
            f"{'*' if one == chosen else ' '} {one.weights}",
            f"{one.context:,}",
            one.kv_type,
            *map(n_bytes_text, (one.found.weight_bytes, one.kv_bytes, one.n_bytes)),
            "yes" if one.longest >= one.context else "no",
        ]
        for one in rows
    ]
    columns = ["  weights", "context", "KV type", "weights", "keys and values", "in all", "fits"]
    print_table(f"{n_bytes_text(rows[0].free_bytes)} of memory are free", columns, table)
    reason = reason or "the default is chosen, because it has enough context"
    print(f"\n{'nothing fits: ' if chosen is None else '* '}{printable(reason)}")
    if speed is not None:
        print("speed: {:,.0f} tokens/s of prompts, {:,.1f} of answers".format(*speed.values()))


def _as_dict(one: Choice) -> dict[str, Any]:
    return {
        "model": one.options.model,
        "quantize": one.options.quantize,
        "weights": one.weights,
        "context": one.context,
        "kv_type": one.kv_type,
        "weight_bytes": one.found.weight_bytes,
        "kv_bytes": one.kv_bytes,
        "n_bytes": one.n_bytes,
        "fits": one.longest >= one.context,
    }


def _speed(chosen: Choice) -> dict[str, float]:
    """Tokens per second with the chosen options, by a measurement of some seconds."""
    from kukri.bench.offline import Kukri

    options = {**vars(chosen.options), "fit": False, "speculation": "off", "max_requests": 1}
    path, n_threads = hub.resolve(options.pop("model")), options.pop("n_threads")
    context = min(options.pop("max_context") or chosen.context, _SPEED_CONTEXT)
    with loading_bar() as progress:
        kukri = Kukri(path, n_threads, context, progress=progress, **options)
    try:
        with progress_bar(2) as advance:
            return kukri.rough_speed(lambda text: advance(1, text))
    finally:
        kukri.close()
