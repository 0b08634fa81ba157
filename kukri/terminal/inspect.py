"""`kukri inspect`: the contents of a model's files. Reads only headers, so it takes files of any size."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from kukri.config import RopeScaling
from kukri.errors import KukriError, UnsupportedError, printable
from kukri.formats import hub
from kukri.formats.facts import SCALING_FIELDS
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.tensor_names import gguf_name, hf_name
from kukri.formats.gguf.weights import GGUFWeights
from kukri.formats.headers import Headers, StoredTensor, read_headers
from kukri.formats.huggingface.weights import SafetensorsWeights
from kukri.formats.tensor_forms import row_of
from kukri.kernels.paged_kv import state_bytes, token_bytes
from kukri.models import load_model
from kukri.models.rope import attention_factor
from kukri.models.weights import TakenWeights
from kukri.terminal.module_tree import Module, class_names, module_tree, tree_lines
from kukri.terminal.output import n_bytes_text
from kukri.terminal.tables import print_facts, print_table

KINDS = ("embedding", "attention", "recurrent", "mlp", "norm", "head", "other")
_LAYER = re.compile(r"(?:model\.|transformer\.|backbone\.)?layers\.(\d+)\.(.+)|blk\.(\d+)\.(.+)")


def show_model(
    model: str | None,
    *,
    with_tree: bool = False,
    with_parameters: bool = False,
    with_tensors: bool = False,
    brief: bool = False,
    as_json: bool,
) -> None:
    """Prints the report on a model, as text or as one JSON object.

    The tree and the table of parameters come alone if requested, and with all the rest if not; `brief` prints
    neither.
    """
    headers = read_headers(hub.resolve(model))
    names, problem = _names_of(headers)
    root = _tree_of(headers, names)
    report = _report(headers, names, problem, root, with_tensors=with_tensors)
    if as_json:
        print(json.dumps(report, ensure_ascii=False))
        return
    chosen = with_tree or with_parameters
    if not chosen:
        _print_facts(report)
    if brief:
        return
    if with_tree or not chosen:
        print(*[] if chosen else ["\nmodules"], *map(printable, tree_lines("", root)), sep="\n")
    if with_parameters or not chosen:
        _print_parameters(report)
    if not chosen:
        _print_types(report)
    if with_tensors:
        _print_tensors(report)


def _names_of(headers: Headers) -> tuple[dict[str, str], KukriError | None]:
    """Hugging Face's name of each tensor, if there is one, and why the model cannot run."""
    config, in_gguf = headers.config, headers.form != "safetensors"
    architecture = config.architecture if config else "llama"
    names = {
        tensor.name: _guessed(tensor.name, architecture) if in_gguf else tensor.name
        for tensor in headers.tensors
    }
    if config is None or headers.problem is not None:
        return names, headers.problem
    problem: KukriError | None = None
    try:  # if a tensor is missing, or of another shape, show what there is
        if in_gguf:
            with GGUFFile(headers.path) as gguf:
                taken = TakenWeights(GGUFWeights(gguf, config))
                try:
                    load_model(taken, config)
                finally:
                    tensors = (name for name in taken.parameters if not row_of(name, architecture).gguf_key)
                    names |= {gguf_name(name, architecture): name for name in tensors}
        else:
            load_model(SafetensorsWeights(headers.path, config), config)  # matrices are not read
    except KukriError as error:
        problem = error
    return names, problem


def _guessed(name: str, architecture: str) -> str:
    try:
        return hf_name(name, architecture)
    except UnsupportedError:
        return name


def _tree_of(headers: Headers, names: Mapping[str, str]) -> Module:
    config, stated = headers.config, headers.stated.get("architectures")
    architecture = config.architecture if config else _architecture(headers)
    root, prefix = class_names(
        architecture, [s for s in stated if isinstance(s, str)] if isinstance(stated, list) else []
    )
    tensors = {names[tensor.name]: tensor for tensor in headers.tensors}
    tied = config is not None and config.tie_embeddings and config.head.kind == "language_model"
    return module_tree(tensors, root, prefix, config.norm_eps if config else None, tied)


