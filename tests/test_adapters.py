"""LoRA adapters of an LLM: transformers' merged model, file formats, batches, prefixes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from kukri import LLM, SamplingParams
from kukri.cli import app
from kukri.engine import Request
from kukri.errors import CapacityError, ConfigError, KukriError, RequestError, UnsupportedError
from kukri.formats.adapters import read_adapter
from kukri.formats.checkpoint import open_checkpoint
from kukri.models import load_model
from kukri.terminal.convert import convert_model
from tests.lazy_imports import lazy_imports
from tests.models.lora_files import (
    ATTENTION,
    LATENT,
    MLP,
    merged,
    random_updates,
    write_gguf_adapter,
    write_peft,
)
from tests.test_llm_safetensors import N_VOCAB, make, theirs

with lazy_imports():
    import torch
    from safetensors.torch import load_file, save_file

pytestmark = pytest.mark.representative(3)  # a model of transformers, saved, and ours

IDS = np.random.default_rng(0).integers(0, 250, 40).tolist()
GREEDY = SamplingParams(temperature=0, max_tokens=10, ignore_eos=True)
NAMES = ("one", "two", "three")
NEOX = ("dense", "dense_h_to_4h", "dense_4h_to_h")
CONVOLUTION = ("in_proj", "out_proj", "w1", "w2", "w3")  # and the MLP, of LFM2


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    return make(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="module")
def gguf(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    convert_model(llama[0], path, "F32", dry_run=False, as_json=True)
    return path


@pytest.fixture(scope="module")
def adapters(llama: tuple[Path, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Three, of other ranks, types and targets."""
    root, model = tmp_path_factory.mktemp("adapters"), llama[1]
    made = {
        "one": (random_updates(model, rank=4, seed=1), torch.float32),
        "two": (random_updates(model, rank=20, seed=2), torch.bfloat16),
        "three": (random_updates(model, ("q_proj", "v_proj"), rank=8, seed=3), torch.float16),
    }
    return {name: write_peft(root / name, u, 16.0, dtype) for name, (u, dtype) in made.items()}


@pytest.fixture(scope="module")
def llm(llama: tuple[Path, Any], adapters: dict[str, Path]) -> Iterator[LLM]:
    with LLM(llama[0], adapters=adapters, max_requests=8, n_threads=2) as made:
        yield made


def close(got: np.ndarray, want: np.ndarray, tolerance: float = 1e-4) -> None:
    np.testing.assert_allclose(got, want, atol=tolerance * max(1.0, np.abs(want).max()), rtol=0)


# --- the arithmetic


@pytest.mark.parametrize(
    "kind",
    [
        "llama",
        "qwen2",
        "phi3",
        "gemma2",
        "granite-plain",
        "lfm2",
        "deepseek_v2",
        "minicpm3",
        "falcon_h1",
        "nemotron_h",
        "mamba2",
        "gpt_neox",
    ],
)
def test_logits_are_those_of_the_merged_model(kind: str, tmp_path: Path) -> None:
    """A matrix under another name, a part of a fused one, an update next to a norm or factor, a scale."""
    directory, model = make(tmp_path / "model", kind)
    updates = random_updates(model, (*ATTENTION, *LATENT, *MLP, *CONVOLUTION, *NEOX), rank=4)
    path = write_peft(tmp_path / "adapter", updates, alpha=6.0)
    want = theirs(merged(model, updates, 1.5), IDS)
    assert np.abs(want - theirs(model, IDS)).max() > 0.05, "the premise: the adapter changes something"
    with LLM(directory, backend="reference", adapters={"a": path}) as llm:
        close(llm.logits(IDS, adapter="a"), want)
        close(llm.logits(IDS), theirs(model, IDS))


def test_names_of_nemotron_hs_own_code(tmp_path: Path) -> None:
    """Adapters trained with the code on the hub, where the model below the head is called backbone."""
    directory, model = make(tmp_path / "model", "nemotron_h")
    updates = random_updates(model, (*ATTENTION, *CONVOLUTION), rank=4)
    older = {name.replace("model.", "backbone.", 1): update for name, update in updates.items()}
    paths = {"a": write_peft(tmp_path / "a", updates), "b": write_peft(tmp_path / "b", older)}
    with LLM(directory, backend="reference", adapters=paths) as llm:
        np.testing.assert_array_equal(llm.logits(IDS, adapter="b"), llm.logits(IDS, adapter="a"))


