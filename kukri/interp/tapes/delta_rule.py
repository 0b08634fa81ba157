"""The gated delta rule with its derivatives, on whole texts in NumPy."""

from __future__ import annotations

import numpy as np

from kukri.kernels.arrays import FloatArray
from kukri.kernels.specs import DeltaSpec


class DeltaRule:
    """`Ops.delta_rule` of one text, token by token, and back: `result` [T, H*P].

    The states of all tokens are kept: T * H * K * P numbers.
    """

    def __init__(
        self,
        spec: DeltaSpec,
        q: FloatArray,
        k: FloatArray,
        v: FloatArray,
        decay: FloatArray,
        beta: FloatArray,
    ) -> None:
        """q and k [T, G*K], v [T, H*P], decay and beta [T, H]."""
        n, heads = len(v), np.arange(spec.n_heads)
        group = spec.n_heads // spec.n_groups
        self._spec = spec
        self._key_heads = heads % spec.n_groups if spec.are_tiled else heads // group
        self._q, self._k = (x.reshape(n, spec.n_groups, -1)[:, self._key_heads] for x in (q, k))  # [T, H, K]
        self._shifted = decay + spec.dt_bias.data
        self._kept = np.exp(np.logaddexp(self._shifted, np.float32(0)) * spec.a.data)  # [T, H]
        self._rate = (1 / (1 + np.exp(-beta))).astype(np.float32)
        values = v.reshape(n, spec.n_heads, spec.d_head)
        self._states = np.zeros(
            (n + 1, spec.n_heads, spec.d_state, spec.d_head), np.float32
        )  # after t tokens
        self._errors = np.empty_like(values)  # the difference from what k finds, by which the state changes
        self.result = np.empty_like(v)
        for t in range(n):
            decayed = self._kept[t][:, None, None] * self._states[t]
            self._errors[t] = values[t] - np.einsum("hk,hkp->hp", self._k[t], decayed)
            written = (self._rate[t][:, None] * self._errors[t])[:, None]
            self._states[t + 1] = decayed + self._k[t][..., None] * written
            self.result[t] = np.einsum("hk,hkp->hp", self._q[t], self._states[t + 1]).reshape(-1)

    def backward(self, grad: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray, FloatArray, FloatArray]:
        """Return the gradients of q, k, v, decay and beta, given the gradient of the result."""
        spec, n = self._spec, len(grad)
        to_result = grad.reshape(n, spec.n_heads, spec.d_head)
        to_q, to_k, to_v = np.empty_like(self._q), np.empty_like(self._k), np.empty_like(to_result)
        to_kept, to_rate = np.empty_like(self._kept), np.empty_like(self._rate)
        to_state = np.zeros_like(self._states[0])
        for t in reversed(range(n)):
            k, rate, kept = self._k[t], self._rate[t][:, None], self._kept[t][:, None, None]
            to_state += self._q[t][..., None] * to_result[t][:, None]
            to_q[t] = np.einsum("hkp,hp->hk", self._states[t + 1], to_result[t])
            to_written = np.einsum("hk,hkp->hp", k, to_state)
            to_rate[t] = (to_written * self._errors[t]).sum(-1)
            to_v[t] = rate * to_written
            to_k[t] = np.einsum("hkp,hp->hk", to_state, rate * self._errors[t])
            to_k[t] -= np.einsum("hkp,hp->hk", kept * self._states[t], to_v[t])  # what k found
            to_state -= k[..., None] * to_v[t][:, None]
            to_kept[t] = (to_state * self._states[t]).sum((-2, -1))
            to_state *= kept
        to_decay = to_kept * self._kept * spec.a.data / (1 + np.exp(-self._shifted))
        to_beta = to_rate * self._rate * (1 - self._rate)
        return self._by_group(to_q), self._by_group(to_k), to_v.reshape(n, -1), to_decay, to_beta

    def _by_group(self, grad: FloatArray) -> FloatArray:
        """Gradients [T, H, K] of heads that share keys, added up: [T, G*K]."""
        found = np.zeros((len(grad), self._spec.n_groups, grad.shape[2]), np.float32)
        for head, key_head in enumerate(self._key_heads):
            found[:, key_head] += grad[:, head]
        return found.reshape(len(grad), -1)
