"""Models with recurrent layers from files: prefixes, batches, answers, masks, hooks, wrong inputs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kukri import LLM, SamplingParams
from kukri.config import EngineConfig
from kukri.engine import Engine
from kukri.errors import FormatError, KukriError, RequestError, UnsupportedError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.huggingface.config import hf_model_config
from kukri.kernels import make_backend
from kukri.models import load_model
from kukri.terminal.convert import convert_model
from kukri.terminal.inspect import show_model
from tests.engine.fake_model import SeerDrafts
from tests.lazy_imports import lazy_imports
from tests.models.made_models import make as make_tiny
from tests.models.tiny_models import TINY
from tests.models.written_models import write
from tests.test_llm_safetensors import N_VOCAB, make
from tests.test_llm_safetensors import TINY as TINY_HF

with lazy_imports():
    import torch

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=3)
TEXT = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """An lfm2 as transformers saves it, and transformers' model."""
    return make(tmp_path_factory.mktemp("hybrid"), "lfm2")


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A granitemoehybrid as transformers saves it."""
    return make(tmp_path_factory.mktemp("granite"), "granitemoehybrid")[0]


@pytest.fixture(scope="module", params=["lfm2", "lfm3", "qwen3_5_text", "granitemoehybrid"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory, _ = make(tmp_path_factory.mktemp("hybrid"), request.param)
    with LLM(directory, quantize="Q8_0", max_requests=4) as opened:
        yield opened


def same(a: Any, b: Any) -> bool:
    """True if tokens and the bits of their log-probabilities are equal."""
    return bool(a.token_ids == b.token_ids and a.logprobs == b.logprobs)


def test_a_shared_prefix_changes_no_bit(llm: LLM) -> None:
    """A state taken from a place that is not where the prompt continues."""
    allocator = llm.calls.engine.allocator
    ends = ["One.", "Another end, and a longer one: seven, eight, nine.", "A third"]
    shared = [llm.generate(TEXT + end, GREEDY) for end in ends]
    n_hit = allocator.n_prefix_hit
    assert n_hit > 2 * 0.6 * len(TEXT)
    for end, before in zip(ends, shared, strict=True):
        llm.calls.engine.add_hooks({})  # forgets all that is cached
        assert same(llm.generate(TEXT + end, GREEDY), before)
    assert allocator.n_prefix_hit == n_hit


@pytest.mark.full(only=["qwen3_5_text-torch", "granitemoehybrid-torch", "lfm2-torch", "lfm3-torch"])
@pytest.mark.parametrize("backend", [None, "torch"])
def test_a_restart_changes_no_bit(llm: LLM, tmp_path: Path, backend: str | None) -> None:
    """A state that is read from disk after other tokens than it was saved after, or in another order."""
    found = []
    for end in ("One.", "Another end."):
        with LLM(llm.path, quantize="Q8_0", backend=backend, prefix_dir=tmp_path) as opened:
            found.append(opened.generate(TEXT + end, GREEDY))
            n_restored = opened.engine.allocator.n_restored
            opened.calls.engine.allocator.saved = None
            opened.calls.engine.add_hooks({})  # forgets all that is cached
            again = opened.generate(TEXT + end, GREEDY)
            assert again.token_ids == found[-1].token_ids
            assert backend == "torch" or same(again, found[-1])  # PyTorch's bits may depend on the batch
    assert n_restored > 0.6 * len(TEXT)


def test_neighbours_and_steps_change_no_bit(llm: LLM) -> None:
    """A sequence that continues with another's state; a chunk that begins with zeros."""
    prompts = ["The first of them.", TEXT, "x"]
    together = llm.generate(prompts, GREEDY)
    llm.calls.engine.add_hooks({})
    assert all(same(llm.generate(p, GREEDY), t) for p, t in zip(prompts, together, strict=True))
    with LLM(llm.path, quantize="Q8_0", max_step_tokens=7) as other:
        assert same(other.generate(TEXT, GREEDY), together[1])


def test_several_answers(llm: LLM) -> None:
    """Answers that share one state."""
    sampled = SamplingParams(temperature=1, seed=5, max_tokens=9, n=3, ignore_eos=True)
    answers = [output.token_ids for output in llm.generate(TEXT, sampled).outputs]
    apart = [llm.generate(TEXT, sampled, n=1, seed=5 + i).token_ids for i in range(3)]
    assert answers == apart
    assert len({tuple(ids) for ids in answers}) == 3


