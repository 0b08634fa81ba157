"""Make a control vector of pairs of texts, save it as GGUF, and steer answers with it."""

import tempfile
from pathlib import Path

import numpy as np

from kukri import LLM
from kukri.interp import ControlVector

GOOD = ["I love this, it is wonderful", "What a great and happy day", "The best food I ever had"]
BAD = ["I hate this, it is terrible", "What an awful and sad day", "The worst food I ever had"]

with tempfile.TemporaryDirectory() as folder:
    path = Path(folder) / "mood.gguf"
    with LLM() as llm:

        def streams(texts: list[str]) -> np.ndarray:
            """The stream after each layer at the last token: [texts, layer, D]."""
            found = []
            for text in texts:
                _, cache = llm.run_with_cache(
                    text, names=lambda name: name.endswith("resid_post"), return_type=None
                )
                found.append([cache["resid_post", i][0, -1] for i in range(llm.config.n_layers)])
            return np.array(found)

        difference = (streams(GOOD) - streams(BAD)).mean(axis=0)
        ControlVector({i: difference[i] for i in range(8, 20)}).save(path, llm.config.architecture)

    with LLM(control_vectors={"mood": path}) as llm:
        prompt = "I went to the new restaurant. The food was"
        for strength in (-0.3, 0.0, 0.3):
            steer = [{"op": "add", "control_vector": "mood", "strength": strength}]
            result = llm.generate(prompt, max_tokens=12, temperature=0, interventions=steer)
            print(f"strength {strength:+.1f}:{result.text!r}")
