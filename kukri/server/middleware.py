"""The middleware that every request passes: its id, the log, the API key, the rate, the size of its body."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from http import HTTPStatus
from ipaddress import ip_address, ip_network
from time import perf_counter
from typing import NamedTuple
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kukri.engine.traces import Span, Traces
from kukri.errors import failure_of
from kukri.server.bounds import FORM_BYTES
from kukri.server.endpoint import Api, Paths
from kukri.server.errors import error_response
from kukri.server.image_bytes import ImageBytes
from kukri.server.keys import Client, KeyRing
from kukri.server.metrics import Metrics
from kukri.server.rates import RateLimiter, WrongKeys, network_of
from kukri.server.settings import ServerSettings

log = logging.getLogger("kukri.server")
_LOOKS = 10  # requests that compute nothing, such as GETs, for each that may
_LEAST_BYTES_PER_S = 1 << 15  # pace of an upload, after the time that any body has
_NO_NAME = re.compile(r"[^A-Za-z0-9_.-]")
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PORT = re.compile(r":[0-9]*$")


def _mark_path(scope: Scope, root_path: str) -> None:
    """Sets `kukri.path`, the path without the prefix under which a proxy serves this application.

    The proxy may leave the prefix on or cut it off; the scope has it afterwards, as ASGI wants it.
    """
    root = scope["root_path"] = root_path or scope.get("root_path", "")
    path = scope["path"]
    if root and not f"{path}/".startswith(f"{root}/"):
        scope["path"] = root + path
    scope["kukri.path"] = scope["path"][len(root) :]


def _left_out(scope: Scope) -> dict[str, str]:
    """Return the names of what a request has and its answer leaves out, by the header that tells them."""
    found: dict[str, Sequence[str]] = scope["kukri.left_out"]
    return {
        header: ", ".join(_NO_NAME.sub("_", name)[:64] or "_" for name in names[:32])
        for header, names in found.items()
        if names
    }


class _Bound(NamedTuple):
    """The most bytes of a body, the option that sets them, and the pace that gives a body more time.

    Images in base64 have a bound of their own besides.
    """

    n_bytes: int
    option: str
    bytes_per_s: int | None
    base64_bytes: int = 0

    @property
    def message(self) -> str:
        return f"the body must be at most {self.n_bytes} bytes ({self.option})"

    @property
    def base64_message(self) -> str:
        n_bytes = self.base64_bytes
        return f"the images in the body must be at most {n_bytes} bytes (--max-images)"


class Middleware:
    """The outermost layer of the application, below CORS."""

    def __init__(
        self,
        app: ASGIApp,
        settings: ServerSettings,
        keys: KeyRing,
        metrics: Metrics,
        apis: Sequence[Api],
        traces: Traces | None = None,
    ) -> None:
        self._app, self._settings, self._metrics, self._traces = app, settings, metrics, traces
        self._keys, self._wrong_keys = keys, WrongKeys()
        rows = [endpoint for api in apis for endpoint in api.endpoints]
        self._apis = {api.prefix: api for api in apis if api.prefix}
        self._open, self._quiet, self._with_images, self._uploads, self._unread = (
            Paths(row for row in rows if getattr(row, trait))
            for trait in ("is_open", "is_quiet", "has_images", "is_upload", "is_unread")
        )
        self._proxies = [ip_network(proxy) for proxy in settings.trusted_proxies]
        per_minute = settings.rate_limit
        self._rates = RateLimiter(per_minute) if per_minute else None
        self._other_rates = RateLimiter(_LOOKS * per_minute) if per_minute else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles one request; an error beneath becomes a 500 with the request's id in the log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        _mark_path(scope, self._settings.root_path)
        started_s, headers, status = perf_counter(), Headers(scope=scope), 0
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else f"req_{uuid4().hex}"
        scope["kukri.id"], scope["kukri.log"] = request_id, {}
        scope["kukri.left_out"] = {}  # names by the header that tells them
        scope["kukri.trace"] = self._span(scope, headers)
        on_end: list[Callable[[], None]] = []  # called when the response is over
        scope["kukri.on_end"] = on_end

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                for name in ("x-request-id", "request-id"):  # OpenAI's and Anthropic's
                    MutableHeaders(scope=message)[name] = request_id
                MutableHeaders(scope=message).update(_left_out(scope))
            await send(message)

        try:
            self._mark_api(scope, headers)
            refusal = self._refusal(scope, headers)
            if refusal is not None:
                await refusal(scope, receive, send_with_id)
            else:
                await self._app(scope, self._limited(self._bound(scope), receive), send_with_id)
        except ClientDisconnect:
            pass  # while it sent its body: nobody waits for an answer
        except BaseException as error:
            failure_of("the request", error)  # raises again what ends the task, or the program
            log.exception("request failed", extra={"request_id": request_id})
            if not status:
                failure = error_response(f"internal server error: see {request_id} in the server's log", 500)
                await failure(scope, receive, send_with_id)
        finally:
            for end in on_end:
                end()
            self._note(scope, request_id, status, perf_counter() - started_s)

    def _mark_api(self, scope: Scope, headers: Headers) -> None:
        """Sets `kukri.error_form`, and has a body count as JSON for an API whose clients often do not say so.

        Not if a browser's page sends it: the type is what makes the browser ask first whether the page may.
        """
        path = scope["kukri.path"]
        api = next((api for prefix, api in self._apis.items() if path.startswith(prefix)), None)
        scope["kukri.error_form"] = None if api is None else api.error
        if api is not None and api.is_all_json and not ("origin" in headers or "sec-fetch-site" in headers):
            MutableHeaders(scope=scope)["content-type"] = "application/json"

    def _span(self, scope: Scope, headers: Headers) -> Span | None:
        """The span of a request that may compute something, if requests are traced."""
        if self._traces is None or scope["method"] != "POST":
            return None
        span = self._traces.begin("POST", headers)
        scope["kukri.log"]["trace_id"] = span.trace_id
        return span

    def _trace(self, scope: Scope, request_id: str, route: str, status: int) -> None:
        """Ends the span of a request."""
        span: Span | None = scope["kukri.trace"]
        if span is None:
            return
        facts = {
            "http.request.method": "POST",
            "http.route": route,
            "http.response.status_code": status,  # 0: the client left first
            "kukri.request_id": request_id,
            **{f"kukri.{name}": fact for name, fact in scope["kukri.log"].items() if fact is not None},
        }
        error = f"status {status}" if status >= HTTPStatus.INTERNAL_SERVER_ERROR else None
        span.end(facts, name=f"POST {route}", error=error)

    def _refusal(self, scope: Scope, headers: Headers) -> Response | None:
        """The response to a refused request, else None; stores the client in the scope."""
        known: Client | None = scope.get(
            "kukri.known_client"
        )  # set in a request that this process made itself
        if known is not None:
            scope["kukri.client"] = known
            return _over_budget(known)
        address = self._address(scope, headers)
        scope["kukri.client"] = client = Client(address, network_of(address))
        host = headers.get("host", "")
        if not self._is_allowed(host):
            name = _PORT.sub("", host.strip())[:100]
            message = (
                f"the Host header {name!r} is not supported: start the server with --allowed-host {name}"
            )
            return error_response(message, 403, code="host_not_allowed")
        if scope["kukri.path"] in self._open:
            return None
        if scope["method"] == "OPTIONS":  # a browser's preflight, which carries no key
            return None
        if not self._may_cross(headers):
            origin = headers.get("origin", "another site")[:200]
            message = (
                f"requests from pages of {origin} are disabled: start the server with --cors-origin ORIGIN"
            )
            return error_response(message, 403, code="origin_not_allowed")
        if self._keys:
            given = headers.get("authorization"), headers.get("x-api-key")
            found = self._keys.find(*given)
            digest = None if found is None else found.digest
            if given != (None, None) and (wait_s := self._wrong_keys.wait_s(client.bucket, digest)):
                return _too_often("too many wrong API keys from this address", wait_s)
            if found is None:
                message = (
                    "a valid API key is required: send it as `Authorization: Bearer KEY` or `X-API-Key: KEY`"
                )
                return error_response(message, 401, code="invalid_api_key")
            scope["kukri.client"] = client = found
        rates = {"POST": self._rates, "HEAD": None}.get(scope["method"], self._other_rates)
        if rates is not None and (wait_s := rates.take(client.bucket)):
            return _too_often(f"more than {rates.per_minute} {scope['method']} requests a minute", wait_s)
        if scope["method"] == "POST" and (refusal := _over_budget(client)) is not None:
            return refusal
        coding = headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            message = f"content-encoding {coding[:50]!r} is not supported: send the body as it is"
            refused = error_response(message, 415, code="unsupported_encoding")
            refused.headers["accept-encoding"] = "identity"
            return refused
        length = headers.get("content-length", "0")
        bound = self._bound(scope)
        is_read = scope["kukri.path"] not in self._unread
        if is_read and length.isdecimal() and int(length[:20]) > bound.n_bytes + bound.base64_bytes:
            return error_response(bound.message, 413, code="body_too_large")
        return None

    def _address(self, scope: Scope, headers: Headers) -> str:
        """The client's address; behind trusted proxies, the last one that they were asked from."""
        address: str = scope["client"][0] if scope.get("client") else "local"
        forwarded = ",".join(headers.getlist("x-forwarded-for")).split(",")
        for hop in reversed(forwarded):
            try:
                if not any(ip_address(address) in network for network in self._proxies):
                    break
                address = str(ip_address(hop.strip()))
            except ValueError:  # no address: what comes before it cannot be trusted either
                break
        return address

    def _is_allowed(self, host: str) -> bool:
        """Whether the Host header is allowed (protects against DNS rebinding)."""
        allowed = self._settings.allowed_hosts
        name = _PORT.sub("", host.strip().lower()).strip("[]")
        return not allowed or name in allowed

    def _may_cross(self, headers: Headers) -> bool:
        """Whether a request comes from no web page, from this server's own, or from an allowed origin.

        Browsers say where a page comes from by Sec-Fetch-Site, which no page can change; older ones, and all
        of them over plain HTTP to another machine, only by the Origin of a request that is not a plain GET.
        """
        origin, site = headers.get("origin"), headers.get("sec-fetch-site")
        if origin is not None and not {origin, "*"}.isdisjoint(self._settings.cors_origins):
            return True
        if site is not None:
            return site in ("same-origin", "none")
        return origin is None or origin.partition("://")[2].lower() == headers.get("host", "").lower()

    def _bound(self, scope: Scope) -> _Bound:
        """The size that a request's body may have, which is larger for a form with a file."""
        settings, path, is_post = self._settings, scope["kukri.path"], scope["method"] == "POST"
        if path in self._uploads and is_post:
            return _Bound(settings.max_upload_bytes + FORM_BYTES, "--max-upload", _LEAST_BYTES_PER_S)
        n_base64 = settings.max_image_bytes if path in self._with_images else 0
        return _Bound(settings.max_body_bytes, "--max-body", None, n_base64)

    def _limited(self, bound: _Bound, receive: Receive) -> Receive:
        """`receive` that ends a body which is too large or too slow."""
        n_bytes, n_base64, is_complete = 0, 0, False
        images = ImageBytes()
        deadline_s = asyncio.get_running_loop().time() + self._settings.read_s

        async def limited() -> Message:
            nonlocal n_bytes, n_base64, is_complete
            if is_complete:
                return await receive()
            more_s = 0.0 if bound.bytes_per_s is None else n_bytes / bound.bytes_per_s
            try:
                async with asyncio.timeout_at(deadline_s + more_s):
                    message = await receive()
            except TimeoutError:
                raise HTTPException(HTTPStatus.REQUEST_TIMEOUT, "the body did not arrive in time") from None
            body = message.get("body", b"")
            n_bytes += len(body)
            if bound.base64_bytes:
                n_base64 += images.count(body)
            is_complete = not message.get("more_body", False)
            if n_bytes - n_base64 > bound.n_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, bound.message)
            if n_base64 > bound.base64_bytes:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, bound.base64_message)
            return message

        return limited

    def _note(self, scope: Scope, request_id: str, status: int, duration_s: float) -> None:
        route = getattr(scope.get("route"), "path", "other")
        self._metrics.on_response(route, status)
        self._trace(scope, request_id, route, status)
        log.log(
            logging.DEBUG if scope["kukri.path"] in self._quiet else logging.INFO,
            "request",
            extra={
                "request_id": request_id,
                "client": scope["kukri.client"].name if "kukri.client" in scope else "unknown",
                "method": scope["method"],
                "path": scope["kukri.path"],
                "status": status,  # 0: the client left first
                "duration_s": round(duration_s, 4),
                **scope["kukri.log"],
                **{header[2:].replace("-", "_"): names for header, names in _left_out(scope).items()},
            },
        )


def _too_often(what: str, wait_s: float) -> Response:
    wait = max(round(wait_s + 0.5), 1)
    message = f"{what}: try again in {wait_s:.1f} s"
    return error_response(message, 429, code="rate_limit_exceeded", retry_after_s=wait)


def _over_budget(client: Client) -> Response | None:
    """The refusal of a key that has used its tokens of today; None if it has not."""
    if not client.is_over_budget:
        return None
    message = (
        f"this API key has used its {client.daily_tokens} tokens for today: try again after midnight UTC"
    )
    wait_s = int(client.meter.left_s) + 1
    return error_response(message, 429, code="insufficient_quota", retry_after_s=wait_s)
