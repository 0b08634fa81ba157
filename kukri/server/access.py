"""Checks of what a client may do beyond asking for answers: each is asked here."""

from __future__ import annotations

from pathlib import Path

from starlette.types import Scope

from kukri.server.errors import ForbiddenError
from kukri.server.keys import Client
from kukri.server.settings import ServerSettings


def client_of(scope: Scope) -> Client:
    """The client that sent a request."""
    client: Client = scope["kukri.client"]
    return client


def may(scope: Scope, wanted: str) -> bool:
    """True if the request's key has a scope, or the server has no keys."""
    return wanted in client_of(scope).scopes


def check_scope(scope: Scope, wanted: str, param: str | None = None) -> None:
    """Raises ForbiddenError, about `param`, unless the request's key has a scope."""
    if not may(scope, wanted):
        message = f"this API key lacks the scope {wanted!r}"
        raise ForbiddenError(message, param=param, code="missing_scope")


def check_interp(settings: ServerSettings, scope: Scope, param: str | None = None) -> None:
    """Raises ForbiddenError, about `param`, unless a client may steer models and read their activations."""
    if not settings.has_interp:
        raise ForbiddenError(
            "interventions and activations are disabled; start the server with --interp",
            param=param,
            code="interp_disabled",
        )
    check_scope(scope, "interp", param)


def check_manages_models(settings: ServerSettings, scope: Scope) -> None:
    """Raises ForbiddenError unless a client may pull and delete models."""
    if not settings.manages_models:
        raise ForbiddenError("this server's models cannot be changed; start it with --manage-models")
    check_scope(scope, "manage")


def check_manages_adapters(settings: ServerSettings, scope: Scope) -> Path:
    """The directory whose adapters a client may load. Raises ForbiddenError if it may not."""
    if settings.adapter_dir is None:
        raise ForbiddenError("this server's adapters cannot be changed; start it with --adapter-dir")
    check_scope(scope, "manage")
    return settings.adapter_dir
