"""`model.forward` against transformers: whole prompts, chunks through a cache, masks of every kind."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from kukri.errors import HookError, KukriError, RequestError
from kukri.kernels.paged_kv import PAGE_TOKENS
from kukri.models import Model, load_model
from tests.lazy_imports import lazy_imports
from tests.models.made_models import make
from tests.models.tiny_llama import TorchSource, random_ids
from tests.models.tiny_models import HEADS, KV_HEADS, V

with lazy_imports():
    import torch
    from transformers import DynamicCache

ARCHITECTURES = ("llama", "mistral", "phi3", "qwen2", "qwen3", "smollm3")
CONTEXT = 1024
N_TOKENS = 1010  # chunks of 1000 leave a rest
# docs/numerics.md: float32 in another order; and keys that another order rounds to the float16 next to
TOLERANCES = {"reference": 1e-4, "cpu": 4e-3}


def half_cache() -> Any:
    """transformers' cache, holding what float16 can: the CPU backend's cache."""
    cache = DynamicCache()
    update = cache.update
    cache.update = lambda keys, values, *rest, **more: update(
        keys.half().float(), values.half().float(), *rest, **more
    )
    return cache


@cache
def pair(name: str) -> tuple[Any, Any, TorchSource]:
    return make(name, context=CONTEXT)


def bound(name: str, backend: Any) -> Model:
    _, config, source = pair(name)
    model = load_model(TorchSource({k: torch.tensor(a) for k, a in source.arrays.items()}), config)
    model.bind(backend)
    return model


def theirs(name: str, backend: Any, ids: Any, **arguments: Any) -> np.ndarray:
    """transformers' logits, its keys and values rounded as the backend rounds them."""
    cache = half_cache() if backend.name == "cpu" else DynamicCache()
    arguments = {key: torch.as_tensor(value) for key, value in arguments.items()}
    with torch.no_grad():
        return pair(name)[0](torch.tensor(ids), past_key_values=cache, **arguments).logits.numpy()


@cache
def long_answer(name: str, half: bool) -> tuple[np.ndarray, np.ndarray]:
    ids = np.array(random_ids(N_TOKENS, V))[None]
    hf = pair(name)[0]
    with torch.no_grad():
        logits = hf(torch.tensor(ids), past_key_values=half_cache() if half else DynamicCache()).logits
    return ids, logits.numpy()


def close(got: np.ndarray, want: np.ndarray, backend: Any) -> None:
    assert (got.dtype, got.shape) == (np.float32, want.shape)
    np.testing.assert_allclose(got, want, atol=TOLERANCES[backend.name], rtol=0)


def batch(n_rows: int, n_tokens: int, seed: int = 5) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, V, (n_rows, n_tokens))


# --- the matrix -----------------------------------------------------------------------------------------


@pytest.mark.full(only=["reference-*-1-cache", "reference-*-10-cache", "cpu-*-1-cache"])
@pytest.mark.parametrize("with_cache", [True, False], ids=["cache", "whole"])
@pytest.mark.parametrize("chunk", [1, 10, 100, 1000])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_are_transformers_own(name: str, chunk: int, with_cache: bool, backend: Any) -> None:
    """A mask [t, t] where [t, t + offset] is meant; a window or rotation that counts from the chunk."""
    ids, want = long_answer(name, backend.name == "cpu")
    model = bound(name, backend)
    if not with_cache:
        close(model.forward(ids[:, :chunk]), want[:, :chunk], backend)
        return
    cache = model.new_cache(1, N_TOKENS)
    while (start := cache.n_tokens) < N_TOKENS:
        # one token at a time at both ends of the text, past windows and pages; all of it takes 1,010 steps
        size = 800 if chunk == 1 and start == 100 else chunk
        part = slice(start, start + size)
        close(model.forward(ids[:, part], cache=cache), want[:, part], backend)
    assert cache.n_tokens == N_TOKENS


