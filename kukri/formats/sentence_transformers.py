"""A checkpoint's way from texts to vectors: sentence-transformers' files, and GGUF's pooling type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kukri.config import MAX_CONTEXT, EmbeddingConfig, LateInteraction, ModelConfig, Pooling
from kukri.dataclass import dataclass, replace
from kukri.errors import FormatError, UnsupportedError, brief, reading
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.json_files import parse_json, read_json
from kukri.host.files import stays_inside
from kukri.kernels.arrays import FloatArray
from kukri.models import ARCHITECTURES
from kukri.models.keys import Keys
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES

_MAX_BYTES = 1_000_000  # the longest modules.json
_MAX_FOLDER = 255  # letters of a module's path
_MAX_WIDTH = 1 << 16  # widest dense layer
_MODES: dict[str, Pooling] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
}
_POOLINGS: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "last": "last", "lasttoken": "last"}
_GGUF_POOLINGS: dict[int, Pooling] = {1: "mean", 2: "cls", 3: "last"}  # llama.cpp's; 0 means no pooling
_RANK = 4
DENSE_TENSORS = ("dense_2.weight", "dense_3.weight")  # GGUF's names, in their order
_ACTIVATIONS = {"Identity": "identity", "Tanh": "tanh", "Sigmoid": "sigmoid"}


# Where GGUF files have the prompt for a query and a document, as llama.cpp's converter writes it, and the
# prompt that Qwen3-Reranker was trained on.
EMBEDDING_KEY = "kukri.embedding"  # kukri's own: what no key of GGUF says, as JSON
LATE_KEY = "kukri.late_interaction"  # kukri's own: settings under PyLate's keys, as JSON
PAIR_KEY = "tokenizer.chat_template.rerank"
PAIR_INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PAIR_TEMPLATE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    f"<Instruct>: {PAIR_INSTRUCTION}\n"
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
_SETTINGS = "config_sentence_transformers.json"
_STANFORDS, _METADATA = "HF_ColBERT", "artifact.metadata"  # the class in config.json, and its settings
_JUDGES, _README = "qwen3-reranker", 1 << 16


@dataclass(frozen=True, eq=False)
class DenseLayer:
    """A layer on top of a pooled vector: activation(weight @ x + bias)."""

    weight: FloatArray  # [out, in]
    bias: FloatArray | None
    activation: str  # identity or tanh

    def __call__(self, x: FloatArray) -> FloatArray:
        """x [..., in] -> [..., out]."""
        y: FloatArray = x @ self.weight.T
        if self.bias is not None:
            y = y + self.bias
        return np.tanh(y) if self.activation == "tanh" else y


def directory_embedding(
    directory: Path, stated: Mapping[str, Any]
) -> tuple[EmbeddingConfig, tuple[DenseLayer, ...]]:
    """Reads a directory's embedding settings and dense layers; its config.json holds `stated`.

    Without modules.json it is the mean of all tokens, normalized. Raises FormatError for broken files and
    UnsupportedError for modules that kukri does not run.
    """
    with reading(directory):
        return _directory_embedding(directory, stated)


def _directory_embedding(
    directory: Path, stated: Mapping[str, Any]
) -> tuple[EmbeddingConfig, tuple[DenseLayer, ...]]:
    prompts, default = _prompts(*_stated(directory / _SETTINGS))
    max_tokens = _max_tokens(*_stated(directory / "sentence_bert_config.json"))
    pooling: Pooling = "mean"
    normalizes, layers = True, list[DenseLayer]()
    if (directory / "modules.json").is_file():
        normalizes = False
        for kind, path in _modules(directory):
            if kind == "Pooling":
                pooling = _pooling(path / "config.json")
            elif kind == "Dense":
                layers.append(_dense(path))
            elif kind == "Normalize":
                normalizes = True
            elif kind != "Transformer":
                raise UnsupportedError(
                    f"{directory / 'modules.json'}: module {brief(kind)} is not supported: use "
                    "Transformer, Pooling, Dense and Normalize"
                )
    template = PAIR_TEMPLATE if _judges_pairs(directory, stated) else ""
    score = _score(directory, stated)
    late = _late_interaction(directory)
    if stated.get("architectures") == [_STANFORDS] and not (directory / "modules.json").is_file():
        late, layers = _stanfords_settings(directory), [_stanfords_dense(directory)]
    config = EmbeddingConfig(pooling, normalizes, max_tokens, prompts, default, score, template, late)
    return config, tuple(layers)


def gguf_embedding(gguf: GGUFFile, architecture: str) -> EmbeddingConfig:
    """Reads a GGUF file's embedding settings: `{architecture}.pooling_type`, the prompt of pairs, and kukri's
    own keys; files without those of late interaction that have its tokens and its dense layer get PyLate's.
    """
    keys = Keys(gguf.metadata, gguf.path)
    own = parse_json(keys.text(EMBEDDING_KEY, "{}").encode(), gguf.path)
    prompts, default = _prompts(own, gguf.path)
    return replace(
        _by_gguf_keys(gguf, architecture),
        normalizes=Keys(own, gguf.path).flag("normalize", True),
        score="identity" if own.get("score") == "identity" else "sigmoid",
        max_tokens=_max_tokens(own, gguf.path),
        prompts=prompts,
        default_prompt=default,
    )


def _by_gguf_keys(gguf: GGUFFile, architecture: str) -> EmbeddingConfig:
    metadata = gguf.metadata
    template, name = metadata.get(PAIR_KEY), str(metadata.get("general.name")).replace(" ", "-")
    if isinstance(template, str) and all(part in template for part in ("{query}", "{document}")):
        return EmbeddingConfig(pair_template=template)
    if _JUDGES in name.lower():
        return EmbeddingConfig(pair_template=PAIR_TEMPLATE)
    if LATE_KEY in metadata or (DENSE_TENSORS[0] in gguf.tensors and _has_prefixes(metadata)):
        text = Keys(metadata, gguf.path).text(LATE_KEY, "{}")
        return EmbeddingConfig(late=_pylate(Keys(parse_json(text.encode(), gguf.path), gguf.path)))
    pooling = metadata.get(f"{architecture}.pooling_type")
    if isinstance(pooling, int | np.integer) and int(pooling) in _GGUF_POOLINGS:
        return EmbeddingConfig(_GGUF_POOLINGS[int(pooling)])
    return EmbeddingConfig()


def _has_prefixes(metadata: Mapping[str, Any]) -> bool:
    """True if PyLate's prefixes are tokens of a file, where words of WordPiece have a mark."""
    tokens, usual = metadata.get("tokenizer.ggml.tokens"), LateInteraction()
    known = {*tokens} if isinstance(tokens, list) else set()
    return all({prefix, f"▁{prefix}"} & known for prefix in (usual.query_prefix, usual.document_prefix))


