"""Gains of speculative decoding: `python -m benchmarks.speculation`.

The same requests are answered with n-gram drafts and without, in turns, by one engine; answers must be equal.
Copies are a file to edit, a passage to repeat, a list to write and a program to continue; edits are changes
to a file, which is printed as a whole; code is written from a request; prose is stories, an explanation and a
letter. A ratio is of the times from the first token to the last, the median over rounds; for streams, of the
times in which all of them are answered, their prompts being cached. An agent's conversation has ten turns
over one file, each with the answers before it in its prompt; its times are those of all turns.
With `--streams` there are the rows of eight streams alone, which need more rounds than others (`-r 9`).
With `--next-token` the model drafts by its own layer for multi-token prediction, and each draft that it made
is replaced by the right token with a chance of 0.8: what such drafts gain if they are accepted so often. With
`--eagle3` a random EAGLE-3 layer, made for the model, takes the place of its own. With `--draft-model` that
model drafts too, for a few of the texts.
With `--predicted` an answer is given as its own prediction instead, whole and with a fifth of its tokens
wrong: what drafts cost and save whatever a model of random weights writes.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import geometric_mean, median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.harness import Experiment, Say, Table, model_path, run, silent
from benchmarks.make_model import DEVIATION
from benchmarks.turns import in_turns
from kukri.calls.conversation import Conversation
from kukri.errors import ContextLengthError, KukriError
from kukri.formats.headers import read_headers
from kukri.formats.huggingface.safetensors import safetensors_bytes
from kukri.sampling import SamplingParams

if TYPE_CHECKING:
    from kukri.calls.results import Result
    from kukri.config import ModelConfig
    from kukri.engine.timings import Timings
    from kukri.kernels.arrays import IntArray
    from kukri.llm import LLM

_CONTEXT, _LONG_CONTEXT = 1024, 8192  # the least, and that of an agent if the model has it
_N_PROSE = 160  # tokens of an answer at most
_N_COPIED, _N_EDITED = 300, 450
_N_STREAMS = 8

_CODE = '''import math


def area_of_circle(radius):
    """The area of a circle of a given radius."""
    if radius < 0:
        raise ValueError("the radius must not be negative")
    return math.pi * radius ** 2


def area_of_rectangle(width, height):
    """The area of a rectangle of a given width and height."""
    if width < 0 or height < 0:
        raise ValueError("the sides must not be negative")
    return width * height


def volume_of_sphere(radius):
    """The volume of a sphere of a given radius."""
    if radius < 0:
        raise ValueError("the radius must not be negative")
    return 4 / 3 * math.pi * radius ** 3


def volume_of_cylinder(radius, height):
    """The volume of a cylinder of a given radius and height."""
    return area_of_circle(radius) * height
'''
_PASSAGE = (
    "The lighthouse of Alexandria stood on the island of Pharos for more than a thousand years. It was built "
    "under Ptolemy the Second, and sailors could see its fire from far away. Three earthquakes damaged it "
    "between 956 and 1323, and its last stones were used to build a fort. Divers found large blocks of "
    "granite in the harbour in 1994, and some of them may have belonged to the tower."
)
_INGREDIENTS = (
    "200 g flour", "3 eggs", "100 ml milk", "a pinch of salt", "50 g butter", "2 apples", "1 lemon",
    "30 g sugar", "1 tea spoon of cinnamon", "a cup of walnuts", "80 g of dark chocolate",
    "2 spoons of honey",
)  # fmt: skip
_LIST = (
    f"Ingredients: {', '.join(_INGREDIENTS)}.\n\nThe ingredients as a list, one on each line:\n"
    f"- {_INGREDIENTS[0]}\n- {_INGREDIENTS[1]}\n"
)
_BEGUN = _CODE.split("ValueError")[0]
_PROGRAM = f"# shapes.py\n\n{_CODE}\n\n# shapes.py, TypeError for ValueError\n\n{_BEGUN}TypeError"


@dataclass(frozen=True)
class Task:
    """A prompt, or a message of a chat, and the end of its answer."""

    name: str
    text: str
    is_chat: bool
    max_tokens: int
    stop: str | None = None


COPIES = (
    Task(
        "edit a file", f"Change `radius` to `r` and print the file:\n```python\n{_CODE}```", True, _N_COPIED
    ),
    Task("repeat a passage", f"Repeat this text word for word:\n\n{_PASSAGE}", True, _N_COPIED),
    Task("write a list", _LIST, False, _N_COPIED, "\n\n"),
    Task("go on with a program", _PROGRAM, False, _N_COPIED, "\n\n\n#"),
)
PROSE = (
    Task("a story", "Write a story about the keeper of a lighthouse.", True, _N_PROSE),
    Task("an explanation", "How is bread made, and why does it rise?", True, _N_PROSE),
    Task("a letter", "Write a letter to a friend about your first week in a new city.", True, _N_PROSE),
    Task("a novel", "The rain had stopped in the night, and when Anna opened the window", False, _N_PROSE),
)
_FILE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def peek(self):
        return self.items[-1]

    def is_empty(self):
        return len(self.items) == 0


class Queue:
    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)

    def get(self):
        return self.items.pop(0)

    def is_empty(self):
        return len(self.items) == 0


def reverse(items):
    stack = Stack()
    for item in items:
        stack.push(item)
    reversed_items = []
    while not stack.is_empty():
        reversed_items.append(stack.pop())
    return reversed_items
"""
EDITS = tuple(
    Task(name, f"{change} and print the whole file.\n\n```python\n{_FILE}```", True, _N_EDITED)
    for name, change in (
        ("rename a class", "Rename the class Stack to Pile everywhere"),
        ("add docstrings", "Add a docstring to each method"),
        ("add type hints", "Add type hints to all functions"),
        ("rename a field", "Rename `items` to `values`"),
    )
)
CODE = (
    Task("a tree", "Write a Python class for a binary search tree with insert and find.", True, _N_COPIED),
    Task("a program", "Write a Python program that counts words and lines of files.", True, _N_COPIED),
    Task("a server", "Write an HTTP server in Python that serves JSON for three routes.", True, _N_COPIED),
    Task("tests", "Write a Python function slugify(text) and tests with pytest for it.", True, _N_COPIED),
)
_TURNS = (
    "Add a method `size` to both classes", "Rename `reverse` to `reversed_list`",
    "Add a docstring to each class", "Make `pop` and `get` raise an IndexError with a message",
    "Add a class `Deque` after Queue", "Add type hints", "Rename `items` to `_items` in all classes",
    "Add a `__repr__` to each class", "Add `if __name__ == \"__main__\":` with an example",
    "Remove the example again",
)  # fmt: skip
_GROUPS = {"copies": COPIES, "edits": EDITS, "code": CODE, "prose": PROSE}
_DRAFTED = (*EDITS[:1], *CODE[:2], *PROSE[:2])  # by a draft model, which takes as long as all others
_TEMPERATURES = (0.0, 0.7)
_RIGHT = (1.0, 0.8, 0.0)  # shares of a prediction
_EAGLE_TOKENS = 32_000  # in the head of a random layer
_FORCED, _N_DRAFTS = 0.8, 3  # the chance of a forced draft, and most of them in a step


