"""The options of loading a model, each declared once: its type, help, flag, and what it accepts.

`LLM`, the flags of the command line, the configuration file of `kukri serve` and the arguments of Ray Serve
all read an option by `ModelOptions`, so a value means the same everywhere and an error names the option.
"""

import os
from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from kukri.config import KV_TYPE_SIZES, KVType, Speculation
from kukri.dataclass import Field, dataclass, fields
from kukri.errors import ConfigError, UnsupportedError, close_matches
from kukri.host.installed import needs_package
from kukri.opening.option_fields import (
    as_integer,
    as_names,
    as_number,
    as_path,
    as_size,
    as_switch,
    as_text,
    declared,
    describe,
    one_of,
    read_fields,
)

if TYPE_CHECKING:
    from kukri.stages.sources import StagePlacer

BackendName = Literal["cpu", "portable", "torch", "gpu", "reference"]
# commands have these groups of flags; an option of no group is set only in Python and in files
Group = Literal["any", "generating", "many", "readers"]
READERS = ("control_vectors", "probes", "saes", "transcoders")  # options of the group "readers"

_RAY_STAGES = "kukri.scale.pipeline:RayStages"  # by name: it stands above this module, and imports Ray


def _paths(value: Any) -> dict[str, str]:
    """Paths by name, of a mapping or of texts NAME=PATH."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        pairs = [(name, as_path(path)) for name, path in value.items()]
    elif isinstance(value, Sequence):
        pairs = [_named_path(text) for text in value]
    else:
        raise ValueError("a mapping of names to paths")
    found: dict[str, str] = {}
    for name, path in pairs:
        if name in found:
            raise ValueError(f"of different names, but two are named {name!r}")
        found[name] = path
    return found


def _named_path(text: Any) -> tuple[str, str]:
    name, separator, path = str(text).partition("=")
    if not (separator and name and path):
        raise ValueError("NAME=PATH each")
    return name, path


def _readers(value: Any) -> Any:
    """Files by name; from Python also objects that are loaded already."""
    if isinstance(value, Mapping) and not all(isinstance(one, (str, os.PathLike)) for one in value.values()):
        return dict(value)
    return _paths(value)


def _stages(value: Any) -> "int | tuple[str, ...] | StagePlacer":
    """A number, addresses, an object that places stages, or the text of one of them."""
    if isinstance(value, str):
        kind, _, number = value.partition(":")
        if kind == "ray" and number.isdecimal():
            return _ray_stages(int(number))
        if value.isdecimal():
            return int(value)
    if isinstance(value, (str, list, tuple)):
        return as_names(value)
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "n_stages")):
        raise ValueError("a number of processes, HOST:PORT,… or ray:N")
    return value  # type: ignore[no-any-return]


def _ray_stages(n_stages: int) -> "StagePlacer":
    try:
        placer: StagePlacer = resolve_name(_RAY_STAGES)(n_stages)
    except ImportError as error:
        raise UnsupportedError(needs_package(f"--stages ray:{n_stages}", error.name, "ray")) from None
    return placer


def _by_name(what: str, flag: str, file: str) -> Any:
    """The option for files that requests use by name."""
    text = f"{what} for requests to use by name; repeatable."
    return declared(_readers, text, "readers", flag=flag, metavar=f"NAME={file}", repeats=True)


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """All options of `LLM`, from which any process can open the same model.

    Each field takes a value of its type or its text on the command line. Raises ConfigError, which names the
    field and its flag, for anything else.
    """

    model: str | None = declared(
        as_path,
        "A known name, an `org/repo[:type]` of the Hugging Face hub, or the path of a .gguf file or a "
        "safetensors directory; None for the default model. Models that are not in the cache are "
        "downloaded.",
    )
    n_threads: int | None = declared(
        as_integer, "Threads. [default: usable cores]", "any", flag="--threads", metavar="N"
    )
    device: str | None = declared(
        as_text,
        "cpu, cuda, cuda:1, mps, xpu, or auto (a GPU if available); GPUs require PyTorch. [default: cpu]",
        "any",
        metavar="NAME",
    )
    backend: BackendName | None = declared(
        one_of(BackendName),
        "Compute backend. portable: CPU, with equal bits on every processor; torch: PyTorch; reference: "
        "NumPy, slow. [default: by device]",
        "any",
    )
    stages: "int | tuple[str, ...] | StagePlacer" = declared(
        _stages,
        "Split the layers over N local processes, over `kukri stage` workers (HOST:PORT,…), or over Ray "
        "(ray:N).",
        "any",
        default=1,
        metavar="N",
    )
    devices: tuple[str, ...] = declared(
        as_names,
        "Split the model over devices, one process each: cuda:0,cuda:1.",
        "any",
        default=(),
        metavar="NAMES",
    )
    quantize: str | None = declared(
        as_text, "Quantize a safetensors model while loading: Q8_0, Q4_K …", "any", metavar="TYPE"
    )
    rope_scaling: str | None = declared(
        as_text, "Extend the context: linear, dynamic or yarn.", "any", metavar="KIND"
    )
    rope_factor: float | None = declared(
        as_number, "Factor for --rope-scaling; 4 means four times the context.", "any", metavar="X"
    )
    max_context: int | None = declared(
        as_integer,
        "Context length, prompt and answer. [default: the model's, or less if memory is short]",
        "generating",
        metavar="N",
    )
    kv_type: KVType | None = declared(
        one_of(KVType),
        f"KV cache type: {KV_TYPE_SIZES}. [default: f16]",
        "generating",
    )
    speculation: Speculation | None = declared(
        one_of(Speculation),
        "Speculative decoding: ngram (prompt lookup), draft or off; never changes the output. "
        "[default: ngram; draft with --draft-model]",
        "generating",
    )
    draft_model: str | None = declared(
        as_path,
        "Small model that drafts tokens, best with the same vocabulary, or mtp: the model's own "
        "multi-token prediction layer.",
        "generating",
        metavar="MODEL",
    )
    adapters: Mapping[str, str] = declared(
        _paths,
        "LoRA adapter: a PEFT directory or GGUF file; repeatable.",
        "generating",
        default={},
        flag="--adapter",
        metavar="NAME=PATH",
        repeats=True,
    )
    prefix_cache: bool = declared(
        as_switch,
        "Reuse the KV cache for later prompts with the same prefix. [default: on]",
        "generating",
        default=True,
        flag="--prefix-cache/--no-prefix-cache",
    )
    prefix_dir: str | None = declared(
        as_path,
        "Save the KV cache of prompts here; later prompts with the same prefix start faster.",
        "generating",
        metavar="DIR",
        envvar="KUKRI_PREFIX_DIR",
    )
    prefix_bytes: int | None = declared(
        as_size,
        "Size limit of --prefix-dir. [default: 4GiB]",
        "generating",
        flag="--prefix-size",
        metavar="SIZE",
    )
    snapshot_bytes: int | None = declared(
        as_size,
        "Memory for cached states of hybrid models. [default: 512MiB]",
        "generating",
        flag="--snapshot-memory",
        metavar="SIZE",
    )
    max_requests: int | None = declared(
        as_integer, "Concurrent requests in the batch; others wait. [default: 16]", "many", metavar="N"
    )
    max_step_tokens: int = declared(
        as_integer,
        "Maximum tokens per step; longer prompts take several steps. [default: 512]",
        "many",
        default=512,
        metavar="N",
    )
    max_prompt_tokens: int | None = declared(
        as_integer,
        "Maximum prompt tokens in a step that also decodes; fewer delay other answers less. [default: 64]",
        "many",
        metavar="N",
    )
    max_step_ms: int | None = declared(
        as_integer,
        "Maximum milliseconds for prompts in a step that also decodes; 0 for no limit. [default: 150]",
        "many",
        metavar="N",
    )
    kv_bytes: int | None = declared(
        as_size,
        "KV cache size, such as 2GiB. [default: from contexts and free memory]",
        "many",
        flag="--kv-memory",
        metavar="SIZE",
    )
    mmproj: str | None = declared(
        as_path,
        "Image encoder of a GGUF model. [default: a file next to it with mmproj in its name]",
        "generating",
        metavar="FILE",
    )
    chat_template: str | None = declared(
        as_text, "Jinja source of a chat template that replaces the model's."
    )
    fit: bool = declared(
        as_switch,
        "If memory is short, choose a weight type and KV cache type that fit, where none is given; logged.",
        default=False,
    )
    raw_answers: bool = declared(
        as_switch,
        "Return answers as raw text, with reasoning and tool calls unparsed.",
        default=False,
    )
    control_vectors: Mapping[str, Any] | None = _by_name("Control vector (GGUF)", "--control-vector", "FILE")
    probes: Mapping[str, Any] | None = _by_name("Linear probe (.safetensors)", "--probe", "FILE")
    saes: Mapping[str, Any] | None = _by_name("SAELens sparse autoencoder", "--sae", "DIR")
    transcoders: Mapping[str, Any] | None = _by_name(
        "Transcoders of one or more layers", "--transcoder", "DIR"
    )

    @property
    def readers(self) -> dict[str, Any]:
        """The files that steer the model or read its activations, by option."""
        return {name: getattr(self, name) for name in READERS}

    @property
    def has_readers(self) -> bool:
        """True if any is given."""
        return any(self.readers.values())

    def __post_init__(self) -> None:
        read_fields(self)


# What other programs call options of `ModelOptions`
_ELSEWHERE = {
    "max_context": ("n_ctx", "num_ctx", "max_model_len", "max_seq_len", "max_seq_length", "context_length"),
    "n_threads": ("num_threads", "num_thread", "threads"),
    "quantize": ("quantization", "load_in_4bit", "load_in_8bit"),
    "kv_type": ("kv_cache_dtype", "type_k", "type_v", "cache_type_k", "cache_type_v"),
    "kv_bytes": ("kv_cache_memory_bytes",),
    "max_requests": ("max_num_seqs", "n_parallel"),
    "max_step_tokens": ("n_batch", "n_ubatch", "max_num_batched_tokens"),
    "adapters": ("lora_path", "lora", "lora_modules"),
    "draft_model": ("speculative_model", "assistant_model"),
    "prefix_cache": ("enable_prefix_caching",),
    "mmproj": ("clip_model_path", "chat_handler"),
    "device": ("device_map", "main_gpu", "n_gpu_layers"),
}


def check_names(names: Iterable[str], what: str) -> None:
    """Raise ConfigError if an option of `what` is unknown; the error names the option that is meant."""
    known = option_fields()
    for name in names:
        if name in known:
            continue
        meant = [own for own, others in _ELSEWHERE.items() if name in others]
        hint = f": use {meant[0]!r}" if meant else close_matches(name, known)
        raise ConfigError(f"{name!r} is not supported by {what}{hint}")


class ModelKeywords(TypedDict, total=False):
    """The fields of `ModelOptions` but `model`, as keywords of `LLM`."""

    n_threads: int | None
    device: str | None
    backend: BackendName | None
    stages: "int | Sequence[str] | StagePlacer"
    devices: Sequence[str]
    quantize: str | None
    rope_scaling: str | None
    rope_factor: float | None
    max_context: int | None
    kv_type: KVType | None
    speculation: Speculation | None
    draft_model: str | os.PathLike[str] | None
    adapters: Mapping[str, str | os.PathLike[str]] | None
    prefix_cache: bool
    prefix_dir: str | os.PathLike[str] | None
    prefix_bytes: int | None
    snapshot_bytes: int | None
    max_requests: int | None
    max_step_tokens: int
    max_prompt_tokens: int | None
    max_step_ms: int | None
    kv_bytes: int | None
    mmproj: str | os.PathLike[str] | None
    chat_template: str | None
    fit: bool
    raw_answers: bool
    control_vectors: Mapping[str, Any] | None
    probes: Mapping[str, Any] | None
    saes: Mapping[str, Any] | None
    transcoders: Mapping[str, Any] | None


def option_fields() -> dict[str, Field[Any]]:
    """The fields of `ModelOptions` by name."""
    return {one.name: one for one in fields(ModelOptions)}


describe(ModelOptions)
