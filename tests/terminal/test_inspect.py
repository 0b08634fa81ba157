"""`kukri inspect` on tiny models of every architecture, against what transformers says of the same model."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from typer.testing import CliRunner

from kukri.cli import app
from kukri.config import EngineConfig
from kukri.engine import Engine
from kukri.engine.kv_size import KVCost
from kukri.formats.gguf.writer import write_gguf
from kukri.kernels import make_backend
from kukri.models import load_model
from kukri.opening.memory import memory_need
from kukri.opening.model_options import ModelOptions
from kukri.quant.types import QUANT_TYPES
from tests.lazy_imports import lazy_imports
from tests.models.made_models import make
from tests.models.tiny_models import IN_GGUF, TINY
from tests.models.written_models import as_read, write
from tests.quick import some

with lazy_imports():
    import torch
    import transformers as tr

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "vocab_size": 80,
    "max_position_embeddings": 256,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}


def inspect(path: Path, *options: str) -> str:
    done = CliRunner().invoke(app, ["inspect", str(path), *options])
    assert done.exit_code == 0, done.output
    return done.stdout


def report_on(path: Path) -> dict[str, Any]:
    return json.loads(inspect(path, "--json"))


def printed_by_torch(model: torch.nn.Module) -> list[str]:
    """PyTorch's print without the modules that hold no weights."""
    keep = []
    for line in str(model).splitlines():
        if not re.search(r"\((rotary_emb|act_fn|activation_fn|activation|act|.*dropout)\): ", line):
            keep.append(line.replace(", padding_idx=0", ""))  # which no inference uses
    return re.sub(r"\(\n +\)", "()", "\n".join(keep)).splitlines()


def untyped(text: str) -> list[str]:
    """kukri's tree without weight types and what else PyTorch does not print."""
    lines = [re.sub(r", (?:F32|BF16|F16|Q8_0|tied to [\w.]+)\)$", ")", line) for line in text.splitlines()]
    lines = [re.sub(r"(Experts|TopKRouter)\(.+\)$", r"\1()", line) for line in lines]
    return [line for line in lines if line]


def saved(directory: Path, model: Any, **save: Any) -> Path:
    model.save_pretrained(directory, **save)
    return directory


def apart(lines: list[str]) -> list[str]:
    """Granite 4's modules as a GGUF file has them: matrices that the checkpoint joins are apart there."""
    names = {"block_sparse_moe": "mlp", "(router)": "(gate)", "output_linear": "down_proj"}
    if not any("block_sparse_moe" in line for line in lines):
        names["shared_mlp"] = "mlp"
    found = []
    for line in lines:
        for old, new in names.items():
            line = line.replace(old, new)
        if "input_linear" in line:
            line = line.replace("out_features=192", "out_features=96")
            found.append(line.replace("input_linear", "gate_proj"))
            line = line.replace("input_linear", "up_proj")
        found.append(line)
    return found


