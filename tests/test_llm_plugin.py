"""kukri as a model of the program llm, found by its entry point."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from kukri.errors import KukriError
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import llm

    from kukri.llm_plugin import Kukri

pytestmark = pytest.mark.usefixtures("compiled_kernels")

SYSTEM = "You are a helpful AI assistant and a poet."
QUESTION = "What is the capital of France?"
RUN = (sys.executable, "-m", "kukri", "run")


@pytest.fixture(scope="module")
def model():
    return Kukri()


@pytest.fixture
def ask(model, smollm2_path):
    options = {"model": str(smollm2_path), "max_tokens": 30}
    return lambda prompt, **more: model.prompt(prompt, **{**options, **more})


@pytest.mark.full
def test_llm_finds_the_model(tmp_path, smollm2_path):
    """Catches an entry point to nowhere, and a plugin that makes each start of llm pay for kukri."""
    (found,) = entry_points(group="llm", name="kukri")
    assert found.value == "kukri.llm_plugin"
    command = [str(Path(sys.executable).with_name("llm")), "-m", "kukri", "-o", "model", str(smollm2_path)]
    command += ["-o", "temperature", "0"]
    environment = os.environ | {"LLM_USER_PATH": str(tmp_path)}
    done = subprocess.run([*command, QUESTION], capture_output=True, text=True, timeout=60, env=environment)
    assert done.stdout.strip() == "The capital of France is Paris."
    script = "import sys, kukri.llm_plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert not {"numba", "torch", "matplotlib", "fastapi"} & set(loaded.stdout.split())


@pytest.mark.full
def test_an_answer_is_that_of_kukri_run(ask, model, smollm2_path):
    """Catches another system message, defaults or template than those of `kukri run`."""
    response = ask(QUESTION, seed=3)
    pieces = list(response)
    assert len(pieces) > 3
    done = subprocess.run(
        [*RUN, QUESTION, "-n", "30", "--seed", "3", "--json", "-m", str(smollm2_path)],
        capture_output=True, text=True, check=True, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    expected = json.loads(done.stdout)
    assert "".join(pieces) == expected["text"]
    usage = response.usage()
    assert (usage.input, usage.output) == (expected["n_prompt_tokens"], expected["n_generated"])


@pytest.mark.full
def test_a_conversation_is_remembered(model, smollm2_path):
    """Catches turns that are lost or that come twice, and options that do not reach the sampler."""
    conversation = model.conversation()
    options = {"model": str(smollm2_path), "max_tokens": 20, "temperature": 0}
    conversation.prompt(QUESTION, system=SYSTEM, **options).text()
    second = conversation.prompt("And of Italy?", **options)
    assert second.text()
    engine = model._loaded[str(smollm2_path)]
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": conversation.responses[0].text()},
        {"role": "user", "content": "And of Italy?"},
    ]
    assert second.text() == engine.chat(messages, temperature=0, max_tokens=20).text
    options["temperature"] = 1.5
    drawn = [model.prompt("Hi", seed=s, **options).text() for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.full
def test_a_schema_is_kept(ask):
    """Catches JSON that is only likely, and objects that continue with properties of their own."""
    schema = llm.schema_dsl("age int, sex", multi=False)
    answer = json.loads(ask("A person", schema=schema).text())
    assert isinstance(answer["age"], int)
    assert isinstance(answer["sex"], str)
    assert set(answer) == {"age", "sex"}


@pytest.mark.full
def test_what_is_wrong_is_our_error(ask):
    """Catches options that are ignored, and a model that nobody finds and everybody waits for."""
    with pytest.raises(KukriError, match="was not found"):
        ask("Hi", model="nowhere.gguf").text()
    with pytest.raises(KukriError, match="top_p"):
        ask("Hi", top_p=7).text()
    with pytest.raises(ValueError, match="colour"):
        ask("Hi", colour=1)
