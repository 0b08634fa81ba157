"""`kukri serve`: models over HTTP until SIGTERM or SIGINT."""

from __future__ import annotations

import gc
import logging
import os
import socket
import ssl
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from kukri.errors import ConfigError, KukriError, UnsupportedError
from kukri.host.files import remove_file
from kukri.host.installed import needs_package
from kukri.host.os_calls import on_hangup, unix_socket
from kukri.terminal.files import read_text
from kukri.terminal.idle_exit import IdleExit
from kukri.terminal.output import say
from kukri.terminal.progress import loading_bar
from kukri.terminal.serve_options import ServeOptions

if TYPE_CHECKING:
    from kukri.server.settings import ModelSpec, ServerSettings

log = logging.getLogger("kukri.server")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOG_LEVELS = ("debug", "info", "warning", "error")


def serve_models(models: Sequence[str], options: ServeOptions, loading: dict[str, Any]) -> None:
    """Serves models; `loading` are options of LLM for each. Checks the options before loading anything.

    A single model is loaded before the server starts, unless it may be unloaded again; of several, those
    that are pinned.
    """
    require_web_stack()
    from kukri.server.logs import configure_logs
    from kukri.terminal.served_models import served_models

    if options.log_level not in _LOG_LEVELS:
        raise ConfigError(f"--log-level must be one of {', '.join(_LOG_LEVELS)}, not {options.log_level!r}")
    if options.chat_template_file is not None:
        loading["chat_template"] = read_text(options.chat_template_file, holds="chat template")
    served = served_models(models, options, loading)
    settings = server_settings(options, loading.get("kv_bytes"))
    if any(model.options.has_readers for model in served):
        settings = replace(settings, has_interp=True)
    configure_logs(as_json=options.log_json, level=options.log_level)
    with socket_of(options) as bound:
        is_alone = len(served) == 1 and settings.idle_unload_s is None and served[0].keep_alive_s is None
        is_alone = is_alone and not served[0].presets
        if not is_alone or settings.model_dir is not None or settings.manages_models:
            _serve_box(served, settings, bound)
        else:
            _serve_one(served[0], settings, bound)


def _serve_one(model: ModelSpec, settings: ServerSettings, bound: socket.socket) -> None:
    """Loads a model, with a bar that shows the progress, and serves it."""
    from kukri.llm import LLM
    from kukri.server.app import create_app
    from kukri.server.models.warm_up import warm_up

    settings = replace(settings, model_names=model.names)
    with loading_bar() as progress:
        llm = LLM(**vars(replace(model.options, fit=True)), progress=progress)
    with llm:
        warm_up(llm)
        app = create_app(llm, settings)
        announce(model.names, settings, bound)
        config, n_tokens = llm.engine_config, llm.engine.pool.n_pages * llm.engine.pool.page_tokens
        say(
            f"KV cache {llm.engine.runner.cache.n_bytes / 2**20:,.0f} MiB: {n_tokens:,} tokens, "
            f"{config.max_requests} requests at a time, {llm.engine.max_context:,} tokens of context",
        )
        run_app(app, settings, bound)


def _serve_box(models: Sequence[ModelSpec], settings: ServerSettings, bound: socket.socket) -> None:
    """Serves models that are loaded when they are needed, those that are pinned at once."""
    from kukri.server.app import create_app

    for model in models:
        _check_options(model)
    app = create_app(None, settings, models)
    registry = app.state.registry
    if not registry.entries and not settings.manages_models:
        raise ConfigError(
            f"a model was not found in {settings.model_dir}: give a model, or another directory"
        )
    announce([entry.name for entry in registry.entries], settings, bound)
    say(
        f"{registry.memory_bytes / 2**30:.1f} GiB for models, {settings.max_loaded} loaded at a time at most",
    )
    run_app(app, settings, bound)


def _check_options(model: ModelSpec) -> None:
    """Raise ConfigError if a model cannot run with its options, by the headers of its files.

    A model that would be fetched is looked at when a request needs it.
    """
    from kukri.formats import hub
    from kukri.formats.model_cache import cached_path
    from kukri.opening.memory import draft_file, memory_need

    draft = draft_file(model.options)
    for name in (model.options.model, *([] if draft is None else [draft])):
        try:
            cached_path(name)
        except UnsupportedError:
            if name is None or hub.is_known(name) or hub.is_repository(name):
                return
    try:
        memory_need(model.options)
    except KukriError as error:
        raise ConfigError(f"the model {model.names[0]!r} cannot be loaded: {error}") from None


def server_settings(
    options: ServeOptions, kv_bytes: int | None, names: tuple[str, ...] = ()
) -> ServerSettings:
    """The settings of a server; `names` are the names of a model that is open already."""
    from kukri.server.settings import ServerSettings

    found = options.settings()
    certificate, key = found.get("ssl_certfile"), found.get("ssl_keyfile")
    if key is not None and certificate is None:
        raise ConfigError("--ssl-keyfile requires --ssl-certfile")
    if certificate is not None:
        _check_certificate(certificate, key)
    for directory in (found.get("model_dir"), found.get("adapter_dir")):
        if directory is not None and not directory.is_dir():
            raise ConfigError(f"the directory {directory} was not found")
    found["allowed_hosts"] = host_names(options.host, found.get("allowed_hosts", ()))
    keys = read_keys(found.get("api_key_file"))
    return ServerSettings(model_names=names, api_keys=keys, kv_bytes=kv_bytes, **found)


