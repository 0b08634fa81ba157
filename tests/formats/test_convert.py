"""Conversion: what transformers saved is the same model as GGUF; files are whole or not there."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import gguf
import numpy as np
import pytest

from kukri import LLM
from kukri.errors import ConfigError, FormatError, KukriError, UnsupportedError
from kukri.formats.checkpoint import open_checkpoint
from kukri.formats.convert import open_gguf, with_recipe, write
from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.kernels.quantize import quantize
from kukri.models import ARCHITECTURES
from kukri.quant.blocks import dequantize
from kukri.quant.mixes import MIXES
from kukri.quant.recipes import Recipe
from kukri.quant.types import QUANT_TYPES
from kukri.terminal.convert import convert_model, convert_to_directory
from kukri.tokenizer import Tokenizer, load_tokenizer
from tests.lazy_imports import lazy_imports
from tests.quick import some
from tests.test_llm_safetensors import ALONE, CHECKPOINTS, N_VOCAB, TINY, exact_logits, make
from tests.tiny_gguf import tiny_config, write_tiny

with lazy_imports():
    import torch
    import transformers as tr

IDS = np.random.default_rng(0).integers(0, N_VOCAB, 50).tolist()
KINDS = [kind for kind in CHECKPOINTS if kind not in ALONE]
Converted: TypeAlias = "Callable[[str], tuple[Path, Path]]"


def convert(source: Path, target: Path, mix: str | None = None) -> Path:
    convert_model(source, target, mix, dry_run=False, as_json=False)
    return target


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    """Gives a kind's directory and the GGUF file made of it, once, for tests that change neither."""
    root = tmp_path_factory.mktemp("converted")

    @cache
    def converted(kind: str) -> tuple[Path, Path]:
        directory, _ = make(root / kind, kind)
        return directory, convert(directory, root / f"{kind}.gguf")

    return converted


@pytest.mark.full(but=some())
@pytest.mark.parametrize("kind", KINDS)
def test_every_architecture_gives_the_logits_it_gave(kind: str, converted: Converted) -> None:
    """Rows of q and k in the wrong order, a key or tensor under another name, a scaling or window lost."""
    directory, path = converted(kind)
    want = exact_logits(directory, IDS)
    # RoPE's factors pass through float32, all else is bit for bit
    np.testing.assert_allclose(exact_logits(path, IDS), want, atol=2e-5 * np.abs(want).max())


@pytest.mark.parametrize("kind", ALONE)
def test_models_without_a_name_in_gguf_are_refused(kind: str, tmp_path: Path) -> None:
    """A file that no program reads, or that another reads as another model."""
    directory, _ = make(tmp_path / "hf", kind)
    with pytest.raises(UnsupportedError, match=r"is not supported in GGUF.*--quantize"):
        convert(directory, tmp_path / "m.gguf")


# without windows, which llama.cpp does not read for these architectures
SAVED = [
    "llama",
    "llama-yarn",
    "llama-tied-llama3",
    "qwen3",
    "phi",
    "phi3",
    "smollm3-yarn",
    "qwen3_moe",
    "olmoe",
    "gemma2",
    "gemma3_text",
    "granite",
    "olmo2",
    "olmo3-yarn",
    "ernie4_5",
    "lfm2",
    "qwen3_5_text",
    "granitemoehybrid",
    "granitemoehybrid-dense",
]


@pytest.mark.parametrize("kind", SAVED)
def test_files_that_llama_cpp_saves_are_read(kind: str, converted: Converted, tmp_path: Path) -> None:
    """Zeros for all that a model has not, other types and another order of tensors, refused."""
    llama_cpp = pytest.importorskip("llama_cpp")
    _, path = converted(kind)
    path_bytes, parameters = str(path).encode(), llama_cpp.llama_model_default_params()
    model = llama_cpp.llama_model_load_from_file(path_bytes, parameters)
    assert model is not None
    llama_cpp.llama_model_save_to_file(model, str(tmp_path / "saved.gguf").encode())
    llama_cpp.llama_model_free(model)
    np.testing.assert_array_equal(exact_logits(tmp_path / "saved.gguf", IDS), exact_logits(path, IDS))
    ours, theirs = Tokenizer.from_gguf(path), Tokenizer.from_gguf(tmp_path / "saved.gguf")
    text = "Hello wörld\n\n 1234 <s> <|im_start|> 日本"
    for options in ({}, {"add_special": True}, {"add_special": True, "parse_special": True}):
        assert ours.encode(text, **options) == theirs.encode(text, **options)