def gguf_dense(gguf: GGUFFile) -> tuple[DenseLayer, ...]:
    """The dense layers of a GGUF file. Raises FormatError for tensors that cannot be such."""
    layers = []
    for name in DENSE_TENSORS:
        if name in gguf.tensors:
            shape = gguf.tensors[name].shape
            if len(shape) != 2 or max(shape) > _MAX_WIDTH:
                raise FormatError(f"must be of a dense layer, not {shape}", path=gguf.path, tensor=name)
            layers.append(DenseLayer(gguf.array(name), None, "identity"))
    return tuple(layers)


def dense_tensors(model: ModelConfig, layers: Sequence[DenseLayer]) -> dict[str, FloatArray]:
    """Dense layers by GGUF's names. Raises UnsupportedError if GGUF has no place for them."""
    is_plain = all(layer.bias is None and layer.activation == "identity" for layer in layers)
    if layers and not (is_plain and len(layers) == ARCHITECTURES[model.architecture].n_dense):
        raise UnsupportedError(
            f"these {len(layers)} dense layers are not supported in GGUF, which has two of EmbeddingGemma "
            "or one of LFM2's ColBERT"
        )
    return {name: layer.weight for name, layer in zip(DENSE_TENSORS, layers)}


def gguf_keys(
    model: ModelConfig, embedding: EmbeddingConfig, layers: Sequence[DenseLayer] = ()
) -> dict[str, Any]:
    """GGUF's keys of an encoder's pooling, token types and dense layers, of others the keys of ranking, and
    kukri's own key for the rest.
    """
    own = {
        "normalize": None if embedding.normalizes else False,
        "score": None if embedding.score == "sigmoid" else embedding.score,
        "max_seq_length": embedding.max_tokens,
        "prompts": embedding.prompts or None,
        "default_prompt_name": embedding.default_prompt,
    }
    stated = {name: value for name, value in own.items() if value is not None}
    return _gguf_keys(model, embedding, layers) | ({EMBEDDING_KEY: json.dumps(stated)} if stated else {})


