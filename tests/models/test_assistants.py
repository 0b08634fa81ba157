"""Assistants of Gemma 4: transformers' logits and drafts; no answer that differs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.engine.draft_kinds.assistant import AssistantDrafts
from kukri.engine.drafts import DraftBudget
from kukri.engine.lookup_drafts import LookupDrafts
from kukri.errors import UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.huggingface.assistant import read_assistant
from kukri.kernels import make_backend
from kukri.kernels.cache import pool_windows
from kukri.kernels.step import ForwardBatch, PoolPages, StepLimits
from kukri.models import load_model
from kukri.models.next_token import RESULT
from tests.lazy_imports import lazy_imports
from tests.models.preempted_drafts import check_too_few_pages
from tests.test_llm_safetensors import GEMMA4, TINY, make

with lazy_imports():
    import torch
    import transformers as tr

PROMPT = [*b"It was a bright cold day in April, and the clocks were striking thirteen."]


def modes(usual: Any, config: Any) -> list[str | None]:
    """What layers do with others' keys; transformers 5.23 raises if all read those of another model."""
    n = config.num_hidden_layers
    return ["reuse"] * n if config.num_kv_shared_layers == n else usual.fget(config)  # type: ignore[no-any-return]


def make_assistant(directory: Path, backbone: int = 64) -> tuple[Path, Any]:
    """A directory of an assistant as transformers saves it, and its model."""
    torch.manual_seed(7)
    text = tr.Gemma4TextConfig(
        **{
            **{**TINY, **GEMMA4, "hidden_size": 32, "intermediate_size": 48, "vocab_size_per_layer_input": 0},
            **{"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 4},
            **{"layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
        }
    )
    config = tr.Gemma4AssistantConfig(text_config=text, backbone_hidden_size=backbone)
    model: Any = tr.Gemma4AssistantForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    model.eval().save_pretrained(directory)
    return directory, model


@pytest.fixture(scope="module", autouse=True)
def mended() -> Iterator[None]:
    usual = tr.Gemma4TextConfig.kv_sharing_modes
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tr.Gemma4TextConfig, "kv_sharing_modes", property(partial(modes, usual)))
        yield


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Path, Any]:
    folder = tmp_path_factory.mktemp("gemma4")
    return (*make(folder / "model", "gemma4_text"), *make_assistant(folder / "assistant"))


