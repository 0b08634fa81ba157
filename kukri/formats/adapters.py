"""LoRA adapters: directories as PEFT saves them, and GGUF files as llama.cpp's converter writes them.

PEFT: adapter_config.json and adapter_model.safetensors, with `….q_proj.lora_A.weight` (rank, in) and
`….lora_B.weight` (out, rank). GGUF: `blk.0.attn_q.weight.lora_a` and `….lora_b`, q and k in the order of rows
of the model's own GGUF files. Experts have updates of their own, `….experts.3.gate_proj.lora_A.weight`, in
GGUF has the experts of a layer in one tensor, (experts, rank, in) and (experts, out, rank). Whatever would
change the result in another way is refused by its name.
"""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from kukri.config import MultiplierConfig
from kukri.errors import FormatError, MissingFileError, UnsupportedError, brief, reading
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.tensor_names import hf_name
from kukri.formats.huggingface.safetensors import SafetensorsFile
from kukri.formats.huggingface.weights import parts_of, prefixes
from kukri.formats.json_files import read_json
from kukri.formats.tensor_forms import gguf_form, hf_form
from kukri.kernels.arrays import ByteArray
from kukri.kernels.weight_handles import LowRank, Weight
from kukri.models import ARCHITECTURES, Adapter, Model
from kukri.models.stored import Order
from kukri.models.weights import expert_name
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES, QuantType

MAX_RANK = 512
CONFIG_NAME, WEIGHTS_NAME = "adapter_config.json", "adapter_model.safetensors"
_FLOATS = ("F32", "F16", "BF16")
_MAX_LISTED = 6
_PEFT = re.compile(r"(?P<module>.+)\.lora_(?P<part>[AB])(?:\.default)?\.weight")
# The model's own matrix, unchanged, which PEFT saves besides an update of the head or the embedding
_COPY = re.compile(r"(?P<module>.+?)(?:\.base_layer)?\.weight")
_GGUF = re.compile(r"(?P<tensor>.+)\.lora_(?P<part>[ab])")
_HEAD = "lm_head.weight"
# PEFT takes names in a pattern for regular expressions. A plain name is matched here; what may backtrack for
# years runs in a process that is stopped.
_PLAIN = re.compile(r"(?:\\\.|[\w.^-])+")
_MAX_PLAIN, _MATCH_SECONDS = 512, 10
_MATCH = r"""
import json, re, sys
patterns, modules = json.load(sys.stdin)
known = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
found = [next((i for i, one in enumerate(known) if one.match(module)), None) for module in modules]
json.dump(found, sys.stdout)
"""

# Keys of adapter_config.json that change the result unless they hold one of these, with what they ask for.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "use_dora": ((False,), "DoRA"),
    "modules_to_save": (([],), "whole modules besides the updates"),
    "bias": (("none",), "biases"),
    "lora_bias": ((False,), "biases of updates"),
    "fan_in_fan_out": ((False,), "transposed matrices"),
    "layer_replication": (([],), "layers twice"),
    "megatron_config": ((), "Megatron's layers"),
    "target_parameters": (([],), "parameters outside of linear layers"),
    "trainable_token_indices": (([], {}), "tokens of the embedding"),
    "alora_invocation_tokens": (([],), "an update from a token on"),
    "use_qalora": ((False,), "QALoRA"),
    "use_bdlora": ((False,), "BDLoRA"),
    "arrow_config": ((), "a router of adapters"),
}
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")  # initializations that rewrite the model's own weights


class _Part(NamedTuple):
    """A or B as stored: its numbers, type, shape and the tensor's name in the file."""

    data: ByteArray
    type: QuantType
    shape: tuple[int, ...]
    name: str


def read_adapter(path: Path, model: Model) -> Adapter:
    """The adapter at a path, checked against the model that it is for.

    Raises FormatError for files that are broken or of another model, UnsupportedError for what kukri does not
    apply: DoRA, saved modules, biases, embeddings.
    """
    if not path.exists():
        raise MissingFileError("was not found", path=path)
    with reading(path):
        return _read_peft(path, model) if path.is_dir() else _read_gguf(path, model)


