"""Checks of what a client may do beyond asking for answers: each is asked here."""

from __future__ import annotations

from starlette.types import Scope

from kukri.dataclass import dataclass
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
        message = f"this API key does not have the scope {wanted!r}"
        raise ForbiddenError(message, param=param, code="missing_scope")


@dataclass(frozen=True)
class Permission:
    """What only some servers allow, by a setting, and only to keys with a scope."""

    scope: str
    setting: str
    refusal: str  # where the setting is off
    code: str | None = None

    def check(self, settings: ServerSettings, scope: Scope, param: str | None = None) -> None:
        """Raises ForbiddenError, about `param`, unless the server and the request's key have it."""
        if not getattr(settings, self.setting):
            raise ForbiddenError(self.refusal, param=param, code=self.code)
        check_scope(scope, self.scope, param)


INTERP = Permission(
    "interp",
    "has_interp",
    "interventions and activations are disabled: start the server with --interp",
    "interp_disabled",
)
MODELS = Permission(
    "manage", "manages_models", "changing models is disabled: start the server with --manage-models"
)
ADAPTERS = Permission(
    "manage", "adapter_dir", "changing adapters is disabled: start the server with --adapter-dir"
)
