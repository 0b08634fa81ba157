"""The `kukri` command: one function per command, whose options are declared in `kukri.terminal.options`.

The commands' work is in `kukri.terminal`, imported when a command runs, so that `kukri run` pays for nothing
else. Annotations are not postponed: typer would evaluate their text at each start.
"""

import atexit
import gc
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kukri.calls.system_message import DEFAULT_SYSTEM
from kukri.terminal.command import command, expanded, given
from kukri.terminal.errors import BenchGroup, ErrorReportingGroup, check_streams
from kukri.terminal.options import (
    BenchOptions,
    ChatServer,
    CircuitOptions,
    ClusterOptions,
    CompareOptions,
    DryRun,
    EmbedOptions,
    FormOptions,
    HideReasoning,
    InspectOptions,
    Json,
    LaunchOptions,
    LoadOptions,
    LoadTestOptions,
    ManyOptions,
    ModelName,
    ModelOptions,
    NeededModel,
    PlotOptions,
    ReaderOptions,
    RerankOptions,
    RunningServer,
    SamplingOptions,
    ServedModels,
    SteeringOptions,
    StoreOptions,
    System,
    TextOptions,
    Threads,
    ToolOptions,
    TranscribeOptions,
    TuneOptions,
    cluster_options,
    one_model,
)

if TYPE_CHECKING:
    import kukri.terminal.serve_options

