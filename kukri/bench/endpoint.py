"""One request to an endpoint with OpenAI's API, timed as a client that streams sees it.

aiohttp, as measured (docs/decisions): the client may not cost the server its processor.
"""

from __future__ import annotations

import json
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

from kukri.dataclass import dataclass, field
from kukri.errors import ConfigError, KukriError, UnsupportedError
from kukri.host.installed import needs_package

if TYPE_CHECKING:
    import aiohttp

Kind = Literal["chat", "completions"]

_PATHS: dict[Kind, str] = {"chat": "chat/completions", "completions": "completions"}
_MAX_LINE_BYTES = 1 << 20  # longest line of a stream; a longer one is not an answer
_MAX_ERROR_BYTES = 1 << 16  # longest error body that is read
_MAX_COUNT = 1 << 40  # tokens; a larger number is not a count
_KEEP_ALIVE_S = 4.0  # shorter than uvicorn's 5 s, so that no request meets a connection as it is closed
_TEXTS = ("content", "reasoning_content", "reasoning", "refusal", "tool_calls")  # keys of a chat's delta


class _Failure(Exception):
    """A failed answer: the kind of error, which is counted, and its message."""

    def __init__(self, kind: str, detail: str) -> None:
        self.kind, self.detail = kind, detail
        super().__init__(f"{kind}: {detail}")


@dataclass
class Answer:
    """One request and its result. Durations in seconds; counts are the server's `usage`.

    Attributes: sent_s (of the clock perf_counter), ttft_s (to the first chunk with text, or to the last one
    if none has any), e2e_s (to the last chunk), gaps_s (between chunks with text), error (a kind), detail.
    """

    sent_s: float = 0.0
    ttft_s: float | None = None
    e2e_s: float = 0.0
    gaps_s: list[float] = field(default_factory=list)
    n_prompt: int | None = None
    n_cached: int = 0
    n_generated: int | None = None
    error: str | None = None
    detail: str = ""
    has_ended: bool = False  # its finish reason, or the end mark, has come
    _last_s: float = 0.0

    @property
    def n_tokens(self) -> int:
        """Tokens of the answer; its chunks with text, if the server gave no usage."""
        return self.n_generated if self.n_generated is not None else len(self.gaps_s) + 1

    @property
    def tpot_s(self) -> float | None:
        """Time per token after the first; None for answers of one token."""
        if self.ttft_s is None or self.n_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.n_tokens - 1)

    def take(self, data: bytes, now_s: float) -> None:
        """Takes the data of one event."""
        if data == b"[DONE]":
            self.has_ended = True
            return
        try:
            event = json.loads(data)
            if event.get("error"):
                raise _Failure("error event", _message(event))
            self._take_usage(event.get("usage") or {})
            for choice in event.get("choices") or ():
                self._take_choice(choice, now_s)
        except (ValueError, TypeError, AttributeError, RecursionError):
            raise _Failure("malformed event", repr(data[:100])) from None

    def _take_choice(self, choice: dict[str, Any], now_s: float) -> None:
        is_last = bool(choice.get("finish_reason"))
        self.has_ended |= is_last
        self.e2e_s = now_s - self.sent_s
        has_text = _has_text(choice)
        if self.ttft_s is None and (has_text or is_last):
            self.ttft_s = self.e2e_s
        if has_text:
            if self._last_s:
                self.gaps_s.append(now_s - self._last_s)
            self._last_s = now_s

    def _take_usage(self, usage: dict[str, Any]) -> None:
        if usage:
            self.n_prompt, self.n_generated = (
                _count(usage, "prompt_tokens"),
                _count(usage, "completion_tokens"),
            )
            self.n_cached = _count(usage.get("prompt_tokens_details") or {}, "cached_tokens") or 0


