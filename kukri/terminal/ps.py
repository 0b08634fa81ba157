"""`kukri ps`: the models of a running server."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kukri.errors import KukriError, printable
from kukri.server.keys import key_header
from kukri.terminal.output import n_bytes_text
from kukri.terminal.tables import print_table

_TIMEOUT_S = 10.0
_MOST_BYTES = 1 << 24  # longest answer that is read


def show_served_models(url: str, api_key: str | None, *, as_json: bool) -> None:
    """Prints the models of the server at `url`, loaded or not. Raises KukriError if it does not tell."""
    models = _served_models(url.rstrip("/").removesuffix("/v1"), api_key)
    if as_json:
        print(json.dumps({"models": models}, ensure_ascii=False))
        return
    rows = [
        [
            printable(str(model.get("id"))),
            printable(str(model.get("state", "loaded"))),
            n_bytes_text(model["memory_bytes"]) if model.get("memory_bytes") else "-",
            str(model.get("running_requests", "-")),
            _until(model),
        ]
        for model in models
    ]
    print_table("models", ["name", "state", "memory", "requests", "unloaded in"], rows)


def _until(model: Mapping[str, Any]) -> str:
    if model.get("state") != "loaded":
        return "-"
    seconds = model.get("expires_in_s")
    return "never" if seconds is None else f"{seconds:.0f} s"


def _served_models(url: str, api_key: str | None) -> list[dict[str, Any]]:
    try:
        models: list[dict[str, Any]] = json.loads(fetched(url, "/v1/models", api_key))["data"]
        return [model for model in models if isinstance(model, dict)]
    except (ValueError, KeyError, TypeError):
        raise KukriError(f"the server at {url} must list its models as OpenAI's API does") from None


def fetched(url: str, path: str, api_key: str | None) -> bytes:
    """The body at a path of the server at `url`. Raises KukriError if there is none."""
    if not url.startswith(("http://", "https://")):
        raise KukriError(f"the URL of a server must begin with http:// or https://, not {url!r}")
    try:
        with urlopen(Request(f"{url}{path}", headers=key_header(api_key)), timeout=_TIMEOUT_S) as response:
            body: bytes = response.read(_MOST_BYTES)
            return body
    except HTTPError as error:
        hint = ": give --api-key" if error.code == 401 else ""
        raise KukriError(f"the server at {url} answered with status {error.code}{hint}") from None
    except (URLError, OSError) as error:
        raise KukriError(f"no server answers at {url}: {getattr(error, 'reason', error)}") from None
