"""A model of a running server, as `kukri chat` uses models: any server with OpenAI's API."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from kukri.calls.results import Chunk, FinishReason, Result
from kukri.engine import Timings
from kukri.errors import ConfigError, KukriError, RequestError, printable
from kukri.server.keys import key_header

_TIMEOUT_S = 600.0  # between two pieces of an answer
_LIST_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 24  # the longest list of models that is read
_MOST_LINE = 1 << 20  # bytes of an event
_MOST_ERROR = 1 << 16


class RemoteModel:
    """Asks the chat endpoint at `url`. It has the parts of an `LLM` that `Chat` uses.

    `sampling` are the fields that the user set. Raises ConfigError for text that is not a URL, KukriError if
    the server does not answer.
    """

    adapters: tuple[str, ...] = ()

    def __init__(self, url: str, api_key: str | None, name: str | None, sampling: Mapping[str, Any]) -> None:
        if urlsplit(url).scheme not in ("http", "https"):
            raise ConfigError(f"--url must begin with http:// or https://, not {url!r}")
        self._url, self._api_key, self._sampling = url.rstrip("/").removesuffix("/v1"), api_key, sampling
        names = self.names()
        if name is None and not names:
            raise ConfigError(f"-m is required: the server at {url} names no models")
        self.name = name or names[0]
        self.options = SimpleNamespace(prefix_dir=None)
        self.config = SimpleNamespace(name=self.name, max_context=1 << 62)
        self.engine_config = SimpleNamespace(max_context=None)
        self.path = Path(self.name)

    def names(self) -> list[str]:
        """The names of the server's models."""
        with self._opened("/v1/models", None, _LIST_TIMEOUT_S) as response:
            try:
                models = json.loads(response.read(_MOST_BYTES))["data"]
                return [str(model["id"]) for model in models]
            except (ValueError, KeyError, TypeError):
                raise KukriError(f"{self._url} must list its models as OpenAI's API does") from None

    def stream(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: object = None,
        *,
        adapter: str | None = None,
        interventions: Sequence[Mapping[str, Any]] = (),
    ) -> Iterator[Chunk]:
        """The answer as it comes; the last chunk has the result, whose counts are the server's."""
        body = {
            "model": self.name, "messages": list(messages), "stream": True,
            "stream_options": {"include_usage": True}, **self._sampling,
        }  # fmt: skip
        start_s = first_s = perf_counter()
        pieces: list[Chunk] = []
        usage: dict[str, Any] = {}
        reason: FinishReason = "stop"
        with self._opened("/v1/chat/completions", body, _TIMEOUT_S) as response:
            for event in _events(response):
                usage = event.get("usage") or usage
                for choice in event.get("choices") or ():
                    delta = choice.get("delta") or {}
                    reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                    piece = Chunk(delta.get("content") or "", reasoning=reasoning)
                    if (piece.text or piece.reasoning) and not pieces:
                        first_s = perf_counter()
                    if piece.text or piece.reasoning:
                        pieces.append(piece)
                        yield piece
                    if choice.get("finish_reason") == "length":
                        reason = "length"
        end_s = perf_counter()
        timings = Timings(
            n_prompt_tokens=int(usage.get("prompt_tokens") or 0),
            n_generated=int(usage.get("completion_tokens") or len(pieces)),
            queue_s=0.0,
            prompt_s=first_s - start_s,
            first_token_s=first_s - start_s,
            decode_s=end_s - first_s,
        )
        text = "".join(piece.text for piece in pieces)
        reasoning = "".join(piece.reasoning for piece in pieces)
        result = Result(text, [], reason, None, None, [], timings, reasoning=reasoning)
        yield Chunk("", finish_reason=reason, result=result)

    def close(self) -> None:
        """Nothing stays open."""

    def _opened(self, path: str, body: Mapping[str, Any] | None, timeout_s: float) -> Any:
        """The response of a request. Raises KukriError, with what the server says, if it has none."""
        headers = {"Content-Type": "application/json", **key_header(self._api_key)}
        data = None if body is None else json.dumps(body).encode()
        try:
            return urlopen(Request(self._url + path, data, headers), timeout=timeout_s)
        except HTTPError as error:
            reason = _said(error.read(_MOST_ERROR)) or error.reason
            raise RequestError(f"{self._url} answered {error.code}: {printable(reason)}") from None
        except (OSError, ValueError) as error:
            why = error.reason if isinstance(error, URLError) else error
            raise KukriError(
                f"no answer from {self._url}, so check that the server is running: {why}"
            ) from None


def _events(response: Any) -> Iterator[dict[str, Any]]:
    """The JSON of a stream's events. Raises KukriError if it breaks off or is something else."""
    try:
        while line := response.readline(_MOST_LINE):
            if not line.startswith(b"data:"):
                continue
            data = line[5:].strip()
            if data == b"[DONE]":
                return
            event = json.loads(data)
            if event.get("error"):
                raise KukriError(f"the server answered: {printable(_said(data))}")
            yield event
    except (OSError, ValueError, AttributeError) as error:
        raise KukriError(f"the stream broke off: {error}") from None


def _said(data: bytes) -> str:
    """The message of an error's body; "" if it has none."""
    try:
        error = json.loads(data).get("error")
        return str(error.get("message") if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        return ""