@pytest.mark.full(but=some())
@pytest.mark.parametrize("kind", KINDS)
def test_the_gguf_package_reads_every_field(kind: str, converted: Converted) -> None:
    """Keys that only our own reader finds, or of a type that others do not expect."""
    reader = gguf.GGUFReader(converted(kind)[1])
    fields = {name: field.contents() for name, field in reader.fields.items()}
    name = fields["general.architecture"]
    assert fields[f"{name}.block_count"] == TINY["num_hidden_layers"]
    assert fields[f"{name}.rope.freq_base"] == pytest.approx(10000.0) or kind.startswith(
        ("smollm3", "gemma3", "lfm2", "hunyuan_v1_dense-alpha", "phimoe", "bailing_moe")
    )
    assert reader.fields[f"{name}.rope.freq_base"].types == [gguf.GGUFValueType.FLOAT32]
    assert len(fields["tokenizer.ggml.tokens"]) == N_VOCAB
    architecture = next(arch for arch, stated in gguf.MODEL_ARCH_NAMES.items() if stated == name)
    expected = gguf.get_tensor_name_map(architecture, 4).mapping.values()
    known = {tensor for _, tensor in expected}
    for tensor in reader.tensors:
        assert tensor.name.rsplit(".", 1)[0] in known or tensor.name in known


@pytest.mark.parametrize(
    ("dtype", "mix", "stored"),
    [
        ("bfloat16", None, "BF16"),
        ("float16", None, "F16"),
        ("float32", "F16", "F16"),
        ("bfloat16", "Q8_0", "Q8_0"),
        ("float32", "q4_k_m", "Q5_0"),
    ],
    ids=str,
)
def test_converted_weights_have_the_type_that_was_asked_for(
    dtype: str, mix: str | None, stored: str, tmp_path: Path
) -> None:
    """Weights rounded twice, vectors rounded at all, a type other than asked for."""
    directory, model = make(tmp_path / "hf", "qwen2", dtype)
    with GGUFFile(convert(directory, tmp_path / "m.gguf", mix)) as file:
        up, bias = file.tensors["blk.1.ffn_up.weight"], file.array("blk.1.attn_q.bias")
        assert up.type.name == stored
        assert file.metadata["general.file_type"] == MIXES[(mix or stored).upper()][1]
        exact = model.model.layers[1].mlp.up_proj.weight.detach().numpy()
        np.testing.assert_array_equal(file.data(up.name), quantize(exact, up.type))
        np.testing.assert_array_equal(bias, model.model.layers[1].self_attn.q_proj.bias.detach().numpy())


