"""Schemas of tools that no grammar can be made of: the argument that is at fault is left free."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from kukri.errors import RequestError
from kukri.sampling import Grammar
from kukri.sampling.grammar import json_rule

log = logging.getLogger("kukri.server")

_MAX_FAULTS = 8  # schemas of one request: each may take as long as a grammar may; then all arguments are free

Functions = Sequence[Mapping[str, Any]]


def without_schemas(functions: Functions) -> Functions:
    """The functions with any object for their arguments."""
    return [{**function, "parameters": {"type": "object"}} for function in functions]


async def loosened(functions: Functions, check: Callable[[Grammar], Awaitable[None]]) -> Functions:
    """The functions with schemas that can be enforced: arguments whose own cannot are free, and logged.

    `check` raises RequestError for a grammar that cannot be served.
    """
    found: list[Mapping[str, Any]] = []
    n_faults = 0

    async def fault(schema: Any) -> str | None:
        nonlocal n_faults
        try:
            await check(Grammar.text(f"start: {json_rule(schema, lenient=True)}", param="tools"))
        except RequestError as error:
            n_faults += 1
            return str(error)
        return None

    for function in functions:
        schema = function.get("parameters") or {"type": "object"}
        reason = await fault(schema)
        if reason is not None:
            schema, freed = await _loosened(schema, fault, lambda: n_faults > _MAX_FAULTS)
            log.warning("the tool %s has %s of any form: %s", function["name"], freed, reason)
        if n_faults > _MAX_FAULTS:
            return without_schemas(functions)
        found.append({**function, "parameters": schema})
    return found


async def _loosened(
    schema: Mapping[str, Any],
    fault: Callable[[Any], Awaitable[str | None]],
    is_enough: Callable[[], bool],
) -> tuple[Mapping[str, Any], str]:
    """(the schema with the arguments at fault free, their names)."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return {"type": "object"}, "arguments"
    definitions = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    kept: dict[str, Any] = {}
    for name, part in properties.items():
        alone = {"type": "object", "properties": {name: part}, "required": [name], **definitions}
        is_bad = not is_enough() and await fault(alone) is not None
        kept[name] = {key: part[key] for key in ("description",) if key in part} if is_bad else part
    freed = [name for name in kept if kept[name] != properties[name]]
    required = [name for name in schema.get("required") or () if name in kept]
    looser = {"type": "object", "properties": kept, "required": required, **definitions}
    if freed and not is_enough() and await fault(looser) is None:
        return looser, f"the argument{'s' if len(freed) > 1 else ''} {', '.join(freed)}"
    return {"type": "object"}, "arguments"
