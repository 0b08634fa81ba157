"""`kukri serve`: a model over HTTP until SIGTERM or SIGINT."""

from __future__ import annotations

import os
import socket
import sys
from math import ceil
from pathlib import Path
from types import FrameType
from typing import Any

from kukri.errors import ConfigError, UnsupportedError
from kukri.terminal.options import ServeOptions, size_bytes
from kukri.terminal.progress import loading_bar

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOG_LEVELS = ("debug", "info", "warning", "error")


def serve_model(model: str | None, options: ServeOptions, loading: dict[str, Any]) -> None:
    """Loads a model and serves it; `loading` are options of LLM. Checks the options before loading."""
    require_web_stack()
    from kukri.server.logs import configure_logs
    from kukri.server.settings import ServerSettings

    settings = ServerSettings(
        model_names=tuple(dict.fromkeys([*(options.alias or []), default_name(model)])),
        api_keys=read_keys(options.api_key_file),
        allowed_hosts=host_names(options.host, options.allowed_host or []),
        trusted_proxies=tuple(options.trusted_proxy or []),
        cors_origins=tuple(options.cors_origin or []),
        any_model=options.any_model,
        max_body_bytes=size_bytes(options.max_body, "--max-body"),
        max_waiting=options.max_waiting,
        rate_limit=options.rate_limit,
        deadline_s=options.deadline_s,
        drain_s=options.drain_s,
        has_page=not options.no_page,
    )
    if options.log_level not in _LOG_LEVELS:
        raise ConfigError(f"the log level must be one of {', '.join(_LOG_LEVELS)}, not {options.log_level!r}")
    template = None
    if options.chat_template_file is not None:
        template = _read(options.chat_template_file, "chat template")
    configure_logs(as_json=options.log_json, level=options.log_level)
    with bound_socket(options.host, options.port) as bound:
        from kukri.llm import LLM
        from kukri.server.app import create_app

        with loading_bar() as progress:
            llm = LLM(model, chat_template=template, progress=progress, **loading)
        with llm:
            _warm_up(llm)
            app = create_app(llm, settings)
            _announce(settings, bound, llm)
            _run(app, settings, bound)


def require_web_stack(command: str = "kukri serve") -> None:
    """Raises UnsupportedError, with the remedy, if the extra `serve` is not installed."""
    try:
        import fastapi  # noqa: F401
        import prometheus_client  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise UnsupportedError(
            f"{command} needs the package {error.name}: install it with pip install 'kukri[serve]'"
        ) from None


def default_name(model: str | None) -> str:
    """The name under which a model is served: a known name as it is, a path without its directories."""
    from kukri.formats.hub import DEFAULT_MODEL

    if model is None:
        return DEFAULT_MODEL
    path = Path(model)
    is_file = path.suffix == ".gguf" or path.exists()
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if is_file else model


def read_keys(file: Path | None) -> tuple[str, ...]:
    """The API keys, each after a name if it has one: of a file, one a line; or $KUKRI_API_KEY, by commas.

    In a file, `#` begins a comment.
    """
    if file is None:
        keys = os.environ.get("KUKRI_API_KEY", "").split(",")
    else:
        lines = _read(file, "API keys").splitlines()
        keys = [line.partition("#")[0] for line in lines]
    found = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if file is not None and not found:
        raise ConfigError(f"{file} holds no API key: write one a line")
    return found


def host_names(host: str, more: list[str]) -> tuple[str, ...]:
    """The names that Host headers may have: on loopback its own and `more`, else `more`, or any name."""
    if host not in _LOOPBACK and not more:
        return ()
    return tuple(dict.fromkeys(name.lower() for name in (*_LOOPBACK, host, *more)))


def _read(file: Path, name: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of the {name} cannot be read: {error}") from None


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


def _warm_up(llm: Any) -> None:
    """Does work that requests would wait for: compiles, and reads weights that are not yet in memory.

    The embedding is read row by row, a token's at a time: one that has not been seen would wait for a disk
    in the middle of every stream, and memory would grow for as long as new tokens come up.
    """
    from kukri.mapped_files import fetch_pages

    fetch_pages(llm.model.embedding.weight.data)
    first = llm.tokenizer.bos_id or 0
    for temperature in (0.0, 1.0):
        llm.generate([first], max_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)


def _announce(settings: Any, bound: socket.socket, llm: Any) -> None:
    """Prints to stderr the URL, the models' names, the size of the KV cache, and a warning without keys."""
    host, port = bound.getsockname()[:2]
    engine, config = llm.engine, llm.engine_config
    n_tokens = engine.pool.n_pages * engine.pool.page_tokens
    size = engine.runner.cache.n_bytes / 2**20
    shown = f"[{host}]" if ":" in host else host
    page = f", a page to chat on at http://{shown}:{port}/" if settings.has_page else ""
    print(f"serving {', '.join(settings.model_names)} on http://{shown}:{port}/v1{page}", file=sys.stderr)
    print(
        f"KV cache {size:,.0f} MiB: {n_tokens:,} tokens, {config.max_requests} requests at a time, "
        f"{engine.max_context:,} tokens of context",
        file=sys.stderr,
    )
    if not settings.api_keys and host not in _LOOPBACK:
        print(
            f"warning: everybody who reaches {host} may use this server: set KUKRI_API_KEY or --api-key-file",
            file=sys.stderr,
        )
    sys.stderr.flush()


def _run(app: Any, settings: Any, bound: socket.socket) -> None:
    import uvicorn

    from kukri.server.header_timeout import protocol_with_timeout

    class Server(uvicorn.Server):
        """Ends with status 0 on SIGTERM or SIGINT, when running answers are finished; at once on a second."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Stops taking requests; a second signal ends the running ones too."""
            app.state.service.bridge.drain(settings.drain_s)
            self.force_exit = self.should_exit
            self.should_exit = True

    config = uvicorn.Config(
        app,
        http=protocol_with_timeout(settings.headers_s),
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=ceil(settings.drain_s) + 5,  # the bridge ends what runs before that
    )
    Server(config).run(sockets=[bound])