def test_shards_and_text(tmp_path: Path) -> None:
    """A shard left out; another tokenizer, end of text or template than the directory's."""
    directory, _ = make(tmp_path / "hf", "llama", max_shard_size="100KB")
    (directory / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    path = convert(directory, tmp_path / "m.gguf")
    np.testing.assert_array_equal(exact_logits(path, IDS), exact_logits(directory, IDS))
    with open_checkpoint(directory) as checkpoint:
        theirs = load_tokenizer(checkpoint.tokenizer)
    ours = Tokenizer.from_gguf(path)
    text = "Hello wörld\n\n 1234 <s> <|im_start|> 日本"
    for options in ({}, {"add_special": True}, {"add_special": True, "parse_special": True}):
        assert ours.encode(text, **options) == theirs.encode(text, **options)
    assert (ours.eos_ids, ours.bos_id, ours.special_ids) == (
        theirs.eos_ids,
        theirs.bos_id,
        theirs.special_ids,
    )
    assert ours.chat_template == theirs.chat_template
    assert GGUFFile(path).metadata["tokenizer.ggml.pre"] == "gpt-2"


def test_configurations_come_back(tmp_path: Path) -> None:
    """NoPE layers, windows or scaling that the file does not say."""
    for kind in ("smollm3", "qwen2", "phi3-longrope", "llama-yarn", "mistral"):
        directory, _ = make(tmp_path / kind, kind)
        with open_checkpoint(directory) as checkpoint:
            want = checkpoint.config
        with GGUFFile(convert(directory, tmp_path / f"{kind}.gguf")) as file:
            got = model_config(file)
        assert got.layers == want.layers
        assert got.rope.rotary_dim == want.rope.rotary_dim
        assert (got.rope.scaling is None) == (want.rope.scaling is None)
        assert (got.n_kv_heads, got.tie_embeddings, got.norm_eps) == (
            want.n_kv_heads,
            want.tie_embeddings,
            pytest.approx(want.norm_eps),
        )


@pytest.mark.full
def test_quantizing_a_gguf_file(tmp_path: Path) -> None:
    """A key lost on the way, tensors that no type was asked for changed, a note that is not given."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    command = [sys.executable, "-m", "kukri", "quantize", str(source), str(tmp_path / "q.gguf"), "Q8_0"]
    done = subprocess.run([*command, "--json"], capture_output=True, text=True, check=True)
    report = json.loads(done.stdout)
    assert report["written"]
    assert done.stderr == ""
    with GGUFFile(source) as before, GGUFFile(tmp_path / "q.gguf") as after:
        assert {t["name"]: t["to"] for t in report["tensors"]} == {
            name: tensor.type.name for name, tensor in after.tensors.items()
        }
        for name, tensor in after.tensors.items():
            assert tensor.type.name == ("F32" if len(tensor.shape) == 1 else "Q8_0")
            want = quantize(np.atleast_2d(before.array(name)), tensor.type)
            np.testing.assert_array_equal(after.data(name), want)
        changed = {"general.file_type", "general.quantization_version"}
        assert set(after.metadata) - changed == set(before.metadata) - changed
        for key in set(before.metadata) - changed:
            np.testing.assert_array_equal(after.metadata[key], before.metadata[key])
    again = [*command[:4], str(tmp_path / "q.gguf"), str(tmp_path / "q4.gguf"), "Q4_0"]
    assert "quantized already" in subprocess.run(again, capture_output=True, text=True, check=True).stderr


def test_a_dry_run_writes_nothing_and_says_what_would_be(tmp_path: Path, capsys: Any) -> None:
    """A dry run that writes, or promises another size than comes out."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    convert_model(source, tmp_path / "q.gguf", "Q4_K_M", dry_run=True, as_json=True)
    planned = json.loads(capsys.readouterr().out)
    assert not (tmp_path / "q.gguf").exists()
    convert_model(source, tmp_path / "q.gguf", "Q4_K_M", dry_run=False, as_json=True)
    assert json.loads(capsys.readouterr().out) == {**planned, "written": True}
    with GGUFFile(tmp_path / "q.gguf") as file:
        assert sum(tensor.n_bytes for tensor in file.tensors.values()) == planned["n_bytes"]
    convert_model(source, tmp_path / "q.gguf", "Q4_K_M", dry_run=True, as_json=False)
    assert "blk.1.ffn_down.weight" in capsys.readouterr().out


@pytest.mark.full(but=some())
@pytest.mark.parametrize("kind", KINDS)
def test_there_and_back(kind: str, converted: Converted, tmp_path: Path) -> None:
    """A directory that transformers reads as another model than the one it saved."""
    directory, path = converted(kind)
    _, model = make(tmp_path / "hf", kind)
    convert_to_directory(path, tmp_path / "back", None, as_json=False)
    again = tr.AutoModelForCausalLM.from_pretrained(tmp_path / "back", attn_implementation="eager").eval()
    # GGUF has one name for both, which compute the same
    want_type = tr.DeepseekV3ForCausalLM if kind == "glm4_moe_lite" else type(model)
    assert type(again) is want_type
    state = again.state_dict()
    is_multiplied = kind.startswith("falcon_h1")  # its matrices come back with the multipliers in them
    for name, tensor in model.state_dict().items() if not is_multiplied else ():
        # these norms are stored as what is added to 1, and pass through float32 with the 1
        atol = 2**-23 if kind.startswith(("gemma", "qwen3_5", "nemotron")) and "norm" in name else 0
        atol = 2**-21 if "A_log" in name else atol  # a logarithm of an exponential
        torch.testing.assert_close(state[name], tensor, rtol=0, atol=atol)
    with torch.no_grad():
        want, got = model(torch.tensor([IDS])).logits, again(torch.tensor([IDS])).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-4 * float(want.abs().max()))
    np.testing.assert_allclose(
        exact_logits(tmp_path / "back", IDS),
        exact_logits(directory, IDS),
        atol=2e-5 * float(want.abs().max()),
    )
    ours, theirs = (tr.AutoTokenizer.from_pretrained(tmp_path / name) for name in ("back", "hf"))
    for text in ("Hello wörld\n\n 1234 日本", "<s> a <|im_end|>"):
        assert ours.encode(text) == theirs.encode(text)
    with GGUFFile(path) as first, GGUFFile(convert(tmp_path / "back", tmp_path / "again.gguf")) as second:
        assert replace(model_config(second), name="") == replace(model_config(first), name="")
        assert {*second.metadata} == {*first.metadata}
        for key in {*first.metadata} - {"general.name"}:
            np.testing.assert_equal(second.metadata[key], first.metadata[key])
        assert second.tensors.keys() == first.tensors.keys()
        for name, tensor in first.tensors.items():
            want, got = first.array(name), second.array(name)
            assert second.tensors[name].type == tensor.type
            atol = 2**-22 if name.endswith(("norm.weight", "ssm_a")) else 0  # as above
            np.testing.assert_allclose(got, want, rtol=2**-20 if atol else 0, atol=atol)


