"""A process that checks bodies of very many values, so that the server stands still for none of them.

It reads a line `MODULE:CLASS N` and then N bytes of JSON, again and again, and answers each by a line of
JSON: [kind, what], see `outcome`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from typing import Any

from pydantic import TypeAdapter, ValidationError

from kukri.host.limits import limit_memory, lower_priority
from kukri.server.body import refusal_of

_NICENESS = 10  # streams come first
_MAX_BYTES = 4 << 30  # bytes of address space


def outcome(name: str, data: bytes) -> tuple[str, Any]:
    """What is wrong with a body of the class `name`.

    ("good", None); ("invalid", the first errors of pydantic); ("refused", [message, param, code] of a
    RequestError); or ("deep", None) if it is nested too deeply.
    """
    module, _, kind = name.partition(":")
    try:
        try:
            adapter = TypeAdapter(getattr(import_module(module), kind))
            adapter.validate_python(json.loads(data), from_attributes=True)  # as FastAPI does
        except ValidationError as error:
            found = error.errors(include_url=False, include_input=False)
            if (refused := refusal_of(found)) is not None:
                return "refused", [str(refused), refused.param, refused.code]
            return "invalid", [{**one, "loc": ("body", *one["loc"])} for one in found]
        except RecursionError:
            return "deep", None
    except ValueError:  # which is also that it is not UTF-8
        return "invalid", [{"type": "json_invalid", "loc": ("body", 0), "msg": "JSON decode error"}]
    return "good", None


def main() -> None:
    """Answers the bodies of stdin until it ends."""
    lower_priority(_NICENESS)
    limit_memory(_MAX_BYTES)
    source = sys.stdin.buffer
    while line := source.readline():
        name, n_bytes = line.decode().split()
        print(json.dumps(outcome(name, source.read(int(n_bytes))), default=str), flush=True)


if __name__ == "__main__":
    main()
