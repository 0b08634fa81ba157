"""Models whose tokens have three positions in images (M-RoPE): positions, and what must not change a bit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.engine.batch_builder import BatchBuilder
from kukri.errors import FormatError, RequestError, ShapeError
from kukri.formats.huggingface.config import hf_model_config, text_config
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.step import ForwardBatch
from kukri.kernels.weight_handles import RopeFrequencies
from kukri.models.rope import section_axes
from kukri.vision.image import ImageInput, ImagePrompt
from tests.lazy_imports import lazy_imports
from tests.vision.test_image_prefixes import TEXT, ask, finish
from tests.vision.tiny_vision import (
    MODELS,
    QWENS,
    TinyVision,
    image,
    our_logits,
    our_tokens,
    prompt,
    relative,
    save,
    their_inputs,
)

with lazy_imports():
    import torch


@pytest.fixture(scope="module", params=QWENS)
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, Any]:
    """A model's name, its directory, and transformers' model."""
    path = tmp_path_factory.mktemp(request.param)
    return request.param, path, save(path, request.param)


@pytest.fixture(scope="module")
def llm(saved: tuple[str, Path, Any]) -> Iterator[LLM]:
    with LLM(saved[1], max_requests=4) as opened:
        yield opened


def sized(height: int, width: int, seed: int = 0) -> ImageInput:
    """An image of so many patches."""
    pixels = np.random.default_rng(seed).uniform(-1, 1, (height * width, 96)).astype(np.float32)
    return ImageInput(pixels, (1, height, width), len(pixels) // 4, sha256(pixels.tobytes()).digest())


@pytest.mark.parametrize(
    "parts",
    [("text ", (10, 6), " text"), ((2, 2),), ((40, 2), " tall"), ("last ", (4, 30)), ((6, 6), "x", (8, 4))],
    ids=str,
)
def test_positions_are_transformers_own(
    saved: tuple[str, Path, Any], llm: LLM, parts: tuple[Any, ...]
) -> None:
    """Catches rows and columns swapped, patches counted for rows, text that counts on from the rows."""
    name, _, theirs = saved
    asked = prompt(name, *(part if isinstance(part, str) else sized(*part) for part in parts))
    inputs = their_inputs(name, asked)
    three = torch.zeros(1, 3, dtype=torch.long)
    want, delta = theirs.model.get_rope_index(
        input_ids=torch.cat([inputs["input_ids"], three], 1),
        mm_token_type_ids=torch.cat([inputs["mm_token_type_ids"], three], 1),
        image_grid_thw=inputs["image_grid_thw"],
        attention_mask=None,
    )
    spans, n = llm.engine.maker.make_request(asked).sequence.spans, len(asked)
    for start, stop in ((0, n + 3), (0, n), (3, n - 1), (n - 1, n + 2), (n + 1, n + 3)):
        np.testing.assert_array_equal(spans.positions(start, stop), want[:, 0, start:stop].numpy())
    assert spans.positions(n + 2, n + 3)[0, 0] == n + 2 + int(delta)  # type: ignore[index]


@pytest.mark.parametrize("grid", [(2, 2), (40, 2), (4, 30), (22, 14)], ids=str)
def test_images_of_odd_proportions(saved: tuple[str, Path, Any], llm: LLM, grid: tuple[int, int]) -> None:
    """Catches windows cut short at the wrong edge, and learned positions resized along the wrong side."""
    name, _, theirs = saved
    asked = prompt(name, "What is ", sized(*grid), "?")
    with torch.no_grad():
        want = theirs(**their_inputs(name, asked)).logits[0].numpy()
    assert relative(our_logits(llm.engine, asked), want) < 3e-3


@pytest.mark.parametrize("step_tokens", [3, 16, 512])
def test_bits_do_not_depend_on_chunks_or_company(
    saved: tuple[str, Path, Any], llm: LLM, step_tokens: int
) -> None:
    """Catches positions of another request's tokens or of the chunk before, and states of later layers added
    to other rows.
    """
    name, directory, _ = saved
    asked = prompt(name, "x", image(name, 3, 1), "middle", image(name, 1, 2), image(name, 1, 1))
    want = our_logits(llm.engine, asked)
    alone = our_tokens(llm.engine, [256, *TEXT.encode()], 9)
    with LLM(directory, max_step_tokens=step_tokens, max_requests=4, n_threads=1) as other:
        company = [
            ask(other.engine, one, 9) for one in ([256, *TEXT.encode()], prompt(name, image(name, 1, 5)))
        ]
        np.testing.assert_array_equal(our_logits(other.engine, asked), want)
        finish(other.engine, *company)
        assert company[0].output_ids == alone


def test_later_turns_are_as_if_computed_afresh(saved: tuple[str, Path, Any], llm: LLM) -> None:
    """Catches positions that begin again after a cached prefix, and drafts at others than their tokens."""
    name, directory, _ = saved
    turn = prompt(name, TEXT, image(name, 1, 4), " first question abcabcabcabc")
    request = ask(llm.engine, turn)
    finish(llm.engine, request)
    ids = [*turn.token_ids, *request.output_ids, *b" and a second question abcabcabcabc"]
    second = ImagePrompt(ids, turn.images, turn.spans)
    again = ask(llm.engine, second, 24)
    finish(llm.engine, again)
    assert again.sequence.n_prefix_hit >= 64
    drafted = ask(llm.engine, second, 24, speculation="ngram", prediction=tuple(again.output_ids))
    finish(llm.engine, drafted)
    assert drafted.sequence.n_accepted > 0
    with LLM(directory, max_requests=1, prefix_cache=False) as alone:
        want = our_tokens(alone.engine, second, 24, speculation="off")
    assert again.output_ids == drafted.output_ids == want


def test_preempted_and_saved_requests_continue(
    saved: tuple[str, Path, Any], llm: LLM, tmp_path: Path
) -> None:
    """Catches positions lost with the pages of a preempted request, or with those read from disk."""
    name, directory, _ = saved
    asked = [
        prompt(name, f"{TEXT} {seed}", image(name, 1, seed), " what is in it, and why?") for seed in range(3)
    ]
    want = [our_tokens(llm.engine, one, 60) for one in asked]
    page_bytes = 4 * 2 * 2 * 16 * 16 * 2
    with LLM(directory, max_requests=3, kv_bytes=20 * page_bytes, max_context=256) as small:
        requests = [ask(small.engine, one, 60) for one in asked]
        finish(small.engine, *requests)
        assert small.engine.scheduler.n_preemptions > 0
        assert [request.output_ids for request in requests] == want
    for n_encoded in (1, 0):
        with LLM(directory, prefix_dir=str(tmp_path / "saved")) as opened:
            assert our_tokens(opened.engine, asked[0], 60) == want[0]
            assert opened.engine.encodings.n_encoded == n_encoded


def test_slices_and_windows_change_no_bit(saved: tuple[str, Path, Any], llm: LLM) -> None:
    """Catches a slice whose layers see more or less than theirs, and states of layers lost between slices."""
    encodings = llm.engine.encodings
    seen = image(saved[0], 3, 8)
    whole = None
    while whole is None:
        whole = encodings.advance(seen, is_brief=False)
    before, encodings._clock = encodings._clock, iter(range(10**6)).__next__
    try:
        rows, n = None, 0
        while rows is None:
            rows, n = encodings.advance(seen, is_brief=True), n + 1
    finally:
        encodings._clock = before
    assert n == 2 * 4 + 1  # and the projector
    np.testing.assert_array_equal(rows, whole)


def test_text_alone_rotates_as_before(saved: tuple[str, Path, Any], llm: LLM) -> None:
    """Catches steps of texts that bring positions of their own, and so are copied instead of filled in."""
    seen: list[ForwardBatch] = []
    built = BatchBuilder.build

    def noting(builder: BatchBuilder, chunks: Any, *rest: Any) -> ForwardBatch:
        seen.append(built(builder, chunks, *rest))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BatchBuilder, "build", noting)
        our_tokens(llm.engine, [256, *b"only text"], 5)
        assert all(batch.rope_positions is None for batch in seen)
        seen.clear()
        our_tokens(llm.engine, prompt(saved[0], image(saved[0], 1, 2), "?"), 5)
    shapes = [batch.rope_positions.ndim for batch in seen if batch.rope_positions is not None]
    assert 2 in shapes
    assert shapes[-1] == 1


def test_images_that_do_not_fit_are_refused(saved: tuple[str, Path, Any], llm: LLM) -> None:
    """Catches a grid by which patches or positions would be read from elsewhere."""
    name = saved[0]
    for grid, n_tokens in (
        ((1, 6, 10), 14),
        ((1, 3, 20), 15),
        ((2, 5, 6), 15),
        ((1, 60), 15),
        ((1, -6, -10), 15),
    ):
        with pytest.raises(RequestError, match="'images' must be patches of 96 numbers"):
            llm.generate(prompt(name, replace(image(name, 1), grid=grid, n_tokens=n_tokens)))


def test_a_file_without_sections_sees_nothing(tmp_path: Path) -> None:
    """Catches images whose tokens rotate by one position each, in silence, if sections are left out."""
    save(tmp_path, "qwen3_vl")
    stated = json.loads((tmp_path / "config.json").read_text())
    del stated["text_config"]["rope_parameters"]["mrope_section"]
    (tmp_path / "config.json").write_text(json.dumps(stated))
    with LLM(tmp_path, backend="reference", max_requests=1) as blind:
        assert len(our_tokens(blind.engine, [256, *b"text"], 2)) == 2
        with pytest.raises(
            RequestError, match=r"'mrope_section' is required in the model's config\.json for"
        ):
            blind.generate(prompt("qwen3_vl", image("qwen3_vl", 1)))


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_vl_moe"])
def test_mixtures_see_too(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches experts under other names below a model of images, and axes in sections."""
    dense = MODELS[name.removesuffix("_moe")]
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    mixture |= {"shared_expert_intermediate_size": 32} if name == "qwen3_5_moe" else {"norm_topk_prob": True}
    text = {**dense.parts["text_config"], **mixture, "model_type": f"{name}_text"}
    classes = {
        "qwen3_5_moe": ("Qwen3_5MoeConfig", "Qwen3_5MoeForConditionalGeneration"),
        "qwen3_vl_moe": ("Qwen3VLMoeConfig", "Qwen3VLMoeForConditionalGeneration"),
    }
    monkeypatch.setitem(
        MODELS, name, TinyVision(*classes[name], {**dense.parts, "text_config": text}, dense.tile_tokens)
    )
    theirs = save(tmp_path, name)
    family = name.removesuffix("_moe")
    asked = prompt(family, "x", image(family, 1, 1), "?", image(family, 1, 2), "and")
    with torch.no_grad():
        want = theirs(**their_inputs(family, asked)).logits[0].numpy()
    with LLM(tmp_path, backend="reference", max_requests=1) as llm:
        assert relative(our_logits(llm.engine, asked), want) < 1e-4


