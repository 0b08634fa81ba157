"""A tiny random encoder of each architecture: transformers', and the config and weights of the same here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from kukri.formats.checkpoint import open_checkpoint
from kukri.models import Model, load_model
from tests.lazy_imports import lazy_imports

with lazy_imports():
    import torch
    import transformers


BYTES_V = 300  # for byte pairs, which need a token for each byte
N_LAYERS, D, F, V, HEADS, CONTEXT = 4, 64, 96, 80, 4, 96


@dataclass(frozen=True)
class TinyEncoder:
    """transformers' <hf_type>Config and <hf_type>Model, and what the configuration says beyond the sizes."""

    hf_type: str
    hf: Mapping[str, Any]


_ROPE = {"rope_type": "default", "rope_theta": 300.0}
_XLM_IDS = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
ENCODERS: dict[str, TinyEncoder] = {
    "bert": TinyEncoder("Bert", {"layer_norm_eps": 1e-5}),
    "modernbert": TinyEncoder(
        "ModernBert",
        {
            **{"local_attention": 8, "norm_eps": 1e-5, "bos_token_id": 2, "vocab_size": BYTES_V},
            **{"eos_token_id": 3, "cls_token_id": 2, "sep_token_id": 3},
        },
    ),
    "xlm_roberta": TinyEncoder(
        "XLMRoberta",
        {
            **{"layer_norm_eps": 1e-5, "type_vocab_size": 1, "max_position_embeddings": CONTEXT + 2},
            **_XLM_IDS,
        },
    ),
    "jina_embeddings_v3": TinyEncoder(
        "JinaEmbeddingsV3", {"layer_norm_eps": 1e-5, "rope_parameters": _ROPE, **_XLM_IDS}
    ),
    "gte": TinyEncoder("Gte", {"layer_norm_eps": 1e-5, "rope_parameters": _ROPE, "pad_token_id": 0}),
    "mpnet": TinyEncoder(
        "MPNet", {"layer_norm_eps": 1e-5, "max_position_embeddings": CONTEXT + 2, **_XLM_IDS}
    ),
    "jina_bert_v2": TinyEncoder("JinaV2", {"layer_norm_eps": 1e-5}),
    "nomic_bert": TinyEncoder("NomicBert", {"layer_norm_eps": 1e-5, "head_dim": D // HEADS}),
}


# without heads for tasks
_LFM2 = {
    **{"num_key_value_heads": 2, "layer_types": ["conv", "full_attention", "conv", "conv"]},
    **{"block_auto_adjust_ff_dim": False, "norm_eps": 1e-5},
}
BARE_ENCODERS = {
    "lfm2_bidirectional": TinyEncoder("Lfm2Bidirectional", _LFM2),
    "lfm2": TinyEncoder("Lfm2", _LFM2),
}


def save(directory: Path, name: str, head: str = "Model", seed: int = 0, **more: Any) -> Any:
    """transformers' model, saved to the directory with a tokenizer; norms and biases are far from 1 and 0."""
    tiny = {**ENCODERS, **BARE_ENCODERS}[name]
    torch.manual_seed(seed)
    common = {
        "hidden_size": D, "intermediate_size": F, "num_attention_heads": HEADS, "num_hidden_layers": N_LAYERS,
        "vocab_size": V, "max_position_embeddings": CONTEXT, "initializer_range": 0.15, "pad_token_id": 0,
        "attn_implementation": "eager",
    }  # fmt: skip
    config = _hf_class(f"{tiny.hf_type}Config")(**{**common, **tiny.hf, **more})
    hf = _hf_class(f"{tiny.hf_type}{head}")(config).eval()
    with torch.no_grad():
        for key, parameter in hf.named_parameters():
            if "norm" in key.lower() or "bias" in key:
                parameter.copy_((0.0 if "bias" in key else 1.0) + 0.3 * torch.randn_like(parameter))
    hf.save_pretrained(directory)
    if name == "modernbert":
        byte_pairs(directory)
    elif name == "mpnet":
        word_pieces(directory, "MPNetTokenizer", ("<s>", "<pad>", "</s>", "[UNK]", "<mask>"))
    elif name in ("xlm_roberta", "jina_embeddings_v3"):
        pieces(directory)
    else:
        word_pieces(directory)
    return hf


def _hf_class(name: str) -> Any:
    """A class of transformers, or one that stands for a class on the hub."""
    from tests.models import jina_class, lfm2_class

    own = vars(lfm2_class) | vars(jina_class)
    return own.get(name) or getattr(transformers, name)


def byte_pairs(directory: Path) -> None:
    """A byte-level BPE tokenizer of up to BYTES_V tokens, texts between [CLS] and [SEP]."""
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    made = Tokenizer(models.BPE(unk_token="[UNK]"))
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.train_from_iterator(
        ["the cat sat on the mat, sitting! ABCDEFGHIJKLMNOPQRSTUVWXYZ cats?."],
        trainers.BpeTrainer(
            vocab_size=BYTES_V,
            special_tokens=tokens,
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        ),
    )
    ends = [("[CLS]", 2), ("[SEP]", 3)]
    made.post_processor = TemplateProcessing("[CLS] $A [SEP]", "[CLS] $A [SEP] $B [SEP]", ends)
    names = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, **{f"{name}_token": tokens[i] for name, i in names.items()}
    ).save_pretrained(directory)


_BERT_IDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def word_pieces(directory: Path, kind: str = "BertTokenizer", special: Sequence[str] = _BERT_IDS) -> None:
    """A WordPiece tokenizer of V tokens, as transformers saves it."""
    pieces = [*"abcdefghijklmnopqrstuvwxyz", "the", "cat", "sat", "##s", "##ing", "on", "mat", ",", ".", "!"]
    pieces += [f"##{letter}" for letter in "abcdefghijklmnopqrtuvwxyz"]
    tokens = [*special, *pieces]
    tokens += [f"w{i}" for i in range(V - len(tokens))]
    (directory / "vocab.txt").write_text("\n".join(tokens))
    made = getattr(transformers, kind)(vocab={token: i for i, token in enumerate(tokens)})
    made.save_pretrained(directory)


def pieces(directory: Path) -> None:
    """A unigram tokenizer of V tokens with a normalization, as transformers saves XLM-RoBERTa's."""
    texts = [
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "▁the",
        "▁cat",
        "▁sat",
        "ing",
        "▁on",
        "▁mat",
        "s",
        "at",
        "tt",
    ]
    texts = [*dict.fromkeys([*texts, "▁c", "▁m", *",.!?", "ca", "▁s", "▁t", "he"])]
    texts += [f"▁w{i}" for i in range(V - len(texts) - 5)]
    vocabulary = [(token, 0.0) for token in ("<s>", "<pad>", "</s>", "<unk>")]
    vocabulary += [(text, -0.7 * i**0.7 + len(text)) for i, text in enumerate(texts, 1)]
    transformers.XLMRobertaTokenizer(
        vocab=[*vocabulary, ("<mask>", 0.0)],
        _spm_precompiled_charsmap=charsmap({**dict.fromkeys("\t\n\r", " "), "à": "a", "ﬁ": "fi", "A": "a"}),
    ).save_pretrained(directory)


def charsmap(replaced: Mapping[str, str]) -> bytes:
    """SentencePiece's compiled normalization: a double array of the texts replaced, and what replaces them.

    A node's children, by their bytes, are in a block of 256 units of their own (Yata 2011, darts-clone).
    """
    texts = b"".join(new.encode() + b"\0" for new in replaced.values())
    starts = np.cumsum([0, *(len(new.encode()) + 1 for new in replaced.values())])
    words = {old.encode(): int(start) for old, start in zip(replaced, starts)}
    nodes = sorted({word[:n] for word in words for n in range(len(word) + 1)}, key=len)
    block = {node: 256 * (1 + i) for i, node in enumerate(nodes)}
    units = np.zeros(256 * (1 + len(nodes)), np.uint32)
    for node in nodes:
        place = block[node[:-1]] ^ node[-1] if node else 0
        units[place] = (node[-1] if node else 0) | (node in words) << 8 | (place ^ block[node]) << 10
        if node in words:
            units[block[node]] = words[node] | 1 << 31
    return np.uint32(units.nbytes).tobytes() + units.tobytes() + texts


def load(directory: Path) -> Model:
    """The model of a directory here."""
    with open_checkpoint(directory) as checkpoint:
        return load_model(checkpoint.weights(checkpoint.config), checkpoint.config)


def hf_states(hf: Any, ids: Sequence[int], types: Sequence[int] | None = None) -> list[np.ndarray]:
    """transformers' hidden states [T, D]: of the embeddings, and after each layer."""
    base = getattr(hf, hf.base_model_prefix, hf)
    more = {} if types is None else {"token_type_ids": torch.tensor([list(types)])}
    with torch.no_grad():
        out = base(torch.tensor([list(ids)]), output_hidden_states=True, **more)
    return [state[0].numpy() for state in out.hidden_states]