# --- PEFT


def _read_peft(directory: Path, model: Model) -> Adapter:
    stated = read_json(directory / CONFIG_NAME)
    _check_config(stated, directory / CONFIG_NAME)
    architecture = ARCHITECTURES[model.config.architecture]
    if architecture.gguf_factors is not None and model.config.multipliers == MultiplierConfig():
        raise UnsupportedError(
            f"{directory}: PEFT's adapters are not supported with {architecture.name} in GGUF, whose "
            "matrices are multiplied by factors that no key holds: load the model's safetensors"
        )
    weights = directory / WEIGHTS_NAME
    if not weights.is_file():
        pickled = any(directory.glob("*.bin"))
        way_out = ": pickles are not supported, so save it as safetensors" if pickled else ""
        raise FormatError(f"must hold {WEIGHTS_NAME}{way_out}", path=directory)
    file = SafetensorsFile(weights)
    matrices = _matrices(model)
    parts: dict[str, dict[str, _Part]] = {}
    modules: dict[str, str] = {}  # as PEFT names them
    for name, tensor in file.tensors.items():
        _refuse_kind(name, weights)
        match = _PEFT.fullmatch(name)
        if match is None and _is_copy(name, tensor.shape, model):
            continue
        if match is None:
            raise FormatError("must be lora_A or lora_B of a linear layer", path=weights, tensor=name)
        module = match["module"].removeprefix("base_model.model.")
        matrix = _canonical(module, matrices, model)
        if matrix is None:
            raise _no_matrix(module, matrices, weights, name)
        if tensor.dtype not in _FLOATS:
            raise UnsupportedError(
                f"{weights}: tensor {name!r} must be of type F32, F16 or BF16, not {tensor.dtype}"
            )
        data = file.data(tensor).copy()  # the file may be replaced while the adapter is in use
        part = _Part(data, QUANT_TYPES[tensor.dtype], tensor.shape, name)
        parts.setdefault(matrix, {})[match["part"].lower()] = part
        modules[matrix] = module
    if stated.get("ensure_weight_tying") and model.config.tie_embeddings and _HEAD in parts:
        raise UnsupportedError(
            f"{directory / CONFIG_NAME}: 'ensure_weight_tying' is not supported with an update of the tied "
            "head: train only the head"
        )
    order_of = _orders(model, is_gguf=False)
    ranks, alphas = (
        _of_modules(stated, key, [*modules.values()], directory / CONFIG_NAME)
        for key in ("rank_pattern", "alpha_pattern")
    )
    updates = {}
    for matrix, both in parts.items():
        down, up = _checked(matrix, matrices[matrix], both, weights, order_of)
        of_module = ranks.get(modules[matrix]), alphas.get(modules[matrix])
        rank, scale = _rank_and_scale(stated, *of_module, directory / CONFIG_NAME)
        if down.shape[0] != rank:
            message = f"has rank {down.shape[0]} where {CONFIG_NAME} says {rank}"
            raise FormatError(message, path=weights, tensor=both["a"].name)
        updates[matrix] = LowRank(down, up, scale)
    return _adapter(directory, updates, model)


def _check_config(stated: Mapping[str, Any], path: Path) -> None:
    """Raises UnsupportedError for anything but plain LoRA."""
    kind = stated.get("peft_type", "LORA")
    if kind != "LORA":
        raise UnsupportedError(f"{path}: 'peft_type' is {brief(kind)}; only LORA is supported")
    for key, (neutral, what) in _REFUSED.items():
        value = stated.get(key)
        if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
            raise UnsupportedError(f"{path}: {key!r} is {brief(value)}, but {what} cannot be applied")
    start = stated.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise UnsupportedError(
            f"{path}: 'init_lora_weights' {brief(start)} is not supported, because it changed the model's "
            "own weights too: save the adapter converted to plain LoRA"
        )


