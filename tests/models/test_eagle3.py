"""EAGLE-3's layers: logits and chains of the definition below, in PyTorch; no answer that differs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.engine.drafts import DraftBudget
from kukri.engine.layer_drafts import LayerDrafts
from kukri.engine.lookup_drafts import LookupDrafts
from kukri.errors import FormatError, UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.huggingface.eagle3 import read_eagle3
from kukri.kernels import make_backend
from kukri.kernels.step import ForwardBatch, StepLimits
from kukri.models import load_model
from tests.lazy_imports import lazy_imports
from tests.models.preempted_drafts import check_too_few_pages
from tests.test_llm_safetensors import CHECKPOINTS, N_VOCAB, TINY, make

with lazy_imports():
    import torch
    from safetensors.torch import save_file

N_LAYERS, D, HEADS, KV_HEADS, D_HEAD, F = 8, 64, 4, 2, 16, 96
PROMPT = [*b"It was a bright cold day in April, and the clocks were striking thirteen."]
EAGLE = {
    **{"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "num_hidden_layers": 1},
    **{"hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS, "head_dim": D_HEAD},
    **{"num_key_value_heads": KV_HEADS, "vocab_size": N_VOCAB, "draft_vocab_size": 240, "rms_norm_eps": 1e-5},
    **{"max_position_embeddings": 32, "rope_theta": 10000.0, "hidden_act": "silu", "bos_token_id": 256},
    **{"eos_token_id": 259, "pad_token_id": None, "torch_dtype": "float32", "tie_word_embeddings": False},
}


def write_eagle(directory: Path, **stated: Any) -> tuple[Path, dict[str, torch.Tensor]]:
    """A directory as training leaves it, and its tensors."""
    torch.manual_seed(11)
    n_q, n_kv = HEADS * D_HEAD, KV_HEADS * D_HEAD
    shapes = {
        **{"self_attn.q_proj": (n_q, 2 * D), "self_attn.k_proj": (n_kv, 2 * D)},
        **{"self_attn.v_proj": (n_kv, 2 * D), "self_attn.o_proj": (D, n_q)},
        **{"mlp.gate_proj": (F, D), "mlp.up_proj": (F, D), "mlp.down_proj": (D, F)},
        **dict.fromkeys(("input_layernorm", "hidden_norm", "post_attention_layernorm"), (D,)),
    }
    every = {f"midlayer.{name}": shape for name, shape in shapes.items()}
    every |= {"fc": (D, 3 * D), "norm": (D,), "lm_head": (240, D)}
    tensors = {
        f"{name}.weight": 0.2 * torch.randn(shape) if len(shape) > 1 else 1 + 0.3 * torch.randn(shape)
        for name, shape in every.items()
    }
    chosen = torch.randperm(256)[:240].sort().values
    tensors["d2t"] = chosen - torch.arange(240)
    tensors["t2d"] = torch.zeros(N_VOCAB, dtype=torch.bool).index_fill(0, chosen, True)
    directory.mkdir(parents=True)
    save_file(tensors, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps({**EAGLE, **stated}))
    return directory, tensors


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * weight


def turned(x: torch.Tensor) -> torch.Tensor:
    """x [T, heads, D_HEAD] rotated by its place."""
    angles = torch.arange(len(x))[:, None] * 10000.0 ** (-torch.arange(0, D_HEAD, 2) / D_HEAD)
    cos, sin = (f(torch.cat([angles, angles], -1))[:, None] for f in (torch.cos, torch.sin))
    one, other = x.chunk(2, -1)
    return x * cos + torch.cat([-other, one], -1) * sin


def layer(
    w: dict[str, torch.Tensor], embedded: torch.Tensor, rows: torch.Tensor, norms_residual: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows for further drafts [T, D] and logits [T, 240]."""

    def part(name: str) -> torch.Tensor:
        return w[f"midlayer.{name}.weight"]

    t = len(rows)
    row = normed(rows, part("hidden_norm"))
    x = torch.cat([normed(embedded, part("input_layernorm")), row], -1)
    q, k, v = (
        (x @ part(f"self_attn.{name}_proj").T).view(t, -1, D_HEAD).repeat_interleave(times, 1)
        for name, times in (("q", 1), ("k", HEADS // KV_HEADS), ("v", HEADS // KV_HEADS))
    )
    scores = torch.einsum("ihd,jhd->hij", turned(q), turned(k)) / D_HEAD**0.5
    weights = (scores + torch.full((t, t), -torch.inf).triu(1)).softmax(-1)
    z = torch.einsum("hij,jhd->ihd", weights, v).reshape(t, -1)
    x = (row if norms_residual else rows) + z @ part("self_attn.o_proj").T
    y = normed(x, part("post_attention_layernorm"))
    gate = torch.nn.functional.silu(y @ part("mlp.gate_proj").T)
    x = x + (gate * (y @ part("mlp.up_proj").T)) @ part("mlp.down_proj").T
    return x, normed(x, w["norm.weight"]) @ w["lm_head.weight"].T


def joined_rows(model: Any, ids: list[int], depths: tuple[int, ...]) -> torch.Tensor:
    """The model's rows [T, 3 D]."""
    with torch.no_grad():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[i][0] for i in depths], -1)


