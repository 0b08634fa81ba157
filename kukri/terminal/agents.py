"""The agents that `kukri launch` knows, by agents.yaml: how each is installed, and uses a server.

Texts there may hold the names of `FILLED` in braces, which are filled in when the agent runs. Only texts of
variables and files may hold the key, because arguments can be seen by other users.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from kukri.dataclass import dataclass, field, fields, replace
from kukri.errors import ConfigError, brief, close_matches

FILLED = ("url", "key", "model", "context", "answer", "home")


@dataclass(frozen=True)
class Agent:
    """An agent's program, and its settings for a server.

    `environment` are variables, None for one that is taken away; `files` are contents by path below the
    directory `{home}`, which only this user may read; `context` is the least number of tokens that the
    agent's own instructions and a short task need. `own` are the file below the user's home, and the settings
    in JSON, that `--install` adds to the agent's own configuration.
    """

    program: str
    install: str = ""
    version: str = ""
    arguments: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    context: int = 0
    own: tuple[str, str] | None = None

    def filled(self, facts: Mapping[str, str]) -> Agent:
        """Return the agent with the values of `FILLED` in its texts."""

        def fill(value: Any) -> Any:
            if isinstance(value, str):
                for name in FILLED:
                    value = value.replace(f"{{{name}}}", facts[name])
            elif isinstance(value, Mapping):
                value = {name: fill(one) for name, one in value.items()}
            elif isinstance(value, tuple):
                value = tuple(map(fill, value))
            return value

        return replace(self, **{one.name: fill(getattr(self, one.name)) for one in fields(self)})


def _agents() -> dict[str, Agent]:
    """The rows of agents.yaml."""
    rows = yaml.safe_load(Path(__file__).with_name("agents.yaml").read_bytes())
    for row in rows.values():
        row["arguments"] = tuple(row.get("arguments", ()))
        if "own" in row:
            file, settings = row["own"]
            row["own"] = file, settings if isinstance(settings, str) else json.dumps(settings)
    return {name: Agent(**row) for name, row in rows.items()}


AGENTS = _agents()


def agent_of(name: str, variables: list[str]) -> Agent:
    """Return the row of an agent, or any program with `variables` (NAME=VALUE), which come last.

    Raises ConfigError for a program that is neither an agent nor has variables, and for a wrong variable.
    """
    given: dict[str, str | None] = {}
    for text in variables:
        variable, separator, value = text.partition("=")
        if not (variable and separator):
            raise ConfigError(f"--env {brief(text)} must be NAME=VALUE")
        given[variable] = value
    if name not in AGENTS and not given:
        hint = close_matches(name, AGENTS) or f": use one of {', '.join(AGENTS)}, or give --env NAME=VALUE"
        raise ConfigError(f"the agent {brief(name)} was not found{hint}")
    row = AGENTS.get(name, Agent(name))
    return replace(row, environment={**row.environment, **given})
