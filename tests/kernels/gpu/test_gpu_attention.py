"""Paged attention under Triton's interpreter: prefill and both kinds of decode, against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from test_gpu_rows import floats

from kukri.kernels.gpu import launch, tiles
from kukri.kernels.types import AttentionSpec

LAYERS, LAYER = 2, 1


class Step:
    """New tokens of several sequences; their pages lie scattered, with NaN in all that is unused."""

    def __init__(self, contexts, n_new, group=3, n_kv_heads=2, d_head=64, window=None, kind="f16", seed=0):
        rng = np.random.default_rng(seed)
        self.spec = AttentionSpec(LAYER, group * n_kv_heads, n_kv_heads, d_head, d_head**-0.5, window)
        n_pages = [-(-n // 16) for n in contexts]
        total = sum(n_pages) + 4
        free = rng.permutation(total)
        shape = (total, LAYERS, n_kv_heads, 16, d_head)
        used = np.zeros((total, 16), bool)
        self.table = np.full((len(contexts), max(n_pages) + 3), total - 1, np.int32)
        for s, (n, count) in enumerate(zip(contexts, n_pages, strict=True)):
            self.table[s, :count], free = free[:count], free[count:]
            for i in range(count):
                used[self.table[s, i], : min(16, n - 16 * i)] = True
        self.cache = make_cache(rng, kind, shape, used)
        self.contexts = np.array(contexts, np.int32)
        self.start = np.concatenate([[0], np.cumsum(n_new)]).astype(np.int32)
        self.q = torch.from_numpy(rng.standard_normal((self.start[-1], group * n_kv_heads, d_head))).half()

    def tensors(self):
        return (torch.from_numpy(a) for a in (self.start, self.contexts, self.table))

    def one_pass(self, is_prefill, softcap=0.0):
        rows = tiles.attention_tile(
            self.spec.n_heads // self.spec.n_kv_heads, self.spec.d_head, is_prefill
        ).rows
        work = torch.tensor(launch.prefill_tiles(self.start.tolist(), self.spec, rows), dtype=torch.int32)
        return launch.attention(self.q, self.cache, *self.tensors(), work, self.spec, is_prefill, softcap)

    def split(self, n_chunks, softcap=0.0):
        return launch.decode_split(self.q, self.cache, *self.tensors(), self.spec, n_chunks, softcap)

    def expected(self, softcap=0.0):
        """float64, each token over exactly the keys that it sees."""
        spec, (keys, values) = self.spec, floats(self.cache)
        out = np.empty(self.q.shape)
        for s, n in enumerate(self.contexts):
            pages = self.table[s, : -(-n // 16)]
            k, v = (x[pages].swapaxes(0, 1).reshape(spec.n_kv_heads, -1, spec.d_head) for x in (keys, values))
            for t in range(self.start[s], self.start[s + 1]):
                end = n - (self.start[s + 1] - 1 - t)
                begin = max(0, end - (spec.window or end))
                q = self.q[t].double().numpy().reshape(spec.n_kv_heads, -1, spec.d_head)
                scores = q @ k[:, begin:end].astype(float).swapaxes(1, 2) * spec.scale
                if softcap:
                    scores = softcap * np.tanh(scores / softcap)
                p = np.exp(scores - scores.max(-1, keepdims=True))
                out[t] = (p / p.sum(-1, keepdims=True) @ v[:, begin:end]).reshape(-1, spec.d_head)
        return out


def make_cache(rng, kind, shape, used):
    def numbers():
        if kind == "f16":
            x = np.where(used[:, None, None, :, None], rng.standard_normal(shape), np.nan).astype(np.float16)
            return (torch.from_numpy(x)[:, LAYER],) * 2
        scales = rng.uniform(0.2, 1.5, (*shape[:-1], shape[-1] // 32)) / 127
        scales = np.where(used[:, None, None, :, None], scales, np.nan).astype(np.float16)
        quants = rng.integers(-127, 128, shape).astype(np.int8)
        return torch.from_numpy(quants)[:, LAYER], torch.from_numpy(scales)[:, LAYER]

    (keys, key_scales), (values, value_scales) = numbers(), numbers()
    return launch.PagedTensors(keys, values, key_scales, value_scales)


def close(got, want, bound=2e-3):
    got = got.numpy()
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


def same(a, b):
    assert (a.numpy().view(np.int32) == b.numpy().view(np.int32)).all()


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(("group", "n_kv_heads", "d_head"), [(3, 2, 64), (4, 1, 128), (1, 2, 32), (5, 1, 96)])
def test_prefill(group, n_kv_heads, d_head, kind):
    """Catches rows of one head given to another, a page's number ignored, unused slots' NaN, a wrong mask."""
    step = Step([290, 17, 31], [40, 17, 1], group, n_kv_heads, d_head, kind=kind)
    close(step.one_pass(is_prefill=True), step.expected())


@pytest.mark.parametrize("window", [1, 20, 256, 300])
def test_window(window):
    """Catches a window off by one, and chunks before it that are read or merged."""
    step = Step([600, 40], [3, 40], window=window)
    close(step.one_pass(is_prefill=True), step.expected())


def test_softcap():
    """Catches a cap of scaled scores, or in the wrong units."""
    step = Step([70, 20], [5, 20])
    step.q *= 8
    close(step.one_pass(is_prefill=True, softcap=3.0), step.expected(3.0))
    assert np.abs(step.expected(3.0) - step.expected()).max() > 0.1


@pytest.mark.parametrize("kind", ["f16", "q8_0"])
@pytest.mark.parametrize(("window", "softcap"), [(None, 0.0), (300, 0.0), (None, 5.0)])
def test_split_equals_one_pass_to_the_bit(window, softcap, kind):
    """Catches a split whose bounds, merge or padding depend on the batch or on the number of chunks."""
    step = Step([700, 1, 256, 257, 16], [1] * 5, window=window, kind=kind)
    one = step.one_pass(is_prefill=False, softcap=softcap)
    close(one, step.expected(softcap))
    same(one, step.split(3, softcap))
    same(one, step.split(5, softcap))


def test_batch_does_not_matter():
    """Catches a result that depends on the sequences beside it, or on where its pages lie."""
    together = Step([300, 513, 40, 16, 1, 77, 256, 90], [1] * 8)
    alone = Step([300], [1], seed=5)
    pages = together.table[0, :19]
    alone.cache, alone.table, alone.q = together.cache, pages[None], together.q[:1]
    same(together.one_pass(is_prefill=False)[:1], alone.one_pass(is_prefill=False))
    same(together.split(3)[:1], alone.split(2))


def test_chunks_of_a_prompt_do_not_matter():
    """Catches tiles of keys that begin at the step's first token: 60 tokens at once, or 23 and 37."""
    whole = Step([330], [60], group=4, n_kv_heads=1)
    first, rest = Step([293], [23], group=4, n_kv_heads=1), Step([330], [37], group=4, n_kv_heads=1)
    for part, q in ((first, whole.q[:23]), (rest, whole.q[23:])):
        part.cache, part.table, part.q = whole.cache, whole.table, q
    got = torch.cat([first.one_pass(is_prefill=True), rest.one_pass(is_prefill=True)])
    torch.testing.assert_close(got, whole.one_pass(is_prefill=True), rtol=1e-6, atol=1e-6)
