"""A measurement in a process of its own that runs on request, so that several can take turns.

The parent writes a line of JSON, [method, arguments...], and reads one, {"result": ...} or {"error": text}.
An idle child waits in a read: it takes no CPU once its engine's threads have gone to sleep.
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


class Child:
    """A Python process that runs `arguments`: a module, which calls `serve`, and its arguments.

    `variables` are added to its environment. Use it in a `with` block, which ends the process. Methods raise
    KukriError with the child's own message if it fails.
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

    @property
    def process_id(self) -> int:
        """The number of the child's process."""
        return self._process.pid

    def ready(self) -> None:
        """Waits until the child has loaded its engine."""
        self._answer()

    def ask(self, *request: object) -> Any:
        """Calls a method of the child, by name and arguments, and returns its result."""
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


def serve(make: Callable[[], Any], methods: Sequence[str]) -> None:
    """Runs `methods` of the object that `make` returns, as requests ask, until stdin ends; then closes it."""
    # what an engine prints goes to stderr, so that stdout carries only answers
    answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
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
