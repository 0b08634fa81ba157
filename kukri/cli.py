"""The `kukri` command: one function per command, which says what may be asked and hands it on.

What commands do is in `kukri.terminal` and is imported when a command runs, so that `kukri run` pays for
nothing but itself.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kukri.terminal import DEFAULT_SYSTEM
from kukri.terminal.errors import ErrorReportingGroup

app = typer.Typer(
    name="kukri",
    cls=ErrorReportingGroup,
    help="Small language models on your own machine, in Python alone.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help and usage errors without rich: 60 ms less
    pretty_exceptions_enable=False,
)
bench_app = typer.Typer()
app.add_typer(bench_app, name="bench")

MODEL_HELP = "A known name, org/repo[:type] of the Hugging Face hub, a .gguf file or a safetensors directory."
Model = Annotated[str | None, typer.Option("--model", "-m", help=MODEL_HELP)]
Quantize = Annotated[str | None, typer.Option(help="Pack safetensors while loading: Q8_0, Q4_K, …")]
RopeScaling = Annotated[
    str | None, typer.Option(help="Stretch the context: linear, dynamic or yarn, with --rope-factor.")
]
RopeFactor = Annotated[float | None, typer.Option(help="How many times as long the context becomes.")]
ModelArgument = Annotated[str | None, typer.Argument(help=MODEL_HELP)]
System = Annotated[
    str, typer.Option("--system", "-s", help="A system message; '' leaves it to the model's template.")
]
Threads = Annotated[
    int | None, typer.Option("--threads", help="Threads; by default one for each usable core.")
]
MaxContext = Annotated[int | None, typer.Option(help="Tokens of prompt and answer together.")]
MaxRequests = Annotated[int, typer.Option(help="Requests computed at a time.")]
KVMemory = Annotated[
    str | None, typer.Option(help="Size of the KV cache, such as 2GiB; by default what these may need.")
]
KVType = Annotated[str, typer.Option(help="Numbers in the KV cache: f16, or q8_0 in half of it.")]
Speculation = Annotated[
    str | None,
    typer.Option(
        help="Guesses at tokens, which change none: ngram looks them up in the text; draft; or off."
    ),
]
DraftModel = Annotated[
    str | None, typer.Option(help="A small model with the same tokens, to guess those to come.")
]
Alias = Annotated[list[str] | None, typer.Option(help="One more name of the model; repeatable.")]
Text = Annotated[Path | None, typer.Option(help="A UTF-8 file; by default the opening of a novel.")]
Window = Annotated[int, typer.Option(help="Tokens that the model reads at once.")]
Stride = Annotated[int, typer.Option(help="Tokens from a window to the next, which are scored.")]
Imatrix = Annotated[Path | None, typer.Option(help="A file of `kukri imatrix`, or of llama.cpp.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only show what would be written.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
TopK = Annotated[int | None, typer.Option(help="Choose among the k most likely tokens.")]
TopP = Annotated[float | None, typer.Option(help="Choose among the most likely tokens of this probability.")]
MinP = Annotated[float | None, typer.Option(help="Leave out tokens less likely than this share of the best.")]
RepetitionPenalty = Annotated[float | None, typer.Option(help="Divides the logits of tokens seen so far.")]
PresencePenalty = Annotated[float | None, typer.Option(help="Taken off the logits of generated tokens.")]
FrequencyPenalty = Annotated[float | None, typer.Option(help="Taken off once for each time generated.")]
Seed = Annotated[int | None, typer.Option(help="Makes sampling repeatable.")]
Stop = Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")]


def main() -> None:
    """Runs the command line of this process and exits: 0, 2 after an error, 130 after Ctrl-C."""
    app()


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
    """Small language models on your own machine, in Python alone."""


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="What to say; text piped in is added to it.")] = None,
    model: Model = None,
    system: System = DEFAULT_SYSTEM,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is: no chat template.")] = False,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens to generate at most.")] = 512,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest.")] = 0.0,
    top_k: TopK = None,
    top_p: TopP = None,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    stop: Stop = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on after an end of text.")] = False,
    threads: Threads = None,
    max_context: MaxContext = None,
    quantize: Quantize = None,
    rope_scaling: RopeScaling = None,
    rope_factor: RopeFactor = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    json: Json = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print counts and speeds to stderr.")] = False,
) -> None:
    """Answer a prompt; the text appears as it is generated."""
    from kukri.terminal.run import answer_prompt

    answer_prompt(
        prompt,
        model=model,
        system=system,
        raw=raw,
        sampling={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
            "stop": stop,
            "ignore_eos": ignore_eos,
        },
        loading={
            "n_threads": threads,
            "max_context": max_context,
            "quantize": quantize,
            "rope_scaling": rope_scaling,
            "rope_factor": rope_factor,
            "speculation": speculation,
            "draft_model": draft_model,
        },
        as_json=json,
        with_stats=stats,
    )


@app.command()
def chat(
    model: Model = None,
    system: System = DEFAULT_SYSTEM,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", "-n", help="Tokens of an answer at most.")
    ] = 1024,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0 takes the likeliest.")] = 0.2,
    top_k: TopK = None,
    top_p: TopP = 0.9,
    min_p: MinP = None,
    repetition_penalty: RepetitionPenalty = None,
    presence_penalty: PresencePenalty = None,
    frequency_penalty: FrequencyPenalty = None,
    seed: Seed = None,
    threads: Threads = None,
    max_context: MaxContext = None,
    quantize: Quantize = None,
    rope_scaling: RopeScaling = None,
    rope_factor: RopeFactor = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
) -> None:
    """Talk with a model in the terminal; /help lists what else it takes."""
    from kukri.terminal.chat import talk

    talk(
        model=model,
        system=system,
        sampling={
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "presence_penalty": presence_penalty,
            "frequency_penalty": frequency_penalty,
            "seed": seed,
        },
        loading={
            "n_threads": threads,
            "max_context": max_context,
            "quantize": quantize,
            "rope_scaling": rope_scaling,
            "rope_factor": rope_factor,
            "speculation": speculation,
            "draft_model": draft_model,
        },
    )


@app.command()
def serve(
    model: Annotated[str | None, typer.Argument(help=MODEL_HELP)] = None,
    host: Annotated[str, typer.Option(help="Address to serve on; 0.0.0.0 is all of them.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", "-p", min=0, max=65535, help="Port; 0 takes any.")] = 8000,
    alias: Alias = None,
    api_key_file: Annotated[
        Path | None, typer.Option(help="API keys, one a line; without it $KUKRI_API_KEY, if set.")
    ] = None,
    cors_origin: Annotated[
        list[str] | None, typer.Option(help="Origin whose pages may ask; repeatable.")
    ] = None,
    any_model: Annotated[
        bool, typer.Option("--any-model", help="Answer whatever model a request names; without it 404.")
    ] = False,
    chat_template_file: Annotated[
        Path | None, typer.Option(help="Jinja template to use instead of the model's own.")
    ] = None,
    max_context: MaxContext = None,
    max_requests: MaxRequests = 16,
    kv_memory: KVMemory = None,
    kv_type: KVType = "f16",
    max_waiting: Annotated[int, typer.Option(help="Requests in the queue; more get 503.")] = 256,
    max_body: Annotated[str, typer.Option(help="Largest body of a request; a larger one gets 413.")] = "2MiB",
    rate_limit: Annotated[
        int | None, typer.Option(help="Requests a minute of one key (without keys: address); more get 429.")
    ] = None,
    deadline: Annotated[
        float | None, typer.Option(help="Seconds that an answer may take; then it is ended.")
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds for running answers after SIGTERM.")] = 60.0,
    no_page: Annotated[bool, typer.Option("--no-page", help="Serve no page to chat on at /.")] = False,
    threads: Threads = None,
    quantize: Quantize = None,
    rope_scaling: RopeScaling = None,
    rope_factor: RopeFactor = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    log_json: Annotated[bool, typer.Option("--log-json", help="Log JSON, one object a line.")] = False,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "info",
) -> None:
    """Serve a model over HTTP: OpenAI's API, Anthropic's messages, and a page to chat on."""
    from kukri.terminal.serve import serve_model

    serve_model(
        model,
        host=host,
        port=port,
        aliases=alias or [],
        api_key_file=api_key_file,
        cors_origins=cors_origin or [],
        any_model=any_model,
        chat_template_file=chat_template_file,
        loading={
            "max_context": max_context,
            "max_requests": max_requests,
            "kv_type": kv_type,
            "n_threads": threads,
            "quantize": quantize,
            "rope_scaling": rope_scaling,
            "rope_factor": rope_factor,
            "speculation": speculation,
            "draft_model": draft_model,
        },
        kv_memory=kv_memory,
        max_waiting=max_waiting,
        max_body=max_body,
        rate_limit=rate_limit,
        deadline_s=deadline,
        drain_s=drain,
        has_page=not no_page,
        log_json=log_json,
        log_level=log_level,
    )


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(help="Requests, one a line, as in OpenAI's batches.")],
    target: Annotated[Path, typer.Argument(help="The file for the results, in the same order.")],
    model: Model = None,
    alias: Alias = None,
    max_context: MaxContext = None,
    max_requests: MaxRequests = 16,
    kv_memory: KVMemory = None,
    kv_type: KVType = "f16",
    threads: Threads = None,
    quantize: Quantize = None,
    rope_scaling: RopeScaling = None,
    rope_factor: RopeFactor = None,
    speculation: Speculation = None,
    draft_model: DraftModel = None,
    json: Json = False,
) -> None:
    """Answer a file of requests, many at a time; run again, it goes on where it stopped."""
    from kukri.terminal.batch import run_batch

    run_batch(
        source,
        target,
        model=model,
        aliases=alias or [],
        loading={
            "max_context": max_context,
            "max_requests": max_requests,
            "kv_type": kv_type,
            "n_threads": threads,
            "quantize": quantize,
            "rope_scaling": rope_scaling,
            "rope_factor": rope_factor,
            "speculation": speculation,
            "draft_model": draft_model,
        },
        kv_memory=kv_memory,
        as_json=json,
    )


@app.command()
def pull(
    name: Annotated[str | None, typer.Argument(help="A known name.")] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash a cached file; fetch it again if bad.")
    ] = False,
    json: Json = False,
) -> None:
    """Fetch a model into the cache and print its path."""
    from kukri.terminal.pull import pull_model

    pull_model(name, verify=verify, as_json=json)


@bench_app.callback(invoke_without_command=True)
def bench(
    context: typer.Context,
    model: Model = None,
    threads: Threads = None,
    prompt_tokens: Annotated[int, typer.Option("--prompt-tokens", "-p", help="Tokens to read.")] = 512,
    generate_tokens: Annotated[int, typer.Option("--generate-tokens", "-g", help="Tokens to write.")] = 128,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="Times that each is measured.")] = 5,
    quantize: Quantize = None,
    rope_scaling: RopeScaling = None,
    rope_factor: RopeFactor = None,
    json: Json = False,
) -> None:
    """Measure reading and writing speed, and how much of the machine's bandwidth that is."""
    if context.invoked_subcommand is not None:
        return
    from kukri.bench.offline import run_bench

    run_bench(
        model,
        n_threads=threads,
        quantize=quantize,
        rope_scaling=rope_scaling,
        rope_factor=rope_factor,
        n_prompt=prompt_tokens,
        n_generate=generate_tokens,
        repetitions=repetitions,
        json_only=json,
    )


