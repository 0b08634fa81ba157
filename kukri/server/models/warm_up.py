"""Warming a model up before its first request."""

from __future__ import annotations

from typing import Any

from kukri.host.mapped_files import fetch_pages, hold_pages
from kukri.llm import LLM


def warm_up(llm: LLM) -> None:
    """Does work that requests would wait for, and takes what steps read of the model's files into memory.

    Matrices are packed by now. Vectors and the rows of embeddings are read where the file is mapped: a file
    that is cut short would end the process, and one that is written over would change answers. A row of a
    token that has not been seen would wait for a disk in the middle of every stream.
    """
    models: list[Any] = llm.engine.models
    for model in models:
        tables = [table.stored for table in model.embedding.tables]
        for array in (*model.vectors, *tables):
            hold_pages(array)
        for table in tables:  # none on systems that hold none
            fetch_pages(table)
    if llm.config.head.kind != "language_model":
        llm.embed("a")
        return
    first = llm.tokenizer.bos_id or 0
    for temperature in (0.0, 1.0):
        llm.generate([first], max_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)
