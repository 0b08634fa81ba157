"""Layers for multi-token prediction: transformers' logits, by both formats; drafts that change no answer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import MODEL_TENSOR, TENSOR_NAMES

from kukri import LLM, SamplingParams
from kukri.engine.draft_kinds.next_token import NextTokenDrafts
from kukri.engine.drafts import DraftBudget
from kukri.engine.lookup_drafts import LookupDrafts
from kukri.errors import ConfigError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.gguf.reader import GGUFFile
from kukri.kernels import make_backend
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.models import load_model
from kukri.models.next_token import NextTokenLayer
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.test_llm_safetensors import N_VOCAB, make

with lazy_imports():
    import torch
    from safetensors.torch import load_file, save_file
    from transformers.cache_utils import MtpCache
    from transformers.modeling_layers import MtpModel

KINDS = ["qwen3_5_text", "glm4_moe_lite"]
SLOW_KINDS = [pytest.param(kind, marks=pytest.mark.slow) for kind in ("qwen3_5_moe_text", "glm4_moe")]
N_LAYERS = 4
_MTP = {"eh_proj": "fc", "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "post_norm": "norm"}
PROMPT = [*b"It was a bright cold day in April, and the clocks were striking thirteen. "]


def stored_name(name: str, kind: str) -> str:
    """The name in the checkpoints of a parameter of transformers' MtpModel."""
    module = re.sub(r"^layers\.0\.(mtp_block\.)?", "", name)
    if kind.startswith("qwen"):
        stem, _, end = module.partition(".")
        return f"mtp.{_MTP[stem]}.{end}" if stem in _MTP else f"mtp.layers.0.{module}"
    return f"model.layers.{N_LAYERS}.{module.replace('post_norm.weight', 'shared_head.norm.weight')}"


def make_with_layer(directory: Path, kind: str) -> tuple[Path, Any, Any]:
    """A directory with the layer, transformers' model, and its layer."""
    directory, model = make(directory, kind)
    model.config.num_mtp_layers = 1
    model.config.mtp_layer_types, model.config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
    layer: Any = MtpModel(model, 1)
    layer.eval()
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "norm" in name:  # else all ones or zeros
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif "embed_tokens" not in name and "shared_head" not in name:
                parameter.copy_(0.2 * torch.randn_like(parameter))
    shared = ("embed_tokens", "shared_head", "rotary_emb")
    state = {
        stored_name(name, kind): tensor.contiguous()
        for name, tensor in layer.state_dict().items()
        if not name.startswith(shared)
    }
    file = directory / "model.safetensors"
    save_file({**load_file(file), **state}, file, metadata={"format": "pt"})
    return directory, model, layer


def theirs(model: Any, layer: Any, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Hidden states [T, D] of all tokens, and the layer's logits [T - 1, V] of what follows each pair."""
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1]
        cache = MtpCache(config=model.config.get_mtp_config())
        positions = torch.arange(1, len(ids))[None]
        tokens = torch.tensor([ids[1:]])
        made = layer.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=tokens)
        return hidden[0].numpy(), layer._project_to_logits(made)[0].numpy()


