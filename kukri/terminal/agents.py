"""The agents that `kukri launch` knows: how each is installed, and what makes it use a server.

Each row was tried with the version that it names. Its texts may hold the names of `FILLED` in braces, which
are filled in when the agent runs. Only texts of variables and files may hold the key, because
arguments can be seen by other users.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

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


# in TOML, for codex' option -c
_CODEX = (
    'model="{model}"',
    'model_provider="kukri"',
    "model_context_window={context}",
    'model_providers.kukri={name="kukri", base_url="{url}/v1", wire_api="responses", '
    'env_key="KUKRI_API_KEY", stream_idle_timeout_ms=3600000}',
)
_CLINE = (
    '{"version": 1, "lastUsedProvider": "openai-compatible", "providers": {"openai-compatible": {"settings": '
    '{"provider": "openai-compatible", "apiKey": "{key}", "model": "{model}", "baseUrl": "{url}/v1"}, '
    '"updatedAt": "2026-11-30T00:00:00.000Z", "tokenSource": "manual"}}}'
)
_OPENCODE = (
    '{"provider": {"kukri": {"npm": "@ai-sdk/openai-compatible", "name": "kukri", "options": '
    '{"baseURL": "{url}/v1", "apiKey": "{key}"}, "models": {"{model}": {"limit": '
    '{"context": {context}, "output": {answer}}}}}}, "model": "kukri/{model}", '
    '"small_model": "kukri/{model}", "autoupdate": false}'
)
_PI = """\
export default function (pi) {
  pi.registerProvider("kukri", {
    baseUrl: "{url}/v1", apiKey: "KUKRI_API_KEY", api: "openai-completions",
    models: [{
      id: "{model}", name: "{model}", reasoning: false, input: ["text"], contextWindow: {context},
      maxTokens: {answer}, cost: { input: 0, output: 0, cacheRead: 0, cacheWrite: 0 },
    }],
  });
}
"""

_CLAUDE: dict[str, str | None] = {
    "ANTHROPIC_BASE_URL": "{url}",
    "ANTHROPIC_AUTH_TOKEN": "{key}",
    "ANTHROPIC_API_KEY": None,  # it would be sent too
    "ANTHROPIC_MODEL": "{model}",
    "ANTHROPIC_SMALL_FAST_MODEL": "{model}",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "{context}",
    "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "{answer}",
    "API_TIMEOUT_MS": "3600000",
}

AGENTS = {
    "aider": Agent(
        "aider",
        "python3 -m pip install aider-chat",
        "0.86.2",
        ("--model", "openai/{model}"),
        {"OPENAI_API_KEY": "{key}", "OPENAI_API_BASE": "{url}/v1"},
        context=2048,
    ),
    "claude": Agent(
        "claude",
        "npm install -g @anthropic-ai/claude-code",
        "2.1.332",
        environment=_CLAUDE,
        context=4096,
        own=(
            ".claude/settings.json",
            json.dumps({"env": {n: v for n, v in _CLAUDE.items() if v is not None}}),
        ),
    ),
    "cline": Agent(
        "cline",
        "npm install -g cline",
        "3.0.65",
        ("--data-dir", "{home}/cline", "--provider", "openai-compatible", "--model", "{model}"),
        files={"cline/settings/providers.json": _CLINE},
        context=8192,
    ),
    "codex": Agent(
        "codex",
        "npm install -g @openai/codex",
        "0.171.0",
        tuple(part for setting in _CODEX for part in ("-c", setting)),
        {"KUKRI_API_KEY": "{key}"},
        context=12288,
    ),
    "mini-swe-agent": Agent(
        "mini",
        "python3 -m pip install mini-swe-agent",
        "2.4.6",
        ("--model", "openai/{model}"),
        {
            "OPENAI_API_KEY": "{key}",
            "OPENAI_API_BASE": "{url}/v1",
            "MSWEA_CONFIGURED": "true",
            "MSWEA_COST_TRACKING": "ignore_errors",
        },
        context=2048,
    ),
    "opencode": Agent(
        "opencode",
        "npm install -g opencode-ai",
        "1.18.33",
        environment={"OPENCODE_CONFIG_CONTENT": _OPENCODE},
        own=(".config/opencode/opencode.json", _OPENCODE),
        context=10240,
    ),
    "pi": Agent(
        "pi",
        "npm install -g @mariozechner/pi-coding-agent",
        "0.73.1",
        ("--extension", "{home}/pi.ts", "--provider", "kukri", "--model", "{model}"),
        {"KUKRI_API_KEY": "{key}"},
        {"pi.ts": _PI},
        context=4096,
    ),
    "qwen-code": Agent(
        "qwen",
        "npm install -g @qwen-code/qwen-code",
        "0.24.4",
        ("--auth-type", "openai"),
        {
            "OPENAI_API_KEY": "{key}",
            "OPENAI_BASE_URL": "{url}/v1",
            "OPENAI_MODEL": "{model}",
            "QWEN_STREAM_IDLE_TIMEOUT_MS": "3600000",
        },
        context=20480,
    ),
}


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
