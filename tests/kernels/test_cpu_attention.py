"""Attention of the CPU backend against its definition, the reference backend.

The file also runs under other CPU names (test_cpu_lowerings.py).
"""

from __future__ import annotations

import ctypes
from dataclasses import replace

import numpy as np
import pytest

from kukri.errors import UnsupportedError
from kukri.kernels.cache import KVLayer
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.cpu.compile.jit import entry_point
from kukri.kernels.cpu.run import abi
from kukri.kernels.paged_kv import PAGE_TOKENS, PagedKV
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import StepLimits
from kukri.kernels.step_arrays import OPTIONAL_ARRAYS
from tests.kernels.small_programs import (
    ATTENTION_ERROR,
    assert_close,
    attention_case,
    copy_of,
    f32_weight,
    plain_batch,
    run,
)
from tests.quick import quick


@pytest.mark.parametrize("window", [None, 10, 100])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "d_head", "kv_type"),
    [
        *((1, 3, 16, "f16"), (4, 1, 32, "f16"), (12, 1, 16, "f16"), (1, 2, 80, "q4")),
        *((3, 2, 64, kv_type) for kv_type in ATTENTION_ERROR),
        *quick([(8, 2, 48, "f16"), (4, 1, 96, "q8_0"), (2, 1, 48, "f32")], kept=[]),
    ],
)
def test_attention(backend, group, n_kv_heads, d_head, kv_type, window):
    """Would catch a mask that forgets the cache, heads of the wrong group, pages mixed up, a lost window,
    a scale of another token or block."""
    rng = np.random.default_rng(group)
    contexts, n_new = (1, 70, 200, 130, 64), (1, 1, 20, 130, 3)
    program, batch, past = attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, kv_type)
    caches = copy_of(past), copy_of(past)
    got = run(backend, program, batch, caches[0], max_sequences=5)
    want = run(ReferenceBackend(), program, batch, caches[1], max_sequences=5)
    assert_close(got, want, relative=ATTENTION_ERROR[kv_type])
    np.testing.assert_array_equal(caches[0].keys[0], caches[1].keys[0])
    np.testing.assert_array_equal(caches[0].values[0], caches[1].values[0])


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "reach"),
    quick([(1, 3, 300), (3, 2, 5), (20, 1, 50)], kept=[(1, 3, 300), (3, 2, 5)]),
)
def test_attention_with_biases_by_distance(backend, group, n_kv_heads, reach, is_causal):
    """Would catch another head's bias, a distance off by one or of the other sign, one that is read beyond
    the table, and biases on the past or on later tokens alone."""
    contexts = (1, 70, 200, 130, 64)
    n_new = (1, 1, 20, 130, 3) if is_causal else contexts
    case = (group, n_kv_heads, 16, None, contexts, n_new)
    program, batch, past = attention_case(np.random.default_rng(5), *case, is_causal=is_causal, reach=reach)
    got = run(backend, program, batch, copy_of(past), max_sequences=5)
    want = run(ReferenceBackend(), program, batch, copy_of(past), max_sequences=5)
    assert_close(got, want, relative=1e-5)


@pytest.mark.parametrize("kv_type", quick(["f16", "q8_0", "f32"], kept=["f16"]))
def test_attention_with_a_softcap(backend, kv_type):
    """Would catch a cap after the mask, on partial results alone, or of scores before their scale."""
    case = (3, 2, 64, 100, (1, 70, 200, 130, 64), (1, 1, 20, 130, 3), kv_type)
    program, batch, past = attention_case(np.random.default_rng(5), *case, softcap=0.5)
    plain, _, _ = attention_case(np.random.default_rng(5), *case)
    got = run(backend, program, batch, copy_of(past), max_sequences=5)
    want, without = (
        run(ReferenceBackend(), p, batch, copy_of(past), max_sequences=5) for p in (program, plain)
    )
    assert_close(got, want, relative=ATTENTION_ERROR[kv_type])
    assert np.abs(got - without).max() > 0.05


