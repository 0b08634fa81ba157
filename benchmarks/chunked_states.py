"""The gated delta rule in chunks of tokens, against token by token: `python -m benchmarks.chunked_states`.

An experiment in NumPy, float32: how far results in chunks are from those of one token after another, and
whether their bits depend on how a prompt is cut into steps. "From the step" begins a chunk with each step, as
kernels of training do; "absolute" at multiples of 16 in position, and keeps the rows of the open chunk with
the state. All products have one shape, with zeros for rows that are not there, as on matrix units.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.harness import Experiment, Table, run

Floats = npt.NDArray[np.float32]

CHUNK = 16  # tokens: the rows of a matrix instruction
WIDTH = 128  # a key's and a value's


@dataclass(frozen=True)
class Tokens:
    """One head's keys and queries [T, K], of length 1, values [T, P], logarithms of decays and rates [T]."""

    q: Floats
    k: Floats
    v: Floats
    decay: Floats
    rate: Floats

    @classmethod
    def random(cls, n_tokens: int, seed: int) -> Tokens:
        """Tokens as a model has them: decays of 0.8 to 1, rates of 0 to 1."""
        rng = np.random.default_rng(seed)
        q, k, v = rng.standard_normal((3, n_tokens, WIDTH))
        q /= np.linalg.norm(q, axis=1, keepdims=True)
        k /= np.linalg.norm(k, axis=1, keepdims=True)
        decay, rate = np.log(rng.uniform(0.8, 1, n_tokens)), rng.uniform(0, 1, n_tokens)
        as_f32 = (x.astype(np.float32) for x in (q, k, v, decay, rate))
        return cls(*as_f32)

    def __len__(self) -> int:
        return len(self.v)


def token_by_token(tokens: Tokens, dtype: type = np.float32) -> npt.NDArray[Any]:
    """The definition: outputs [T, P]."""
    given = (tokens.q, tokens.k, tokens.v, tokens.decay, tokens.rate)
    arrays: list[npt.NDArray[Any]] = [x.astype(dtype) for x in given]
    q, k, v, decay, rate = arrays
    state: npt.NDArray[Any]
    state, y = np.zeros((WIDTH, WIDTH), dtype), np.empty_like(v)
    for t in range(len(tokens)):
        state = state * np.exp(decay[t])
        state = state + np.outer(k[t], rate[t] * (v[t] - k[t] @ state))
        y[t] = q[t] @ state
    return y