@dataclass(frozen=True)
class SpeculationRow:
    """Speculation on one task, or on streams. Speeds in tokens/s, ratios speculating / plain."""

    task: str
    temperature: float
    n_tokens: int
    n_drafted: int
    n_accepted: int
    plain: float
    speculating: float
    ratio: float  # median of the rounds
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class SpeculationReport:
    """The report of `python -m benchmarks.speculation`."""

    model: str
    rounds: int
    rows: tuple[SpeculationRow, ...]
    means: dict[str, dict[str, float]]  # geometric means of ratios, by group and temperature


class _Trial:
    """An engine that answers tasks both ways."""

    def __init__(
        self, path: Path, n_threads: int | None, rounds: int, draft_model: str | None = None
    ) -> None:
        from kukri.llm import LLM

        config = read_headers(path).config
        context = _CONTEXT if config is None else min(_LONG_CONTEXT, config.max_context)
        options: dict[str, Any] = {"n_threads": n_threads, "max_context": context}
        self.llm = LLM(path, max_requests=_N_STREAMS, draft_model=draft_model, **options)
        self._rounds, self._kind = rounds, "ngram" if draft_model is None else "draft"

    def row(self, name: str, tasks: Sequence[Task], temperature: float) -> SpeculationRow:
        """Answers the tasks side by side. Raises KukriError if answers differ."""
        return self._compare(name, temperature, partial(self._answer, tasks, temperature))

    def agent(self, temperature: float) -> SpeculationRow:
        """An agent's conversation. Raises KukriError if answers differ."""
        return self._compare("an agent, ten turns", temperature, partial(self._converse, temperature))

    def _compare(
        self, name: str, temperature: float, ask: Callable[[str], tuple[float, list[Result]]]
    ) -> SpeculationRow:
        """Answers both ways in turns, as `ask` does by a kind of speculation: seconds, and the answers."""
        measures = [partial(ask, kind) for kind in ("off", self._kind)]
        rounds = in_turns(measures, self._rounds, silent)  # the first, not counted, fills the prefix cache
        for (_, plain), (_, results) in rounds:
            if [a.token_ids for a in results] != [a.token_ids for a in plain]:
                raise KukriError(f"speculation changed the answers: {name} at temperature {temperature}")
        plain_s, speculating_s = zip(*((a, b) for (a, _), (b, _) in rounds), strict=True)
        results = rounds[-1][1][1]
        n_tokens = sum(len(result.token_ids) for result in results)
        return _row(name, temperature, n_tokens, [r.timings for r in results], plain_s, speculating_s)

    def _converse(self, temperature: float, kind: str) -> tuple[float, list[Result]]:
        """Seconds in which all turns were decoded, and the answers; fewer turns if the context is full."""
        messages: list[dict[str, str]] = []
        self.llm.engine.drafting.earlier_answers.forget()
        results: list[Result] = []
        for i, turn in enumerate(_TURNS):
            file = "" if i else f"Here is my file:\n```python\n{_FILE}```\n"
            messages.append({"role": "user", "content": f"{file}{turn} and print the whole file."})
            params = SamplingParams(temperature=temperature, seed=0, max_tokens=_N_EDITED, speculation=kind)
            try:
                results.append(self.llm.chat(messages, params))
            except ContextLengthError:
                break
            messages.append({"role": "assistant", "content": results[-1].text})
        return sum(result.timings.decode_s for result in results), results

    def predicted(self, share: float) -> SpeculationRow:
        """A text continued with its own answer as prediction, of which this share of tokens is right."""
        llm, prompt = self.llm, list(range(100, 228))
        params = SamplingParams(temperature=0, max_tokens=_N_PROSE, ignore_eos=True)
        answer = llm.generate(prompt, params, speculation="off")
        draws = random.Random(0)
        prediction = [token if draws.random() < share else 7 for token in answer.token_ids]
        return self._against(f"predicted, {share:.0%} right", prompt, params, answer, prediction=prediction)

    def layer(self) -> SpeculationRow:
        """A text continued with drafts of a layer that reads the model's rows, of which 0.8 are right."""
        llm, prompt = self.llm, list(range(100, 228))
        params = SamplingParams(temperature=0, max_tokens=_N_PROSE, ignore_eos=True)
        answer = llm.generate(prompt, params, speculation="off")
        force_drafts(llm, [*prompt, *answer.token_ids])
        name = f"{_N_DRAFTS} drafts of a layer, {_FORCED:.0%} right"
        return self._against(name, prompt, params, answer, speculation="draft")

    def _against(
        self, name: str, prompt: list[int], params: SamplingParams, answer: Result, **kind: Any
    ) -> SpeculationRow:
        """Plain decoding and a kind of speculation in turns. Raises KukriError unless both give `answer`."""
        llm = self.llm

        def ask(kind: dict[str, Any]) -> Result:
            llm.engine.drafting.earlier_answers.forget()
            return llm.generate(prompt, params, **kind)

        measures = [partial(ask, kind) for kind in ({"speculation": "off"}, kind)]
        rounds = in_turns(measures, self._rounds, silent)
        if any(result.token_ids != answer.token_ids for pair in rounds for result in pair):
            raise KukriError(f"speculation changed an answer: {name}")
        plain_s, speculating_s = zip(*([r.timings.decode_s for r in pair] for pair in rounds), strict=True)
        return _row(name, 0.0, len(answer.token_ids), [rounds[-1][1].timings], plain_s, speculating_s)

    def _answer(self, tasks: Sequence[Task], temperature: float, kind: str) -> tuple[float, list[Result]]:
        """Seconds of the answers, and the answers."""
        llm, calls = self.llm, []
        llm.engine.drafting.earlier_answers.forget()  # the same requests are asked again
        for i, task in enumerate(tasks):
            params = SamplingParams(
                temperature=temperature, seed=i, max_tokens=task.max_tokens, stop=task.stop, speculation=kind
            )
            message = {"role": "user", "content": task.text}
            if task.is_chat:
                calls.append(Conversation(llm.calls, [message], params).next_call())
            else:
                calls.extend(llm.calls.for_prompts(task.text, params, {}))
        started = time.perf_counter()
        results = llm.calls.run(calls)
        spent_s = time.perf_counter() - started
        return results[0].timings.decode_s if len(tasks) == 1 else spent_s, results


