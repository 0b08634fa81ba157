"""Features that only some systems have, taken away: kukri imports, loads and generates all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import kukri
from kukri import LLM, SamplingParams
from tests.tiny_gguf import write_tiny

# Keeps from kukri, in the process that runs it, what Windows lacks; other packages go by the system's name
WITHOUT = """
import builtins, os, signal, sys, types

class Lesser(types.ModuleType):
    def __init__(self, module, missing):
        super().__init__(module.__name__)
        self.module, self.missing = module, missing.split()

    def __getattr__(self, name):
        if name in self.missing:
            raise AttributeError(name)
        return getattr(self.module, name)

missing = ("fcntl", "resource", "termios", "tty", "pty", "pwd", "grp", "readline", "syslog")
lesser = {
    "os": Lesser(
        os,
        "fork killpg nice sysconf sched_getaffinity geteuid getuid getegid getgid setsid fchmod mkfifo uname "
        "O_NOFOLLOW O_CLOEXEC O_NONBLOCK O_DIRECTORY",
    ),
    "signal": Lesser(signal, "setitimer ITIMER_PROF SIGKILL SIGPROF SIGALRM alarm"),
}
whole = builtins.__import__

def restricted(name, globals=None, *rest):
    if (globals or {}).get("__name__", "").partition(".")[0] == "kukri":
        if name in missing:
            raise ImportError(f"no {name} here")
        if name in lesser:
            return lesser[name]
    return whole(name, globals, *rest)

builtins.__import__ = restricted
"""
GENERATE = """
from kukri import LLM, SamplingParams
params = SamplingParams(temperature=0, max_tokens=8)
with LLM(sys.argv[1], max_context=64) as llm:
    print(llm.chat([{"role": "user", "content": "Hi"}], params).token_ids)
"""
IMPORT = """
import importlib, pkgutil, kukri
for module in pkgutil.walk_packages(kukri.__path__, "kukri."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except ImportError as error:
            if (error.name or "").partition(".")[0] not in ("ray", "matplotlib", "triton", "llm"):
                raise
"""


def run_without(source: str, *arguments: object, **env: str) -> str:
    path = os.pathsep.join([str(Path(kukri.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT + source, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": path} | env,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.full
def test_every_module_imports() -> None:
    """Would catch a module of POSIX systems imported at the top of a file."""
    run_without(IMPORT)


@pytest.mark.full
def test_a_generation(tmp_path: Path) -> None:
    """Would catch a call that only POSIX systems have, from finding the cores to rendering a template."""
    path = write_tiny(tmp_path / "tiny.gguf")
    with LLM(path, max_context=64) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        expected = llm.chat([{"role": "user", "content": "Hi"}], params).token_ids
    assert run_without(GENERATE, path).strip() == str(expected)