def test_logits_on_the_cpu(llm: LLM, llama: tuple[Path, Any]) -> None:
    """A kernel's mistake: a rank of several tiles, types, a part that an adapter leaves."""
    close(llm.logits(IDS), theirs(llama[1], IDS), 5e-3)
    for name, rank, targets in (
        ("one", 4, (*ATTENTION, *MLP)),
        ("two", 20, (*ATTENTION, *MLP)),
        ("three", 8, ("q_proj", "v_proj")),
    ):
        updates = random_updates(llama[1], targets, rank, NAMES.index(name) + 1)
        close(llm.logits(IDS, adapter=name), theirs(merged(llama[1], updates, 16 / rank), IDS), 2e-2)


def test_alpha_and_rank_of_single_modules(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """rsLoRA's scale, and patterns: a name that is another's end, a rank that is the default's."""
    directory, model = llama
    updates = random_updates(model, ("q_proj", "down_proj"), rank=4)
    updates |= random_updates(model, ("o_proj",), rank=9, seed=5)
    scales = dict.fromkeys(updates, 8.0 / 2)  # alpha / sqrt(4)
    scales |= {name: 8.0 / 3 for name in updates if name.endswith("o_proj")}
    scales |= {"model.layers.1.self_attn.q_proj": 2.0 / 2, "model.layers.2.mlp.down_proj": 3.0 / 2}
    patterns = {"model.layers.1.self_attn.q_proj": 2, "layers.2.mlp.down_proj": 3.0, "proj": 99}
    path = write_peft(
        tmp_path, updates, 8, r=4, use_rslora=True, alpha_pattern=patterns, rank_pattern={"o_proj": 9}
    )
    with LLM(directory, backend="reference", adapters={"a": path}) as llm:
        close(llm.logits(IDS, adapter="a"), theirs(merged(model, updates, scales), IDS))


def test_a_head_of_its_own(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """An update of rows that want logits, at rows of tokens."""
    directory, model = llama
    updates = random_updates(model, ("lm_head", "v_proj"))
    path = write_peft(tmp_path, updates)
    with LLM(directory, adapters={"a": path}, n_threads=2) as llm:
        close(llm.logits(IDS, adapter="a"), theirs(merged(model, updates, 2.0), IDS), 2e-2)
        request = llm.engine.maker.make_output_request(IDS, "logits", first_row=20, stop_row=30, adapter="a")
        (rows,) = llm.calls.compute([request])
        np.testing.assert_array_equal(rows, llm.logits(IDS, adapter="a")[20:30])


def test_copies_of_the_models_own_matrices_are_left_out(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """An adapter of the head refused for what PEFT saves with it: the head and embedding as they were."""
    directory, model = llama
    updates = random_updates(model, ("lm_head", "v_proj"))
    path = write_peft(tmp_path, updates)
    tensors = load_file(path / "adapter_model.safetensors")
    copies = {"lm_head.base_layer.weight": model.lm_head.weight}
    copies |= {"model.embed_tokens.weight": model.model.embed_tokens.weight}
    tensors |= {f"base_model.model.{name}": weight.detach().clone() for name, weight in copies.items()}
    save_file(tensors, path / "adapter_model.safetensors")
    with LLM(directory, backend="reference", adapters={"a": path}) as llm:
        close(llm.logits(IDS, adapter="a"), theirs(merged(model, updates, 2.0), IDS))


def with_head_update(model: Any, a: torch.Tensor, b: torch.Tensor, scale: float) -> np.ndarray:
    """Logits of a transformers model whose head alone is W x + scale * B A x, as PEFT computes it."""
    hook = model.lm_head.register_forward_hook(lambda _, x, y: y + scale * ((x[0] @ a.T) @ b.T))
    try:
        return theirs(model, IDS)
    finally:
        hook.remove()


def tied_head(tmp_path: Path, kind: str) -> tuple[Path, Path, np.ndarray, tuple[Any, Any]]:
    """A model with a tied head, an adapter of it with copies of its matrix, its logits and the update."""
    directory, model = make(tmp_path / "model", kind)
    assert model.lm_head.weight is model.model.embed_tokens.weight, "the premise"
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(4, 64, generator=generator) * 0.1
    b = torch.randn(N_VOCAB, 4, generator=generator) * 0.1
    path = write_peft(tmp_path / "a", {"lm_head": (a, b)}, 6.0)
    tensors = load_file(path / "adapter_model.safetensors")
    for name in ("lm_head.base_layer", "model.embed_tokens"):
        tensors[f"base_model.model.{name}.weight"] = model.lm_head.weight.detach().clone()
    save_file(tensors, path / "adapter_model.safetensors")
    want = with_head_update(model, a, b, 6.0 / 4)
    assert np.abs(want - theirs(model, IDS)).max() > 0.1, "the premise: it changes the logits"
    return directory, path, want, (a, b)


def test_a_tied_head(tmp_path: Path) -> None:
    """An update refused because the head is the embedding's matrix, or applied to the embedding too."""
    directory, path, want, update = tied_head(tmp_path, "llama-tied-llama3")
    of_gguf = write_gguf_adapter(tmp_path / "a.gguf", {"lm_head": update}, 16, 6.0)
    with LLM(directory, backend="reference", adapters={"a": path, "gguf": of_gguf}) as llm:
        plain = llm.logits(IDS)
        close(llm.logits(IDS, adapter="a"), want)
        close(llm.logits(IDS, adapter="gguf"), want)
        np.testing.assert_array_equal(llm.logits(IDS), plain)
    write_peft(tmp_path / "a", {"lm_head": update}, ensure_weight_tying=True)
    with pytest.raises(UnsupportedError, match="ensure_weight_tying"):
        LLM(directory, backend="reference", adapters={"a": path})


@pytest.mark.full
@pytest.mark.parametrize("kind", ["llama-tied-llama3", "qwen3", "gemma2"])
@pytest.mark.parametrize("backend", ["cpu", "torch"])
def test_a_tied_head_on_each_backend(kind: str, backend: str, tmp_path: Path) -> None:
    """A backend that packs the embedding without the head's update."""
    directory, path, want, _ = tied_head(tmp_path, kind)
    with LLM(directory, backend=backend, adapters={"a": path}, n_threads=2) as llm:
        close(llm.logits(IDS, adapter="a"), want, 2e-2)


def test_a_tied_head_is_merged_into_a_matrix_of_its_own(tmp_path: Path) -> None:
    """An update of the head that changes the embedding too."""
    directory, path, want, _ = tied_head(tmp_path, "llama-tied-llama3")
    done = CliRunner().invoke(app, ["merge", str(directory), str(path), "-o", str(tmp_path / "m.gguf")])
    assert done.exit_code == 0, done.output
    with LLM(tmp_path / "m.gguf", backend="reference") as llm:
        close(llm.logits(IDS), want)
    done = CliRunner().invoke(app, ["merge", str(directory), str(path), "-o", str(tmp_path / "m")])
    assert "tied head is not supported in a directory" in done.output


@pytest.mark.full
def test_factors_in_the_matrices_of_gguf_are_those_of_updates_too(tmp_path: Path) -> None:
    """Falcon-H1, whose GGUF has matrices multiplied: an update merged as it is, or applied to such a file."""
    directory, model = make(tmp_path / "model", "falcon_h1")
    updates = random_updates(
        model, ("q_proj", "k_proj", "o_proj", "in_proj", "out_proj", "down_proj", "lm_head")
    )
    path = write_peft(tmp_path / "a", updates)
    done = CliRunner().invoke(app, ["merge", str(directory), str(path), "-o", str(tmp_path / "m.gguf")])
    assert done.exit_code == 0, done.output
    with LLM(tmp_path / "m.gguf", backend="reference") as llm:
        close(llm.logits(IDS), theirs(merged(model, updates, 2.0), IDS))
    with pytest.raises(UnsupportedError, match="not supported with falcon_h1 in GGUF"):
        LLM(tmp_path / "m.gguf", backend="reference", adapters={"a": path})


@pytest.mark.full
def test_heads_in_the_order_of_gguf_are_those_of_updates_too(tmp_path: Path) -> None:
    """Qwen3.5 with more value heads than key heads, which GGUF has in another order than PEFT's files."""
    directory, model = make(tmp_path / "model", "qwen3_5_text-grouped")
    names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj", "q_proj", "down_proj")
    updates = random_updates(model, names)
    path = write_peft(tmp_path / "a", updates)
    want = theirs(merged(model, updates, 2.0), IDS)
    for command in (
        ["merge", directory, path, "-o", tmp_path / "m.gguf"],
        ["convert", directory, tmp_path / "c.gguf"],
    ):
        done = CliRunner().invoke(app, [*map(str, command)])
        assert done.exit_code == 0, done.output
    with LLM(tmp_path / "m.gguf", backend="reference") as llm:
        close(llm.logits(IDS), want)
    with LLM(tmp_path / "c.gguf", backend="reference", adapters={"a": path}) as llm:
        close(llm.logits(IDS, adapter="a"), want)
    again = ["merge", tmp_path / "c.gguf", path, "-o", tmp_path / "again.gguf"]
    assert CliRunner().invoke(app, [*map(str, again)]).exit_code == 0
    with LLM(tmp_path / "again.gguf", backend="reference") as llm:
        close(llm.logits(IDS), want)


def test_patterns_are_regular_expressions(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """A pattern refused or taken for a plain name; another order than the file's."""
    directory, model = llama
    updates = random_updates(model, ("q_proj", "v_proj", "down_proj"), rank=4)
    patterns = {
        "^model.layers.0.self_attn.q_proj": 1,
        r"layers\.[01]\..*(q|v)_proj": 2,
        "v_pro.": 3,
        r".*\.3\.mlp\.\w+": 5.0,
        "[a-z]+_proj": 99,
    }

    plain = {name: patterns[name] for name in ("^model.layers.0.self_attn.q_proj", "v_pro.")}
    with open_checkpoint(directory) as checkpoint:
        ours = load_model(checkpoint.weights(checkpoint.config), checkpoint.config)
    for stated, want in ((patterns, {1, 2, 3, 5, 99}), (plain, {1, 3, 8}), ({"(q|k)_proj": 3}, {3, 8})):
        path = write_peft(tmp_path / str(len(stated)), updates, 8, r=4, alpha_pattern=stated)
        alphas = {}
        for name in updates:  # as PEFT looks for a module's alpha
            known = (alpha for key, alpha in stated.items() if re.match(rf"(.*\.)?({key})$", name))
            alphas[name] = next(known, 8)
        found = {name: update.scale for name, update in read_adapter(path, ours).updates.items()}
        assert found == {f"{name}.weight": alpha / 4 for name, alpha in alphas.items()}
        assert {*alphas.values()} == want, "the premise: what each pattern is for"


@pytest.mark.parametrize("weight_type", ["F32", "F16"])
def test_gguf_adapters(llama: tuple[Path, Any], gguf: Path, weight_type: str, tmp_path: Path) -> None:
    """Rows of q and k in another order than the model's; the scale of another rank."""
    directory, model = llama
    updates = random_updates(model, rank=6)
    of_gguf = write_gguf_adapter(tmp_path / "a.gguf", updates, 16, 9.0, weight_type)
    of_peft = write_peft(tmp_path / "a", updates, 9.0)
    want = theirs(merged(model, updates, 1.5), IDS)
    for path in (directory, gguf):
        with LLM(path, backend="reference", adapters={"gguf": of_gguf, "peft": of_peft}) as llm:
            close(llm.logits(IDS, adapter="peft"), want)
            close(llm.logits(IDS, adapter="gguf"), want, 1e-4 if weight_type == "F32" else 5e-3)


@pytest.mark.slow
def test_logits_are_those_of_peft(tmp_path: Path) -> None:
    """A rule of PEFT's that the formula here does not have: names, scales, patterns."""
    peft = pytest.importorskip("peft")
    for kind, config in {
        "llama": {"target_modules": "all-linear", "lora_alpha": 20, "r": 8},
        "qwen3": {"target_modules": ["q_proj", "down_proj"], "use_rslora": True, "r": 4},
        "phi3": {"target_modules": ["qkv_proj", "gate_up_proj"], "r": 4, "alpha_pattern": {"qkv_proj": 3}},
        "llama-biases": {
            "target_modules": r".*\.(0|2)\..*(q|up)_proj",
            "r": 16,
            "rank_pattern": {"up_proj": 2},
        },
    }.items():
        directory, model = make(tmp_path / kind, kind)
        tuned = peft.get_peft_model(model, peft.LoraConfig(**config, init_lora_weights=False))
        tuned.save_pretrained(tmp_path / f"{kind}-adapter")
        with torch.no_grad():
            want = tuned.eval()(torch.tensor([IDS])).logits[0].numpy()
        with LLM(directory, backend="reference", adapters={"a": tmp_path / f"{kind}-adapter"}) as llm:
            close(llm.logits(IDS, adapter="a"), want)


# --- batches, prefixes, loading and unloading


def requests(llm: LLM, prompts: list[list[int]], names: list[str | None]) -> list[Request]:
    made = [
        llm.engine.maker.make_requests(ids, GREEDY, adapter=name)[0]
        for ids, name in zip(prompts, names, strict=True)
    ]
    for request in made:
        llm.engine.add_request(request)
    return made


def finish(llm: LLM) -> None:
    while llm.engine.has_work:
        llm.engine.step()
        llm.engine.check_integrity()


def test_a_crowd_of_adapters_changes_no_answer(
    llm: LLM, llama: tuple[Path, Any], adapters: dict[str, Path]
) -> None:
    """A token that depends on the adapters next to it: each is that of the adapter alone, and of none."""
    rng = np.random.default_rng(1)
    shared = rng.integers(0, 250, 20).tolist()
    prompts = [shared + rng.integers(0, 250, int(n)).tolist() for n in rng.integers(1, 30, 12)]
    names = [None, *NAMES] * 3
    crowd = requests(llm, prompts, names)
    finish(llm)
    with LLM(llama[0], n_threads=2) as plain:
        for prompt, name, request in zip(prompts, names, crowd, strict=True):
            if name is None:
                assert plain.generate(prompt, GREEDY).token_ids == request.output_ids
    for one in NAMES:
        with LLM(llama[0], adapters={one: adapters[one]}, n_threads=2, speculation="off") as alone:
            for prompt, name, request in zip(prompts, names, crowd, strict=True):
                if name == one:
                    assert alone.generate(prompt, GREEDY, adapter=one).token_ids == request.output_ids
    texts = {tuple(request.output_ids) for request in requests_of(llm, shared)}
    assert len(texts) == 4, "the premise: each adapter has an answer of its own"


def requests_of(llm: LLM, prompt: list[int]) -> list[Request]:
    """A prompt's requests by each adapter and without, finished."""
    made = requests(llm, [prompt] * 4, [None, *NAMES])
    finish(llm)
    return made


def test_logits_in_a_crowd_are_those_alone_to_the_bit(llm: LLM) -> None:
    """A row that differs in its last bits, which greedy tokens would not show."""
    alone = {name: llm.logits(IDS, adapter=name) for name in (None, *NAMES)}
    made = [llm.engine.maker.make_output_request(IDS, "logits", adapter=name) for name in (*NAMES, None) * 2]
    for rows, name in zip(llm.calls.compute(made), (*NAMES, None) * 2, strict=True):
        np.testing.assert_array_equal(rows, alone[name])


def test_a_prefix_of_one_adapter_is_no_other_ones(llama: tuple[Path, Any], adapters: dict[str, Path]) -> None:
    """Keys and values of one adapter read by another, or by one that has its name now."""
    with LLM(llama[0], adapters={"a": adapters["one"], "b": adapters["two"]}, n_threads=2) as llm:
        for name in ("a", "b", None):
            (first,) = requests(llm, [IDS], [name])
            finish(llm)
            assert first.sequence.n_prefix_hit == 0
            (again,) = requests(llm, [IDS], [name])
            finish(llm)
            assert again.sequence.n_prefix_hit == 32
            assert again.output_ids == first.output_ids
        llm.unload_adapter("a")
        llm.load_adapter("a", adapters["three"])
        (other,) = requests(llm, [IDS], ["a"])
        finish(llm)
        assert other.sequence.n_prefix_hit == 0
    with LLM(llama[0], adapters={"c": adapters["three"]}, n_threads=2) as llm:
        assert llm.generate(IDS, GREEDY, adapter="c").token_ids == other.output_ids


def test_adapters_come_and_go_while_requests_run(llama: tuple[Path, Any], adapters: dict[str, Path]) -> None:
    """A slot that is given away while a request still needs it; memory that is never given back."""
    with LLM(llama[0], n_threads=2) as llm:
        wanted = {}
        for name in NAMES:
            llm.load_adapter(name, adapters[name])
            wanted[name] = llm.generate(IDS, GREEDY, adapter=name).token_ids
            llm.unload_adapter(name)
            assert llm.adapters == ()
            assert llm.engine.runner.adapters == ()
        llm.load_adapter("one", adapters["one"])
        llm.load_adapter("two", adapters["two"])
        running = requests(llm, [IDS, IDS], ["one", "two"])
        queued = llm.engine.maker.make_requests(IDS, GREEDY, adapter="one")[0]  # made, and not yet there
        llm.engine.step()
        llm.engine.step()
        llm.unload_adapter("one")
        llm.load_adapter("three", adapters["three"])
        assert llm.adapters == ("two", "three")
        llm.engine.add_request(queued)
        running += [*requests(llm, [IDS], ["three"]), queued]
        finish(llm)
        for request, name in zip(running, ("one", "two", "three", "one"), strict=True):
            assert request.output_ids == wanted[name]
        assert len(llm.engine.adapters.slots) == 3
        assert llm.engine.adapters.slots[0] is None
        with pytest.raises(RequestError, match="adapter 'one' was not found: choose one of two, three"):
            llm.generate(IDS, adapter="one")
        with pytest.raises(RequestError, match="adapter 'one' was not found"):
            llm.unload_adapter("one")


def test_names_of_adapters_are_checked_and_their_number_is_bounded(
    llama: tuple[Path, Any], adapters: dict[str, Path]
) -> None:
    """A name that is taken, cannot be written on a command line, or is unknown; too many adapters."""
    with LLM(llama[0], n_threads=2) as llm:
        with pytest.raises(RequestError, match="adapter 'a' was not found: no adapters are loaded"):
            llm.generate("Hi", adapter="a")
        for name in ("", "a b", "a=b", "x" * 201):
            with pytest.raises(ConfigError, match="an adapter's name"):
                llm.load_adapter(name, adapters["three"])
        for i in range(64):
            llm.engine.adapters.add(
                f"a{i}", llm.engine.adapters.get("a0") if i else adapter_of(llm, adapters)
            )
        with pytest.raises(ConfigError, match="must be new, not 'a3'"):
            llm.load_adapter("a3", adapters["three"])
        with pytest.raises(CapacityError, match="64 adapters"):
            llm.load_adapter("more", adapters["three"])


def adapter_of(llm: LLM, adapters: dict[str, Path]) -> Any:
    llm.load_adapter("first", adapters["three"])
    made = llm.engine.adapters.get("first")
    llm.unload_adapter("first")
    return made


def test_drafts_and_hooks_with_an_adapter(llm: LLM, llama: tuple[Path, Any]) -> None:
    """Drafts that are accepted without the adapter; a hook that sees the model without it."""
    prompt = IDS[:8] * 4
    drafted = llm.generate(prompt, GREEDY, adapter="one", speculation="ngram")
    assert drafted.token_ids == llm.generate(prompt, GREEDY, adapter="one", speculation="off").token_ids
    seen: dict[str, np.ndarray] = {}
    name = "blocks.1.hook_attn_out"
    for adapter in (None, "one"):
        with llm.hooks({name: lambda n, x, key=adapter: seen.update({str(key): x.copy()})}):
            llm.logits(IDS, adapter=adapter)
    assert np.abs(seen["None"] - seen["one"]).max() > 1e-3
    result, cache = llm.generate_with_hooks(IDS, GREEDY, names=[name], adapter="one")
    assert result.token_ids == llm.generate(IDS, GREEDY, adapter="one").token_ids
    np.testing.assert_array_equal(cache[name][0, : len(IDS)], seen["one"])


def test_activations_with_an_adapter(llm: LLM, llama: tuple[Path, Any]) -> None:
    """Activations of the model alone, or results of heads by the matrix that the adapter changes."""
    updates = random_updates(llama[1], rank=4, seed=1)
    merged_model = merged(llama[1], updates, 4.0)
    logits, cache = llm.run_with_cache(IDS, adapter="one")
    assert logits is not None
    close(logits[0], theirs(merged_model, IDS), 2e-2)
    seen: list[np.ndarray] = []
    hooks = [("blocks.2.attn.hook_z", lambda x, hook: seen.append(x.copy()))]
    again = llm.run_with_hooks(IDS, fwd_hooks=hooks, adapter="one")
    np.testing.assert_array_equal(again, logits)
    np.testing.assert_array_equal(seen[0], cache["blocks.2.attn.hook_z"])
    plain, plain_cache = llm.run_with_cache(IDS)
    close(plain[0], theirs(llama[1], IDS), 2e-2)
    _, by_heads = llm.run_with_cache(
        IDS, names=["blocks.2.attn.hook_result", "blocks.2.hook_attn_out"], adapter="one"
    )
    results = by_heads["blocks.2.attn.hook_result"].sum(axis=2)
    close(results, by_heads["blocks.2.hook_attn_out"], 1e-2)
    assert np.abs(results - plain_cache["blocks.2.hook_attn_out"]).max() > 0.01, "the premise"
    _, generated = llm.generate_with_hooks(
        IDS, GREEDY, names=["blocks.2.attn.hook_result", "blocks.2.hook_attn_out"], adapter="one"
    )
    close(generated["blocks.2.attn.hook_result"].sum(axis=2), generated["blocks.2.hook_attn_out"], 1e-2)
    with pytest.raises(RequestError, match="adapter 'nothing' was not found"):
        llm.run_with_cache(IDS, adapter="nothing")


def test_vectors_and_ranks_with_an_adapter(llm: LLM) -> None:
    """An adapter that is taken and not used, or whose vectors are compared with those of the model alone."""
    documents = ["one text", "another, longer text", "a third"]
    asked = llm.embed("a query", adapter="one")
    found = llm.embed(documents, adapter="one")
    assert np.abs(asked - llm.embed("a query")).max() > 1e-3
    ranked = llm.rerank("a query", documents, adapter="one")
    assert [one.score for one in ranked] == sorted((float(v @ asked) for v in found), reverse=True)
    assert [one.score for one in ranked] != [one.score for one in llm.rerank("a query", documents)]


def test_a_cross_encoder_with_an_adapter(tmp_path: Path) -> None:
    """Names of an encoder's matrices after PEFT's prefix, and scores of the model alone."""
    from tests.models.tiny_encoders import save

    hf = save(tmp_path / "model", "bert", "ForSequenceClassification", num_labels=1)
    updates = random_updates(hf, ("query", "value", "dense"), rank=4)
    updates = {name: update for name, update in updates.items() if "pooler" not in name}
    paths = {"a": write_peft(tmp_path / "a", updates, task_type="SEQ_CLS")}
    changed = merged(hf, updates, 2.0)
    documents = ["the mat", "cats", "a cat sat on a mat, sitting"]
    with LLM(tmp_path / "model", adapters=paths, n_threads=1) as llm:
        wanted = []
        for document in documents:
            ids = llm.text_encoder.encode_pairs("cat?", [document]).ids[0]
            types = torch.tensor(llm.text_encoder.token_types(ids))[None].long()
            with torch.no_grad():
                outputs = changed(torch.tensor([ids]), token_type_ids=types)
            wanted.append(float(torch.sigmoid(outputs.logits[0, 0])))
        scores = {one.index: one.score for one in llm.rerank("cat?", documents, adapter="a")}
        plain = {one.index: one.score for one in llm.rerank("cat?", documents)}
    np.testing.assert_allclose([scores[i] for i in range(3)], wanted, atol=5e-3)
    assert max(abs(scores[i] - plain[i]) for i in range(3)) > 0.02, "the premise"


def test_on_the_command_line(llm: LLM, llama: tuple[Path, Any], adapters: dict[str, Path]) -> None:
    """An option that is taken and not used; the second adapter in place of the first."""
    command = ["run", str(llama[0]), "Hello", "--raw", "-n", "8", "-t", "0", "--ignore-eos", "--json"]
    found = []
    for names in ((), ("two", "one")):
        given = [word for name in names for word in ("--adapter", f"{name}={adapters[name]}")]
        done = CliRunner().invoke(app, [*command, *given])
        assert done.exit_code == 0, done.output
        found.append(json.loads(done.stdout)["token_ids"])
    params = replace(GREEDY, max_tokens=8)
    assert found == [llm.generate("Hello", params, adapter=name).token_ids for name in (None, "two")]
    assert found[0] != found[1]


# --- merging


@pytest.mark.parametrize("is_gguf", [False, True], ids=["directory", "gguf"])
def test_merged_models_compute_the_same(
    llama: tuple[Path, Any], gguf: Path, adapters: dict[str, Path], is_gguf: bool, tmp_path: Path
) -> None:
    """Rows of q and k in another order, an update of another tensor, a lost scale."""
    updates = random_updates(llama[1], rank=4, seed=1)
    want = theirs(merged(llama[1], updates, 4.0), IDS)
    source = gguf if is_gguf else llama[0]
    targets = [tmp_path / "m.gguf"] if is_gguf else [tmp_path / "m.gguf", tmp_path / "merged"]
    for target in targets:
        done = CliRunner().invoke(
            app, ["merge", str(source), str(adapters["one"]), "-o", str(target), "--json"]
        )
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["tensors"] == len(updates)
        with LLM(target, backend="reference") as llm:
            close(llm.logits(IDS), want)
    if not is_gguf:
        kept = {file.name for file in llama[0].iterdir()}
        assert {file.name for file in targets[1].iterdir()} == kept
        theirs_again = type(llama[1]).from_pretrained(targets[1], attn_implementation="eager")
        close(theirs(theirs_again.eval(), IDS), want)


def test_merging_into_packed_weights(
    llama: tuple[Path, Any], adapters: dict[str, Path], tmp_path: Path
) -> None:
    """Tensors that lose their type, or a note that is not printed."""
    packed, target = tmp_path / "q8.gguf", tmp_path / "merged.gguf"
    convert_model(llama[0], packed, "Q8_0", dry_run=False, as_json=True)
    done = CliRunner().invoke(app, ["merge", str(packed), str(adapters["three"]), "-o", str(target)])
    assert done.exit_code == 0, done.output
    assert "note: 8 merged tensors were quantized again" in done.stderr
    with LLM(packed, backend="reference", adapters={"a": adapters["three"]}) as llm:
        base, want = llm.logits(IDS), llm.logits(IDS, adapter="a")
    with LLM(target, backend="reference") as llm:
        assert {p.type for p in llm.model.parameters if len(p.shape) > 1} == {"Q8_0"}
        got = llm.logits(IDS)
    # the merged matrices are rounded once more
    assert np.sqrt(np.mean((got - want) ** 2)) < 0.1 * np.sqrt(np.mean((base - want) ** 2))


def test_wrong_targets_of_a_merge(
    llama: tuple[Path, Any], gguf: Path, adapters: dict[str, Path], tmp_path: Path
) -> None:
    """A file that is written over, a directory made of a GGUF file, a half-written model."""
    one = str(adapters["one"])
    for arguments, words in (
        ([str(gguf), one, "-o", str(tmp_path / "d")], "must be a .gguf file"),
        ([str(gguf), one, "-o", str(gguf)], "must not be the input"),
        ([str(llama[0]), one, "-o", str(tmp_path)], "already exists: name a new directory"),
        ([str(llama[0]), one], "-o TARGET is required"),
        ([str(llama[0]), str(tmp_path / "no"), "-o", str(tmp_path / "d")], "was not found"),
    ):
        done = CliRunner().invoke(app, ["merge", *arguments])
        assert done.exit_code == 2
        assert words in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_an_option_that_is_wrong_fails_at_the_start(llama: tuple[Path, Any], tmp_path: Path) -> None:
    """An LLM without the adapter that it was opened with."""
    with pytest.raises(KukriError, match="was not found"):
        LLM(llama[0], adapters={"a": tmp_path / "nothing"})


def test_vocabulary_is_the_premise() -> None:
    """Prompts outside of the vocabulary would be errors."""
    assert max(IDS) < N_VOCAB
