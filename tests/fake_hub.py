"""A small hub on the loopback interface, which huggingface_hub takes for its own."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

COMMIT = "0123456789abcdef0123456789abcdef01234567"
TOKEN = "hf_test"
TINY = "org/tiny"  # a repository of a model that can be served


@dataclass
class Hub:
    """The server's files by repository, and the requests that it got."""

    repos: dict[str, dict[str, bytes]]
    gated: set[str] = field(default_factory=set)
    requests: list[str] = field(default_factory=list)
    status: int | None = None  # every answer, when set
    takes_ranges: bool = True
    stall_at: int | None = None  # bytes of a file sent before the line goes silent until `released`
    released: threading.Event = field(default_factory=threading.Event)
    n_bytes: int = 0  # sent
    n_lost: int = 0  # answers whose client had left
    url: str = ""
    home: str = ""

    @property
    def n_downloads(self) -> int:
        return sum(request.startswith("GET") and "/resolve/" in request for request in self.requests)


class Handler(BaseHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.hub.requests.append(f"{self.command} {self.path}")
        parts = self.path.partition("?")[0].strip("/").split("/")
        is_api = parts[:2] == ["api", "models"]
        repo = "/".join(parts[2:4] if is_api else parts[:2])
        if self.hub.status is not None:
            self.answer(self.hub.status, b"{}")
        elif repo not in self.hub.repos:
            self.answer(404, b"{}", {"X-Error-Code": "RepoNotFound"})
        elif repo in self.hub.gated and self.headers["Authorization"] != f"Bearer {TOKEN}":
            self.answer(403, b"{}", {"X-Error-Code": "GatedRepo"})
        elif is_api:
            revision = parts[5] if len(parts) > 5 else "main"
            if revision not in ("main", COMMIT):
                self.answer(404, b"{}", {"X-Error-Code": "RevisionNotFound"})
                return
            siblings = [{"rfilename": name, "size": len(data)} for name, data in self.hub.repos[repo].items()]
            self.answer(200, json.dumps({"id": repo, "sha": COMMIT, "siblings": siblings}).encode())
        else:
            data = self.hub.repos[repo].get("/".join(parts[4:]))
            if data is None:
                self.answer(404, b"{}", {"X-Error-Code": "EntryNotFound"})
                return
            headers = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(data).hexdigest()}"'}
            asked = self.headers["Range"] if self.hub.takes_ranges else None
            beginning = re.fullmatch(r"bytes=0-(\d+)", asked or "")
            if beginning is not None and self.command == "GET":
                data = data[: int(beginning[1]) + 1]
            self.answer(200 if beginning is None else 206, data, headers)

    def answer(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "GET":
            return
        self.hub.n_bytes += len(body)
        try:
            if self.hub.stall_at is not None and "/resolve/" in self.path:
                self.wfile.write(body[: self.hub.stall_at])
                self.wfile.flush()
                while not self.hub.released.wait(0.05):
                    self.connection.setblocking(False)
                    try:
                        has_left = self.connection.recv(1) == b""
                    except BlockingIOError:
                        has_left = False
                    self.connection.setblocking(True)
                    if has_left:
                        raise ConnectionResetError
                body = body[self.hub.stall_at :]
            self.wfile.write(body)
        except ConnectionError:
            self.hub.n_lost += 1


@contextmanager
def running(made: Hub) -> Iterator[None]:
    """Serves the hub within the block, and sets its `url`."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (Handler,), {"hub": made}))
    made.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield
    finally:  # or a test that fails keeps the process from ending
        made.released.set()
        server.shutdown()
        thread.join()
        server.server_close()
