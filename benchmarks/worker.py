"""One engine in a process of its own, timed on request: the child of `benchmarks.harness.Worker`."""

from __future__ import annotations

import sys
from typing import Any

from benchmarks.child import serve

_METHODS = ("prefill_s", "decode_s", "batch_decode_s", "versions")


def make_engine(
    engine: str, path: str, kv_type: str, n_threads: int, context_tokens: int, n_streams: int
) -> Any:
    """Loads an engine by its name in `benchmarks.harness.ENGINES`; kukri with 0 threads chooses itself."""
    if engine == "kukri":
        from kukri.bench.offline import Kukri

        return Kukri(path, n_threads or None, context_tokens, max_requests=n_streams, kv_type=kv_type)
    from benchmarks.llama_cpp import LlamaCpp

    return LlamaCpp(path, n_threads, context_tokens, n_streams=n_streams, kv_type=kv_type)


if __name__ == "__main__":
    _, _engine, _path, _kv_type, *_numbers = sys.argv
    serve(lambda: make_engine(_engine, _path, _kv_type, *map(int, _numbers)), _METHODS)
