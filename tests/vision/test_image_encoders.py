"""Models of images and text against transformers: embeddings of images, logits and greedy tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import cycle
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import FormatError, UnsupportedError, UnusedTensorError
from kukri.formats.huggingface.config import hf_model_config, text_config
from kukri.formats.huggingface.vision import vision_config
from kukri.vision.encoders.idefics3 import nearest_places
from kukri.vision.encoders.placed import averaged
from tests.lazy_imports import lazy_imports
from tests.vision.tiny_checkpoints import save_with_processor
from tests.vision.tiny_vision import (
    MODELS,
    image,
    our_logits,
    our_tokens,
    prompt,
    relative,
    save,
    their_inputs,
    their_tokens,
)

with lazy_imports():
    import torch

BOUNDS = {"reference": 1e-4, "cpu": 3e-3}


# variants, of which test_mmproj compares logits and tokens; and one whose parts others have
SLOW = ("gemma4-whole", "gemma4-unified", "lighton_ocr", "paddleocr_vl")


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS],
)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Any, Any]:
    """A model's name, transformers' model, and its directory."""
    directory = tmp_path_factory.mktemp(request.param)
    return request.param, save(directory, request.param), directory


@pytest.fixture(scope="module", params=BOUNDS)
def run(request: Any, pair: tuple[str, Any, Any]) -> Iterator[tuple[str, Any, LLM, float]]:
    """A model's name, transformers' model and ours on a backend, and the largest error there."""
    name, theirs, directory = pair
    with LLM(directory, backend=request.param, max_requests=4) as llm:
        yield name, theirs, llm, BOUNDS[request.param]


# the tests of families in test_mmproj stand for the others
@pytest.mark.full(but=["*-idefics3-(2*", "*-idefics3-*two: *"])
@pytest.mark.parametrize(
    "parts",
    [
        ("What is ", 1, "?"),
        (2, " first"),
        ("last: ", 1),
        ("two: ", 1, " and ", 2, "?"),
        ("tiles: ", 3, " and ", 1, 1),
        ("none at all",),
    ],
    ids=str,
)
def test_logits_and_tokens_are_transformers_own(run: tuple[str, Any, LLM, float], parts: tuple[Any]) -> None:
    """Catches rows in a wrong order or place, tiles mixed up, positions that skip images, a lost scale."""
    name, theirs, llm, bound = run
    images = (image(name, part, seed) if isinstance(part, int) else part for seed, part in enumerate(parts))
    asked = prompt(name, *images)
    answer = our_tokens(llm.engine, asked, 12)
    with torch.no_grad():
        want = theirs(**their_inputs(name, asked)).logits[0].numpy()
        assert their_tokens(theirs, name, asked, answer) == answer
    assert relative(our_logits(llm.engine, asked), want) < bound


def test_rows_of_embeddings_are_transformers_own(run: tuple[str, Any, LLM, float]) -> None:
    """Catches an encoder's error that the text's layers hide."""
    name, theirs, llm, bound = run
    seen = image(name, 2, 7)
    inputs = their_inputs(name, prompt(name, seen))
    of_images = {k: v for k, v in inputs.items() if k.startswith(("pixel", "spatial", "image_"))}
    with torch.no_grad():
        found = theirs.model.get_image_features(**of_images)
    want = found.pooler_output
    want = torch.cat([*want]) if isinstance(want, list | tuple) else want.reshape(-1, want.shape[-1])
    deep = getattr(found, "deepstack_features", None) or []
    want = torch.cat([want, *(torch.cat([*each]) for each in deep)], dim=1)
    encodings = llm.engine.encodings
    rows = None
    while rows is None:
        rows = encodings.advance(seen, is_brief=False)
    assert rows.shape == want.shape
    assert relative(rows, want.numpy()) < bound


@pytest.mark.full
@pytest.mark.parametrize("name", ["idefics3", "qwen3_vl"])
def test_weights_of_16_bits(name: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches whole numbers too coarse for an encoder, or products whose bits depend on slices.

    Both sides have the weights that the file has.
    """
    theirs = save(tmp_path, name).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path)
    theirs = theirs.to(torch.float32)
    seen = image(name, 2, 7)
    with torch.no_grad():
        of_images = {
            k: v
            for k, v in their_inputs(name, prompt(name, seen)).items()
            if k.startswith(("pixel", "image_"))
        }
        found = theirs.model.get_image_features(**of_images).pooler_output
    want = torch.cat([*found]) if isinstance(found, list | tuple) else found.reshape(-1, found.shape[-1])
    asked = prompt(name, "What is ", seen, "?")
    with LLM(tmp_path, max_requests=4) as llm:
        encodings = llm.engine.encodings
        rows: list[Any] = []
        monkeypatch.setattr("kukri.engine.spans.images._MLP_ROWS", 7)
        monkeypatch.setattr("kukri.engine.spans.images._CUT_FROM", 0.1)
        for is_brief in (False, True):
            made = None
            while made is None:
                made = encodings.advance(seen, is_brief=is_brief)
            rows.append(made)
        with torch.no_grad():
            logits = theirs(**their_inputs(name, asked)).logits[0].numpy()
        assert relative(our_logits(llm.engine, asked), logits) < BOUNDS["cpu"]
    np.testing.assert_array_equal(*rows)
    assert relative(rows[0][:, : want.shape[1]], want.numpy()) < 1e-3