def theirs(model: Any, assistant: Any, ids: list[int], n: int) -> list[int]:
    """The first n drafts after some tokens, of which the last has not been computed."""
    # a window of w has w + 1 keys there; here it has w - 1, which are what the model keeps
    assistant.model.config.sliding_window = GEMMA4["sliding_window"] - 2
    with torch.no_grad():
        made = model(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        hidden, token = made.hidden_states[-1][:, -1:], torch.tensor([ids[-1:]])
        drafts = []
        for _ in range(n):
            embedded = model.get_input_embeddings()(token)
            out = assistant(
                inputs_embeds=torch.cat([embedded, hidden], dim=-1),
                position_ids=torch.tensor([[len(ids) - 1]]),
                shared_kv_states=made.shared_kv_states,
            )
            token, hidden = out.logits.argmax(dim=-1), out.last_hidden_state
            drafts.append(int(token))
    return drafts


@pytest.mark.full(only=["reference", "cpu"])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_drafts_are_transformers_and_change_no_answer(
    pair: tuple[Path, Any, Path, Any], backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another layer's keys, a position or a row of another token, a window of another size."""
    directory, model, draft, assistant = pair
    greedy = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
    prompts = [PROMPT, [121, 122]]
    with LLM(directory, backend=backend, max_requests=3) as llm:
        want = [llm.generate(prompt, greedy).token_ids for prompt in prompts]
    found: dict[tuple[int, ...], list[int]] = {}
    propose, offer = AssistantDrafts.propose, DraftBudget.offer

    def kept(drafts: AssistantDrafts, n: int) -> list[int]:
        made = propose(drafts, n)
        found[tuple(drafts.tokens[: drafts.n_tokens].tolist())] = list(made)
        return made

    monkeypatch.setattr(AssistantDrafts, "propose", kept)
    monkeypatch.setattr(AssistantDrafts, "chances", lambda drafts, n: iter([1.0] * min(n, 3)))
    monkeypatch.setattr(LookupDrafts, "chances", lambda drafts, n: iter(()))
    monkeypatch.setattr(DraftBudget, "offer", lambda budget, chances, cost=0.0: offer(budget, chances))
    with LLM(directory, backend=backend, draft_model=draft, max_requests=3) as llm:
        got = [answer.token_ids for answer in llm.generate(prompts, greedy)]
        llm.engine.check_integrity()
    assert got == want
    n = n_equal = 0
    for before, drafts in found.items():
        for ours, their in zip(drafts, theirs(model, assistant, list(before), len(drafts))):
            n, n_equal = n + 1, n_equal + (ours == their)
    assert n > 40
    # on the CPU activations are int8, and a draft that differs changes those after it
    assert n_equal > (0.98 if backend == "reference" else 0.8) * n


def test_logits_are_transformers(pair: tuple[Path, Any, Path, Any]) -> None:
    """Embedding and hidden state in each other's place, keys of another layer, a head of the model's."""
    directory, model, draft, assistant = pair
    assistant.model.config.sliding_window = GEMMA4["sliding_window"]
    ids = np.random.default_rng(0).integers(0, 256, 40).tolist()
    n, backend = len(ids) - 1, make_backend("reference")
    with open_checkpoint(directory) as checkpoint:
        ours: Any = load_model(checkpoint.weights(checkpoint.config), checkpoint.config)
    drafting = read_assistant(draft, ours)
    for block in drafting.blocks:  # as many keys as there
        if block.attention.spec.window is not None:
            window = GEMMA4["sliding_window"] + 1
            block.attention.spec = replace(block.attention.spec, window=window)
    n_pages = -(-n // backend.page_tokens)
    n_pools = len(pool_windows(ours.cache_layout))
    cache = backend.new_cache(ours.cache_layout, n_pages, 0, "f32")
    steps, ends = np.arange(n, dtype=np.int32), np.array([0, n], np.int32)
    table = np.arange(n_pages, dtype=np.int32)[None]
    others = (PoolPages(steps, table),) * (n_pools - 1)
    batch = ForwardBatch(np.array(ids[:-1], np.int32), steps, steps, ends, ends[1:], table, steps)
    limits = StepLimits(n, 1, n, n_pages)
    backend.compile(ours, cache, limits)(replace(batch, other_pools=others))
    with torch.no_grad():
        made = model(torch.tensor([ids[:-1]]), output_hidden_states=True, return_shared_kv_states=True)
        hidden = made.hidden_states[-1][:, -1:]
        embedded = model.get_input_embeddings()(torch.tensor([ids[-1:]]))
        want = assistant(
            inputs_embeds=torch.cat([embedded, hidden], dim=-1),
            position_ids=torch.tensor([[n]]),
            shared_kv_states=made.shared_kv_states,
        )
    last, one = np.array([n - 1], np.int32), np.array([0, 1], np.int32)
    batch = ForwardBatch(
        *(np.array(ids[-1:], np.int32), last, last, one, last + 1, table, one[:1]),
        rope_positions=last + 1,
        activations=hidden[0].numpy(),
        other_pools=tuple(PoolPages(last, table) for _ in others),
    )
    seen: dict[str, np.ndarray] = {}
    program = backend.compile(drafting, cache, limits, frozenset([RESULT]))
    got = program(batch, lambda name, x: seen.update({name: x.copy()})).numpy()
    np.testing.assert_allclose(got[0], want.logits[0, 0].numpy(), atol=2e-4)
    np.testing.assert_allclose(seen[RESULT][0], want.last_hidden_state[0, 0].numpy(), atol=2e-4)


def test_too_few_pages_change_no_answer(
    pair: tuple[Path, Any, Path, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages of a request that was preempted, or has begun again with others."""
    check_too_few_pages(pair[0], pair[2], AssistantDrafts, monkeypatch)


def test_another_models_assistant_is_refused(pair: tuple[Path, Any, Path, Any], tmp_path: Path) -> None:
    """Rows of another width, or keys that are not there."""
    directory, _, _, _ = pair
    with pytest.raises(UnsupportedError, match="another width"):
        LLM(directory, draft_model=make_assistant(tmp_path / "wide", backbone=96)[0])
    with pytest.raises(UnsupportedError, match="assistant of Gemma 4"):
        LLM(make(tmp_path / "llama", "llama")[0], draft_model=tmp_path / "wide")
