"""The facts of a replica that a front must know, and the facts in which replicas must agree."""

from __future__ import annotations

import os
import socket

from kukri.dataclass import dataclass
from kukri.engine.model_identity import weights_identity
from kukri.llm import LLM


@dataclass(frozen=True)
class ReplicaFacts:
    """A replica as its fronts know it."""

    name: str
    model: str  # equal for the same weights, in the same version of kukri
    numerics: str  # equal if results are the same bits
    host: str
    pid: int
    max_context: int
    max_requests: int  # computed at a time
    n_pages: int
    page_tokens: int
    has_draft_model: bool


def replica_facts(llm: LLM, name: str) -> ReplicaFacts:
    """The facts of an open model under the replica's name."""
    engine, pool, config = llm.engine, llm.engine.pool, llm.engine_config
    return ReplicaFacts(
        name=name,
        model=weights_identity(llm.path, llm.config, llm.options.quantize),
        numerics=engine.arithmetic,
        host=socket.gethostname(),
        pid=os.getpid(),
        max_context=engine.max_context,
        max_requests=config.max_requests,
        # with a window a request never holds more than the window's pages, so no request is too long
        n_pages=pool.n_pages if pool.window is None else pool.pages_for(engine.max_context),
        page_tokens=pool.page_tokens,
        has_draft_model=llm.options.draft_model is not None,
    )