class Endpoint:
    """An API below a URL such as http://127.0.0.1:8000/v1; open within `async with`.

    Raises ConfigError for a URL or key that can be none, UnsupportedError without aiohttp.
    """

    def __init__(self, url: str, api_key: str | None, kind: Kind, timeout_s: float) -> None:
        try:
            import aiohttp  # noqa: F401
        except ImportError:
            raise UnsupportedError(needs_package("kukri bench serve", "aiohttp", "load")) from None
        self.url, self._kind, self._timeout_s = _checked_url(url), kind, timeout_s
        self._headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if api_key:
            if not (api_key.isascii() and api_key.isprintable()):
                raise ConfigError("the API key must have only characters that HTTP headers allow")
            self._headers["Authorization"] = f"Bearer {api_key}"

    async def __aenter__(self) -> Endpoint:
        import aiohttp

        # no limit of connections: a client that queues requests measures itself
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S)
        self._session = aiohttp.ClientSession(
            connector=connector, headers=self._headers, timeout=aiohttp.ClientTimeout(total=self._timeout_s)
        )
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._session.close()

    async def first_model(self) -> str:
        """The first of the models that are served. Raises KukriError if there is none."""
        import aiohttp

        try:
            async with self._session.get(f"{self.url}/models", allow_redirects=False) as response:
                if response.status != 200:
                    raise KukriError(self.refusal(f"HTTP {response.status}", await _said(response)))
                body = await _start_of(response, _MAX_LINE_BYTES)
            return str(json.loads(body)["data"][0]["id"])
        except TimeoutError:
            raise KukriError(self.refusal("timeout", f"nothing came for {self._timeout_s:g} s")) from None
        except (aiohttp.ClientError, OSError) as error:
            raise KukriError(self.refusal("no connection", str(error))) from None
        except (ValueError, LookupError, TypeError):
            raise KukriError(f"--model is required: {self.url}/models lists no model") from None

    async def ask(self, body: bytes) -> Answer:
        """Sends a request, JSON with `stream` set, and reads the answer; a failure is in its `error`."""
        import aiohttp

        answer = Answer(sent_s=perf_counter())
        try:
            url = f"{self.url}/{_PATHS[self._kind]}"
            async with self._session.post(url, data=body, allow_redirects=False) as response:
                if response.status != 200:
                    raise _Failure(f"HTTP {response.status}", await _said(response))
                await _read(response, answer)
        except _Failure as failure:
            answer.error, answer.detail = failure.kind, failure.detail
        except TimeoutError:
            answer.error, answer.detail = "timeout", f"no whole answer within {self._timeout_s:g} s"
        except aiohttp.ClientConnectorError as error:
            answer.error, answer.detail = "no connection", str(error)
        except (aiohttp.ClientError, OSError) as error:
            answer.error, answer.detail = "disconnected", str(error) or type(error).__name__
        return answer

    def refusal(self, kind: str, detail: str) -> str:
        """An error of one line: why nothing can be measured here, and the remedy."""
        ways = {
            "no connection": "start a server (kukri serve) or give its --url",
            "timeout": "look at the server, or give it longer with --timeout",
            "HTTP 401": "give a key with --api-key or $OPENAI_API_KEY",
            "HTTP 403": "give a key that may, with --api-key or $OPENAI_API_KEY",
            "HTTP 404": "check --url, which mostly ends with /v1, and --model",
            "HTTP 429": "ask for less at a time, or raise the server's limit",
        }
        way = f"; {ways[kind]}" if kind in ways else ""
        return f"{self.url}: {kind}: {detail}{way}"


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    """Reads server-sent events to their end. All that one read brings has come at one moment."""
    rest = b""
    async for piece in response.content.iter_any():
        now_s = perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                answer.take(line[5:].strip(), now_s)
        if len(rest) > _MAX_LINE_BYTES:
            raise _Failure("malformed event", f"a line of more than {_MAX_LINE_BYTES:,} bytes")
    if not answer.has_ended:
        kind = "no stream" if not answer.e2e_s else "cut off"
        raise _Failure(kind, f"{response.content_type} that ended without a finish_reason or [DONE]")
    if answer.ttft_s is None:
        raise _Failure("empty answer", "a stream without text or finish_reason")


async def _start_of(response: aiohttp.ClientResponse, n_bytes: int) -> bytes:
    """The body, up to `n_bytes` or a few more: one read brings only what has come."""
    body = b""
    async for piece in response.content.iter_any():
        body += piece
        if len(body) >= n_bytes:
            break
    return body


async def _said(response: aiohttp.ClientResponse) -> str:
    """The message in the body of an error."""
    body = await _start_of(response, _MAX_ERROR_BYTES)
    try:
        return _message(json.loads(body))
    except (ValueError, AttributeError, RecursionError):
        return body[:200].decode(errors="replace").strip() or str(response.reason)


def _message(body: dict[str, Any]) -> str:
    error = body.get("error") or body
    return str(error.get("message") or error)[:500] if isinstance(error, dict) else str(error)[:500]


def _has_text(choice: dict[str, Any]) -> bool:
    if choice.get("text"):
        return True
    delta = choice.get("delta") or {}
    return any(delta.get(name) for name in _TEXTS)


def _count(counts: dict[str, Any], name: str) -> int | None:
    value = counts.get(name)
    return value if isinstance(value, int) and 0 <= value <= _MAX_COUNT else None


def _checked_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_http = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        is_http = False
    if not is_http:
        raise ConfigError(f"the URL must be like http://127.0.0.1:8000/v1, not {url!r}")
    return url.rstrip("/")
