"""Options that only the server has, besides the options of `kukri.terminal.options`."""

from pathlib import Path
from typing import Any

import typer

from kukri.server.settings import setting_fields
from kukri.terminal.command import given, option
from kukri.terminal.options import flags


def _use_config(context: typer.Context, file: Path | None) -> Path | None:
    """Take options that the command line leaves out from a configuration file."""
    if file is not None and not context.resilient_parsing:
        from kukri.terminal.config_file import option_defaults

        context.default_map = option_defaults(file, context.command.params)
    return file


@flags(setting_fields().values())
class ServeOptions:
    """Options of the HTTP server: where it listens, and the settings that have flags."""

    host: str = option("Address to listen on; 0.0.0.0 for all.", default="127.0.0.1", metavar="ADDRESS")
    port: int = option(
        "Port to listen on; 0 picks a free one.", "--port", "-p", default=8000, min=0, max=65535, metavar="N"
    )
    unix_socket: Path | None = option("Listen on this Unix socket, not on a port.", metavar="PATH")
    config: Path | None = option(
        "TOML file with these options and with models.",
        metavar="FILE",
        is_eager=True,
        callback=_use_config,
    )
    preset: list[str] | None = option(
        "Serve a model with a system message, parameters and more, from TOML or a Modelfile; repeatable.",
        metavar="[NAME=]FILE",
    )
    alias: list[str] | None = option("Another name for the first model; repeatable.", metavar="NAME")
    pin: list[str] | None = option("Load this model at startup and keep it; repeatable.", metavar="NAME")
    chat_template_file: Path | None = option("Jinja chat template, instead of the model's.", metavar="FILE")
    log_json: bool = option("Log as JSON, one object per line.", "--log-json", default=False)
    log_level: str = option("debug, info, warning or error.", default="info", metavar="LEVEL")

    def settings(self) -> dict[str, Any]:
        """The settings that are given. Raises ConfigError."""
        return {name: value for name, value in given(self).items() if name in setting_fields()}
