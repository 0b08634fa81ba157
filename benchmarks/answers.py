"""How answers read with the default sampling: `python -m benchmarks.answers [--sampling '{"top_p": 0.8}']`.

Open questions are looked through for repetition, short questions for facts, texts to be copied for words that
penalties took. Another set of parameters is compared by giving it, over the model's own.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Experiment, Say, Table, model_path, run, silent
from kukri.calls.system_message import opening

if TYPE_CHECKING:
    from kukri.calls.results import Result
    from kukri.llm import LLM
    from kukri.sampling import SamplingParams

POEMS = ("Write a short poem about rain.", "Write a poem about the sea.", "Write a poem about winter.")
_OPEN = (
    *POEMS,
    "Write a haiku about autumn leaves.",
    "Tell me a story about a dragon who is afraid of fire.",
    "Write a short story about a robot who learns to paint.",
    "Explain how a bicycle stays upright.",
    "Explain photosynthesis to a ten-year-old.",
    "What is machine learning?",
    "List five tips for learning a new language.",
    "Give me a recipe for pancakes.",
    "Write an email to my boss asking for a day off.",
    "Describe a busy market in the morning.",
    "What are the benefits of regular exercise?",
    "Write a song about a lonely lighthouse keeper.",
    "How do I plant tomatoes?",
    "Plan a three-day trip to Rome.",
    "Write a dialogue between a cat and a dog.",
    "What causes the seasons?",
    "Write a limerick about a programmer.",
    "Compare cats and dogs as pets.",
)
_FACTS = (
    ("What is the capital of France?", "Paris"),
    ("What is the capital of Italy?", "Rome"),
    ("What is the capital of Japan?", "Tokyo"),
    ("What is the capital of Germany?", "Berlin"),
    ("What color is the sky on a clear day?", "blue"),
    ("Who wrote Romeo and Juliet?", "Shakespeare"),
    ("What is the largest planet in the solar system?", "Jupiter"),
    ("What is the chemical symbol of water?", "H2O"),
    ("What is the opposite of hot?", "cold"),
    ("What do bees make?", "honey"),
    ("Which ocean is the largest?", "Pacific"),
    ("What is the first month of the year?", "January"),
)
_COPIES = (
    "The old harbour master counted seventeen grey boats before breakfast.",
    "Please send the signed contract to the office in Rotterdam by Friday.",
    "Water boils at one hundred degrees Celsius at sea level.",
    "Our train leaves from platform nine and arrives in Vienna late at night.",
    "She bought four apples, two pears and a loaf of bread.",
    "The committee will meet again in the second week of October.",
)
_AT_ONCE = 24


@dataclass(frozen=True)
class AnswersReport:
    """The report of `python -m benchmarks.answers`: shares of answers, but for the mean of `rep4`."""

    sampling: dict[str, Any]
    n_seeds: int
    rep4: float  # share of an answer's pieces of 4 tokens that came before
    loops: float  # answers in which one piece comes 5 times
    poems: float  # poems that say five words twice
    ended: float  # within the limit of tokens
    facts: float  # short questions answered rightly
    copies: float  # texts repeated as they are


def measure(
    model: str | None, sampling: dict[str, Any], n_seeds: int, n_threads: int | None, say: Say = silent
) -> AnswersReport:
    """Asks all questions with each seed, with `sampling` over the model's defaults."""
    from kukri.llm import LLM

    with LLM(model_path(model, 1024), n_threads=n_threads, max_requests=_AT_ONCE, max_context=1024) as llm:
        params = llm.default_params.replace(**sampling)
        say("open questions")
        texts = _answers(llm, _OPEN, params, n_seeds, 300)
        pieces = [_pieces(result.token_ids) for result in texts]
        say("poems")
        poems = _answers(llm, POEMS, params, 4 * n_seeds, 300)
        say("facts and copies")
        facts = _answers(llm, [question for question, _ in _FACTS], params, n_seeds, 40)
        copies = _answers(
            llm, [f"Repeat this sentence exactly: {one}" for one in _COPIES], params, n_seeds, 60
        )
    wanted = [right for _, right in _FACTS] * n_seeds
    return AnswersReport(
        sampling=sampling,
        n_seeds=n_seeds,
        rep4=fmean(1 - len(found) / max(found.total(), 1) for found in pieces),
        loops=_share(pieces, lambda found: max(found.values(), default=0) >= 5),
        poems=_share(poems, lambda result: repeats_a_phrase(result.text)),
        ended=_share(texts, lambda result: result.finish_reason == "stop"),
        facts=_share(zip(facts, wanted, strict=True), lambda pair: pair[1].lower() in pair[0].text.lower()),
        copies=_share(
            zip(copies, _COPIES * n_seeds, strict=True), lambda pair: pair[1].rstrip(".") in pair[0].text
        ),
    )


def repeats_a_phrase(text: str) -> bool:
    """True if five words come twice in the same order."""
    words = re.findall(r"\w+", text.lower())
    phrases = [tuple(words[i : i + 5]) for i in range(len(words) - 4)]
    return len(set(phrases)) < len(phrases)


def _answers(
    llm: LLM, questions: Sequence[str], params: SamplingParams, n_seeds: int, max_tokens: int
) -> list[Result]:
    """The answers to all questions with the first seed, then with the next."""

    def ask(seed_and_question: tuple[int, str]) -> Result:
        seed, question = seed_and_question
        messages = [*opening(llm.chat_template), {"role": "user", "content": question}]
        return llm.chat(messages, params, seed=seed, max_tokens=max_tokens)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(ask, [(seed, one) for seed in range(n_seeds) for one in questions]))


def _pieces(ids: Sequence[int]) -> Counter[tuple[int, ...]]:
    return Counter(tuple(ids[i : i + 4]) for i in range(len(ids) - 3))


def _share(answers: Any, is_so: Callable[[Any], bool]) -> float:
    found = [is_so(one) for one in answers]
    return sum(found) / len(found)


def main() -> None:
    """The experiment's command line."""
    experiment = Experiment("answers", "How answers read with the default sampling.")
    experiment.count("-n", "--seeds", 4, "answers to each question")
    experiment.options.add_argument("--sampling", type=json.loads, default={}, help="parameters as JSON")
    given = experiment.parse()
    report = measure(given.model, given.sampling, given.seeds, given.threads, experiment.say)
    names = ("rep4", "loops", "poems", "ended", "facts", "copies")
    row = [json.dumps(report.sampling), *(f"{getattr(report, name):.3f}" for name in names)]
    experiment.show(report, Table("Answers", ["over the defaults", *names], [row]))


if __name__ == "__main__":
    run(main)