def _rank_and_scale(stated: Mapping[str, Any], rank: Any, alpha: Any, path: Path) -> tuple[int, float]:
    """The rank of a module's update and its factor: alpha / rank, or alpha / sqrt(rank) of rsLoRA.

    `rank` and `alpha` are what the patterns say of the module, None where they say nothing.
    """
    rank = stated.get("r", 8) if rank is None else rank
    alpha = stated.get("lora_alpha", 8) if alpha is None else alpha
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise FormatError(f"the rank must be from 1 to {MAX_RANK}, not {brief(rank)}", path=path)
    if type(alpha) not in (int, float) or not math.isfinite(alpha) or abs(alpha) > 1e6:
        raise FormatError(f"'lora_alpha' must be a number, not {brief(alpha)}", path=path)
    is_rs = stated.get("use_rslora", False)
    if not isinstance(is_rs, bool):
        raise FormatError(f"'use_rslora' must be true or false, not {brief(is_rs)}", path=path)
    return rank, float(alpha / math.sqrt(rank) if is_rs else alpha / rank)


def _of_modules(stated: Mapping[str, Any], key: str, modules: list[str], path: Path) -> dict[str, Any]:
    """The value of the first regular expression in a pattern that a module's name matches, or its end.

    Modules that match none are left out. Raises FormatError for an invalid regular expression.
    """
    patterns = stated.get(key) or {}
    if not isinstance(patterns, dict):
        raise FormatError(f"{key!r} must be an object, not {brief(patterns)}", path=path)
    values = [*patterns.values()]
    if len(patterns) <= _MAX_PLAIN and all(map(_PLAIN.fullmatch, patterns)):
        known = [re.compile(rf"(.*\.)?({pattern})$") for pattern in patterns]
        found = [next((i for i, one in enumerate(known) if one.match(name)), None) for name in modules]
    else:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-c", _MATCH],
                input=json.dumps([[*patterns], modules]),
                capture_output=True,
                text=True,
                timeout=_MATCH_SECONDS,
            )
        except subprocess.TimeoutExpired:
            raise FormatError(f"{key!r} takes too long to match: name the modules", path=path) from None
        if done.returncode:
            reason = done.stderr.strip().rpartition("\n")[2]
            raise FormatError(f"{key!r} must hold regular expressions: {brief(reason)}", path=path)
        found = json.loads(done.stdout)
    return {name: values[i] for name, i in zip(modules, found) if i is not None}


def _canonical(module: str, matrices: Mapping[str, Any], model: Model) -> str | None:
    """The name of the matrix of a module as PEFT names it: with or without what is in front of the layers.

    A module of several matrices has none.
    """
    architecture = ARCHITECTURES[model.config.architecture]
    stripped = [module.removeprefix(one) for one in prefixes(architecture) if module.startswith(one)]
    candidates = [module, f"model.{module}", *(f"model.{name}" for name in stripped)]
    named = (parts_of(f"{name}.weight", architecture) for name in candidates)
    return next((parts[0] for parts in named if len(parts) == 1 and parts[0] in matrices), None)


def _is_copy(name: str, shape: tuple[int, ...], model: Model) -> bool:
    """True for a copy of the model's own embedding or head, of the same shape: no token was added."""
    match = _COPY.fullmatch(name.removeprefix("base_model.model."))
    if match is None:
        return False
    stored = {parameter.name: parameter.shape for parameter in model.parameters}
    embedding = f"{ARCHITECTURES[model.config.architecture].embedding}.weight"
    copied = {name: stored.get(name, stored[embedding]) for name in (embedding, _HEAD) if embedding in stored}
    matrix = _canonical(match["module"], copied, model)
    return matrix is not None and copied[matrix] == shape