@pytest.mark.full
def test_the_tolerances_would_show_the_mistakes_that_the_matrix_is_for() -> None:
    """A tolerance wider than what a forgotten offset, window or cache changes."""
    for name in ARCHITECTURES:
        ids, want = long_answer(name, half=False)
        with torch.no_grad():
            alone = pair(name)[0](torch.tensor(ids[:, 500:510])).logits.numpy()
            late = pair(name)[0](
                torch.tensor(ids[:, 500:510]), position_ids=torch.arange(500, 510)[None]
            ).logits.numpy()
        for wrong in (alone, late):
            assert np.abs(wrong - want[:, 500:510]).max() > 50 * max(TOLERANCES.values())
    windows = {name: {layer.window for layer in pair(name)[1].layers} for name in ARCHITECTURES}
    assert [windows[name] for name in ("mistral", "phi3", "qwen2")] == [{5}, {9}, {None, 7}]
    assert {layer.use_rope for layer in pair("smollm3")[1].layers} == {True, False}


# --- pads -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", ["llama", "mistral", "smollm3", "qwen2"])
def test_padded_batches(name: str, side: str, backend: Any) -> None:
    """A pad that is seen, positions that skip or count pads otherwise, a row that sees its neighbour."""
    model, lengths = bound(name, backend), [30, 1, 17]
    mask = np.zeros((3, 30), np.int64)
    for row, n in enumerate(lengths):
        mask[row, -n:] = 1
    mask = mask if side == "left" else mask[:, ::-1].copy()
    ids = batch(3, 30)
    want = theirs(name, backend, ids, attention_mask=mask)
    got = model.forward(ids, mask)
    seen = mask.astype(bool)
    close(got[seen], want[seen], backend)
    assert not got[~seen].any()
    np.testing.assert_array_equal(model.forward(ids, seen), got)
    np.testing.assert_array_equal(model.forward(torch.tensor(ids), torch.tensor(mask)), got)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_continues_from_its_cache(side: str, backend: Any) -> None:
    """Columns taken for places in the cache once pads lie before them."""
    model = bound("llama", backend)
    mask = np.ones((2, 25), np.int64)
    mask[1, slice(0, 6) if side == "left" else slice(14, 20)] = 0
    ids = batch(2, 25)
    want = theirs("llama", backend, ids, attention_mask=mask)
    cache = model.new_cache(2, 25)
    for start, stop in ((0, 20), (20, 21), (21, 25)):
        got = model.forward(ids[:, start:stop], mask[:, :stop], cache=cache)
        seen = mask[:, start:stop].astype(bool)
        close(got[seen], want[:, start:stop][seen], backend)
    again = model.new_cache(2, 25)
    model.forward(ids[:, :20], mask[:, :20], cache=again)
    got = model.forward(ids[:, 20:], cache=again)  # without a mask the new ones are tokens
    close(got, want[:, 20:], backend)


def test_pads_leave_other_tokens_to_the_bit(backend: Any) -> None:
    """A row whose arithmetic depends on the others, or on how the batch was cut into steps."""
    model, ids = bound("qwen3", backend), batch(3, 150)
    mask = np.ones((3, 150), np.int64)
    mask[1, :40] = 0
    got = model.forward(ids, mask)
    np.testing.assert_array_equal(model.forward(ids[2]), got[2:])
    alone = model.forward(ids[1, 40:], positions=np.arange(40, 150))
    np.testing.assert_array_equal(alone[0], got[1, 40:])
    cache = model.new_cache(3, 200)
    parts = [model.forward(ids[:, i : i + 37], mask[:, : i + 37], cache=cache) for i in range(0, 150, 37)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), got)


def test_positions_rotate_and_nothing_else(backend: Any) -> None:
    """Positions dropped, or taken for what causality and windows count."""
    model, ids = bound("mistral", backend), batch(2, 20)
    positions = np.stack([np.arange(20) * 3 + 5, np.arange(20)[::-1] + 900])
    close(
        model.forward(ids, positions=positions),
        theirs("mistral", backend, ids, position_ids=positions.copy()),
        backend,
    )
    shared = model.forward(ids, positions=positions[0])
    np.testing.assert_array_equal(shared, model.forward(ids, positions=np.stack([positions[0]] * 2)))


