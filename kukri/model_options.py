"""The options of loading a model, each declared once: its type, help, flag, and what it accepts.

`LLM`, the flags of the command line, the configuration file of `kukri serve` and the arguments of Ray Serve
all read an option by `ModelOptions`, so a value means the same everywhere and an error names the option.
"""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, TypedDict, get_args, get_origin

from kukri.config import KVType, Speculation
from kukri.errors import ConfigError, UnsupportedError

if TYPE_CHECKING:
    from kukri.stages.sources import StagePlacer

BackendName = Literal["cpu", "torch", "gpu", "reference"]
# commands have these groups of flags; an option of no group is set only in Python and in files
Group = Literal["any", "generating", "many", "readers"]

_RAY_STAGES = "kukri.scale.pipeline:RayStages"  # by name: it stands above this module, and imports Ray
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
_SWITCHES = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


@dataclass(frozen=True)
class OptionFacts:
    """What an option accepts and how it is shown.

    `read` makes the option's value of what a caller, a flag, a file or Ray gives it, and raises ValueError
    with the words after "must be". `flag` is empty for an option without one; `repeats` a flag that may be
    given several times.
    """

    read: Callable[[Any], Any]
    help: str
    flag: str
    group: Group | None
    metavar: str | None = None
    envvar: str | None = None
    repeats: bool = False


def _setting(
    read: Callable[[Any], Any],
    help: str,
    group: Group | None = None,
    *,
    default: Any = None,
    flag: str = "",
    **shown: Any,
) -> Any:
    facts = OptionFacts(read, help, flag, group, **shown)
    if isinstance(default, dict):
        return field(default_factory=dict, metadata={"facts": facts})
    return field(default=default, metadata={"facts": facts})


def size_bytes(text: str, name: str = "a size") -> int:
    """The bytes of a size such as 2MiB, 500KB or 4096. Raises ConfigError, about `name`, for other text."""
    try:
        return _size(text)
    except ValueError as error:
        raise ConfigError(f"{name} must be {error}, not {text!r}") from None


def _size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMG]i?B|)", str(value))
    if match is None:
        raise ValueError("a size such as 2MiB or 1.5GiB")
    return int(float(match[1]) * _UNITS[match[2]])


def _integer(value: Any) -> int:
    text = str(value)
    if isinstance(value, bool) or not re.fullmatch(r"-?[0-9]{1,18}", text):
        raise ValueError("a whole number")
    return int(text)


def _number(value: Any) -> float:
    if not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError):
            pass
    raise ValueError("a number")


