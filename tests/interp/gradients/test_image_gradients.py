"""Gradients of encoders of images and of texts with images, next to torch's on transformers' models."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import HookError, RequestError
from kukri.interp import gradients
from kukri.interp.gradients import image_gradients
from kukri.vision.encoders.rotated import grid_of_blocks
from kukri.vision.image import ImageInput
from tests.vision.tiny_vision import MODELS, image, prompt, relative, save, their_inputs

RIGHT, WRONG = 5, 9
QUICK = ["idefics3", "gemma3", "gemma4", "qwen2_5_vl", "qwen3_vl"]
BLOCKS = (
    "encoder.layers",
    "transformer.layers",
    "visual.blocks",
    "vision_tower.layers",
)  # the ends of their names
FAMILIES = [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
METRIC = gradients.logit_difference(RIGHT, WRONG)


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, LLM]]:
    """A model's name, transformers' model with eager attention, and ours."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = save(directory, request.param)
    theirs.set_attn_implementation("eager")
    with LLM(directory, backend="reference") as llm:
        yield request.param, theirs, llm


def asked(name: str) -> Any:
    """A prompt with two images, the first of several tiles where the family has some."""
    return prompt(name, "What is ", image(name, 3, 1), " and ", image(name, 1, 2), "?")


def blocks(theirs: Any) -> Any:
    """The encoder's layers; none of Gemma 4's that has no attention."""
    return next((m for key, m in theirs.named_modules() if key.endswith(BLOCKS) and "vis" in key), [])


def patches(x: Any, lengths: Any) -> Any:
    """Those of all parts one after another, of an array [parts, T, D], padded, or of such rows."""
    rows = x.reshape(-1, x.shape[-1])
    if len(rows) == lengths.sum():
        return rows
    return np.concatenate([part[:n] for part, n in zip(x, lengths, strict=True)])


def order(name: str, images: Any) -> Any:
    """Where each of our patches lies among transformers', which has PaddleOCR-VL's row by row, and has
    LFM3-VL's square by square.
    """
    if name not in ("paddleocr_vl", "lfm3_vl"):
        return slice(None)
    places, first = [], 0
    for one in images:
        rows, columns = grid_of_blocks(one.grid[1:], 2)
        own = rows * one.grid[2] + columns
        places.append(first + (own if name == "paddleocr_vl" else np.argsort(own)))
        first += len(one.pixels)
    return np.concatenate(places)


def torch_gradients(theirs: Any, name: str) -> tuple[float, list[Any], list[Any]]:
    """The logit difference after a prompt, and its gradients by the streams after the encoder's layers and
    before the text's, [rows, D] each.
    """
    kept: tuple[list[Any], list[Any]] = [], []

    def keep(into: list[Any], x: Any) -> None:
        x.retain_grad()
        into.append(x)

    handles = [
        block.register_forward_hook(
            lambda module, given, found: keep(kept[0], found[0] if isinstance(found, tuple) else found)
        )
        for block in blocks(theirs)
    ]
    text = theirs.model.text_model if hasattr(theirs.model, "text_model") else theirs.model.language_model
    handles += [
        layer.register_forward_pre_hook(
            lambda module, given, options: keep(kept[1], given[0] if given else options["hidden_states"]),
            with_kwargs=True,
        )
        for layer in text.layers
    ]
    logits = theirs(**their_inputs(name, asked(name))).logits[0, -1]
    value = logits[RIGHT] - logits[WRONG]
    value.backward()
    for handle in handles:
        handle.remove()
    theirs.zero_grad()
    return float(value.detach()), *([x.grad.numpy() for x in one] for one in kept)


def test_gradients_of_an_answer_are_torchs(pair: tuple[str, Any, LLM]) -> None:
    """Catches a derivative of an encoder's op, of its projector, of rows that lie elsewhere in the text, of
    rows for deeper layers, by positions or windows of another patch.
    """
    name, theirs, llm = pair
    value, of_encoder, of_text = torch_gradients(theirs, name)
    ours = asked(name)
    found, _, grads = gradients.run_with_gradients(llm, ours, METRIC)
    assert found == pytest.approx(value, abs=2e-4)
    assert len(of_text) == llm.config.n_layers
    for layer, want in enumerate(of_text):
        # Gemma 4 makes embeddings of layers of the first
        point = "hook_embed" if name == "gemma4" and not layer else f"resid_pre{layer}"
        assert relative(grads[point][0], want.reshape(-1, llm.config.d_model)) < 2e-4
    metric = image_gradients.of_answer(llm, ours, METRIC)
    found, _, grads = llm.vision.run_with_gradients(list(ours.images), metric)
    assert found == pytest.approx(value, abs=2e-4)
    assert len(of_encoder) == (0 if name == "gemma4-unified" else llm.vision.config.n_layers)
    for layer, want in enumerate(of_encoder):
        mine = patches(grads["resid_post", layer], grads.lengths)
        assert relative(mine, patches(want, grads.lengths)[order(name, ours.images)]) < 2e-4