def test_a_lossy_conversion_says_so(tmp_path: Path, capsys: Any) -> None:
    """Settings of embeddings that vanish without a line, in either direction."""
    directory, _ = make(tmp_path / "hf", "llama")
    modules = [{"type": "x.Transformer", "path": ""}, {"type": "x.Pooling", "path": "1"}]
    (directory / "1").mkdir()
    (directory / "1" / "config.json").write_text('{"pooling_mode": "lasttoken"}')
    (directory / "modules.json").write_text(json.dumps(modules))
    path = convert(directory, tmp_path / "m.gguf")
    assert "other programs ignore kukri's own keys: kukri.embedding" in capsys.readouterr().err
    with open_checkpoint(directory) as first, open_checkpoint(path) as second:
        assert first.embedding == second.embedding
    convert_to_directory(path, tmp_path / "back", None, as_json=True)
    assert "settings of embeddings (pooling, prompts, limits) are left out" in capsys.readouterr().err
    plain = make(tmp_path / "plain", "llama")[0]
    convert(plain, tmp_path / "plain.gguf")
    convert_to_directory(tmp_path / "plain.gguf", tmp_path / "plain back", None, as_json=True)
    assert "note:" not in capsys.readouterr().err


def test_every_architecture_that_generates_goes_there_and_back() -> None:
    """An architecture that the matrix of conversions above lacks, though GGUF has it."""
    generating = {name for name, one in ARCHITECTURES.items() if one.is_causal and one.in_gguf}
    assert generating - {"granitemoehybrid_dense"} == {kind.split("-")[0] for kind in KINDS}


@pytest.mark.full
def test_a_quantized_file_becomes_floats(smollm2_path: Path, tmp_path: Path) -> None:
    """Weights that are dequantized wrongly, a chat template lost, a directory that is overwritten."""
    convert_to_directory(smollm2_path, tmp_path / "hf", None, as_json=True)
    with GGUFFile(smollm2_path) as file, open_checkpoint(tmp_path / "hf") as checkpoint:
        config = checkpoint.config
        shape = (config.d_ffn, config.d_model)
        up = checkpoint.weights(config).matrix("model.layers.7.mlp.up_proj.weight", shape)
        assert up.type.name == "F16"
        np.testing.assert_array_equal(
            up.data, quantize(file.array("blk.7.ffn_up.weight"), QUANT_TYPES["F16"])
        )
        ours, theirs = load_tokenizer(checkpoint.tokenizer), Tokenizer.from_gguf(file)
        text = "Hello, wörld! 1234\n\n<|im_start|>"
        for options in ({}, {"parse_special": True}):
            assert ours.encode(text, **options) == theirs.encode(text, **options)
        assert ours.chat_template == theirs.chat_template
        assert ours.eos_ids == theirs.eos_ids
    with pytest.raises(ConfigError, match="already exists: name a new directory"):
        convert_to_directory(smollm2_path, tmp_path / "hf", None, as_json=True)
    with pytest.raises(ConfigError, match="must hold F32, F16, BF16, not 'Q8_0'"):
        convert_to_directory(smollm2_path, tmp_path / "x", "Q8_0", as_json=True)
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def broken_by(path: Path, how: str) -> str:
    """Damages a directory; gives the message that should say so."""
    weights = path / "model.safetensors"
    if how == "nan":
        model = tr.AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            model.model.layers[2].mlp.down_proj.weight[1, 2] = float("nan")
        model.save_pretrained(path)
        return r"blk\.2\.ffn_down\.weight.*NaN or infinite"
    if how == "shard":
        next(path.glob("model-00002*")).unlink()
        return "names the shard .*, which was not found"
    if how == "dtype":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)
        save_file(tensors, weights)
        return r"model\.norm\.weight.*must be of type .*, not I32"
    if how == "duplicate":
        data = weights.read_bytes()
        weights.write_bytes(data.replace(b"layers.2.mlp.up_proj", b"layers.1.mlp.up_proj", 1))
        return r"key 'model\.layers\.1\.mlp\.up_proj\.weight' appears twice"
    weights.write_bytes(weights.read_bytes()[:-50])
    return "is cut short"


