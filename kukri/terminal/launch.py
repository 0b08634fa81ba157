"""`kukri launch`: runs an agent in this terminal with a model of this machine."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from kukri.errors import ConfigError, brief
from kukri.host.private_files import make_private, write_private
from kukri.terminal.agents import AGENTS, FILLED, Agent, agent_of
from kukri.terminal.launched_server import (
    LaunchedServer,
    key_file,
    running_server,
    serve_command,
    started_server,
    state_directory,
)
from kukri.terminal.options import LaunchOptions
from kukri.terminal.own_settings import install, uninstall

_ANSWER_SHARE = 8  # part of the context that an answer may take
_MOST_ANSWER = 8192  # tokens


def launch_agent(name: str | None, arguments: Sequence[str], options: LaunchOptions) -> None:
    """Runs an agent in the place of this process, with a server that it finds or starts.

    Without a name it lists the agents. Raises KukriError if the agent is not installed, or has no server.
    """
    if name is None:
        _list_agents()
        return
    agent = agent_of(name, options.env or [])
    try:
        serve = shlex.split(options.serve or "")
    except ValueError as error:
        raise ConfigError(f"--serve {brief(options.serve)} must be options of a command: {error}") from None
    if options.print_only:
        _print(agent, arguments, serve, options)
        return
    if options.install or options.uninstall:
        _change_own(agent, options)
        return
    program = shutil.which(agent.program)
    if program is None:
        remedy = f": run `{agent.install}`" if agent.install else ""
        raise ConfigError(f"the program {agent.program!r} was not found{remedy}")
    if options.url is not None:
        server = running_server(options.url, options.api_key, options.model)
    else:
        server = started_server(options.model, serve)
    if server.context < agent.context:
        raise ConfigError(
            f"the context of {server.model!r} must be at least {agent.context} tokens for {name}, not "
            f"{server.context}: choose another --model"
        )
    home = state_directory() / "agents" / server.name
    agent = agent.filled(_facts(server, home))
    for path, text in agent.files.items():
        make_private((home / path).parent)
        write_private(home / path, text.encode())
    variables = {**os.environ, **agent.environment}
    environment = {name: text for name, text in variables.items() if text is not None}
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(program, [agent.program, *agent.arguments, *arguments], environment)


def _facts(server: LaunchedServer, home: Path) -> dict[str, str]:
    answer = min(server.context // _ANSWER_SHARE, _MOST_ANSWER)
    numbers = {"context": str(server.context), "answer": str(answer)}
    return numbers | {"url": server.url, "key": server.key, "model": server.model, "home": str(home)}


def _change_own(agent: Agent, options: LaunchOptions) -> None:
    """Adds an agent's settings to the user's own configuration, or takes them back. Raises ConfigError."""
    if agent.own is None:
        raise ConfigError(f"--install is not supported for {agent.program}: run it by `kukri launch`")
    file = Path.home() / agent.own[0]
    if options.uninstall:
        uninstall(file, json.loads(agent.own[1].replace("{context}", "0").replace("{answer}", "0")))
        print(f"{file} is as it was")
        return
    if options.url is None:
        raise ConfigError("--url is required by --install: servers that launch starts have changing ports")
    server = running_server(options.url, options.api_key, options.model)
    own = agent.filled(_facts(server, state_directory())).own
    assert own is not None, "it has one"
    print(f"{file} is changed; {install(file, json.loads(own[1]))} is the file as it was")


def _list_agents() -> None:
    for name, agent in AGENTS.items():
        found = shutil.which(agent.program)
        print(f"{name:<16}{'tried with ' + agent.version:<22}{found or 'to install: ' + agent.install}")


def _print(agent: Agent, arguments: Sequence[str], serve: Sequence[str], options: LaunchOptions) -> None:
    """Prints the commands of the server and the agent, for a shell, without the key."""
    from kukri.server.settings import default_name

    home, url, model = state_directory() / "agents", options.url, options.model
    facts = {name: name.upper() for name in FILLED} | {"model": default_name(model), "home": str(home)}
    facts["url"] = (url or "http://127.0.0.1:PORT").rstrip("/").removesuffix("/v1")
    filled = agent.filled(facts)
    if url is None:
        print("# the server, unless it runs already; KEY is in", key_file())
        print(shlex.join(["kukri", *serve_command(model, serve)[3:]]))
    for path, text in filled.files.items():
        print(f"# {home / path}\n{text}")
    print(f"# the agent, tried with {agent.version}" if agent.version else "# the agent")
    variables = [
        f"{name}={shlex.quote(text)}" for name, text in filled.environment.items() if text is not None
    ]
    taken = [part for name, text in filled.environment.items() if text is None for part in ("-u", name)]
    command = shlex.join([agent.program, *filled.arguments, *arguments])
    print(" ".join([*(["env", *taken] if taken else []), *variables, command]))
