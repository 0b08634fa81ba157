"""Correctness of the torch and gpu backends on a device, against the reference: `kukri doctor --gpu`.

Products, attention and a small random model run on the device and in NumPy; then the promises of the gpu
backend must be bit-identical: the same step twice, a sequence alone and in a batch, graphs and eager steps.
So anybody with a GPU can check code that was written without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from kukri.config import LayerConfig, ModelConfig, RopeConfig
from kukri.dataclass import dataclass
from kukri.engine.batch_builder import BatchBuilder, Chunk
from kukri.engine.spans.embedding_spans import NO_SPANS
from kukri.errors import UnsupportedError
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Backend
from kukri.kernels.cache import Cache, CacheLayout, KVLayer, KVType
from kukri.kernels.op_set import Program
from kukri.kernels.quantize import quantize
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import AttentionSpec
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import Experts, Vector, Weight
from kukri.models import load_model
from kukri.quant.types import FLOATS, QUANT_TYPES, WRITTEN
from kukri.sampling import RequestSampler, SamplingParams, sample_rows

TOLERANCE = (
    0.03  # root mean square, relative: int8 or bfloat16 inputs take up to 0.02, a wrong kernel about 1
)
_PAGE = 16
_SAMPLERS = tuple(
    SamplingParams(seed=seed, **fields)
    for seed in range(8)
    for fields in (
        {"temperature": 0.0, "logit_bias": {7: 12.0}},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 0.9},
        {"top_k": 40, "top_p": 0.95},
        {"top_p": 0.8, "min_p": 0.01, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    )
)


@dataclass(frozen=True)
class Check:
    """One comparison; `error` is relative, or the number of differing values if bits are compared."""

    name: str
    passed: bool
    error: float


@dataclass(frozen=True)
class Sizes:
    """Sizes of the checks: tokens of products, columns, and contexts of attention."""

    tokens: tuple[int, ...] = (1, 8, 33, 200)
    n_columns: int = 768
    n_rows: int = 333
    contexts: tuple[int, ...] = (700, 17, 40)
    n_layers: int = 4


FULL = Sizes()


class _Sequence:
    """A token sequence on pages of its own."""

    token_types: IntArray | None = None
    adapter_slot = -1
    state_slot = 0
    spans = NO_SPANS

    def __init__(self, tokens: IntArray, first_page: int) -> None:
        self.tokens = tokens
        n_pages = -(-len(tokens) // _PAGE)
        self.page_rows = [np.arange(first_page, first_page + n_pages, dtype=np.int32)]


class _Runner:
    """A program on a backend, fed with chunks of sequences."""

    def __init__(
        self,
        backend: Backend,
        program: Program,
        layout: CacheLayout,
        n_tokens: int,
        n_pages: int,
        kv_type: KVType = "f16",
    ) -> None:
        self.cache: Cache = backend.new_cache(layout, 8 * n_pages, kv_type=kv_type)
        limits = StepLimits(n_tokens, 8, n_tokens, n_pages)
        self._program = backend.compile(program, self.cache, limits)
        self._builder = BatchBuilder(self._program.inputs, backend.page_tokens)
        self._n_pages = n_pages

    def step(self, *chunks: tuple[_Sequence, int, int, int]) -> FloatArray:
        """The rows of (sequence, start, tokens, rows) of each."""
        padded = []
        for sequence, start, n_tokens, n_rows in chunks:
            row = np.zeros(self._n_pages, np.int32)
            row[: len(sequence.page_rows[0])] = sequence.page_rows[0]
            other = _Sequence(sequence.tokens, 0)
            other.page_rows = [row]
            padded.append(Chunk(other, start, n_tokens, n_rows))
        return self._program(self._builder.build(padded)).numpy().copy()


def check_backend(
    make: Callable[[], Backend], make_eager: Callable[[], Backend] | None = None, sizes: Sizes = FULL
) -> Iterator[Check]:
    """Each check of a backend as it is done; `make_eager` makes one like it without graphs.

    Each gets a backend of its own, for whether one is batch-invariant depends on what it has run.
    """
    reference = ReferenceBackend()
    for type in (*FLOATS, *WRITTEN):  # the types with a quantizer
        yield from _check_product(make(), reference, type.name, sizes)
    kinds: tuple[KVType, ...] = ("f16", "q8_0", "fp8")
    for kv_type in kinds:
        for window in (None, 50):
            yield _check_attention(make(), reference, kv_type, window, sizes)
    yield from _check_model(make(), reference, None if make_eager is None else make_eager(), sizes)
    yield _check_sampling(make(), reference)


def _check_product(backend: Backend, reference: Backend, name: str, sizes: Sizes) -> Iterator[Check]:
    """A product with a matrix of a weight type: near the reference's, and a row the same for any batch."""
    random = np.random.default_rng(1)
    n = max(sizes.tokens)
    table = _weight(random, "F32", (n, sizes.n_columns))
    matrix = _weight(random, name, (sizes.n_rows, sizes.n_columns))

    def program(ops, batch):  # type: ignore[no-untyped-def]
        return ops.logit_rows(ops.linear(ops.embed(table, batch), [matrix]), batch)

    sequence = _Sequence(np.arange(n, dtype=np.int32), 0)
    n_pages = -(-n // _PAGE)
    mine = _Runner(backend, program, [KVLayer(1, 32)], n, n_pages)
    theirs = _Runner(reference, program, [KVLayer(1, 32)], n, n_pages)
    want = theirs.step((sequence, 0, n, n))
    results = [mine.step((sequence, 0, t, t)) for t in sizes.tokens]
    error = max(_distance(got, want[: len(got)]) for got in results)
    yield Check(f"product {name}", error < TOLERANCE, error)
    if backend.is_batch_invariant:
        yield _same_bits(f"product {name}, any batch", results[0][:1], *(got[:1] for got in results[1:]))


def _check_attention(
    backend: Backend, reference: Backend, kv_type: KVType, window: int | None, sizes: Sizes
) -> Check:
    """Prompts, then a token more of each, over pages; with sinks if there is a window, as gpt-oss has.

    Numbers are eighths, which fp8 holds: the reference, which has no fp8 cache, keeps them in float32.
    """
    sinks = None if window is None else Vector(np.linspace(-3, 3, 8, dtype=np.float32))
    spec = AttentionSpec(0, 8, 2, 64, 0.125, window, sinks=sinks)
    width = (spec.n_heads + 2 * spec.n_kv_heads) * spec.d_head
    n = sum(sizes.contexts)
    eighths = np.random.default_rng(2).integers(-8, 9, (n, width)).astype(np.float32) / 8
    table = Weight(eighths.view(np.uint8), QUANT_TYPES["F32"], eighths.shape, "qkv")
    parts = tuple(heads * spec.d_head for heads in (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads))

    def program(ops, batch):  # type: ignore[no-untyped-def]
        q, k, v = ops.split(ops.embed(table, batch), parts)
        return ops.logit_rows(ops.attention(q, k, v, spec, batch), batch)

    n_pages = -(-max(sizes.contexts) // _PAGE)
    ids = np.random.default_rng(3).permutation(n).astype(np.int32)
    starts = np.cumsum([0, *sizes.contexts])
    sequences = [_Sequence(ids[a:b], i * n_pages) for i, (a, b) in enumerate(pairwise(starts))]
    results = []
    for one in (backend, reference):
        kept: KVType = "f32" if kv_type == "fp8" and one is reference else kv_type
        runner = _Runner(one, program, [KVLayer(spec.n_kv_heads, spec.d_head)], n, n_pages, kept)
        prompts = runner.step(*((s, 0, len(s.tokens) - 1, len(s.tokens) - 1) for s in sequences))
        decoded = runner.step(*((s, len(s.tokens) - 1, 1, 1) for s in sequences))
        results.append(np.concatenate([prompts, decoded]))
    error = _distance(*results)
    return Check(f"attention {kv_type}, window {window}", error < TOLERANCE, error)


def _check_model(
    backend: Backend, reference: Backend, eager: Backend | None, sizes: Sizes
) -> Iterator[Check]:
    """A small random Llama with head norms: logits, then bit-identical results."""
    model = load_model(_RandomSource(), _config(sizes.n_layers))
    ids = np.random.default_rng(4).integers(0, model.config.n_vocab, 40).astype(np.int32)
    alone, batched = _Sequence(ids, 0), _Sequence(ids, 3)
    other = _Sequence(ids[::-1].copy(), 6)

    def runner(one: Backend) -> _Runner:
        return _Runner(one, model, model.cache_layout, 64, 3)

    mine = runner(backend)
    first = mine.step((alone, 0, 20, 20))
    want = runner(reference).step((alone, 0, 20, 20))
    error = _distance(first, want)
    # roundings of each layer add up
    yield Check("model, logits", error < 2 * TOLERANCE, error)
    yield _same_bits("model, twice", first, mine.step((alone, 0, 20, 20)))
    if not backend.is_batch_invariant:
        return
    mine.step((batched, 0, 20, 0), (other, 0, 11, 0))
    steps = range(20, 24)
    decoded = [mine.step((alone, i, 1, 1)) for i in steps]
    crowd = [mine.step((other, i - 9, 1, 1), (batched, i, 1, 1))[1:] for i in steps]
    yield _same_bits("model, alone and in a batch", np.concatenate(decoded), np.concatenate(crowd))
    if eager is not None:
        plain = runner(eager)
        plain.step((alone, 0, 20, 0))
        by_hand = [plain.step((alone, i, 1, 1)) for i in steps]
        yield _same_bits("model, graphs and eager steps", np.concatenate(decoded), np.concatenate(by_hand))


def _check_sampling(backend: Backend, reference: Backend) -> Check:
    """Tokens of all common stages, chosen from logits as a program of the backend gives them."""

    def program(ops, batch):  # type: ignore[no-untyped-def]
        rows = ops.embed(table, batch)
        return ops.logit_rows(rows, batch)

    n_rows, n_vocab = len(_SAMPLERS), 5000
    random = np.random.default_rng(7)
    rows = random.normal(0, 3, (n_rows, n_vocab)).astype(np.float32).round(1)  # with ties
    table = Weight(rows.view(np.uint8), QUANT_TYPES["F32"], rows.shape, "logits")
    chosen = []
    for one in (backend, reference):
        sequence = _Sequence(np.arange(n_rows, dtype=np.int32), 0)
        n_pages = len(sequence.page_rows[0])
        limits = StepLimits(n_rows, 1, n_rows, n_pages)
        run = one.compile(program, one.new_cache([KVLayer(1, 32)], n_pages), limits)
        logits = run(BatchBuilder(run.inputs, _PAGE).build([Chunk(sequence, 0, n_rows, n_rows)]))
        samplers = [RequestSampler(params, [1, 2, 3, 2], n_vocab, one.sampling) for params in _SAMPLERS]
        chosen.append(sample_rows(samplers, logits, one.sampling))
    n_different = sum(a != b for a, b in zip(*chosen, strict=True))
    return Check("sampling, tokens", n_different == 0, float(n_different))


def _same_bits(name: str, first: FloatArray, *others: FloatArray) -> Check:
    n_different = sum(int((first.view(np.int32) != other.view(np.int32)).sum()) for other in others)
    return Check(name, n_different == 0, float(n_different))


def _distance(got: FloatArray, want: FloatArray) -> float:
    """The root mean square of the difference, relative; infinite if a number is not finite."""
    if not np.isfinite(got).all():
        return float("inf")
    return float(np.sqrt(np.mean((got - want) ** 2) / np.mean(want**2)))


def _weight(random: np.random.Generator, name: str, shape: tuple[int, int]) -> Weight:
    kind = QUANT_TYPES[name]
    return Weight(quantize(random.standard_normal(shape, dtype=np.float32) * 0.1, kind), kind, shape, name)


class _RandomSource:
    """A checkpoint of random weights of two types, without biases."""

    def __init__(self) -> None:
        self._random = np.random.default_rng(5)

    def matrix(self, name: str, shape: tuple[int, int]) -> Weight:
        return _weight(self._random, "Q6_K" if "v_proj" in name else "Q4_K", shape)

    def experts(self, name: str, shape: tuple[int, int, int]) -> Experts:
        raise UnsupportedError("experts are not supported by the random model")

    def expert_vectors(self, name: str, shape: tuple[int, int]) -> FloatArray:
        raise UnsupportedError("experts are not supported by the random model")

    def vector(self, name: str, size: int) -> FloatArray:
        return 1 + 0.2 * self._random.standard_normal(size, dtype=np.float32)

    def has(self, name: str) -> bool:
        return not name.endswith(".bias") and "qkv_proj" not in name

    def done(self) -> None:
        """See WeightSource.done."""


def _config(n_layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        n_layers=n_layers,
        d_model=256,
        n_heads=4,
        n_kv_heads=2,
        d_head=64,
        d_ffn=512,
        n_vocab=320,
        norm_eps=1e-5,
        max_context=64,
        tie_embeddings=True,
        rope=RopeConfig(10000.0, 64),
        layers=(LayerConfig(),) * n_layers,
    )


def check_device(name: str, say: Callable[[Check], None], backends: Sequence[str] = ("torch", "gpu")) -> bool:
    """Checks the backends on a device; `say` gets each check. True if all passed."""
    from kukri.kernels import make_backend

    passed = True
    for kind in backends:
        if make_backend(kind, device=name).name != kind:  # without Triton gpu is torch
            continue
        make = partial(make_backend, kind, device=name)
        eager = partial(_without_graphs, name) if kind == "gpu" else None
        for check in check_backend(make, eager):
            passed &= check.passed
            say(Check(f"{kind}: {check.name}", check.passed, check.error))
    return passed


def _without_graphs(device: str) -> Backend:
    from kukri.kernels.gpu.backend import GpuBackend

    return GpuBackend(device, with_graphs=False)