@pytest.mark.parametrize("how", ["nan", "shard", "dtype", "duplicate", "cut"])
def test_broken_sources_leave_nothing(how: str, tmp_path: Path) -> None:
    """Half a file under the final name, or a traceback, for a checkpoint that is broken."""
    options = {"max_shard_size": "100KB"} if how == "shard" else {}
    directory, _ = make(tmp_path / "hf", "llama", **options)
    message = broken_by(directory, how)
    out = tmp_path / "out"
    out.mkdir()
    (out / "m.gguf").write_bytes(b"what was there before")
    with pytest.raises(KukriError, match=message) as caught:
        convert(directory, out / "m.gguf", "Q8_0")
    assert "\n" not in str(caught.value)
    assert [(path.name, path.read_bytes()) for path in out.iterdir()] == [
        ("m.gguf", b"what was there before")
    ]


def test_an_interrupt_and_a_full_disk_leave_nothing(tmp_path: Path, monkeypatch: Any) -> None:
    """Half a file under the final name after Ctrl-C; a traceback when the disk is full."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())

    def interrupt(step: Any) -> None:
        if "blk.1.ffn_up" in step.name:
            raise KeyboardInterrupt

    out = tmp_path / "out"
    out.mkdir()
    with open_gguf(source) as conversion:
        with pytest.raises(KeyboardInterrupt):
            write(with_recipe(conversion, Recipe("Q8_0")), out / "m.gguf", interrupt)
        assert not list(out.iterdir())
        monkeypatch.setattr(os, "fsync", lambda file: (_ for _ in ()).throw(OSError(28, os.strerror(28))))
        with pytest.raises(FormatError, match=r"m\.gguf cannot be written: No space left on device"):
            write(with_recipe(conversion, Recipe("Q8_0")), out / "m.gguf", lambda step: None)
    assert not list(out.iterdir())


def test_a_file_that_may_not_grow_leaves_nothing(tmp_path: Path) -> None:
    """A real failure to write in the middle of the tensors: a traceback, or what was written so far."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "kukri", "quantize", str(source), str(out / "m.gguf"), "Q8_0"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000)),
    )
    assert done.returncode == 2
    assert "m.gguf cannot be written: File too large" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not list(out.iterdir())


