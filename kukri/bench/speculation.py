"""What guesses at tokens to come are worth: `python -m kukri.bench.speculation`.

The same requests are answered with guesses and without, in turns, by one engine; answers must be equal. What
copies is a file to edit, a passage to repeat, a list to write and a program to go on with; prose is stories,
an explanation and a letter. A ratio is of the times from the first token to the last, the median over rounds;
of streams, of the times in which all of them are answered, their prompts being cached.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import TYPE_CHECKING

from kukri.bench.command import model_path, parser, positive, print_table, run, say
from kukri.errors import KukriError

if TYPE_CHECKING:
    from kukri.llm import Result

_CONTEXT = 1024
_N_PROSE = 160  # tokens of an answer at most
_N_COPIED = 300
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
    """A prompt, or a message of a chat, and where its answer ends."""

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
_TEMPERATURES = (0.0, 0.7)


@dataclass(frozen=True)
class SpeculationRow:
    """What guesses were worth at one task, or for streams. Speeds in tokens/s, ratios of speed."""

    what: str
    temperature: float
    n_tokens: int
    n_drafted: int
    n_accepted: int
    plain: float
    guessing: float
    ratio: float  # median of the rounds
    ratios: tuple[float, ...]


@dataclass(frozen=True)
class SpeculationReport:
    """What `python -m kukri.bench.speculation` found; `copies` and `prose` are geometric means of ratios."""

    model: str
    rounds: int
    rows: tuple[SpeculationRow, ...]
    copies: dict[str, float]  # by temperature
    prose: dict[str, float]


class _Trial:
    """An engine that answers tasks both ways."""

    def __init__(self, path: Path, n_threads: int | None, rounds: int) -> None:
        from kukri.llm import LLM

        self.llm = LLM(path, n_threads=n_threads, max_context=_CONTEXT, max_requests=_N_STREAMS)
        self._rounds = rounds

    def row(self, what: str, tasks: Sequence[Task], temperature: float) -> SpeculationRow:
        """The tasks answered at a time, both ways in turns. Raises KukriError where answers differ."""
        plain: list[float] = []
        guessing: list[float] = []
        results: list[Result] = []
        for i in range(self._rounds + 1):  # the first round reads the prompts, and is not counted
            found = {}
            for kind in ("off", "ngram") if i % 2 else ("ngram", "off"):
                found[kind] = self._answer(tasks, temperature, kind)
            results = found["ngram"][1]
            if [a.token_ids for a in results] != [a.token_ids for a in found["off"][1]]:
                raise KukriError(f"answers with guesses are others: {what} at temperature {temperature}")
            if i:
                plain.append(found["off"][0])
                guessing.append(found["ngram"][0])
        n_tokens = sum(len(result.token_ids) for result in results)
        ratios = tuple(a / b for a, b in zip(plain, guessing, strict=True))
        return SpeculationRow(
            what,
            temperature,
            n_tokens,
            sum(result.timings.n_drafted for result in results),
            sum(result.timings.n_accepted for result in results),
            n_tokens / median(plain),
            n_tokens / median(guessing),
            median(ratios),
            ratios,
        )

    def _answer(self, tasks: Sequence[Task], temperature: float, kind: str) -> tuple[float, list[Result]]:
        """Seconds that the answers took, and the answers."""
        from kukri.sampling import SamplingParams

        llm, answers = self.llm, []
        for i, task in enumerate(tasks):
            params = SamplingParams(
                temperature=temperature,
                seed=i,
                max_tokens=task.max_tokens,
                stop=task.stop,
                speculation=kind,
            )
            message = {"role": "user", "content": task.text}
            ids = llm._encode_chat([message]) if task.is_chat else llm._encode(task.text)
            answers.append(llm._answer(ids, params))
        started = time.perf_counter()
        results = llm._run(answers)
        spent_s = time.perf_counter() - started
        return results[0].timings.decode_s if len(tasks) == 1 else spent_s, results


def measure(
    model: str | None, rounds: int, n_threads: int | None, *, silent: bool = False
) -> SpeculationReport:
    """Answers everything `rounds` times each way."""
    path = model_path(model, _CONTEXT)
    trial = _Trial(path, n_threads, rounds)
    rows: list[SpeculationRow] = []
    means: dict[str, dict[str, float]] = {"copies": {}, "prose": {}}
    for temperature in _TEMPERATURES:
        for kind, tasks in (("copies", COPIES), ("prose", PROSE)):
            wanted = [(task.name, [task]) for task in tasks]
            streams = [tasks[i % len(tasks)] for i in range(_N_STREAMS)]
            for what, together in [*wanted, (f"{_N_STREAMS} streams of {kind}", streams)]:
                row = trial.row(what, together, temperature)
                say(f"{what} at temperature {temperature:g}: {row.ratio:.2f}", silent=silent)
                rows.append(row)
            means[kind][f"{temperature:g}"] = geometric_mean(row.ratio for row in rows[-len(tasks) - 1 : -1])
    trial.llm.close()
    return SpeculationReport(str(path), rounds, tuple(rows), **means)


def main() -> None:
    """The program."""
    options = parser("speculation", "generating with guesses at tokens to come, and without")
    options.add_argument("-r", "--rounds", type=positive, default=5, help="times each way (5)")
    given = options.parse_args()
    report = measure(given.model, given.rounds, given.threads, silent=given.json)
    if not given.json:
        rows = [
            [
                row.what,
                f"{row.temperature:g}",
                f"{row.n_tokens}",
                f"{row.n_accepted} of {row.n_drafted}",
                f"{row.plain:,.0f}",
                f"{row.guessing:,.0f}",
                f"{row.ratio:.2f}",
                f"{min(row.ratios):.2f} to {max(row.ratios):.2f}",
            ]
            for row in report.rows
        ]
        for temperature in report.copies:
            for kind, means in (("copies", report.copies), ("prose", report.prose)):
                mean = ["" for _ in range(4)]
                rows.append([f"{kind}, geometric mean", temperature, *mean, f"{means[temperature]:.2f}", ""])
        header = ["", "temp.", "tokens", "came true", "plain, /s", "guessing, /s", "ratio", "of rounds"]
        print_table("tokens/s from the first token on, in turns", header, rows)
    print(json.dumps(asdict(report)))


if __name__ == "__main__":
    run(main)
