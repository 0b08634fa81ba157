"""A real server on loopback, and what tests ask of it."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import uvicorn

from kukri import LLM
from kukri.formats.hub import DEFAULT_MODEL, MODELS
from kukri.server import body_check
from kukri.server.app import create_app
from kukri.server.chat import grammar_check
from kukri.server.connection import uvicorn_options
from kukri.server.models.registry import ModelRegistry
from kukri.server.models.served_model import ServedModel
from kukri.server.settings import ModelSpec, ServerSettings
from tests.lazy_imports import lazy_imports
from tests.server.answer_forms import FormClient

with lazy_imports():
    import openai

MODEL = "smol"
CHAT, TEXT, RESPONSE = "/v1/chat/completions", "/v1/completions", "/v1/responses"
ASK = {  # a request of each form
    CHAT: {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    TEXT: {"model": MODEL, "prompt": "Hi", "max_tokens": 2},
    RESPONSE: {"model": MODEL, "input": "Hi", "max_output_tokens": 2},
}
# the second name that it has: the file's, as `kukri serve --alias smol` has it
OTHER_NAME = Path(os.environ.get("KUKRI_TEST_MODEL") or MODELS[DEFAULT_MODEL].member).stem
SERVER = "KUKRI_TEST_SERVER"  # in the environment: the URL of a server to test in place of our own
TOOL_TEMPLATE = """{%- if tools %}<|im_start|>system
You may call these functions: {% for tool in tools %}{{ tool.function | tojson }} {% endfor %}
Answer with <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif %}{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.name is defined %}{{ message.name }}: {% endif %}{{ message.content or "" }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>
{%- endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking %}<think>
{% endif %}{% endif %}"""

# Two processes of a server start when they are needed, and not for each server that runs for some seconds,
# because they take a second of processor time.
body_check._SETTLE_S = grammar_check._SETTLE_S = 1e6


@dataclass
class Served:
    """A running server, seen from both sides."""

    url: str
    registry: ModelRegistry | None = None  # None: it is another process
    app: Any = None  # likewise

    @property
    def served(self) -> ServedModel:
        """The first model's."""
        assert self.registry is not None, f"only a server of the test's own shows it, not ${SERVER}"
        assert self.registry.entries[0].served is not None
        return self.registry.entries[0].served

    @property
    def client(self) -> openai.OpenAI:
        http = openai.DefaultHttpxClient(verify=False)  # see below
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60, http_client=http
        )

    def http(self, **options) -> httpx.Client:
        """A client that also checks that each answer has the form that the document describes."""
        # without TLS there is nothing to verify, and authorities take 20 ms to load
        return FormClient(base_url=self.url, timeout=60, **{"verify": False, **options})

    def pages_used(self) -> int:
        """KV pages that requests hold now."""
        return self.served.bridge.loop.status().n_pages_held

    def wait_until(self, is_true: Callable[[], bool], timeout_s: float = 20.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not is_true():
            assert time.monotonic() < deadline, "it never came true"
            time.sleep(0.005)


@contextmanager
def serving(llm: LLM | None, models: Sequence[ModelSpec] = (), **settings) -> Iterator[Served]:
    """Serves an open model, and others on demand, from a thread within the `with` block."""
    names = {} if llm is None else {"model_names": (MODEL, OTHER_NAME)}
    given = ServerSettings(**{**names, **settings})
    app = create_app(llm, given, models)
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    options = {**uvicorn_options(given), "timeout_graceful_shutdown": 10}
    server = uvicorn.Server(uvicorn.Config(app, **options))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            time.sleep(0.01)
        yield Served(f"http://127.0.0.1:{bound.getsockname()[1]}", app.state.registry, app)
    finally:
        server.should_exit = True
        thread.join(timeout=30)
        assert not thread.is_alive(), "the server did not end"
