"""The `kukri` command: one function per command, with its arguments and help.

The commands' work is in `kukri.terminal`, imported when a command runs, so that `kukri run` pays for nothing
else; options that several share are in `kukri.terminal.options`. Annotations are not postponed: typer would
evaluate their text at each start.
"""

import gc
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer

from kukri.opening import DEFAULT_SYSTEM
from kukri.terminal.errors import BenchGroup, ErrorReportingGroup
from kukri.terminal.options import (
    Alias,
    APIKey,
    ClusterOptions,
    DryRun,
    Imatrix,
    Json,
    LoadOfUsers,
    LoadOptions,
    LoadTestOptions,
    ManyOptions,
    ModelArgument,
    ModelOption,
    ModelOptions,
    NeededModel,
    ReaderOptions,
    SamplingOptions,
    ServeOptions,
    ServerURL,
    SteeringOptions,
    System,
    TextOptions,
    Threads,
    cluster_options,
    command,
    expanded,
    given,
    model_and,
    model_names,
    one_model,
    size_bytes,
)

_GC_THRESHOLD = (
    50_000  # objects between collections: with Python's 700, a start spends 25 ms on finding nothing
)

app = typer.Typer(
    name="kukri",
    cls=ErrorReportingGroup,
    help="Run small language models on your own machine, in Python alone.",
    no_args_is_help=True,
    add_completion=True,
    rich_markup_mode=None,  # help and usage errors without rich: 60 ms less
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer(cls=BenchGroup, subcommand_metavar="[MODEL | COMMAND [ARGS]...]")
app.add_typer(bench_app, name="bench")
cluster_app = typer.Typer(help="Serve a model by replicas on several machines.", no_args_is_help=True)
app.add_typer(cluster_app, name="cluster")


def main() -> None:
    """Runs the command line of this process and exits: 0, 2 after an error, 130 after Ctrl-C."""
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
    """Run small language models on your own machine, in Python alone."""


@command(app)
def run(
    model: ModelArgument = None,
    prompt: Annotated[
        str | None,
        typer.Argument(metavar="[PROMPT]", help="Prompt; a lone argument is this. Piped text is appended."),
    ] = None,
    model_option: ModelOption = None,
    system: System = DEFAULT_SYSTEM,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    *,
    sampling: SamplingOptions,
    loading: LoadOptions,
    steering: SteeringOptions,
    json: Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print token counts and speeds to stderr.")] = False,
) -> None:
    """Answer a prompt and stream the answer."""
    gc.set_threshold(_GC_THRESHOLD)
    from kukri.terminal.run import answer_prompt, is_model_file

    if prompt is None and not is_model_file(model):
        model, prompt = None, model
    files, interventions = steering.files_and_interventions()
    answer_prompt(
        prompt,
        model=one_model(model, model_option),
        system=system,
        raw=raw,
        sampling=given(sampling),
        loading=given(loading) | files,
        interventions=interventions,
        as_json=json,
        with_stats=stats,
    )


@command(app)
def chat(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    system: System = DEFAULT_SYSTEM,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the last conversation.")] = False,
    *,
    sampling: SamplingOptions,
    loading: LoadOptions,
    steering: SteeringOptions,
) -> None:
    """Chat in the terminal; /help lists commands."""
    gc.set_threshold(_GC_THRESHOLD)
    from kukri.terminal.chat import talk

    files, interventions = steering.files_and_interventions()
    talk(
        model=one_model(model, model_option),
        system=system,
        sampling=given(sampling),
        loading=given(loading) | files,
        resumes=resume,
        interventions=interventions,
    )


@command(app)
def serve(
    model: ModelArgument = None,
    model_option: Annotated[
        list[str] | None,
        typer.Option(
            "--model",
            "-m",
            metavar="[NAME=]MODEL",
            help="A model, loaded when it is needed; repeatable.",
            autocompletion=model_names,
        ),
    ] = None,
    *,
    serving: ServeOptions,
    loading: ManyOptions,
    readers: ReaderOptions,
) -> None:
    """Serve OpenAI's, Anthropic's and Ollama's APIs and a page.

    Listens on http://127.0.0.1:8000 unless told otherwise. Needs the extra `serve`.
    """
    from kukri.terminal.serve import serve_models

    serve_models(
        [*([model] if model else []), *(model_option or [])], serving, given(loading) | readers.files()
    )


@command(app)
def ps(
    url: ServerURL = "http://127.0.0.1:8000",
    api_key: APIKey = None,
    json: Json = False,
) -> None:
    """List the models of a running server and their state."""
    from kukri.terminal.ps import show_served_models

    show_served_models(url, api_key, as_json=json)


@command(cluster_app, "serve")
def cluster_serve(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    *,
    replicas: ClusterOptions,
    serving: ServeOptions,
    loading: ManyOptions,
) -> None:
    """Serve one model by replicas on Ray, with the API of `kukri serve`.

    A replica that dies costs its clients nothing but time. Needs the extras `serve` and `ray`.
    """
    from kukri.terminal.cluster import serve_cluster

    serve_cluster(one_model(model, model_option), replicas, serving, given(loading))


@command(cluster_app)
def status(
    url: ServerURL = "http://127.0.0.1:8000",
    api_key: APIKey = None,
    json: Json = False,
) -> None:
    """List the replicas of a running server and their load."""
    from kukri.terminal.cluster import show_cluster

    show_cluster(url, api_key, as_json=json)


@command(app)
def stage(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one.")
    ] = "127.0.0.1:7310",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Device of the layers. [default: the engine's]")
    ] = None,
    n_threads: Threads = None,
    once: Annotated[bool, typer.Option("--once", help="Serve one engine and end.")] = False,
) -> None:
    """Compute some layers of a model for another machine.

    The engine, any command with --stages HOST:PORT, says which. Both need the same random text in
    KUKRI_STAGE_TOKEN. The connection is not encrypted.
    """
    from kukri.terminal.stage import run_stage

    run_stage(listen, device, n_threads, once=once)


