"""Paged attention under Triton's interpreter: prefill and both kinds of decode, against NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec
from tests.kernels.gpu.device import DEVICE
from tests.kernels.gpu.test_gpu_rows import floats
from tests.kernels.small_programs import assert_close
from tests.kernels.test_shared_kv import program_of, results
from tests.lazy_imports import lazy_imports
from tests.quick import quick

with lazy_imports():
    import torch

    from kukri.kernels.gpu import attention, tiles
    from kukri.kernels.gpu.backend import GpuBackend

LAYERS, LAYER = 2, 1


class Step:
    """New tokens of several sequences; their pages lie scattered, with NaN in all that is unused."""

    def __init__(
        self, contexts, n_new, group=3, n_kv_heads=2, d_head=64, window=None, kind="f16", seed=0, softcap=None
    ):
        rng = np.random.default_rng(seed)
        self.spec = AttentionSpec(
            LAYER, group * n_kv_heads, n_kv_heads, d_head, d_head**-0.5, window, softcap
        )
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
        self.sinks = None
        self.q = torch.as_tensor(rng.standard_normal((self.start[-1], group * n_kv_heads, d_head))).half()
        # a new token for each sequence, before its rotation: columns of a wider tensor
        widths = [n * d_head for n in (group * n_kv_heads, n_kv_heads, n_kv_heads)]
        qkv = torch.as_tensor(rng.standard_normal((len(contexts), sum(widths) + 5), dtype=np.float32))
        self.new = qkv[:, : sum(widths)].split(widths, 1)
        angles = rng.uniform(0, 7, (max(contexts), d_head // 2 - 4)).astype(np.float32)
        self.rope = torch.as_tensor(np.cos(angles)), torch.as_tensor(np.sin(angles))
        last = self.contexts - 1
        self.positions = torch.as_tensor(last)
        pages = self.table[np.arange(len(contexts)), last // 16]
        self.slots = torch.as_tensor((pages * 16 + last % 16).astype(np.int32))

    def tensors(self):
        return (torch.as_tensor(a) for a in (self.start, self.contexts, self.table))

    def one_pass(self, is_prefill):
        rows = tiles.attention_tile(self.spec.group, self.spec.d_head, is_prefill).rows
        work = torch.tensor(attention.prefill_tiles(self.start.tolist(), self.spec, rows), dtype=torch.int32)
        return attention.attention(
            self.q, self.cache, *self.tensors(), work, self.spec, self.sinks, is_prefill=is_prefill
        )

    def tokens(self):
        return attention.NewTokens(*self.new, self.rope, self.positions, self.slots)

    def decode(self, n_chunks=1):
        """(result, the cache after it) for the new tokens."""
        cache = copied(self.cache)
        return attention.decode(self.tokens(), cache, *self.tensors(), self.spec, self.sinks, n_chunks), cache

    def store(self):
        """Rotates and stores the new tokens by a launch of its own, so that `one_pass` may follow."""
        self.cache = copied(self.cache)
        self.q = attention.rope_and_store(self.tokens(), self.cache, self.spec)

    def expected(self):
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
                if spec.softcap:
                    scores = spec.softcap * np.tanh(scores / spec.softcap)
                p, total = np.exp(scores), 0
                if self.sinks is not None:
                    total = np.exp(self.sinks.double().numpy().reshape(spec.n_kv_heads, -1, 1))
                out[t] = (p / (p.sum(-1, keepdims=True) + total) @ v[:, begin:end]).reshape(-1, spec.d_head)
        return out


@pytest.mark.full
def test_native_conversion_of_fp8_changes_no_bit(monkeypatch):
    """A subnormal, sign or exponent of another number: all codes of e4m3 but those beyond 2 and NaN."""
    step = Step([300, 17], [1, 1], group=3, n_kv_heads=2, d_head=64, kind="fp8")
    plain, _ = step.decode()
    monkeypatch.setattr("kukri.kernels.gpu.kv_types.converts_e4m3", lambda keys: True)
    assert step.cache.kind == "fp8_native"
    same(step.decode()[0], plain)


@pytest.mark.full
@pytest.mark.parametrize("kind", quick(["f16", "q8_0"], kept=["q8_0"]))
def test_pages_that_a_window_has_passed_may_hold_anything(kind):
    """A value before the first token that is seen, times a weight of 0: its page is another's, or NaN."""
    for window, n_new in ((1, (1, 1)), (40, (1, 1)), (300, (1, 1)), (40, (20, 9))):
        step = Step([700, 290], n_new, window=window, kind=kind)
        passed = Step([700, 290], n_new, window=window, kind=kind)
        for s, n in enumerate(step.contexts):
            passed.table[s, : max(n - n_new[s] + 1 - window, 0) // 16] = len(passed.cache.keys) - 1  # NaN
        for n_chunks in (1, 3) if max(n_new) == 1 else ():
            same(passed.decode(n_chunks)[0], step.decode(n_chunks)[0])
        same(passed.one_pass(max(n_new) > 1), step.one_pass(max(n_new) > 1))


def make_cache(rng, kind, shape, used):
    def numbers():
        if kind == "f16":
            x = np.where(used[:, None, None, :, None], rng.standard_normal(shape), np.nan).astype(np.float16)
            return (torch.as_tensor(x)[:, LAYER],) * 2
        if kind == "fp8":
            x = np.where(used[:, None, None, :, None], rng.integers(0, 127, shape), 0x7F).astype(np.uint8)
            x |= rng.integers(0, 2, shape, np.uint8) << 7  # 0x7F and 0xFF are NaN
            x &= np.where(used[:, None, None, :, None], 0xBF, 0xFF).astype(np.uint8)  # below 2 in size
            return (torch.as_tensor(x)[:, LAYER],) * 2
        scales = rng.uniform(0.2, 1.5, (*shape[:-1], shape[-1] // 32)) / 127
        scales = np.where(used[:, None, None, :, None], scales, np.nan).astype(np.float16)
        quants = rng.integers(-127, 128, shape).astype(np.int8)
        return torch.as_tensor(quants)[:, LAYER], torch.as_tensor(scales)[:, LAYER]

    (keys, key_scales), (values, value_scales) = numbers(), numbers()
    return attention.PagedTensors(keys, values, key_scales, value_scales)


def copied(cache):
    """The same numbers elsewhere, without the unused layer between pages."""
    keys, values = cache.keys.clone(), cache.values.clone()
    if cache.kind != "q8_0":
        return attention.PagedTensors(keys, values, keys, values)
    return attention.PagedTensors(keys, values, cache.key_scales.clone(), cache.value_scales.clone())


def same_caches(a, b):
    for name in ("keys", "values", "key_scales", "value_scales"):
        assert getattr(a, name).numpy().tobytes() == getattr(b, name).numpy().tobytes()


def close(got, want, bound=2e-3):
    got = got.numpy()
    assert np.isfinite(got).all()
    assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want)


def same(a, b):
    assert (a.numpy().view(np.int32) == b.numpy().view(np.int32)).all()


@pytest.mark.full(but=["1-2-32-q8_0"])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "d_head", "kind"),
    [(3, 2, 64, "f16"), (4, 1, 128, "q8_0"), (1, 2, 32, "q8_0"), (5, 1, 96, "f16"), (2, 1, 80, "fp8")],
)
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
    step = Step([70, 20], [5, 20], softcap=3.0)
    step.q *= 8
    capped = step.expected()
    close(step.one_pass(is_prefill=True), capped)
    step.spec = replace(step.spec, softcap=None)
    assert np.abs(step.expected() - capped).max() > 0.1


