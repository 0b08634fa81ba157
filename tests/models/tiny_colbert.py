"""Tiny models with late interaction as PyLate saves them, and the vectors of their definition."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np

from tests.lazy_imports import lazy_imports
from tests.models.tiny_encoders import BYTES_V, D, V, save

with lazy_imports():
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

WIDTH = 24
PREFIXES = {True: "[Q] ", False: "[D] "}


def save_late(directory: Path, name: str, **settings: Any) -> Any:
    """An encoder with the two prefixes, a dense layer to WIDTH, and PyLate's settings; gives the encoder."""
    base = BYTES_V if name == "modernbert" else V
    more = {"local_attention": 64} if name == "modernbert" else {}
    hf = save(directory, name, vocab_size=base + 2, **more)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    tokenizer.add_tokens(list(PREFIXES.values()))
    tokenizer.save_pretrained(directory)
    modules = {"": "sentence_transformers.models.Transformer", "1_Dense": "pylate.models.Dense.Dense"}
    stated = [
        {"idx": i, "name": str(i), "path": path, "type": kind}
        for i, (path, kind) in enumerate(modules.items())
    ]

    def write(path: str, value: Any) -> None:
        (directory / path).write_text(json.dumps(value))

    write("modules.json", stated)
    (directory / "1_Dense").mkdir()
    facts = {"in_features": D, "out_features": WIDTH, "bias": False, "use_residual": False}
    write("1_Dense/config.json", {**facts, "activation_function": "torch.nn.modules.linear.Identity"})
    save_file({"linear.weight": torch.randn(WIDTH, D)}, directory / "1_Dense" / "model.safetensors")
    usual = {
        "query_prefix": "[Q] ", "document_prefix": "[D] ", "query_length": 20, "document_length": 40,
        "attend_to_expansion_tokens": False, "do_query_expansion": True, "similarity_fn_name": "MaxSim",
        "skiplist_words": list(string.punctuation), "model_type": "ColBERT", "prompts": {},
    }  # fmt: skip
    write("config_sentence_transformers.json", usual | settings)
    write("sentence_bert_config.json", {"max_seq_length": 39, "do_lower_case": False})
    return hf


def defined(directory: Path, hf: Any, text: str, is_query: bool, **settings: Any) -> np.ndarray:
    """The vectors of a text by transformers, padded and masked as PyLate does."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    most = settings.get("query_length", 20) if is_query else settings.get("document_length", 40)
    expands = is_query and settings.get("do_query_expansion", True)
    ids = tokenizer(text, truncation=True, max_length=most - 1).input_ids
    ids.insert(1, tokenizer.convert_tokens_to_ids(PREFIXES[is_query]))
    n_added = most - len(ids) if expands else 0
    seen = [1] * len(ids) + [int(settings.get("attend_to_expansion_tokens", False))] * n_added
    ids += [tokenizer.mask_token_id] * n_added
    with torch.no_grad():
        state = hf(input_ids=torch.tensor([ids]), attention_mask=torch.tensor([seen])).last_hidden_state[0]
    weight = load_file(directory / "1_Dense" / "model.safetensors")["linear.weight"]
    vectors = torch.nn.functional.normalize(state @ weight.T, dim=1).numpy()
    skipped = [] if is_query else tokenizer.convert_tokens_to_ids(list(string.punctuation))
    skipped = [i for i in skipped if i != tokenizer.unk_token_id]
    return vectors[[i not in skipped for i in ids]]
