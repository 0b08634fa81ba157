"""Options of the command line, each declared once, in dataclasses that commands take as parameters.

Fields have the names that `LLM`, `SamplingParams` and the commands' functions use, so `given` passes them on
as they are. The dataclasses have no `__repr__`, and no `__eq__` if nobody compares them: half a millisecond
each.
"""

import json
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args

import typer

from kukri.dataclass import Field, dataclass
from kukri.errors import ConfigError, brief
from kukri.opening.model_options import Group, option_fields
from kukri.opening.option_fields import choices, flag_of, option_facts, read_option
from kukri.sampling.fields import facts_of
from kukri.sampling.params import SamplingParams
from kukri.terminal.command import argument, option

_Class = TypeVar("_Class")


def model_flags(*groups: Group) -> Callable[[type[_Class]], type[_Class]]:
    """Makes a class a dataclass whose fields are the flags of these groups of `kukri.ModelOptions`."""
    return flags(one for one in option_fields().values() if option_facts(one).group in groups)


def flags(declared: Iterable[Field[Any]]) -> Callable[[type[_Class]], type[_Class]]:
    """Makes a class a dataclass that has flags for these fields after its own."""

    def add(made: type[_Class]) -> type[_Class]:
        for one in declared:
            made.__annotations__[one.name] = _flag_type(one)
            setattr(made, one.name, _flag(one))
        return dataclass(eq=False, repr=False)(made)

    return add


def _flag(one: Field[Any]) -> Any:
    """The flag of a declared option. A wrong value is an error of `read_option`, in one line."""
    facts = option_facts(one)
    shown: dict[str, Any] = {"metavar": facts.metavar, "envvar": facts.envvar}
    if names := choices(one):
        shown |= {"metavar": f"[{'|'.join(names)}]", "autocompletion": lambda: list(names)}
    flags = [facts.flag] if facts.flag else []
    if facts.flag.startswith("--no-"):  # the field is True without it
        return option(facts.help, *flags, default=False, convert=lambda is_off: not is_off)
    default = False if one.default is False else None
    read = partial(read_option, one, where=flag_of(one))
    return option(facts.help, *flags, default=default, convert=read, **shown)


def _flag_type(one: Field[Any]) -> Any:
    """The type that typer reads: numbers and switches as they are declared, all else as text."""
    facts = option_facts(one)
    if facts.repeats:
        return list[str] | None
    declared = {one.type, *get_args(one.type)} & {int, float, bool}
    return (declared.pop() if len(declared) == 1 and facts.metavar not in ("SIZE", "TIME") else str) | None


# --- the model: an argument or -m, in every command


def _model_names(incomplete: str) -> list[str]:
    """Known and cached models for the shell's completion."""
    from kukri.formats.hub import MODELS
    from kukri.formats.model_cache import cached_models
    from kukri.formats.repos import SHORT_NAMES

    names = dict.fromkeys([*(model.name for model in cached_models()), *MODELS, *SHORT_NAMES])
    return [name for name in names if name.startswith(incomplete)]


_MODEL_HELP = (
    "Name (see `kukri list`), org/repo[:type] on the Hugging Face hub, .gguf file or safetensors "
    "directory; @sha256:HEX after it pins its files."
)


@dataclass(eq=False, repr=False)
class ModelName:
    """The model of a command, None for the default model; `NeededModel` has no default model."""

    model: str | None = argument(_MODEL_HELP, metavar="MODEL", autocompletion=_model_names)
    model_option: str | None = option(
        "Model, instead of the argument.",
        "--model",
        "-m",
        metavar="MODEL",
        autocompletion=_model_names,
    )
    is_needed = False

    @property
    def name(self) -> str | None:
        """The model. Raises ConfigError if it is given twice."""
        return one_model(self.model, self.model_option)

    def and_arguments(self, names: str, *arguments: str | None) -> list[Any]:
        """The model and the arguments after it: see `model_and`."""
        return model_and(self.model_option, self.model, *arguments, names=names, needs_model=self.is_needed)


@dataclass(eq=False, repr=False)
class NeededModel(ModelName):
    """The model of a command that reads no other than the one it is given."""

    model: str | None = argument(_MODEL_HELP, metavar="MODEL", autocompletion=_model_names)
    is_needed = True