def _architecture(headers: Headers) -> str:
    key = "model_type" if headers.form == "safetensors" else "general.architecture"
    return str(headers.stated.get(key, "-"))


def _report(
    headers: Headers,
    names: Mapping[str, str],
    problem: KukriError | None,
    root: Module,
    *,
    with_tensors: bool,
) -> dict[str, Any]:
    """Everything `kukri inspect` shows, ready for JSON.

    `config` is None for a model that kukri cannot run; `unsupported` then says why.
    """
    report: dict[str, Any] = {
        "path": str(headers.path),
        "format": headers.form,
        "files": [file.name for file in headers.files],
        "file_bytes": headers.file_bytes,
        "n_metadata_keys": len(headers.stated),
        "n_tensors": len(headers.tensors),
        "n_parameters": headers.n_parameters,
        "n_active_parameters": headers.n_active_parameters,
        "buffers": [tensor.name for tensor in headers.buffers],
        "architecture": _architecture(headers),
        "unsupported": None if problem is None else str(problem),
        "unknown_keys": list(headers.unknown),
        **_config_report(headers),
        "types": _by_type(headers.tensors),
        "layers": _by_layer(headers.tensors, names),
        "modules": root.as_dict(),
        "metadata": headers.stated,
    }
    if with_tensors:
        report["tensors"] = [
            {
                "name": tensor.name,
                "type": tensor.type,
                "shape": list(tensor.shape),
                "file": tensor.file,
                "offset": tensor.offset,
                "n_bytes": tensor.n_bytes,
            }
            for tensor in headers.tensors
        ]
    return report


def _config_report(headers: Headers) -> dict[str, Any]:
    config = headers.config
    if config is None:
        return {"config": None, "kv_bytes_per_token": None}
    scaling = config.rope.scaling
    try:
        layout = headers.cache_layout
    except KukriError:  # a layer that is larger than the model: `unsupported` says what is wrong
        layout = ()
    kv_bytes = token_bytes(layout, "f16")
    return {
        "config": asdict(config),
        "rope_layers": "".join("R" if layer.use_rope else "N" for layer in config.layers),
        "window_layers": "".join("." if layer.window is None else "w" for layer in config.layers),
        "rope_scaling": None if scaling is None else _scaling_report(scaling),
        "kv_bytes_per_token": kv_bytes,
        "kv_bytes_full_context": kv_bytes * config.max_context,
        "kv_bytes_per_token_mha": kv_bytes * config.n_heads // config.n_kv_heads,
        "recurrent_layers": "".join(
            "S" if layer.is_recurrent else "B" if layer.has_state else "M" if layer.is_mlp else "A"
            for layer in config.layers
        ),
        "state_bytes": state_bytes(layout),
        "gqa_saves": 1 - config.n_kv_heads / config.n_heads,
    }


def _scaling_report(scaling: RopeScaling) -> dict[str, Any]:
    """The parameters that a kind of scaling reads, and the attention factor that follows."""
    names = [name for name in SCALING_FIELDS[scaling.kind] if name != "attention_factor"]
    given = {name: getattr(scaling, name) for name in names}
    if scaling.factors:  # they say it all
        given = {"factors": scaling.factors}
    return {"kind": scaling.kind, **given, "attention_factor": attention_factor(scaling)}


