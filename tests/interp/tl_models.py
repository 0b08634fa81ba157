"""Tiny random models in TransformerLens and here. `python tests/interp/tl_models.py` writes names.json anew.

TransformerLens is no dependency of the tests: names.json holds what it says of names, shapes and values, and
`pytest -m slow tests/interp` compares with the package itself where it is installed (4.3 was used).
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

if __name__ == "__main__":  # pytest adds these folders itself
    sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[1] / "models")]
import tiny_models

from kukri.interp import Session
from kukri.kernels import make_backend
from kukri.kernels.types import KVType
from kukri.models import load_model

NAMES = ["smollm3", "llama", "qwen3", "phi", "phi3", "starcoder2", "mistral", "qwen2"]
NAMES += ["gemma2", "gemma3_text", "olmo2", "granite"]
_LOGITS = ["unembed.hook_out", "hook_unembed"]
# TransformerLens shows logits before their cap or factor, and of Gemma 3's two rotations the last computed
OTHER = {"gemma2": _LOGITS, "granite": _LOGITS, "gemma3_text": ["rotary_emb.hook_cos", "rotary_emb.hook_sin"]}
FACTS = Path(__file__).parent / "names.json"
# longer than every window, and than longrope's original context
IDS = np.random.default_rng(0).integers(3, tiny_models.V, (1, tiny_models.N_TOKENS), np.int32)


def session(name: str, backend: str = "reference", kv_type: KVType | None = None) -> Session:
    """A session of a tiny model, whose tokens are words t0, t1 and so on."""
    _, config, source = tiny_models.make(name)
    model = load_model(source, config)

    def encode(text: str, add_special: bool = True) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    return Session(model, make_backend(backend), encode, nullcontext, kv_type=kv_type)


def bridge(name: str) -> Any:
    """TransformerLens' TransformerBridge of the same model."""
    warnings.filterwarnings("ignore")
    import torch
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    hf, _, _ = tiny_models.make(name)
    with tempfile.TemporaryDirectory() as folder:
        hf.save_pretrained(folder)
        words = models.WordLevel({f"t{i}": i for i in range(tiny_models.V)}, unk_token="t0")
        special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def is_probed(name: str) -> bool:
    """True if names.json has a name: those outside the blocks, and of the first and the last block."""
    return not name.startswith("blocks.") or name.startswith(("blocks.0.", "blocks.3."))


def probe(x: Any) -> float:
    """One number of an array, that each of its entries changes; masked scores count as 0."""
    flat = np.asarray(x, np.float64).reshape(-1)
    flat = np.where(flat < -1e30, 0.0, flat)
    return float(flat @ np.cos(np.arange(len(flat))) / np.sqrt(len(flat)))


def main() -> None:
    """Writes names.json from TransformerLens."""
    import torch

    facts = {}
    for name in NAMES:
        with torch.no_grad():
            _, cache = bridge(name).run_with_cache(torch.from_numpy(IDS).long())
        facts[name] = {
            key: [list(x.shape), round(probe(x.numpy()), 4)]
            for key, x in cache.items()
            if is_probed(key) and key not in OTHER.get(name, ())
        }
    models = []
    for name, found in facts.items():
        lines = [f"{json.dumps(key)}: {json.dumps(fact)}" for key, fact in found.items()]
        models.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
    FACTS.write_text("{\n" + ",\n".join(models) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
