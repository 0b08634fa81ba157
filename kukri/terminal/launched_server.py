"""The server of `kukri launch`: one for each user, model and set of options, which its agents share.

Who starts a server locks a file and lets the server inherit the lock, so the lock is free exactly when no
server lives, however it ended. An agent inherits a shared lock of another file, which the server takes for
itself before it ends for idleness: no launch gets a server that is about to end.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path

from kukri import __version__
from kukri.config import KVType
from kukri.dataclass import dataclass
from kukri.errors import ConfigError, KukriError, UnsupportedError, brief
from kukri.host.os_calls import lock_file, locked
from kukri.host.private_files import make_private, open_private, write_private
from kukri.terminal.progress import waiting
from kukri.terminal.ps import fetched

_IDLE = "30m"  # after which a server without agents ends
_KV_TYPE: KVType = "q8_0"
_POLL_S = 0.05
_USUAL_CONTEXT = 1 << 15  # tokens, of a server that does not tell
_MODEL = re.compile(r"[\w./:@+ -]{1,256}")
_ANNOUNCED = re.compile(r"^serving .* on (http://127\.0\.0\.1:[0-9]+)/v1", re.MULTILINE)


@dataclass(frozen=True)
class LaunchedServer:
    """A server that answers: its URL without /v1, key, model and the model's context in tokens.

    `name` is one that files for its agents may have: the same when the server starts again.
    """

    name: str
    url: str
    key: str
    model: str
    context: int


def state_directory() -> Path:
    """The directory of keys, locks and logs, in the user's state directory."""
    from platformdirs import user_state_path

    return user_state_path("kukri") / "launch"


def key_file() -> Path:
    """The file of the user's key, which only the user may read."""
    return state_directory() / "key"


def serve_command(model: str | None, more: Sequence[str]) -> list[str]:
    """Return the command of a server for agents; the options `more` come last and so decide."""
    from platformdirs import user_cache_path

    if model is not None and Path(model).exists():
        model = str(Path(model).absolute())  # the server has a directory of its own
    command = [sys.executable, "-m", "kukri", "serve", *([] if model is None else [model])]
    command += ["--port", "0", "--api-key-file", str(key_file()), "--any-model", "--log-level", "warning"]
    command += ["--max-requests", "4", "--kv-type", _KV_TYPE, "--idle-exit", _IDLE]
    if "KUKRI_PREFIX_DIR" not in os.environ:
        command += ["--prefix-dir", str(user_cache_path("kukri") / "prefixes")]
    return [*command, *more]


def running_server(url: str, keys: str | None, model: str | None, name: str = "") -> LaunchedServer:
    """Return the server at a URL, with its first model or the one that is named. Raises KukriError."""
    url, key = url.rstrip("/").removesuffix("/v1"), (keys or "").partition(",")[0] or "none"
    name = name or _digest(url)
    try:
        models = json.loads(fetched(url, "/v1/models", keys))["data"]
        found = next(one for one in models if model in (None, one["id"]))
        if not _MODEL.fullmatch(found["id"]):  # it stands in settings that agents read as JSON or code
            raise KukriError(
                f"the model's name {brief(found['id'])} is not supported: give --alias to the server"
            )
        context = int(found.get("max_model_len") or _USUAL_CONTEXT)
        return LaunchedServer(name, url, key, found["id"], context)
    except StopIteration:
        raise ConfigError(f"the model {model!r} was not found at {url}: choose another --model") from None
    except (ValueError, KeyError, TypeError):
        raise KukriError(f"the server at {url} must list its models as OpenAI's API does") from None


def started_server(model: str | None, more: Sequence[str]) -> LaunchedServer:
    """Return a server for a model when it answers, started if none runs with these options.

    This process, and the program that takes its place, keep the server from ending for idleness. Raises
    KukriError if it does not start.
    """
    from kukri.formats import hub
    from kukri.opening.memory import fitted, is_open_name
    from kukri.opening.model_options import ModelOptions
    from kukri.terminal.serve import require_web_stack

    require_web_stack("kukri launch")
    directory = state_directory()
    make_private(directory)
    if is_open_name(model):  # the server keeps the file, whatever else takes memory later
        model = fitted(ModelOptions(model=model, fit=True, kv_type=_KV_TYPE)).model
    path = hub.resolve(model).absolute()  # fetched here, where its progress is seen
    command = serve_command(model, more)
    name = _digest(__version__, str(path), str(path.stat().st_mtime_ns), *command)
    lock, log, users = (directory / f"{name}.{kind}" for kind in ("lock", "log", "users"))
    command += ["--in-use", str(users)]
    kept = lock_file(users, is_shared=True)
    if kept is None:
        raise UnsupportedError(f"the directory {directory}, without locks, is not supported: use --url")
    os.set_inheritable(kept, True)
    with waiting("the server for agents starts") as show:
        is_ours = False
        while True:
            with locked(directory):  # so that a log belongs to the server which holds the lock
                mine = lock_file(lock, wait=False)
                if mine is not None and not is_ours:
                    _user_key()
                    _start(command, log, mine)
                said = log.read_text("utf-8", "replace")
            if mine is None and (announced := _ANNOUNCED.search(said)):
                return running_server(announced[1], _user_key(), None, name)
            last = (said.strip().splitlines() or [""])[-1]
            if mine is not None:
                os.close(mine)
                if is_ours:
                    raise KukriError(f"the server for agents ended: {last} (its log is {log})")
                is_ours = True
            show(last)
            time.sleep(_POLL_S)


def _digest(*facts: str) -> str:
    return sha256("\0".join(facts).encode()).hexdigest()[:16]


def _start(command: Sequence[str], log: Path, lock: int) -> None:
    """Start a server that inherits a lock, out of reach of this terminal's signals."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        subprocess.Popen(
            command,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            pass_fds=(lock,),
        )
    finally:
        os.close(descriptor)


def _user_key() -> str:
    """The key of this user's servers, random and made when it is first needed."""
    path = key_file()
    if not path.exists():
        write_private(path, secrets.token_urlsafe(32).encode())
    with open_private(path) as file:
        return file.read().decode()
