"""Store activations, train a small sparse autoencoder on them with torch, and read features out of a stream.

It is saved as SAELens saves one. Real ones are trained on billions of tokens; this one shows the way. Needs
torch and safetensors: `pip install torch safetensors`.
"""

import json
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from kukri import LLM
from kukri.interp.store import ActivationStore, write_store

HOOK, N_FEATURES, STEPS, BATCH = "blocks.14.hook_resid_post", 256, 40, 128
TEXTS = [Path(__file__).read_text(encoding="utf-8")]  # any texts will do, and millions of them are better

with tempfile.TemporaryDirectory() as folder:
    with LLM() as llm:
        report = write_store(llm, TEXTS, [HOOK], Path(folder) / "store", context=64, shuffle=0)
        width = llm.config.d_model
    print(f"{report.n_tokens} tokens in {report.n_shards} shards")

    torch.manual_seed(0)
    store = ActivationStore(Path(folder) / "store")
    mean = torch.cat([torch.from_numpy(x) for x in store.batches(HOOK, BATCH)]).mean(0)
    decoder = torch.randn(N_FEATURES, width) / width**0.5
    weights = {"W_enc": decoder.T.clone(), "W_dec": decoder, "b_enc": torch.zeros(N_FEATURES), "b_dec": mean}
    for tensor in weights.values():
        tensor.requires_grad_()
    optimizer = torch.optim.Adam(weights.values(), lr=2e-3)
    step, losses = 0, []
    while step < STEPS:
        for batch in store.batches(HOOK, BATCH, seed=step):
            x = torch.from_numpy(batch)
            features = torch.relu((x - weights["b_dec"]) @ weights["W_enc"] + weights["b_enc"])
            error = (features @ weights["W_dec"] + weights["b_dec"] - x).pow(2).sum(-1)
            loss = (error / (x - mean).pow(2).sum(-1)).mean() + 1e-4 * features.abs().sum(-1).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
            step += 1
    print(f"loss {losses[0]:.2f} at first, {sum(losses[-5:]) / 5:.2f} at last")

    sae = Path(folder) / "sae"
    sae.mkdir()
    save_file({name: x.detach().contiguous() for name, x in weights.items()}, sae / "sae_weights.safetensors")
    config = {"architecture": "standard", "d_in": width, "d_sae": N_FEATURES, "metadata": {"hook_name": HOOK}}
    (sae / "cfg.json").write_text(json.dumps(config))

    with LLM(saes={"mine": sae}) as llm:
        read = [{"op": "read", "sae": "mine", "top_k": 3, "positions": "generated"}]
        for chunk in llm.stream("import numpy as", max_tokens=6, temperature=0, interventions=read):
            for one in chunk.readouts:
                shown = ", ".join(f"{i}: {x:.1f}" for i, x in one.values["mine"].items())
                print(f"features of {llm.tokenizer.decode([one.token_id])!r}: {shown}")
