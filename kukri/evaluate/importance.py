"""Importance matrices of a model over a text, by hooks on the inputs of its matrices."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from kukri.errors import ConfigError
from kukri.evaluate.text import STEP_TOKENS, bos_ids, check_language_model
from kukri.formats.gguf.tensor_names import gguf_name
from kukri.formats.imatrix import ImportanceMatrix
from kukri.kernels.arrays import DoubleArray, FloatArray
from kukri.kernels.taps import Hook
from kukri.llm import LLM
from kukri.models.trace import Trace


def importance_matrix(
    llm: LLM,
    ids: Sequence[int],
    chunk_tokens: int,
    dataset: str,
    on_tokens: Callable[[int], None] = lambda n: None,
) -> ImportanceMatrix:
    """The ImportanceMatrix of the matrices in the model's layers over `ids`, computed in chunks.

    The head and the embedding are left out, as llama.cpp leaves them. `on_tokens` is called with the number
    of tokens of each step. Raises ConfigError for no tokens, UnsupportedError for a model that predicts none.
    """
    check_language_model(llm)
    if not ids:
        raise ConfigError("the text must have tokens: use a longer one")
    bos = bos_ids(llm.tokenizer)
    room = chunk_tokens - len(bos)
    if room < 1:
        raise ConfigError(f"chunks of {chunk_tokens} tokens cannot hold text: use longer ones")
    inputs = Trace(llm.model).inputs
    hook_of = {gguf_name(name, llm.config.architecture): hook for name, hook in inputs.items()}
    hook_of = {name: hook for name, hook in hook_of.items() if name.startswith("blk.")}
    chunks = [[*bos, *ids[start : start + room]] for start in range(0, len(ids), room)]
    cache = llm.model.new_cache(1, max(map(len, chunks)))
    with _sums_of_squares(llm, set(hook_of.values())) as sums:
        for chunk in chunks:
            cache.crop(0)
            for start in range(0, len(chunk), STEP_TOKENS):
                step = chunk[start : start + STEP_TOKENS]
                llm.model.bound(step, cache=cache, program=llm.model.hidden)
                on_tokens(len(step))
    n_tokens = float(sum(map(len, chunks)))
    return ImportanceMatrix(
        {name: sums[hook].astype(np.float32) for name, hook in hook_of.items()},
        dict.fromkeys(hook_of, n_tokens),
        (dataset,),
        len(chunks),
        chunk_tokens,
    )


@contextmanager
def _sums_of_squares(llm: LLM, names: set[str]) -> Iterator[dict[str, DoubleArray]]:
    """Filled, while the block runs, with each hook's sum, over all tokens, of the squares of its values."""
    sums: dict[str, DoubleArray] = {}

    def add(name: str, x: FloatArray) -> None:
        squares = np.einsum("tc,tc->c", x, x, dtype=np.float64)
        sums[name] = sums[name] + squares if name in sums else squares

    hooks: dict[str, Hook] = dict.fromkeys(names, add)
    with llm.hooks(hooks):
        yield sums
