"""What Gemma 4 alone has: files that contradict themselves, hooks, patterns and gradients of shared keys."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from benchmarks.make_model import SHAPES, make_model
from kukri import LLM, SamplingParams
from kukri.bench.card import model_card
from kukri.config import RopeConfig
from kukri.errors import ConfigError, FormatError, KukriError, UnsupportedError
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.huggingface.config import hf_config, hf_model_config
from kukri.interp import patching
from kukri.quant.mixes import mix_types
from tests.interp.test_patching import CLEAN, CORRUPT, cell_by_cell, metric
from tests.interp.tl_models import session
from tests.lazy_imports import lazy_imports
from tests.models import tiny_models, written_models
from tests.models.lora_files import merged, random_updates, write_peft
from tests.models.made_models import make
from tests.test_llm_safetensors import GEMMA4, TINY, theirs
from tests.test_llm_safetensors import make as make_directory

with lazy_imports():
    import torch
    import transformers as tr

PATH = Path("config.json")
SHARED = {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True}
TYPES = ["sliding_attention", "full_attention"] * 2


def stated(**keys: Any) -> dict[str, Any]:
    return {**TINY, **GEMMA4, "model_type": "gemma4_text", "layer_types": TYPES, **SHARED, **keys}


@pytest.mark.parametrize(
    ("keys", "error", "what"),
    [
        ({"num_kv_shared_layers": 4}, FormatError, "num_kv_shared_layers.*must be from 0 to 3"),
        ({"num_kv_shared_layers": 3}, FormatError, "leaves no layer for layer 1"),
        ({"vocab_size_per_layer_input": 9}, UnsupportedError, "vocab_size_per_layer_input"),
        ({"use_bidirectional_attention": "all"}, UnsupportedError, "use_bidirectional_attention"),
        (
            {"attention_k_eq_v": True, "num_global_key_value_heads": 3},
            FormatError,
            "must divide 4 heads, which 3 does not",
        ),
        (
            {"per_layer_config": {"1": {"head_dim": 64}, "3": {"head_dim": 32}}},
            KukriError,
            "per_layer_config",
        ),
        ({"per_layer_config": 3}, KukriError, "per_layer_config"),
        ({"hidden_size_per_layer_input": -1}, FormatError, "hidden_size_per_layer_input"),
    ],
)
def test_wrong_keys_are_named(keys: dict[str, Any], error: type[KukriError], what: str) -> None:
    """A layer that would read keys of a layer that has none, tables of another size, a crash."""
    given = stated(**keys)
    given.pop("global_head_dim") if "per_layer_config" in keys else None
    with pytest.raises(error, match=what):
        hf_model_config(given, PATH)


@pytest.mark.parametrize(("layer", "source"), [(2, 2), (2, 3), (3, 2), (2, 1), (1, -1)])
def test_a_layer_reads_an_earlier_one_of_its_kind(layer: int, source: int) -> None:
    """A layer that reads itself, a later layer, one that reads another itself, or one with other heads."""
    config = make("gemma4_text")[1]
    layers = [*config.layers]
    layers[layer] = replace(layers[layer], kv_from=source)
    with pytest.raises(ConfigError, match=f"layer {layer} cannot share the keys of layer {source}"):
        replace(config, layers=tuple(layers))


@pytest.mark.parametrize("is_old", [True, False])
@pytest.mark.parametrize("name", ["shared", "keys"])
def test_both_spellings_are_read_and_written(name: str, is_old: bool) -> None:
    """transformers 5's `per_layer_config` ignored, a fact that one of the two loses, or one not written."""
    keys = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "hidden_size_per_layer_input": 0}
    given = stated(**(keys | {"num_kv_shared_layers": 0, "layer_types": None} if name == "keys" else {}))
    want = hf_model_config(given, PATH)
    full = want.attention(3)
    assert (full.d_head, want.attention(0).d_head) == (32, 16)
    assert [layer.kv_from for layer in want.layers] == ([None] * 4 if name == "keys" else [None, None, 0, 1])
    assert full.keys_are_values == (name == "keys")
    assert full.n_kv_heads == (1 if name == "keys" else 2)
    again = tr.Gemma4TextConfig(**given).to_dict() if not is_old else hf_config(want, ())
    assert ("per_layer_config" in again) != is_old
    assert replace(hf_model_config(again, PATH), name=want.name) == want