def force_drafts(llm: LLM, text: list[int]) -> None:
    """Makes drafts of a layer right with a chance of 0.8, for requests that continue a text so.

    The layer computes them as ever. No text is looked up.
    """
    from kukri.engine.draft_kinds.next_token import NextTokenDrafts
    from kukri.engine.layer_drafts import LayerModel
    from kukri.engine.lookup_drafts import LookupDrafts

    drafting = llm.engine.drafting.drafter
    assert isinstance(drafting, LayerModel), "it was opened with its layer"
    draws, kind = random.Random(0), drafting.kind

    class Forced(kind):  # type: ignore[valid-type, misc]
        def follow(self, tokens: IntArray, n_tokens: int) -> None:
            super().follow(tokens, n_tokens)
            if isinstance(self, NextTokenDrafts):
                # random weights write rare tokens as often as others, and texts do not
                self.has_rare, self.cost_factor = False, 1.0

        def chances(self, n: int) -> Iterator[float]:
            return super().chances(min(n, _N_DRAFTS))  # type: ignore[no-any-return]

        def propose(self, n: int) -> list[int]:
            first = self.first + self.n_tokens
            right = text[first : first + len(super().propose(n))]
            self.drafts = [token if draws.random() < _FORCED else 7 for token in right]
            return self.drafts

    LookupDrafts.chances = lambda drafts, n: iter(())  # type: ignore[method-assign, assignment]
    drafting.kind = Forced


