"""A check of answers whose drafts come from rows of the model: pages are too few for all requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.engine.draft_model import CountedDrafts


def check_too_few_pages(
    directory: Path, draft: Path, kind: type[CountedDrafts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asserts that a draft model, whose drafts of a `kind` are always worth making, changes no answer."""
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 256, n).tolist() for n in (5, 40, 16, 33, 1, 60)]
    sampled = SamplingParams(temperature=1, max_tokens=40, ignore_eos=True, seed=1, n=2)
    with LLM(directory, max_requests=4) as llm:
        want = [[o.token_ids for o in llm.generate(prompt, sampled).outputs] for prompt in prompts]
        page_bytes = llm.engine.runner.backend.page_bytes(llm.engine.model.cache_layout, "f16")
    chances = kind.chances
    monkeypatch.setattr(kind, "chances", lambda drafts, n: (1.0 for _ in chances(drafts, n)))
    options: dict[str, Any] = {"max_requests": 4, "max_step_tokens": 24, "kv_bytes": 14 * page_bytes}
    with LLM(directory, draft_model=draft, **options) as llm:
        got = llm.generate(prompts, sampled)
        assert [[o.token_ids for o in each.outputs] for each in got] == want
        llm.engine.check_integrity()
        assert llm.engine.scheduler.n_preemptions > 0
        assert llm.engine.scheduler.n_drafted > 20
