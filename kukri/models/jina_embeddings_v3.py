"""Jina Embeddings v3 (Sturua et al. 2024): XLM-RoBERTa that rotates, in place of embedded positions.

The updates for its tasks are adapters, in files of their own.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.models.layers import MLP
from kukri.models.nomic_bert import NOMIC_BERT, NomicBertBlock
from kukri.models.xlm_roberta import XLM_ROBERTA, XLMRoberta

_NOMIC = {
    name: stored for name, stored in NOMIC_BERT.tensor_names.items() if name[:4] not in ("attn", "mlp.")
}

JINA_EMBEDDINGS_V3 = replace(
    XLM_ROBERTA,
    name="jina_embeddings_v3",
    model=XLMRoberta.of(
        block_type=NomicBertBlock.of(attention_name="mixer", mlp_type=MLP), norm_name="model.emb_ln"
    ),
    hf_class="JinaEmbeddingsV3Model",
    hf_type="",
    gguf="jina-bert-v3",
    first_position=0,
    has_rope=True,
    layers=NOMIC_BERT.layers,
    tensor_names={
        **_NOMIC,
        **{"classifier.dense": "cls", "classifier.out_proj": "cls.output"},
        **{
            "mixer.Wqkv": "attn_qkv",
            "mixer.out_proj": "attn_output",
            "mlp.fc1": "ffn_up",
            "mlp.fc2": "ffn_down",
        },
    },
    defaults={
        **XLM_ROBERTA.defaults,
        **{"layer_norm_eps": 1e-5, "type_vocab_size": 1, "rope_theta": 20000.0},
    },
    fixed={},
    biases={"mixer": True, "mlp": True},
)
