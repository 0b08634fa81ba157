"""A process that makes one attribution graph: no stream waits for it, and to end it is to kill it.

A line of stdin is the job, JSON; it ends when its stdin does. Lines of stdout are ["tracing", [done, total]],
counted in targets, then [outcome, message], see `outcome_of`; after "made" the next line is the graph.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any, Literal

from kukri.host.limits import lower_priority

_NICENESS = 10  # streams come first
Outcome = Literal["made", "refused", "failed"]


def graph_of(job: dict[str, Any], progress: Callable[[int, int], None] | None = None) -> dict[str, Any]:
    """The pruned graph of a job in circuit-tracer's JSON, its features with their tokens.

    A job has the `model`'s options, the directory of its `transcoders`, the token `ids` of the `prompt`, the
    options of `attribute` (`attributed`) and of `as_json` (`written`), and what its `metadata` says besides.
    Raises KukriError.
    """
    from kukri.interp.features.transcoders import Transcoders
    from kukri.interp.gradients.circuits import attribute
    from kukri.interp.plots.graph_page import add_written_tokens
    from kukri.interp.session import Session
    from kukri.kernels import make_backend
    from kukri.opening.loading import read_model
    from kukri.opening.model_options import ModelOptions

    read = read_model(ModelOptions(**job["model"]))
    tokenizer = read.tokenizer

    def token_text(token: int) -> str:
        return tokenizer.decode([token], continues=True)

    backend = make_backend("reference")
    session = Session(read.model, backend, tokenizer.encode, tokenizer.token_bytes, nullcontext)
    transcoders = Transcoders.load(Path(job["transcoders"]))
    llm = SimpleNamespace(interp=session)
    made = attribute(llm, job["ids"], transcoders, progress=progress, **job["attributed"])
    found = made.as_json(token_text, **job["written"])
    add_written_tokens(session, transcoders, found, token_text)
    found["metadata"] |= job["metadata"]
    return found


def outcome_of(
    job: dict[str, Any], progress: Callable[[int, int], None] | None = None
) -> tuple[Outcome, str]:
    """("made", JSON of the graph), ("refused", why) if the request is to blame, else ("failed", why)."""
    from kukri.errors import KukriError, RequestError, UnsupportedError

    try:
        return "made", json.dumps(graph_of(job, progress))
    except (RequestError, UnsupportedError) as error:
        return "refused", str(error)
    except KukriError as error:
        return "failed", str(error)
    except MemoryError:
        return "refused", "not enough memory for this graph: give a shorter prompt, or trace fewer features"


def main() -> None:
    """Makes the graph that stdin describes."""
    job = json.loads(sys.stdin.readline())
    Thread(target=_end_with_stdin, daemon=True).start()
    os.environ["OMP_NUM_THREADS"] = str(job["n_threads"])  # read when NumPy is imported
    lower_priority(_NICENESS)
    outcome, text = outcome_of(job, _tell)
    print(json.dumps([outcome, "" if outcome == "made" else text]), flush=True)
    if outcome == "made":
        print(text, flush=True)


def _tell(done: int, total: int) -> None:
    print(json.dumps(["tracing", [done, total]]), flush=True)


def _end_with_stdin() -> None:
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
