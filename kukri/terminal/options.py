"""Options of the command line, each declared once, in dataclasses whose fields carry flags and help.

A command takes them as parameters; `command` expands their fields into options of that command. Fields have
the names that `LLM`, `SamplingParams` and the commands' functions use, so `given` passes them on as they are.
Annotations are evaluated here, not postponed: typer reads them at each start. The dataclasses have no
`__repr__`, and no `__eq__` if nobody compares them: half a millisecond each.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from kukri.errors import ConfigError, UnsupportedError

_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def command(app: typer.Typer, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
    """Registers a function as a command of `app`; its parameters may be the dataclasses of this module.

    `name` is the function's unless given; `settings` are `typer.Typer.command`'s.
    """

    def register(function: Any) -> Any:
        app.command(name, **settings)(expanded(function))
        return function

    return register


def expanded(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with each parameter that is a dataclass replaced by keyword parameters for its fields."""
    groups: dict[str, Any] = {}
    parameters: list[Parameter] = []
    for parameter in signature(function).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += map(_as_parameter, fields(parameter.annotation))
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY))

    def call(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{one.name: values.pop(one.name) for one in fields(group)})
        return function(**values)

    call.__name__, call.__doc__ = function.__name__, function.__doc__
    call.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    call.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return call


def _as_parameter(one: Field[Any]) -> Parameter:
    annotation = Annotated[one.type, one.metadata["option"]]  # type: ignore[name-defined]
    return Parameter(one.name, Parameter.KEYWORD_ONLY, default=one.default, annotation=annotation)


def option(
    help: str,
    *flags: str,
    default: Any = None,
    convert: Callable[[Any], Any] | None = None,
    **settings: Any,
) -> Any:
    """A dataclass field that is an option; `flags` and `settings` are `typer.Option`'s.

    Without flags the option is named like the field. `given` passes on what `convert` makes of the value.
    """
    made = typer.Option(*flags, help=help, **settings)
    return field(default=default, metadata={"option": made, "convert": convert})


def given(options: Any) -> dict[str, Any]:
    """Fields of a dataclass that the command line set: those that are neither None, False nor empty."""
    found: dict[str, Any] = {}
    for one in fields(options):
        value, convert = getattr(options, one.name), one.metadata["convert"]
        if not (value is None or value is False or value == []):
            found[one.name] = value if convert is None else convert(value)
    return found


def named_paths(values: Sequence[str], flag: str) -> dict[str, str]:
    """The paths of NAME=PATH by their names. Raises ConfigError, about the flag, for anything else."""
    found: dict[str, str] = {}
    for text in values:
        name, separator, path = text.partition("=")
        if not (separator and name and path):
            raise ConfigError(f"{flag} is given as NAME=PATH, not {text!r}")
        if name in found:
            raise ConfigError(f"{flag}: two are named {name!r}")
        found[name] = path
    return found


def size_bytes(text: str, name: str = "a size") -> int:
    """The bytes of a size such as 2MiB, 500KB or 4096. Raises ConfigError, about `name`, for other text."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B|)", text)
    if match is None:
        raise ConfigError(f"{name} must be a size such as 2MiB or 1.5GiB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


# --- the model: an argument or -m, in every command


def model_names(incomplete: str) -> list[str]:
    """Known and cached models for the shell's completion."""
    from kukri.formats.hub import MODELS
    from kukri.formats.model_cache import cached_models
    from kukri.formats.repos import SHORT_NAMES

    names = dict.fromkeys([*(model.name for model in cached_models()), *MODELS, *SHORT_NAMES])
    return [name for name in names if name.startswith(incomplete)]