def random_metric(rows: Any) -> tuple[float, Any]:
    """A number of an array or of several, with a curve, and its gradient."""
    many = rows if isinstance(rows, list) else [rows]
    factors = [np.random.default_rng(3).standard_normal(one.shape).astype(np.float32) for one in many]
    value = sum(float((one * f + one**2 / 2).sum()) for one, f in zip(many, factors))
    grads = [f + one for one, f in zip(many, factors)]
    return value, grads if isinstance(rows, list) else grads[0]


def test_gradients_are_finite_differences(pair: tuple[str, Any, LLM]) -> None:
    """Catches a gradient of queries or values by another head, and that of an inner activation."""
    name, _, llm = pair
    vision, seen = llm.vision, image(name, 1, 4)
    (part,) = vision.model.parts(seen)
    names = ["hook_embed", "blocks.1.attn.hook_q", "blocks.1.attn.hook_v", "blocks.2.mlp.hook_post"]
    inner = "blocks.2.hook_resid_post"
    if name == "gemma4-unified":
        names, inner = ["hook_embed"], "blocks.0.hook_resid_mid"
    rng = np.random.default_rng(2)
    for of in (None, inner):
        _, activations, grads = vision.run_with_gradients(seen, random_metric, names, of=of)
        for point in names:
            x = activations[point]
            direction = rng.standard_normal(x.shape).astype(np.float32) * x.std()
            values = []
            for step in (-1e-3, 1e-3):
                given = {point: (x + np.float32(step) * direction).reshape(x.shape[1], -1)}
                values.append(random_metric(vision.tape(given).see(part, of).x)[0])
            slope = (values[1] - values[0]) / 2e-3
            size = float(np.sqrt((grads[point] ** 2).sum() * (direction**2).sum()))
            assert float((grads[point] * direction).sum()) == pytest.approx(slope, abs=5e-3 * size), point


def test_values_are_those_of_the_engine(pair: tuple[str, Any, LLM]) -> None:
    """Catches gradients at other activations than the encoder's, and images of a list in another order."""
    name, _, llm = pair
    seen = [image(name, 3, 1), image(name, 1, 2)]
    given: list[Any] = []

    def metric(rows: Any) -> tuple[float, Any]:
        given.append(rows)
        return 0.0, [np.ones_like(one) for one in rows]

    _, activations, grads = llm.vision.run_with_gradients(seen, metric)
    rows, cache = llm.vision.run_with_cache(seen)
    for mine, want in zip(given[0], rows, strict=True):
        assert relative(mine, want) < 2e-3  # float32 weights and values
    for point in activations:
        assert activations[point].shape == grads[point].shape == cache[point].shape
        assert relative(activations[point], cache[point]) < 2e-3


def test_a_tape_is_freed_with_its_last_user(pair: tuple[str, Any, LLM]) -> None:
    """Catches tapes of an image's parts that pile up until Python collects."""
    name, _, llm = pair
    tape = llm.vision.tape()
    result = tape.see(next(llm.vision.model.parts(image(name))))
    tape.backward(result, np.ones_like(result.x))
    freed = weakref.ref(tape)
    del tape, result
    assert freed() is None


def test_what_has_no_gradient_is_refused(pair: tuple[str, Any, LLM], monkeypatch: Any) -> None:
    """Catches zeros and errors of NumPy's in place of one line."""
    name, _, llm = pair
    vision, seen = llm.vision, image(name)
    lacking = "ln_final.hook_scale" if name == "gemma4-unified" else "blocks.1.attn.hook_pattern"
    for options in ({"names": [lacking]}, {"of": lacking}):
        with pytest.raises((RequestError, HookError), match=lacking):
            vision.run_with_gradients(seen, random_metric, **options)
    with pytest.raises(HookError, match=r"blocks\.9"):
        vision.run_with_gradients(seen, random_metric, ["blocks.9.hook_resid_pre"])
    with pytest.raises(RequestError, match="the metric's gradient must have the shape"):
        vision.run_with_gradients(seen, lambda rows: (0.0, rows[:1]))
    with pytest.raises(RequestError, match="as many as in the prompt, 2, not 1"):
        vision.run_with_gradients(seen, image_gradients.of_answer(llm, asked(name), METRIC))
    other = ImageInput(seen.pixels[..., :-1], seen.grid, seen.n_tokens, seen.digest)
    with pytest.raises(RequestError, match="'images' must"):
        vision.run_with_gradients(other, random_metric)
    monkeypatch.setattr(image_gradients, "most_that_fit", lambda *_: 1)
    with pytest.raises(RequestError, match="GB: give smaller images, or fewer names"):
        vision.run_with_gradients(seen, random_metric)
