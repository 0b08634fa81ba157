"""Warming a model up before its first request."""

from __future__ import annotations

from typing import Any

from kukri.host.mapped_files import fetch_pages
from kukri.llm import LLM


def warm_up(llm: LLM) -> None:
    """Does work that requests would wait for: compiles, and reads weights that are not yet in memory.

    The embedding is read row by row, a token's at a time: one that has not been seen would wait for a disk
    in the middle of every stream, and memory would grow for as long as new tokens come up.
    """
    model: Any = llm.model
    fetch_pages(model.embedding.weight.stored)
    if llm.config.head.kind != "language_model":
        llm.embed("a")
        return
    first = llm.tokenizer.bos_id or 0
    for temperature in (0.0, 1.0):
        llm.generate([first], max_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)