def test_slices_change_no_bit(run: tuple[str, Any, LLM, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rows lost or mixed up where a layer or the projector is cut, and a cut left half way."""
    name, _, llm, _ = run
    seen, encodings = image(name, 2, 7), llm.engine.encodings
    monkeypatch.setattr("kukri.engine.spans.images._MLP_ROWS", 7)
    monkeypatch.setattr("kukri.engine.spans.images._CUT_FROM", 0.1)
    monkeypatch.setattr("kukri.engine.spans.images._PROJECTED_ROWS", 3)
    monkeypatch.setattr(encodings, "_clock", iter(range(10**6)).__next__)  # a slice takes a second
    found: list[Any] = []
    n_slices: list[int] = []
    for kinds in ((False,), (True,), (True, True, False)):  # whole, in slices, and both
        turns, rows = cycle(kinds), None
        n_slices.append(0)
        while rows is None:
            rows = encodings.advance(seen, is_brief=next(turns))
            n_slices[-1] += 1
        found.append(rows)
    assert n_slices[1] > max(n_slices[0], 4)
    for rows in found[1:]:
        np.testing.assert_array_equal(rows, found[0])


@pytest.mark.parametrize("side", [4, 14, 16, 24, 26, 27, 28, 30, 32, 37, 64])
def test_places_of_patches_round_as_in_training(side: int) -> None:
    """Catches learned positions one off where a fraction in float32 falls short of its bound.

    The sides are those that encoders have: of some others torch's own bounds depend on the processor.
    """
    bounds = torch.arange(1 / side, 1.0, 1 / side)
    fractions = torch.clamp(
        torch.arange(side, dtype=torch.float32) * (1.0 / torch.tensor(side)), max=1 - 1e-6
    )
    places = torch.bucketize(fractions, bounds, right=True)
    np.testing.assert_array_equal(nearest_places(side).reshape(side, side)[0], places.numpy())


@pytest.mark.parametrize("shape", [(4, 4), (3, 9), (8, 8), (16, 5), (1, 1)])
def test_positions_are_resized_as_torch_does(shape: tuple[int, int]) -> None:
    """Catches a resize without antialiasing, with corners aligned, or with height and width swapped."""
    grid = np.random.default_rng(0).standard_normal((8, 8, 5)).astype(np.float32)
    want = torch.nn.functional.interpolate(
        torch.from_numpy(grid).permute(2, 0, 1)[None], shape, mode="bilinear", antialias=True
    )
    np.testing.assert_allclose(averaged(grid, shape), want[0].permute(1, 2, 0).numpy(), atol=1e-6)


def test_first_files_of_paddleocr_vl_say_the_same(tmp_path: Any) -> None:
    """Catches a name read two ways: a file that states text and images in one."""
    save_with_processor(tmp_path / "hf", "paddleocr_vl")
    stated = json.loads((tmp_path / "hf" / "config.json").read_text())
    first_files = {**stated, **stated.pop("text_config"), "use_3d_rope": True, "model_type": "paddleocr_vl"}
    assert hf_model_config(text_config(first_files), tmp_path / "hf" / "config.json") == hf_model_config(
        text_config(json.loads((tmp_path / "hf" / "config.json").read_text())),
        tmp_path / "hf" / "config.json",
    )


def test_a_damaged_encoder_is_refused(tmp_path: Any) -> None:
    """Catches a vision tower that is dropped in silence, whose model then invents what it sees."""
    from safetensors.numpy import load_file, save_file

    save(tmp_path, "idefics3")
    whole = load_file(tmp_path / "model.safetensors")
    lost = "model.vision_model.encoder.layers.1.mlp.fc1.weight"
    save_file({k: v for k, v in whole.items() if k != lost}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(FormatError, match=r"layers\.1\.mlp\.fc1.*is missing|is missing.*layers\.1\.mlp\.fc1"):
        LLM(tmp_path, backend="reference")
    more = {**whole, "model.vision_model.head.weight": np.zeros((4, 4), np.float32)}
    save_file(more, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(UnusedTensorError, match=r"takes: 'model\.vision_model\.head"):
        LLM(tmp_path, backend="reference")


def test_llava_with_another_encoder_is_refused(tmp_path: Any) -> None:
    """Catches an encoder taken for Pixtral's, and a projector that reads another layer or part of it."""
    own = {"model_type": "llava", "vision_config": {"model_type": "pixtral", "hidden_act": "silu"}}
    own |= {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    assert vision_config(own, tmp_path / "config.json", 64) is not None
    for key, value in (
        ("vision_config", {"model_type": "clip_vision_model"}),
        ("vision_feature_layer", -2),
        ("vision_feature_select_strategy", "default"),
    ):
        with pytest.raises(UnsupportedError, match="model_type" if key == "vision_config" else key):
            vision_config({**own, key: value}, tmp_path / "config.json", 64)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("conv_kernel_size", 4),
        ("layer_types", ["conv", "mamba"] * 7),
        ("num_key_value_heads", 3),
        ("norm_eps", 0),
        ("rope_parameters", {"rope_theta": -1.0}),
    ],
)
def test_lfm3_vl_with_other_layers_is_refused(tmp_path: Any, key: str, value: Any) -> None:
    """Catches convolutions without a middle, and a layer that is taken for a convolution."""
    with pytest.raises(
        (FormatError, UnsupportedError), match=key if key != "rope_parameters" else "rope_theta"
    ):
        vision_config({"model_type": "lfm3_vl", "vision_config": {key: value}}, tmp_path / "config.json", 64)
