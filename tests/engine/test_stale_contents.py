"""What lies in the cache where no token of a context is: it may be anything, and changes nothing.

Nobody clears pages. A page may hold what an aborted request left, NaN of a request that failed, or another
layout's bytes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kukri.config import EngineConfig, LayerConfig
from kukri.engine import Engine
from kukri.kernels import make_backend
from kukri.kernels.cache import KVType
from kukri.models import Model, load_model
from kukri.sampling import SamplingParams
from tests.models.tiny_llama import make_pair, random_ids

N_VOCAB = 80
NAN, HUGE = 0xFF, 0x7B  # bytes: every float of them is NaN, or about the largest there is
LAYERS = {
    "full": (LayerConfig(), LayerConfig()),
    "windows": (LayerConfig(window=24), LayerConfig()),
}


@pytest.fixture(scope="module", params=LAYERS)
def model(request: pytest.FixtureRequest) -> Model:
    _, config, source = make_pair(d_head=32, layers=LAYERS[request.param], n_vocab=N_VOCAB)
    return load_model(source, config)


def answers(model: Model, backend: str, kv_type: KVType, fill: int) -> list[tuple[list[int], list[float]]]:
    """Tokens and log-probabilities of a crowd: chunks, drafts, shared prefixes, preemption, an abort."""
    # torch's sums depend on how prompts are cut into steps, so no clock may cut them
    config = EngineConfig(max_requests=4, max_step_tokens=24, max_step_ms=0, max_context=160, kv_type=kv_type)
    engine = Engine(model, make_backend(backend, 1), config, n_pages=11)
    cache: Any = engine.runner.cache
    for memory in (*cache._keys, *cache._values):
        memory[...] = fill
    random = np.random.default_rng(1)
    shared = random_ids(40, N_VOCAB, seed=9)
    prompts = [random_ids(n, N_VOCAB, seed=n) for n in (1, 17, 90)]
    prompts += [shared + prompts[1], shared + random_ids(30, N_VOCAB, seed=3) * 2, shared[:33]]
    requests = []
    for i, prompt in enumerate(prompts):
        sampling: dict[str, Any] = {"temperature": 0} if i % 2 else {"temperature": 1.0, "seed": i}
        params = SamplingParams(max_tokens=30, ignore_eos=True, logprobs=2, speculation="ngram", **sampling)
        requests.append(engine.maker.make_request(prompt, params))
    requests.append(engine.maker.make_request(random.integers(3, 80, 60).tolist(), params))
    for request in requests:
        engine.add_request(request)
    for _ in range(3):
        engine.step()
    engine.abort(requests[-1])
    while engine.has_work:
        engine.step()
    engine.check_integrity()
    assert engine.scheduler.n_preemptions
    assert engine.scheduler.n_drafted
    assert not any(request.answer.error for request in requests)
    return [
        (request.output_ids, [token.logprob or 0.0 for token in request.answer.sampled])
        for request in requests[:-1]
    ]


@pytest.mark.full(only=["*-reference-q*", "windows-reference-*", "*-torch-*"])
@pytest.mark.parametrize("kv_type", ["f16", "q8_0", "q4"])
@pytest.mark.parametrize("backend", ["reference", "cpu", "torch"])
def test_stale_contents_change_nothing(model: Model, backend: str, kv_type: KVType) -> None:
    """A value past a context that is read: weights of 0 times NaN are NaN."""
    if backend == "torch":
        pytest.importorskip("torch")
    clean = answers(model, backend, kv_type, 0)
    for fill in (NAN, HUGE):
        assert answers(model, backend, kv_type, fill) == clean
