"""`kukri inspect`: the contents of a model's files. Reads only headers, so it takes files of any size."""

from __future__ import annotations

import json
from typing import Any

from kukri.errors import printable
from kukri.formats import hub
from kukri.opening.description import KINDS, report_and_modules
from kukri.opening.module_tree import tree_lines
from kukri.terminal.output import n_bytes_text
from kukri.terminal.tables import print_facts, print_table


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
    report, root = report_and_modules(hub.resolve(model), with_tensors=with_tensors)
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