def test_what_config_json_cannot_say_is_refused() -> None:
    """Values made by the keys' matrix in one layer of two that see all, or shared keys in the middle."""
    config = make("gemma4_text")[1]
    for change in (
        {"keys_are_values": True},
        {"kv_from": 0, "d_head": 16, "window": 7, "rope": RopeConfig(500.0, 16)},
    ):
        layers = [*config.layers]
        layers[1] = replace(layers[1], **change)
        wrong = replace(config, layers=(*layers[:3], replace(layers[3], kv_from=None)))
        with pytest.raises(UnsupportedError, match=r"not supported by config.json"):
            hf_config(wrong, ())


def test_models_without_windows_are_written() -> None:
    """A rotation that is lost because no layer has one of its own."""
    config = make("gemma4_text-keys")[1]
    plain = replace(config, layers=(replace(config.layers[3]),) * 4, max_context=128)
    again = hf_model_config(hf_config(plain, ()), PATH)
    assert [again.attention(i) for i in range(4)] == [plain.attention(i) for i in range(4)]


def test_tables_of_layers_keep_8_bits() -> None:
    """The table of all layers' embeddings, or what reads it, at 4 bits."""
    shapes = {
        **{"per_layer_token_embd.weight": (512, 256), "per_layer_model_proj.weight": (256, 256)},
        **{"blk.0.inp_gate.weight": (256, 256), "blk.0.proj.weight": (256, 256)},
        **{"blk.0.ffn_up.weight": (256, 256), "token_embd.weight": (512, 256)},
    }
    for mix in ("Q4_K_M", "Q4_0", "IQ4_XS", "Q2_K"):
        types = {name: kind.name for name, kind in mix_types(mix, shapes, 2).items()}
        of_layers = {
            kind for name, kind in types.items() if "per_layer" in name or name[6:9] in ("inp", "pro")
        }
        assert of_layers == {"Q8_0"}
        assert types["blk.0.ffn_up.weight"] != "Q8_0"
    assert set(mix_types("F16", shapes, 2).values()) == {mix_types("F16", shapes, 2)["token_embd.weight"]}


IDS = np.random.default_rng(0).integers(0, 250, 60).tolist()
KINDS = ["gemma4_text", "gemma4_text-keys", "gemma4_moe_text"]


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Any]]:
    return {kind: make_directory(tmp_path_factory.mktemp("gemma4") / "hf", kind) for kind in KINDS}


@pytest.mark.parametrize(("backend", "tolerance"), [("reference", 1e-4), ("cpu", 2e-3), ("torch", 1e-4)])
@pytest.mark.parametrize("kind", KINDS)
def test_logits_and_patterns_by_an_llm(
    kind: str, backend: str, tolerance: float, directories: dict[str, tuple[Path, Any]]
) -> None:
    """Keys of a window that has passed, or a pattern of a layer's own keys where it reads another's."""
    directory, model = directories[kind]
    with torch.no_grad():
        want = model(torch.tensor([IDS]), output_attentions=True)
    logits = want.logits[0].numpy()
    with LLM(directory, backend=backend, max_context=128) as llm:
        got, cache = llm.interp.run_with_cache(IDS)
        # as a whole: the CPU's cache is float16, and scores are not scaled down, so a single one may tip
        assert np.linalg.norm(got[0] - logits) < tolerance * np.linalg.norm(logits)
        assert np.abs(got[0] - logits).max() < 2 * tolerance * np.abs(logits).max()
        for i, pattern in enumerate(want.attentions):
            np.testing.assert_allclose(
                cache["pattern", i][0], pattern[0].numpy(), atol=max(1e-4, 5 * tolerance)
            )
        names = [name for name in cache if name.startswith("blocks.3.")]
        assert ("blocks.3.attn.hook_k" in names) == (kind != "gemma4_text")
        assert ("blocks.3.attn.k.hook_in" in names) == (kind != "gemma4_text")


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kind", KINDS)
def test_answers_past_the_windows_are_greedy(
    kind: str, backend: str, directories: dict[str, tuple[Path, Any]]
) -> None:
    """A page that a window passed and a layer that shares keys still reads; a cached prefix without them."""
    directory, model = directories[kind]
    with LLM(directory, backend=backend, max_context=128, max_step_tokens=16) as llm:
        for prompt in (IDS, IDS, IDS[:40]):  # the second time from the cache
            found = llm.generate(prompt, SamplingParams(temperature=0, max_tokens=20, ignore_eos=True))
            logits = theirs(model, prompt + found.token_ids)[len(prompt) - 1 : -1]
            best = logits.max(axis=-1)
            chosen = logits[np.arange(20), found.token_ids]
            assert (best - chosen < (1e-3 if backend == "reference" else 5e-2)).all()