def write_eagle3(directory: Path, config: ModelConfig) -> Path:
    """A directory with a random EAGLE-3 layer for a model, with as many tokens as published ones have."""
    d, n_q = config.d_model, config.n_heads * config.d_head
    n_kv, n_vocab = config.n_kv_heads * config.d_head, min(config.n_vocab, _EAGLE_TOKENS)
    shapes: dict[str, tuple[int, ...]] = {
        **{"fc": (d, 3 * d), "norm": (d,), "lm_head": (n_vocab, d), "midlayer.hidden_norm": (d,)},
        **{"midlayer.input_layernorm": (d,), "midlayer.post_attention_layernorm": (d,)},
        **{f"midlayer.self_attn.{name}_proj": (n_kv, 2 * d) for name in "kv"},
        **{"midlayer.self_attn.q_proj": (n_q, 2 * d), "midlayer.self_attn.o_proj": (d, n_q)},
        **{f"midlayer.mlp.{name}_proj": (config.d_ffn, d) for name in ("gate", "up")},
        "midlayer.mlp.down_proj": (d, config.d_ffn),
    }
    draws = np.random.default_rng(0)
    weights = {
        f"{name}.weight": np.ones(shape, np.float16)
        if len(shape) == 1
        else (DEVIATION * draws.standard_normal(shape, np.float32)).astype(np.float16)
        for name, shape in shapes.items()
    }
    (directory / "model.safetensors").write_bytes(safetensors_bytes(weights))
    keys = {
        **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1},
        **{"hidden_size": d, "intermediate_size": config.d_ffn, "num_attention_heads": config.n_heads},
        **{"num_key_value_heads": config.n_kv_heads, "head_dim": config.d_head, "rms_norm_eps": 1e-6},
        **{"rope_theta": 10000.0, "max_position_embeddings": 2048, "draft_vocab_size": n_vocab},
        "hidden_act": "silu",
    }
    (directory / "config.json").write_text(json.dumps(keys))
    return directory


def _row(
    name: str,
    temperature: float,
    n_tokens: int,
    timings: Sequence[Timings],
    plain_s: Sequence[float],
    speculating_s: Sequence[float],
) -> SpeculationRow:
    ratios = tuple(a / b for a, b in zip(plain_s, speculating_s, strict=True))
    return SpeculationRow(
        name,
        temperature,
        n_tokens,
        sum(each.n_drafted for each in timings),
        sum(each.n_accepted for each in timings),
        n_tokens / median(plain_s),
        n_tokens / median(speculating_s),
        median(ratios),
        ratios,
    )


