"""Latent attention beyond logits: its cache, saved prefixes, the ops for heads, and files that are wrong."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.head_matrices import take_part
from kukri.kernels import make_backend
from kukri.kernels.backend import Backend
from kukri.kernels.cache import KVLayer
from kukri.kernels.quantize import quantize
from kukri.kernels.weight_handles import Experts, Weight
from kukri.models import load_model
from kukri.quant.blocks import dequantize
from kukri.quant.types import QUANT_TYPES
from tests.models.made_models import make
from tests.models.tiny_llama import Driver, random_ids
from tests.models.tiny_models import D_HEAD, HEADS, TINY, V
from tests.models.written_models import write
from tests.test_llm_safetensors import make as make_directory

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_a_token_takes_one_row_of_the_cache() -> None:
    """A cache of every head's keys and values."""
    _, config, source = make("deepseek_v2")
    assert load_model(source, config).cache_layout == (KVLayer(1, 48),) * 4


@pytest.mark.parametrize("kv_type", ["q8_0", "q4"])
def test_packed_caches(kv_type: Any, reference: Backend) -> None:
    """Keys that are values too, rotated twice, or scales of the wrong half."""
    _, config, source = make("minicpm3")  # whose experts no rounding changes
    latent = config.latent
    assert latent is not None
    model = load_model(source, config)
    ids = random_ids(40, V)
    if kv_type == "q8_0":  # heads of 48 are no multiple of 32
        with pytest.raises(UnsupportedError, match="multiple of 32, not 48"):
            Driver(model, reference, kv_type=kv_type)
        return
    want = Driver(model, reference, kv_type=kv_type).run(ids, [len(ids)])
    backend = make_backend("cpu", 2)
    try:
        got = Driver(model, backend, kv_type=kv_type).run(ids, [7, 16, 3])
    finally:
        backend.close()  # type: ignore[attr-defined]
    assert np.linalg.norm(got - want) < 2e-2 * np.linalg.norm(want)


def test_prefixes_are_found_and_saved(tmp_path: Path) -> None:
    """Pages of latents that another process, or the next request, reads as something else."""
    directory, _ = make_directory(tmp_path / "model", "deepseek_v2")
    text = "The capital of France is Paris, and that of Spain is Madrid. " * 2
    with LLM(directory, prefix_cache=False) as llm:
        want = llm.generate(text, GREEDY).token_ids
    for n_restored in (0, 112):  # the second time from disk
        with LLM(directory, prefix_dir=tmp_path / "prefixes") as llm:
            assert llm.generate(text, GREEDY).token_ids == want
            assert llm.engine.allocator.n_restored == n_restored
            assert llm.generate(text, GREEDY).token_ids == want


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
def test_the_joined_matrices_come_apart(kind: str) -> None:
    """Keys that are not transposed, the values of another head, blocks cut in the wrong place."""
    _, config, _ = make("minicpm3")
    latent, generator = config.latent, np.random.default_rng(0)
    assert latent is not None
    type_ = QUANT_TYPES[kind]
    joined = generator.standard_normal((HEADS, latent.d_nope + latent.d_value, latent.rank), np.float32)
    rows = quantize(joined.reshape(-1, latent.rank), type_)
    stored = dequantize(rows, type_).reshape(joined.shape)
    for part, want in (
        ("k", stored[:, : latent.d_nope].swapaxes(1, 2)),
        ("v", stored[:, latent.d_nope :]),
    ):
        found, found_type = take_part(rows, type_, f"model.layers.0.self_attn.{part}_b_proj.weight", config)
        got = dequantize(found.reshape(-1, found.shape[-1]), found_type).reshape(want.shape)
        np.testing.assert_allclose(got, want, atol=0.03 if (kind, part) == ("Q8_0", "k") else 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (
            {"attention.kv_lora_rank": 40},
            r"key_length' is 48, not the sum of a latent of 40 and 16 that rotate",
        ),
        ({"attention.key_length_mla": D_HEAD}, r"is 16, of which 16 rotate: nothing is left"),
        ({"attention.kv_lora_rank": 0}, r"must be from 1 to .*, not 0"),
        ({"attention.kv_lora_rank": 1 << 30}, r"must be from 1 to 16384"),
    ],
)
def test_wrong_widths_of_gguf(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """A latent that is as wide as no tensor, which is found deep in a step, or not at all."""
    _, config, source = make("deepseek_v2")
    tiny = TINY["deepseek_v2"]
    try:
        TINY["deepseek_v2"] = replace(tiny, keys={**(tiny.keys or {}), **keys})
        path = write(tmp_path / "wrong.gguf", "deepseek_v2", config, source)
    finally:
        TINY["deepseek_v2"] = tiny
    with pytest.raises(FormatError, match=message):
        model_config(GGUFFile(path))


@pytest.mark.parametrize(
    ("keys", "error", "message"),
    [
        ({"kv_lora_rank": 31}, FormatError, r"kv_a_proj_with_mqa.*where the configuration asks for"),
        ({"v_head_dim": 24}, FormatError, r"kv_b_proj.*where the configuration asks for"),
        ({"kv_lora_rank": None}, FormatError, r"'kv_lora_rank' is missing"),
        ({"topk_method": "group_limited_greedy"}, UnsupportedError, r"only 'greedy' is supported"),
    ],
)
def test_wrong_widths_of_a_directory(
    keys: dict[str, Any], error: type[Exception], message: str, tmp_path: Path
) -> None:
    """Rows of keys read as those of values."""
    directory, _ = make_directory(tmp_path / "model", "deepseek_v2")
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    with pytest.raises(error, match=message):
        LLM(directory)


def test_products_of_heads_are_each_heads_own(reference: Backend) -> None:
    """A head's rows times another's matrix, on the backend that defines them."""
    from kukri.kernels.reference import ReferenceOps

    generator = np.random.default_rng(0)
    matrices = generator.standard_normal((3, 5, 7), np.float32)
    kind = QUANT_TYPES["F32"]
    heads = Experts(tuple(Weight(m.view(np.uint8), kind, (5, 7), "heads") for m in matrices))
    x = generator.standard_normal((4, 21), np.float32)
    ops = ReferenceOps(reference.new_cache((), 1))  # type: ignore[arg-type]
    want = np.einsum("thi,hoi->tho", x.reshape(4, 3, 7), matrices).reshape(4, 15)
    np.testing.assert_allclose(ops.head_linear(x, heads), want, rtol=1e-5, atol=1e-5)
    parts = [ops.head_columns(x, 3, 0, 2), ops.head_columns(x, 3, 2, 7)]
    np.testing.assert_array_equal(parts[0], x.reshape(4, 3, 7)[..., :2].reshape(4, 6))
    np.testing.assert_array_equal(ops.join_heads(parts, 3), x)