def ours(path: Path, hidden: np.ndarray, ids: list[int]) -> np.ndarray:
    """Logits [T - 1, V] of the layer of a checkpoint on the reference backend, with a float32 cache."""
    with open_checkpoint(path) as checkpoint:
        config = checkpoint.config
        model: Any = load_model(checkpoint.weights(config), config)
        layer = NextTokenLayer(checkpoint.weights(config), model)
    n, backend = len(ids) - 1, make_backend("reference")
    n_pages = -(-n // backend.page_tokens)
    program = backend.compile(
        layer, backend.new_cache(layer.cache_layout, n_pages, 1, "f32"), StepLimits(n, 1, n, n_pages)
    )
    steps, ends = np.arange(n, dtype=np.int32), np.array([0, n], np.int32)
    table, tokens = np.arange(n_pages, dtype=np.int32)[None], np.array(ids[1:], np.int32)
    batch = ForwardBatch(tokens, steps, steps, ends, ends[1:], table, steps, activations=hidden[:-1])
    return program(batch).numpy()


@pytest.mark.parametrize("kind", [*KINDS, *SLOW_KINDS])
def test_logits_are_transformers(kind: str, tmp_path: Path) -> None:
    """Embedding and hidden state in each other's place, a norm left out, a token late, the wrong layer."""
    directory, model, layer = make_with_layer(tmp_path, kind)
    ids = np.random.default_rng(0).integers(0, 256, 40).tolist()
    hidden, want = theirs(model, layer, ids)
    np.testing.assert_allclose(ours(directory, hidden, ids), want, atol=2e-4)
    if kind == "qwen3_5_text":  # and from names that transformers maps itself
        model.config.name_or_path, model.config.dtype = str(directory), torch.float32
        again = theirs(model, MtpModel.from_pretrained(model), ids)[1]
        np.testing.assert_array_equal(again, want)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_has_the_layer_after_the_last(kind: str, tmp_path: Path) -> None:
    """A model of one layer too many, or a layer by other names than llama.cpp's."""
    directory, model, layer = make_with_layer(tmp_path, kind)
    path = tmp_path / "whole.gguf"
    convert_model(directory, path, None, dry_run=False, as_json=False)
    joins = (MODEL_TENSOR.NEXTN_EH_PROJ, MODEL_TENSOR.NEXTN_ENORM, MODEL_TENSOR.NEXTN_HNORM)
    with GGUFFile(path) as gguf:
        prefix = gguf.metadata["general.architecture"]
        assert gguf.metadata[f"{prefix}.nextn_predict_layers"] == 1
        assert gguf.metadata[f"{prefix}.block_count"] == N_LAYERS + 1
        for tensor in (*joins, MODEL_TENSOR.NEXTN_SHARED_HEAD_NORM):
            assert f"{TENSOR_NAMES[tensor].format(bid=N_LAYERS)}.weight" in gguf.tensors
    ids = np.random.default_rng(1).integers(0, 256, 24).tolist()
    hidden, want = theirs(model, layer, ids)
    np.testing.assert_allclose(ours(path, hidden, ids), want, atol=2e-4)
    with LLM(path, backend="reference") as llm:
        assert llm.config.n_layers == N_LAYERS
        np.testing.assert_allclose(llm.logits(ids), answers(model, ids), atol=2e-2)


def answers(model: Any, ids: list[int]) -> np.ndarray:
    """transformers' logits [T, V]."""
    with torch.no_grad():
        logits: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return logits


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, Any]:
    return make_with_layer(tmp_path_factory.mktemp("next"), request.param)


class Asked:
    """Has the layer draft in each step, and keeps its first drafts by the tokens before them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, right: list[int] | None = None) -> None:
        self.drafts: dict[tuple[int, ...], int] = {}
        chances, propose = NextTokenDrafts.chances, NextTokenDrafts.propose

        def certain(drafts: NextTokenDrafts, n: int) -> Any:
            return (1.0 for _ in chances(drafts, n))

        def kept(drafts: NextTokenDrafts, n: int) -> list[int]:
            found = propose(drafts, n)
            before = tuple(drafts.tokens[: drafts.n_tokens].tolist())
            if found:
                self.drafts[before] = found[0]
            if right is not None:  # as if the layer had been right but for some
                stop = drafts.first + drafts.n_tokens
                found = [t if (stop + i) % 5 else 7 for i, t in enumerate(right[stop : stop + len(found)])]
                drafts.drafts = found
            return found

        monkeypatch.setattr(NextTokenDrafts, "chances", certain)
        monkeypatch.setattr(NextTokenDrafts, "propose", kept)
        monkeypatch.setattr(LookupDrafts, "chances", lambda drafts, n: iter(()))
        monkeypatch.setattr(NextTokenDrafts, "reading_cost", 0.0)
        offer = DraftBudget.offer
        monkeypatch.setattr(DraftBudget, "offer", lambda budget, chances, cost=0.0: offer(budget, chances))


@pytest.mark.parametrize(("n_step", "n_frequent"), [(20, N_VOCAB), (512, 200)])
def test_drafts_are_the_layers_and_change_no_answer(
    made: tuple[Path, Any, Any], n_step: int, n_frequent: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of another token or request, of a rejected draft, or in place of which the layer's own stay; a
    text of rare tokens for which frequent ones are drafted."""
    directory, model, layer = made
    monkeypatch.setattr("kukri.models.next_token.MOST_DRAFTED", n_frequent)
    greedy = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    prompts = [PROMPT, [*PROMPT[5:], 120], [121], [*range(200, 240)]]
    with LLM(directory, max_requests=4) as llm:
        want = [llm.generate(prompt, greedy) for prompt in prompts]
    asked = Asked(monkeypatch)
    with LLM(directory, draft_model="mtp", max_requests=4, max_step_tokens=n_step) as llm:
        together = llm.generate(prompts, greedy)
        assert [a.token_ids for a in together] == [a.token_ids for a in want]
        assert llm.engine.scheduler.n_drafted > 15
    n_equal = n = 0
    for prompt, answer in zip(prompts, want):
        ids = [*prompt, *answer.token_ids]
        _, logits = theirs(model, layer, ids)
        for i, row in enumerate(logits):
            if np.count_nonzero(np.array(ids[: i + 2])[-64:] >= n_frequent) <= 8:
                row = row[:n_frequent]
            draft = asked.drafts.get(tuple(ids[1 : i + 2]))
            if draft is not None:
                n, n_equal = n + 1, n_equal + (draft == row.argmax())
    assert n > 15
    assert n_equal > 0.9 * n  # activations are int8, and the cache float16


