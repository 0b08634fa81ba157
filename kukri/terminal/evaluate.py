"""`kukri perplexity`, `kukri compare` and `kukri imatrix`: quality of models and quantizations."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from kukri import LLM
from kukri.dataclass import asdict, dataclass
from kukri.errors import ConfigError
from kukri.evaluate.compare import Comparison, compare
from kukri.evaluate.importance import importance_matrix
from kukri.evaluate.perplexity import perplexity
from kukri.evaluate.text import STEP_TOKENS, Window, read_text, text_windows
from kukri.formats import hub
from kukri.formats.imatrix import write_imatrix
from kukri.quant.recipes import recipe_named
from kukri.terminal.convert import quantized_file
from kukri.terminal.files import check_parent
from kukri.terminal.options import CompareOptions, TextOptions
from kukri.terminal.output import n_bytes_text
from kukri.terminal.plots import Chart, require_plots, save_chart
from kukri.terminal.progress import progress_bar
from kukri.terminal.tables import print_facts, print_table


@dataclass(eq=False, repr=False)
class Reading(TextOptions):
    """A text, a file's or the prose that comes with kukri, to be read in windows of tokens.

    Attributes: words, the text itself. Raises ConfigError if the file cannot be read.
    """

    def __post_init__(self) -> None:
        self.words = read_text(self.text)

    def open(self, model: str | Path | None) -> LLM:
        """A model with room for a window."""
        return LLM(
            model,
            max_context=self.window,
            max_step_tokens=min(STEP_TOKENS, self.window),
            n_threads=self.n_threads,
        )

    def windows(self, llm: LLM) -> list[Window]:
        """The text in the model's tokens."""
        return text_windows(llm.tokenizer, self.words, self.window, self.stride)


def compare_models(
    a: str | None, b: str | None, reading: Reading, options: CompareOptions, *, as_json: bool
) -> None:
    """Compares A with B, or with itself in other types. Raises ConfigError unless it is one of the two."""
    if (b is None) == (options.types is None):
        raise ConfigError(
            "a second model is required, or --types to compare the first with, such as Q8_0,Q4_K_M"
        )
    if b is not None:
        if options.imatrix is not None:
            raise ConfigError("--imatrix requires --types")
        return show_comparison(a, b, reading, options.plot, as_json=as_json)
    show_types(hub.resolve(a), reading, options, as_json=as_json)


def write_importances(
    model: str | None, text: Path, target: Path, chunk_tokens: int, *, n_threads: int | None, as_json: bool
) -> None:
    """Writes the importance matrix of a model over a text."""
    check_parent(target)
    reading = Reading(text, chunk_tokens, 1, n_threads)
    with reading.open(model) as llm:
        ids = llm.tokenizer.encode(reading.words)
        with progress_bar(len(ids)) as advance:
            matrix = importance_matrix(llm, ids, chunk_tokens, text.name, lambda n: advance(n, "reading"))
    write_imatrix(target, matrix)
    if as_json:
        made = {"path": str(target), "n_tokens": len(ids), "n_chunks": matrix.n_chunks}
        print(json.dumps({**made, "n_tensors": len(matrix.sums)}))
        return
    facts = f"{len(matrix.sums)} over {len(ids):,} tokens in {matrix.n_chunks} chunks"
    print_facts([("wrote", str(target)), ("tensors", facts)])


def show_perplexity(model: str | None, reading: Reading, *, as_json: bool) -> None:
    """Measures a model's perplexity and prints it."""
    with reading.open(model) as llm:
        windows = reading.windows(llm)
        with reading_bar(windows, "reading") as on_tokens:
            found = perplexity(llm, windows, on_tokens)
        path = str(llm.path)
    if as_json:
        print(
            json.dumps({"model": path, **asdict(found), "window": reading.window, "stride": reading.stride})
        )
        return
    print_facts(
        [
            ("model", path),
            ("tokens", f"{found.n_tokens:,} scored, windows of {reading.window}, stride {reading.stride}"),
            ("perplexity", f"{found.perplexity:.4f} ± {found.error:.4f}"),
        ]
    )


