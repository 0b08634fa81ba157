"""A model over the rows of a Ray Data set: `dataset.map_batches(**predictor("model", column="prompt"))`.

Nothing here imports Ray: `predictor` gives the arguments of `map_batches`, which starts an actor for each
model. Rows are independent: which others are in their batch, and on which actor, changes no bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from kukri.errors import ConfigError, RequestError
from kukri.llm import LLM

Task = Literal["generate", "chat", "embed", "classify", "rerank"]
_TASKS = ("generate", "chat", "embed", "classify", "rerank")
Batch = dict[str, Any]  # columns by name, each a NumPy array


class Predictor:
    """Adds the model's answers to batches of rows.

    `task` says how `column` is used. "generate": its texts are continued; "chat": each is a conversation, as
    messages or as their JSON; the text goes to the column `output`, why it ended to `output`_finish_reason.
    "embed": `output` has a vector for each text; "classify": the likeliest label, and its score in
    `output`_score; "rerank": the score of each text as an answer to the row's text in the column `query`, as
    in `LLM.rerank`. `sampling` are fields of SamplingParams. A row that cannot be answered gets the reason in
    `output`_error, which is empty for the others; no other row is touched by it.
    """

    def __init__(
        self,
        model: str | None,
        column: str,
        query: str | None,
        output: str,
        task: Task,
        sampling: Mapping[str, Any],
        options: Mapping[str, Any],
    ) -> None:
        self._llm = LLM(model, **options)
        self._column, self._query, self._output = column, query, output
        self._task, self._sampling = task, dict(sampling)

    def __call__(self, batch: Batch) -> Batch:
        """The batch with the answers' columns."""
        inputs = [self._input(value) for value in batch[self._column]]
        if self._query is not None:
            inputs = list(zip(map(str, batch[self._query]), inputs, strict=True))
        many: dict[Task, Callable[[list[Any]], list[Any]]] = {
            "generate": lambda texts: self._llm.generate(texts, **self._sampling),
            "chat": lambda conversations: self._llm.chat(conversations, **self._sampling),
            "embed": lambda texts: list(self._llm.embed(texts)),
            "classify": lambda texts: [self._llm.classify(text)[0] for text in texts],
            "rerank": self._scores,
        }
        results, errors = _answered(many[self._task], inputs)
        return {**batch, **self._columns(results), f"{self._output}_error": np.array(errors)}

    def _input(self, value: Any) -> Any:
        if self._task != "chat":
            return str(value)
        messages = json.loads(value) if isinstance(value, str) else value
        return [dict(message) for message in messages]

    def _scores(self, pairs: list[tuple[str, str]]) -> list[float]:
        """The score of each pair of a query and a document; a query's documents are one batch."""
        places: dict[str, list[int]] = {}
        for i, (query, _) in enumerate(pairs):
            places.setdefault(query, []).append(i)
        scores = [0.0] * len(pairs)
        for query, its in places.items():
            for one in self._llm.rerank(query, [pairs[i][1] for i in its]):
                scores[its[one.index]] = one.score
        return scores

    def _columns(self, results: Sequence[Any]) -> Batch:
        """The columns of results; None for missing ones."""
        name = self._output
        if self._task == "embed":
            width = next((len(vector) for vector in results if vector is not None), 0)
            nothing = np.full(width, np.nan, np.float32)
            return {name: np.array([nothing if vector is None else vector for vector in results])}
        if self._task == "classify":
            labels = ["" if one is None else one.label for one in results]
            scores = [np.nan if one is None else one.score for one in results]
            return {name: np.array(labels), f"{name}_score": np.array(scores, np.float32)}
        if self._task == "rerank":
            return {name: np.array([np.nan if one is None else one for one in results])}
        texts = ["" if one is None else one.text for one in results]
        reasons = ["" if one is None else one.finish_reason for one in results]
        return {name: np.array(texts, object), f"{name}_finish_reason": np.array(reasons)}


def predictor(
    model: str | None = None,
    *,
    column: str,
    query: str | None = None,
    output: str = "answer",
    task: Task = "generate",
    sampling: Mapping[str, Any] | None = None,
    concurrency: int | tuple[int, int] = 1,
    batch_size: int = 64,
    **options: Any,
) -> dict[str, Any]:
    """The arguments of `map_batches` for a `Predictor`, which has `column`, `query`, `output`, `task` and
    `sampling`.

    `concurrency` actors, or from one number to another, have a model each, opened with `options` (those of
    `LLM`); each takes as many processors as `n_threads` says, 1 unless it is given. Ray Data replaces an
    actor that dies, and runs its batches again. Raises ConfigError on an unknown task, and unless
    Only "rerank" has a `query`.
    """
    if task not in _TASKS:
        raise ConfigError(f"task must be one of {', '.join(_TASKS)}, not {task!r}")
    if (query is not None) != (task == "rerank"):
        raise ConfigError("'query' is supported for the task rerank only")
    options.setdefault("n_threads", 1)
    arguments = {
        "model": model,
        "column": column,
        "query": query,
        "output": output,
        "task": task,
        "sampling": sampling or {},
        "options": options,
    }
    return {
        "fn": Predictor,
        "fn_constructor_kwargs": arguments,
        "concurrency": concurrency,
        "batch_size": batch_size,
        "num_cpus": options["n_threads"],
    }


def _answered(
    answer: Callable[[list[Any]], list[Any]], inputs: list[Any]
) -> tuple[list[Any | None], list[str]]:
    """Return the results of inputs and their errors, of all at once, or one by one if some are wrong."""
    try:
        return answer(inputs), [""] * len(inputs)
    except RequestError:
        results: list[Any | None] = []
        errors: list[str] = []
        for one in inputs:
            try:
                results += answer([one])
                errors.append("")
            except RequestError as error:
                results.append(None)
                errors.append(str(error))
        return results, errors