def test_holes_are_hidden_where_no_layer_has_a_window(backend: Any) -> None:
    """A token between others that stays visible though the mask says 0."""
    ids, mask = batch(1, 20), np.ones((1, 20), np.int64)
    mask[0, 8:11] = 0
    seen = mask.astype(bool)
    got = bound("qwen3", backend).forward(ids, mask)
    close(got[seen], theirs("qwen3", backend, ids, attention_mask=mask)[seen], backend)
    with pytest.raises(RequestError, match="layers with a window or a state do not support padding"):
        bound("mistral", backend).forward(ids, mask)


# --- masks of four dimensions ---------------------------------------------------------------------------


def random_mask(shape: tuple[int, ...], seed: int = 2) -> np.ndarray:
    """Boolean; every token sees at least itself."""
    mask = np.random.default_rng(seed).random(shape) < 0.4
    n_new, n_total = shape[2:]
    mask[:, :, np.arange(n_new), np.arange(n_total - n_new, n_total)] = True
    return mask


@pytest.mark.parametrize("n_rows", [1, 2])
@pytest.mark.parametrize("n_heads", [1, HEADS])
@pytest.mark.parametrize("name", ["llama", "mistral", "smollm3", "phi3"])
def test_masks_are_used_as_given(name: str, n_heads: int, n_rows: int, backend: Any) -> None:
    """Causality or a window kept next to the mask, a head or row that reads another's."""
    model, ids = bound(name, backend), batch(2, 37)
    mask = random_mask((n_rows, n_heads, 37, 37))
    assert np.triu(mask[0, 0], 1).any(), "the mask shows no later token, and could be taken for causal"
    lowest = torch.finfo(torch.float32).min
    want = theirs(name, backend, ids, attention_mask=np.where(mask, 0, lowest).astype(np.float32))
    close(model.forward(ids, mask), want, backend)
    close(model.forward(ids, np.where(mask, 0.0, -np.inf)), want, backend)
    added = np.random.default_rng(3).normal(size=mask.shape).astype(np.float32)
    close(model.forward(ids, added), theirs(name, backend, ids, attention_mask=added), backend)


def test_the_causal_mask_gives_what_no_mask_gives(backend: Any) -> None:
    """A mask that is read a column or a row off."""
    model, ids = bound("llama", backend), batch(1, 70)
    causal = np.tril(np.ones((70, 70), bool))[None, None]
    close(model.forward(ids, causal), model.forward(ids), backend)


@pytest.mark.parametrize("chunk", [1, 10, 33])
def test_masks_over_a_cache(chunk: int, backend: Any) -> None:
    """Columns of the mask that count from the chunk; a mask against a cache whose row holds pads."""
    model, ids = bound("llama", backend), batch(2, 40)
    mask = random_mask((2, 1, 40, 40)) & np.tril(np.ones((40, 40), bool))
    mask[1, :, 3:, :3] = False  # the pads below
    lowest = torch.finfo(torch.float32).min
    want = theirs("llama", backend, ids, attention_mask=np.where(mask, 0, lowest).astype(np.float32))
    cache = model.new_cache(2, 40)
    pads = np.ones((2, 3), np.int64)
    pads[1] = 0
    first = np.where(mask[:, :, :3, :3], 0, lowest).astype(np.float32)
    model.forward(ids[:, :3], first, cache=cache)
    for start in range(3, 40, chunk):
        stop = min(start + chunk, 40)
        got = model.forward(ids[:, start:stop], mask[:, :, start:stop, :stop], cache=cache)
        close(got, want[:, start:stop], backend)
    padded = model.new_cache(2, 40)
    model.forward(ids[:1].repeat(2, 0)[:, :3], pads, cache=padded)
    assert padded.stored().tolist() == [[True] * 3, [False] * 3]
    got = model.forward(ids[:, 3:], mask[:, :, 3:], cache=padded)
    close(got[1], want[1, 3:], backend)


