"""transformers' delta rule token by token, as its paper states it, for models made after this is imported.

By chunks of 64 tokens, its default for prompts, float32 loses up to 2.4e-4 of logits of size 7 on processors
whose PyTorch sums in another order (Sapphire Rapids), which is more than the tests allow.
"""

from __future__ import annotations

from transformers.models.qwen3_5 import modeling_qwen3_5

modeling_qwen3_5.torch_chunk_gated_delta_rule = modeling_qwen3_5.torch_recurrent_gated_delta_rule