def test_drafts_change_no_bit(llm: LLM) -> None:
    """A state that has read a rejected draft, or has not read an accepted one."""
    prompt, scheduler = "a b c d a b c d a b c d", llm.calls.engine.scheduler
    plain = llm.generate(prompt, GREEDY, speculation="off", max_tokens=60)
    n_drafted, n_accepted = scheduler.n_drafted, scheduler.n_accepted
    for prediction in (plain.text, plain.text[::-1], plain.text[::2] + plain.text):
        drafted = llm.generate(prompt, GREEDY, speculation="ngram", prediction=prediction, max_tokens=60)
        assert same(drafted, plain)
    assert scheduler.n_drafted - n_drafted > scheduler.n_accepted - n_accepted > 0


class Remembered(SeerDrafts):
    """Drafts what was said before, each draft wrong with a probability of a fifth."""

    def __init__(self, said: list[int]) -> None:
        super().__init__(0.8)
        self._said = said

    def propose(self, n: int) -> list[int]:
        """See Drafts."""
        right = self._said[len(self._text) :][:n]
        return [token if self._random.random() < self._skill else token ^ 1 for token in right]


def test_drafts_of_a_model_with_windows_change_no_bit() -> None:
    """Catches a model with states and windows that has no drafts, and a window that has passed tokens which
    a state reads again.
    """
    _, config, source = make_tiny("falcon_h1")
    layers = [replace(layer, window=window) for layer, window in zip(config.layers, (7, None, 20, 7))]
    model = load_model(source, replace(config, layers=tuple(layers)))
    engine = Engine(model, make_backend("cpu", n_threads=1), EngineConfig(max_requests=2))
    prompt = np.random.default_rng(3).integers(3, config.n_vocab, 20).tolist()
    params = replace(GREEDY, max_tokens=120)
    said: list[int] = []
    found: list[Any] = []
    for _ in range(2):
        request = engine.maker.make_request(prompt, params)
        if said:
            request.drafts = Remembered(prompt + said)  # type: ignore[assignment]
        engine.add_request(request)
        while engine.has_work:
            engine.step()
            engine.check_integrity()
        said = request.output_ids
        found.append((said, request.answer.sampled))
    assert found[0] == found[1]
    assert 120 > request.sequence.n_accepted > 40
    assert request.sequence.n_drafted > request.sequence.n_accepted


def test_logits_and_vectors_of_texts(llm: LLM) -> None:
    """Rows that continue from a cached state, whose own rows are missing or wrong."""
    ids = llm.tokenizer.encode(TEXT)
    llm.generate(TEXT, GREEDY)
    cached = llm.logits(ids), llm.embed(TEXT)
    llm.calls.engine.add_hooks({})
    np.testing.assert_array_equal(llm.logits(ids), cached[0])
    np.testing.assert_array_equal(llm.embed(TEXT), cached[1])


def test_forward_pads_on_either_side(saved: tuple[Path, Any]) -> None:
    """Pads that enter a state; a row of the batch with another's state; a cache that is not continued."""
    directory, hf = saved
    ids = np.random.default_rng(0).integers(0, N_VOCAB, (2, 20))
    with LLM(directory, backend="reference") as llm:
        model = llm.model
        with torch.no_grad():
            want = hf(torch.from_numpy(ids)).logits.numpy()
        np.testing.assert_allclose(model.forward(ids), want, atol=1e-4)
        mask = np.ones((2, 20), int)
        mask[0, :5] = mask[1, 16:] = 0
        padded = model.forward(ids, mask)
        np.testing.assert_array_equal(
            padded[0, 5:], model.forward(ids[:1, 5:], positions=np.arange(5, 20))[0]
        )
        np.testing.assert_array_equal(padded[1, :16], model.forward(ids[1:, :16])[0])
        cache = model.new_cache(2, 40)
        steps = [model.forward(ids[:, :7], cache=cache), model.forward(ids[:, 7:], cache=cache)]
        np.testing.assert_array_equal(np.concatenate(steps, axis=1), model.forward(ids))
        with pytest.raises(RequestError, match="state cannot be rolled back"):
            cache.crop(3)
        cache.crop(0)
        np.testing.assert_array_equal(model.forward(ids[:, :7], cache=cache), steps[0])
        with pytest.raises(RequestError, match="is not supported by recurrent layers"):
            model.forward(ids, np.ones((1, 1, 20, 20), bool))
        mask[0, 10] = 0
        with pytest.raises(RequestError, match="layers with a window or a state do not support padding"):
            model.forward(ids, mask)