def _by_type(tensors: Iterable[StoredTensor]) -> list[dict[str, Any]]:
    """A row for each weight type, the largest first."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        row = rows.setdefault(
            tensor.type,
            {
                "type": tensor.type,
                "bits_per_weight": tensor.bits_per_weight,
                "n_tensors": 0,
                "n_parameters": 0,
                "n_bytes": 0,
            },
        )
        row["n_tensors"] += 1
        row["n_parameters"] += tensor.n_parameters
        row["n_bytes"] += tensor.n_bytes
    return sorted(rows.values(), key=lambda row: -int(row["n_bytes"]))


def _by_layer(tensors: Iterable[StoredTensor], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """A row for each layer and for each module outside the layers: parameters by kind, and bytes."""
    rows: dict[str, dict[str, Any]] = {}
    for tensor in tensors:
        layer, kind = place_of(names[tensor.name])
        row = rows.setdefault(
            layer, {"layer": layer, **dict.fromkeys(KINDS, 0), "n_parameters": 0, "n_bytes": 0}
        )
        row[kind] += tensor.n_parameters
        row["n_parameters"] += tensor.n_parameters
        row["n_bytes"] += tensor.n_bytes
    return sorted(rows.values(), key=lambda row: _order(row["layer"]))


def place_of(name: str) -> tuple[str, str]:
    """(layer, kind) of a tensor: `model.layers.3.self_attn.q_proj.weight` -> ("3", "attention")."""
    match = _LAYER.fullmatch(name)
    if match is not None:
        layer, inside = str(int(match[1] or match[3])), match[2] or match[4]
    else:
        module = name.removesuffix(".weight").removesuffix(".bias")
        layer = inside = module.rpartition(".")[2]
    if "norm" in inside:
        return layer, "norm"
    for part, kind in (
        *(("self_attn", "attention"), ("attn", "attention"), ("mlp", "mlp"), ("ffn", "mlp")),
        *((part, "mlp") for part in ("feed_forward", "shared_mlp", "block_sparse_moe")),
        *((f"mixer.{part}", "attention") for part in ("q_proj", "k_proj", "v_proj", "o_proj")),
        *((f"mixer.{part}", "mlp") for part in ("up_proj", "down_proj", "gate", "experts", "shared_experts")),
        *((state, "recurrent") for state in ("mixer", "conv", "shortconv", "mamba", "ssm", "linear_attn")),
        *(("embed", "embedding"), ("token_embd", "embedding")),
        *((head, "head") for head in ("lm_head", "output", "qa_outputs", "score", "classifier")),
    ):
        if inside.startswith(part):
            return layer, kind
    return layer, "other"


def _order(layer: str) -> tuple[int, int, str]:
    """Embedding first, then the layers by number, then the rest, heads last."""
    if layer.isdecimal():
        return 1, int(layer), ""
    place = 0 if "emb" in layer else 2 if "norm" in layer else 3
    return place, 0, layer


def _print_facts(report: dict[str, Any]) -> None:
    files = f", {len(report['files'])} files" if len(report["files"]) > 1 else ""
    size = n_bytes_text(report["file_bytes"])
    facts = [
        ("file", f"{report['path']} ({size}{files}, {report['format']})"),
        ("name", _name(report)),
        ("architecture", report["architecture"]),
        ("parameters", f"{report['n_parameters']:,} in {report['n_tensors']} tensors{_active_text(report)}"),
    ]
    if report["buffers"]:
        shown = ", ".join(report["buffers"][:3]) + (", …" if len(report["buffers"]) > 3 else "")
        facts.append(("not counted", f"{shown}: these follow from the configuration"))
    if report["unknown_keys"]:
        facts.append(("unknown keys", ", ".join(report["unknown_keys"]) + " (left out)"))
    if report["unsupported"] is not None:
        facts.append(("not runnable", report["unsupported"]))
    if report["config"] is not None:
        facts += _config_facts(report)
    print_facts(facts)


def _active_text(report: dict[str, Any]) -> str:
    n_active = report["n_active_parameters"]
    return "" if n_active == report["n_parameters"] else f", {n_active:,} of them active in a token"


def _name(report: dict[str, Any]) -> str:
    return str((report["config"] or {}).get("name") or report["metadata"].get("general.name", "-"))


def _config_facts(report: dict[str, Any]) -> list[tuple[str, str]]:
    config = report["config"]
    rope, max_context = config["rope"], config["max_context"]
    windows = sorted({layer["window"] for layer in config["layers"]} - {None})
    sees = f"w sees {', '.join(f'{window:,}' for window in windows)} tokens, " if windows else ""
    per_token, full = report["kv_bytes_per_token"], report["kv_bytes_full_context"]
    mlp, mixture = f"MLP {config['d_ffn']}", config["mixture"]
    if mixture is not None:
        mlp = (
            f"{mixture['n_experts']} experts of width {mixture['d_ffn']}, {mixture['n_used']} used by a token"
        )
    states = []
    if config["recurrent"] is not None:
        kinds = _grouped(report["recurrent_layers"])
        others = {"M": ", M is an MLP or a mixture", "B": ", B does both"}
        more = "".join(text for letter, text in others.items() if letter in report["recurrent_layers"])
        states = [
            ("recurrent layers", f"{kinds}   S keeps a state, A attends{more}"),
            ("state", f"{n_bytes_text(report['state_bytes'])} per sequence, of any length"),
        ]
    return [
        ("layers", f"{config['n_layers']} of width {config['d_model']}, {mlp}"),
        (
            "attention",
            f"{config['n_heads']} heads of {config['d_head']}, {config['n_kv_heads']} for keys and values",
        ),
        ("norm", f"epsilon {config['norm_eps']:g}"),
        ("rope", f"theta {rope['theta']:g}, {rope['rotary_dim']} of {config['d_head']} dimensions of a head"),
        ("rope scaling", _scaling_text(report["rope_scaling"])),
        ("rope layers", f"{_grouped(report['rope_layers'])}   R rotates, N does not (NoPE)"),
        ("windows", f"{_grouped(report['window_layers'])}   {sees}. sees the whole context"),
        *states,
        ("vocabulary", f"{config['n_vocab']:,} tokens"),
        ("head", _head_text(config)),
        ("context", f"{max_context:,} tokens"),
        ("KV cache", f"{per_token:,} bytes per token, {n_bytes_text(full)} when full"),
        (
            "GQA saves",
            f"{report['gqa_saves']:.0%} of the {report['kv_bytes_per_token_mha']:,} bytes per token"
            f" with {config['n_heads']} heads for keys and values",
        ),
    ]


def _head_text(config: dict[str, Any]) -> str:
    kind, labels = config["head"]["kind"], config["head"]["labels"]
    if kind == "language_model":
        return "language model" + (", tied to the embedding" if config["tie_embeddings"] else "")
    shown = ", ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "")
    return str(kind).replace("_", " ") + (f": {shown}" if labels else "")


def _grouped(pattern: str) -> str:
    """A symbol for each layer, in tens."""
    return " ".join(pattern[start : start + 10] for start in range(0, len(pattern), 10))


def _scaling_text(scaling: dict[str, Any] | None) -> str:
    if scaling is None:
        return "none"
    shown = []
    for name, value in scaling.items():
        if isinstance(value, tuple):
            if value:
                shown.append(f"{len(value)} {name.replace('_', ' ')} from {min(value):g} to {max(value):g}")
        elif name != "kind":
            shown.append(f"{name.replace('_', ' ')} {value:g}" if value is not True else name)
    return f"{scaling['kind']}: {', '.join(shown)}"


def _print_parameters(report: dict[str, Any]) -> None:
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


def _print_types(report: dict[str, Any]) -> None:
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


def _print_tensors(report: dict[str, Any]) -> None:
    listed = [
        [tensor["name"], tensor["type"], " x ".join(map(str, tensor["shape"])), f"{tensor['n_bytes']:,}"]
        for tensor in report["tensors"]
    ]
    print_table("tensors", ["name", "type", "shape", "bytes"], listed)


def _count(number: int) -> str:
    return f"{number:,}" if number else "-"
