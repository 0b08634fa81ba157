"""A model's modules as PyTorch prints them: `(q_proj): Linear(in_features=576, …)`, equal layers folded.

The tree is made of the tensors' Hugging Face names, so it shows modules that hold weights and no others.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kukri.dataclass import dataclass, field
from kukri.formats.headers import StoredTensor
from kukri.models import ARCHITECTURES

# The order in which transformers' classes define their modules; others come after, as the file has them.
_ORDER = (
    *("model", "transformer", "embed_tokens", "layers", "self_attn", "linear_attn"),
    *("conv", "conv1d", "feed_forward", "mlp", "norm"),
    *("final_layernorm", "embedding_norm", "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "in_proj"),
    *(
        "out_proj",
        "in_proj_qkv",
        "in_proj_z",
        "in_proj_b",
        "in_proj_a",
        "dense",
        "q_norm",
        "k_norm",
        "q_layernorm",
        "k_layernorm",
        "query_layernorm",
        "key_layernorm",
        "w1",
        "w3",
        "w2",
    ),
    *("router", "experts", "gate"),
    *("gate_proj", "up_proj", "gate_up_proj", "down_proj", "fc1", "fc2", "c_fc", "c_proj"),
    *("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm"),
    *("post_self_attn_layernorm", "post_mlp_layernorm"),
    *(
        "post_feedforward_layernorm",
        "operator_norm",
        "ffn_norm",
        "lm_head",
        "qa_outputs",
        "score",
        "classifier",
    ),
)
_MAX_DEPTH = 32  # deeper than any sane model's modules
# Modules of which transformers' class name is the architecture's and this
_CLASSES = {"model": "Model", "transformer": "Model", "self_attn": "Attention", "mlp": "MLP"} | {
    "feed_forward": "MLP",
    "conv": "ShortConv",
    "linear_attn": "GatedDeltaNet",
    "mamba": "MambaLayer",
    "backbone": "Model",
    "mixer": "Mixer",
    "shared_mlp": "MLP",
}
# and modules with other names in transformers
_OWN_CLASSES = {
    "Cohere2RMSNorm": "Cohere2LayerNorm",
    "GraniteMoeSparseMoeBlock": "GraniteMoeMoE",
    "GemmaEmbedding": "GemmaTextScaledWordEmbedding",
    "Gemma2Embedding": "Gemma2TextScaledWordEmbedding",
    "Gemma3Embedding": "Gemma3TextScaledWordEmbedding",
    "Gemma3Model": "Gemma3TextModel",
    "Gemma4Embedding": "Gemma4TextScaledWordEmbedding",
    "Gemma4Model": "Gemma4TextModel",
    "Gemma4Attention": "Gemma4TextAttention",
    "Gemma4MLP": "Gemma4TextMLP",
    "Gemma4DecoderLayer": "Gemma4TextDecoderLayer",
    "GptOssSparseMoeBlock": "GptOssMLP",
    "GraniteMoeHybridSparseMoeBlock": "GraniteMoeHybridMoE",
    "Qwen3_5Model": "Qwen3_5TextModel",
}


@dataclass
class Module:
    """One module. `kind` is its class; `facts` are printed in parentheses, alone if `is_folded`."""

    kind: str
    facts: str = ""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)  # weight, bias
    children: dict[str, Module] = field(default_factory=dict)
    is_folded: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The tree for JSON, every layer on its own."""
        tensors = {
            name: {"type": tensor.type, "shape": list(tensor.shape), "n_parameters": tensor.n_parameters}
            for name, tensor in self.tensors.items()
        }
        children = {name: child.as_dict() for name, child in self.children.items()}
        return {"class": self.kind, "facts": self.facts, "tensors": tensors, "modules": children}


def module_tree(
    tensors: Mapping[str, StoredTensor], root: str, prefix: str, norm_eps: float | None, tied: bool
) -> Module:
    """The tree of tensors by Hugging Face name.

    `root` is the class of the whole, `prefix` what its parts' classes begin with; `tied` adds the head that
    is the embedding.
    """
    top = Module(root)
    for name, tensor in tensors.items():
        *path, last = name.split(".") if name.count(".") < _MAX_DEPTH else [name]
        if path and path[-1] in ("sinks", "A_log", "dt_proj", "D"):  # a parameter of the layer itself
            last = path.pop()
        if path[-2:-1] == ["block_sparse_moe"] and path[-1].endswith("_linear"):  # files omit this level
            path, last = [*path[:-1], "experts"], path[-1]
        if path[-2:] == ["router", "layer"]:
            path.pop()
        module = top
        for part in path:
            module = module.children.setdefault(part, Module(""))
        module.tensors[last] = tensor
    if tied:
        embedding = next((n for n in tensors if n.endswith("embed_tokens.weight")), None)
        if embedding is not None:
            weight = tensors[embedding]
            facts = f"in_features={weight.shape[-1]}, out_features={weight.shape[0]}, bias=False"
            top.children["lm_head"] = Module(
                "Linear", f"{facts}, tied to {embedding.removesuffix('.weight')}"
            )
    for name, child in top.children.items():
        _describe(child, name, prefix, norm_eps)
    _sort(top)
    return top


def tree_lines(name: str, module: Module, indent: str = "") -> list[str]:
    """The lines of a module, with consecutive equal children as one."""
    head = f"{indent}({name}): {module.kind}(" if name else f"{module.kind}("
    if module.is_folded or not module.children:
        return [f"{head}{module.facts})"]
    lines = [head]
    for label, child in _folded(module.children):
        lines += tree_lines(label, child, indent + "  ")
    return [*lines, f"{indent})"]