app = typer.Typer(
    name="kukri",
    cls=ErrorReportingGroup,
    help="Run small language models on your own machine, in pure Python.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # help and usage errors without rich: 60 ms less
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(cls=BenchGroup, subcommand_metavar="[MODEL | COMMAND [ARGS]...]")
app.add_typer(bench_app, name="bench")
cluster_app = typer.Typer(help="Serve a model on several machines with replicas.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")


def main() -> None:
    """Runs the command line of this process and exits: 0, 2 after an error, 130 after Ctrl-C."""
    check_streams()
    logging.getLogger("kukri").addHandler(logging.StreamHandler())  # a server has its own
    atexit.register(gc.freeze)  # or Python looks for garbage among all objects as it ends: 40 ms
    _keep_only(sys.argv[1:2])
    app()


def _keep_only(names: list[str]) -> None:
    """Leaves only the command of this name, if there is one: to build them all takes 25 ms of a start."""
    commands = [
        one for one in app.registered_commands if (one.name or getattr(one.callback, "__name__", "")) in names
    ]
    if commands:
        app.registered_commands, app.registered_groups = commands, []


def _print_version(wanted: bool) -> None:
    if wanted:
        from kukri import __version__

        typer.echo(f"kukri {__version__}")
        raise typer.Exit


def _list_recipes(wanted: bool) -> None:
    if wanted:
        from kukri.terminal.convert import show_recipes

        show_recipes()
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run small language models on your own machine, in pure Python."""


@command(app)
def run(
    *,
    named: ModelName,
    prompt: Annotated[
        str | None,
        typer.Argument(
            metavar="PROMPT",
            help="Prompt; a single argument is the prompt, unless it is a model's name: then chat with it. "
            "Piped text is appended.",
        ),
    ] = None,
    image: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Image to ask about, before the prompt; repeatable."),
    ] = None,
    system: System = DEFAULT_SYSTEM,
    raw: Annotated[
        bool, typer.Option("--raw", help="Continue the text as is, without a chat template.")
    ] = False,
    parse_special: Annotated[
        bool,
        typer.Option(
            help="With --raw: parse special tokens such as <|im_start|> in the prompt, or keep them as plain "
            "text."
        ),
    ] = True,
    form: FormOptions,
    tools: ToolOptions,
    sampling: SamplingOptions,
    loading: LoadOptions,
    steering: SteeringOptions,
    json: Json = False,
    hide_reasoning: HideReasoning = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print token counts and speeds to stderr.")] = False,
) -> None:
    """Answer a prompt and stream the answer."""
    from kukri.terminal.run import answer_or_chat

    files, interventions = steering.files_and_interventions()
    answer_or_chat(
        named,
        prompt,
        form,
        tools,
        system=system,
        images=image or (),
        raw=raw,
        parse_special=parse_special,
        sampling=given(sampling),
        loading=given(loading) | files,
        interventions=interventions,
        as_json=json,
        with_stats=stats,
        hides_reasoning=hide_reasoning,
    )


@command(app)
def chat(
    *,
    named: ModelName,
    system: System = DEFAULT_SYSTEM,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the last conversation.")] = False,
    hide_reasoning: HideReasoning = False,
    remote: ChatServer,
    sampling: SamplingOptions,
    loading: LoadOptions,
    steering: SteeringOptions,
) -> None:
    """Chat in the terminal; /help lists commands."""
    from kukri.terminal.chat import talk

    files, interventions = steering.files_and_interventions()
    talk(
        model=named.name,
        system=system,
        sampling=given(sampling),
        loading=given(loading) | files,
        resumes=resume,
        interventions=interventions,
        hides_reasoning=hide_reasoning,
        **vars(remote),
    )


@command(app)
def serve(
    *,
    named: ServedModels,
    serving: "kukri.terminal.serve_options.ServeOptions",
    loading: ManyOptions,
    readers: ReaderOptions,
) -> None:
    """Serve the OpenAI, Anthropic and Ollama APIs and a chat page.

    Listens on http://127.0.0.1:8000 by default. Requires the extra `serve`.
    """
    from kukri.terminal.serve import serve_models

    serve_models(named.names, serving, given(loading) | given(readers))


@command(app)
def launch(
    *,
    agent: Annotated[
        str | None,
        typer.Argument(metavar="AGENT", help="Agent, or with --env any program. [default: list the agents]"),
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="-- ARGS", help="Arguments of the agent, after --.")
    ] = None,
    options: LaunchOptions,
) -> None:
    """Run a coding agent with a model of this machine.

    The agents of a model share a server, which starts with the first and ends when it is idle for half an
    hour. Requires the extra `serve`, but for --url and --print.
    """
    from kukri.terminal.launch import launch_agent

    launch_agent(agent, arguments or [], options)


@command(app)
def ps(*, server: RunningServer, json: Json = False) -> None:
    """List a running server's models and their state."""
    from kukri.terminal.ps import show_served_models

    show_served_models(server.url, server.api_key, as_json=json)


@command(cluster_app, "serve")
def cluster_serve(
    *,
    named: ModelName,
    replicas: ClusterOptions,
    serving: "kukri.terminal.serve_options.ServeOptions",
    loading: ManyOptions,
) -> None:
    """Serve one model with replicas on Ray and the `kukri serve` API.

    When a replica dies, its requests continue on another. Requires the extras `serve` and `ray`.
    """
    from kukri.terminal.cluster import serve_cluster

    serve_cluster(named.name, replicas, serving, given(loading))


@command(cluster_app)
def status(*, server: RunningServer, json: Json = False) -> None:
    """List a running server's replicas and their load."""
    from kukri.terminal.cluster import show_cluster

    show_cluster(server.url, server.api_key, as_json=json)


@command(app)
def stage(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Address to listen on; port 0 picks a free one.")
    ] = "127.0.0.1:7310",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Device to compute on. [default: the engine's]")
    ] = None,
    n_threads: Threads = None,
    once: Annotated[bool, typer.Option("--once", help="Exit after serving one engine.")] = False,
) -> None:
    """Compute some layers of a model for another machine.

    The engine, any command with --stages HOST:PORT, decides which. Both need the same random text in
    KUKRI_STAGE_TOKEN. The connection is not encrypted.
    """
    from kukri.terminal.stage import run_stage

    run_stage(listen, device, n_threads, once=once)