@command(app)
def plan(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    *,
    load: LoadOfUsers,
    loading: ManyOptions,
    json: Json = False,
) -> None:
    """Tell how many replicas a load needs.

    Measures the engine's steps on this machine and simulates replicas with them.
    """
    from kukri.terminal.plan import plan as print_plan

    print_plan(one_model(model, model_option), load, given(loading), as_json=json)


@command(app)
def batch(
    model: ModelArgument = None,
    source: Annotated[
        str | None, typer.Argument(metavar="SOURCE", help="Requests as in OpenAI's batches, JSON lines.")
    ] = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help="File for the results, in the same order.")
    ] = None,
    model_option: ModelOption = None,
    alias: Alias = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Let replicas on Ray answer; the options on replicas are for it.")
    ] = False,
    *,
    replicas: ClusterOptions,
    loading: ManyOptions,
    json: Json = False,
) -> None:
    """Answer a file of requests, many at a time.

    An interrupted run resumes with the same command. Needs the extra `serve`, and `ray` with --ray.
    """
    from kukri.terminal.batch import run_batch

    model, source, target = model_and(
        model_option, model, source, target, names="MODEL SOURCE TARGET", needs_model=False
    )
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
    model: ModelArgument = None,
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Texts. [default: lines of piped text]")
    ] = None,
    model_option: ModelOption = None,
    prompt: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model's own prompt, such as query.")
    ] = None,
    dimensions: Annotated[int | None, typer.Option(metavar="N", help="Cut vectors to N numbers.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    *,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Print a vector for each text, by minilm if no model is named."""
    from kukri.terminal.embed import model_and_texts, show_vectors

    model, texts = model_and_texts(model_option, [model, *(texts or [])])
    show_vectors(
        texts,
        model=model,
        prompt_name=prompt,
        dimensions=dimensions,
        truncate=truncate,
        loading=given(loading),
        as_json=json,
    )


@command(app)
def rerank(
    model: ModelArgument = None,
    query: Annotated[
        str | None, typer.Argument(metavar="QUERY", help="What the documents are to answer.")
    ] = None,
    documents: Annotated[
        list[str] | None,
        typer.Argument(metavar="[DOCUMENT]...", help="Documents. [default: lines of piped text]"),
    ] = None,
    model_option: ModelOption = None,
    top_n: Annotated[int | None, typer.Option("--top-n", metavar="N", help="Print the N best alone.")] = None,
    truncate: Annotated[bool, typer.Option("--truncate", help="Cut texts that are too long.")] = False,
    *,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Rank documents by a query, with minilm if no model is named.

    A cross-encoder reads both together; other models compare embeddings.
    """
    from kukri.terminal.embed import model_and_texts, show_ranking

    model, texts = model_and_texts(model_option, [model, query, *(documents or [])])
    show_ranking(
        texts,
        model=model,
        top_n=top_n,
        truncate=truncate,
        loading=given(loading),
        as_json=json,
    )


@command(app)
def activations(
    model: ModelArgument = None,
    texts: Annotated[
        str | None,
        typer.Argument(metavar="TEXTS", help='A text, or JSON lines with a "text" each (.jsonl).'),
    ] = None,
    model_option: ModelOption = None,
    names: Annotated[
        list[str] | None,
        typer.Option("--names", metavar="NAME", help="Hook, such as resid_post14; repeatable."),
    ] = None,
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="Directory for the shards.")] = None,
    context: Annotated[int, typer.Option(metavar="N", help="Tokens of a window.", min=1)] = 128,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="Size of a shard.")] = "128MiB",
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Random order of windows and of a shard's rows.", min=0)
    ] = None,
    *,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Store a model's activations on texts, as autoencoders are trained on.

    Shards are safetensors in float16, with tokens and positions. An interrupted run resumes with the same
    command.
    """
    from kukri.errors import ConfigError
    from kukri.terminal.activations import store_activations

    model, source = model_and(model_option, model, texts, names="MODEL TEXTS", needs_model=False)
    if not names or out is None:
        raise ConfigError("give the hooks and a directory: --names resid_post14 --out DIR")
    store_activations(
        Path(str(source)),
        out,
        model=model,
        names=names,
        context=context,
        shard_bytes=size_bytes(shard_size, "--shard-size"),
        shuffle=shuffle,
        loading=given(loading),
        as_json=json,
    )


@command(app)
def pull(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Check a cached file's hash; fetch it again if it is damaged.")
    ] = False,
    json: Json = False,
) -> None:
    """Download a model into the cache and print its path."""
    from kukri.terminal.pull import pull_model

    pull_model(one_model(model, model_option), verify=verify, as_json=json)


@command(app, "list")
def list_(
    known: Annotated[
        bool, typer.Option("--known", help="List the names that `kukri pull` knows too.")
    ] = False,
    json: Json = False,
) -> None:
    """List the cached models."""
    from kukri.terminal.models import list_models

    list_models(with_known=known, as_json=json)


@command(app)
def rm(
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Cached models, named as in kukri list.")
    ] = None,
    model_option: ModelOption = None,
) -> None:
    """Remove models from the cache."""
    from kukri.errors import ConfigError
    from kukri.terminal.models import remove_models

    names = [*(models or []), *([model_option] if model_option else [])]
    if not names:
        raise ConfigError("missing argument MODEL: kukri list shows the cached models")
    remove_models(names)


@command(app)
def show(model: ModelArgument = None, model_option: ModelOption = None, json: Json = False) -> None:
    """Show a cached model: architecture, size, context, types."""
    from kukri.terminal.models import show_cached_model

    show_cached_model(one_model(model, model_option), as_json=json)


@bench_app.callback(invoke_without_command=True)
@expanded
def bench(
    context: typer.Context,
    model: ModelOption = None,
    n_prompt: Annotated[
        int, typer.Option("--prompt-tokens", "-p", metavar="N", help="Tokens of the prompt.")
    ] = 512,
    n_generate: Annotated[
        int, typer.Option("--generate-tokens", "-g", metavar="N", help="Tokens to generate.")
    ] = 128,
    repetitions: Annotated[
        int, typer.Option("--repetitions", "-r", metavar="N", help="Repetitions of each measurement.")
    ] = 5,
    *,
    loading: ModelOptions,
    json: Json = False,
) -> None:
    """Measure prefill and decode speed, or load a server."""
    if context.invoked_subcommand is not None:
        return
    from kukri.bench.offline import run_bench

    run_bench(
        model,
        n_prompt=n_prompt,
        n_generate=n_generate,
        repetitions=repetitions,
        json_only=json,
        **given(loading),
    )


@command(bench_app, "serve")
def bench_serve(*, load: LoadTestOptions, json: Json = False) -> None:
    """Load a server with OpenAI's API; show its latency."""
    from kukri.terminal.load import load_server

    load_server(load, as_json=json)


@command(bench_app)
def ablate(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Measure one technique, such as kv-cache; repeatable."),
    ] = None,
    threads: Threads = None,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", metavar="N", help="Rounds.")] = 5,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the gains as a PNG.")] = None,
    page: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a Markdown page, with its chart beside it.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure the gain of each technique on this machine."""
    from kukri.terminal.ablate import show_ablation

    show_ablation(
        one_model(model, model_option),
        only or [],
        n_threads=threads,
        repetitions=repetitions,
        plot=plot,
        page=page,
        as_json=json,
    )


@command(app)
def inspect(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show the modules, as PyTorch prints them.")] = False,
    params: Annotated[bool, typer.Option("--params", help="Show the parameters of each layer.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor.")] = False,
    json: Json = False,
) -> None:
    """Show a model's configuration, modules and parameters."""
    from kukri.terminal.inspect import show_model

    show_model(
        one_model(model, model_option),
        with_tree=tree,
        with_parameters=params,
        with_tensors=tensors,
        as_json=json,
    )