def test_a_token_that_sees_nothing_gets_nothing_from_attention(backend: Any) -> None:
    """NaN from a softmax over nothing. PyTorch's attention gives zeros there too."""
    model, ids = bound("llama", backend), batch(1, 20)
    mask = np.tril(np.ones((20, 20), bool))[None, None]
    mask[..., 4, :] = False
    got = model.forward(ids, mask)
    hf = pair("llama")[0]
    hf.set_attn_implementation("sdpa")
    try:
        want = theirs("llama", backend, ids, attention_mask=mask)
    finally:
        hf.set_attn_implementation("eager")
    close(got, want, backend)


# --- caches, hooks, the backend -------------------------------------------------------------------------


def test_a_cache_is_cut_and_used_again(backend: Any) -> None:
    """Keys of a branch that was left showing in the next."""
    model, ids = bound("smollm3", backend), batch(2, 30)
    cache = model.new_cache(2, 30)
    model.forward(ids, cache=cache)
    cache.crop(11)
    other = batch(2, 19, seed=9)
    want = model.forward(np.concatenate([ids[:, :11], other], axis=1))
    np.testing.assert_array_equal(model.forward(other, cache=cache), want[:, 11:])
    with pytest.raises(RequestError, match="cannot be cut to 31 tokens, but has 30"):
        cache.crop(31)


def test_calls_without_a_cache_know_nothing_of_one_another(backend: Any) -> None:
    """Scratch memory that one call leaves for the next, shorter or longer, of more rows or fewer."""
    model = bound("mistral", backend)
    ids = batch(3, 300)
    want = model.forward(ids[:1, :20])
    for shape in ((3, 300), (1, 5), (2, 290)):
        model.forward(ids[: shape[0], : shape[1]])
        np.testing.assert_array_equal(model.forward(ids[:1, :20]), want)


def test_a_failed_call_leaves_the_cache_as_it_was(backend: Any) -> None:
    """A hook's error after which the text continues from tokens that were never computed."""
    model, ids = bound("llama", backend), batch(1, 20)
    cache = model.new_cache(1, 20)
    want = model.forward(ids)
    model.forward(ids[:, :8], cache=cache)
    hooks = {"blocks.1.hook_resid_pre": lambda name, x: 1 / 0}
    model.bound.add_hooks(hooks)
    with pytest.raises(HookError, match=r"blocks\.1"):
        model.forward(ids[:, 8:], cache=cache)
    model.bound.remove_hooks(hooks)
    np.testing.assert_array_equal(model.forward(ids[:, 8:], cache=cache), want[:, 8:])


@pytest.mark.parametrize("masked", [False, True])
def test_hooks_see_and_edit_the_tokens_of_a_call(masked: bool, backend: Any) -> None:
    """A program that keeps listeners that are gone, or that masks run without."""
    model, ids = bound("llama", backend), batch(2, 9)
    mask = np.tril(np.ones((9, 9), bool))[None, None] if masked else None
    plain = model.forward(ids, mask)
    seen: list[int] = []

    def silence(name: str, x: np.ndarray) -> np.ndarray:
        seen.append(len(x))
        return np.zeros_like(x)

    hooks = {"blocks.2.hook_mlp_out": silence}
    model.bound.add_hooks(hooks)
    edited = model.forward(ids, mask)
    model.bound.remove_hooks(hooks)
    assert sum(seen) == ids.size
    assert np.abs(edited - plain).max() > 0.1
    np.testing.assert_array_equal(model.forward(ids, mask), plain)


def test_a_model_without_a_backend_says_so() -> None:
    """An AttributeError of None."""
    _, config, source = pair("llama")
    model = load_model(TorchSource({k: torch.tensor(a) for k, a in source.arrays.items()}), config)
    with pytest.raises(KukriError, match="must have a backend"):
        model.forward([1, 2])


