"""Any `llama-bench` binary as a peer: of llama.cpp, ik_llama.cpp or another fork.

Each measurement is a run of the program with one repetition, after the warm-up that it makes itself; the
speed is its own figure, without the time of loading.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.harness import last_line
from kukri.errors import ConfigError, KukriError


class LlamaBench:
    """A `llama-bench` program, measured as `benchmarks.harness.Worker` measures an engine.

    Its constructor asks it for --help. Raises ConfigError if it can't be run, KukriError if a run fails.
    """

    def __init__(
        self, engine: str, program: str, path: str | os.PathLike[str], n_threads: int, kv_type: str = "f16"
    ) -> None:
        self.engine, self._program = engine, program
        if not Path(program).is_file() or not os.access(program, os.X_OK):
            raise ConfigError(f"{program} is not a program: --engine takes a name and a path of llama-bench")
        self._help = self._run("--help")
        if "-pg" not in self._help:
            raise ConfigError(f"{program} --help does not look like llama-bench's")
        ggml_type = "q4_0" if kv_type == "q4" else kv_type
        self._options = ["-m", os.fspath(path), "-t", str(n_threads), "-ctk", ggml_type, "-ctv", ggml_type]
        self._versions: dict[str, str] = {}

    def prefill_tokens_per_s(self, n_tokens: int) -> float:
        """Tokens per second of one prompt."""
        return self._speed("-p", str(n_tokens), "-n", "0")

    def decode_tokens_per_s(self, n_tokens: int, depth: int = 0) -> float:
        """Tokens per second of one generation, after a prompt of `depth` tokens."""
        if not depth:
            return self._speed("-p", "0", "-n", str(n_tokens))
        if re.search(r"^\s*-gp\b", self._help, re.MULTILINE):  # ik_llama.cpp's
            return self._speed("-p", "0", "-n", "0", "-gp", f"{depth},{n_tokens}")
        return self._speed("-p", "0", "-n", str(n_tokens), "-d", str(depth))

    def versions(self) -> dict[str, str]:
        """The commit that the program was built from, if it has told."""
        return self._versions

    def _speed(self, *options: str) -> float:
        said = self._run(*self._options, *options, "-r", "1", "-o", "json")
        try:
            (result,) = json.loads(said[re.search(r"^\[", said, re.MULTILINE).start() :])  # type: ignore[union-attr]
            self._versions = {self.engine: str(result.get("build_commit", "unknown"))}
            return float(result["avg_ts"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise KukriError(f"{self._program} printed no result: {last_line(said)}") from None

    def _run(self, *arguments: str) -> str:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
        try:
            ended = subprocess.run([self._program, *arguments], check=False, **options)
        except OSError as error:
            raise ConfigError(f"{self._program} can't be run: {error.strerror}") from None
        if ended.returncode:
            raise KukriError(
                f"{self._program} ended with status {ended.returncode}: {last_line(ended.stderr)}"
            )
        return str(ended.stdout)