def test_a_full_disk_leaves_nothing(tmp_path: Path) -> None:
    """A disk that is full in the middle of the tensors: a traceback, or what was written so far."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    out = tmp_path / "out"
    out.mkdir()
    command = [sys.executable, "-m", "kukri", "quantize", str(source), str(out / "m.gguf"), "Q8_0"]
    # a disk of 32 KiB that this process alone sees; where no mount is allowed, files may not grow beyond that
    script = f"""
        mount -t tmpfs -o size=32k none {shlex.quote(str(out))} 2>/dev/null || ulimit -f 64
        {shlex.join(command)}
        echo status $? && ls -A {shlex.quote(str(out))}
    """
    alone = ["unshare", "--user", "--map-root-user", "--mount"] if shutil.which("unshare") else []
    if alone and subprocess.run([*alone, "true"], capture_output=True).returncode:
        alone = []
    done = subprocess.run([*alone, "sh", "-c", script], capture_output=True, text=True)
    assert done.stdout == "status 2\n"
    assert re.search(r"m\.gguf cannot be written: (No space left on device|File too large)", done.stderr)
    assert len(done.stderr.splitlines()) == 1


def test_targets_that_cannot_be(tmp_path: Path) -> None:
    """A source that is overwritten while it is read; a type that is not one."""
    source = write_tiny(tmp_path / "f32.gguf", tiny_config())
    with pytest.raises(ConfigError, match="must not be the input"):
        convert(source, source, "Q8_0")
    with pytest.raises(ConfigError, match="must be a file, not a directory"):
        convert(source, tmp_path, "Q8_0")
    with pytest.raises(ConfigError, match="was not found"):
        convert(source, tmp_path / "no" / "m.gguf", "Q8_0")
    with pytest.raises(ConfigError, match=r"'Q9_Z' is not supported: use a recipe .*, or one of F32, F16"):
        convert(source, tmp_path / "m.gguf", "Q9_Z")


def test_a_tokenizer_without_a_name_in_gguf_is_refused(tmp_path: Path) -> None:
    """A file whose text is cut otherwise than the model learned it."""
    directory, _ = make(tmp_path / "hf", "llama")
    path = directory / "tokenizer.json"
    made = json.loads(path.read_text())
    made["pre_tokenizer"] = {**made["pre_tokenizer"], "add_prefix_space": True}
    path.write_text(json.dumps(made))
    with pytest.raises(UnsupportedError, match=": this tokenizer's way of splitting text into words is not"):
        convert(directory, tmp_path / "m.gguf")


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",  # it runs its own pattern of windows and NoPE layers alone
    [
        *("llama", "llama-tied-llama3", "llama-biases", "llama-yarn", "smollm3-yarn", "qwen3", "phi3", "phi"),
        *("phi3-as-phi4-mini", "olmo2", "olmo3", "olmo3-yarn", "granite", "ernie4_5"),
        *(
            "gemma",
            "gemma2",
            "gemma3_text",
            "gemma3_text-pattern",
            "qwen3_moe",
            "olmoe",
            "lfm2",
            "qwen3_5_text",
        ),
        *("granitemoehybrid", "granitemoehybrid-dense", "qwen3_5_text-grouped"),
        *(
            "deepseek_v2-yarn",
            "glm4_moe_lite",
            "minicpm3",
            "ministral3",
            "minicpm",
            "minicpm-longrope",
            "mamba2",
            "apertus",
            "smallthinker_softmax",
            "bailing_moe",
        ),
        *("nemotron_h", "nemotron_h_moe", "gpt_neox", "falcon_h1", "falcon_h1-normed"),
    ],
)
def test_llama_cpp_gives_the_same_logits(kind: str, tmp_path: Path) -> None:
    """A file that only kukri understands."""
    pytest.importorskip("llama_cpp")
    from benchmarks.llama_cpp import LlamaCpp

    directory, _ = make(tmp_path / "hf", kind)
    path = convert(directory, tmp_path / "m.gguf")
    engine = LlamaCpp(path, n_threads=1, context_tokens=64, all_logits=True, plain_weights=True)
    ids = np.random.default_rng(0).integers(0, 256, 12).tolist()
    got, want = engine.logits(ids), exact_logits(directory, ids)
    engine.close()
    # llama.cpp's cache is float16
    np.testing.assert_allclose(got, want, atol=0.03)


@pytest.mark.full
def test_real_weights_survive(smollm2_path: Path, tmp_path: Path) -> None:
    """A real file that loses keys or the order of its tensors' bytes: F16 of Q4_1 is not exact, but near."""
    path = convert(smollm2_path, tmp_path / "f16.gguf", "F16")
    with GGUFFile(smollm2_path) as before, GGUFFile(path) as after:
        name = "blk.7.ffn_up.weight"
        want = dequantize(before.data(name), before.tensors[name].type)
        np.testing.assert_array_equal(after.data(name), quantize(want, QUANT_TYPES["F16"]))
    with LLM(path, max_context=64, backend="reference") as llm:
        assert llm.tokenizer.encode("Hello")
        assert np.isfinite(llm.logits([1, 2, 3])).all()
