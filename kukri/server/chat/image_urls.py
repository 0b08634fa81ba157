"""Images as clients send them: base64, data URLs, and addresses if the server fetches images.

The URLs are a client's: nothing of this machine's network is asked. Each host is resolved once, all its
addresses must be public, and the connection goes to one of these addresses, because a second answer of its
name server could lead elsewhere. The same holds for each redirect.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import time
from http import HTTPStatus
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Any
from urllib.parse import SplitResult, urljoin, urlsplit

from kukri.calls.image_prompts import url_of
from kukri.errors import RequestError
from kukri.tokenizer.image_marks import ImagePart
from kukri.vision.decode import base64_bytes, data_url_bytes

MAX_BYTES = 20 << 20
MAX_S = 10.0  # for all of it
MAX_REDIRECTS = 3
_MAX_URL = 4096  # characters
_PIECE = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)


def fetched(url: str, param: str) -> bytes:
    """The bytes at a URL. Raises RequestError, naming `param`, for any that may not or cannot be fetched."""
    deadline_s = time.monotonic() + MAX_S
    try:
        for _ in range(MAX_REDIRECTS + 1):
            found = _fetch(url, deadline_s)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise _Refused(f"it redirects more than {MAX_REDIRECTS} times")
    except _Refused as error:
        reason = str(error)
    except TimeoutError:
        reason = f"it took more than {MAX_S:g} s"
    except (OSError, http.client.HTTPException, ValueError, UnicodeError) as error:
        reason = f"{type(error).__name__}"
    raise RequestError.of(param, f"cannot be fetched: {reason}", code="invalid_image") from None


class _Refused(Exception):
    """Why an address is not asked, or what it sent is not taken."""


def _fetch(url: str, deadline_s: float) -> bytes | str:
    """What is at a URL, or the URL to which it redirects."""
    if len(url) > _MAX_URL or any(c <= " " or c == "\x7f" for c in url):
        raise _Refused("its URL is too long or has control characters")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise _Refused("its URL does not begin with http:// or https:// and a host")
    if parts.username is not None or parts.password is not None:
        raise _Refused("its URL has a name or password")
    connection = _connection(parts, deadline_s)
    try:
        target = parts.path or "/"
        headers = {
            "Host": parts.netloc,
            "User-Agent": "kukri",
            "Accept": "image/*",
            "Accept-Encoding": "identity",
        }
        connection.request("GET", f"{target}?{parts.query}" if parts.query else target, headers=headers)
        response = connection.getresponse()
        if response.status in _REDIRECTS:
            return response.headers.get("Location") or ""
        if response.status != HTTPStatus.OK:
            raise _Refused(f"its server answered with status {response.status}")
        return _body(response, connection, deadline_s)
    finally:
        connection.close()


def _body(
    response: http.client.HTTPResponse, connection: http.client.HTTPConnection, deadline_s: float
) -> bytes:
    data = bytearray()
    while True:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError
        if connection.sock is not None:
            connection.sock.settimeout(left_s)
        piece = response.read1(_PIECE)
        if not piece:
            return bytes(data)
        data += piece
        if len(data) > MAX_BYTES:
            raise _Refused(f"it is larger than {MAX_BYTES >> 20} MiB")


def _connection(parts: SplitResult, deadline_s: float) -> http.client.HTTPConnection:
    """A connection to the host's first address, if all its addresses are public."""
    host = parts.hostname or ""
    port = parts.port or (443 if parts.scheme == "https" else 80)
    addresses = [str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)]
    if not addresses or not all(map(is_public, addresses)):
        raise _Refused("its address is not public")
    left_s = max(deadline_s - time.monotonic(), 0.001)
    raw = socket.create_connection((addresses[0], port), timeout=left_s)
    connection = http.client.HTTPConnection(host, port, timeout=left_s)
    if parts.scheme == "https":
        try:
            connection.sock = ssl.create_default_context().wrap_socket(raw, server_hostname=host)
        except BaseException:
            raw.close()
            raise
    else:
        connection.sock = raw
    return connection


def is_public(address: str) -> bool:
    """True for an address of the public internet, without one of another network inside it."""
    try:
        found: IPv4Address | IPv6Address = ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo and found.teredo[1])
        if inner is None and found.packed[:12] == bytes.fromhex("0064ff9b0000000000000000"):
            inner = IPv4Address(found.packed[12:])
        if inner:
            return False if not found.ipv4_mapped else is_public(str(inner))
    return found.is_global and not found.is_multicast


class ImageReader:
    """Finds the bytes of an image. With `fetches`, also at a public address (`--image-urls`)."""

    def __init__(self, *, fetches: bool) -> None:
        self._fetches = fetches

    def read(self, image: ImagePart) -> bytes:
        """The bytes, not yet looked at. Raises RequestError for what says none; never opens a file."""
        data: Any = image.part.get("data")
        param = image.param
        if isinstance(data, str):
            is_url = data[:5].lower() == "data:"
            return data_url_bytes(data, param) if is_url else base64_bytes(data, param)
        url = url_of(image)
        if url is None:
            raise RequestError.of(param, "must be base64, as data:image/png;base64,...", code="invalid_image")
        if url[:5].lower() == "data:":
            return data_url_bytes(url, param)
        if url[:7].lower() == "http://" or url[:8].lower() == "https://":
            if not self._fetches:
                raise RequestError(
                    f"fetching {param!r} is disabled: send a data URL, or start the server with --image-urls",
                    param=param,
                    code="unsupported_content",
                )
            return fetched(url, param)
        raise RequestError.of(param, "must have a data:, http:// or https:// URL", code="invalid_image")