def _matrices(model: Model) -> Mapping[str, tuple[int, int]]:
    """The matrices that an adapter may change, and their shapes; a tied head by a name of its own."""
    from kukri.models.trace import Trace

    trace = Trace(model)
    head, embedding = trace.unembedding, trace.embedding
    is_tied = head is not None and embedding is not None and head.weights == (embedding,)
    return trace.multiplied | ({_HEAD: embedding.shape} if is_tied and embedding is not None else {})


# --- GGUF


def _read_gguf(path: Path, model: Model) -> Adapter:
    with GGUFFile(path) as file:
        alpha = _check_keys(file, model)
        matrices = _matrices(model)
        parts: dict[str, dict[str, _Part]] = {}
        for name, tensor in file.tensors.items():
            match = _GGUF.fullmatch(name)
            if match is None:
                raise FormatError("must be 'lora_a' or 'lora_b' of a matrix", path=path, tensor=name)
            matrix = _matrix_name(match["tensor"], model, path, name)
            if expert_name(matrix, 0) not in matrices:
                raise _no_matrix(matrix.removesuffix(".weight"), matrices, path, name)
            data, kind = file.data(name).copy(), file.readable(name).type
            if kind.name not in _FLOATS:
                data, kind = dequantize(data, kind).view(np.uint8), QUANT_TYPES["F32"]
            part = _Part(data, kind, tensor.shape, name)
            for one, of_one in _apart(matrix, part, model, path):
                parts.setdefault(one, {})[match["part"]] = of_one
        order_of = _orders(model, is_gguf=True)
        updates = {}
        for matrix, both in parts.items():
            down, up = _checked(matrix, matrices[matrix], both, path, order_of)
            scale = alpha / down.shape[0] if alpha else 1.0  # as llama.cpp has it
            updates[matrix] = LowRank(down, up, scale)
        return _adapter(path, updates, model)


def _check_keys(file: GGUFFile, model: Model) -> float:
    """The alpha of a file. Raises FormatError and UnsupportedError unless it is LoRA for such a model."""
    path, stated = file.path, file.metadata
    if stated.get("general.type") != "adapter":
        raise FormatError("must be an adapter: its general.type is not 'adapter'", path=path)
    kind = stated.get("adapter.type")
    if kind != "lora":
        raise UnsupportedError(f"{path}: 'adapter.type' is {brief(kind)}; only lora is supported")
    if "adapter.alora.invocation_tokens" in stated:
        raise UnsupportedError(f"{path}: updates that begin at invocation tokens are not supported")
    architecture = stated.get("general.architecture")
    wanted = ARCHITECTURES[model.config.architecture].gguf
    if architecture != wanted:
        raise FormatError(f"is for the architecture {brief(architecture)}, not {wanted!r}", path=path)
    alpha = stated.get("adapter.lora.alpha")
    if not isinstance(alpha, float) or not math.isfinite(alpha) or abs(alpha) > 1e6:
        raise FormatError(f"key 'adapter.lora.alpha' must be a number, not {brief(alpha)}", path=path)
    return alpha


def _matrix_name(stored: str, model: Model, path: Path, tensor: str) -> str:
    try:
        return hf_name(stored, model.config.architecture)
    except UnsupportedError:
        raise FormatError("names no tensor of the model", path=path, tensor=tensor) from None


def _apart(matrix: str, part: _Part, model: Model, path: Path) -> Iterator[tuple[str, _Part]]:
    """The matrices that A or B is for: of experts, which it is stacked for, each with its own."""
    if expert_name(matrix, 0) == matrix:
        yield matrix, part
        return
    assert model.config.mixture is not None, "it has matrices of experts"
    n = model.config.mixture.n_experts
    if len(part.shape) != 3 or part.shape[0] != n:
        raise _wrong_shape(part, f"{n} two-dimensional experts", path)
    for i, rows in enumerate(part.data.reshape(n, -1)):
        yield expert_name(matrix, i), part._replace(data=rows, shape=part.shape[1:])