@command(app)
def convert(
    model: NeededModel = None,
    target: Annotated[
        str | None, typer.Argument(metavar="TARGET", help=".gguf file (or directory, --to hf) to write.")
    ] = None,
    model_option: ModelOption = None,
    type: Annotated[
        str | None,
        typer.Option(
            "--type",
            "-t",
            metavar="TYPE",
            help="F32, BF16, Q8_0, Q4_K_M … or a recipe. [default: most weights']",
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

    model, target = model_and(model_option, model, target, names="MODEL TARGET")
    source = source_path(model)
    if to == "hf":
        return convert_to_directory(source, Path(str(target)), type, as_json=json)
    convert_model(source, Path(str(target)), type, dry_run=dry_run, as_json=json)


@command(app)
def merge(
    model: NeededModel = None,
    adapter: Annotated[
        str | None, typer.Argument(metavar="ADAPTER", help="LoRA adapter: a PEFT directory or GGUF file.")
    ] = None,
    model_option: ModelOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="TARGET", help=".gguf file, or directory, to write."),
    ] = None,
    json: Json = False,
) -> None:
    """Write a model with a LoRA adapter in its weights."""
    from kukri.errors import ConfigError
    from kukri.terminal.merge import merge_model

    model, adapter = model_and(model_option, model, adapter, names="MODEL ADAPTER")
    if output is None:
        raise ConfigError("missing option -o TARGET: a .gguf file, or a directory, to write")
    merge_model(model, Path(str(adapter)), output, as_json=json)


@command(app)
def quantize(
    model: NeededModel = None,
    target: Annotated[str | None, typer.Argument(metavar="TARGET", help=".gguf file to write.")] = None,
    type: Annotated[
        str | None,
        typer.Argument(metavar="TYPE", help="Q4_K_M, Q8_0, IQ4_XS … as in llama.cpp, or a recipe."),
    ] = None,
    model_option: ModelOption = None,
    imatrix: Imatrix = None,
    dry_run: DryRun = False,
    list_recipes: Annotated[
        bool,
        typer.Option("--list-recipes", callback=_list_recipes, is_eager=True, help="List kukri's recipes."),
    ] = False,
    json: Json = False,
) -> None:
    """Write a model with its weights in another type."""
    from kukri.terminal.convert import convert_model, source_path

    model, target, type = model_and(model_option, model, target, type, names="MODEL TARGET TYPE")
    convert_model(source_path(model), Path(str(target)), type, dry_run=dry_run, as_json=json, imatrix=imatrix)


@command(app)
def perplexity(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    *,
    reading: TextOptions,
    json: Json = False,
) -> None:
    """Measure a model's perplexity on a text."""
    from kukri.terminal.evaluate import Reading, show_perplexity

    show_perplexity(one_model(model, model_option), Reading(**vars(reading)), as_json=json)


@command(app)
def compare(
    a: Annotated[str | None, typer.Argument(metavar="[A]", help="Model to compare with.")] = None,
    b: Annotated[
        str | None, typer.Argument(metavar="[B]", help="Model to measure; none with --types.")
    ] = None,
    model_option: Annotated[
        str | None,
        typer.Option("--model", "-m", metavar="MODEL", help="Model to compare with, instead of A."),
    ] = None,
    types: Annotated[
        str | None, typer.Option(metavar="LIST", help="Compare A with itself in these types: Q8_0,Q4_K_M.")
    ] = None,
    imatrix: Imatrix = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw a PNG: error by layer, or loss by size.")
    ] = None,
    *,
    reading: TextOptions,
    json: Json = False,
) -> None:
    """Compare two models: KL divergence, perplexity, error.

    With --types, compare one model with its own quantizations.
    """
    from kukri.terminal.evaluate import Reading, compare_models

    if model_option is not None:
        a, b = model_option, a if b is None else one_model(a, model_option)
    compare_models(a, b, Reading(**vars(reading)), types=types, imatrix=imatrix, plot=plot, as_json=json)


