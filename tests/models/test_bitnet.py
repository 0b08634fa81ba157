"""BitNet's files: packed ternary matrices, and weights that are rounded as they are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import KukriError
from kukri.formats.headers import read_headers
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import byte_tokenizer, exact_logits, theirs

with lazy_imports():
    import torch
    import transformers as tr
    from safetensors.torch import load_file, save_file
    from transformers.integrations.bitnet import WeightQuant, pack_weights

IDS = np.random.default_rng(0).integers(0, 250, 30).tolist()
SIZES = {
    **{"vocab_size": 320, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
    **{"bos_token_id": 256, "eos_token_id": 257, "tie_word_embeddings": True},
}


def saved(directory: Path, mode: str, **more: Any) -> Any:
    """A directory of packed ("offline") or of exact weights ("online"); gives transformers' float model of
    what they stand for.
    """
    torch.manual_seed(0)
    model = tr.BitNetForCausalLM(tr.BitNetConfig(**{**SIZES, **more}, attn_implementation="eager")).eval()
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, module in model.named_modules():
        if not isinstance(module, torch.nn.Linear) or name == "lm_head":
            continue
        exact = module.weight.detach()
        scale = exact.abs().mean()
        scale = scale.bfloat16().float() if mode == "offline" else scale
        signs = (exact / scale).round().clamp(-1, 1)
        if mode == "offline":
            tensors[f"{name}.weight"] = pack_weights(signs.clone())
            tensors[f"{name}.weight_scale"] = scale.reshape(1).bfloat16()
        else:
            torch.testing.assert_close(signs * scale, WeightQuant.forward.__wrapped__(None, exact))
        module.weight.data = signs * scale
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    path = directory / "config.json"
    stated = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": mode}
    path.write_text(json.dumps({**json.loads(path.read_text()), "quantization_config": stated}))
    return model


@pytest.mark.parametrize("mode", ["offline", "online"])
@pytest.mark.parametrize("width", [256, 192])
def test_ternary_matrices_are_those_of_transformers(mode: str, width: int, tmp_path: Path) -> None:
    """Quarters of rows in another order, a scale of another matrix, exact weights run as they are."""
    model = saved(tmp_path, mode, hidden_size=width)
    want = theirs(model, IDS)
    # 2 bits a weight have a scale in float16, which holds those of packed files
    tolerance = 1e-4 if mode == "offline" else 3e-3
    np.testing.assert_allclose(exact_logits(tmp_path, IDS), want, atol=tolerance * np.abs(want).max())
    with LLM(tmp_path, n_threads=1) as llm:
        types = {p.type for p in llm.model.parameters if ".mlp." in p.name and len(p.shape) == 2}
        assert types == ({"TQ2_0"} if width == 256 else {"F32", "TQ2_0"})
        got = llm.logits(IDS)
    n_scales = 14 if mode == "offline" else 0
    assert read_headers(tmp_path).n_parameters == sum(p.numel() for p in model.parameters()) + n_scales
    assert np.corrcoef(got.ravel(), want.ravel())[0, 1] > 0.999


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_class": "bitlinear"}, "only 'autobitlinear' is supported"),
        ({"use_rms_norm": True}, "use_rms_norm' is True"),
        ({"quant_method": "gptq"}, "take the original checkpoint"),
        (3, "must hold ternary weights"),
        ("scale", "weight_scale'.*is missing"),
    ],
    ids=str,
)
def test_wrong_files(change: Any, message: str, tmp_path: Path) -> None:
    """Layers that compute something else, and bytes that become weights in silence."""
    saved(tmp_path, "offline")
    name = "model.layers.1.mlp.up_proj.weight"
    path, tensors = tmp_path / "config.json", load_file(tmp_path / "model.safetensors")
    if isinstance(change, dict):
        stated = json.loads(path.read_text())
        stated["quantization_config"] |= change
        path.write_text(json.dumps(stated))
    elif change == 3:
        tensors[name][5, 7] |= 3
    else:
        del tensors[f"{name}_scale"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(KukriError, match=message):
        LLM(tmp_path, backend="reference")