def _gguf_keys(
    model: ModelConfig, embedding: EmbeddingConfig, layers: Sequence[DenseLayer]
) -> dict[str, Any]:
    if (late := embedding.late) is not None:
        if ARCHITECTURES[model.architecture].n_dense != 1:
            raise UnsupportedError(
                "vectors of tokens (ColBERT) are not supported in GGUF except for LFM2: keep the safetensors"
            )
        name = ARCHITECTURES[model.architecture].gguf
        width = len(layers[-1].weight) if layers else model.d_model
        return {f"{name}.embedding_length_out": np.uint32(width), LATE_KEY: json.dumps(_as_pylate(late))}
    number = next(number for number, pooling in _GGUF_POOLINGS.items() if pooling == embedding.pooling)
    pooling_key = f"{ARCHITECTURES[model.architecture].gguf}.pooling_type"
    if model.is_causal:
        of_pairs = {PAIR_KEY: embedding.pair_template} if embedding.pair_template else {}
        is_usual = embedding.pooling == EmbeddingConfig().pooling
        return of_pairs | ({} if is_usual else {pooling_key: np.uint32(number)})
    if model.head.kind == "sequence_classification":
        number = _RANK
    keys: dict[str, Any] = {pooling_key: np.uint32(number)}
    for name, weight in dense_tensors(model, layers).items():
        key = f"{ARCHITECTURES[model.architecture].gguf}.{name.removesuffix('.weight')}_feat"
        keys |= {f"{key}_out": np.uint32(weight.shape[0]), f"{key}_in": np.uint32(weight.shape[1])}
    if model.n_token_types:
        keys["tokenizer.ggml.token_type_count"] = np.uint32(model.n_token_types)
    return keys


def _judges_pairs(directory: Path, stated: Mapping[str, Any]) -> bool:
    """True for Qwen3-Reranker and its kin, which no file but the readme tells from Qwen3."""
    readme = directory / "README.md"
    heading = readme.read_text("utf-8", "replace")[:_README] if readme.is_file() else ""
    hints = (*directory.resolve().parts[-3:], str(stated.get("_name_or_path")))  # a hub's cache has snapshots
    return f"# {_JUDGES}" in heading.lower() or any(_JUDGES in hint.lower() for hint in hints)


def _modules(directory: Path) -> list[tuple[str, Path]]:
    """(the last part of its type, its directory) of each module, in order."""
    path = directory / "modules.json"
    if path.stat().st_size > _MAX_BYTES:
        raise FormatError(f"must be at most {_MAX_BYTES} bytes", path=path)
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FormatError(f"must be JSON: {' '.join(str(error).split())[:100]}", path=path) from None
    if not isinstance(modules, list):
        raise FormatError("must hold a list of modules", path=path)
    found = []
    for module in modules:
        kind, folder = (module.get("type"), module.get("path")) if isinstance(module, dict) else (None, None)
        if not isinstance(kind, str) or not isinstance(folder, str):
            raise FormatError(f"module {brief(module)} must have a type and a path", path=path)
        if len(folder) > _MAX_FOLDER:
            raise FormatError(f"module {brief(kind)} has the path {brief(folder)}", path=path)
        if not stays_inside(folder):
            raise FormatError(f"module {brief(kind)} must lie in the directory", path=path)
        found.append((kind.rpartition(".")[2], directory / folder))
    return found


def _pooling(path: Path) -> Pooling:
    stated = read_json(path)
    if stated.get("include_prompt") is False:
        raise UnsupportedError(
            f"{path}: key 'include_prompt' must be true: leaving the prompt's tokens out is not supported"
        )
    mode = stated.get("pooling_mode")
    if mode is None:
        modes = [key for key, value in stated.items() if key.startswith("pooling_mode_") and value is True]
        mode = _MODES.get(modes[0], modes[0]) if len(modes) == 1 else modes
    pooling = _POOLINGS.get(str(mode))
    if pooling is None:
        raise UnsupportedError(f"{path}: pooling {brief(mode)} is not supported: use mean, cls or last")
    return pooling


def _dense(directory: Path) -> DenseLayer:
    path = directory / "config.json"
    stated = read_json(path)
    keys = Keys(stated, path)
    n_in, n_out = (keys.whole(name, most=_MAX_WIDTH) for name in ("in_features", "out_features"))
    keys.expect("use_residual", False)
    activation = _activation(stated.get("activation_function"), path)
    if activation == "sigmoid":
        raise keys.unsupported("activation_function", "is Sigmoid: only Identity and Tanh are supported")
    bias = _tensor(directory, "linear.bias", (n_out,)) if stated.get("bias", True) else None
    return DenseLayer(_tensor(directory, "linear.weight", (n_out, n_in)), bias, activation)


def _tensor(directory: Path, name: str, shape: tuple[int, ...] | None = None) -> FloatArray:
    """A float tensor of a shape; without one, any matrix that can be a dense layer's."""
    from kukri.formats.huggingface.safetensors import open_files
    from kukri.formats.huggingface.weights import RUNS

    files = open_files(directory)
    if name not in files:
        raise FormatError("is missing", path=directory, tensor=name)
    found = files[name].tensors[name]
    is_matrix = len(found.shape) == 2 and min(found.shape) >= 1 and max(found.shape) <= _MAX_WIDTH
    if not (is_matrix if shape is None else found.shape == shape) or found.dtype not in RUNS:
        wanted = "a dense layer's" if shape is None else shape
        raise FormatError(f"must be {wanted}, not {found.dtype} {found.shape}", path=directory, tensor=name)
    rows = files[name].data(found).reshape(found.shape[0] if len(found.shape) > 1 else 1, -1)
    return dequantize(rows.copy(), QUANT_TYPES[found.dtype]).reshape(found.shape)


