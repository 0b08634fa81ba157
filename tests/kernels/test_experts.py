"""Mixtures of experts on the CPU backend against the reference: routing, products, sums, and independence."""

from __future__ import annotations

import numpy as np
import pytest

from kukri.errors import HookError, MissingKernelError, ShapeError
from kukri.kernels import make_backend
from kukri.kernels.cache import KVLayer
from kukri.kernels.reference import ReferenceBackend
from kukri.kernels.specs import Routing
from kukri.kernels.step import StepLimits
from kukri.kernels.weight_handles import Experts, Vector
from tests.kernels.small_programs import (
    TYPES,
    assert_close,
    both,
    exact_rows,
    f32_weight,
    plain_batch,
    run,
    weight,
)
from tests.quick import COMMON, quick

ROUTING = Routing(n_experts=11, n_used=3, normalized=True)


def experts(rng, type_name, n, n_out, n_in):
    return Experts(tuple(weight(rng, type_name, n_out, n_in) for _ in range(n)), f"test.{type_name}")


def one_product(rng, types, routing, x, logits, n_out=(32, 24)):
    """Experts of one product, its bias, and the sum of a token's results."""
    parts = [experts(rng, t, routing.n_experts, n, x.shape[1]) for t, n in zip(types, n_out, strict=True)]
    bias = Vector(rng.standard_normal(routing.n_experts * sum(n_out)).astype(np.float32))
    pad = f32_weight(rng.standard_normal((64, sum(n_out))))
    rows, router = f32_weight(x), f32_weight(logits)

    def program(ops, batch):
        routes = ops.route(ops.embed(router, batch), routing)
        # a matrix after it brings any width to one that `combine` takes
        y = ops.expert_linear(ops.embed(rows, batch), routes, parts, bias)
        wide = ops.expert_linear(y, routes, [Experts((pad,) * routing.n_experts)])
        return ops.logit_rows(ops.combine(wide, routes), batch)

    return program


def whole_mixture(rng, type_name, routing, x, logits, n_ffn=64):
    """The MLP of a mixture, added to x."""
    n, d = routing.n_experts, x.shape[1]
    up = [experts(rng, type_name, n, n_ffn, d) for _ in range(2)]
    down = experts(rng, type_name, n, d, n_ffn)
    rows, router = f32_weight(x), f32_weight(logits)

    def program(ops, batch):
        inputs = ops.embed(rows, batch)
        routes = ops.route(ops.embed(router, batch), routing, ("weights", None))
        gate_up = ops.expert_linear(inputs, routes, up)
        gates, ups = ops.split(gate_up, (n_ffn, n_ffn))
        hidden = ops.map("gated_silu", ups, gates)
        out = ops.combine(ops.expert_linear(hidden, routes, [down]), routes, inputs, ("out", None))
        return ops.logit_rows(out, batch)

    return program


def case(seed, n_tokens, n_in=256, routing=ROUTING):
    rng = np.random.default_rng(seed)
    return rng, exact_rows(rng, n_tokens, n_in), rng.standard_normal((n_tokens, routing.n_experts)) * 3


@pytest.mark.parametrize("type_name", quick(TYPES, kept=COMMON))
def test_products_of_every_type(backend, type_name: str) -> None:
    """An expert's rows taken from another; a panel's lanes out of order; a bias of another expert."""
    rng, x, logits = case(1, 21)
    assert_close(*both(backend, one_product(rng, [type_name] * 2, ROUTING, x, logits), plain_batch(21)))


@pytest.mark.parametrize("n_tokens", [1, 2, 9, 150])
@pytest.mark.parametrize("n_out", [(32, 48), (24, 40)], ids=str)
def test_any_number_of_tokens(backend, n_tokens: int, n_out: tuple[int, int]) -> None:
    """Panels that are not full, entries of more rows than one holds, matrices that end within a tile."""
    rng, x, logits = case(2, n_tokens, 64)
    logits[:, 3] += 9  # an expert that every token uses
    program = one_product(rng, ["F32", "Q8_0"], ROUTING, x, logits, n_out)
    assert_close(*both(backend, program, plain_batch(n_tokens)))


@pytest.mark.parametrize("normalized", [True, False])
@pytest.mark.parametrize(("n_experts", "n_used"), [(128, 8), (5, 5), (32, 1), (60, 4)])
def test_a_whole_mixture(backend, n_experts: int, n_used: int, normalized: bool) -> None:
    """Weights that are not the softmax's; rows of rows read as rows of tokens; a residual left out."""
    routing = Routing(n_experts, n_used, normalized)
    rng, x, logits = case(3, 17, 64, routing)
    program = whole_mixture(rng, "F32", routing, x, logits)
    assert_close(*both(backend, program, plain_batch(17)), relative=1e-5)


