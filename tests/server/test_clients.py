"""The programs of examples/clients against a real server, as they are but for the port."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kukri import LLM
from tests.server.live_server import Served, serving

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "examples" / "clients"
FRANCE = "The capital of France is Paris."
RUN = {
    "openai_client.py": [sys.executable],
    "langchain_client.py": [sys.executable],
    "curl.sh": ["sh"],
}
EXPECTED = {
    "openai_client.py": (FRANCE, "city='Paris' country='France'"),
    "langchain_client.py": (FRANCE, "8 tokens", "city='Paris'"),
    "curl.sh": (FRANCE, "data: [DONE]"),
}
STREAMED = {
    "openai_client.py": '"Paris"',
    "langchain_client.py": "The capital of Japan is Tokyo.",
    "curl.sh": "4, 5, 6",
}


@pytest.fixture(scope="module")
def shop(smollm2_path: Path) -> Iterator[Served]:
    """A server of the default model under its own name."""
    with (
        LLM(smollm2_path, max_context=512, max_requests=2, n_threads=1) as llm,
        serving(llm, model_names=("smollm2-135m",)) as server,
    ):
        yield server


@pytest.fixture
def run(shop, tmp_path) -> Callable[..., str]:
    """Runs a command in a folder with the examples, their port replaced; gives what it printed."""
    for file in CLIENTS.iterdir():
        text = file.read_text(encoding="utf-8")
        assert "http://127.0.0.1:8000" in text
        (tmp_path / file.name).write_text(text.replace("http://127.0.0.1:8000", shop.url), encoding="utf-8")

    def run(*command: str) -> str:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OPENAI_")}
        environment |= {"LLM_USER_PATH": str(tmp_path), "PYTHONPATH": os.environ.get("PYTHONPATH", str(ROOT))}
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, cwd=tmp_path, env=environment
        )
        assert done.returncode == 0, done.stderr + done.stdout
        assert not done.stderr
        return done.stdout

    return run


@pytest.mark.full(only=["*.py"])
@pytest.mark.parametrize("name", RUN)
def test_a_client_gets_its_answers(name, run):
    """Catches a field that a client sends and the server refuses, and examples that no longer run."""
    if shutil.which(RUN[name][0]) is None or (name == "curl.sh" and shutil.which("curl") is None):
        pytest.skip("no curl here")
    said = run(*RUN[name], name)
    for text in EXPECTED[name]:
        assert text in said, said
    # a chunk of a stream may hold several tokens
    texts = re.findall(r'^data: .*"text":"(.*?)"', said, re.MULTILINE)
    assert STREAMED[name] in ("".join(texts) if name == "curl.sh" else said.replace("|", "")), said
    assert name == "curl.sh" or said.count("|") >= 2, said


def llm_command() -> str:
    return str(Path(sys.executable).with_name("llm"))


@pytest.mark.full
def test_llm_asks_a_server(run):
    """Catches a configuration that llm does not understand, and a conversation that forgets."""
    ask = (llm_command(), "-m", "kukri-server", "-o", "temperature", "0", "-o", "max_tokens", "30")
    system = ("-s", "You are a helpful AI assistant.")
    assert run(*ask, *system, "What is the capital of France?").strip() == FRANCE
    schema = '{"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}'
    assert '"Rome"' in run(*ask, "-c", "--schema", schema, "And of Italy?")


def test_every_client_is_tested_and_in_the_documentation():
    """Catches an example without a test, and a page that names programs which are not there."""
    files = {path.name for path in CLIENTS.iterdir()}
    assert files == {*RUN, "extra-openai-models.yaml"}
    page = (ROOT / "docs" / "reference" / "clients.md").read_text(encoding="utf-8")
    section = page.split("\n## Examples\n")[1].split("\n## ")[0]
    assert set(re.findall(r"examples/clients/([\w.-]+)", section)) == files
