"""Architectures are found by any of their names, and only the files that say a name are imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kukri.models import ARCHITECTURES

NAMES = sorted(
    {name for a in ARCHITECTURES.values() for name in (a.name, a.gguf, a.gguf_seeing, a.hf_type)} - {""}
)
# what `LLM` imports, and what it takes to know an architecture, without one of these
_IMPORTS = """
import sys
import kukri.llm
from kukri.models import ARCHITECTURES
assert ARCHITECTURES["qwen3"].name == "qwen3"
print(*(name for name in sys.argv[1:] if name in sys.modules))
"""


@pytest.mark.parametrize("name", NAMES)
def test_every_architecture_is_found_by_each_of_its_names(name: str) -> None:
    """A name that a file inherits and does not say, by which its architecture would not be found."""
    want = [a for a in ARCHITECTURES.values() if name in (a.name, a.gguf, a.gguf_seeing, a.hf_type)]
    assert sorted(a.name for a in ARCHITECTURES.called(name)) == sorted(a.name for a in want)


def test_unknown_names_are_no_architectures() -> None:
    """A lookup that fails with anything but KeyError, or takes part of a file for a name."""
    for name in ("", "no_such", "silu", 'llama"', "../llama"):
        assert name not in ARCHITECTURES
    assert ARCHITECTURES.called(None) == ()


@pytest.mark.full
def test_what_a_model_does_not_need_is_not_imported() -> None:
    """A start that pays for all architectures, directories, images, adapters or draft models."""
    unneeded = [
        *(
            "kukri.models.bert",
            "kukri.models.gemma4_text",
            "kukri.models.eagle3",
            "kukri.engine.draft_kinds.language_model",
            *(
                f"kukri.engine.draft_kinds.{kind}"
                for kind in ("assistant", "eagle3", "language_model", "next_token")
            ),
        ),
        *(
            "kukri.engine.spans.images",
            "kukri.vision.encoder",
            "kukri.vision.processors",
            "kukri.formats.gguf.vision",
        ),
        *(f"kukri.formats.huggingface.{part}" for part in ("config", "directory", "safetensors", "weights")),
        *("kukri.formats.adapters", "kukri.formats.headers"),
    ]
    done = subprocess.run(
        [sys.executable, "-c", _IMPORTS, *unneeded], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == []
