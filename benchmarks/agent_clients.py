"""Coding agents that are pointed at a local server: how each is installed, configured and run.

Versions are pinned; the settings are those that a person would write to use a server of their own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

MODEL = "local"  # the name that the server has for the model
_CONTEXT_TOKENS, _MOST_TOKENS = 32768, 1024


@dataclass(frozen=True)
class Client:
    """An agent: the package that has its program, and what makes it use the server at `url`.

    `set_up(home, url)` writes its settings below `home`, which is its HOME, and returns its environment;
    `command` are its arguments but for the prompt, which is the last.
    """

    name: str
    package: str  # on npm, or on PyPI if it has "==" in it
    program: str
    command: tuple[str, ...]
    set_up: Callable[[Path, str], dict[str, str]]


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def _codex(home: Path, url: str) -> dict[str, str]:
    _write(
        home / ".codex/config.toml",
        f'model = "{MODEL}"\nmodel_provider = "kukri"\nmodel_context_window = {_CONTEXT_TOKENS}\n'
        f'[model_providers.kukri]\nname = "kukri"\nbase_url = "{url}/v1"\nwire_api = "responses"\n'
        'env_key = "OPENAI_API_KEY"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        "stream_idle_timeout_ms = 3600000\n",
    )
    return {"OPENAI_API_KEY": "none"}


def _qwen(home: Path, url: str) -> dict[str, str]:
    security = {"auth": {"selectedType": "openai"}}
    settings = {"security": security, "privacy": {"usageStatisticsEnabled": False}}
    _write(home / ".qwen/settings.json", json.dumps(settings))
    return {"OPENAI_API_KEY": "none", "OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": MODEL}


def _opencode(home: Path, url: str) -> dict[str, str]:
    limit = {"context": _CONTEXT_TOKENS, "output": _MOST_TOKENS}
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "kukri",
        "options": {"baseURL": f"{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": limit}},
    }
    settings = {"provider": {"kukri": provider}, "model": f"kukri/{MODEL}", "permission": "allow"}
    _write(home / ".config/opencode/opencode.json", json.dumps(settings | {"autoupdate": False}))
    return {}


def _pi(home: Path, url: str) -> dict[str, str]:
    model = {"id": MODEL, "contextWindow": _CONTEXT_TOKENS, "maxTokens": _MOST_TOKENS}
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": [model]}
    _write(home / ".pi/agent/models.json", json.dumps({"providers": {"kukri": provider}}))
    return {}


def _claude(home: Path, url: str) -> dict[str, str]:
    return {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": str(_MOST_TOKENS),
        "IS_SANDBOX": "1",  # it refuses to work without questions as root elsewhere
        "API_TIMEOUT_MS": "3600000",
    }


def _aider(home: Path, url: str) -> dict[str, str]:
    return {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"}


_CLAUDE = Client(
    "claude-code",
    "@anthropic-ai/claude-code@2.1.332",
    "claude",
    ("--dangerously-skip-permissions", "-p"),
    _claude,
)
CLIENTS = [
    Client(
        "codex",
        "@openai/codex@0.169.0",
        "codex",
        ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        _codex,
    ),
    Client("qwen-code", "@qwen-code/qwen-code@0.24.4", "qwen", ("--yolo", "-p"), _qwen),
    Client("opencode", "opencode-ai@1.18.33", "opencode", ("run",), _opencode),
    Client(
        "pi",
        "@mariozechner/pi-coding-agent@0.73.1",
        "pi",
        ("--provider", "kukri", "--model", MODEL, "-p"),
        _pi,
    ),
    _CLAUDE,
    # as small models need it: among thirty tools, and 12,000 tokens about them, they lose their way
    replace(_CLAUDE, name="claude-code-bare", command=("--bare", "--tools", "Bash,Write", *_CLAUDE.command)),
    Client(
        "aider",
        "aider-chat==0.86.2",
        "aider",
        ("--yes-always", "--no-git", "--no-check-update", "--model", f"openai/{MODEL}", "--message"),
        _aider,
    ),
]
