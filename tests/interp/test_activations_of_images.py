"""Activations of prompts with images and of their encoders, against transformers, and edits of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from kukri import LLM
from kukri.errors import HookError, RequestError
from kukri.interp import plots
from tests.lazy_imports import lazy_imports
from tests.vision.tiny_vision import MODELS, image, our_tokens, prompt, relative, save, their_inputs

with lazy_imports():
    import torch

SEEN = ["idefics3", "gemma3", "gemma4-whole", "qwen3_vl"]
PARTS = {
    "gemma4-whole": "model.vision_tower",
    "idefics3": "model.vision_model",
    "gemma3": "model.vision_tower",
    "qwen3_vl": "model.visual",
}


@pytest.fixture(scope="module", params=SEEN)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Any, LLM]]:
    """A model's name, transformers' model with eager attention, and ours."""
    directory = tmp_path_factory.mktemp(request.param)
    theirs = save(directory, request.param)
    theirs.set_attn_implementation("eager")
    with LLM(directory, max_requests=4, n_threads=1) as llm:
        yield request.param, theirs, llm


def test_the_encoder_has_transformers_activations(pair: tuple[str, Any, LLM]) -> None:
    """Catches a layer shown as another, a part's patches in another's place, and a pattern with a mask."""
    name, theirs, llm = pair
    seen = image(name, 1, 3)
    encoder = theirs.get_submodule(PARTS[name])
    streams, patterns = [], []

    def keep(module: Any, _: Any, found: Any) -> None:
        streams.append((found[0] if isinstance(found, tuple) else found).reshape(-1, width))

    def keep_pattern(module: Any, _: Any, found: Any) -> None:
        patterns.append(found[1])

    width = llm.vision.config.d_model
    blocks = encoder.blocks if name == "qwen3_vl" else encoder.encoder.layers
    handles = [block.register_forward_hook(keep) for block in blocks]
    if name != "qwen3_vl":
        handles += [block.self_attn.register_forward_hook(keep_pattern) for block in blocks]
    with torch.no_grad():
        theirs(**their_inputs(name, prompt(name, seen)))
    for handle in handles:
        handle.remove()
    rows, cache = llm.vision.run_with_cache(seen)
    assert len(rows) == seen.n_tokens
    for layer, want in enumerate(streams):
        assert relative(cache["resid_post", layer][0], want.numpy()) < 3e-3
    for layer, want in enumerate(patterns):
        np.testing.assert_allclose(cache["pattern", layer][0], want[0].numpy(), atol=2e-3)
    assert len(streams) == llm.vision.config.n_layers
    np.testing.assert_allclose(cache["pattern", 0].sum(axis=-1), 1, rtol=1e-5)


def test_a_text_with_images_has_transformers_activations(pair: tuple[str, Any, LLM]) -> None:
    """Catches a run that leaves the images out, and rows of chunks in a wrong order."""
    name, theirs, llm = pair
    asked = prompt(name, "What is ", image(name, 1, 1), " and ", image(name, 1, 2), "?")
    streams: list[Any] = []
    layers = theirs.get_submodule("model.text_model" if name == "idefics3" else "model.language_model").layers

    def keep(module: Any, given: Any, options: Any) -> None:
        streams.append(given[0] if given else options["hidden_states"])

    handles = [layer.register_forward_pre_hook(keep, with_kwargs=True) for layer in layers]
    with torch.no_grad():
        want = theirs(**their_inputs(name, asked), output_attentions=True)
    for handle in handles:
        handle.remove()
    logits, cache = llm.run_with_cache(asked, names=lambda point: point.endswith(("resid_pre", "pattern")))
    assert logits is not None
    assert relative(logits[0], want.logits[0].numpy()) < 3e-3
    assert len(streams) == llm.config.n_layers
    for layer, stream in enumerate(streams):
        assert relative(cache["resid_pre", layer][0], stream[0].numpy()) < 3e-3
    for layer, pattern in enumerate(want.attentions):
        np.testing.assert_allclose(cache["pattern", layer][0], pattern[0].numpy(), atol=5e-3)


def test_attention_over_an_image(pair: tuple[str, Any, LLM], tmp_path: Any) -> None:
    """Catches weights of another token, or rows and columns exchanged."""
    name, _, llm = pair
    asked = prompt(name, "a", image(name, 1, 1), "b", image(name, 1, 2), "cd")
    _, cache = llm.run_with_cache(asked, names=["pattern1"])
    second = asked.spans[-1]
    weights = llm.vision.attention(cache, asked, 1, query=-2, image=1)
    n = second.n_tokens
    assert weights.shape[1:] == {"qwen3_vl": (5, 3), "gemma4-whole": (3, 2)}.get(
        name, (int(n**0.5), int(n**0.5))
    )
    want = cache["pattern1"][0, :, len(asked) - 2, second.start : second.start + n]
    np.testing.assert_array_equal(weights.reshape(len(want), n), want)
    seen = np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)
    plots.image_attention(weights, seen, tmp_path / "heads.png")
    assert (tmp_path / "heads.png").read_bytes()[:4] == b"\x89PNG"
    with pytest.raises(RequestError, match="picture"):
        plots.image_attention(weights[0], seen)


def test_layers_with_windows_are_shown_once(tmp_path: Any) -> None:
    """Catches backends that show layers again as they are with other windows."""
    save(tmp_path, "qwen2_5_vl")
    seen = image("qwen2_5_vl", 1, 3)
    rows: dict[str, Any] = {}
    streams: dict[str, Any] = {}
    for backend in ("cpu", "reference"):
        shown: list[str] = []
        hooks = [("blocks.0.hook_resid_mid", lambda value, hook, shown=shown: shown.append(hook.name))]
        with LLM(tmp_path, backend=backend, n_threads=1) as llm:
            rows[backend], cache = llm.vision.run_with_cache(seen, fwd_hooks=hooks)
        streams[backend] = [cache["resid_post", layer] for layer in range(llm.vision.config.n_layers)]
        assert len(shown) == 1
    assert relative(rows["reference"], rows["cpu"]) < 3e-3
    for ours, want in zip(streams["reference"], streams["cpu"], strict=True):
        assert relative(ours, want) < 3e-3


def test_one_image_patched_into_another(pair: tuple[str, Any, LLM]) -> None:
    """Catches edits of the encoder that the text does not see, that others' answers do, or that are kept."""
    name, _, llm = pair
    ours, other = image(name, 2, 1), image(name, 2, 2)
    asked, wanted = prompt(name, "a", ours, "b"), prompt(name, "a", other, "b")
    plain, want = (llm.run_with_hooks(one) for one in (asked, wanted))
    before = our_tokens(llm.engine, asked, 4)
    point = "blocks.0.hook_resid_pre"
    _, cache = llm.vision.run_with_cache(other, names=[point])
    patches = iter(cache[point])

    def patch(value: Any, hook: Any) -> None:
        value[:] = next(patches)[: value.shape[1]]

    hooks = [(f"vision.{point}", patch)]
    patched = llm.run_with_hooks(asked, fwd_hooks=hooks)
    assert plain is not None
    assert want is not None
    assert patched is not None
    np.testing.assert_array_equal(patched[0, -1], want[0, -1])
    assert (patched[0, -1] != plain[0, -1]).any()
    assert our_tokens(llm.engine, asked, 4) == before
    np.testing.assert_array_equal(llm.run_with_hooks(asked), plain)