# The tree of these shows kukri's modules: experts' biases and shared experts by one name for all, where each
# class of transformers has its own; Nemotron's LayerNorm as any other; matrices of heads as files have them.
OWN_TREE = (
    "qwen2_moe",
    "qwen3_5_moe_text",
    "lfm2_moe",
    "ernie4_5_moe",
    "glm4_moe",
    "afmoe",
    "hunyuan_v1_moe",
)
OWN_TREE += ("granitemoeshared", "nemotron", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3")
OWN_TREE += (
    "nemotron_h",
    "nemotron_h_moe",
    "nemotron_h_moe-latent",
    "gpt_neox",
    "mamba2",
    "phimoe",
    "apertus",
    "smallthinker",
    "smallthinker_softmax",
    "falcon_h1",
    "falcon_h1-normed",
    "bailing_moe",
    "exaone",
)
OWN_TREE += tuple(name for name in TINY if name not in IN_GGUF)


@pytest.mark.full(but=["ernie4_5_moe", "lfm2_moe", "afmoe"])
@pytest.mark.parametrize("name", OWN_TREE)
def test_a_tree_of_ones_own_counts_every_parameter(name: str, tmp_path: Path) -> None:
    """A bias of a router, a gate or a shared expert that no line and no count has."""
    hf, config, source = make(name)
    buffers = [b for key, b in hf.named_buffers() if key.endswith(("bias", "beta", "eps"))]
    n_parameters = sum(tensor.numel() for tensor in (*hf.parameters(), *buffers))
    n_listed = sum(".act_fn." in key for key in source.arrays)  # which are no tensors in GGUF
    made = [(saved(tmp_path / "hf", hf), n_parameters)]
    if name in IN_GGUF:
        made.append((write(tmp_path / "tiny.gguf", name, config, source), n_parameters - n_listed))
    for path, n in made:
        assert report_on(path)["n_parameters"] == n
        assert "Linear(in_features=64" in inspect(path, "--tree")


@pytest.mark.full(but=some())
@pytest.mark.parametrize("name", [name for name in TINY if name not in OWN_TREE])
def test_the_tree_is_pytorchs(name: str, tmp_path: Path) -> None:
    """A module of another name, class, shape or bias; a layer folded that differs; a count off by a bias."""
    hf, config, source = make(name)
    n_parameters = sum(parameter.numel() for parameter in hf.parameters())
    n_parameters += sum(b.numel() for key, b in hf.named_buffers() if key.endswith("layer_scalar"))
    file = write(tmp_path / "tiny.gguf", name, config, source)
    directory = saved(tmp_path / "hf", hf)
    for path in (file, directory):
        want = printed_by_torch(hf)
        if path == file and TINY[name].gguf_arch == "llama":
            want = [line.replace("Mistral", "Llama") for line in want]  # as the file says
        if path == file and TINY[name].gguf_arch == "olmo2":
            want = [line.replace("Olmo3", "Olmo2") for line in want]
        if name == "minicpm":  # which is Granite here
            want = [line.replace("Granite", "MiniCPM") for line in want]
        want = [line for line in want if "OlmoLayerNorm()" not in line]  # which holds no weights
        if path == file and name.startswith("granitemoe"):
            want = apart(want)
        got = untyped(inspect(path, "--tree"))
        is_gemma4 = name.startswith("gemma4")  # whose norms PyTorch prints without shape, and without weights
        assert is_gemma4 or sorted(got) == sorted(want)
        if not is_gemma4 and name not in (
            "phi3",
            "olmoe",
            "granitemoe",
            "granitemoehybrid",
            "granitemoehybrid_dense",
        ):  # whose classes have o_proj before qkv_proj, the router before experts, norms before layers
            assert got == want
        report = report_on(path)
        assert report["unsupported"] is None
        assert report["n_parameters"] == n_parameters
        for rows in (report["layers"], report["types"]):
            assert sum(row["n_parameters"] for row in rows) == n_parameters
        # layers' own embeddings and factors are neither attention nor MLP
        assert is_gemma4 or sum(row["other"] for row in report["layers"]) == 0
        assert report["config"]["architecture"] in (config.architecture, as_read(name, config).architecture)


def test_layers_that_differ_are_not_folded(tmp_path: Path) -> None:
    """Mixed weight types, as in every Q4_K_M file, shown as if all layers were like the first."""
    _, config, source = make("qwen3")
    path = write(tmp_path / "tiny.gguf", "qwen3", config, source, "Q8_0")
    assert "(0-3): 4 x Qwen3DecoderLayer(" in inspect(path, "--tree")
    from kukri.formats.gguf.reader import GGUFFile

    with GGUFFile(path) as gguf:
        tensors: dict[str, Any] = {
            t.name: (t.type, gguf.data(t.name), t.shape) for t in gguf.tensors.values()
        }
        f32 = gguf.array("blk.2.ffn_down.weight")
        tensors["blk.2.ffn_down.weight"] = (QUANT_TYPES["F32"], f32, f32.shape)
        write_gguf(tmp_path / "mixed.gguf", dict(gguf.metadata), tensors)
    text = inspect(tmp_path / "mixed.gguf", "--tree")
    assert re.findall(r"\(([\d-]+)\): ((?:\d x )?)Qwen3DecoderLayer", text) == [
        ("0-1", "2 x "),
        ("2", ""),
        ("3", ""),
    ]
    assert text.count("out_features=64, bias=False, F32)") == 1


def test_counts_of_a_question_answering_head(tmp_path: Path) -> None:
    """A head left out, counted as an embedding, or next to a tied head that is not there."""
    model = tr.LlamaForQuestionAnswering(tr.LlamaConfig(**SIZES))
    path = saved(tmp_path, model)
    report = report_on(path)
    assert report["n_parameters"] == sum(p.numel() for p in model.parameters())
    assert {row["layer"]: row["head"] for row in report["layers"]}["qa_outputs"] == 2 * 64 + 2
    assert report["unsupported"] is None
    assert "head          question answering\n" in inspect(path)
    text = inspect(path, "--tree")
    assert untyped(text) == printed_by_torch(model)


def test_a_model_without_a_head(tmp_path: Path) -> None:
    """A tied head invented for a model that has none."""
    model = tr.Qwen2Model(tr.Qwen2Config(**SIZES, tie_word_embeddings=True))
    path = saved(tmp_path, model)
    assert untyped(inspect(path, "--tree")) == printed_by_torch(model)
    report = report_on(path)
    assert report["n_parameters"] == sum(p.numel() for p in model.parameters())
    assert report["unsupported"] is None


@pytest.mark.parametrize("task", ["SequenceClassification", "TokenClassification"])
def test_counts_of_a_classification_head(task: str, tmp_path: Path) -> None:
    """Labels that are not shown, or a head that is counted as something else."""
    labels = {0: "good", 1: "bad", 2: "ugly"}
    model = getattr(tr, f"AutoModelFor{task}").from_config(tr.LlamaConfig(**SIZES, id2label=labels))
    path = saved(tmp_path, model)
    report = report_on(path)
    assert report["unsupported"] is None
    assert report["n_parameters"] == sum(p.numel() for p in model.parameters())
    assert untyped(inspect(path, "--tree")) == printed_by_torch(model)
    words = re.sub(r"(?<!^)(?=[A-Z])", " ", task).lower()
    assert f"{words}: good, bad, ugly" in inspect(path)


def test_a_135m_model_with_a_head_has_134_516_162(tmp_path: Path) -> None:
    """The number that transformers gives for SmolLM2-135M with a question-answering head."""
    with torch.device("meta"):
        sizes = {**SIZES, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30}
        sizes |= {"num_attention_heads": 9, "num_key_value_heads": 3, "vocab_size": 49152}
        model = tr.LlamaForQuestionAnswering(tr.LlamaConfig(**sizes))
    write_sparse(tmp_path, model)
    assert "134,516,162 in 274 tensors" in inspect(tmp_path)


def write_sparse(directory: Path, model: Any, n_shards: int = 1) -> None:
    """A checkpoint of a model's true size whose weights are holes in the files."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(model.config.to_dict()))
    named = [(name, p) for name, p in model.named_parameters()]
    index: dict[str, str] = {}
    for shard in range(n_shards):
        name = f"model-{shard + 1:05}-of-{n_shards:05}.safetensors" if n_shards > 1 else "model.safetensors"
        header: dict[str, Any] = {}
        end = 0
        for key, p in named[shard::n_shards]:
            header[key] = {
                "dtype": "BF16",
                "shape": list(p.shape),
                "data_offsets": [end, end + 2 * p.numel()],
            }
            index[key], end = name, end + 2 * p.numel()
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)  # as the format's own writer does
        with (directory / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + end)
    if n_shards > 1:
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.full
def test_gigabytes_are_not_read(tmp_path: Path) -> None:
    """Weights read for the sake of their names: SmolLM3-3B's true size in three shards, 6 GB."""
    with torch.device("meta"):
        sizes = {**SIZES, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36}
        sizes |= {"num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 128256}
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}
        sizes |= {"max_position_embeddings": 65536, "rope_parameters": {**yarn, "rope_theta": 5e6}}
        model = tr.SmolLM3ForCausalLM(tr.SmolLM3Config(**sizes))
    write_sparse(tmp_path, model, n_shards=3)
    text = inspected_within(tmp_path, 200e6)
    n_parameters = sum(p.numel() for p in model.parameters())
    assert f"{n_parameters:,} in 326 tensors" in text
    assert "6.2 GB, 3 files, safetensors" in text
    assert "RRRNRRRNRR RNRRRNRRRN RRRNRRRNRR RNRRRN" in text
    assert "yarn: factor 2, original context 65536, beta fast 32, beta slow 1, truncate" in text
    assert "attention factor 1.06931" in text
    assert "73,728 bytes per token, 9.7 GB when full" in text
    assert "75% of the 294,912 bytes per token" in text
    report = report_on(tmp_path)
    assert report["gqa_saves"] == 0.75
    assert report["kv_bytes_full_context"] == 73_728 * 131_072
    assert report["rope_scaling"]["kind"] == "yarn"
    assert report["files"] == [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]
    layer = report["modules"]["modules"]["model"]["modules"]["layers"]["modules"]["35"]
    q = layer["modules"]["self_attn"]["modules"]["q_proj"]
    assert q["tensors"] == {"weight": {"type": "BF16", "shape": [2048, 2048], "n_parameters": 2048**2}}


def test_layers_with_windows_do_not_keep_the_whole_context(tmp_path: Path) -> None:
    """Catches memory of whole contexts for layers that see a window: five times what Gemma 3 270M takes."""
    with torch.device("meta"):
        sizes = {"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 256}
        sizes |= {"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144}
        sizes |= {"sliding_window": 512, "max_position_embeddings": 32768}
        model = tr.Gemma3ForCausalLM(tr.Gemma3TextConfig(**sizes))
    write_sparse(tmp_path, model)
    told = report_on(tmp_path)["kv_bytes_full_context"]
    assert told == memory_need(ModelOptions(model=str(tmp_path), max_requests=1)).kv_bytes
    assert round(told / 1e6) == 125


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "deepseek_v2"])
def test_the_memory_is_what_the_engine_takes(name: str) -> None:
    """Catches an estimate that counts pages otherwise than the engine allocates them."""
    _, config, source = make(name)
    model = load_model(source, replace(config, max_context=4096))
    engine = Engine(model, make_backend("cpu", n_threads=1), EngineConfig(max_requests=1))
    cost = KVCost.on_host(model.cache_layout, "f16", EngineConfig.max_step_tokens)
    assert engine.runner.cache.n_bytes == cost.n_bytes(cost.wanted(1, 4096))


def test_nor_are_those_of_a_gguf_file(tmp_path: Path) -> None:
    """Rows of q and k brought into order only to be counted: an 8B model, 16 GB."""
    d, f, n_layers = 4096, 14336, 32
    matrices = {"attn_q": (d, d), "attn_k": (1024, d), "attn_v": (1024, d), "attn_output": (d, d)}
    matrices |= {"ffn_gate": (f, d), "ffn_up": (f, d), "ffn_down": (d, f)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (128256, d), "output.weight": (128256, d)}
    shapes["output_norm.weight"] = (d,)
    for i in range(n_layers):
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in matrices.items()}
        shapes |= {f"blk.{i}.{name}.weight": (d,) for name in ("attn_norm", "ffn_norm")}
    path = tmp_path / "big.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(n_layers)
    writer.add_context_length(8192)
    writer.add_embedding_length(d)
    writer.add_feed_forward_length(f)
    writer.add_head_count(32)
    writer.add_head_count_kv(8)
    writer.add_layer_norm_rms_eps(1e-5)
    n_bytes = 0
    for name, shape in shapes.items():
        kind = gguf.GGMLQuantizationType.F32 if len(shape) == 1 else gguf.GGMLQuantizationType.F16
        size = int(np.prod(shape)) * (4 if len(shape) == 1 else 2)
        writer.add_tensor_info(name, shape, np.dtype(np.float16), size, raw_dtype=kind)
        n_bytes += -(-size // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    with path.open("r+b") as file:  # the weights are a hole
        file.truncate(-(-path.stat().st_size // 32) * 32 + n_bytes)
    text = inspected_within(path, 200e6)
    assert "8,030,261,248 in 291 tensors" in text
    assert "16.1 GB" in text
    assert "(0-31): 32 x LlamaDecoderLayer(" in text


def inspected_within(path: Path, most_bytes: float) -> str:
    """The output of a process of its own, whose peak memory is below a bound."""
    program = (
        "from kukri.cli import app; from kukri.host.hardware import peak_rss_bytes\n"
        f"app(['inspect', {str(path)!r}], standalone_mode=False)\n"
        "print(peak_rss_bytes())"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) < most_bytes
    return done.stdout


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm3-listed", ["RNNR   R rotates", "....   . sees the whole"]),
        ("qwen2", ["..ww   w sees 7 tokens, . sees the whole context", "scaling  none"]),
        ("phi3", ["longrope: factor 8, original context 32, 6 short factors from 1 to 2.5, 6 long factors"]),
        ("llama", ["llama3: ", "not counted   rope_freqs.weight"]),
        ("phi", ["8 of 16 dimensions of a head", "0% of the"]),
    ],
)
def test_patterns_and_scaling_are_drawn(name: str, words: list[str], tmp_path: Path) -> None:
    """A layer's rotation or window that the report turns around or hides."""
    _, config, source = make(name)
    text = inspect(write(tmp_path / "tiny.gguf", name, config, source))
    for word in words:
        assert word in text


def test_a_tied_copy_of_the_head_counts_once(tmp_path: Path) -> None:
    """A checkpoint that stores the tied head too, reported larger than its model."""
    from safetensors.torch import load_file, save_file

    model = tr.Qwen2ForCausalLM(tr.Qwen2Config(**{**SIZES, "tie_word_embeddings": True}))
    path = saved(tmp_path, model) / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, path)
    report = report_on(tmp_path)
    assert report["n_parameters"] == sum(p.numel() for p in model.parameters())
    assert len(report["buffers"]) == 2


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    """--tree that prints everything, or nothing where there is no flag."""
    _, config, source = make("qwen3")
    path = write(tmp_path / "tiny.gguf", "qwen3", config, source)
    tree, table = inspect(path, "--tree"), inspect(path, "--params")
    assert tree.startswith("Qwen3ForCausalLM(")
    assert "parameters" not in tree
    assert "parameters" in table
    assert "Linear(" not in table
    whole = inspect(path)
    assert tree in whole
    assert table in whole
    assert "weight types" in whole
    assert "KV cache" in whole


