"""Tiny random models in TransformerLens and here. `python -m tests.interp.tl_models` writes names.json again.

TransformerLens is no dependency of the tests: names.json holds what it says of names, shapes and values, and
`pytest -m slow tests/interp` compares with the package itself where it is installed (4.3 was used).
"""

from __future__ import annotations

import json
import tempfile
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np

from kukri.interp import Session
from kukri.kernels import make_backend
from kukri.kernels.cache import KVType
from kukri.models import Model, load_model
from tests.models import made_models, tiny_encoders, tiny_models

NAMES = ["smollm3", "llama", "qwen3", "phi", "phi3", "starcoder2", "mistral", "qwen2"]
NAMES += ["gemma2", "gemma3_text", "olmo2", "granite", "ernie4_5", "olmo3"]
NAMES += ["olmoe", "qwen3_moe", "gpt_oss", "lfm2", "qwen3_5_text"]
ENCODERS = ["bert"]
# Differences of TransformerLens, by the end of the name: logits before their cap or factor; of two
# rotations the last computed; each frequency of a rotation once; queries and gates as one; dimensions of a
# head in pairs. Of an encoder it has the head for masked words and the parts of the embedding, and patterns
# under the name of scores.
_LOGITS, _ROTATION = ("unembed.hook_out", "hook_unembed"), ("hook_cos", "hook_sin")
_OUTER_ROTATION = ("rotary_emb.hook_cos", "rotary_emb.hook_sin")
_QUERIES = ("attn.hook_q", "attn.q.hook_out")
_KEYS = ("attn.hook_k", "attn.k.hook_out", "attn.hook_rot_q", "attn.hook_rot_k")
_OF_MASKED_WORDS = (
    *("attn.hook_attn_scores", "embed.hook_out", "type_embed.hook_in", "pos_embed.hook_in", "hook_pos_embed"),
    *("embed_ln.hook_in", "embed_ln.hook_scale", "embed_ln.hook_normalized", "mlm_head.hook_in"),
    *("mlm_head.hook_out", "ln_final.hook_in", "ln_final.hook_scale", "ln_final.hook_normalized"),
    *("ln_final.hook_out", "unembed.hook_in", *_LOGITS),
)
OTHER = {
    "gemma2": _LOGITS, "granite": _LOGITS, "gemma3_text": _OUTER_ROTATION, "olmo3": _OUTER_ROTATION,
    "gpt_oss": _ROTATION, "qwen3_5_text": _QUERIES, "ernie4_5": (*_QUERIES, *_KEYS),
    "bert": _OF_MASKED_WORDS,
}  # fmt: skip
_PROBED = {"lfm2": (0, 2), "bert": (0, 2)}  # blocks whose names are probed, if not the first and the last
FACTS = Path(__file__).parent / "names.json"
# longer than every window, and than longrope's original context
IDS = np.random.default_rng(0).integers(3, tiny_models.V, (1, tiny_models.N_TOKENS), np.int32)


def session(name: str, backend: str = "reference", kv_type: KVType | None = None) -> Session:
    """A session of a tiny model, whose tokens are words t0, t1 and so on."""
    if name in ENCODERS:
        model = _encoder(name)
    else:
        _, config, source = made_models.make(name)
        model = load_model(source, config)

    def encode(text: str, add_special: bool = True) -> list[int]:
        return [int(word[1:]) for word in text.split()]

    def token_bytes(token_id: int) -> bytes:
        return b" t%d" % token_id

    return Session(model, make_backend(backend), encode, token_bytes, nullcontext, kv_type=kv_type)


def _encoder(name: str) -> Model:
    with tempfile.TemporaryDirectory() as folder:
        tiny_encoders.save(Path(folder), name, "ForMaskedLM")
        return tiny_encoders.load(Path(folder))


def bridge(name: str) -> Any:
    """TransformerLens' TransformerBridge of the same model."""
    warnings.filterwarnings("ignore")
    import torch
    from tokenizers import Tokenizer, models
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import PreTrainedTokenizerFast

    with tempfile.TemporaryDirectory() as folder:
        if name in ENCODERS:
            tiny_encoders.save(Path(folder), name, "ForMaskedLM")
            return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)
        made_models.make(name)[0].save_pretrained(folder)
        words = models.WordLevel({f"t{i}": i for i in range(tiny_models.V)}, unk_token="t0")
        special = {"bos_token": "t1", "eos_token": "t2", "pad_token": "t0"}
        PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), **special).save_pretrained(folder)
        return TransformerBridge.boot_transformers(folder, device="cpu", dtype=torch.float32)


def is_probed(model: str, name: str) -> bool:
    """True if names.json has a name: those outside the blocks, and of two of them."""
    blocks = tuple(f"blocks.{i}." for i in _PROBED.get(model, (0, 3)))
    return name.startswith(blocks) or not name.startswith("blocks.")


def with_batch(name: str, x: Any) -> Any:
    """The array with the batch dimension, which TransformerLens flattens in routers: [batch, pos, ...]."""
    is_routed = name.partition(".mlp.")[2].startswith(("gate", "router", "hook_expert", "hook_router"))
    return x[None] if is_routed and x.ndim == 2 else x


def probe(x: Any) -> float:
    """One number of an array, that each of its entries changes; masked scores count as 0."""
    flat = np.asarray(x, np.float64).reshape(-1)
    flat = np.where(flat < -1e30, 0.0, flat)
    return float(flat @ np.cos(np.arange(len(flat))) / np.sqrt(len(flat)))


def main() -> None:
    """Writes names.json from TransformerLens."""
    import torch

    facts = {}
    for name in [*NAMES, *ENCODERS]:
        with torch.no_grad():
            _, cache = bridge(name).run_with_cache(torch.from_numpy(IDS).long())
        facts[name] = {
            key: [list(with_batch(key, x).shape), round(probe(x.numpy()), 4)]
            for key, x in cache.items()
            if is_probed(name, key) and not key.endswith(OTHER.get(name, ("?",)))
        }
    models = []
    for name, found in facts.items():
        lines = [f"{json.dumps(key)}: {json.dumps(fact)}" for key, fact in found.items()]
        models.append(f'"{name}": {{\n' + ",\n".join(lines) + "\n}")
    FACTS.write_text("{\n" + ",\n".join(models) + "\n}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
