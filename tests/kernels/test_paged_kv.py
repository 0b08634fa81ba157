"""The cache: layers of different shapes in one page, pages and slots that are copied and cleared."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.errors import UnsupportedError
from kukri.kernels import make_backend
from kukri.kernels.cache import KVLayer, StateLayer, pool_layouts, pool_windows
from kukri.kernels.kv_types import KV_TYPES
from kukri.kernels.paged_kv import PagedKV, head_bytes, page_bytes, state_bytes

STATE = StateLayer((("conv", (3, 8)), ("ssm", (2, 4, 5))))
LAYOUT = (KVLayer(2, 32), STATE, KVLayer(1, 64, window=8), KVLayer(3, 32), STATE)
TYPES = [kv_type for kv_type, kept in KV_TYPES.items() if kept.encode is not None]


def every_array(cache):
    """Each array of numbers [P, ...], the parts of records one by one."""
    for arrays in (cache.keys, cache.values):
        for array in arrays.values():
            yield from ([array[name] for name in array.dtype.names] if array.dtype.names else [array])


def number(cache):
    """Gives each array other numbers, which grow along it."""
    for i, array in enumerate(every_array(cache)):
        array[:] = (np.arange(array.size).reshape(array.shape) + 17 * i) % 101 + 1


@pytest.mark.parametrize("kv_type", TYPES)
def test_layers_of_different_shapes_share_a_page_and_no_byte(kv_type):
    """A layer's keys written over a neighbour's, or a page over the next."""
    cache = PagedKV(LAYOUT, 3, kv_type=kv_type)
    number(cache)
    for i, array in enumerate(every_array(cache)):
        want = (np.arange(array.size).reshape(array.shape) + 17 * i) % 101 + 1
        np.testing.assert_array_equal(array, want.astype(array.dtype))
    assert cache.keys.keys() == cache.values.keys() == {0, 2, 3}
    assert cache.keys[2].shape[0] == 3


@pytest.mark.parametrize("kv_type", TYPES)
def test_a_pages_layers_lie_together(kv_type):
    """A short context that touches memory of its own for each layer."""
    cache = PagedKV([KVLayer(3, 64)] * 4, 5, kv_type=kv_type)
    starts = [cache.keys[layer].__array_interface__["data"][0] for layer in range(4)]
    assert set(np.diff(starts)) == {3 * head_bytes(64, kv_type)}
    assert {keys.strides[0] for keys in cache.keys.values()} == {cache.page_stride(0)}
    assert cache.page_stride(0) == 4 * 3 * head_bytes(64, kv_type)
    assert all(keys[0].flags.c_contiguous for keys in cache.keys.values())


@pytest.mark.parametrize("kv_type", TYPES)
def test_sizes_are_known_before_memory_is_taken(kv_type):
    """A pool sized by other bytes than its cache takes."""
    cache = PagedKV(LAYOUT, 7, n_states=2, kv_type=kv_type)
    arrays = sum(array.nbytes for array in every_array(cache))
    states = sum(array.nbytes for layer in cache.states.values() for array in layer.values())
    assert state_bytes(LAYOUT) == 2 * 4 * (3 * 8 + 2 * 4 * 5)
    assert page_bytes(LAYOUT, kv_type) * 7 == arrays
    assert cache.n_bytes == arrays + states
    assert make_backend("reference").page_bytes(LAYOUT, kv_type) == page_bytes(LAYOUT, kv_type)


@pytest.mark.parametrize("kv_type", TYPES)
def test_pages_are_copied_whole(kv_type):
    """A layer, the values or the scales left out; a neighbour touched."""
    cache = PagedKV(LAYOUT, 5, kv_type=kv_type)
    number(cache)
    before = [array.copy() for array in every_array(cache)]
    for pool in range(2):
        cache.copy_page(1, 3, pool)
    for array, old in zip(every_array(cache), before, strict=True):
        np.testing.assert_array_equal(array, old[[0, 1, 2, 1, 4]])


@pytest.mark.parametrize("kv_type", TYPES)
def test_each_window_has_a_pool_of_its_own(kv_type):
    """A page of one pool that is copied, saved or counted with those of another."""
    layers = KVLayer(3, 64), KVLayer(2, 32, 50), KVLayer(1, 64), KVLayer(2, 32, 20), KVLayer(1, 32, 50)
    cache = PagedKV(layers, (7, 4, 3), kv_type=kv_type)
    assert pool_windows(layers) == (None, 50, 20)
    assert cache.pool_of == {0: 0, 1: 1, 2: 0, 3: 2, 4: 1}
    assert [len(cache.keys[i]) for i in range(5)] == [7, 4, 7, 3, 4]
    pages = [page_bytes(pool, kv_type) for pool in pool_layouts(layers)]
    assert cache.n_bytes == np.dot(pages, (7, 4, 3))
    number(cache)
    before = {i: (cache.keys[i].copy(), cache.values[i].copy()) for i in cache.keys}
    cache.copy_page(1, 3, 1)
    for i, arrays in before.items():
        order = [0, 1, 2, 1] if cache.pool_of[i] == 1 else range(len(arrays[0]))
        for array, old in zip((cache.keys[i], cache.values[i]), arrays, strict=True):
            np.testing.assert_array_equal(array, old[order])
    other = PagedKV(layers, (7, 4, 3), kv_type=kv_type)
    data = cache.page_data((6, 2, 1))
    assert len(data) == sum(pages)
    other.set_page_data((0, 3, 2), data)
    assert other.page_data((0, 3, 2)) == data
    assert other.keys[1][3].tobytes() == cache.keys[1][2].tobytes()
    assert other.values[3][2].tobytes() == cache.values[3][1].tobytes()


def test_states_are_copied_by_slot():
    """A layer or an array left out, a slot next to the one meant."""
    cache = PagedKV(LAYOUT, 1, n_states=3)
    assert cache.states.keys() == {1, 4}
    arrays = [array for layer in cache.states.values() for array in layer.values()]
    assert [array.shape for array in arrays] == [(3, 3, 8), (3, 2, 4, 5)] * 2
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    assert not any(array.any() for array in arrays)
    for i, array in enumerate(arrays):
        array[:] = np.arange(array.size).reshape(array.shape) + i + 1
    before = [array.copy() for array in arrays]
    cache.copy_state(0, 2)
    for array, old in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, old[[0, 1, 0]])


def test_heads_that_q8_0_cannot_hold_are_refused():
    """A last block of 32 that is not whole, in one layer of many."""
    for make in (lambda: PagedKV([KVLayer(1, 64), KVLayer(1, 48)], 1, kv_type="q8_0"),
                 lambda: page_bytes([KVLayer(1, 48)], "q8_0")):  # fmt: skip
        with pytest.raises(UnsupportedError, match="heads of a multiple of"):
            make()