@pytest.mark.parametrize("window", [None, 1, 9, 65])
@pytest.mark.parametrize(
    ("group", "d_head", "kv_type"), [(1, 16, "f16"), (4, 32, "f16"), (4, 96, "q8_0"), (1, 80, "q4")]
)
def test_attention_to_later_tokens(backend, group, d_head, kv_type, window):
    """Would catch texts that are read causally, a neighbour's or the page's last keys, a window's other side,
    and chunks of a long text that its first tokens do not reach."""
    rng = np.random.default_rng(group)
    lengths = (1, 70, 3, 150, 64)
    program, batch, past = attention_case(
        rng, group, 2, d_head, window, lengths, lengths, kv_type, is_causal=False
    )
    caches = copy_of(past), copy_of(past)
    got = run(backend, program, batch, caches[0], max_sequences=5)
    want = run(ReferenceBackend(), program, batch, caches[1], max_sequences=5)
    assert_close(got, want, relative=ATTENTION_ERROR[kv_type])


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(("group", "n_kv_heads", "d_head"), [(1, 3, 16), (3, 2, 64), (8, 2, 48)])
def test_attention_with_sinks(backend, group, n_kv_heads, d_head, window):
    """A sink of another head, or one that counts once for each chunk of a long context."""
    rng = np.random.default_rng(group)
    contexts, n_new = (1, 70, 200, 130, 64), (1, 1, 20, 130, 3)
    sinks = rng.standard_normal(group * n_kv_heads) * 4
    results = []
    for values in (sinks, None):
        rng = np.random.default_rng(group)
        case = attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, sinks=values)
        program, batch, past = case
        got = run(backend, program, batch, copy_of(past), max_sequences=5)
        want = run(ReferenceBackend(), program, batch, copy_of(past), max_sequences=5)
        assert_close(got, want, relative=1e-5)
        results.append(got)
    assert np.abs(results[0] - results[1]).max() > 0.1


def test_a_q8_0_cache_is_close_to_float16(backend):
    """Would catch quantization that is wrong in the same way on both backends."""
    logits = []
    for kv_type in ("f16", "q8_0"):
        rng = np.random.default_rng(3)
        program, batch, past = attention_case(rng, 3, 2, 64, None, (70, 130), (70, 130), kv_type)
        logits.append(run(backend, program, batch, past, max_sequences=2))
    error = np.abs(logits[0] - logits[1])
    assert 1e-4 < error.max() < 0.05
    with pytest.raises(UnsupportedError, match="heads of a multiple of"):
        PagedKV([KVLayer(1, 16)], 1, kv_type="q8_0")


