"""The `WeightSource` of a directory of safetensors files."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kukri.config import ModelConfig
from kukri.errors import ConfigError, FormatError, UnsupportedError, UnusedTensorError, brief, brief_list
from kukri.formats.head_matrices import joined_heads, joined_shape, take_part
from kukri.formats.huggingface.safetensors import DTYPE_BYTES, SafetensorsFile, open_files
from kukri.formats.huggingface.ternary import PER_BYTE, rounded_rows, ternary_rows
from kukri.formats.tensor_forms import hf_form, parameters
from kukri.kernels.arrays import ByteArray, FloatArray
from kukri.kernels.quantize import requantize
from kukri.kernels.weight_handles import Experts, Weight
from kukri.models import ARCHITECTURES, Architecture
from kukri.models.next_token import is_after_last
from kukri.models.weights import WeightSource, expert_name, of_experts
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES, WRITTEN, QuantType, fitting_type

_HEADS = (
    "lm_head",
    "score",
    "classifier",
    "qa_outputs",
    "cls",
    "head",
    "decoder",
)  # outside of the model below them
RUNS = ("F32", "F16", "BF16")
_BYTES = ("U8",)

# Tensors that old checkpoints carry and that follow from the configuration: frequencies and causal masks.
_IGNORABLE = re.compile(
    r"(?:.*\.)?(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|(?:self_attn|attention)\.(?:bias|masked_bias)"
    r"|embeddings\.(?:position_ids|token_type_ids))"
)

PACKED_TYPES = tuple(type.name for type in WRITTEN)  # while loading

# Packing leaves them as they are: routers, which are small and of which an error chooses other experts;
# convolutions; a table of all layers' embeddings, which stays in the file, and their projections.
_UNPACKED = re.compile(r".+\.(?:mlp\.gate|mlp\.router|conv|\w*conv1d)\.weight|.+per_layer.+")
# What joins the layer for multi-token prediction to the model, where its name is "mtp".
_MTP = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "norm",
}

# The model below a head, or on its own, has other names in front than a language model's.
_PREFIXES = (
    "model.",
    "transformer.",
    "bert.",
    "roberta.",
    "model.language_model.",
    "language_model.model.",
    "model.text_model.",
    "backbone.",
    "",
)

_OUTER = "language_model."  # in front of a head too, where transformers 4 wrote a text of images and text

# Tensors besides the text's in models of images and text.
_IMAGES = re.compile(
    r"(?:model\.)?(?:(?:vision|audio)_\w+|embed_(?:vision|audio)|multi_modal_projector|connector|visual|mlp_AR)"
    r"\..+"
)


class SafetensorsWeights(WeightSource):
    """The `WeightSource` of a directory's safetensors files. Matrices are views of the mapped files.

    `quantize_to` packs every matrix to that type instead, a copy in memory, or to the type that stands in for
    it if rows are not whole blocks of 256; vectors, and rows that are not whole blocks of either, stay as
    they are. Raises FormatError for what is broken or absent, and ConfigError for a type that weights cannot
    be packed to.
    """

    def __init__(
        self, directory: str | os.PathLike[str], config: ModelConfig, quantize_to: str | None = None
    ) -> None:
        self.path, self._config = Path(directory), config
        self._target = None if quantize_to is None else packed_type(quantize_to)
        self._files = open_files(self.path)
        self._architecture = ARCHITECTURES[config.architecture]
        self._prefix = model_prefix(self._files, self._architecture)
        self._taken: set[str] = set()
        experts = ARCHITECTURES[config.architecture].experts
        self._is_interleaved = experts is not None and experts.is_interleaved

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        if (ternary := self._ternary(name, shape)) is not None:
            return self._packed(*ternary, shape, name)
        (n_out, n_in), (stored, part, n_parts) = shape, joined_name(name, self._architecture)
        first, form = first_row(name, self._architecture), hf_form(name, self._config, n_out)
        data, kind = self._take(
            stored, form.transform.store_shape((first + n_parts * n_out, n_in), self._config.recurrent)
        )
        rows = data.reshape(first + n_parts * n_out, -1)[first + part * n_out :][:n_out]
        return self._packed(rows, kind, shape, name, form.rows)

    def _ternary(self, name: str, shape: tuple[int, int]) -> tuple[ByteArray, QuantType] | None:
        """The ternary rows of a layer's matrix of BitNet; None for others."""
        file = self._files.get(self._stored_name(name))
        if file is None or ".layers." not in name:
            return None
        if file.tensors[self._stored_name(name)].dtype == "U8":
            packed, _ = self._take(name, (shape[0] // PER_BYTE, shape[1]), _BYTES)
            scale, kind = self._take(f"{name}_scale", (1,))
            rows = packed.reshape(-1, shape[1])
            return ternary_rows(rows, float(dequantize(scale.reshape(1, -1), kind)[0, 0]), self.path, name)
        if not self._config.is_rounded:
            return None
        data, kind = self._take(name, shape)
        return rounded_rows(dequantize(data.reshape(shape[0], -1), kind))

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        if self._is_interleaved:
            return self._interleaved_experts(name, shape)
        if joined := joined_heads(name):
            data, kind = self._take(joined, joined_shape(self._config))
            parts, kind = take_part(data, kind, name, self._config)
            return Experts(tuple(self._packed(each, kind, shape[1:], name) for each in parts), name)
        n, n_out, n_in = shape
        fused, part, n_parts = joined_name(name, self._architecture)
        if fused == name:
            fused, part, n_parts = _fused(name.removesuffix(".weight"))
        is_apart = self._stored_name(fused) not in self._files and not is_stacked(name, self._architecture)
        if is_apart:
            weights = tuple(self.matrix(expert_name(name, i), (n_out, n_in)) for i in range(n))
        else:
            data, kind = self._take(fused, (n, n_parts * n_out, n_in))
            rows = data.reshape(n, n_parts * n_out, -1)[:, part * n_out : (part + 1) * n_out]
            weights = tuple(
                self._packed(each, kind, (n_out, n_in), expert_name(name, i)) for i, each in enumerate(rows)
            )
        if len({weight.type for weight in weights}) > 1:
            raise FormatError("must be of one type for all experts", path=self.path, tensor=name)
        return Experts(weights, name)

    def _interleaved_experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        """Experts of one tensor (experts, in, out), or of MXFP4's blocks and scales, as rows: copies."""
        n, n_out, n_in = shape
        fused, part, n_parts = _fused(name.removesuffix(".weight"))
        n_rows, turn = n_parts * n_out, slice(part, None, n_parts)
        if self._stored_name(f"{fused}_blocks") in self._files:
            blocks, _ = self._take(f"{fused}_blocks", (n, n_rows, n_in // 32, 16), _BYTES)
            scales, _ = self._take(f"{fused}_scales", (n, n_rows, n_in // 32), _BYTES)
            rows = mxfp4_rows(
                blocks.reshape(n, n_rows, -1, 16)[:, turn], scales.reshape(n, n_rows, -1)[:, turn]
            )
            kind = QUANT_TYPES["MXFP4"]
        else:
            data, kind = self._take(fused, (n, n_in, n_rows))
            numbers = data.view(f"u{kind.block_bytes}").reshape(n, n_in, n_rows)[:, :, turn]
            rows = np.ascontiguousarray(numbers.swapaxes(1, 2)).view(np.uint8)
        weights = (
            self._packed(each, kind, (n_out, n_in), expert_name(name, i)) for i, each in enumerate(rows)
        )
        return Experts(tuple(weights), name)

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        fused, part, n_parts = _fused(name.removesuffix(".bias"))
        data, kind = self._take(f"{fused}_bias", (shape[0], n_parts * shape[1]))
        return np.ascontiguousarray(dequantize(data.reshape(shape[0], -1), kind)[:, part::n_parts])

    def vector(self, name: str, size: int) -> FloatArray:
        form = hf_form(name, self._config, size)
        data, kind = self._take(
            joined_name(name, self._architecture)[0],
            form.transform.store_shape((size,), self._config.recurrent),
        )
        values = dequantize(data.reshape(1, -1), kind).reshape(size)
        values = values if form.transform.load is None else form.transform.load(values)
        return values if form.rows is None else values[form.rows]

    def has(self, name: str) -> bool:
        return self._stored_name(joined_name(name, self._architecture)[0]) in self._files

    @property
    def names(self) -> Collection[str]:
        """Every tensor but the images'."""
        return [name for name in self._files if not is_of_images(name)]

    @property
    def n_of_images(self) -> int:
        """Tensors of images, which no layer takes."""
        return len(self._files) - len(self.names)

    def done(self) -> None:
        unused = [
            name
            for name in self.names
            if name not in self._taken
            and not follows_from_config(name, self._config.tie_embeddings)
            and not self._is_unused(canonical_name(name, self._prefix, self._architecture))
        ]
        if unused:
            listed = brief_list([*map(brief, unused)])
            raise UnusedTensorError(
                f"holds tensors that no layer of {self._config.architecture} takes: {listed}; check "
                "'model_type' in config.json, or save the checkpoint without them",
                path=self.path,
            )

    def _is_unused(self, name: str) -> bool:
        """True for a tensor that the model may leave."""
        if self._architecture.next_token and is_after_last(name, self._config.n_layers):
            return True
        return re.fullmatch(self._architecture.unused, name) is not None

    def _packed(
        self,
        rows: ByteArray,
        kind: QuantType,
        shape: tuple[int, int],
        name: str,
        order: npt.NDArray[np.int64] | None = None,
    ) -> Weight:
        weight = Weight(rows, kind, shape, name, row_order=order)
        target = self._target and fitting_type(self._target, shape[1])
        if target is None or not is_packed(name, shape):
            return weight
        return Weight(requantize(weight.data, kind, target, tensor=name), target, shape, name)

    def _stored_name(self, name: str) -> str:
        name = parameter_name(name, self._architecture)
        if self._architecture.next_token == "mtp" and is_after_last(name, self._config.n_layers):
            return mtp_name(name)
        if name.startswith("model."):
            return self._prefix + name.removeprefix("model.")
        return _OUTER + name if self._prefix == f"{_OUTER}model." else name

    def _take(
        self, name: str, shape: tuple[int, ...], dtypes: tuple[str, ...] = RUNS
    ) -> tuple[ByteArray, QuantType]:
        name = self._stored_name(name)
        file = self._files.get(name)
        if file is None:
            raise FormatError("is missing", path=self.path, tensor=name)
        tensor = file.tensors[name]
        if tensor.shape != shape:
            message = f"has shape {tensor.shape} where the configuration asks for {shape}"
            raise FormatError(message, path=file.path, offset=tensor.offset, tensor=name)
        data = stored_data(file, name, dtypes)
        self._taken.add(name)
        return data, QUANT_TYPES["I8" if tensor.dtype == "U8" else tensor.dtype]


def stored_data(file: SafetensorsFile, name: str, dtypes: tuple[str, ...]) -> ByteArray:
    """The bytes of a tensor, where numbers lie on their own boundaries.

    Raises UnsupportedError unless it is of one of these types.
    """
    tensor = file.tensors[name]
    if tensor.dtype not in dtypes:
        raise UnsupportedError(
            f"{file.path}: tensor {name!r} must be of type {', '.join(dtypes)}, not {tensor.dtype}"
        )
    data = file.data(tensor)
    return data.copy() if tensor.offset % DTYPE_BYTES[tensor.dtype] else data


_IN_LAYER = re.compile(r"(?P<layer>.+\.layers\.\d+\.)(?P<module>.+)\.(?P<kind>weight|bias)")


def joined_name(name: str, architecture: Architecture) -> tuple[str, int, int]:
    """The tensor of safetensors that has a tensor's rows, which part of it they are, and of how many.

    That is the tensor itself, or a joined tensor's first part, unless `Architecture.joined` says otherwise.
    """
    name_of_all, expert = of_experts(name)
    match = _IN_LAYER.fullmatch(name_of_all)
    for stored, modules in architecture.joined.items():
        if match is not None and match["module"] in modules:
            joined = f"{match['layer']}{stored}.{match['kind']}"
            joined = joined if name == name_of_all else expert_name(joined, expert)
            return joined, modules.index(match["module"]), len(modules)
    return name, 0, 1


def is_stacked(name: str, architecture: Architecture) -> bool:
    """True for experts that safetensors hold in one tensor, by `Architecture.joined`."""
    stored = joined_name(name, architecture)[0]
    return stored != name and ".experts." not in stored.removeprefix(_layer_of(stored))


def _layer_of(name: str) -> str:
    match = _IN_LAYER.fullmatch(name)
    return "" if match is None else match["layer"]


def parts_of(name: str, architecture: Architecture) -> list[str]:
    """The tensors that a tensor of safetensors holds: the inverse of `joined_name`."""
    name = _canonical(name, architecture)
    name_of_all, expert = of_experts(name)
    match = _IN_LAYER.fullmatch(name_of_all)
    modules = architecture.joined.get(match["module"], ()) if match is not None else ()
    if match is None or not modules:
        return [name]
    parts = [f"{match['layer']}{module}.{match['kind']}" for module in modules]
    return parts if name == name_of_all else [expert_name(part, expert) for part in parts]


def first_row(name: str, architecture: Architecture) -> int:
    """The first row of a tensor of safetensors that means something here."""
    return architecture.first_position if name.endswith(".position_embeddings.weight") else 0


def _fused(module: str) -> tuple[str, int, int]:
    """As `joined_name`, of a module of experts whose gate and up are one tensor, gate first."""
    layer, _, part = module.rpartition(".")
    return (module, 0, 1) if part == "down_proj" else (f"{layer}.gate_up_proj", int(part == "up_proj"), 2)


def mxfp4_rows(blocks: ByteArray, scales: ByteArray) -> ByteArray:
    """Rows of GGUF's MXFP4, uint8 [..., 17 n], of bytes [..., n, 16] and exponents [..., n] of safetensors.

    A byte holds neighbours there, and weights j and j + 16 of a block here.
    """
    quants = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*blocks.shape[:-1], 32)
    packed = quants[..., :16] | quants[..., 16:] << 4
    rows: ByteArray = np.concatenate([scales[..., None], packed], axis=-1)
    return rows.reshape(*scales.shape[:-1], -1)


def is_packed(name: str, shape: tuple[int, ...]) -> bool:
    """True for a tensor that packing while loading is for: a matrix other than a router or a convolution."""
    return len(shape) > 1 and _UNPACKED.fullmatch(name) is None


def parameter_name(name: str, architecture: Architecture) -> str:
    """A tensor's name as models know it, as it is stored: parameters without a module have a short one."""
    layer, rest = _apart(name)
    return _renamed(layer + parameters(architecture.name).get(rest, rest), architecture.hf_names)


def _renamed(name: str, names: Mapping[str, str]) -> str:
    """The name with another beginning below "model.", if `names` has one."""
    below = name.removeprefix("model.")
    own = next((own for own in names if name != below and below.startswith(own)), "")
    return f"model.{names[own]}{below.removeprefix(own)}" if own else name


def _canonical(name: str, architecture: Architecture) -> str:
    """The inverse of `_renamed`."""
    return _renamed(name, {stored: own for own, stored in architecture.hf_names.items()})


def _apart(name: str) -> tuple[str, str]:
    """The name of a layer and of a tensor in it; "" for a tensor outside of layers."""
    match = re.fullmatch(r"(.*?\.\d+\.)?(.+)", name)
    assert match is not None, "it has a name"
    return match[1] or "", match[2]


def follows_from_config(name: str, tied: bool) -> bool:
    """True for a tensor that is not a parameter; `tied` if the head is the embedding."""
    # transformers ties the head to the embedding and drops the copy that some checkpoints hold
    return (tied and name == "lm_head.weight") or _IGNORABLE.fullmatch(name) is not None


def is_of_images(name: str) -> bool:
    """True for a tensor that turns images into what a language model reads."""
    return _IMAGES.fullmatch(name) is not None


def model_prefix(names: Collection[str], architecture: Architecture) -> str:
    """The name prefix of the model below a head, in a checkpoint with tensors of these names."""
    embedding = parameter_name(f"{architecture.embedding}.weight", architecture).removeprefix("model.")
    found = (prefix for prefix in prefixes(architecture) if f"{prefix}{embedding}" in names)
    return next(found, _PREFIXES[0])


def prefixes(architecture: Architecture) -> tuple[str, ...]:
    """Return what may stand in front of the names of a model's modules, the likeliest first."""
    return (architecture.hf_prefix, f"{architecture.name}.", *_PREFIXES)


def mtp_name(name: str) -> str:
    """The name in safetensors of a tensor of the layer after the last, where "mtp" is that layer's name."""
    module, dot, kind = name.split(".", 3)[3].rpartition(".")
    return f"mtp.{_MTP[module]}.{kind}" if module in _MTP else f"mtp.layers.0.{module}{dot}{kind}"


def canonical_name(name: str, prefix: str, architecture: Architecture) -> str:
    """A stored tensor's name as models know it; `prefix` comes from `model_prefix`."""
    is_head = not prefix and name.partition(".")[0] in _HEADS
    layer, rest = _apart(name)
    own = {stored: ours for ours, stored in parameters(architecture.name).items()}
    name = layer + own.get(rest, rest)
    if name.startswith(prefix) and not is_head:
        return _canonical(f"model.{name.removeprefix(prefix)}", architecture)
    return name.removeprefix(_OUTER) if prefix == f"{_OUTER}model." else name


def packed_type(name: str) -> QuantType:
    """The weight type of a name. Raises ConfigError for one that weights cannot be packed to."""
    if name not in PACKED_TYPES:
        raise ConfigError(
            f"the type {name!r} is not supported for packing weights while loading: use one of "
            f"{', '.join(PACKED_TYPES)}"
        )
    return QUANT_TYPES[name]