# --- one clear error each -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "param", "message"),
    [
        ({"token_ids": [[1, V]]}, "token_ids", f"token id {V} must be from 0 to"),
        ({"token_ids": [[-1, 2]]}, "token_ids", "token id -1 must be from 0 to"),
        ({"token_ids": [[1.5, 2]]}, "token_ids", "must be integers"),
        ({"token_ids": []}, "token_ids", "at least one"),
        ({"token_ids": [[1], [2, 3]]}, "token_ids", "must be an array"),
        ({"token_ids": np.ones((1, 1, 1), int)}, "token_ids", r"\[B, T\]"),
        ({"token_ids": np.ones((1, CONTEXT + 1), int)}, "token_ids", "must be at most the context, 1024"),
        ({"attention_mask": np.ones((2, 4))}, "attention_mask", r"is \[2, 4\] and must be \[2, 5\]"),
        ({"attention_mask": np.ones(5)}, "attention_mask", r"is \[5\] and must be \[2, 5\]"),
        ({"attention_mask": np.full((2, 5), 2)}, "attention_mask", "1 for tokens and 0 for padding"),
        ({"attention_mask": np.full((2, 5), "1")}, "attention_mask", "1 for tokens and 0 for padding"),
        ({"attention_mask": np.zeros((2, 5))}, "attention_mask", "must leave a token"),
        ({"attention_mask": np.ones((2, 1, 5, 4), bool)}, "attention_mask", r"\[2 or 1, 4 or 1, 5, 5\]"),
        ({"attention_mask": np.ones((3, 1, 5, 5), bool)}, "attention_mask", r"is \[3, 1, 5, 5\]"),
        ({"attention_mask": np.ones((2, KV_HEADS, 5, 5), bool)}, "attention_mask", r"is \[2, 2, 5, 5\]"),
        ({"attention_mask": np.ones((2, 1, 5, 5), int)}, "attention_mask", "boolean or hold numbers to add"),
        ({"attention_mask": np.full((2, 1, 5, 5), np.nan)}, "attention_mask", "NaN"),
        ({"attention_mask": np.full((2, 1, 5, 5), np.inf)}, "attention_mask", r"\+inf"),
        ({"positions": np.arange(4)}, "positions", r"must be integers \[2, 5\] or \[5\]"),
        ({"positions": np.arange(5.0)}, "positions", "must be integers"),
        ({"positions": np.arange(5) - 1}, "positions", "'positions' must be 0 to 1023, not -1 to 3"),
        ({"positions": np.arange(5) + 1020}, "positions", "'positions' must be 0 to 1023"),
        ({"cache": "no"}, "cache", r"must come from new_cache\(\)"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], param: str, message: str, backend: Any) -> None:
    """Anything wrong that reaches the arithmetic, or an error that does not say what to do."""
    model = bound("llama", backend)
    with pytest.raises(RequestError, match=message) as caught:
        model.forward(**{"token_ids": batch(2, 5), **arguments})
    assert caught.value.param == param
    assert "\n" not in str(caught.value)


def test_wrong_caches(backend: Any) -> None:
    """A cache that is too small, of another shape or model, or asked to have been something else."""
    model, ids = bound("llama", backend), batch(2, 5)
    cache = model.new_cache(2, 9)
    model.forward(ids, cache=cache)
    with pytest.raises(RequestError, match="must have room for 5 more tokens: 5 of 9 are used"):
        model.forward(ids, cache=cache)
    with pytest.raises(RequestError, match="must have the rows of 'token_ids', 1, not 2"):
        model.forward(ids[:1], cache=cache)
    with pytest.raises(RequestError, match=r"is \[2, 2\] and must be \[2, 7\], 5 cached"):
        model.forward(ids[:, :2], np.ones((2, 2)), cache=cache)
    changed = np.ones((2, 7))
    changed[0, 2] = 0
    with pytest.raises(RequestError, match="must hide the same cached tokens"):
        model.forward(ids[:, :2], changed, cache=cache)
    with pytest.raises(RequestError, match="1 to 1024"):
        model.new_cache(1, CONTEXT + 1)
    with pytest.raises(RequestError, match="must be at least 1"):
        model.new_cache(0)
    other = load_model(*reversed(make("phi")[1:]))
    other.bind(backend)
    with pytest.raises(RequestError, match="must be made by this model"):
        model.forward(ids, cache=other.new_cache(2, PAGE_TOKENS))
    assert cache.n_tokens == 5