@command(app)
def batch(
    *,
    named: ModelName,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Requests in OpenAI's batch format, JSON lines.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="File to write the results to, in the same order.")
    ] = None,
    alias: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Another name for the model; repeatable.")
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Answer with replicas on Ray; enables the replica options.")
    ] = False,
    replicas: ClusterOptions,
    loading: ManyOptions,
    json: Json = False,
) -> None:
    """Answer a file of requests in batches.

    Run the same command to resume an interrupted run. Requires the extra `serve`, and `ray` with --ray.
    """
    from kukri.terminal.batch import run_batch

    model, source, target = named.and_arguments("MODEL SOURCE TARGET", source, target)
    run_batch(
        Path(str(source)),
        Path(str(target)),
        model=model,
        aliases=alias or [],
        loading=given(loading),
        cluster=cluster_options(replicas, is_wanted=ray),
        as_json=json,
    )


@command(app)
def embed(
    *,
    named: ModelName,
    texts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXT", help="Texts to embed. [default: lines of piped text]"),
    ] = None,
    options: EmbedOptions,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Embed texts and print their vectors (default model: minilm)."""
    from kukri.terminal.embed import model_and_texts, show_vectors

    model, texts = model_and_texts(named.model_option, [named.model, *(texts or [])])
    show_vectors(texts, model, options, given(loading), as_json=json)


@command(app)
def rerank(
    *,
    named: ModelName,
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="What the documents should answer.")
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="DOCUMENT", help="Documents to rank. [default: lines of piped text]"),
    ] = None,
    options: RerankOptions,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Rank documents by a query (default model: minilm).

    A cross-encoder reads both together, and ColBERT compares their tokens; for other models embeddings are
    compared.
    """
    from kukri.terminal.embed import model_and_texts, show_ranking

    model, texts = model_and_texts(named.model_option, [named.model, query, *(documents or [])])
    show_ranking(texts, model, options, given(loading), as_json=json)


