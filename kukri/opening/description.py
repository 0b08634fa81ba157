"""What a model's files hold, without their weights: `kukri inspect` prints it, `LLM.describe` returns it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kukri.config import EngineConfig, RopeScaling
from kukri.engine.kv_size import KVCost
from kukri.errors import KukriError, UnsupportedError
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
from kukri.opening.module_tree import Module, class_names, module_tree

KINDS = ("embedding", "attention", "recurrent", "mlp", "norm", "head", "other")
_LAYER = re.compile(r"(?:model\.|transformer\.|backbone\.)?layers\.(\d+)\.(.+)|blk\.(\d+)\.(.+)")


def describe(path: Path, *, with_tensors: bool = False) -> dict[str, Any]:
    """Return what a model's files say of it, ready for JSON, by their headers alone."""
    return report_and_modules(path, with_tensors=with_tensors)[0]


def report_and_modules(path: Path, *, with_tensors: bool = False) -> tuple[dict[str, Any], Module]:
    """The same, and the tree of its modules."""
    headers = read_headers(path)
    names, problem = _names_of(headers)
    root = _tree_of(headers, names)
    return _report(headers, names, problem, root, with_tensors=with_tensors), root


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
    kv_bytes, cost = token_bytes(layout, "f16"), KVCost.on_host(layout, "f16", EngineConfig.max_step_tokens)
    return {
        "config": asdict(config),
        "rope_layers": "".join("R" if layer.use_rope else "N" for layer in config.layers),
        "window_layers": "".join("." if layer.window is None else "w" for layer in config.layers),
        "rope_scaling": None if scaling is None else _scaling_report(scaling),
        "kv_bytes_per_token": kv_bytes,
        "kv_bytes_full_context": cost.n_bytes(cost.wanted(1, config.max_context)),
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