def test_sinks():
    """Catches a sink of another head, one that is capped, in other units, or counted once a chunk."""
    step = Step([270, 20], [5, 20], softcap=3.0)
    without = step.expected()
    step.sinks = torch.tensor([-4.0, 9.0, 0.0, 2.0, -9.0, 5.0])
    close(step.one_pass(is_prefill=True), step.expected())
    assert np.abs(step.expected() - without).max() > 0.1


@pytest.mark.full
@pytest.mark.parametrize(
    ("window", "softcap", "kind", "has_sinks"),
    quick(
        [(None, None, "q8_0", False), (300, None, "fp8", True), (None, 5.0, "f16", False)],
        kept=[(300, None, "fp8", True)],
    ),
)
def test_decode_is_the_same_to_the_bit_in_one_launch_two_and_three(window, softcap, kind, has_sinks):
    """Catches a token that is rotated, stored or read otherwise than by a launch of its own, or too late; a
    split whose bounds, merge or padding depend on the batch or on the number of chunks.
    """
    step = Step([700, 1, 256, 257, 16], [1] * 5, window=window, kind=kind, softcap=softcap)
    if has_sinks:
        step.sinks = torch.tensor([-4.0, 3.0, 0.0, 2.0, -9.0, 5.0])
    results = [step.decode(n_chunks) for n_chunks in (1, 3, 5)]
    step.store()
    want = step.one_pass(is_prefill=False)
    close(want, step.expected())
    for got, cache in results:
        same(got, want)
        same_caches(cache, step.cache)


@pytest.mark.parametrize(("group", "n_kv_heads", "d_head"), [(4, 1, 128), (1, 2, 32), (5, 1, 96)])
def test_decode_of_other_heads(group, n_kv_heads, d_head):
    """Catches a head size or group that is a power of two by habit, in rotation or storing."""
    step = Step([40, 17], [1, 1], group, n_kv_heads, d_head)
    got, cache = step.decode()
    step.store()
    same(got, step.one_pass(is_prefill=False))
    same_caches(cache, step.cache)


@pytest.mark.full
def test_batch_does_not_matter():
    """Catches a result that depends on the sequences next to it, or on where its pages lie."""
    together = Step([300, 513, 40, 16, 1, 77, 256, 90], [1] * 8)
    alone = Step([300], [1], seed=5)
    alone.cache, alone.table = together.cache, together.table[:1, :19]
    alone.new, alone.rope = [x[:1] for x in together.new], together.rope
    alone.slots = together.slots[:1]
    same(together.decode()[0][:1], alone.decode()[0])
    same(together.decode(3)[0][:1], alone.decode(2)[0])


@pytest.mark.full
def test_chunks_of_a_prompt_do_not_matter():
    """Catches tiles of keys that begin at the step's first token: 60 tokens at once, or 24 and 36.

    24 are whole tiles of queries: the interpreter's matrix products round by a row's place in its tile.
    """
    whole = Step([330], [60], group=4, n_kv_heads=1)
    first, rest = Step([294], [24], group=4, n_kv_heads=1), Step([330], [36], group=4, n_kv_heads=1)
    for part, q in ((first, whole.q[:24]), (rest, whole.q[24:])):
        part.cache, part.table, part.q = whole.cache, whole.table, q
    same(torch.cat([first.one_pass(True), rest.one_pass(True)]), whole.one_pass(True))


@pytest.mark.full
@pytest.mark.parametrize("d_head", [16, 512])
def test_a_layer_reads_the_keys_of_another(d_head):
    """Keys stored over those of the other layer, or its own cache read, in prefill and decoding; heads that
    no tile fits.
    """
    program = program_of(d_head, np.random.default_rng(1))
    want = results(ReferenceBackend(), program, "f16", d_head)
    for got, expected in zip(results(GpuBackend(DEVICE), program, "f16", d_head), want, strict=True):
        assert_close(got, expected, 5e-3)