@bench_app.command("serve")
def bench_serve(
    url: Annotated[str, typer.Option(help="Where the API is.")] = "http://127.0.0.1:8000/v1",
    api_key: Annotated[str | None, typer.Option(envvar="OPENAI_API_KEY", help="Key of the API.")] = None,
    model: Annotated[str | None, typer.Option("--model", "-m", help="By default the first served.")] = None,
    endpoint: Annotated[Literal["chat", "completions"], typer.Option(help="Which of the two.")] = "chat",
    rate: Annotated[
        str | None, typer.Option(help="Open loop: requests a second, arriving at random, like 1,2,4.")
    ] = None,
    concurrency: Annotated[
        str | None, typer.Option(help="Closed loop: requests at a time; by default 1,4,16.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", "-n", min=1, help="Requests of each load; by default 100.")
    ] = None,
    duration: Annotated[float | None, typer.Option(help="Seconds in which those of a load begin.")] = None,
    prompt_tokens: Annotated[
        int, typer.Option("--prompt-tokens", "-p", help="Tokens of a prompt of random words.")
    ] = 128,
    prompts: Annotated[Path | None, typer.Option(help="JSONL instead: prompt or messages a line.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-g", help="Tokens of an answer at most.")] = 64,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Ask for all of them, where the server knows ignore_eos.")
    ] = False,
    extra_body: Annotated[
        str | None, typer.Option(help="More fields of a request, as JSON; null takes one away.")
    ] = None,
    slo: Annotated[
        str | None, typer.Option(help="Limits of a good answer in ms: ttft:500,tpot:50,e2e:5000.")
    ] = None,
    warm_up: Annotated[int, typer.Option(help="Requests before, not counted.")] = 2,
    timeout: Annotated[float, typer.Option(help="Seconds that an answer may take.")] = 300.0,
    seed: Annotated[
        int | None, typer.Option(help="Of prompts and arrivals; by default another each time.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw latency against load as a PNG.")] = None,
    json: Json = False,
) -> None:
    """Load any server with OpenAI's API: latencies, throughput, goodput."""
    from kukri.terminal.load import load_server

    load_server(
        url=url,
        api_key=api_key,
        model=model,
        kind=endpoint,
        rate=rate,
        concurrency=concurrency,
        n_requests=requests,
        duration_s=duration,
        n_prompt=prompt_tokens,
        prompts=prompts,
        max_tokens=max_tokens,
        ignore_eos=ignore_eos,
        extra_body=extra_body,
        slo=slo,
        n_warm_up=warm_up,
        timeout_s=timeout,
        seed=seed,
        plot=plot,
        as_json=json,
    )


