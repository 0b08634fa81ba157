"""Checks of what a client may do beyond asking for answers."""

from __future__ import annotations

from starlette.types import Scope

from kukri.server.errors import ForbiddenError
from kukri.server.settings import ServerSettings


def check_interp(settings: ServerSettings, scope: Scope, param: str | None = None) -> None:
    """Raises ForbiddenError, about `param`, unless a client may steer models and read their activations."""
    if not settings.has_interp:
        raise ForbiddenError(
            "nobody may steer models or read activations here: start the server with --interp",
            param=param,
            code="interp_disabled",
        )
    if "interp" not in scope["kukri.client"].scopes:
        raise ForbiddenError(
            "the API key lacks the scope interp: write scope=interp after it",
            param=param,
            code="missing_scope",
        )