@pytest.mark.parametrize("type_name", ["F32", "Q4_K", "Q8_0"])
def test_a_token_is_alone_in_any_crowd(backend, type_name: str) -> None:
    """A result that depends on the tokens that share its experts, to the bit."""
    rng, x, logits = case(4, 100)
    program = whole_mixture(rng, type_name, ROUTING, x, logits, 256)
    whole = run(backend, program, plain_batch(100))
    for n_tokens in (1, 2, 7, 40):
        np.testing.assert_array_equal(run(backend, program, plain_batch(n_tokens)), whole[:n_tokens])


def weights_of(backend, logits, routing, on_tap=None):
    """Returns the array that the weights' tap sees, and the result."""
    rng = np.random.default_rng(5)
    x = exact_rows(rng, len(logits), 64)
    program = whole_mixture(rng, "F32", routing, x, np.asarray(logits, np.float32))
    seen = []

    def listen(name, weights):
        if name == "weights":
            seen.append(weights.copy())
            return None if on_tap is None else on_tap(weights)
        return None

    limits = StepLimits(32, 1, 32, 4)
    compiled = backend.compile(
        program, backend.new_cache([KVLayer(1, 16)], 4), limits, frozenset(["weights"])
    )
    result = compiled(plain_batch(len(logits)), listen).numpy().copy()
    return seen[0], result


def general(n_experts, n_used, normalized, by_sigmoid, bias, groups):
    """A routing with a bias of this size, and (n_groups, n_groups_used, n_best)."""
    offsets = np.random.default_rng(8).standard_normal(n_experts).astype(np.float32) * bias
    scores = {"by_sigmoid": by_sigmoid, "bias": Vector(offsets) if bias else None}
    names = ("n_groups", "n_groups_used", "n_best")
    return Routing(n_experts, n_used, normalized, **scores, **dict(zip(names, groups)))


GENERAL = [
    general(11, 3, True, True, 0.0, (1, 1, 2)),
    general(11, 3, False, True, 0.3, (1, 1, 2)),
    general(11, 3, True, False, 0.3, (1, 1, 2)),
    general(64, 6, True, True, 0.3, (8, 3, 2)),
    general(24, 5, False, False, 0.0, (4, 2, 1)),
    general(12, 4, True, True, 2.0, (12, 5, 2)),  # groups of one expert
    general(1, 1, False, True, 0.0, (1, 1, 2)),  # a gate
    Routing(11, 2, normalized=False, tolerance=0.02),
    Routing(11, 3, normalized=False, tolerance=0.5),
]


def by_hand(logits, routing):
    """The weights [T, E], expert by expert in float64."""
    weights = np.zeros(logits.shape)
    for row, logit in zip(weights, logits.astype(np.float64)):
        scores = 1 / (1 + np.exp(-logit)) if routing.by_sigmoid else np.exp(logit) / np.exp(logit).sum()
        by = scores + (0 if routing.bias is None else routing.bias.data)
        groups = np.array_split(np.arange(len(logit)), routing.n_groups)
        groups.sort(key=lambda group: -sum(sorted(by[group])[::-1][: routing.n_best]))
        allowed = np.concatenate(groups[: routing.n_groups_used])
        used = sorted(allowed, key=lambda i: -by[i])[: routing.n_used]
        if routing.tolerance:
            for n, i in enumerate(used):
                left = [j for j in range(len(logit)) if j not in used[:n]]
                far = [(logit[i] - logit[j]) / max(abs(logit[j]), logit[i]) > routing.tolerance for j in left]
                row[i] = 1 / np.exp(logit[left] - logit[i])[~np.array(far)].sum()
            continue
        row[used] = scores[used] / (scores[used].sum() if routing.normalized else 1)
    return weights


@pytest.mark.parametrize("routing", GENERAL, ids=range(len(GENERAL)))
def test_routing_in_general(backend, routing: Routing) -> None:
    """A bias in the weights; groups judged by all their experts, or by none; a softmax for a sigmoid."""
    rng, x, logits = case(3, 17, 64, routing)
    want = by_hand(np.float32(logits), routing)
    for each in (ReferenceBackend(), backend):
        np.testing.assert_allclose(weights_of(each, logits, routing)[0], want, rtol=1e-5, atol=1e-7)
    program = whole_mixture(rng, "F32", routing, x, logits)
    assert_close(*both(backend, program, plain_batch(17)), relative=1e-5)
    pytest.importorskip("torch")
    assert_close(*both(make_backend("torch"), program, plain_batch(17)), relative=1e-5)