def test_axes_of_sections() -> None:
    """Catches sections that are not Qwen3-VL's: its axes take turns from 1 on, and axis 0 has the rest."""
    assert section_axes([2, 3, 3], interleaved=False) == (0, 0, 1, 1, 1, 2, 2, 2)
    assert section_axes([4, 2, 2], interleaved=True) == (0, 1, 2, 0, 1, 2, 0, 0)
    found = section_axes([24, 20, 20], interleaved=True)
    assert [found.count(axis) for axis in range(3)] == [24, 20, 20]


def test_rows_of_several_positions() -> None:
    """Catches a pair of dimensions that turns by another axis, and rows written over the plain ones."""
    plain = RopeRows(RopeFrequencies((1.0, 0.5, 0.1), 20))
    rows = RopeRows(RopeFrequencies((1.0, 0.5, 0.1), 20, axes=(0, 2, 1)))
    for each in (plain, rows):
        each.ensure(20)
    positions = np.array([[3, 4], [5, 19], [0, 7]], np.int32)
    first = rows.mix(positions)
    for mixed, own in ((rows.cos, plain.cos), (rows.sin, plain.sin)):
        want = [[own[3, 0], own[0, 1], own[5, 2]], [own[4, 0], own[7, 1], own[19, 2]]]
        np.testing.assert_array_equal(mixed[first : first + 2], want)
        np.testing.assert_array_equal(mixed[:20], own)
    with pytest.raises(ShapeError, match="3 positions a token, and the RoPE has None"):
        plain.at(positions)
    with pytest.raises(ShapeError, match="beyond the RoPE's 20 positions"):
        rows.ensure(21)


def test_sections_in_config_json(tmp_path: Path) -> None:
    """Catches Qwen2.5-VL's own file, which states its text at the top, and sections that do not add up."""
    own = {
        **{"model_type": "qwen2_5_vl", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 99, "rms_norm_eps": 1e-6},
        **{"max_position_embeddings": 256, "hidden_act": "silu", "rope_theta": 1e6},
        **{"tie_word_embeddings": True, "vision_config": {"depth": 2}},
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
    }
    rope = hf_model_config(text_config(own), tmp_path / "config.json").rope
    assert rope.axes == (0, 0, 1, 1, 1, 2, 2, 2)
    own["rope_scaling"] = {"type": "mrope", "mrope_section": [2, 3, 4]}
    with pytest.raises(FormatError, match=r"mrope_section.* must be three numbers with the sum 8"):
        hf_model_config(text_config(own), tmp_path / "config.json")