def test_attention_ignores_what_lies_outside_the_context(backend):
    """Would catch reads of stale slots: they hold other requests' numbers, here the largest there are."""
    rng = np.random.default_rng(9)
    program, batch, past = attention_case(rng, 3, 2, 64, None, contexts=(37, 81), n_new=(1, 9))
    clean, dirty = copy_of(past), copy_of(past)
    used = {
        (int(batch.page_table[s, p // PAGE_TOKENS]), p % PAGE_TOKENS)
        for s in range(2)
        for p in range(batch.context_len[s])
    }
    for page in range(past.n_pages[0]):
        for offset in range(PAGE_TOKENS):
            if (page, offset) not in used:
                dirty.keys[0][page, :, :, offset] = 65504
                dirty.values[0][page, :, offset] = -65504
    np.testing.assert_array_equal(run(backend, program, batch, clean), run(backend, program, batch, dirty))


def test_the_cache_limits_numbers_and_keeps_nan(backend):
    """Would catch an inf that makes NaN of 0 * inf later, and a NaN hidden from the request that made it."""
    values = np.zeros((3, 320), np.float32)
    values[1, 192:256], values[1, 256:] = 1e30, -1e30
    values[2, 256:] = np.nan
    spec = AttentionSpec(0, 3, 1, 64, 1.0)
    cache = PagedKV([KVLayer(1, 64)], 2)

    def program(ops, batch):
        q, k, v = ops.split(ops.embed(f32_weight(values), batch), (192, 64, 64))
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    for n_tokens in (2, 3):
        got = run(backend, program, plain_batch(n_tokens), cache)
        assert np.isnan(got[-1]).all() == (n_tokens == 3)
    assert cache.keys[0].max() == 65504
    assert cache.values[0][0, 0, 1].min() == -65504


def test_nan_left_in_a_page_does_not_reach_the_next_owner(backend):
    """Would catch 0 * NaN: slots past a sequence's end may hold what a failed request left."""
    rng = np.random.default_rng(9)
    program, batch, past = attention_case(rng, 3, 2, 64, None, contexts=(37, 81), n_new=(1, 9))
    clean, dirty = copy_of(past), copy_of(past)
    for s, n_context in enumerate(batch.context_len):
        page, offset = batch.page_table[s, n_context // PAGE_TOKENS], n_context % PAGE_TOKENS
        dirty.keys[0][page, :, :, offset:] = np.nan
        dirty.values[0][page, :, offset:] = np.nan
    np.testing.assert_array_equal(run(backend, program, batch, clean), run(backend, program, batch, dirty))


@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4"])
@pytest.mark.parametrize(
    ("contexts", "n_new"), [((300, 130, 40), (1, 1, 1)), ((300, 90), (33, 7)), ((301, 300, 299), (1, 1, 1))]
)
def test_pages_that_a_window_has_passed_may_hold_anything(backend, contexts, n_new, kv_type):
    """Would catch a key or value read before what the first new token sees: its page is another's."""
    for window in (1, 21, 64, 100):
        rng = np.random.default_rng(window)
        program, batch, past = attention_case(rng, 3, 2, 64, window, contexts, n_new, kv_type)
        seen = set()
        for s, n_context in enumerate(contexts):
            first = max(n_context - n_new[s] + 1 - window, 0) // PAGE_TOKENS
            seen |= set(batch.page_table[s, first : -(-n_context // PAGE_TOKENS)].tolist())
        passed = replace(batch, page_table=batch.page_table.copy())
        for s, n_context in enumerate(contexts):
            passed.page_table[s, : max(n_context - n_new[s] + 1 - window, 0) // PAGE_TOKENS] = 0
        dirty = copy_of(past)
        unseen = [page for page in range(past.n_pages[0]) if page not in seen]
        for memory in (*dirty._keys, *dirty._values):
            memory[unseen] = 0xFF  # NaN
        got = run(backend, program, passed, dirty)
        np.testing.assert_array_equal(got, run(backend, program, batch, copy_of(past)))
        assert np.isfinite(got).all()


def work_entries(compiled):
    """The last step's work entries, int64 [entries, fields], of the layers whose cut was made last."""
    n_work, work = int(compiled._batch._headers[-1][abi.N_WORK // 8]), compiled._batch._keep[-2]
    return work.view(np.int64).reshape(-1, abi.WORK_BYTES // 8)[:n_work]


def test_a_window_costs_no_more_in_a_long_context(backend):
    """Would catch work entries for chunks of keys that no token sees, by their number and keys: no clock."""
    counts = []
    for n_context, n_new in ((1024, 1), (16384, 1), (1024, 40), (16384, 40)):
        rng = np.random.default_rng(0)
        program, batch, past = attention_case(rng, 3, 2, 64, 512, (n_context,) * 2, (n_new,) * 2)
        compiled = backend.compile(program, past, StepLimits(80, 2, 80, n_context // PAGE_TOKENS))
        compiled(batch)
        entries = work_entries(compiled)
        chunks = entries[:, abi.WORK_CHUNK_STOP // 8] - entries[:, abi.WORK_CHUNK // 8]
        counts.append((len(entries), int(chunks.sum())))
    assert counts[0] == counts[1]
    assert counts[2] == counts[3]
    assert 2 * 8 <= counts[0][1] <= 2 * 9


def token_alone(batch, t, sequence):
    """A step of token t alone, of a sequence of which those before it are in the cache."""
    return replace(
        batch,
        token_ids=batch.token_ids[t : t + 1],
        positions=batch.positions[t : t + 1],
        slots=batch.slots[t : t + 1],
        query_start=np.array([0, 1], np.int32),
        context_len=batch.positions[t : t + 1] + 1,
        page_table=batch.page_table[sequence : sequence + 1],
        logit_rows=np.array([0], np.int32),
        **dict.fromkeys(row.name for row in OPTIONAL_ARRAYS),
    )


@pytest.mark.parametrize(("n_threads", "n_tokens"), [(1, [32]), (2, [16, 16]), (6, [6, 6, 6, 6, 6, 2])])
def test_a_prompt_is_cut_into_as_few_parts_as_threads_need(n_threads, n_tokens):
    """Would catch many parts of few rows, for each of which keys are widened again."""
    program, batch, past = attention_case(np.random.default_rng(0), 3, 2, 64, None, (1024,), (32,))
    backend = CpuBackend(n_threads=n_threads)
    compiled = backend.compile(program, past, StepLimits(32, 1, 32, 1024 // PAGE_TOKENS))
    compiled(batch)
    assert work_entries(compiled)[:, abi.WORK_N_TOKENS // 8].tolist() == n_tokens
    backend.close()


def test_key_heads_are_parts_while_threads_are_more_than_entries():
    """Would catch a prompt of which some threads have no part, or one twice as long as the others'."""
    program, batch, past = attention_case(np.random.default_rng(0), 3, 6, 64, None, (320,), (320,))
    backend = CpuBackend(n_threads=6)
    compiled = backend.compile(program, past, StepLimits(320, 1, 320, 320 // PAGE_TOKENS))
    compiled(batch)
    assert len(work_entries(compiled)) == 8
    attend = compiled.plan.kernel_names.index("attend_f16[3,64]")
    address, record = compiled.plan.ops[attend, :2].tolist()
    n_tiles = ctypes.c_int64()
    entry_point(address)(ctypes.byref(n_tiles), None, record, -1)
    assert n_tiles.value == 8 * 6
    backend.close()


@pytest.mark.parametrize(("n_threads", "kv_type"), [(1, "f16"), (2, "f16"), (5, "f16"), (2, "q4")])
def test_results_do_not_depend_on_threads_or_batch_mates(n_threads, kv_type):
    """Would catch sums whose order follows the batch: a token alone and among others, to the bit."""
    rng = np.random.default_rng(10)
    program, batch, past = attention_case(rng, 3, 2, 64, None, (300, 290), (40, 1), kv_type)
    backend = CpuBackend(n_threads=n_threads)
    together = run(backend, program, batch, copy_of(past))
    cache = copy_of(past)
    for t in range(40):  # the first sequence token by token
        one = token_alone(batch, t, 0)
        np.testing.assert_array_equal(run(backend, program, one, cache)[0], together[t])
    backend.close()


@pytest.mark.parametrize(
    ("group", "d_head", "kv_type", "window", "softcap", "reach"),
    [
        *((7, 64, "f16", None, None, 0), (3, 64, "f16", 100, 0.5, 0), (12, 16, "f16", 5, None, 0)),
        *((4, 96, "q8_0", None, None, 0), (3, 64, "q4", 70, None, 0), (2, 48, "f32", None, None, 0)),
        *((1, 16, "f16", None, None, 0), (2, 256, "f16", None, None, 0), (3, 16, "f16", 100, None, 60)),
    ],
)
def test_a_prompt_attends_as_its_tokens_alone(backend, group, d_head, kv_type, window, softcap, reach):
    """Would catch rows of a tile or of a vector given a neighbour's, tiles left out of which a row sees keys,
    and another order of sums than that of one token: results are equal to the bit."""
    rng = np.random.default_rng(group)
    sizes = (group, 2, d_head, window, (500, 37), (460, 33), kv_type, softcap)
    case = attention_case(rng, *sizes, reach=reach)
    program, batch, past = case
    want = run(ReferenceBackend(), program, batch, copy_of(past))
    together = run(backend, program, batch, past)
    assert_close(together, want, relative=ATTENTION_ERROR[kv_type])
    for t in (*range(0, 460, 37), 24, 23, 458, 459, 460, 461, 492):
        s = int(t >= 460)
        alone = token_alone(batch, t, s)
        np.testing.assert_array_equal(run(backend, program, alone, past)[0], together[t])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("group", "d_head", "kv_type"),
    [(3, 64, "f16"), (4, 96, "q8_0"), (3, 64, "q4"), (1, 16, "f16"), (12, 16, "f16"), (2, 48, "f32")],
)
def test_sequences_that_share_a_prefix_attend_as_alone(backend, group, d_head, kv_type, window):
    """Would catch a token given a neighbour's keys or row, and bits that depend on sharing."""
    rng = np.random.default_rng(group)
    contexts = (400, 300, 330, 256, 290, 310, 200, 500, 64, 70, 1)
    shared_chunks = (4, 4, 4, 4, 4, 4, 2, 0, 1, 1, 0)
    case = attention_case(rng, group, 2, d_head, window, contexts, (1,) * len(contexts), kv_type)
    program, batch, past = case
    for s, n_chunks in enumerate(shared_chunks):
        batch.page_table[s, : 4 * n_chunks] = batch.page_table[0, : 4 * n_chunks]
    last = batch.page_table[range(len(contexts)), batch.positions // PAGE_TOKENS]
    batch.slots[:] = last * PAGE_TOKENS + batch.positions % PAGE_TOKENS  # 256 and 64 write to a shared page
    together = run(backend, program, batch, copy_of(past), max_sequences=len(contexts))
    reference = run(ReferenceBackend(), program, batch, copy_of(past), max_sequences=len(contexts))
    assert_close(together, reference, relative=ATTENTION_ERROR[kv_type])
    cache = copy_of(past)
    run(backend, program, batch, cache, max_sequences=len(contexts))  # for what is written to shared pages
    for s in range(len(contexts)):
        alone = token_alone(batch, s, s)
        np.testing.assert_array_equal(run(backend, program, alone, copy_of(cache))[0], together[s])


def test_a_shared_prefix_is_one_piece_of_work(backend):
    """Would catch sequences whose common pages are read for each of them, and a lone one made to share."""
    contexts = (300, 300, 300, 300, 290, 100)
    program, batch, past = attention_case(
        np.random.default_rng(3), 3, 2, 64, None, contexts, (1,) * len(contexts)
    )

    def n_entries(n_sharing):
        compiled = backend.compile(program, copy_of(past), StepLimits(16, 8, 16, batch.page_table.shape[1]))
        batch.page_table[:n_sharing, :16] = batch.page_table[0, :16]
        compiled(batch)
        return len(work_entries(compiled))

    n_tokens = abi.query_tokens(3)
    alone = 5 * 5 + 2
    assert n_entries(1) == alone
    assert n_entries(4) == alone - 4 * 4 + 4 * -(-4 // n_tokens)
    assert n_entries(5) == alone - 4 * 4 + 4 * -(
        -4 // n_tokens
    )  # one is left over: a row for three is no gain


@pytest.mark.parametrize("window", [None, 10])
@pytest.mark.parametrize(
    ("group", "n_kv_heads", "d_head", "kv_type"),
    [(4, 2, 24, "f16"), (1, 3, 8, "f16"), (2, 2, 44, "f32"), (1, 1, 76, "q4")],
)
def test_attention_of_odd_heads(backend, group, n_kv_heads, d_head, kv_type, window):
    """Would catch a neighbour's columns in a head, a cache of another size, and columns that nobody wrote."""
    rng = np.random.default_rng(d_head)
    contexts, n_new = (1, 70, 130, 3), (1, 70, 130, 3)
    program, batch, past = attention_case(rng, group, n_kv_heads, d_head, window, contexts, n_new, kv_type)
    own = backend.new_cache([KVLayer(n_kv_heads, d_head)], past.n_pages, kv_type=kv_type)
    got = run(backend, program, batch, own)
    want = run(ReferenceBackend(), program, batch, past)
    assert_close(got, want, relative=0.3 if kv_type == "q4" else 1e-5)