def _stanfords_dense(directory: Path) -> DenseLayer:
    """The dense layer of a model in Stanford's format: a tensor alongside the encoder's."""
    return DenseLayer(_tensor(directory, "linear.weight"), None, "identity")


def _stanfords_settings(directory: Path) -> LateInteraction:
    """The settings of a model in Stanford's format, under the names of its artifact.metadata."""
    keys = Keys(*_stated(directory / _METADATA))
    usual = LateInteraction("[unused0]", "[unused1]")
    return replace(
        usual,
        query_prefix=keys.text("query_token_id", usual.query_prefix),
        document_prefix=keys.text("doc_token_id", usual.document_prefix),
        query_tokens=keys.whole("query_maxlen", usual.query_tokens, most=MAX_CONTEXT),
        document_tokens=keys.whole("doc_maxlen", usual.document_tokens, most=MAX_CONTEXT),
        sees_expansion=keys.flag("attend_to_mask_tokens", usual.sees_expansion),
        skipped=usual.skipped if keys.flag("mask_punctuation", True) else (),
    )


def _late_interaction(directory: Path) -> LateInteraction | None:
    """PyLate's settings of a model with a vector for each token; None for others."""
    keys = Keys(*_stated(directory / _SETTINGS))
    return _pylate(keys) if str(keys.value("similarity_fn_name")).lower() == "maxsim" else None


def _as_pylate(late: LateInteraction) -> dict[str, Any]:
    """Settings under PyLate's keys."""
    return {
        "query_prefix": late.query_prefix,
        "document_prefix": late.document_prefix,
        "query_length": late.query_tokens,
        "document_length": late.document_tokens,
        "do_query_expansion": late.expands,
        "attend_to_expansion_tokens": late.sees_expansion,
        "skiplist_words": list(late.skipped),
    }


def _pylate(keys: Keys) -> LateInteraction:
    """Settings by PyLate's keys."""
    usual = LateInteraction()
    words = keys.value("skiplist_words")
    return LateInteraction(
        keys.text("query_prefix", usual.query_prefix),
        keys.text("document_prefix", usual.document_prefix),
        keys.whole("query_length", usual.query_tokens, most=MAX_CONTEXT),
        keys.whole("document_length", usual.document_tokens, most=MAX_CONTEXT),
        keys.flag("do_query_expansion", usual.expands),
        keys.flag("attend_to_expansion_tokens", usual.sees_expansion),
        usual.skipped if words is None else tuple(keys.items("skiplist_words", str)),
    )


def _stated(path: Path) -> tuple[dict[str, Any], Path]:
    """The contents of a file, empty if it is missing, and its path."""
    return read_json(path) if path.is_file() else {}, path


def _prompts(stated: Mapping[str, Any], path: Path) -> tuple[dict[str, str], str | None]:
    """The prompts by name, and the name of the one that is used if none is chosen."""
    prompts, default = stated.get("prompts") or {}, stated.get("default_prompt_name")
    if not isinstance(prompts, dict) or not all(isinstance(prompt, str) for prompt in prompts.values()):
        raise FormatError("key 'prompts' must map names to strings", path=path)
    if default is not None and default not in prompts:
        raise FormatError(
            f"key 'default_prompt_name' must be among the prompts, not {brief(default)}", path=path
        )
    return prompts, default


def _max_tokens(stated: Mapping[str, Any], path: Path) -> int | None:
    keys = Keys(stated, path)
    return (
        keys.whole("max_seq_length", most=MAX_CONTEXT) if keys.value("max_seq_length") is not None else None
    )


def _score(directory: Path, stated: Mapping[str, Any]) -> str:
    """The function that a cross-encoder's output goes through, as sentence-transformers chooses it."""
    own = stated.get("sentence_transformers")
    chosen = own.get("activation_fn") if isinstance(own, dict) else None
    chosen = chosen or stated.get("sbert_ce_default_activation_function")
    return "sigmoid" if chosen is None else _activation(chosen, directory / "config.json")


def _activation(stated: Any, path: Path) -> str:
    """A class of torch by the last part of its name; none is the identity."""
    name = "Identity" if stated is None else str(stated).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        raise UnsupportedError(f"{path}: activation {brief(stated)} is not supported")
    return _ACTIVATIONS[name]