MODEL_HELP = (
    "Name (see kukri list), org/repo[:type] on the Hugging Face hub, .gguf file or safetensors directory."
)
ModelArgument = Annotated[
    str | None, typer.Argument(metavar="[MODEL]", help=MODEL_HELP, autocompletion=model_names)
]
NeededModel = Annotated[
    str | None, typer.Argument(metavar="MODEL", help=MODEL_HELP, autocompletion=model_names)
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="The model, instead of the argument.",
        autocompletion=model_names,
    ),
]


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model that is given as an argument or as -m; None for the default model."""
    if argument is not None and option is not None:
        raise ConfigError(f"the model is given twice: {argument!r} and -m {option!r}")
    return argument if option is None else option


def model_and(option: str | None, *arguments: str | None, names: str, needs_model: bool = True) -> list[Any]:
    """The model and the arguments behind it, of which the model comes first or is given as -m.

    `names` are those of the arguments, separated by spaces, for errors. Without `needs_model` the model may
    be missing: the result then begins with None.
    """
    present = [argument for argument in arguments if argument is not None]
    if len(present) == len(arguments):
        return [one_model(present[0], option), *present[1:]]
    if option is not None or not needs_model:
        if len(present) == len(arguments) - 1:
            return [option, *present]
        present.append("")  # the model, which the list of arguments need not have
    raise ConfigError(f"missing argument {names.split()[len(present)]}: --help shows them all")


# --- options that several commands share

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
System = Annotated[
    str, typer.Option("--system", "-s", metavar="TEXT", help="System message; '' for the template's own.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="Threads. [default: usable cores]")
]
Alias = Annotated[
    list[str] | None, typer.Option("--alias", metavar="NAME", help="Another name of the model; repeatable.")
]
Imatrix = Annotated[
    Path | None, typer.Option(metavar="FILE", help="Importance matrix of `kukri imatrix` or llama.cpp.")
]
ServerURL = Annotated[str, typer.Option(metavar="URL", help="URL of the server.")]
APIKey = Annotated[str | None, typer.Option(metavar="KEY", envvar="KUKRI_API_KEY", help="API key.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the result's size and types; write nothing.")]


@dataclass(frozen=True, eq=False, repr=False)
class ModelOptions:
    """Options of loading that every command with an engine has."""

    n_threads: int | None = option("Threads. [default: usable cores]", "--threads", metavar="N")
    device: str | None = option(
        "cpu, cuda, cuda:1, mps, xpu, or auto for a GPU if there is one. [default: cpu]", metavar="NAME"
    )
    backend: Literal["cpu", "torch", "gpu", "reference"] | None = option(
        "How to compute there; torch is PyTorch without Triton. [default: by the device]"
    )
    stages: str | None = option(
        "Cut the model into so many processes, HOST:PORT,… of kukri stage and this one, or ray:N.",
        metavar="N",
        convert=lambda text: _stages(text),
    )
    devices: str | None = option(
        "Cut the model over devices, a process each: cuda:0,cuda:1.",
        metavar="NAMES",
        convert=lambda text: tuple(text.split(",")),
    )
    quantize: str | None = option("Pack a safetensors model while loading: Q8_0, Q4_K …", metavar="TYPE")
    rope_scaling: str | None = option("Extend the context: linear, dynamic or yarn.", metavar="KIND")
    rope_factor: float | None = option("Factor of --rope-scaling: 4 for four times the context.", metavar="X")


@dataclass(frozen=True, eq=False, repr=False)
class LoadOptions(ModelOptions):
    """Options of loading a model to generate with."""

    max_context: int | None = option("Tokens of prompt and answer. [default: the model's]", metavar="N")
    kv_type: Literal["f16", "q8_0", "q4", "fp8", "f32"] | None = option(
        "KV-cache type; q8_0 takes half the memory, fp8 too (on GPUs), q4 a quarter, f32 twice and is "
        "exact. [default: f16]"
    )
    speculation: str | None = option(
        "Speculative decoding: ngram (prompt lookup), draft or off; output is unchanged. "
        "[default: ngram; draft with --draft-model]",
        metavar="KIND",
    )
    draft_model: str | None = option(
        "Small model that drafts tokens, of the same vocabulary.", metavar="MODEL"
    )
    adapters: list[str] | None = option(
        "LoRA adapter: a PEFT directory or GGUF file; repeatable.",
        "--adapter",
        metavar="NAME=PATH",
        convert=lambda values: named_paths(values, "--adapter"),
    )
    prefix_dir: str | None = option(
        "Save what prompts computed here; later runs whose prompts begin alike start sooner.",
        metavar="DIR",
        envvar="KUKRI_PREFIX_DIR",
    )
    prefix_bytes: int | None = option(
        "Largest size of --prefix-dir. [default: 4GiB]",
        "--prefix-size",
        metavar="SIZE",
        parser=lambda text: size_bytes(text, "--prefix-size"),
    )


def _stages(text: str) -> Any:
    """The stages of `LLM` that a text names. Raises UnsupportedError without Ray for ray:N."""
    kind, _, number = text.partition(":")
    if kind == "ray" and number.isdecimal():
        try:
            from kukri.scale.pipeline import RayStages
        except ImportError as error:
            raise UnsupportedError(
                f"--stages {text} needs the package {error.name}: install it with pip install 'kukri[ray]'"
            ) from None
        return RayStages(int(number))
    return int(text) if text.isdecimal() else tuple(text.split(","))


def _named_file(text: str) -> tuple[str, str]:
    """The name and the path of NAME=PATH."""
    name, separator, path = text.partition("=")
    if not separator or not name or not path:
        raise ConfigError(f"a file is given as NAME=PATH, not {text!r}")
    return name, path


@dataclass(frozen=True, eq=False, repr=False)
class ReaderOptions:
    """Options of what steers a model and reads its activations."""

    control_vectors: list[str] | None = option(
        "Control vector (GGUF) that requests may name; repeatable.", "--control-vector", metavar="NAME=FILE"
    )
    probes: list[str] | None = option(
        "Linear probe (.safetensors) that requests may name; repeatable.", "--probe", metavar="NAME=FILE"
    )
    saes: list[str] | None = option(
        "Sparse autoencoder of SAELens that requests may name; repeatable.", "--sae", metavar="NAME=DIR"
    )

    def files(self) -> dict[str, dict[str, str]]:
        """The options of LLM: files by name. Raises ConfigError."""
        return {
            kind: dict(_named_file(text) for text in texts) for kind, texts in vars(self).items() if texts
        }


@dataclass(frozen=True, eq=False, repr=False)
class SteeringOptions:
    """Options of control vectors that work on every answer."""

    control_vector: list[str] | None = option(
        "Control vector (GGUF) to add; repeatable.", metavar="FILE[:STRENGTH]"
    )
    control_vector_layers: str | None = option(
        "First and last layer that it works on. [default: all]", metavar="FIRST-LAST"
    )

    def files_and_interventions(self) -> tuple[dict[str, dict[str, str]], list[dict[str, Any]]]:
        """The options of LLM, and what to do to each request. Raises ConfigError."""
        if not self.control_vector:
            if self.control_vector_layers is not None:
                raise ConfigError("--control-vector-layers needs a --control-vector")
            return {}, []
        layers = None
        if self.control_vector_layers is not None:
            match = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", self.control_vector_layers)
            if match is None:
                raise ConfigError(f"layers are given as FIRST-LAST, not {self.control_vector_layers!r}")
            layers = [int(match[1]), int(match[2])]
        files: dict[str, str] = {}
        interventions: list[dict[str, Any]] = []
        for i, text in enumerate(self.control_vector):
            match = re.fullmatch(r"(.+):([+-]?[0-9]*\.?[0-9]+)", text)
            path, strength = (text, 1.0) if match is None else (match[1], float(match[2]))
            files[str(i)] = path
            interventions.append(
                {"op": "add", "control_vector": str(i), "strength": strength, "layers": layers}
            )
        return {"control_vectors": files}, interventions


@dataclass(frozen=True, eq=False, repr=False)
class ManyOptions(LoadOptions):
    """Options of loading a model for many requests at a time."""

    max_requests: int | None = option("Requests computed at a time. [default: 16]", metavar="N")
    kv_bytes: int | None = option(
        "Size of the KV cache, such as 2GiB. [default: by the contexts and free memory]",
        "--kv-memory",
        metavar="SIZE",
        parser=lambda text: size_bytes(text, "--kv-memory"),
    )


@dataclass(frozen=True, eq=False, repr=False)
class SamplingOptions:
    """Sampling parameters; None means the default of the command or model."""

    max_tokens: int | None = option("Most tokens to generate.", "--max-tokens", "-n", metavar="N")
    temperature: float | None = option(
        "Sampling temperature; 0 is greedy.", "--temperature", "-t", metavar="T"
    )
    top_k: int | None = option("Sample from the K most likely tokens.", metavar="K")
    top_p: float | None = option("Sample from the most likely tokens of probability P.", metavar="P")
    min_p: float | None = option("Drop tokens below P times the best one's probability.", metavar="P")
    repetition_penalty: float | None = option("Divide the logits of tokens seen so far by X.", metavar="X")
    presence_penalty: float | None = option("Subtract X from the logits of generated tokens.", metavar="X")
    frequency_penalty: float | None = option("Subtract X for each time a token was generated.", metavar="X")
    seed: int | None = option("Seed, for repeatable sampling.", metavar="N")
    stop: list[str] | None = option("Stop before this text; repeatable.", metavar="TEXT")
    ignore_eos: bool = option("Generate past the end of text.", "--ignore-eos", default=False)


def _use_config(context: typer.Context, file: Path | None) -> Path | None:
    """Takes the options of a configuration file for those that the command line leaves out."""
    if file is not None and not context.resilient_parsing:
        from kukri.terminal.config_file import option_defaults

        context.default_map = option_defaults(file, context.command.params)
    return file


@dataclass(frozen=True, eq=False, repr=False)
class ServeOptions:
    """Options of the HTTP server."""

    host: str = option("Address; 0.0.0.0 is all of them.", default="127.0.0.1", metavar="ADDRESS")
    port: int = option(
        "Port; 0 for any free one.", "--port", "-p", default=8000, min=0, max=65535, metavar="N"
    )
    config: Path | None = option(
        "TOML file with these options, and models with options of their own.",
        metavar="FILE",
        is_eager=True,
        callback=_use_config,
    )
    alias: list[str] | None = option("Another name of the first model; repeatable.", metavar="NAME")
    model_dir: Path | None = option("Serve every model of this directory too, by its name.", metavar="DIR")
    adapter_dir: Path | None = option(
        "Let clients load and unload the LoRA adapters of this directory.", metavar="DIR"
    )
    pin: list[str] | None = option("Load this model at the start and keep it; repeatable.", metavar="NAME")
    max_loaded: int = option("Models in memory at a time.", default=3, min=1, metavar="N")
    memory: str | None = option("Memory for models. [default: nine tenths of what is free]", metavar="SIZE")
    idle_unload: str | None = option(
        "Unload models that were idle for so long, such as 10m. [default: never]", metavar="TIME"
    )
    manage_models: bool = option(
        "Let clients pull and delete models; serve those in the cache.", "--manage-models", default=False
    )
    api_key_file: Path | None = option(
        "API keys, [NAME] KEY [priority=N] [scope=interp] a line. [default: $KUKRI_API_KEY]", metavar="FILE"
    )
    share_prefixes: bool = option(
        "Let keys share cached prompts, which shows them how others begin.",
        "--share-prefixes",
        default=False,
    )
    allowed_host: list[str] | None = option(
        "Another name allowed in Host headers; repeatable.", metavar="NAME"
    )
    trusted_proxy: list[str] | None = option(
        "Proxy whose X-Forwarded-For is believed; repeatable.", metavar="ADDRESS"
    )
    cors_origin: list[str] | None = option("Origin allowed by CORS; repeatable.", metavar="URL")
    interp: bool = option(
        "Let clients steer the model and read activations: keys with scope=interp, all without keys.",
        "--interp",
        default=False,
    )
    max_activations: str = option("Largest activations of a request.", default="64MiB", metavar="SIZE")
    any_model: bool = option("Answer requests for any model's name.", "--any-model", default=False)
    chat_template_file: Path | None = option("Jinja template in place of the model's.", metavar="FILE")
    batch_dir: Path | None = option("Keep /v1/files and /v1/batches here.", metavar="DIR")
    max_waiting: int = option("Requests in the queue; more get 503.", default=256, metavar="N")
    max_body: str = option("Largest request; larger ones get 413.", default="2MiB", metavar="SIZE")
    rate_limit: int | None = option("Requests per minute and key (or address); more get 429.", metavar="N")
    deadline_s: float | None = option("Longest time of an answer.", "--deadline", metavar="SECONDS")
    stream_interval: int = option("Tokens in a chunk of a stream after the first.", default=1, metavar="N")
    drain_s: float = option(
        "Time for running answers after SIGTERM.", "--drain", default=60.0, metavar="SECONDS"
    )
    no_page: bool = option("Serve no chat page at /.", "--no-page", default=False)
    traces: str | None = option(
        "Send a trace of each request to the OTLP collector at URL. [default: $OTEL_EXPORTER_OTLP_ENDPOINT]",
        metavar="URL",
    )
    log_json: bool = option("Log JSON, one object per line.", "--log-json", default=False)
    log_level: str = option("debug, info, warning or error.", default="info", metavar="LEVEL")


@dataclass(frozen=True, repr=False)
class ClusterOptions:
    """Options of replicas on Ray."""

    n_replicas: int = option("Replicas of the model.", "--replicas", "-r", default=1, min=0, metavar="N")
    max_replicas: int | None = option("Let their number follow the load, up to N.", metavar="N")
    spare_s: float = option(
        "Time without need of a replica until it goes.", "--spare", default=120.0, min=0, metavar="SECONDS"
    )
    cpus: float | None = option(
        "Processors for each replica. [default: its threads, or a machine's]", metavar="N"
    )
    gpus: float = option("GPUs for each replica.", default=0, min=0, metavar="N")
    address: str | None = option(
        "Ray cluster to join: auto, or HOST:PORT. [default: a new one on this machine]", metavar="ADDRESS"
    )


@dataclass(frozen=True, eq=False, repr=False)
class LoadOfUsers:
    """Options of `kukri plan`: what users send, and what they expect."""

    users: float = option("Users at a time.", default=100.0, metavar="N")
    pause_s: float = option(
        "Seconds from a user's request to the next.", "--pause", default=30.0, metavar="SECONDS"
    )
    tokens: int = option("Tokens of an answer.", "--tokens", "-n", default=200, metavar="N")
    prefixes: int = option("Different system prompts.", default=1, min=1, metavar="N")
    prefix_tokens: int = option("Tokens of a system prompt.", default=256, min=0, metavar="N")
    own_tokens: int = option("Tokens of a prompt behind it.", default=128, metavar="N")
    first_token_s: float = option(
        "Time to the first token that 99% must have.", "--first-token", default=1.0, metavar="SECONDS"
    )
    tokens_per_s: float = option("Speed that the median answer must have.", default=10.0, metavar="N")
    costs: str | None = option(
        "Milliseconds of a step itself, a sequence, a prompt token. [default: measured here]", metavar="A,B,C"
    )
    n_requests: int = option("Requests to simulate.", "--requests", default=2000, min=1, metavar="N")


def cluster_options(options: ClusterOptions, *, is_wanted: bool) -> ClusterOptions | None:
    """The options if Ray is wanted, else None. Raises ConfigError if they are set without it."""
    if not is_wanted and options != ClusterOptions():
        raise ConfigError("the options on replicas belong to --ray: give it too")
    return options if is_wanted else None


@dataclass(frozen=True, eq=False, repr=False)
class TextOptions:
    """Options of reading a text to measure on."""

    text: Path | None = option("UTF-8 text. [default: the opening of a novel]", metavar="FILE")
    window: int = option("Tokens of a window, its context included.", default=512, metavar="N")
    stride: int = option("Tokens from one window to the next.", default=256, metavar="N")
    n_threads: int | None = option("Threads. [default: usable cores]", "--threads", metavar="N")


@dataclass(frozen=True, eq=False, repr=False)
class LoadTestOptions:
    """Options of `kukri bench serve`."""

    url: str = option("URL of the API.", default="http://127.0.0.1:8000/v1", metavar="URL")
    api_key: str | None = option("API key.", envvar="OPENAI_API_KEY", metavar="KEY")
    model: str | None = option("Model. [default: the first served]", "--model", "-m", metavar="NAME")
    kind: Literal["chat", "completions"] = option("Endpoint to load.", "--endpoint", default="chat")
    rate: str | None = option("Open loop: Poisson arrivals per second, such as 1,2,4.", metavar="LIST")
    concurrency: str | None = option("Closed loop: concurrent requests. [default: 1,4,16]", metavar="LIST")
    n_requests: int | None = option(
        "Requests per load. [default: 100]", "--requests", "-n", min=1, metavar="N"
    )
    duration_s: float | None = option("Seconds of each load.", "--duration", metavar="SECONDS")
    n_prompt: int = option(
        "Tokens of a prompt of random words.", "--prompt-tokens", "-p", default=128, metavar="N"
    )
    prompts: Path | None = option("JSON lines with prompt or messages, to use instead.", metavar="FILE")
    max_tokens: int = option("Most tokens of an answer.", "--max-tokens", "-g", default=64, metavar="N")
    ignore_eos: bool = option(
        "Generate all of them, on servers that know ignore_eos.", "--ignore-eos", default=False
    )
    extra_body: str | None = option("More fields of requests; null removes one.", metavar="JSON")
    slo: str | None = option("Goodput limits in ms: ttft:500,tpot:50,e2e:5000.", metavar="LIMITS")
    n_warm_up: int = option("Requests before, not counted.", "--warm-up", default=2, metavar="N")
    timeout_s: float = option("Longest time of an answer.", "--timeout", default=300.0, metavar="SECONDS")
    seed: int | None = option("Seed of prompts and arrivals. [default: random]", metavar="N")
    plot: Path | None = option("Draw latency over load as a PNG.", metavar="FILE")
