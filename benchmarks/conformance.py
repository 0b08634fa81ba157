"""Client packages against `kukri serve`, each used as its documentation shows: a row of a table for each.

    python -m benchmarks.conformance                                 # all clients, at their newest versions
    python -m benchmarks.conformance cohere npm --environments DIR   # some, in environments that stay in DIR
    python -m benchmarks.conformance --python .venv/bin/python ollama openai    # as they are installed there
    python -m benchmarks.conformance lm_eval
    python -m benchmarks.conformance --loops --model qwen2.5-1.5b openai llm

A server with the default model is started, unless `--url` names one. Clients want different versions of each
other, so each package gets a virtual environment of its own, into which pip (or npm) installs its newest
version; its cases run there (`conformance_cases.py`, `conformance_frameworks.py`, `conformance_cases.mjs`).
What cannot be installed is said and is no failure. `--loops` runs loops of three tool calls
(`conformance_loops.py`), for which the model has to call tools by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks.harness import last_line, run, served
from kukri.formats import hub
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.tokenizer.huggingface_writer import tokenizer_files

_ROOT = Path(__file__).parent.parent
_OPTIONS = ("--alias", hub.DEFAULT_MODEL, "--any-model", "--max-requests", "4", "--log-level", "warning")
CLIENTS = {  # what is installed for a package, if that is more than the package
    "openai": (),
    "anthropic": (),
    "ollama": (),
    "cohere": (),
    "mistralai": (),
    "langchain-openai": (),
    "llama-index-llms-openai-like": ("llama-index-embeddings-openai-like",),
    "litellm": (),
    "pydantic-ai-slim": ("pydantic-ai-slim[openai]",),
    "openai-agents": (),
    "instructor": (),
    "haystack-ai": (),
    "dspy": ("numpy",),
    "smolagents": ("smolagents[openai]",),
    "llm": (),
    "npm": ("openai", "ai", "@ai-sdk/openai-compatible", "ollama", "@anthropic-ai/sdk", "zod"),
}
_MORE: dict[str, tuple[str, ...]] = {"lm_eval": ("lm-eval[api]", "transformers")}  # if it is named
FRAMEWORKS = "benchmarks.conformance_frameworks"  # which has the cases of conformance_cases, too
COLUMNS = ("chat", "stream", "tools", "structured", "embeddings", "rerank", "more")
_REFUSED = re.compile(r"\b(?:400|404|405|422|501)\b")  # the status with which a server refuses by name


def installed(package: str, folder: Path) -> str:
    """Makes the environment of a package in a folder, unless it is there; returns why it failed, or ""."""
    wanted = [package, *CLIENTS.get(package, _MORE.get(package, ()))]
    if (folder / "done").exists():
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    if package == "npm":
        if shutil.which("npm") is None:
            return "npm was not found"
        command = ["npm", "install", "--no-audit", "--no-fund", *wanted[1:]]
    else:
        venv.create(folder, with_pip=True)
        command = [*_pip(folder), *wanted]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        return last_line(done.stderr)
    (folder / "done").touch()
    return ""


def _pip(folder: Path) -> list[str]:
    return [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]


def run_cases(python: str, url: str, only: list[str], *, has_loops: bool = False) -> list[dict[str, Any]]:
    """Return the outcomes of a Python's cases: package, version, about, case, error (None if it passed)."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    module = "benchmarks.conformance_loops" if has_loops else FRAMEWORKS
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        environment["KUKRI_TOKENIZER_DIR"] = folder
        return outcomes_of([python, "-m", module, url, *only], environment)


def run_npm(folder: Path, url: str) -> list[dict[str, Any]]:
    """Return the outcomes of the JavaScript clients that a folder has."""
    # beside the packages, where Node.js looks for them
    program = shutil.copy(Path(__file__).with_suffix("").with_name("conformance_cases.mjs"), folder)
    return outcomes_of(["node", str(Path(program).resolve()), url], dict(os.environ), folder)