@dataclass(eq=False, repr=False)
class ServedModels:
    """The models of `kukri serve`: an argument, and as many -m as wanted."""

    model: str | None = argument(_MODEL_HELP, metavar="MODEL", autocompletion=_model_names)
    others: list[str] | None = option(
        "Model to serve, loaded on demand; repeatable.",
        "--model",
        "-m",
        metavar="[NAME=]MODEL",
        autocompletion=_model_names,
    )

    @property
    def names(self) -> list[str]:
        """All of them."""
        return [*([self.model] if self.model else []), *(self.others or [])]


def one_model(argument: str | None, option: str | None) -> str | None:
    """The model that is given as an argument or as -m; None for the default model."""
    if argument is not None and option is not None:
        raise ConfigError(f"the model must be given once: {argument!r} or -m {option!r}")
    return argument if option is None else option


def model_and(option: str | None, *arguments: str | None, names: str, needs_model: bool = True) -> list[Any]:
    """The model and the arguments after it, of which the model comes first or is given as -m.

    `names` names the arguments, separated by spaces, for errors. Without `needs_model` the model may
    be missing: the result then begins with None.
    """
    present = [argument for argument in arguments if argument is not None]
    if len(present) == len(arguments):
        return [one_model(present[0], option), *present[1:]]
    if option is not None or not needs_model:
        if len(present) == len(arguments) - 1:
            return [option, *present]
        present.append("")  # the model, which the list of arguments need not have
    raise ConfigError(f"{names.split()[len(present)]} is required: {names}")


# --- options that several commands share

