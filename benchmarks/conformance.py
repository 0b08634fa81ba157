"""Client packages against `kukri serve`, each used as its documentation shows: how many cases pass.

    python -m benchmarks.conformance ollama openai anthropic langchain-openai   # those of the extra `test`
    python -m venv clients && clients/bin/pip install litellm mcp
    python -m benchmarks.conformance --python clients/bin/python litellm
    python -m venv evals && evals/bin/pip install "lm-eval[api]" transformers
    python -m benchmarks.conformance --python evals/bin/python lm_eval
    clients/bin/pip install openai anthropic langchain-openai litellm llm smolagents openai-agents
    python -m benchmarks.conformance --python clients/bin/python --loops --model qwen2.5-1.5b openai llm

A server with the default model is started, unless `--url` names one; the cases run in a process of the
clients' own environment (`conformance_cases.py`). instructor and pydantic-ai-slim[openai] want one
each: these packages ask for different versions of openai. `--loops` runs loops of three tool calls
(`conformance_loops.py`), for which the model has to call tools by itself.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import run, served
from kukri.formats import hub
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.tokenizer.huggingface_writer import tokenizer_files

_ROOT = Path(__file__).parent.parent
_OPTIONS = ("--alias", hub.DEFAULT_MODEL, "--any-model", "--max-requests", "4", "--log-level", "warning")


def run_cases(python: str, url: str, only: list[str], *, has_loops: bool = False) -> list[dict[str, Any]]:
    """The outcome of each case: package, version, case, and the error of one that failed, else None."""
    environment = {**os.environ, "PYTHONPATH": str(_ROOT), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    module = "benchmarks.conformance_loops" if has_loops else "benchmarks.conformance_cases"
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        environment["KUKRI_TOKENIZER_DIR"] = folder
        done = subprocess.run(
            [python, "-m", module, url, *only], stdout=subprocess.PIPE, text=True, env=environment
        )
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"package"')]


def write_tokenizer(folder: Path) -> None:
    """Writes the default model's tokenizer as transformers reads it."""
    with open_checkpoint(hub.resolve(None)) as checkpoint:
        assert isinstance(checkpoint.tokenizer, GGUFFile)
        for name, contents in tokenizer_files(checkpoint.tokenizer).items():
            (folder / name).write_text(contents if isinstance(contents, str) else json.dumps(contents))


def table(outcomes: list[dict[str, Any]]) -> str:
    """The number of cases that passed for each package, as Markdown."""
    lines = ["| package | version | passed | cases |", "| --- | --- | --- | --- |"]
    for package in dict.fromkeys(outcome["package"] for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome["package"] == package]
        passed = sum(outcome["error"] is None for outcome in own)
        names = ", ".join(o["case"] + ("" if o["error"] is None else " (fails)") for o in own)
        lines.append(f"| {package} | {own[0]['version']} | {passed} of {len(own)} | {names} |")
    return "\n".join(lines)


def main() -> None:
    """Runs the cases, prints the table, what failed, and one line of JSON; exits with 1 if a case failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--python", default=sys.executable, help="Python with the client packages")
    parser.add_argument("--url", help="a running server, such as http://127.0.0.1:8000")
    parser.add_argument("--model", help="the model of the server that is started; the default one")
    parser.add_argument("--loops", action="store_true", help="loops of three tool calls")
    parser.add_argument("packages", nargs="*", help="those to run; all if none is named")
    given = parser.parse_args()
    if given.url:
        outcomes = run_cases(given.python, given.url, given.packages, has_loops=given.loops)
    else:
        with served(hub.resolve(given.model), *_OPTIONS) as (_, url):
            outcomes = run_cases(given.python, url, given.packages, has_loops=given.loops)
    print(table(outcomes))
    failed = [outcome for outcome in outcomes if outcome["error"] is not None]
    for outcome in failed:
        print(f"{outcome['package']}: {outcome['case']}: {outcome['error']}", file=sys.stderr)
    print(json.dumps({"n_cases": len(outcomes), "n_passed": len(outcomes) - len(failed)}))
    raise SystemExit(1 if failed or not outcomes else 0)


if __name__ == "__main__":
    run(main)
