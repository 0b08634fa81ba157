"""XLM-RoBERTa (Conneau et al. 2020), of multilingual E5, BGE-M3 and their rerankers: BERT with another head.

In safetensors positions are counted from 2 on, after the position of padding; in GGUF, where it is a bert,
from 0.
"""

from __future__ import annotations

from dataclasses import replace

from kukri.models.bert import BERT, Bert


class XLMRoberta(Bert):
    """The whole model."""

    pooler_name, classifier_name = "classifier.dense", "classifier.out_proj"


XLM_ROBERTA = replace(
    BERT,
    name="xlm_roberta",
    model=XLMRoberta,
    hf_class="XLMRobertaModel",
    hf_type="xlm-roberta",
    gguf="bert",
    first_position=2,
    unused=rf"{BERT.unused}|lm_head\..+",
    tensor_names={**BERT.tensor_names, "classifier.dense": "cls", "classifier.out_proj": "cls.output"},
    defaults={**BERT.defaults, "pad_token_id": 1},
)
