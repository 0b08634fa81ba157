"""How sure the model is: of each token that it writes, and of each token of a given text."""

import numpy as np

from kukri import LLM

TEXT = "The quick brown fox jumps over the lazy cat."

with LLM() as llm:
    decode = llm.tokenizer.decode

    print("What it writes, and what else it might have written:")
    result = llm.generate("The three primary colors are", temperature=0, max_tokens=8, logprobs=3)
    for token in result.logprobs:
        others = ", ".join(f"{decode([i])!r} {np.exp(logprob):.0%}" for i, logprob in token.top_logprobs)
        print(f"  {decode([token.id])!r:<12}{others}")

    print("What it thinks of a text:")
    ids = llm.tokenizer.encode(TEXT)
    logits = llm.logits(ids)  # [T, V]: row t is about token t + 1
    logprobs = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    for row, token_id in zip(logprobs, ids[1:], strict=False):
        best = int(row.argmax())
        instead = "" if best == token_id else f"  rather {decode([best])!r} {np.exp(row[best]):.0%}"
        print(f"  {decode([token_id])!r:<12}{np.exp(row[token_id]):>6.1%}{instead}")
    chosen = logprobs[np.arange(len(ids) - 1), ids[1:]]
    print(f"perplexity {np.exp(-chosen.mean()):.1f}")