@bench_app.command()
def ablate(
    model: Model = None,
    only: Annotated[
        list[str] | None, typer.Option(help="Measure this technique alone, such as kv-cache; repeatable.")
    ] = None,
    threads: Threads = None,
    repetitions: Annotated[int, typer.Option("--repetitions", "-r", help="Times that each is measured.")] = 5,
    plot: Annotated[Path | None, typer.Option(help="Draw the gains as a PNG.")] = None,
    page: Annotated[
        Path | None, typer.Option(help="Write a page of all this in Markdown, its chart beside it.")
    ] = None,
    json: Json = False,
) -> None:
    """Measure what each technique buys on this machine: with it and without, in turns."""
    from kukri.terminal.ablate import show_ablation

    show_ablation(
        model,
        only or [],
        n_threads=threads,
        repetitions=repetitions,
        plot=plot,
        page=page,
        as_json=json,
    )


@app.command()
def inspect(
    model: ModelArgument = None,
    tree: Annotated[bool, typer.Option("--tree", help="Show the modules, as PyTorch prints them.")] = False,
    params: Annotated[bool, typer.Option("--params", help="Show the parameters of each layer.")] = False,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor too.")] = False,
    json: Json = False,
) -> None:
    """Show what is in a model: configuration, modules, parameters by layer, bytes by type."""
    from kukri.terminal.inspect import show_model

    show_model(model, with_tree=tree, with_parameters=params, with_tensors=tensors, as_json=json)


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(help="A safetensors directory, or a .gguf file.")],
    target: Annotated[Path, typer.Argument(help="The .gguf file to write.")],
    type: Annotated[
        str | None,
        typer.Option("--type", "-t", help="F32, BF16, Q8_0, Q4_K_M, … or a recipe (type of most weights)."),
    ] = None,
    to: Annotated[Literal["gguf", "hf"], typer.Option(help="hf: a safetensors directory.")] = "gguf",
    dry_run: DryRun = False,
    json: Json = False,
) -> None:
    """Write a checkpoint as a GGUF file, or a GGUF file as a safetensors directory."""
    from kukri.terminal.convert import convert_model, convert_to_directory

    if to == "hf":
        return convert_to_directory(source, target, type, as_json=json)
    convert_model(source, target, type, dry_run=dry_run, as_json=json)


