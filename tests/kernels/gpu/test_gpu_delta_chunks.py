"""The delta rule in chunks under Triton's interpreter: its definition, and the same bits by any steps."""

from __future__ import annotations

import numpy as np
import pytest

from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch

    from benchmarks.prototypes.delta_chunks import ChunkedState, delta_rule

N, HEADS, GROUPS, K, P = 35, 2, 1, 44, 9


def exact(q, k, v, decay, beta, a, dt_bias):
    """Token by token in float64: [T, H * P]."""
    q, k, v, decay, beta, a, dt_bias = (x.double().numpy() for x in (q, k, v, decay, beta, a, dt_bias))
    kept, rate = np.exp(np.logaddexp(decay + dt_bias, 0) * a), 1 / (1 + np.exp(-beta))
    states, y = np.zeros((HEADS, K, P)), np.empty((N, HEADS, P))
    for t in range(N):
        for h, state in enumerate(states):
            state *= kept[t, h]
            state += np.outer(k[t], rate[t, h] * (v[t].reshape(HEADS, P)[h] - k[t] @ state))
            y[t, h] = q[t] @ state
    return y.reshape(N, -1)


@pytest.mark.full
def test_delta_chunks_are_the_reference_in_any_steps():
    """A decay of another row, a row that sees one after it, a state a chunk early, rows of another slot; a
    result that depends on steps: whole, token by token, and two sequences in uneven pieces.
    """
    torch.manual_seed(0)
    q, k, v = (torch.randn(N, n) for n in (GROUPS * K, GROUPS * K, HEADS * P))
    q, k = (x / x.norm(dim=1, keepdim=True) for x in (q, k))
    gates = torch.randn(N, HEADS), torch.randn(N, HEADS)
    vectors = -torch.rand(HEADS), torch.randn(HEADS)
    inputs = (q, k, v, *gates)

    def state():
        new = ChunkedState.empty(3, GROUPS, HEADS, K, P)
        for x in vars(new).values():
            x.fill_(torch.nan)  # a slot may hold anything before its sequence begins
        return new

    whole = delta_rule(*inputs, *vectors, state(), [0, N], [N], [1])
    want = exact(*inputs, *vectors)
    np.testing.assert_allclose(whole.numpy(), want, rtol=0, atol=2e-6 * np.abs(want).max())
    mine = state()
    for t in range(19):
        one = delta_rule(*(x[t : t + 1] for x in inputs), *vectors, mine, [0, 1], [t + 1], [2])
        assert torch.equal(one, whole[t : t + 1]), t
    mine, done = state(), 0
    for cut in (1, 21, 33, 34, N):
        both = (torch.cat([x[done:cut], x[done:cut].flip(1)]) for x in inputs)
        n = cut - done
        two = delta_rule(*both, *vectors, mine, [0, n, 2 * n], [cut, cut], [0, 2])
        assert torch.equal(two[:n], whole[done:cut])
        done = cut
