"""`kukri inspect`: what is in a model file. Reads its headers alone, so it takes files of any size."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from math import prod
from pathlib import Path
from typing import Any

from kukri.errors import UnsupportedError
from kukri.formats import hub
from kukri.formats.config_gguf import model_config
from kukri.formats.gguf import GGUFFile, GGUFTensor
from kukri.terminal.output import n_bytes_text
from kukri.terminal.tables import print_facts, print_table

KINDS = ("embedding", "attention", "mlp", "norm", "other")


def show_model(model: str | None, *, with_tensors: bool, as_json: bool) -> None:
    """Prints the report on a model file, as tables or as one JSON object."""
    report = model_report(hub.resolve(model), with_tensors=with_tensors)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    _print_report(report)


def model_report(path: Path, *, with_tensors: bool = False) -> dict[str, Any]:
    """Everything `kukri inspect` shows, ready for JSON. Raises FormatError for a broken file.

    `config` is None for a model that kukri cannot run; `unsupported` then says why.
    """
    with GGUFFile(path) as file:
        tensors = list(file.tensors.values())
        report: dict[str, Any] = {
            "path": str(path),
            "file_bytes": path.stat().st_size,
            "gguf_version": file.version,
            "n_metadata_keys": len(file.metadata),
            "n_tensors": len(tensors),
            "n_parameters": sum(prod(tensor.shape) for tensor in tensors),
            **_config_report(file),
            "types": _by_type(tensors),
            "layers": _by_layer(tensors),
            "metadata": {key: _shown(file, key) for key in file.metadata},
        }
    if with_tensors:
        report["tensors"] = [
            {
                "name": tensor.name,
                "type": tensor.type.name,
                "shape": list(tensor.shape),
                "offset": tensor.offset,
                "n_bytes": tensor.n_bytes,
            }
            for tensor in tensors
        ]
    return report


def _config_report(file: GGUFFile) -> dict[str, Any]:
    try:
        config = model_config(file)
    except UnsupportedError as error:
        return {"config": None, "unsupported": str(error), "kv_bytes_per_token": None}
    facts = asdict(config)
    facts["layers"] = [asdict(layer) for layer in config.layers]
    return {"config": facts, "unsupported": None, "kv_bytes_per_token": config.kv_bytes_per_token}


def _by_type(tensors: Iterable[GGUFTensor]) -> list[dict[str, Any]]:
    """A row for each weight type, the largest first."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        row = rows.setdefault(
            tensor.type.name,
            {
                "type": tensor.type.name,
                "bits_per_weight": tensor.type.bits_per_weight,
                "n_tensors": 0,
                "n_parameters": 0,
                "n_bytes": 0,
            },
        )
        row["n_tensors"] += 1
        row["n_parameters"] += prod(tensor.shape)
        row["n_bytes"] += tensor.n_bytes
    return sorted(rows.values(), key=lambda row: -row["n_bytes"])