def outcomes_of(
    command: list[str], environment: dict[str, str], folder: Path | None = None
) -> list[dict[str, Any]]:
    """Return the outcomes that a process in a folder prints, each as a line of JSON."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"package"')]


def write_tokenizer(folder: Path) -> None:
    """Writes the default model's tokenizer as transformers reads it."""
    with open_checkpoint(hub.resolve(None)) as checkpoint:
        assert isinstance(checkpoint.tokenizer, GGUFFile)
        for name, contents in tokenizer_files(checkpoint.tokenizer).items():
            (folder / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))


def state(outcome: dict[str, Any]) -> str:
    """Return what became of a case: right, refused (the server says why), fails, or not installed."""
    if outcome["error"] is None:
        return "right"
    if outcome["version"] == "not installed":
        return "not installed"
    return "refused" if _REFUSED.search(outcome["error"]) else "fails"


def table(outcomes: list[dict[str, Any]]) -> str:
    """Return a row for each package as Markdown, then the reason of each case that is not right."""
    columns = [name for name in COLUMNS if any(one["about"] == name for one in outcomes)]
    columns += sorted({one["about"] for one in outcomes} - set(COLUMNS) - {""})
    lines = [f"| client | version | {' | '.join(columns)} |", "| --- " * (2 + len(columns)) + "|"]
    reasons = []
    for package in dict.fromkeys(outcome["package"] for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome["package"] == package]
        cells = [_cell(one for one in own if one["about"] == name) for name in columns]
        lines.append(f"| {package} | {own[0]['version']} | {' | '.join(cells)} |")
        reasons += [
            f"- {package}, {one['case'] or 'installation'}: {state(one)}: {one['error']}"
            for one in own
            if state(one) != "right"
        ]
    return "\n".join(lines + ([""] if reasons else []) + reasons)


def _cell(outcomes: Iterable[dict[str, Any]]) -> str:
    states = [state(outcome) for outcome in outcomes]
    n_right = states.count("right")
    others = [name for name in dict.fromkeys(states) if name != "right"]
    if len(states) < 2 or not others:
        return (states or [""])[0]
    return ", ".join([f"{n_right} of {len(states)} right", *others])


def run_clients(url: str, packages: Iterable[str], folder: Path) -> list[dict[str, Any]]:
    """Return the outcomes of packages, each in an environment of its own below a folder."""
    outcomes = []
    for package in packages:
        print(f"{package} …", file=sys.stderr, flush=True)
        if reason := installed(package, folder / package):
            facts = {"package": package, "version": "not installed", "about": "", "case": ""}
            outcomes.append({**facts, "error": reason})
        elif package == "npm":
            outcomes += run_npm(folder / package, url)
        else:
            outcomes += run_cases(str(folder / package / "bin" / "python"), url, [package])
    return outcomes


def main() -> None:
    """Runs the cases, prints the table and one line of JSON; exits with 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", help="Python with the client packages, in place of new environments")
    parser.add_argument("--environments", type=Path, help="directory of environments that stay")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="the model of the server that is started; the default one")
    parser.add_argument("--loops", action="store_true", help="loops of three tool calls")
    parser.add_argument("packages", nargs="*", help="those to run; all if none is named")
    given = parser.parse_args()

    def outcomes_at(url: str) -> list[dict[str, Any]]:
        if given.python or given.loops:
            return run_cases(given.python or sys.executable, url, given.packages, has_loops=given.loops)
        with tempfile.TemporaryDirectory() as scratch:
            return run_clients(url, given.packages or CLIENTS, given.environments or Path(scratch))

    if given.url:
        outcomes = outcomes_at(given.url)
    else:
        with served(hub.resolve(given.model), *_OPTIONS) as (_, url):
            outcomes = outcomes_at(url)
    print(table(outcomes))
    counts = {name: sum(state(one) == name for one in outcomes) for name in ("right", "refused", "fails")}
    print(json.dumps({"n_cases": len(outcomes), **counts}))
    raise SystemExit(1 if counts["fails"] or not outcomes else 0)


if __name__ == "__main__":
    run(main)
