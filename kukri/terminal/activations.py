"""`kukri activations`: activations of many texts in files."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kukri.errors import ConfigError
from kukri.llm import LLM
from kukri.opening.option_fields import size_bytes
from kukri.terminal.files import read_text
from kukri.terminal.options import StoreOptions
from kukri.terminal.output import n_bytes_text
from kukri.terminal.progress import counting_bar, loading_bar


def store_activations(
    source: Path, model: str | None, options: StoreOptions, loading: dict[str, Any], *, as_json: bool
) -> None:
    """Writes the activations of hooks on the texts of a file, and says how many. See `write_store`."""
    from kukri.interp.store import write_store

    if not options.names or options.out is None:
        raise ConfigError("--names and --out are required, such as --names 'resid_post14' --out DIR")
    texts, shard_bytes = read_texts(source), size_bytes(options.shard_size, "--shard-size")
    with loading_bar() as progress:
        llm = LLM(model, max_context=max(options.context, 16), progress=progress, **loading)
    with llm, counting_bar() as advance:
        report = write_store(
            llm,
            texts,
            options.names,
            options.out,
            model=llm.config.name,
            context=options.context,
            shard_bytes=shard_bytes,
            shuffle=options.shuffle,
            progress=advance,
        )
    if as_json:
        print(json.dumps({"folder": str(options.out), **asdict(report)}))
        return
    print(
        f"{options.out}: {report.n_tokens:,} tokens of {', '.join(report.names)} in {report.n_shards} "
        f"shards, {n_bytes_text(report.n_bytes)}; {report.n_written} of them new"
    )


def read_texts(source: Path) -> list[str]:
    """The texts of a file: of JSON lines the field `text`, else the whole. Raises ConfigError."""
    whole = read_text(source)
    if source.suffix not in (".jsonl", ".ndjson"):
        return [whole]
    texts: list[str] = []
    for i, line in enumerate(whole.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found = json.loads(line)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict) or not isinstance(found.get("text"), str):
            raise ConfigError(f'{source}, line {i} must be a JSON object with a "text"')
        texts.append(found["text"])
    return texts