class Chunks:
    """A sequence in chunks: the state before the open chunk, and the chunk's rows so far."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens, self.state = tokens, np.zeros((WIDTH, WIDTH), np.float32)
        self.close()

    def close(self) -> None:
        """Begins a chunk."""
        self.n = 0
        self.k, self.u = (np.zeros((CHUNK, WIDTH), np.float32) for _ in range(2))
        self.sums = np.zeros(
            CHUNK, np.float32
        )  # sums of the logarithms of decays, from the chunk's beginning

    def step(self, start: int, stop: int) -> Floats:
        """Outputs of tokens that fit into the open chunk; a full one is added to the state."""
        tokens, rows, new = self.tokens, slice(self.n, self.n + stop - start), slice(start, stop)
        q, v = np.zeros((CHUNK, WIDTH), np.float32), np.zeros((CHUNK, WIDTH), np.float32)
        self.k[rows], q[rows], v[rows] = tokens.k[new], tokens.q[new], tokens.v[new]
        for i, t in enumerate(range(start, stop), self.n):
            self.sums[i] = tokens.decay[t] + (self.sums[i - 1] if i else 0)
        ratio = np.exp(np.tril(self.sums[:, None] - self.sums))  # by which row j has decayed at row i
        kept = np.exp(self.sums)[:, None]
        found, seen = kept * (self.k @ self.state), kept * (q @ self.state)
        among, between = np.tril(ratio * (self.k @ self.k.T), -1), np.tril(ratio * (q @ self.k.T))
        for i, t in enumerate(range(start, stop), self.n):
            self.u[i] = tokens.rate[t] * (v[i] - found[i] - among[i] @ self.u)
        y: Floats = (seen + between @ self.u)[rows]
        self.n += stop - start
        if self.n == CHUNK:
            left = np.exp(self.sums[-1] - self.sums)[:, None]
            self.state = kept[-1] * self.state + (left * self.k).T @ self.u
            self.close()
        return y


def in_chunks(tokens: Tokens, cuts: Sequence[int], is_absolute: bool) -> Floats:
    """Outputs of a prompt that came in steps, each up to one of `cuts`."""
    chunks, parts, start = Chunks(tokens), [], 0
    for cut in cuts:
        if not is_absolute and chunks.n:
            _end_early(chunks)
        while start < cut:
            stop = min(cut, start + CHUNK - chunks.n)
            parts.append(chunks.step(start, stop))
            start = stop
    return np.concatenate(parts)


def _end_early(chunks: Chunks) -> None:
    """Adds the rows of an open chunk to the state."""
    last = chunks.sums[chunks.n - 1]
    left = np.where(np.arange(CHUNK) < chunks.n, np.exp(last - chunks.sums), 0)[:, None].astype(np.float32)
    chunks.state = np.exp(last) * chunks.state + (left * chunks.k).T @ chunks.u
    chunks.close()


def state_bytes() -> dict[str, float]:
    """Bytes of a head's state, and read and written for a token of decode, in both forms."""
    state, row = 4 * WIDTH * WIDTH, 4 * (2 * WIDTH + 1)
    moved = state + row * (CHUNK - 1) / 2 + row + (state + row * CHUNK) / CHUNK
    return {
        "state": state,
        "state, chunks": state + CHUNK * row,
        "decode": 2 * state,
        "decode, chunks": moved,
    }


def main() -> None:
    """Runs the experiment; 1 if the bits of absolute chunks depend on cuts."""
    experiment = Experiment("chunked_states", "Compare recurrent layers in chunks.", with_model=False)
    experiment.count("-n", "--tokens", 300, "tokens of a prompt")
    given = experiment.parse()
    tokens = Tokens.random(given.tokens, 0)
    exact, stepwise = token_by_token(tokens, np.float64), token_by_token(tokens)
    whole, singly = [len(tokens)], list(range(1, len(tokens) + 1))
    rng = np.random.default_rng(1)
    some = [*np.sort(rng.choice(np.arange(1, len(tokens)), 9, replace=False)).tolist(), len(tokens)]
    errors, equal = {"token by token": _error(stepwise, exact)}, {}
    for name, is_absolute in (("from the step", False), ("absolute", True)):
        y = in_chunks(tokens, whole, is_absolute)
        errors[name] = _error(y, exact)
        equal[name] = [float((in_chunks(tokens, cuts, is_absolute) == y).mean()) for cuts in (some, singly)]
    equal["token by token"] = [float((in_chunks(tokens, singly, True) == stepwise).mean())]
    rows = [
        [name, f"{error:.1e}", *(f"{share:.3f}" for share in equal[name][:2])]
        for name, error in errors.items()
    ]
    rows[0][2:] = ["-", f"{equal['token by token'][0]:.3f}"]
    header = ["chunks", "largest error", "same bits in 10 steps", "one by one"]
    sizes = [[name, f"{n / 1024:.0f}"] for name, n in state_bytes().items()]
    report = {"errors": errors, "equal": equal, "bytes": state_bytes()}
    title = f"{given.tokens} tokens of one head, {WIDTH} x {WIDTH}"
    experiment.show(report, Table(title, header, rows), Table("memory of a head", ["of", "KiB"], sizes))
    raise SystemExit(0 if equal["absolute"] == [1.0, 1.0] else 1)


def _error(y: npt.NDArray[Any], exact: npt.NDArray[Any]) -> float:
    return float(np.abs(y - exact).max() / np.abs(exact).max())


if __name__ == "__main__":
    run(main)
