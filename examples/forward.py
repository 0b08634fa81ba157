"""Running the model by hand: a padded batch, a cache, a mask of one's own, and vectors of texts."""

import numpy as np

from kukri import LLM

with LLM() as llm:
    model, tokenizer = llm.model, llm.tokenizer

    print("Two texts of different length in one batch, padded on the left:")
    texts = [tokenizer.encode(text) for text in ("The capital of France is", "Water boils at 100 degrees")]
    longest = max(map(len, texts))
    ids = np.array([[0] * (longest - len(text)) + text for text in texts])
    mask = np.array([[0] * (longest - len(text)) + [1] * len(text) for text in texts])
    cache = model.new_cache(batch_size=2, max_tokens=longest + 8)
    logits = model.forward(ids, attention_mask=mask, cache=cache)  # [B, T, V]
    answers = []
    for _ in range(8):
        answers.append(logits[:, -1].argmax(-1))
        logits = model.forward(answers[-1][:, None], cache=cache)
    for answer in np.stack(answers, axis=1):
        print(f"  {tokenizer.decode(answer)!r}")

    print("The same question with its second token hidden from all others:")
    n = len(texts[0])
    visible = np.tril(np.ones((1, 1, n, n), bool))
    visible[..., 2:, 1] = False
    for name, given in (("whole", None), ("hidden", visible)):
        best = model.forward([texts[0]], attention_mask=given)[0, -1].argmax()
        print(f"  {name}: {tokenizer.decode([best])!r}")

    print("How near texts are to one another:")
    about = ["A cat sleeps on the sofa.", "A kitten naps on the couch.", "Stocks fell on Monday."]
    vectors = llm.embed(about)  # [n, D], of length 1
    for text, similarity in zip(about, vectors @ vectors[0], strict=True):
        print(f"  {similarity:.2f}  {text}")
