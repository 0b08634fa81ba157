"""A program: `kukri chat` with a model that tells as JSON what it was told.

`python -m tests.terminal.echo_chat DIRECTORY [readline]` keeps its history there, and has readline or not.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import platformdirs

from kukri.calls.results import Chunk
from kukri.sampling import SamplingParams
from kukri.terminal.chat import Chat, _converse


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class EchoLLM:
    """Answers "told: " and the last message, of a long one its digest. "wait" takes a second."""

    config = SimpleNamespace(name="echo", max_context=1 << 30)
    engine_config = SimpleNamespace(max_context=None)
    path, options, adapters = Path("echo.gguf"), SimpleNamespace(prefix_dir=None), ()

    def stream(self, messages, params, adapter=None, interventions=()):
        text = messages[-1]["content"]
        if text == "wait":
            yield Chunk("waiting ")
            time.sleep(1)
        yield Chunk(f"{len(messages)} told: {json.dumps(text if len(text) < 10_000 else digest(text))}\n")

    def close(self):
        pass


if __name__ == "__main__":
    if sys.argv[2:] != ["readline"]:
        sys.modules["readline"] = None  # as where Python was built without it
    platformdirs.user_state_path = lambda _: Path(sys.argv[1])
    _converse(Chat(EchoLLM(), SamplingParams()), None)
