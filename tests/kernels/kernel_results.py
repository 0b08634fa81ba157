"""Results of kernels on fixed inputs, for comparing processors to the bit.

Run as a program with a file to write (npz), a tiny model, and the weight types to multiply: prints the names
of the kernels that it used, as JSON. Needs no more than kukri itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

sys.path.append(str(Path(__file__).parents[2]))  # for `tests`: ARM's Python runs this file by its path

from kukri import LLM, SamplingParams
from kukri.kernels.cpu import CpuBackend
from kukri.kernels.cpu.compile.jit import KernelLibrary
from kukri.kernels.specs import Routing
from kukri.kernels.weight_handles import Experts, Vector, Weight
from tests.kernels.small_programs import attention_case, exact_rows, f32_weight, plain_batch, run, weight

N_TOKENS = (1, 2, 3, 5, 8, 9, 16)
AS_LOGITS = ("Q4_0", "Q8_0", "Q6_K")  # multiplied with rows of two int8 terms, too
used: set[str] = set()


def results(model, types):
    """By name, arrays that depend on nothing but the arithmetic of the kernels."""
    backend = CpuBackend(2)
    found = {}
    for name in types:
        found |= products(backend, name)
    for kv_type in ("f16", "q8_0"):
        found[f"attention {kv_type}"] = attention(backend, kv_type)
    found["mixture"] = mixture(backend)
    found |= elementwise(backend)
    with LLM(model, backend="cpu", n_threads=2, max_context=96) as llm:
        for name, sampling in (("greedy", {"temperature": 0}), ("seeded", {"temperature": 1, "top_p": 0.9})):
            params = SamplingParams(seed=3, max_tokens=24, ignore_eos=True, logprobs=2, **sampling)
            result = llm.generate(list(range(40, 75)), params)
            found[f"tokens of logits, {name}"] = np.array(result.token_ids)
            found[f"log-probabilities of logits, {name}"] = np.array([t.logprob for t in result.logprobs])
    return found


def products(backend, name):
    rng = np.random.default_rng(1)
    w = weight(rng, name, 41, 512)  # rows end inside a tile
    each = Weight(w.stored, w.type, w.shape, w.name, per_token=True) if name == "Q4_0" else None
    found = {}
    for n in N_TOKENS:
        rows = rng.standard_normal((n, w.shape[1])).astype(np.float32)
        rows[-1:] = exact_rows(rng, 1, w.shape[1])  # whole numbers from -127 to 127
        x = f32_weight(rows)

        def middle(ops, batch, x=x):
            return ops.logit_rows(ops.linear(ops.embed(x, batch), (w,)), batch)

        def last(ops, batch, x=x):
            return ops.linear(ops.logit_rows(ops.embed(x, batch), batch), (w,))

        def per_token(ops, batch, x=x):
            return ops.logit_rows(ops.linear(ops.embed(x, batch), (each,)), batch)

        found[f"{name} x {n}"] = run(backend, middle, plain_batch(n))
        if name in AS_LOGITS:
            found[f"{name} x {n}, as logits"] = run(backend, last, plain_batch(n))
        if each is not None:
            found[f"{name} x {n}, one scale a token"] = run(backend, per_token, plain_batch(n))
    return found


def mixture(backend):
    rng = np.random.default_rng(4)
    routing = Routing(n_experts=5, n_used=2, normalized=True)
    x, logits = f32_weight(exact_rows(rng, 21, 64)), f32_weight(rng.standard_normal((21, 5)))
    experts = Experts(tuple(weight(rng, "Q8_0", 48, 64) for _ in range(5)))

    def program(ops, batch):
        routes = ops.route(ops.embed(logits, batch), routing)
        results = ops.expert_linear(ops.embed(x, batch), routes, [experts])
        return ops.logit_rows(ops.combine(results, routes), batch)

    return run(backend, program, plain_batch(21))


def attention(backend, kv_type):
    rng = np.random.default_rng(2)
    program, batch, past = attention_case(rng, 3, 2, 32, None, (70, 150, 9), (3, 1, 9), kv_type)
    return run(backend, program, batch, past)


def elementwise(backend):
    rng = np.random.default_rng(3)
    x = f32_weight(rng.standard_normal((9, 64)) * 4)
    ones = Vector(rng.standard_normal(64).astype(np.float32))
    programs = {
        "norm": lambda ops, rows: ops.rms_norm(rows, ones, 1e-5),
        "silu": lambda ops, rows: ops.map("gated_silu", *ops.split(rows, (32, 32))[::-1]),
        "gelu": lambda ops, rows: ops.map("gated_gelu", *ops.split(rows, (32, 32))[::-1]),
    }
    return {
        name: run(backend, lambda ops, b, f=f: ops.logit_rows(f(ops, ops.embed(x, b)), b), plain_batch(9))
        for name, f in programs.items()
    }


def note_names():
    """Notes the names of all kernels that are loaded from here on."""
    link = KernelLibrary._link

    def noted(library, name, *code):
        used.add(name)
        link(library, name, *code)

    KernelLibrary._link = noted


if __name__ == "__main__":
    note_names()
    np.savez(sys.argv[1], **results(sys.argv[2], sys.argv[3:]))
    print(json.dumps(sorted(used)))
