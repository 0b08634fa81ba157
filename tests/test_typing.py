"""Types as a user's editor sees them: right calls pass mypy, wrong parameters are named."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
from kukri import (
    LLM, ActivationCache, AsyncLLM, Result, SamplingOptions, SamplingParams, Transcription, errors
)

def use(llm: LLM, options: SamplingOptions) -> None:
    one: Result = llm.generate("a", temperature=0.5, stop="b")
    same: Result = llm.chat([{"role": "user", "content": "a"}], **options)
    many: list[Result] = llm.generate(["a", "b"], SamplingParams(), top_k=3)
    texts: list[str] = [chunk.text for chunk in llm.stream("a", max_tokens=3, seed=None)]
    llm.generate("a", temprature=0.5)  # wrong
    llm.chat([{"role": "user", "content": "a"}], temprature=0.5)  # wrong
    llm.stream("a", temprature=0.5)  # wrong
    llm.stream("a", top_k="many")  # wrong

async def use_async(llm: AsyncLLM) -> None:
    one: Result = await llm.generate("a", temperature=0.5)
    many: list[Result] = await llm.generate(["a", "b"])
    texts: list[str] = [chunk.text async for chunk in llm.stream("a", max_tokens=3)]
    several: list[Transcription] = await llm.transcribe(["a.wav", "b.wav"])
    hooked: tuple[Result, ActivationCache] = await llm.generate_with_hooks("a")
    await llm.embed("a", truncat=True)  # wrong
    await llm.chat([], temprature=0.5)  # wrong
    llm.stream("a", temprature=0.5)  # wrong
"""


@pytest.mark.full
def test_wrong_parameters_are_errors_of_types(tmp_path: Path) -> None:
    """A misspelt parameter that shows when the program runs, or a right call that mypy refuses."""
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--config-file="]
    done = subprocess.run(
        [*command, f"--cache-dir={tmp_path / 'cache'}", str(file)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parent.parent,
    )
    assert done.returncode == 1, done.stderr
    found = {int(n) for n in re.findall(r"program\.py:(\d+): error", done.stdout)}
    wrong = {n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith("# wrong")}
    assert found == wrong, done.stdout
    assert done.stdout.count('"temprature"') == 5
