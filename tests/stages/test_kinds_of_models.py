"""Models of several kinds in two processes: the tokens of one, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kukri import LLM
from kukri.config import LayerConfig
from kukri.engine.kv_size import KVCost
from kukri.kernels import make_backend
from kukri.kernels.cache import pool_layouts
from kukri.models import load_model
from kukri.stages.backend import StagedBackend
from kukri.stages.cut import StageRoom, model_bytes
from kukri.stages.program import stage_layout
from tests.models.tiny_llama import make_pair
from tests.test_llm_safetensors import make
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny

OPTIONS: dict[str, Any] = {"n_threads": 1, "max_requests": 4, "max_step_tokens": 48}
PROMPTS = ["a prompt", "another one, which is longer than a page of the cache", "a third", "a prompt", "5th"]


def answers(llm: LLM) -> list[Any]:
    """Tokens and log-probabilities of greedy and sampled requests, some of which share a prefix."""
    common = {"max_tokens": 24, "ignore_eos": True, "logprobs": 2}
    results = llm.generate(PROMPTS, temperature=0, **common)
    results += llm.generate([text + " and more" for text in PROMPTS], temperature=0.8, seed=4, **common)
    llm.engine.check_integrity()
    return [(result.token_ids, result.logprobs) for result in results]


@pytest.mark.representative(1)
@pytest.mark.full(but=["lfm2"])
@pytest.mark.parametrize("name", ["lfm2", "qwen3_5_text", "granitemoehybrid", "qwen3_moe", "gpt_oss"])
def test_hybrids_and_mixtures_are_cut(name: str, tmp_path: Path) -> None:
    """Catches states that are kept in the wrong process, snapshots of some layers, experts of others."""
    directory, _ = make(tmp_path, name)
    found = []
    for stages in (1, 2):
        with LLM(directory, quantize="Q8_0", stages=stages, **OPTIONS) as llm:
            found.append(answers(llm))
            assert llm.engine.allocator.n_prefix_hit > 0
    assert found[0] == found[1]


@pytest.mark.full
def test_a_draft_model_drafts_for_stages(tmp_path: Path) -> None:
    """Catches drafts of a model whose pages are those of another, or that go unused."""
    target = write_tiny(tmp_path / "target.gguf", tiny_config())
    other = write_tiny(tmp_path / "other.gguf", arrays=random_arrays(tiny_config(), seed=1))
    with LLM(target, speculation="off", **OPTIONS) as llm:
        expected = answers(llm)
    for draft in (target, other):
        with LLM(target, draft_model=draft, stages=2, **OPTIONS) as llm:
            llm.engine.drafting.drafter.cost.of_one = 0.0  # else models of one size draft nothing
            assert answers(llm) == expected
            assert llm.engine.scheduler.n_drafted > 0
            assert draft is other or llm.engine.scheduler.n_accepted > 0


def test_the_cache_of_a_stage_that_has_the_layers_without_windows_fits() -> None:
    """Room counted as if each pool had as many pages: the layers that see all take the most of a cache."""
    layers = LayerConfig(window=32), LayerConfig()
    _, config, source = make_pair(d_head=32, layers=layers, n_vocab=80)
    model, local = load_model(source, config), make_backend("reference")
    rooms = [StageRoom(20 << 20, memory="a"), StageRoom(20 << 20, memory="b")]
    pipeline: Any = None  # no step runs
    backend = StagedBackend(local, model, pipeline, [], [1] * len(layers), rooms)
    weights = model_bytes(model)
    n_bytes = backend.free_bytes() - weights.held(range(len(layers)))
    cost = KVCost.of(backend, model.cache_layout, "f16", 64)
    sizes = cost.pool_sizes(n_bytes, 64, 1 << 20)
    assert sizes[0] > 10 * sizes[1] > 0
    for part, room in zip(backend.cut, rooms, strict=True):
        pools = pool_layouts(stage_layout(model.cache_layout, part, model.config.n_layers))
        held = sum(n * local.page_bytes(own, "f16") for n, own in zip(sizes, pools, strict=True))
        assert held + weights.held(part) <= room.free_bytes