def _folded(children: Mapping[str, Module]) -> list[tuple[str, Module]]:
    """Children, consecutive equal ones as (`0-29`, a module of kind `30 x …`)."""
    runs: list[list[str]] = []
    printed: list[str] = []
    for name, child in children.items():
        text = "\n".join(tree_lines("", child))
        if runs and name.isdecimal() and printed[-1] == text:
            runs[-1].append(name)
        else:
            runs.append([name])
            printed.append(text)
    folded = []
    for run in runs:
        child = children[run[0]]
        if len(run) > 1:
            child = Module(f"{len(run)} x {child.kind}", child.facts, child.tensors, child.children)
        folded.append((run[0] if len(run) == 1 else f"{run[0]}-{run[-1]}", child))
    return folded


def _describe(module: Module, name: str, prefix: str, norm_eps: float | None) -> None:
    for child_name, child in module.children.items():
        _describe(child, child_name, prefix, norm_eps)
    if module.kind:
        return
    if name == "experts":
        module.kind, module.facts, module.is_folded = f"{prefix}Experts", ", ".join(_parts(module)), True
        return
    if "experts" in module.children:
        module.kind = _OWN_CLASSES.get(f"{prefix}SparseMoeBlock", f"{prefix}SparseMoeBlock")
        for router in module.children.keys() & {"gate", "router"}:
            module.children[router].kind = f"{prefix}TopKRouter"
        return
    if module.children:
        numbered = all(child.isdecimal() for child in module.children)
        kind = prefix + _CLASSES.get(name, "DecoderLayer")
        module.kind = "ModuleList" if numbered else _OWN_CLASSES.get(kind, kind)
        if name in ("linear_attn", "mamba") and "norm" in module.children:
            module.children["norm"].kind, module.children["norm"].facts = f"{prefix}RMSNormGated", ""
        return
    module.kind, module.facts = _leaf(name, module.tensors, prefix, norm_eps)


def _parts(experts: Module) -> Iterator[str]:
    """Tensors of the experts: `down_proj=8x64x32, F16` if stacked, else `8 x down_proj=64x32, F16`."""
    for key, tensor in experts.tensors.items():
        yield f"{key}={'x'.join(map(str, tensor.shape))}, {tensor.type}"
    numbered = [child for name, child in experts.children.items() if name.isdecimal()]
    if numbered:
        yield from (f"{len(numbered)} x {part}" for part in _parts(numbered[0]))
    for name, child in experts.children.items():
        if not name.isdecimal():
            for key, tensor in child.tensors.items():
                label = name if key == "weight" else f"{name}.{key}"
                yield f"{label}={'x'.join(map(str, tensor.shape))}, {tensor.type}"


def _leaf(
    name: str, tensors: Mapping[str, StoredTensor], prefix: str, norm_eps: float | None
) -> tuple[str, str]:
    """Class and facts of a module with tensors of its own."""
    weight = tensors.get("weight")
    if weight is not None and name in ("conv", "conv1d") and len(weight.shape) in (2, 3):
        n, n_taps = weight.shape[0], weight.shape[-1]
        sizes = f"{n}, {n}, kernel_size=({n_taps},), stride=(1,), padding=({n_taps - 1},), groups={n}"
        return "Conv1d", sizes + ("" if "bias" in tensors else ", bias=False") + f", {weight.type}"
    if weight is None or len(weight.shape) > 2 or not tensors.keys() <= {"weight", "bias"}:
        shown = (f"{key}={'x'.join(map(str, t.shape))}, {t.type}" for key, t in tensors.items())
        return "Module", ", ".join(shown)
    has_bias = "bias" in tensors
    if len(weight.shape) == 2:
        n_out, n_in = weight.shape
        if "embed" in name:
            return _OWN_CLASSES.get(f"{prefix}Embedding", "Embedding"), f"{n_out}, {n_in}, {weight.type}"
        return "Linear", f"in_features={n_in}, out_features={n_out}, bias={has_bias}, {weight.type}"
    eps = "" if norm_eps is None else f", eps={norm_eps:g}"
    if has_bias:
        return "LayerNorm", f"{weight.shape}{eps}, elementwise_affine=True, bias=True, {weight.type}"
    if f"{prefix}RMSNorm" in _OWN_CLASSES:
        return _OWN_CLASSES[f"{prefix}RMSNorm"], ""
    return f"{prefix}RMSNorm", f"{weight.shape}{eps}, {weight.type}"


def _sort(module: Module) -> None:
    def place(name: str) -> tuple[int, int]:
        if name.isdecimal():
            return 0, int(name)
        return (1, _ORDER.index(name)) if name in _ORDER else (2, 0)

    module.children = {name: module.children[name] for name in sorted(module.children, key=place)}
    for child in module.children.values():
        _sort(child)


def class_names(architecture: str, stated: Sequence[str]) -> tuple[str, str]:
    """Class of the whole and prefix of its parts' classes, by config.json's `architectures` or the family."""
    if stated and (match := re.fullmatch(r"(\w+?)(?:For\w+|Model)", stated[0])):
        return stated[0], match[1]
    known = ARCHITECTURES.get(architecture)
    root = known.hf_class if known else f"{architecture.capitalize()}ForCausalLM"
    return root, root.removesuffix("ForCausalLM")
