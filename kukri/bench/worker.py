"""An engine in a process of its own that measures when asked, so that engines can take turns.

The parent writes a line of JSON, [method, arguments...], and reads one, {"result": ...} or {"error": text}.
A worker that is not asked waits in a read: it takes no CPU once its engine's threads have gone to sleep.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from kukri.errors import KukriError

ENGINES = ("kukri", "llama-cpp-python")
_METHODS = ("prefill_s", "decode_s", "batch_decode_s", "versions")


class Child:
    """A Python process of ours that answers: the module `arguments` begin with calls `serve`.

    `variables` are added to its environment. Use it in a `with` block, which ends the process. Raises
    KukriError with the child's own message where it cannot do what is asked.
    """

    def __init__(
        self, name: str, arguments: Sequence[str], variables: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **(variables or {})},
        )

    def ready(self) -> None:
        """Waits until the child has loaded what it measures."""
        self._answer()

    def ask(self, *request: object) -> Any:
        """What a method of the child gives: its name, then its arguments."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise KukriError(f"the {self.name} process has ended") from None
        return self._answer()

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            raise KukriError(f"the {self.name} process ended with status {status}: see its messages above")
        answer = json.loads(line)
        if "error" in answer:
            raise KukriError(answer["error"])
        return answer["result"]


class Worker(Child):
    """A running engine. Raises KukriError with the worker's own message where it cannot do what is asked.

    `n_threads` and `context_tokens` are the engine's, which runs `n_streams` requests of that context at a
    time; use it in a `with` block, which ends the process.
    """

    def __init__(
        self,
        engine: str,
        path: str | os.PathLike[str],
        n_threads: int,
        context_tokens: int,
        n_streams: int = 1,
    ) -> None:
        self.engine = engine
        numbers = map(str, (n_threads, context_tokens, n_streams))
        super().__init__(engine, ["kukri.bench.worker", engine, os.fspath(path), *numbers])

    def prefill_tokens_per_s(self, n_tokens: int) -> float:
        """Tokens per second of one prompt."""
        return n_tokens / float(self.ask("prefill_s", n_tokens))

    def decode_tokens_per_s(self, n_tokens: int) -> float:
        """Tokens per second of one generation."""
        return n_tokens / float(self.ask("decode_s", n_tokens))

    def batch_decode_tokens_per_s(self, n_streams: int, n_prompt: int, n_tokens: int) -> float:
        """Tokens per second of all of `n_streams` generations side by side, after prompts of `n_prompt`."""
        return n_streams * (n_tokens - 1) / float(self.ask("batch_decode_s", n_streams, n_prompt, n_tokens))

    def versions(self) -> dict[str, str]:
        """What runs in the worker."""
        return dict(self.ask("versions"))


def serve(make: Callable[[], Any], methods: Sequence[str]) -> None:
    """Answers requests for methods of what `make` gives until stdin ends; then closes it."""
    # what an engine prints goes to stderr, so that stdout carries answers alone
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    try:
        engine = make()
    except KukriError as error:
        print(json.dumps({"error": str(error)}), file=answers)
        return
    print(json.dumps({"result": None}), file=answers)
    for line in sys.stdin:
        method, *values = json.loads(line)
        assert method in methods
        try:
            result = getattr(engine, method)(*values)
        except KukriError as error:
            print(json.dumps({"error": str(error)}), file=answers)
        else:
            print(json.dumps({"result": result}), file=answers)
    engine.close()


def _make_engine(engine: str, path: str, n_threads: int, context_tokens: int, n_streams: int) -> Any:
    if engine == "kukri":
        from kukri.bench.offline import Kukri

        return Kukri(path, n_threads, context_tokens, max_requests=n_streams)
    from kukri.bench.llama_cpp import LlamaCpp

    return LlamaCpp(path, n_threads, context_tokens, n_streams=n_streams)


if __name__ == "__main__":
    _, _engine, _path, *_numbers = sys.argv
    serve(lambda: _make_engine(_engine, _path, *map(int, _numbers)), _METHODS)