@command(app, "tune-recipe")
def tune_recipe(
    model: ModelArgument = None,
    model_option: ModelOption = None,
    *,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Size of all weights, such as 90MB.")],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="Recipe to write, .yaml or .json.")
    ],
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="UTF-8 text. [default: the opening of a novel]")
    ] = None,
    types: Annotated[
        str, typer.Option(metavar="LIST", help="Types to choose from.")
    ] = "Q2_K,Q3_K,IQ4_XS,Q4_K,Q5_K,Q6_K,Q8_0",
    tokens: Annotated[int, typer.Option(metavar="N", help="Most tokens of the text to read.")] = 512,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Choose a weight type for each tensor by measuring.

    Writes a recipe for `kukri quantize` that fits the weights into --size.
    """
    from kukri.terminal.tune import write_tuned_recipe

    write_tuned_recipe(
        one_model(model, model_option),
        size,
        output,
        text,
        types,
        max_tokens=tokens,
        n_threads=threads,
        as_json=json,
    )


@command(app)
def imatrix(
    model: ModelArgument = None,
    text: Annotated[
        str | None, typer.Argument(metavar="TEXT", help="UTF-8 text like that the model will read.")
    ] = None,
    model_option: ModelOption = None,
    *,
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="File to write.")],
    chunk: Annotated[int, typer.Option(metavar="N", help="Tokens read at a time.")] = 512,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write an importance matrix for `kukri quantize`."""
    from kukri.terminal.evaluate import write_importances

    model, text = model_and(model_option, model, text, names="MODEL TEXT", needs_model=False)
    write_importances(model, Path(str(text)), output, chunk, n_threads=threads, as_json=json)


@command(app)
def doctor(
    gpu: Annotated[
        bool, typer.Option("--gpu", help="Check the kernels on a GPU against the CPU instead: a minute.")
    ] = False,
    device: Annotated[str, typer.Option(metavar="NAME", help="The device of --gpu.")] = "auto",
    json: Json = False,
) -> None:
    """Show the CPU, its kernels, the caches and versions."""
    from kukri.terminal.doctor import check_gpu, show_machine

    if gpu:
        check_gpu(device, as_json=json)
    else:
        show_machine(as_json=json)