@app.command()
def quantize(
    source: Annotated[Path, typer.Argument(help="A .gguf file, or a safetensors directory.")],
    target: Annotated[Path, typer.Argument(help="The .gguf file to write.")],
    type: Annotated[str, typer.Argument(help="Q4_K_M, Q8_0, IQ4_XS, … as in llama.cpp; or a recipe.")],
    imatrix: Imatrix = None,
    dry_run: DryRun = False,
    list_recipes: Annotated[
        bool,
        typer.Option(
            "--list-recipes", callback=_list_recipes, is_eager=True, help="Print kukri's own recipes."
        ),
    ] = False,
    json: Json = False,
) -> None:
    """Write a model with its weights in another type."""
    from kukri.terminal.convert import convert_model

    convert_model(source, target, type, dry_run=dry_run, as_json=json, imatrix=imatrix)


@app.command()
def perplexity(
    model: ModelArgument = None,
    text: Text = None,
    window: Window = 512,
    stride: Stride = 256,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure how well a model predicts a text."""
    from kukri.terminal.evaluate import Reading, show_perplexity

    show_perplexity(model, Reading(text, window, stride, threads), as_json=json)


@app.command()
def compare(
    a: Annotated[str, typer.Argument(help="The model that the other is measured by.")],
    b: Annotated[str | None, typer.Argument(help="The other; none with --types.")] = None,
    text: Text = None,
    types: Annotated[
        str | None, typer.Option(help="Compare A with itself in these types: Q8_0,Q6_K,Q4_K_M or recipes.")
    ] = None,
    imatrix: Imatrix = None,
    plot: Annotated[Path | None, typer.Option(help="Draw a PNG: error by layer, or loss by size.")] = None,
    window: Window = 512,
    stride: Stride = 256,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Measure what a model loses against another: KL divergence, tokens, perplexity, layers."""
    from kukri.terminal.evaluate import Reading, compare_models

    reading = Reading(text, window, stride, threads)
    compare_models(a, b, reading, types=types, imatrix=imatrix, plot=plot, as_json=json)


@app.command("tune-recipe")
def tune_recipe(
    model: Annotated[str, typer.Argument(help="A .gguf file or a safetensors directory, not quantized yet.")],
    size: Annotated[str, typer.Option(help="What all weights may take, such as 90MB.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The recipe to write: .yaml or .json.")],
    text: Text = None,
    types: Annotated[
        str, typer.Option(help="Types to choose from.")
    ] = "Q2_K,Q3_K,IQ4_XS,Q4_K,Q5_K,Q6_K,Q8_0",
    tokens: Annotated[int, typer.Option(help="Tokens of the text that are read, at most.")] = 512,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Choose a type for each tensor by what it costs, and write the recipe for `kukri quantize`."""
    from kukri.terminal.tune import write_tuned_recipe

    write_tuned_recipe(model, size, output, text, types, max_tokens=tokens, n_threads=threads, as_json=json)


@app.command()
def imatrix(
    model: Annotated[str, typer.Argument(help=MODEL_HELP)],
    text: Annotated[Path, typer.Argument(help="A UTF-8 file of what the model is to be good at.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="The file to write.")],
    chunk: Annotated[int, typer.Option(help="Tokens read at a time.")] = 512,
    threads: Threads = None,
    json: Json = False,
) -> None:
    """Write how much each column of the weights matters on a text, for `kukri quantize --imatrix`."""
    from kukri.terminal.evaluate import write_importances

    write_importances(model, text, output, chunk, n_threads=threads, as_json=json)


@app.command()
def doctor(json: Json = False) -> None:
    """Show the CPU, the kernels made for it, the caches and the versions."""
    from kukri.terminal.doctor import show_machine

    show_machine(as_json=json)
