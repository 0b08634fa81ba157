"""What the last token of a question looks at in a picture, head by head.

`python examples/image_attention.py MODEL IMAGE [OUT.png]`: MODEL is one that sees, such as
SmolVLM-256M-Instruct. Needs matplotlib and Pillow: `pip install ".[plots,vision]"`.
"""

import sys

from kukri import LLM
from kukri.interp import plots
from kukri.vision.decode import decode

if len(sys.argv) < 3:
    sys.exit(__doc__)
model, path, *rest = sys.argv[1:]
output = rest[0] if rest else "attention.png"

with LLM(model) as llm:
    content = [{"type": "image", "image": path}, {"type": "text", "text": "What is in the middle?"}]
    prompt = llm.chat_prompt([{"role": "user", "content": content}])
    layer = llm.config.n_layers // 2
    _, cache = llm.run_with_cache(prompt, names=[f"pattern{layer}"])
    weights = llm.vision.attention(cache, prompt, layer)  # [head, rows, columns]
    plots.image_attention(weights, decode(path, "image"), output, title=f"Layer {layer}")
    print(f"{output}: {len(weights)} heads over {weights.shape[1]} x {weights.shape[2]} places")

    # the same of the encoder: how the patches of the picture see each other
    _, seen = llm.vision.run_with_cache(path, names=["pattern0"])
    print(f"the encoder's first layer: patterns {list(seen['pattern0'].shape)}")