def require_web_stack(command: str = "kukri serve") -> None:
    """Raises UnsupportedError, with the remedy, if the extra `serve` is not installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(needs_package(command, error.name, "serve")) from None


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The API keys, each after a name if it has one: from a file, one per line, or $KUKRI_API_KEY, by commas.

    In a file, `#` begins a comment.
    """
    if file is None:
        keys = os.environ.get("KUKRI_API_KEY", "").split(",")
    else:
        lines = read_text(file, holds="API keys").splitlines()
        keys = [line.partition("#")[0] for line in lines]
    found = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if file is not None and not found:
        raise ConfigError(f"{file} must hold API keys, one per line")
    return found


def reread_keys(app: Any, file: Path | None) -> None:
    """Takes the API keys that the file has now; the old ones stay if it cannot be used."""
    try:
        app.state.registry.keys.replace(read_keys(file))
    except ConfigError as error:
        log.error("the API keys were not read again: %s", error)
    else:
        log.info("the API keys were read again", extra={"n_keys": len(app.state.registry.keys.clients)})


def host_names(host: str, more: Sequence[str]) -> tuple[str, ...]:
    """The names that Host headers may have: on loopback its own and `more`, else `more`, or any name."""
    if host not in _LOOPBACK and not more:
        return ()
    return tuple(dict.fromkeys(name.lower() for name in (*_LOOPBACK, host, *more)))


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket bound to the address, not yet listening. Raises ConfigError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(f"cannot serve on {host} port {port}: {error}") from None
    return bound


def socket_of(options: ServeOptions) -> socket.socket:
    """The socket that the options name."""
    if options.unix_socket is None:
        return bound_socket(options.host, options.port)
    return bound_unix_socket(options.unix_socket)


def bound_unix_socket(path: Path) -> socket.socket:
    """A Unix socket bound to a path, for this user only. Raises ConfigError if that fails.

    A socket that an earlier server left there is replaced; another file, or a server that answers, is not.
    """
    bound = unix_socket()
    if bound is None:
        raise ConfigError("--unix-socket is not supported on this system")
    try:
        if path.is_socket():
            with socket.socket(bound.family) as other:
                if other.connect_ex(str(path)) == 0:
                    raise ConfigError(
                        f"{path} is already in use by another server: choose another --unix-socket"
                    )
            remove_file(path)
        bound.bind(str(path))
        path.chmod(0o600)
    except OSError as error:
        bound.close()
        raise ConfigError(f"cannot serve on {path}: {error.strerror or error}") from None
    except ConfigError:
        bound.close()
        raise
    return bound


def _check_certificate(certificate: Path, key: Path | None) -> None:
    """Raises ConfigError unless the files are a certificate and its key."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except (OSError, ssl.SSLError) as error:
        reason = error.strerror or str(error)
        raise ConfigError(f"--ssl-certfile {certificate} cannot be used: {reason}") from None


def announce(names: Sequence[str], settings: ServerSettings, bound: socket.socket) -> None:
    """Begins to listen, and prints to stderr the URL, the models' names, and a warning without keys."""
    bound.listen()  # a reader of the URL may connect at once, before uvicorn accepts
    if isinstance(path := bound.getsockname(), str):
        say(
            f"serving {', '.join(names) or 'no model yet'} on the Unix socket {path}",
        )
        return
    scheme = "http" if settings.ssl_certfile is None else "https"
    host, port = path[:2]
    shown = f"[{host}]" if ":" in host else host
    page = f", a page to chat on at {scheme}://{shown}:{port}/" if settings.has_page else ""
    listed = ", ".join(names) or "no model yet"
    say(f"serving {listed} on {scheme}://{shown}:{port}/v1{page}")
    if not settings.api_keys and host not in _LOOPBACK:
        say(
            f"warning: everybody who reaches {host} may use this server: set KUKRI_API_KEY or --api-key-file",
        )


def run_app(app: Any, settings: ServerSettings, bound: socket.socket) -> None:
    """Serves an application until SIGTERM or SIGINT. Raises the error of a start that failed."""
    import uvicorn

    from kukri.server.connection import uvicorn_options

    class Server(uvicorn.Server):
        """Ends with status 0 on SIGTERM or SIGINT, when running answers are finished; at once on a second."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Stops taking requests; a second signal ends the running ones too."""
            app.state.registry.drain(settings.drain_s)
            self.force_exit = self.should_exit
            self.should_exit = True

        async def on_tick(self, counter: int) -> bool:
            """Ends, too, when the server is idle for long."""
            return await super().on_tick(counter) or idle.is_over(self.server_state.total_requests)

    idle = IdleExit(app.state.registry, settings)
    if settings.api_key_file is not None:
        on_hangup(lambda: reread_keys(app, settings.api_key_file))
    config = uvicorn.Config(app, **uvicorn_options(settings))
    gc.collect()
    gc.freeze()  # these objects stay, and looking through them again would stop all streams for 40 ms
    gc.set_threshold(700)  # again, because a search through 50,000 young objects stops all streams too
    with suppress(SystemExit):  # the start failed: its reason follows
        Server(config).run(sockets=[bound])
    if app.state.failure is not None:
        raise app.state.failure