def test_more_groups_than_a_kernel_has_room_for_are_refused(backend) -> None:
    """Sums of groups beyond the kernel's memory."""
    routing = general(128, 2, True, True, 0.3, (128, 3, 2))
    rng, x, logits = case(3, 5, 64, routing)
    with pytest.raises(MissingKernelError, match="up to 64"):
        run(backend, whole_mixture(rng, "F32", routing, x, logits), plain_batch(5))


@pytest.mark.parametrize("normalized", [True, False])
def test_the_torch_backend(normalized: bool) -> None:
    """An expert's rows given to another; a weight that is not the softmax's."""
    pytest.importorskip("torch")
    routing = Routing(11, 3, normalized)
    rng, x, logits = case(6, 30, 64, routing)
    program = whole_mixture(rng, "Q8_0", routing, x, logits)
    assert_close(*both(make_backend("torch"), program, plain_batch(30)), relative=1e-5)
    program = one_product(rng, ["F32", "F16"], routing, x, logits)
    assert_close(*both(make_backend("torch"), program, plain_batch(30)), relative=1e-5)
    routing = Routing(4, 2, normalized)
    got, want = (weights_of(make_backend(name), logits[:, :4], routing)[0] for name in ("torch", "reference"))
    np.testing.assert_allclose(got, want, rtol=1e-5)


@pytest.mark.parametrize("normalized", [True, False])
def test_the_weights_of_routes(backend, normalized: bool) -> None:
    """Equal logits that choose others than the first; an expert of logit -inf that is used; another sum."""
    logits = np.array([[1, 1, 1, 1], [-np.inf, 0, -np.inf, -np.inf], [-900, 30, 60, -np.inf], [0, 1, 2, 3]])
    routing = Routing(4, 2, normalized)
    got, _ = weights_of(backend, logits, routing)
    want, _ = weights_of(ReferenceBackend(), logits, routing)
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert (np.flatnonzero(got[0]) == [0, 1]).all()
    assert np.flatnonzero(got[1]).tolist() == [1]
    if normalized:
        np.testing.assert_allclose(got.sum(axis=1), 1, rtol=1e-6)
    else:
        np.testing.assert_allclose(got[0], [0.25, 0.25, 0, 0])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_broken_logits_give_nan_and_spare_the_others(backend, bad: float) -> None:
    """A NaN that leads outside an array, or is lost, or reaches the tokens next to it."""
    logits = np.random.default_rng(0).standard_normal((9, 4))
    _, want = weights_of(backend, logits, Routing(4, 2, True))
    logits[4, 1] = bad
    _, got = weights_of(backend, logits, Routing(4, 2, True))
    assert np.isnan(got[4]).all()
    others = np.arange(9) != 4
    np.testing.assert_array_equal(got[others], want[others])


def test_hooks_on_weights(backend) -> None:
    """An edit that is not followed: an expert without a weight still used, or another weight not taken."""
    logits = np.random.default_rng(1).standard_normal((9, 4))

    def only_expert_2(weights):
        edited = np.zeros_like(weights)
        edited[:, 2] = 0.5
        return edited

    routing = Routing(4, 2, True)
    got = weights_of(backend, logits, routing, only_expert_2)[1]
    want = weights_of(ReferenceBackend(), logits, routing, only_expert_2)[1]
    assert_close(got, want, 1e-5)
    assert np.abs(got - weights_of(backend, logits, routing)[1]).max() > 1e-3
    for each in (backend, ReferenceBackend()):
        with pytest.raises(HookError, match="must leave 2 experts of a token with a weight, not 4"):
            weights_of(each, logits, routing, np.ones_like)


def test_experts_are_alike() -> None:
    """Experts of several shapes or types as one."""
    rng = np.random.default_rng(0)
    with pytest.raises(ShapeError, match="'e' must be of one shape and type"):
        Experts((weight(rng, "F32", 4, 32), weight(rng, "F32", 5, 32)), "e")
    with pytest.raises(ShapeError, match="must be of one shape and type"):
        Experts((weight(rng, "F32", 4, 32), weight(rng, "F16", 4, 32)))