def test_an_adapter_of_shared_keys_and_layer_inputs(
    tmp_path: Path, directories: dict[str, tuple[Path, Any]]
) -> None:
    """An update of keys that the values do not get, or that the layers which read them do not see."""
    for kind in ("gemma4_text", "gemma4_text-keys"):
        directory, model = directories[kind]
        targets = ("q_proj", "k_proj", "o_proj", "down_proj", "per_layer_input_gate", "per_layer_projection")
        updates = random_updates(model, targets)
        path = write_peft(tmp_path / kind, updates, 8.0)
        want = theirs(merged(model, updates, 2.0), IDS)
        with LLM(directory, backend="reference", adapters={"a": path}) as llm:
            got = llm.logits(IDS, adapter="a")
        np.testing.assert_allclose(got, want, atol=2e-3 * np.abs(want).max())
        assert np.abs(want - theirs(model, IDS)).max() > 0.1


@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_sweeps_see_shared_keys(backend: str) -> None:
    """Cells that begin after the layer whose keys others read, or after the embeddings of layers."""
    own = session("gemma4_text", backend)
    llm = SimpleNamespace(interp=own)
    _, clean = own.run_with_cache(CLEAN)
    for layer in (1, 3):
        want = cell_by_cell(own, "resid_pre", "layer pos", clean["resid_pre", layer], layer, metric)
        got = patching.sweep(
            llm, CORRUPT, metric, "resid_pre", lambda i: clean["resid_pre", i], logits="last", layers=[layer]
        )
        np.testing.assert_allclose(got[0], want, atol=1e-5)
        assert np.ptp(got) > 1e-3


@pytest.mark.full
def test_a_quantized_file_leaves_its_table_on_disk(tmp_path: Path) -> None:
    """A file of true shapes that does not run, a table at 4 bits, or one that counts as taken memory."""
    shape = replace(
        SHAPES["gemma4-e2b"],
        **{"d_model": 256, "d_ffn": 256, "n_layers": 5, "n_heads": 4, "d_head": 64, "n_vocab": 1024},
        **{"attending": (1, 3), "n_shared": 2, "window": 16, "context": 256},
    )
    make_model(tmp_path / "m.gguf", shape, "Q4_K_M", "tiny")
    card = model_card(tmp_path / "m.gguf")
    with LLM(tmp_path / "m.gguf", n_threads=2) as llm:
        (table,) = llm.model.inputs.tables
        assert card.bytes_per_token == sum(card.bytes_by_type.values()) - table.stored.nbytes
        assert (table.type.name, table.shape) == ("Q8_0", (1024, 5 * 256))
        assert not table.stored.flags.owndata  # a view of the mapped file
        assert np.isfinite(llm.logits(IDS)).all()
        assert [layer.kv_from for layer in llm.config.layers] == [None, None, None, 1, 2]
    make_model(tmp_path / "f16.gguf", shape, "F16", "tiny")
    with LLM(tmp_path / "f16.gguf", n_threads=2) as llm:
        found = llm.logits(IDS)
    with LLM(tmp_path / "f16.gguf", backend="reference") as llm:
        want = llm.logits(IDS)
    assert np.linalg.norm(found - want) < 0.01 * np.linalg.norm(want)


@pytest.mark.full
def test_layers_that_share_cannot_be_cut(directories: dict[str, tuple[Path, Any]]) -> None:
    """A stage that reads keys of another, which it does not have."""
    with pytest.raises(ConfigError, match=r"this model cannot be split into stages \(--stages,"):
        LLM(directories["gemma4_text"][0], stages=2)


def test_gguf_whose_layers_all_read_others_is_refused(tmp_path: Path) -> None:
    """A layer that would read its own keys, which it does not make."""
    _, config, source = make("gemma4_text")
    tiny = tiny_models.TINY["gemma4_text"]
    with pytest.MonkeyPatch.context() as patch:
        keys = {**(tiny.keys or {}), "attention.shared_kv_layers": 4}
        patch.setitem(tiny_models.TINY, "gemma4_text", replace(tiny, keys=keys))
        path = written_models.write(tmp_path / "m.gguf", "gemma4_text", config, source)
    with GGUFFile(path) as file, pytest.raises(FormatError, match=r"shared_kv_layers.*must be from 0 to 3"):
        model_config(file)
