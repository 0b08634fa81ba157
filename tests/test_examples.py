"""Every example runs as a person would run it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.pictures import picture
from tests.vision.seeing import save_seeing

pytestmark = pytest.mark.usefixtures("compiled_kernels", "default_model")

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))

# something that only an example that worked prints
EXPECTED = {
    "quickstart.py": "Paris",
    "stream.py": "tokens, ",
    "async_streams.py": "3 answers, ",
    "chat.py": "> And at sunset?",
    "logprobs.py": "perplexity ",
    "forward.py": " Paris",
    "patching.py": "steered: ' Paris",
    "ioi.py": "estimates and patches correlate: 0.",
    "steering.py": "strength +0.3:",
    "pictures.py": "pictures: heads.png, lens.svg, neurons.png",
    "sae.py": "features of ",
    "graph.py": "graph.svg: ",
    "image_attention.py": "attention.png: ",
    "hooks.py": "without the MLP of layer",
}


def test_every_example_is_tested():
    """Catches an example added without a word about what it should print."""
    assert {path.name for path in EXAMPLES} == set(EXPECTED)


def seeing(folder):
    """A tiny model that sees, and a picture."""
    save_seeing(folder / "model")
    Image.fromarray(picture(30, 40)).save(folder / "seen.png")
    return [str(folder / "model"), str(folder / "seen.png")]


@pytest.mark.full
def test_an_example_without_its_arguments_says_how_it_is_run(tmp_path):
    """Catches a traceback for who runs an example as it is."""
    path = next(path for path in EXAMPLES if path.name == "image_attention.py")
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert "Traceback" not in done.stderr
    assert "python examples/image_attention.py MODEL IMAGE" in done.stderr


SLOW = ("ioi.py", "pictures.py", "sae.py", "graph.py")


@pytest.mark.representative(3)
@pytest.mark.full(but=["quickstart.py"])
@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.slow) if path.name in SLOW else path for path in EXAMPLES],
    ids=[path.name for path in EXAMPLES],
)
def test_the_example_runs(path, smollm2_path, tmp_path):
    """Catches an example that the interface has left behind, or one too slow to be tried."""
    environment = os.environ | {"PYTHONIOENCODING": "utf-8"}
    arguments = seeing(tmp_path) if path.name == "image_attention.py" else []
    done = subprocess.run(
        [sys.executable, str(path), *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=tmp_path,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    assert EXPECTED[path.name] in done.stdout
    assert not done.stderr
