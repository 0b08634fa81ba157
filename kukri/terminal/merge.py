"""`kukri merge`: a model with an adapter in its weights, as a file of its own."""

from __future__ import annotations

import json
from pathlib import Path

from kukri.errors import ConfigError
from kukri.formats.adapters import read_adapter
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.convert import write
from kukri.formats.merge import with_adapter, write_merged_directory
from kukri.models import load_model
from kukri.terminal.convert import check_target, opened, progress, source_path
from kukri.terminal.output import say
from kukri.terminal.progress import progress_bar
from kukri.terminal.tables import print_facts


def merge_model(model: str | None, adapter: Path, target: Path | None, *, as_json: bool) -> None:
    """Writes a model with an adapter merged: a GGUF file, or a directory like the one it is made from.

    Tensors keep their types, so that those of a packed file are quantized again.
    """
    if target is None:
        raise ConfigError("-o TARGET is required: a .gguf file, or a directory, to write")
    source = source_path(model)
    is_file = target.suffix == ".gguf"
    if not is_file and not source.is_dir():
        raise ConfigError(f"-o must be a .gguf file, because {source} is one, not {target}")
    if not is_file and target.exists():
        raise ConfigError(f"{target} already exists: name a new directory")
    if is_file:
        check_target(source, target)
    with open_checkpoint(source) as checkpoint:
        config = checkpoint.config
        changes = read_adapter(adapter.expanduser(), load_model(checkpoint.weights(config), config))
    n_packed = 0
    if is_file:
        with opened(source) as conversion:
            plan = with_adapter(conversion, changes)
            kept = {*map(id, conversion.steps)}
            n_packed = sum(step.target.block_size > 1 for step in plan.steps if id(step) not in kept)
            with progress(plan) as on_tensor:
                write(plan, target, on_tensor)
    else:
        with progress_bar(len(changes.updates)) as advance:
            write_merged_directory(source, target, config, changes, lambda name: advance(1, name))
    n = len(changes.updates)
    if as_json:
        print(json.dumps({"path": str(target), "tensors": n, "rank": changes.rank}))
    else:
        print_facts([("wrote", str(target)), ("merged", f"{n} tensors, rank {changes.rank}")])
    if n_packed:
        say(
            f"note: {n_packed} merged tensors were quantized again, which may lose more than the adapter"
            " adds: merge into the original weights, and quantize then",
        )