def test_hooks_and_interventions_of_the_text(pair: tuple[str, Any, LLM]) -> None:
    """Catches edits that come after the hooks, or only one of both kinds."""
    name, _, llm = pair
    asked = prompt(name, "a", image(name, 1, 1), "b")
    edit = {"op": "scale", "name": "blocks.1.hook_resid_post", "strength": 0.0}
    _, cache = llm.run_with_cache(asked, names=["resid_post1"], interventions=[edit])
    np.testing.assert_array_equal(cache["resid_post1"], 0)
    seen: list[int] = []
    loss, _ = llm.run_with_cache(
        asked,
        return_type="loss",
        fwd_hooks=[("blocks.0.hook_resid_pre", lambda value, hook: seen.append(value.shape[1]))],
    )
    assert np.isfinite(loss)
    assert sum(seen) == len(asked)


def test_what_cannot_be_is_refused(pair: tuple[str, Any, LLM]) -> None:
    """Catches names and options that do nothing."""
    name, _, llm = pair
    asked = prompt(name, image(name, 1, 1))
    with pytest.raises(HookError, match=r"blocks\.9"):
        llm.run_with_hooks(asked, fwd_hooks=[("vision.blocks.9.hook_resid_pre", print)])
    with pytest.raises(RequestError, match="stop_at_layer"):
        llm.run_with_cache(asked, stop_at_layer=1)
    with pytest.raises(HookError, match="division"):
        llm.vision.run_with_hooks(image(name), [("blocks.0.hook_resid_pre", lambda value, hook: 1 / 0)])
    assert {*SEEN} <= {*MODELS}


def test_a_text_model_has_no_encoder(tiny_path: Any) -> None:
    """Catches an error of Python's own."""
    with (
        LLM(tiny_path, backend="reference") as llm,
        pytest.raises(RequestError, match="which reads only text"),
    ):
        _ = llm.vision