def test_a_split_model_and_a_broken_one(tmp_path: Path) -> None:
    """A part shown as the model; a missing tensor that hides all others, or that is not mentioned."""
    _, config, source = make("qwen3")
    path = write(tmp_path / "tiny.gguf", "qwen3", config, source)
    del source.arrays["model.layers.1.mlp.up_proj.weight"]
    broken = write(tmp_path / "broken.gguf", "qwen3", config, source)
    report = report_on(broken)
    assert "blk.1.ffn_up.weight" in report["unsupported"]
    assert report["n_parameters"] == report_on(path)["n_parameters"] - 96 * 64
    assert re.search(r"not runnable .*'blk\.1\.ffn_up\.weight' is missing", inspect(broken))
    model = tr.LlamaForCausalLM(tr.LlamaConfig(**SIZES, attention_bias=True))
    stated = saved(tmp_path / "hf", model) / "config.json"
    for change, problem in (
        ({"hidden_size": 128, "head_dim": 16}, r"\(80, 64\) where the configuration asks for \(80, 128\)"),
        ({"attention_bias": False}, r"but key 'attention_bias' of config\.json is false"),
        ({"model_type": "gpt9"}, "'model_type' 'gpt9' is not supported"),
    ):
        was = stated.read_text()
        stated.write_text(json.dumps({**json.loads(was), **change}))
        assert re.search(f"not runnable .*{problem}", inspect(stated.parent))
        stated.write_text(was)
    assert "not runnable" not in inspect(stated.parent)


def test_hostile_names_do_no_harm(tmp_path: Path) -> None:
    """A tree as deep as a name has dots, and escape sequences that reach the terminal."""
    tensor = (QUANT_TYPES["F32"], np.zeros((2, 3), np.float32), (2, 3))
    names = ["." * 250, "a\x1b[31m.weight", "layers.9.b.weight", "weight", "a.b", "a.b.c", ".weight"]
    path = tmp_path / "hostile.gguf"
    write_gguf(path, {"general.architecture": "x"}, dict.fromkeys(names, tensor))
    text = inspect(path, "--tensors")
    assert "\x1b" not in text
    assert "\\x1b" in text
    assert report_on(path)["n_parameters"] == 6 * len(names)