def chain(
    model: Any, w: dict[str, torch.Tensor], joined: torch.Tensor, tokens: list[int], n: int
) -> list[int]:
    """The n drafts after some tokens, the first of which follows the first row."""
    rows, drafts, embed = joined @ w["fc.weight"].T, list[int](), model.get_input_embeddings()
    with torch.no_grad():
        for _ in range(n):
            made, logits = layer(w, embed(torch.tensor([*tokens, *drafts])), rows, norms_residual=False)
            place = int(logits[-1].argmax())
            drafts.append(place + int(w["d2t"][place]))
            rows = torch.cat([rows, made[-1:]])
    return drafts


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TINY, "num_hidden_layers", N_LAYERS)
        patch.setitem(TINY, "initializer_range", 0.15)
        patch.setitem(CHECKPOINTS, "deep", ("LlamaConfig", {}))
        return make(tmp_path_factory.mktemp("llama"), "deep")


@pytest.mark.parametrize(
    ("stated", "depths"),
    [
        ({}, (2, 4, 5)),
        ({"norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, (1, 3, 6)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}}, (1, 4, 7)),
    ],
)
def test_logits_are_the_definitions(
    target: tuple[Path, Any], stated: dict[str, Any], depths: tuple[int, ...], tmp_path: Path
) -> None:
    """Embedding and row in each other's place, rows of other layers or in another order, a norm left out."""
    directory, model = target
    path, tensors = write_eagle(tmp_path / "eagle", **stated)
    ids = np.random.default_rng(0).integers(0, 256, 40).tolist()
    joined = joined_rows(model, ids[:-1], depths)
    with torch.no_grad():
        embedded = model.get_input_embeddings()(torch.tensor(ids[1:]))
        norms_residual = "norm_before_residual" in stated
        _, want = layer(tensors, embedded, joined @ tensors["fc.weight"].T, norms_residual)
    with open_checkpoint(directory) as checkpoint:
        ours = load_model(checkpoint.weights(checkpoint.config), checkpoint.config)
    drafting, backend, n = read_eagle3(path, ours), make_backend("reference"), len(ids) - 1
    assert drafting.taps == tuple(f"blocks.{i}.hook_resid_pre" for i in depths)
    n_pages = -(-n // backend.page_tokens)
    cache = backend.new_cache(drafting.cache_layout, n_pages, 0, "f32")
    steps, ends = np.arange(n, dtype=np.int32), np.array([0, n], np.int32)
    table, tokens = np.arange(n_pages, dtype=np.int32)[None], np.array(ids[1:], np.int32)
    given, limits = (tokens, steps, steps, ends, ends[1:], table, steps), StepLimits(n, 1, n, n_pages)
    reduced = backend.compile(drafting.reduced, cache, limits)
    rows = reduced(ForwardBatch(*given, activations=joined.numpy())).numpy().copy()
    got = backend.compile(drafting, cache, limits)(ForwardBatch(*given, activations=rows)).numpy()
    np.testing.assert_allclose(got, want.numpy(), atol=2e-4)
    np.testing.assert_array_equal(drafting.to_target, tensors["d2t"].numpy() + np.arange(len(tensors["d2t"])))


@pytest.mark.full(only=["reference-512"])
@pytest.mark.parametrize(("backend", "n_step"), [("reference", 512), ("cpu", 20)])
def test_chains_are_the_definitions_and_change_no_answer(
    target: tuple[Path, Any], backend: Any, n_step: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of another token or request, the model's row in place of the layer's own, ids of the head taken
    for the model's.
    """
    directory, model = target
    path, tensors = write_eagle(tmp_path / "eagle")
    greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    prompts = [PROMPT, [121, 122], [*range(180, 220)]]
    with LLM(directory, backend=backend, max_requests=3) as llm:
        want = [llm.generate(prompt, greedy).token_ids for prompt in prompts]
    found: dict[tuple[int, ...], list[int]] = {}
    propose, chances, offer = LayerDrafts.propose, LayerDrafts.chances, DraftBudget.offer

    def kept(drafts: LayerDrafts, n: int) -> list[int]:
        made = propose(drafts, n)
        found[tuple(drafts.tokens[: drafts.n_tokens].tolist())] = list(made)
        return made

    monkeypatch.setattr("kukri.engine.draft_kinds.eagle3.LAYER_TYPE", None)  # as the definition has it
    monkeypatch.setattr(LayerDrafts, "propose", kept)
    monkeypatch.setattr(LayerDrafts, "reading_cost", 0.0)
    monkeypatch.setattr(LayerDrafts, "chances", lambda drafts, n: (1.0 for _ in chances(drafts, min(n, 3))))
    monkeypatch.setattr(LookupDrafts, "chances", lambda drafts, n: iter(()))
    monkeypatch.setattr(DraftBudget, "offer", lambda budget, chances, cost=0.0: offer(budget, chances))
    options: dict[str, Any] = {"backend": backend, "max_requests": 3, "max_step_tokens": n_step}
    with LLM(directory, draft_model=path, **options) as llm:
        assert [answer.token_ids for answer in llm.generate(prompts, greedy)] == want
        llm.engine.check_integrity()
        assert llm.generate(PROMPT, greedy).token_ids == want[0]  # whose prompt is cached
    n = n_equal = 0
    for prompt, answer in zip(prompts, want):
        ids = [*prompt, *answer]
        rows = joined_rows(model, ids, (2, 4, 5))
        for stop in range(len(prompt) + 1, len(ids) + 1):
            drafts = found.get(tuple(ids[1:stop]))
            if drafts:
                their = chain(model, tensors, rows[: stop - 1], ids[1:stop], len(drafts))
                n, n_equal = n + len(drafts), n_equal + sum(a == b for a, b in zip(drafts, their))
    assert n > (40 if n_step > 100 else 15)
    # on the CPU activations are int8, and a draft that differs changes those after it
    assert n_equal > (0.98 if backend == "reference" else 0.75) * n


def test_too_few_pages_change_no_answer(
    target: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that is preempted or begins again, and drafts by rows of what it was."""
    check_too_few_pages(target[0], write_eagle(tmp_path / "eagle")[0], LayerDrafts, monkeypatch)


@pytest.mark.parametrize(
    ("stated", "message"),
    [
        ({"hidden_size": 32}, "not 1 of 32"),
        ({"num_hidden_layers": 2}, "not 2 of 64"),
        ({"eagle_aux_hidden_state_layer_ids": [1, 3, 8]}, "layers of the model's 8"),
        ({"eagle_aux_hidden_state_layer_ids": [3, 3, 4]}, "in order"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": "all"}}, "must list"),
    ],
)
def test_what_does_not_fit_is_refused(
    target: tuple[Path, Any], stated: dict[str, Any], message: str, tmp_path: Path
) -> None:
    """A traceback, or rows of layers that the model does not have."""
    path, _ = write_eagle(tmp_path / "eagle", **stated)
    with pytest.raises((UnsupportedError, FormatError), match=message):
        LLM(target[0], draft_model=path)


def test_tokens_that_the_model_lacks_are_refused(target: tuple[Path, Any], tmp_path: Path) -> None:
    """An id read from beyond the vocabulary."""
    path, tensors = write_eagle(tmp_path / "eagle")
    for wrong in (tensors["d2t"] + N_VOCAB, tensors["d2t"] - 300, tensors["d2t"][:5]):
        save_file({**tensors, "d2t": wrong.contiguous()}, path / "model.safetensors")
        with pytest.raises(FormatError, match="d2t"):
            LLM(target[0], draft_model=path)