def test_hooks_see_the_layers(llm: LLM) -> None:
    """A state layer without taps, names of attention where there is none, a run without states."""
    ids = llm.tokenizer.encode(TEXT)[:50]
    logits, cache = llm.run_with_cache(ids)
    np.testing.assert_array_equal(logits[0], llm.logits(ids))
    names = {name for name in cache if name.startswith("blocks.0.")}
    reads = {**dict.fromkeys(("lfm2", "lfm3"), "conv.hook_conv_out"), "qwen3_5_text": "linear_attn.hook_read"}
    inside = reads.get(llm.config.architecture, "mamba.hook_read")
    assert {f"blocks.0.{inside}", "blocks.0.hook_mixer_out", "blocks.0.hook_resid_post"} <= names
    assert not any(".attn." in name for name in names)
    mid = cache["blocks.0.hook_resid_pre"] + cache["blocks.0.hook_mixer_out"]
    np.testing.assert_array_equal(cache["blocks.0.hook_resid_mid"], mid)
    hook = [(f"blocks.1.{inside}", lambda x, hook: x * 0)]
    assert np.abs(llm.run_with_hooks(ids, fwd_hooks=hook) - logits).max() > 0.01
    np.testing.assert_array_equal(llm.logits(ids), logits[0])


def test_inspect_tells_states(saved: tuple[Path, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Keys and values counted for layers that have none."""
    show_model(str(saved[0]), as_json=True)
    report = json.loads(capsys.readouterr().out)
    assert report["recurrent_layers"] == "SSAS"
    assert report["kv_bytes_per_token"] * 4 == report["kv_bytes_per_token_mha"] * 2
    assert report["state_bytes"] == 3 * 2 * 64 * 4
    show_model(str(saved[0]), as_json=False)
    assert "SSAS   S keeps a state, A attends\n" in capsys.readouterr().out


CONV = "model.layers.1.conv.conv.weight"


@pytest.mark.parametrize(
    ("change", "keys", "error", "message"),
    [
        (lambda t: t.pop(CONV), {}, FormatError, r"'model.layers.1.conv.conv.weight'.*is missing"),
        (
            lambda t: t.update({CONV: np.zeros((64, 1, 4), np.float32)}), {}, FormatError,
            r"layers.1.conv.conv.*has shape \(64, 1, 4\) where the configuration asks for \(64, 1, 3\)",
        ),
        (lambda t: None, {"conv_L_cache": 1}, FormatError, "must have 2 taps or more, not 1"),
        (lambda t: None, {"conv_L_cache": "3"}, FormatError, "conv_L_cache.*must be a whole number"),
        (
            lambda t: None, {"layer_types": ["conv", "mamba", "full_attention", "conv"]}, UnsupportedError,
            "layer_types' names 'mamba': only full_attention, conv are supported",
        ),
        (lambda t: None, {"layer_types": ["conv"]}, FormatError, "layer_types' must have 4 entries, not 1"),
        (
            lambda t: None, {"layer_types": None, "full_attn_idxs": [2, 9]}, FormatError,
            "full_attn_idxs' must name layers from 0 to 3",
        ),
    ],
    ids=["missing", "shape", "taps", "type", "layer types", "few layers", "indices"],
)  # fmt: skip
def test_wrong_files(
    saved: tuple[Path, Any],
    edited_copy: Callable[..., Path],
    change: Any,
    keys: Any,
    error: Any,
    message: str,
) -> None:
    """A traceback from NumPy; a model that runs with a layer left out."""
    with pytest.raises(error, match=message) as caught:
        LLM(edited_copy(saved[0], change, keys))
    assert isinstance(caught.value, KukriError)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ssm.inner_size": 33}, r"ssm.inner_size' must be a multiple of 2 heads, not 33"),
        (
            {"ssm.time_step_rank": 3, "ssm.inner_size": 48},
            "recurrent groups \\(2\\) must divide the heads \\(3\\)",
        ),
        ({"ssm.state_size": 0}, r"ssm.state_size' must be from 1 to .*, not 0"),
        ({"attention.recurrent_layers": [True, False]}, "recurrent_layers' must have 4 entries, not 2"),
    ],
)
def test_sizes_that_do_not_divide(keys: dict[str, Any], message: str, tmp_path: Path) -> None:
    """Heads cut in the middle; a traceback from a reshape."""
    name = "qwen3_5_text"
    tiny = TINY[name]
    _, config, source = make_tiny(name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(TINY, name, replace(tiny, keys={**(tiny.keys or {}), **keys}))
        path = write(tmp_path / "m.gguf", name, config, source)
    with GGUFFile(path) as file, pytest.raises(FormatError, match=message) as caught:
        model_config(file)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"mamba_n_heads": 3}, "mamba_n_heads' must divide the width 128, which 3 does not"),
        ({"mamba_d_head": 16}, "mamba_d_head' is 16, but 4 heads of a width of 128 have 32"),
        ({"mamba_n_groups": 3}, "recurrent groups \\(3\\) must divide the heads \\(4\\)"),
        ({"mamba_n_groups": 2}, r"mamba.in_proj.weight'.*has shape \(324, 64\) where.*asks for \(388, 64\)"),
        ({"mamba_d_state": 31}, r"mamba.in_proj.weight'.*has shape \(324, 64\) where.*asks for \(322, 64\)"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type' is 'alibi': only rope and"),
        ({"time_step_limit": [-0.1, 0.1]}, "time_step_limit' must be the least and the largest step"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok' must be at most 8, the experts, not 9"),
        ({"num_local_experts": 7}, r"input_linear.weight'.*has shape \(8, 64, 64\)|router.*\(8, 64\) where"),
        ({"num_local_experts": 0}, "no layer of granitemoehybrid_dense takes: .*block_sparse_moe"),
        (
            {"layer_types": ["mamba", "rwkv", "mamba", "mamba"]},
            "names 'rwkv': only attention, mamba, linear_attention",
        ),
        ({"mamba_conv_bias": False}, r"mamba.conv1d.bias'.*is there, but key 'mamba_conv_bias'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_keys_of_granite(keys: dict[str, Any], message: str, granite: Path, tmp_path: Path) -> None:
    """A traceback from NumPy; a model that runs with sizes, experts or layers other than its own."""
    copy = Path(shutil.copytree(granite, tmp_path / "copy"))
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **keys}))
    with pytest.raises(KukriError, match=message) as caught:
        LLM(copy)
    assert "\n" not in str(caught.value)


def test_a_draft_model_is_refused(saved: tuple[Path, Any]) -> None:
    """A draft model whose state keeps what was rejected."""
    with pytest.raises(KukriError, match=r"a draft model \(--draft-model\) must have no recurrent") as caught:
        LLM(saved[0], draft_model=saved[0])
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"ssm_multipliers": [1.0] * 4}, "ssm_multipliers' must have 5 numbers, not 4"),
        ({"mlp_multipliers": [1.0, -1.0]}, "mlp_multipliers' must be a finite number above 0"),
        ({"mlp_multipliers": 2.0}, "mlp_multipliers' must be a list of numbers"),
        ({"key_multiplier": 0}, "key_multiplier' must be a finite number above 0"),
        ({"lm_head_multiplier": "1"}, "lm_head_multiplier' must be a number"),
        ({"mamba_proj_bias": True}, "mamba_proj_bias' is True: only False is supported"),
        ({"mamba_d_head": 8}, "mamba_d_head' is 8, but 8 heads of a width of 128 have 16"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_keys_of_falcon_h1(keys: dict[str, Any], message: str) -> None:
    """A multiplier that is left out, or a bias that is multiplied by another number than its row."""
    sizes = {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_head": 16}
    with pytest.raises(KukriError, match=message):
        hf_model_config({**TINY_HF, "model_type": "falcon_h1", **sizes, **keys}, Path("config.json"))


def test_multipliers_of_tied_matrices_are_not_lost(tmp_path: Path) -> None:
    """A GGUF file whose embeddings have the head's multiplier, or the head theirs."""
    directory, model = make(tmp_path / "hf", "falcon_h1-normed")
    convert_model(directory, tmp_path / "m.gguf", None, dry_run=False, as_json=False)
    embedding = model.get_input_embeddings().weight.detach().numpy()
    with GGUFFile(tmp_path / "m.gguf") as file:
        np.testing.assert_allclose(file.array("token_embd.weight"), 3 * embedding, rtol=1e-6)
        np.testing.assert_array_equal(file.array("output.weight"), embedding)