def show_comparison(a: str | None, b: str, reading: Reading, plot: Path | None, *, as_json: bool) -> None:
    """Compares model B with model A and prints the result; `plot` names a PNG to write."""
    if plot is not None:
        require_plots(plot)
    with reading.open(a) as llm_a, reading.open(b) as llm_b:
        windows = reading.windows(llm_a)
        with reading_bar(windows, "comparing") as on_tokens:
            found = compare(llm_a, llm_b, windows, on_tokens)
        paths = {"a": str(llm_a.path), "b": str(llm_b.path)}
    if plot is not None and found.layers is not None:
        layers = list(enumerate(found.layers))
        save_chart(plot, Chart("block", "residual stream, relative error", layers, from_zero=True))
    if as_json:
        print(json.dumps({"models": paths, **asdict(found)}))
        return
    print_facts([*((name.upper(), path) for name, path in paths.items()), *_facts(found)])
    if found.layers is not None:
        rows = [[f"blocks.{i}", f"{error:.4f}"] for i, error in enumerate(found.layers)]
        print_table("residual stream after each block", ["block", "relative error"], rows)


def _facts(found: Comparison) -> list[tuple[str, str]]:
    return [
        ("tokens", f"{found.n_tokens:,}"),
        ("KL(A || B)", f"{found.kl_mean:.6f} ± {found.kl_error:.6f} nats"),
        ("  median", f"{found.kl_median:.6f}"),
        ("  99%", f"{found.kl_p99:.6f}"),
        ("  max", f"{found.kl_max:.6f}"),
        ("same top", f"{found.same_top:.2%}"),
        ("Δp", f"{found.delta_p_mean:+.3%} mean, {found.delta_p_rms:.3%} rms"),
        ("perplexity", f"A {found.a.perplexity:.4f} ± {found.a.error:.4f}, B {found.b.perplexity:.4f}"),
        ("  B / A", f"{found.perplexity_ratio:.5f} ± {found.perplexity_ratio_error:.5f}"),
    ]


def show_types(model: Path, reading: Reading, options: CompareOptions, *, as_json: bool) -> None:
    """Quantizes a model to each type in turn and prints the sizes and losses; `options.plot` names a PNG."""
    types, plot = type_list(options.types or ""), options.plot
    for name in types:
        recipe_named(name)
    if plot is not None:
        require_plots(plot)
    found: dict[str, tuple[int, Comparison]] = {}
    with tempfile.TemporaryDirectory() as directory, reading.open(model) as original:
        windows = reading.windows(original)
        with progress_bar(len(types)) as advance:
            for name in types:
                advance(1, name)
                path = Path(directory) / "model.gguf"
                n_bytes = quantized_file(model, path, name, options.imatrix)
                with reading.open(path) as llm:
                    found[name] = n_bytes, compare(original, llm, windows)
    if plot is not None:
        points = [(n_bytes / 1e6, c.kl_mean) for n_bytes, c in found.values()]
        save_chart(plot, Chart("weights, MB", "mean KL, nats", points, labels=list(found), log=True))
    if as_json:
        made = {name: {"n_bytes": n_bytes, **asdict(c)} for name, (n_bytes, c) in found.items()}
        print(json.dumps({"model": str(model), "types": made}))
        return
    rows = [
        [
            name,
            n_bytes_text(n_bytes),
            f"{c.kl_mean:.6f} ± {c.kl_error:.6f}",
            f"{c.kl_p99:.4f}",
            f"{c.same_top:.2%}",
            f"{c.perplexity_ratio:.4f}",
        ]
        for name, (n_bytes, c) in found.items()
    ]
    title = f"{model} in other types, {next(iter(found.values()))[1].n_tokens:,} tokens"
    print_table(title, ["type", "weights", "mean KL", "99%", "same top", "perplexity B / A"], rows)


def type_list(text: str) -> list[str]:
    """The names in a list with commas. Raises ConfigError for an empty one."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise ConfigError("--types must name types, such as Q8_0,Q6_K,Q4_K_M")
    return list(dict.fromkeys(names))


@contextmanager
def reading_bar(windows: Sequence[Window], what: str) -> Iterator[Callable[[int], None]]:
    """A progress bar for all tokens of the windows."""
    with progress_bar(sum(len(window.ids) - 1 for window in windows)) as advance:
        yield lambda n_tokens: advance(n_tokens, what)