def measure(
    model: str | None,
    rounds: int,
    n_threads: int | None,
    say: Say = silent,
    *,
    only: str = "",
    draft_model: str | None = None,
) -> SpeculationReport:
    """Answers everything `rounds` times each way; `only` "streams", what is "predicted", or drafts of a
    "next_token" or "eagle3" layer. With a `draft_model` a few texts.
    """
    path = model_path(model, _CONTEXT)
    if only == "next_token":
        draft_model = "mtp"
    with TemporaryDirectory() as folder:
        if only == "eagle3":
            config = read_headers(path).config
            assert config is not None
            draft_model = str(write_eagle3(Path(folder), config))
        trial = _Trial(path, n_threads, rounds, draft_model)
    rows: list[SpeculationRow] = []
    means: dict[str, dict[str, float]] = {name: {} for name in _GROUPS}
    if only == "predicted":
        rows = [trial.predicted(share) for share in _RIGHT]
    if only in ("next_token", "eagle3"):
        rows = [trial.layer()]
    for temperature in _TEMPERATURES if draft_model and not only else ():
        for task in _DRAFTED:
            rows.append(row := trial.row(task.name, [task], temperature))
            say(f"{task.name} at temperature {temperature:g}: {row.ratio:.2f}")
    for temperature in () if only not in ("", "streams") or draft_model else _TEMPERATURES:
        for kind, tasks in _GROUPS.items():
            wanted = [] if only else [(task.name, [task]) for task in tasks]
            streams = [tasks[i % len(tasks)] for i in range(_N_STREAMS)]
            for name, together in [*wanted, (f"{_N_STREAMS} streams of {kind}", streams)]:
                row = trial.row(name, together, temperature)
                say(f"{name} at temperature {temperature:g}: {row.ratio:.2f}")
                rows.append(row)
            if wanted:
                alone = rows[-len(tasks) - 1 : -1]
                means[kind][f"{temperature:g}"] = geometric_mean(row.ratio for row in alone)
        if not only:
            rows.append(trial.agent(temperature))
            say(f"{rows[-1].task} at temperature {temperature:g}: {rows[-1].ratio:.2f}")
    trial.llm.close()
    return SpeculationReport(str(path), rounds, tuple(rows), means)


def main() -> None:
    """Runs the experiment."""
    experiment = Experiment("speculation", "Compare decoding with speculation and without, in turns.")
    experiment.count("-r", "--rounds", 5, "times each way")
    experiment.options.add_argument(
        "--streams",
        action="store_true",
        help="several streams alone, whose ratios need more rounds than others",
    )
    experiment.options.add_argument("--predicted", action="store_true", help="predict the answers themselves")
    experiment.options.add_argument(
        "--next-token", action="store_true", help="draft by the model's own layer"
    )
    experiment.options.add_argument("--eagle3", action="store_true", help="draft by a random EAGLE-3 layer")
    experiment.options.add_argument("--draft-model", metavar="MODEL", help="draft by it too, for a few texts")
    given = experiment.parse()
    kinds = ("streams", "predicted", "next_token", "eagle3")
    only = next((kind for kind in kinds if getattr(given, kind)), "")
    options = {"only": only, "draft_model": given.draft_model}
    report = measure(given.model, given.rounds, given.threads, experiment.say, **options)
    rows = [
        [
            row.task,
            f"{row.temperature:g}",
            f"{row.n_tokens}",
            f"{row.n_accepted} of {row.n_drafted}",
            f"{row.plain:,.0f}",
            f"{row.speculating:,.0f}",
            f"{row.ratio:.2f}",
            f"{min(row.ratios):.2f} to {max(row.ratios):.2f}",
        ]
        for row in report.rows
    ]
    for kind, means in report.means.items():
        for temperature, mean in means.items():
            blank = ["" for _ in range(4)]
            rows.append([f"{kind}, geometric mean", temperature, *blank, f"{mean:.2f}", ""])
    header = ["", "temp.", "tokens", "accepted", "plain, /s", "speculating, /s", "ratio", "of rounds"]
    experiment.show(report, Table("tokens/s from the first token on, in turns", header, rows))


if __name__ == "__main__":
    run(main)