# --- both


_Orders = Callable[[str, int], tuple[Order, Order]]


def _orders(model: Model, *, is_gguf: bool) -> _Orders:
    """Gives the orders of rows of B and columns of A in the file by a matrix's name and its rows' number.

    None stands for as they are.
    """
    form_of = gguf_form if is_gguf else hf_form

    def order(name: str, n_rows: int) -> tuple[Order, Order]:
        form = form_of(name, model.config, n_rows)
        return form.rows, form.columns

    return order


def _checked(
    matrix: str, shape: tuple[int, int], both: Mapping[str, _Part], path: Path, order_of: _Orders
) -> tuple[Weight, Weight]:
    """A and B of a matrix of this shape. Raises FormatError if one is missing or wrong."""
    (n_out, n_in), present = shape, next(iter(both.values()))
    for missing in {"a", "b"} - both.keys():
        raise FormatError(f"requires its {missing.upper()}", path=path, tensor=present.name)
    down, up = both["a"], both["b"]
    rank = down.shape[0] if len(down.shape) == 2 else 0
    if not 1 <= rank <= MAX_RANK or down.shape != (rank, n_in):
        raise _wrong_shape(down, f"(rank up to {MAX_RANK}, {n_in})", path)
    if up.shape != (n_out, rank):
        raise _wrong_shape(up, f"({n_out}, {rank})", path)
    weights = []
    order, columns = order_of(matrix, n_out)
    for part, name in ((down, "A"), (up, "B")):
        rows = part.data.reshape(part.shape[0], -1)
        if not np.isfinite(dequantize(rows, part.type)).all():
            raise FormatError("must hold finite numbers", path=path, tensor=part.name)
        if name == "B" and order is not None:
            rows = np.ascontiguousarray(rows[order])
        if name == "A" and columns is not None:
            numbers = rows.view(f"u{part.type.block_bytes}")
            rows = np.ascontiguousarray(numbers[:, columns]).view(np.uint8)
        weights.append(Weight(rows, part.type, (part.shape[0], part.shape[1]), f"{matrix}.{name}"))
    return weights[0], weights[1]


def _wrong_shape(part: _Part, wanted: str, path: Path) -> FormatError:
    message = f"has shape {part.shape} where the model needs {wanted}: the adapter is for another model"
    return FormatError(message, path=path, tensor=part.name)


def _refuse_kind(name: str, path: Path) -> None:
    """Raises UnsupportedError for tensors of updates of anything but linear layers."""
    for mark, what in (
        ("lora_embedding_", "updates of embeddings"),
        ("lora_magnitude_vector", "DoRA"),
        ("modules_to_save", "whole modules besides the updates"),
    ):
        if mark in name:
            raise UnsupportedError(f"{path}: tensor {name[:200]!r}: {what} cannot be applied")


def _no_matrix(module: str, matrices: Iterable[str], path: Path, tensor: str) -> Exception:
    """The error of an update of a module that is not a linear layer of the model."""
    if module.rpartition(".")[2] in ("embed_tokens", "word_embeddings", "wte"):
        return UnsupportedError(f"{path}: tensor {tensor!r}: updates of embeddings are not supported")
    parts = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in matrices)
    listed = ", ".join([*parts][: 2 * _MAX_LISTED])
    message = f"the model has no linear layer {brief(module)}: its layers have {listed}"
    return FormatError(message, path=path, tensor=tensor)


def _adapter(path: Path, updates: Mapping[str, LowRank], model: Model) -> Adapter:
    if not updates:
        raise FormatError("updates no matrix", path=path)
    if not model.config.tie_embeddings:
        return Adapter(path, updates)
    # the head multiplies by the embedding's matrix, whose rows are read without an update
    embedding = f"{ARCHITECTURES[model.config.architecture].embedding}.weight"
    return Adapter(path, {embedding if name == _HEAD else name: one for name, one in updates.items()})