Json = Annotated[bool, typer.Option("--json", help="Print only a JSON object.")]
System = Annotated[
    str, typer.Option("--system", "-s", metavar="TEXT", help="System message; '' for the template's default.")
]
HideReasoning = Annotated[
    bool, typer.Option("--hide-reasoning", help="Print answers without the reasoning before them.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", metavar="N", help="Threads. [default: usable cores]")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show the resulting size and types without writing.")]


@dataclass(eq=False, repr=False)
class RunningServer:
    """Options of asking a running server."""

    url: str = option("URL of the server.", default="http://127.0.0.1:8000", metavar="URL")
    api_key: str | None = option("API key.", metavar="KEY", envvar="KUKRI_API_KEY")


@dataclass(eq=False, repr=False)
class ChatServer:
    """A running server to chat with, instead of a model of this machine."""

    url: str | None = option(
        "Chat with a server (any with OpenAI's API) instead of loading a model.", metavar="URL"
    )
    api_key: str | None = option("API key, with --url.", metavar="KEY", envvar="KUKRI_API_KEY")


@model_flags("any")
class ModelOptions:
    """Options of loading that every command with an engine has."""


@model_flags("any", "generating")
class LoadOptions:
    """Options of loading a model to generate with."""


@model_flags("any", "generating", "many")
class ManyOptions:
    """Options of loading a model for many requests at a time."""


@model_flags("readers")
class ReaderOptions:
    """Options of what steers a model and reads its activations: files by name."""


@dataclass(eq=False, repr=False)
class SteeringOptions:
    """Options of what steers every answer."""

    control_vector: list[str] | None = option(
        "Control vector (GGUF) to add; repeatable.", metavar="FILE[:STRENGTH]"
    )
    control_vector_layers: str | None = option(
        "First and last layer it applies to. [default: all]", metavar="FIRST-LAST"
    )
    intervention: list[str] | None = option(
        "Edit of activations, as JSON such as "
        '{"op": "scale", "name": "attn_out3", "strength": 0, "positions": {"text": "Paris"}}'
        ", or @FILE with one or a list; repeatable.",
        metavar="JSON|@FILE",
    )
    probe: list[str] | None = option(
        "Linear probe (.safetensors) for interventions; repeatable.", metavar="NAME=FILE"
    )
    sae: list[str] | None = option(
        "SAELens sparse autoencoder for interventions; repeatable.", metavar="NAME=DIR"
    )
    transcoder: list[str] | None = option(
        "Transcoders of one or more layers for interventions; repeatable.", metavar="NAME=DIR"
    )

    def files_and_interventions(self) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """The options of LLM, and what to do to each request. Raises ConfigError."""
        vectors, interventions = self._control_vectors()
        for text in self.intervention or ():
            interventions += _edits(text)
        files = {"control_vectors": vectors, "probes": self.probe, "saes": self.sae}
        files["transcoders"] = self.transcoder
        return {name: given for name, given in files.items() if given}, interventions

    def _control_vectors(self) -> tuple[dict[str, str], list[dict[str, Any]]]:
        if not self.control_vector:
            if self.control_vector_layers is not None:
                raise ConfigError("--control-vector-layers requires --control-vector")
            return {}, []
        layers = None
        if self.control_vector_layers is not None:
            match = re.fullmatch(r"([0-9]{1,4})-([0-9]{1,4})", self.control_vector_layers)
            if match is None:
                raise ConfigError(
                    f"--control-vector-layers must be FIRST-LAST, not {self.control_vector_layers!r}"
                )
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
        return files, interventions


def _edits(text: str) -> list[dict[str, Any]]:
    """The interventions of a value of --intervention. Raises ConfigError."""
    option_name = f"--intervention {brief(text)}"
    try:
        given = json.loads(Path(text[1:]).read_bytes() if text.startswith("@") else text)
    except OSError as error:
        raise ConfigError(f"{option_name} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise ConfigError(f"{option_name} must be JSON") from None
    many = given if isinstance(given, list) else [given]
    for one in many:
        if not isinstance(one, dict) or one.get("op") in ("capture", "read"):
            raise ConfigError(
                f"{option_name}: an edit must be an object whose op adds, scales, clamps, replaces or ablates"
            )
    return many


def sampling_flags(made: type[_Class]) -> type[_Class]:
    """Makes a class a dataclass of the fields of SamplingParams that have flags; None is the default."""
    kinds = {"number": float, "integer": int, "texts": list[str]}
    for name, facts in facts_of(SamplingParams):
        if facts.flags and facts.kind == "switch":
            made.__annotations__[name] = bool
            setattr(made, name, option(facts.help, *facts.flags, default=False))
        elif facts.flags:
            again = " Repeatable." if facts.kind == "texts" else ""
            made.__annotations__[name] = kinds[facts.kind] | None
            setattr(made, name, option(facts.help + again, *facts.flags, metavar=facts.metavar))
    return dataclass(eq=False, repr=False)(made)


@sampling_flags
class SamplingOptions:
    """Sampling parameters, as `kukri.sampling.params` declares them."""


@dataclass(eq=False, repr=False)
class FormOptions:
    """The form that an answer must have: one of these, or none (`kukri.terminal.answer_form`)."""

    schema: Path | None = option("Constrain the answer to JSON that matches this schema.", metavar="FILE")
    regex: str | None = option("Constrain the answer to this regular expression.", metavar="PATTERN")
    choice: list[str] | None = option(
        "Constrain the answer to one of these texts; repeatable.", metavar="A,B"
    )
    grammar: Path | None = option("Constrain the answer to this grammar (Lark or GBNF).", metavar="FILE")


@dataclass(eq=False, repr=False)
class ToolOptions:
    """Python functions that the model may call (`kukri.terminal.function_files`)."""

    tool: list[Path] | None = option(
        "Let the model call the public functions of this Python file; repeatable.", metavar="FILE"
    )
    yes: bool = option("Allow all tool calls without asking.", "--yes", "-y", default=False)
    max_rounds: int = option("Maximum rounds of tool calls before the answer.", default=8, min=1, metavar="N")


@dataclass(repr=False)
class ClusterOptions:
    """Options of replicas on Ray."""

    n_replicas: int = option("Number of replicas.", "--replicas", "-r", default=1, min=0, metavar="N")
    max_replicas: int | None = option("Scale with the load up to N replicas.", metavar="N")
    spare_s: float = option(
        "Keep an idle replica this long.", "--spare", default=120.0, min=0, metavar="SECONDS"
    )
    cpus: float | None = option("CPUs per replica. [default: --threads, or all of a machine]", metavar="N")
    gpus: float = option("GPUs per replica.", default=0, min=0, metavar="N")
    address: str | None = option(
        "Ray cluster to join: auto, or HOST:PORT. [default: a new one on this machine]", metavar="ADDRESS"
    )


def cluster_options(options: ClusterOptions, *, is_wanted: bool) -> ClusterOptions | None:
    """The options if Ray is wanted, else None. Raises ConfigError if they are set without it."""
    if not is_wanted and options != ClusterOptions():
        raise ConfigError("the options of replicas require --ray")
    return options if is_wanted else None


@dataclass(eq=False, repr=False)
class TextOptions:
    """Options of reading a text to measure on."""

    text: Path | None = option("UTF-8 text file. [default: the opening of a novel]", metavar="FILE")
    window: int = option("Tokens per window, including its context.", default=512, metavar="N")
    stride: int = option("Tokens between the starts of windows.", default=256, metavar="N")
    n_threads: int | None = option("Threads. [default: usable cores]", "--threads", metavar="N")


@dataclass(eq=False, repr=False)
class LoadTestOptions:
    """Options of `kukri bench serve`."""

    url: str = option("URL of the API.", default="http://127.0.0.1:8000/v1", metavar="URL")
    api_key: str | None = option("API key.", envvar="OPENAI_API_KEY", metavar="KEY")
    model: str | None = option(
        "Model to load-test. [default: the first served]", "--model", "-m", metavar="NAME"
    )
    kind: Literal["chat", "completions"] = option("Endpoint to load-test.", "--endpoint", default="chat")
    rate: str | None = option("Open loop: Poisson arrivals per second, such as 1,2,4.", metavar="LIST")
    concurrency: str | None = option("Closed loop: concurrent requests. [default: 1,4,16]", metavar="LIST")
    n_requests: int | None = option(
        "Requests per load. [default: 100]", "--requests", "-n", min=1, metavar="N"
    )
    duration_s: float | None = option("Duration of each load.", "--duration", metavar="SECONDS")
    n_prompt: int = option(
        "Tokens per prompt of random words.", "--prompt-tokens", "-p", default=128, metavar="N"
    )
    prompts: Path | None = option(
        "JSON lines with prompt or messages, instead of random words.", metavar="FILE"
    )
    max_tokens: int = option(
        "Maximum number of tokens of an answer.", "--max-tokens", "-g", default=64, metavar="N"
    )
    ignore_eos: bool = option(
        "Generate all --max-tokens, on servers that support ignore_eos.", "--ignore-eos", default=False
    )
    extra_body: str | None = option("Extra request fields; null removes one.", metavar="JSON")
    slo: str | None = option("Goodput limits in ms: ttft:500,tpot:50,e2e:5000.", metavar="LIMITS")
    n_warm_up: int = option("Requests to warm up with, not counted.", "--warm-up", default=2, metavar="N")
    timeout_s: float = option("Time limit for an answer.", "--timeout", default=300.0, metavar="SECONDS")
    seed: int | None = option("Seed for prompts and arrivals. [default: random]", metavar="N")
    plot: Path | None = option("Plot latency over load as a PNG.", metavar="FILE")


# --- options of one command


@dataclass(eq=False, repr=False)
class LaunchOptions:
    """Options of `kukri launch`."""

    model: str | None = option(_MODEL_HELP, "--model", "-m", metavar="MODEL", autocompletion=_model_names)
    env: list[str] | None = option(
        "Variable for the agent, for any program too; {url}, {key}, {model} and {context} in it are filled "
        "in; repeatable.",
        metavar="NAME=VALUE",
    )
    serve: str | None = option(
        "Further options of `kukri serve`, in one text; paths must be absolute.", metavar="TEXT"
    )
    print_only: bool = option("Print what would be run, and run nothing.", "--print", default=False)
    url: str | None = option("Use this running server, which is not started.", metavar="URL")
    api_key: str | None = option("API key, with --url.", metavar="KEY", envvar="KUKRI_API_KEY")
    install: bool = option(
        "With --url: add the settings to the agent's own configuration, of which a backup is kept.",
        "--install",
        default=False,
    )
    uninstall: bool = option("Take back what --install added.", "--uninstall", default=False)


@dataclass(eq=False, repr=False)
class EmbedOptions:
    """Options of `kukri embed`, as `LLM.embed` has them."""

    prompt_name: str | None = option("Named prompt of the model, such as query.", "--prompt", metavar="NAME")
    dimensions: int | None = option("Truncate vectors to N dimensions.", metavar="N")
    truncate: bool = option("Truncate texts that are too long.", "--truncate", default=False)


@dataclass(eq=False, repr=False)
class RerankOptions:
    """Options of `kukri rerank`, as `LLM.rerank` has them."""

    top_n: int | None = option("Print only the N best matches.", metavar="N")
    instruction: str | None = option(
        "Instruction for Qwen3-Reranker: what makes a document relevant.", metavar="TEXT"
    )
    truncate: bool = option("Truncate texts that are too long.", "--truncate", default=False)


@dataclass(eq=False, repr=False)
class TranscribeOptions:
    """Options of `kukri transcribe`."""

    format: Literal["text", "srt", "vtt", "json"] = option(
        "Form of the output; json is a line per file.", "-f", "--format", default="text"
    )
    out: Path | None = option("Directory to write a file to for each sound.", "-o", "--out", metavar="DIR")
    language: str | None = option("Language spoken, such as en. [default: detected]", metavar="CODE")
    translate: bool = option("Translate into English.", "--translate", default=False)
    prompt: str | None = option("Text that was said before the sound.", metavar="TEXT")
    hotwords: str | None = option("Words and spellings to expect.", metavar="TEXT")
    word_times: bool = option("Time each word.", "--word-times", default=False)


@dataclass(eq=False, repr=False)
class StoreOptions:
    """Options of `kukri activations`."""

    names: list[str] | None = option("Hook to record, such as resid_post14; repeatable.", metavar="NAME")
    out: Path | None = option("Directory to write shards to.", metavar="DIR")
    context: int = option("Tokens per window.", default=128, min=1, metavar="N")
    shard_size: str = option("Size of each shard.", default="128MiB", metavar="SIZE")
    shuffle: int | None = option("Shuffle windows, and rows within a shard.", min=0, metavar="SEED")


@dataclass(eq=False, repr=False)
class CircuitOptions:
    """Options of `kukri circuit`."""

    transcoders: Path | None = option("Directory of the model's transcoders.", metavar="DIR")
    out: Path | None = option(
        "File to write: .json, .html (interactive), .png or .svg.",
        "--out",
        "-o",
        metavar="FILE",
    )
    max_features: int = option(
        "Maximum number of features to trace upstream.", default=2048, min=0, metavar="N"
    )
    max_logits: int = option("Maximum number of next tokens to explain.", default=10, min=1, metavar="N")
    node_threshold: float = option(
        "Share of influence to keep when pruning nodes.", default=0.8, min=0.0, max=1.0, metavar="SHARE"
    )
    edge_threshold: float = option(
        "Share of influence to keep when pruning edges.", default=0.98, min=0.0, max=1.0, metavar="SHARE"
    )


@dataclass(eq=False, repr=False)
class PlotOptions:
    """Options of `kukri plot`."""

    out: Path | None = option(
        "File to write: .png, .svg, or .html for attention.", "--out", "-o", metavar="FILE"
    )
    layer: int = option("Layer of the attention or the transcoder.", default=0, min=0, metavar="N")
    against: str | None = option(
        "Second prompt to patch activations from, with the same number of tokens.", metavar="PROMPT"
    )
    sae: Path | None = option("SAELens sparse autoencoder with the features.", metavar="DIR")
    transcoders: Path | None = option("Transcoders with the features.", metavar="DIR")
    feature: list[int] | None = option("Feature to show; repeatable.", min=0, metavar="N")
    top: int = option("Strongest features to show without --feature.", default=8, min=1, max=64, metavar="N")


@dataclass(eq=False, repr=False)
class BenchOptions:
    """Options of `kukri bench`, as `run_bench` has them."""

    model: str | None = option("Model, instead of the argument.", "--model", "-m", metavar="MODEL")
    n_prompt: int = option("Prompt tokens.", "--prompt-tokens", "-p", default=512, metavar="N")
    n_generate: int = option("Tokens to generate.", "--generate-tokens", "-g", default=128, metavar="N")
    repetitions: int = option("Repetitions per measurement.", "--repetitions", "-r", default=5, metavar="N")


@dataclass(eq=False, repr=False)
class InspectOptions:
    """Options of `kukri inspect`, as `show_model` has them."""

    with_tree: bool = option("Show the module tree, as PyTorch prints it.", "--tree", default=False)
    with_parameters: bool = option("Show parameters per layer.", "--params", default=False)
    with_tensors: bool = option("List every tensor.", "--tensors", default=False)


@dataclass(eq=False, repr=False)
class CompareOptions:
    """Options of `kukri compare`."""

    types: str | None = option("Compare A with its own quantizations: Q8_0,Q4_K_M.", metavar="LIST")
    imatrix: Path | None = option("Importance matrix from `kukri imatrix` or llama.cpp.", metavar="FILE")
    plot: Path | None = option("Plot a PNG: error by layer, or loss by size.", metavar="FILE")


@dataclass(eq=False, repr=False)
class TuneOptions:
    """Options of `kukri tune-recipe`."""

    size: str = option("Size limit for all weights, such as 90MB.", default=..., metavar="SIZE")
    output: Path = option("Recipe to write, .yaml or .json.", "--output", "-o", default=..., metavar="FILE")
    text: Path | None = option("UTF-8 text file. [default: the opening of a novel]", metavar="FILE")
    types: str = option(
        "Types to choose from.", default="Q2_K,Q3_K,IQ4_XS,Q4_K,Q5_K,Q6_K,Q8_0", metavar="LIST"
    )
    max_tokens: int = option("Maximum number of tokens to read.", "--tokens", default=512, metavar="N")
    n_threads: int | None = option("Threads. [default: usable cores]", "--threads", metavar="N")