@command(app)
def transcribe(
    *,
    named: ModelName,
    files: Annotated[
        list[str] | None, typer.Argument(metavar="FILE", help="Sound files; - is standard input.")
    ] = None,
    options: TranscribeOptions,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Write what is said in sound files, by a Whisper model."""
    from kukri.terminal.embed import model_and_texts
    from kukri.terminal.transcribe import transcribe_files

    model, files = model_and_texts(named.model_option, [named.model, *(files or [])])
    if json:
        options.format = "json"
    transcribe_files(files, model, options, given(loading))


@command(app)
def activations(
    *,
    named: ModelName,
    texts: Annotated[
        str | None,
        typer.Argument(metavar="TEXTS", help='Text file, or JSON lines with a "text" each (.jsonl).'),
    ] = None,
    options: StoreOptions,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Record a model's activations on texts to disk.

    Writes float16 safetensors shards with tokens and positions, for training autoencoders. Run the same
    command to resume an interrupted run.
    """
    from kukri.terminal.activations import store_activations

    model, source = named.and_arguments("MODEL TEXTS", texts)
    store_activations(Path(str(source)), model, options, given(loading), as_json=json)


@command(app)
def circuit(
    *,
    named: ModelName,
    prompt: Annotated[
        str | None, typer.Argument(metavar="PROMPT", help="Text whose end is explained.")
    ] = None,
    options: CircuitOptions,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Write the attribution graph of a prompt, over the features of transcoders.

    The JSON is circuit-tracer's, for its viewer and Neuronpedia's.
    """
    from kukri.terminal.circuit import write_circuit

    model, text = named.and_arguments("MODEL PROMPT", prompt)
    write_circuit(str(text), model, options, given(loading), as_json=json)


@command(app)
def plot(
    *,
    kind: Annotated[
        Literal["lens", "attention", "patching", "features"],
        typer.Argument(metavar="KIND", help="What to draw: lens, attention, patching or features."),
    ],
    named: ModelName,
    prompt: Annotated[str | None, typer.Argument(metavar="PROMPT", help="Text to draw it for.")] = None,
    options: PlotOptions,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Draw what a model does with a prompt.

    The likeliest token before each layer (lens), where a layer's heads attend, what patching another prompt's
    stream changes, or how strong features are at each token.
    """
    from kukri.terminal.plot import write_plot

    model, text = named.and_arguments("KIND MODEL PROMPT", prompt)
    write_plot(kind, str(text), model, options, given(loading), as_json=json)


@command(app)
def pull(
    *,
    named: ModelName,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Check the cached file's hash and download it again if it is damaged."),
    ] = False,
    digest: Annotated[
        bool,
        typer.Option(
            "--digest",
            help="Print NAME@sha256:HEX instead, which commands and configuration files take as a model.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Download a model into the cache and print its path."""
    from kukri.terminal.models import pull_model

    pull_model(named.name, verify=verify, as_json=json, with_digest=digest)


@command(app, "list")
def list_(
    known: Annotated[
        bool,
        typer.Option(
            "--all", "--known", help="Also list the names that `kukri pull` knows, and the memory they need."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """List cached models."""
    from kukri.terminal.models import list_models

    list_models(with_known=known, as_json=json)


@command(app)
def rm(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="MODEL", help="Cached models, as named by kukri list.")
    ] = None,
    model_option: Annotated[
        str | None, typer.Option("--model", "-m", metavar="MODEL", help="Model, instead of the argument.")
    ] = None,
) -> None:
    """Remove models from the cache."""
    from kukri.terminal.models import remove_models

    remove_models([*(models or []), *([model_option] if model_option else [])])


@command(app)
def show(*, named: ModelName, json: Json = False) -> None:
    """Show a cached model: architecture, size, context, types."""
    from kukri.terminal.models import show_cached_model

    show_cached_model(named.name, as_json=json)


@bench_app.callback(invoke_without_command=True)
@expanded
def bench(
    context: typer.Context, *, options: BenchOptions, loading: ModelOptions, json: Json = False
) -> None:
    """Measure prefill and decode speed, or load-test a server."""
    if context.invoked_subcommand is not None:
        return
    from kukri.terminal.bench import run_bench

    run_bench(**vars(options), as_json=json, **given(loading))


@command(bench_app, "serve")
def bench_serve(*, load: LoadTestOptions, json: Json = False) -> None:
    """Load-test a server with OpenAI's API; report latency."""
    from kukri.terminal.load import load_server

    load_server(load, as_json=json)


@command(app)
def inspect(*, named: ModelName, options: InspectOptions, json: Json = False) -> None:
    """Show a model's configuration, modules and parameters."""
    from kukri.terminal.inspect import show_model

    show_model(named.name, **vars(options), as_json=json)


@command(app)
def fit(
    *,
    named: ModelName,
    speed: Annotated[
        bool, typer.Option("--speed", help="Load the chosen one and measure its speed for some seconds.")
    ] = False,
    loading: ManyOptions,
    json: Json = False,
) -> None:
    """Show which weight types, contexts and KV types fit the memory.

    Reads only the headers of files, also of the hub's. `kukri run`, `chat` and `serve` take the marked line.
    """
    from kukri.terminal.fit import show_fit

    show_fit(named.name, given(loading), with_speed=speed, as_json=json)


@command(app)
def convert(
    *,
    named: NeededModel,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help=".gguf file to write, or a directory with --to hf.")
    ] = None,
    type: Annotated[
        str | None,
        typer.Option(
            "--type",
            "-t",
            metavar="TYPE",
            help="F32, BF16, Q8_0, Q4_K_M … or a recipe. [default: the type of most weights]",
        ),
    ] = None,
    to: Annotated[
        Literal["gguf", "hf"], typer.Option(help="Format to write; hf is a safetensors directory.")
    ] = "gguf",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Convert between safetensors and GGUF."""
    from kukri.terminal.convert import convert_model, convert_to_directory, source_path

    model, target = named.and_arguments("MODEL TARGET", target)
    source = source_path(model)
    if to == "hf":
        return convert_to_directory(source, Path(str(target)), type, as_json=json)
    convert_model(source, Path(str(target)), type, dry_run=dry_run, as_json=json)


@command(app)
def merge(
    *,
    named: NeededModel,
    adapter: Annotated[
        str | None, typer.Argument(metavar="ADAPTER", help="LoRA adapter: a PEFT directory or GGUF file.")
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="TARGET", help=".gguf file or directory to write."),
    ] = None,
    json: Json = False,
) -> None:
    """Merge a LoRA adapter into a model's weights."""
    from kukri.terminal.merge import merge_model

    model, adapter = named.and_arguments("MODEL ADAPTER", adapter)
    merge_model(model, Path(str(adapter)), output, as_json=json)


@command(app)
def quantize(
    *,
    named: NeededModel,
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=".gguf file to write.")] = None,
    type: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="Q4_K_M, Q8_0, IQ4_XS … (as in llama.cpp) or a recipe."),
    ] = None,
    imatrix: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Importance matrix from `kukri imatrix` or llama.cpp.")
    ] = None,
    dry_run: DryRun = False,
    list_recipes: Annotated[
        bool,
        typer.Option(
            "--list-recipes",
            callback=_list_recipes,
            is_eager=True,
            help="List the recipes that come with kukri.",
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Quantize a model to another weight type."""
    from kukri.terminal.convert import convert_model, source_path

    model, target, type = named.and_arguments("MODEL TARGET TYPE", target, type)
    convert_model(source_path(model), Path(str(target)), type, dry_run=dry_run, as_json=json, imatrix=imatrix)


@command(app)
def perplexity(*, named: ModelName, reading: TextOptions, json: Json = False) -> None:
    """Measure a model's perplexity on a text."""
    from kukri.terminal.evaluate import Reading, show_perplexity

    show_perplexity(named.name, Reading(**vars(reading)), as_json=json)


@command(app)
def compare(
    a: Annotated[str | None, typer.Argument(metavar="A", help="Baseline model.")] = None,
    b: Annotated[
        str | None, typer.Argument(metavar="B", help="Model to measure; leave out with --types.")
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Baseline model, instead of A."),
    ] = None,
    *,
    options: CompareOptions,
    reading: TextOptions,
    json: Json = False,
) -> None:
    """Compare two models: KL divergence, perplexity, error.

    With --types, compare a model with its own quantizations.
    """
    from kukri.terminal.evaluate import Reading, compare_models

    if model_option is not None:
        a, b = model_option, a if b is None else one_model(a, model_option)
    compare_models(a, b, Reading(**vars(reading)), options, as_json=json)


@command(app, "tune-recipe")
def tune_recipe(*, named: ModelName, options: TuneOptions, json: Json = False) -> None:
    """Choose a weight type for each tensor by measuring.

    Writes a recipe for `kukri quantize` that fits the weights into --size.
    """
    from kukri.terminal.tune import write_tuned_recipe

    write_tuned_recipe(named.name, options, as_json=json)


@command(app)
def imatrix(
    *,
    named: ModelName,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="UTF-8 text similar to what the model will read.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")],
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens per chunk.")] = 512,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write an importance matrix for `kukri quantize`."""
    from kukri.terminal.evaluate import write_importances

    model, text = named.and_arguments("MODEL TEXT", text)
    write_importances(model, Path(str(text)), output, chunk, n_threads=threads, as_json=json)


@command(app)
def doctor(
    gpu: Annotated[
        bool,
        typer.Option("--gpu", help="Check the kernels on a GPU against the CPU instead; takes a minute."),
    ] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="Device for --gpu.")] = "auto",
    json: Json = False,
) -> None:
    """Show the CPU, its kernels, caches and versions."""
    from kukri.terminal.doctor import check_gpu, show_machine

    if gpu:
        check_gpu(device, as_json=json)
    else:
        show_machine(as_json=json)
