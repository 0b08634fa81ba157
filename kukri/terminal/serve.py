"""`kukri serve`: a model over HTTP until a signal says to end."""

from __future__ import annotations

import os
import re
import socket
import sys
from pathlib import Path
from types import FrameType
from typing import Any

from kukri.errors import ConfigError, UnsupportedError
from kukri.terminal.progress import loading_bar

_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_LOG_LEVELS = ("debug", "info", "warning", "error")
_UNITS = {"": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def serve_model(
    model: str | None,
    *,
    host: str,
    port: int,
    aliases: list[str],
    api_key_file: Path | None,
    cors_origins: list[str],
    any_model: bool,
    chat_template_file: Path | None,
    loading: dict[str, Any],
    kv_memory: str | None,
    max_waiting: int,
    max_body: str,
    rate_limit: int | None,
    deadline_s: float | None,
    drain_s: float,
    has_page: bool,
    log_json: bool,
    log_level: str,
) -> None:
    """Loads a model and serves it. What is wrong with the options is found before the model is loaded.

    `loading`: what LLM takes beside the model and the cache's size.
    """
    require_web_stack()
    from kukri.server.logs import configure_logs
    from kukri.server.settings import ServerSettings

    settings = ServerSettings(
        model_names=tuple(dict.fromkeys([*aliases, default_name(model)])),
        api_keys=read_keys(api_key_file),
        cors_origins=tuple(cors_origins),
        any_model=any_model,
        max_body_bytes=n_bytes(max_body, "max_body"),
        max_waiting=max_waiting,
        rate_limit=rate_limit,
        deadline_s=deadline_s,
        drain_s=drain_s,
        has_page=has_page,
    )
    if log_level not in _LOG_LEVELS:
        raise ConfigError(f"the log level must be one of {', '.join(_LOG_LEVELS)}, not {log_level!r}")
    kv_bytes = None if kv_memory is None else n_bytes(kv_memory, "kv_memory")
    template = None if chat_template_file is None else _read(chat_template_file, "chat template")
    configure_logs(as_json=log_json, level=log_level)
    with bound_socket(host, port) as bound:
        from kukri.llm import LLM
        from kukri.server.app import create_app

        with loading_bar() as progress:
            llm = LLM(model, kv_bytes=kv_bytes, chat_template=template, progress=progress, **loading)
        with llm:
            _warm_up(llm)
            app = create_app(llm, settings)
            _announce(settings, bound, llm)
            _run(app, settings, bound)


def require_web_stack(command: str = "kukri serve") -> None:
    """Raises UnsupportedError, with the way out, where the extra `serve` is not installed."""
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
    """The API keys: of a file, one a line, `#` begins a comment; or $KUKRI_API_KEY, separated by commas."""
    if file is None:
        keys = os.environ.get("KUKRI_API_KEY", "").split(",")
    else:
        lines = _read(file, "API keys").splitlines()
        keys = [line.partition("#")[0] for line in lines]
    found = tuple(dict.fromkeys(key.strip() for key in keys if key.strip()))
    if file is not None and not found:
        raise ConfigError(f"{file} holds no API key: write one a line")
    return found


def _read(file: Path, name: str) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the file of the {name} cannot be read: {error}") from None


def n_bytes(text: str, name: str) -> int:
    """The bytes of a size such as 2MiB, 500KB or 4096."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?) ?([KMG]i?B|)", text)
    if match is None:
        raise ConfigError(f"{name} must be a size such as 2MiB or 1.5GiB, not {text!r}")
    return int(float(match[1]) * _UNITS[match[2]])


def bound_socket(host: str, port: int) -> socket.socket:
    """A socket on the address, not yet listening. Raises ConfigError where the address cannot be had."""
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
    """Does what requests would have to wait for: compiles, and reads what is still in the file alone.

    The embedding is read row by row, a token's at a time: one that has not been seen would wait for a disk
    in the middle of every stream, and memory would grow for as long as new tokens come up.
    """
    from kukri.mapped_files import fetch_pages

    fetch_pages(llm.model.embedding.weight.data)
    first = llm.tokenizer.bos_id or 0
    for temperature in (0.0, 1.0):
        llm.generate([first], max_tokens=2, temperature=temperature, top_p=0.9, ignore_eos=True)


def _announce(settings: Any, bound: socket.socket, llm: Any) -> None:
    """Says on stderr what is served, to whom, and how much memory that takes."""
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

    class Server(uvicorn.Server):
        """Ends with status 0 on SIGTERM or SIGINT, when running answers are finished; at once on a second."""

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            """Stops taking requests; a second signal ends the running ones too."""
            app.state.service.bridge.is_draining = True
            self.force_exit = self.should_exit
            self.should_exit = True

    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        ws="none",
        timeout_graceful_shutdown=max(round(settings.drain_s), 1),
    )
    Server(config).run(sockets=[bound])