def test_accepted_drafts_change_no_answer(
    made: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the layer read of a draft it made stays; a draft after an accepted one that is lost."""
    directory, _, _ = made
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True, logprobs=2)
    with LLM(directory) as llm:
        want = llm.generate(PROMPT, params)
    Asked(monkeypatch, [*PROMPT, *want.token_ids])
    with LLM(directory, draft_model="mtp") as llm:
        for n_hit in (0, 64):  # the second time the prompt is cached, whose rows are not there
            got = llm.generate(PROMPT, params)
            assert (got.token_ids, got.logprobs) == (want.token_ids, want.logprobs)
            assert llm.engine.allocator.n_prefix_hit >= n_hit
            assert got.timings.n_accepted > 20
            assert got.timings.n_accepted < got.timings.n_drafted
        llm.engine.check_integrity()


@pytest.mark.full
def test_too_few_pages_change_no_answer(made: tuple[Path, Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is preempted, ends early or shares a prompt, and drafts by rows of what it was."""
    directory, _, _ = made
    random = np.random.default_rng(2)
    prompts = [random.integers(0, 256, n).tolist() for n in (5, 40, 16, 33, 1, 60)]
    prompts += [[*prompts[1], 3], [*prompts[1][:32], 5]]
    sampled = SamplingParams(temperature=1, max_tokens=40, ignore_eos=True, seed=1, n=2)
    with LLM(directory, max_requests=4) as llm:
        want = [[o.token_ids for o in llm.generate(prompt, sampled).outputs] for prompt in prompts]
        page_bytes = llm.engine.runner.backend.page_bytes(llm.engine.model.cache_layout, "f16")
    Asked(monkeypatch)
    options: dict[str, Any] = {"max_requests": 4, "max_step_tokens": 24, "kv_bytes": 14 * page_bytes}
    with LLM(directory, draft_model="mtp", **options) as llm:
        got = llm.generate(prompts, sampled)
        assert [[o.token_ids for o in each.outputs] for each in got] == want
        llm.engine.check_integrity()
        assert llm.engine.scheduler.n_preemptions > 0
        assert llm.engine.scheduler.n_drafted > 20
        drafting = llm.engine.drafting.drafter
        assert drafting is not None
        assert drafting.pool.n_free == drafting.pool.n_pages


def test_a_model_without_the_layer_says_so(tmp_path: Path) -> None:
    """An error about a missing tensor, or drafts that are never made."""
    for kind in ("qwen3_5_text", "llama"):
        directory, _ = make(tmp_path / kind, kind)
        with pytest.raises(
            ConfigError,
            match=r"--draft-model mtp.*a layer for multi-token prediction that is supported was not found",
        ):
            LLM(directory, draft_model="mtp")