def _switch(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    found = _SWITCHES.get(str(value).lower())
    if found is None:
        raise ValueError("true or false")
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("a text")
    return value


def _path(value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise ValueError("a path")
    return str(os.fspath(value))


def _one_of(kind: Any) -> Callable[[Any], Any]:
    names = get_args(kind)

    def read(value: Any) -> Any:
        if value is False and "off" in names:  # YAML's word for off
            return "off"
        if value not in names:
            raise ValueError(f"one of {', '.join(names)}")
        return value

    return read


def _paths(value: Any) -> dict[str, str]:
    """Paths by name, of a mapping or of texts NAME=PATH."""
    if isinstance(value, str):
        value = [value]
    if isinstance(value, Mapping):
        pairs = [(name, _path(path)) for name, path in value.items()]
    elif isinstance(value, Sequence):
        pairs = [_named_path(text) for text in value]
    else:
        raise ValueError("paths by name")
    found: dict[str, str] = {}
    for name, path in pairs:
        if name in found:
            raise ValueError(f"of different names: two are named {name!r}")
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


def _names(value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        value = value.split(",")
    if not isinstance(value, Sequence) or not all(isinstance(name, str) and name for name in value):
        raise ValueError("names with commas between them")
    return tuple(value)


def _stages(value: Any) -> "int | tuple[str, ...] | StagePlacer":
    """A number, addresses, an object that places stages, or the text of one of them."""
    if isinstance(value, str):
        kind, _, number = value.partition(":")
        if kind == "ray" and number.isdecimal():
            return _ray_stages(int(number))
        if value.isdecimal():
            return int(value)
    if isinstance(value, (str, list, tuple)):
        return _names(value)
    if isinstance(value, bool) or not (isinstance(value, int) or hasattr(value, "n_stages")):
        raise ValueError("a number of processes, HOST:PORT,… or ray:N")
    return value  # type: ignore[no-any-return]


def _ray_stages(n_stages: int) -> "StagePlacer":
    try:
        placer: StagePlacer = resolve_name(_RAY_STAGES)(n_stages)
    except ImportError as error:
        raise UnsupportedError(
            f"--stages ray:{n_stages} needs the package {error.name}: pip install 'kukri[ray]'"
        ) from None
    return placer


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Everything that `LLM` is opened with; any process can open the same model from it.

    Each field takes a value of its type or the text that the command line has for it. Raises ConfigError,
    naming the field and its flag, for anything else.
    """

    model: str | None = _setting(
        _path,
        "A known name, an `org/repo[:type]` of the Hugging Face hub, or the path of a .gguf file or of a "
        "directory with safetensors; None for the default model. What is not in the cache is downloaded.",
    )
    n_threads: int | None = _setting(
        _integer, "Threads. [default: usable cores]", "any", flag="--threads", metavar="N"
    )
    device: str | None = _setting(
        _text,
        "cpu, cuda, cuda:1, mps, xpu, or auto (a GPU if available); all but the CPU need PyTorch. "
        "[default: cpu]",
        "any",
        metavar="NAME",
    )
    backend: BackendName | None = _setting(
        _one_of(BackendName),
        "Compute backend; torch is PyTorch without Triton, reference is NumPy, for checks. "
        "[default: by device]",
        "any",
    )
    stages: "int | tuple[str, ...] | StagePlacer" = _setting(
        _stages,
        "Split the model among N processes, HOST:PORT,… of kukri stage and this one, or ray:N.",
        "any",
        default=1,
        metavar="N",
    )
    devices: tuple[str, ...] = _setting(
        _names,
        "Split the model over devices, one process each: cuda:0,cuda:1.",
        "any",
        default=(),
        metavar="NAMES",
    )
    quantize: str | None = _setting(
        _text, "Quantize a safetensors model while loading: Q8_0, Q4_K …", "any", metavar="TYPE"
    )
    rope_scaling: str | None = _setting(
        _text, "Extend the context: linear, dynamic or yarn.", "any", metavar="KIND"
    )
    rope_factor: float | None = _setting(
        _number, "Factor for --rope-scaling; 4 means four times the context.", "any", metavar="X"
    )
    max_context: int | None = _setting(
        _integer,
        "Context length, prompt and answer. [default: the model's, or less if memory is short]",
        "generating",
        metavar="N",
    )
    kv_type: KVType = _setting(
        _one_of(KVType),
        "KV cache type: q8_0 and fp8 (GPUs only) take half the memory, q4 a quarter, f32 twice (exact). "
        "[default: f16]",
        "generating",
        default="f16",
    )
    speculation: Speculation | None = _setting(
        _one_of(Speculation),
        "Speculative decoding: ngram (prompt lookup), draft or off; never changes the output. "
        "[default: ngram; draft with --draft-model]",
        "generating",
    )
    draft_model: str | None = _setting(
        _path, "Small model with the same vocabulary that drafts tokens.", "generating", metavar="MODEL"
    )
    adapters: Mapping[str, str] = _setting(
        _paths,
        "LoRA adapter: a PEFT directory or GGUF file; repeatable.",
        "generating",
        default={},
        flag="--adapter",
        metavar="NAME=PATH",
        repeats=True,
    )
    prefix_cache: bool = _setting(
        _switch,
        "Keep the KV cache of prompts for later prompts that begin alike. [default: on]",
        "generating",
        default=True,
        flag="--prefix-cache/--no-prefix-cache",
    )
    prefix_dir: str | None = _setting(
        _path,
        "Save the KV cache of prompts here; later prompts with the same prefix start faster.",
        "generating",
        metavar="DIR",
        envvar="KUKRI_PREFIX_DIR",
    )
    prefix_bytes: int | None = _setting(
        _size,
        "Size limit of --prefix-dir. [default: 4GiB]",
        "generating",
        flag="--prefix-size",
        metavar="SIZE",
    )
    snapshot_bytes: int | None = _setting(
        _size,
        "Memory for the states of hybrid models after prompts and answers. [default: 512MiB]",
        "generating",
        flag="--snapshot-memory",
        metavar="SIZE",
    )
    max_requests: int | None = _setting(
        _integer, "Concurrent requests in the batch; others wait. [default: 16]", "many", metavar="N"
    )
    max_step_tokens: int = _setting(
        _integer,
        "Most tokens that a step computes: a longer prompt is read in several steps. [default: 512]",
        "many",
        default=512,
        metavar="N",
    )
    max_prompt_tokens: int | None = _setting(
        _integer,
        "Most prompt tokens of a step in which others decode; fewer delay them less. [default: 64]",
        "many",
        metavar="N",
    )
    max_step_ms: int | None = _setting(
        _integer,
        "Most milliseconds for the prompts of a step, which others wait for; 0: no bound. [default: 150]",
        "many",
        metavar="N",
    )
    kv_bytes: int | None = _setting(
        _size,
        "KV cache size, such as 2GiB. [default: from contexts and free memory]",
        "many",
        flag="--kv-memory",
        metavar="SIZE",
    )
    chat_template: str | None = _setting(_text, "Source of a Jinja template that replaces the file's.")
    control_vectors: Mapping[str, Any] | None = _setting(
        _readers,
        "Control vector (GGUF) for requests to use by name; repeatable.",
        "readers",
        flag="--control-vector",
        metavar="NAME=FILE",
        repeats=True,
    )
    probes: Mapping[str, Any] | None = _setting(
        _readers,
        "Linear probe (.safetensors) for requests to use by name; repeatable.",
        "readers",
        flag="--probe",
        metavar="NAME=FILE",
        repeats=True,
    )
    saes: Mapping[str, Any] | None = _setting(
        _readers,
        "SAELens sparse autoencoder for requests to use by name; repeatable.",
        "readers",
        flag="--sae",
        metavar="NAME=DIR",
        repeats=True,
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if value is None:  # not given, as an empty form and YAML's null say it
                value = one.default_factory() if callable(one.default_factory) else one.default
            else:
                value = read_option(one, value)
            object.__setattr__(self, one.name, value)


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
    kv_type: KVType
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
    chat_template: str | None
    control_vectors: Mapping[str, Any] | None
    probes: Mapping[str, Any] | None
    saes: Mapping[str, Any] | None


def option_fields() -> dict[str, Field[Any]]:
    """The fields of `ModelOptions` by name."""
    return {one.name: one for one in fields(ModelOptions)}


def option_facts(one: Field[Any]) -> OptionFacts:
    """What a field of `ModelOptions` accepts, and how it is shown."""
    facts: OptionFacts = one.metadata["facts"]
    return facts


def choices(one: Field[Any]) -> tuple[str, ...]:
    """The names that an option chooses from; none for any other option."""
    kinds = [kind for kind in (one.type, *get_args(one.type)) if get_origin(kind) is Literal]
    return get_args(kinds[0]) if kinds else ()


def flag_of(one: Field[Any]) -> str:
    """The flag of an option: of a switch the one that turns it on, "" for an option without a flag."""
    facts = option_facts(one)
    if facts.group is None:
        return ""
    return facts.flag.partition("/")[0] or "--" + one.name.replace("_", "-")


def read_option(one: Field[Any], value: Any, where: str | None = None) -> Any:
    """The value of an option. Raises ConfigError about `where`, by default its keyword and its flag."""
    try:
        return option_facts(one).read(value)
    except ValueError as error:
        flag = flag_of(one)
        name = where or (f"{one.name} ({flag})" if flag else one.name)
        raise ConfigError(f"{name} must be {error}, not {value!r}") from None


def _described() -> str:
    """The section `Attributes:` of the docstring of `ModelOptions`."""
    lines = (f"        {one.name}: {option_facts(one).help}" for one in fields(ModelOptions))
    return "\n".join(["", "    Attributes:", *lines])


ModelOptions.__doc__ = f"{ModelOptions.__doc__}{_described()}\n    "