def _by_layer(tensors: Iterable[GGUFTensor]) -> list[dict[str, Any]]:
    """A row for each layer and for each tensor outside the layers: parameters by kind, and bytes."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        layer, kind = place_of(tensor.name)
        row = rows.setdefault(
            layer, {"layer": layer, **dict.fromkeys(KINDS, 0), "n_parameters": 0, "n_bytes": 0}
        )
        row[kind] += prod(tensor.shape)
        row["n_parameters"] += prod(tensor.shape)
        row["n_bytes"] += tensor.n_bytes
    return sorted(rows.values(), key=lambda row: _order(row["layer"]))


def place_of(tensor_name: str) -> tuple[str, str]:
    """(layer, kind) of a tensor: `blk.3.attn_q.weight` -> ("3", "attention")."""
    parts = tensor_name.split(".")
    in_layer = parts[0] == "blk" and len(parts) > 2 and parts[1].isdecimal()
    layer, name = (str(int(parts[1])), parts[2]) if in_layer else (parts[0], parts[0])
    if "norm" in name:
        return layer, "norm"
    for prefix, kind in (
        ("attn", "attention"),
        ("ffn", "mlp"),
        ("token_embd", "embedding"),
        ("output", "embedding"),
    ):
        if name.startswith(prefix):
            return layer, kind
    return layer, "other"


def _order(layer: str) -> tuple[int, int, str]:
    """Embedding first, then the layers by number, then the rest."""
    if layer == "token_embd":
        return 0, 0, layer
    return (1, int(layer), "") if layer.isdecimal() else (2, 0, layer)


def _shown(file: GGUFFile, key: str) -> Any:
    """A metadata value; of an array just how long it is."""
    n_items = file.metadata.n_items(key)
    return file.metadata[key] if n_items is None else f"array of {n_items}"


def _print_report(report: dict[str, Any]) -> None:
    config = report["config"]
    print_facts(_headline_facts(report))
    if config is None:
        print_facts([("not runnable", report["unsupported"])])
    else:
        print_facts(_config_facts(config, report["kv_bytes_per_token"]))
    kinds = [kind for kind in KINDS if any(row[kind] for row in report["layers"])]
    rows = [
        [
            row["layer"],
            *(_count(row[kind]) for kind in kinds),
            _count(row["n_parameters"]),
            f"{row['n_bytes']:,}",
        ]
        for row in report["layers"]
    ]
    n_bytes = sum(row["n_bytes"] for row in report["layers"])
    sums = [_count(sum(row[kind] for row in report["layers"])) for kind in kinds]
    rows.append(["total", *sums, _count(report["n_parameters"]), f"{n_bytes:,}"])
    print_table("parameters", ["layer", *kinds, "all", "bytes"], rows)
    types = [
        [
            row["type"],
            f"{row['bits_per_weight']:g}",
            str(row["n_tensors"]),
            _count(row["n_parameters"]),
            f"{row['n_bytes']:,}",
        ]
        for row in report["types"]
    ]
    print_table("weight types", ["type", "bits", "tensors", "parameters", "bytes"], types)
    if "tensors" in report:
        listed = [
            [tensor["name"], tensor["type"], " x ".join(map(str, tensor["shape"])), f"{tensor['n_bytes']:,}"]
            for tensor in report["tensors"]
        ]
        print_table("tensors", ["name", "type", "shape", "bytes"], listed)


def _headline_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    metadata = report["metadata"]
    return [
        (
            "file",
            f"{report['path']} ({n_bytes_text(report['file_bytes'])}, GGUF version {report['gguf_version']})",
        ),
        ("name", str(metadata.get("general.name", "-"))),
        ("architecture", str(metadata.get("general.architecture", "-"))),
        ("parameters", f"{report['n_parameters']:,} in {report['n_tensors']} tensors"),
    ]


def _config_facts(config: dict[str, Any], kv_bytes_per_token: int) -> list[tuple[str, str]]:
    rope, max_context = config["rope"], config["max_context"]
    attention = f"{config['n_heads']} heads of {config['d_head']}, {config['n_kv_heads']} for keys and values"
    if windows := {layer["window"] for layer in config["layers"]} - {None}:
        attention += f", window {', '.join(map(str, sorted(windows)))} tokens"
    rotary = f"theta {rope['theta']:g}, {rope['rotary_dim']} dimensions"
    if n_nope := sum(not layer["use_rope"] for layer in config["layers"]):
        rotary += f", {n_nope} layers without"
    tied = ", embedding tied to the head" if config["tie_embeddings"] else ""
    full = n_bytes_text(kv_bytes_per_token * max_context)
    return [
        ("layers", f"{config['n_layers']} of width {config['d_model']}, MLP {config['d_ffn']}"),
        ("attention", attention),
        ("rope", rotary),
        ("vocabulary", f"{config['n_vocab']:,} tokens{tied}"),
        ("context", f"{max_context:,} tokens"),
        ("KV cache", f"{kv_bytes_per_token:,} bytes per token, {full} when full"),
    ]


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"
