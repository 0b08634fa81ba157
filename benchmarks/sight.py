"""How often a trained model names what it sees, over HTTP and in PyTorch: `python -m benchmarks.sight DIR`.

DIR is what `python -m benchmarks.train_vision DIR` wrote. Both answer greedily about the same pictures, drawn
with another seed than those of the training; kukri through `kukri serve`, as images in base64.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from PIL import Image

from benchmarks.drawn_pictures import QUESTION, Contents, draw, read
from benchmarks.harness import Experiment, Table, run, served
from kukri.kernels.arrays import ByteArray

_SEED = 1000
_MAX_TOKENS = 12
_PARTS = ("count", "colour", "kind")


@dataclass(frozen=True)
class SightReport:
    """Of `n` pictures: how often each part was named rightly, by side, and how many answers are the same."""

    n: int
    right: dict[str, dict[str, int]]
    same: int


def kukri_answers(folder: Path, pictures: list[ByteArray], n_threads: int) -> Iterator[str]:
    """The answers of `kukri serve`."""
    with served(folder, "--threads", str(n_threads)) as (_, url), httpx.Client(timeout=120) as client:
        for picture in pictures:
            written = io.BytesIO()
            Image.fromarray(picture).save(written, "PNG")
            image = f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
            content = [{"type": "image_url", "image_url": {"url": image}}, {"type": "text", "text": QUESTION}]
            asked = {
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_tokens": _MAX_TOKENS,
            }
            answer = client.post(f"{url}/v1/chat/completions", json=asked).raise_for_status().json()
            yield answer["choices"][0]["message"]["content"]


def torch_answers(folder: Path, pictures: list[ByteArray], n_threads: int) -> Iterator[str]:
    """Those of transformers, in float32."""
    import torch

    tr: Any = import_module("transformers")
    torch.set_num_threads(n_threads)
    model = tr.Idefics3ForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = tr.AutoTokenizer.from_pretrained(folder)
    stated = json.loads((folder / "preprocessor_config.json").read_text())
    n_rows = (model.config.vision_config.image_size // model.config.vision_config.patch_size) ** 2
    keys = ("size", "max_image_size", "do_image_splitting", "image_mean", "image_std")
    processor = tr.Idefics3Processor(
        tr.Idefics3ImageProcessorPil(**{key: stated[key] for key in keys}),
        tokenizer,
        image_seq_len=n_rows // model.config.scale_factor**2,
        chat_template=tokenizer.chat_template,
    )
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    asked = processor.apply_chat_template(messages, add_generation_prompt=True)
    for picture in pictures:
        inputs: Any = processor(text=asked, images=[Image.fromarray(picture)], return_tensors="pt")
        with torch.no_grad():
            end = {"eos_token_id": tokenizer.eos_token_id, "do_sample": False}
            ids = model.generate(**inputs, max_new_tokens=_MAX_TOKENS, **end)
        yield tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)


def n_right(answers: list[str], contents: list[Contents]) -> dict[str, int]:
    """How often each part is named rightly, and all three."""
    found = [read(answer) for answer in answers]
    pairs = list(zip(found, contents, strict=True))
    right = {part: sum(getattr(a, part, None) == getattr(b, part) for a, b in pairs) for part in _PARTS}
    return right | {"all": sum(a == b for a, b in pairs)}


def main() -> None:
    """Asks both about the same pictures."""
    experiment = Experiment("sight", "How often a model names what it sees.", with_model=False)
    experiment.options.add_argument("folder", type=Path, metavar="DIR")
    experiment.count("-n", "--pictures", 200, "pictures")
    given = experiment.parse()
    random = np.random.default_rng(_SEED)
    pictures, contents = map(list, zip(*(draw(random) for _ in range(given.pictures))))
    answers: dict[str, list[str]] = {}
    for side, ask in (("kukri", kukri_answers), ("torch", torch_answers)):
        experiment.say(f"{side} answers {len(pictures)} times")
        answers[side] = [answer.strip() for answer in ask(given.folder, pictures, given.threads)]
    right = {side: n_right(own, contents) for side, own in answers.items()}
    same = sum(a == b for a, b in zip(*answers.values(), strict=True))
    rows = [
        [part, *(f"{own[part]} of {len(pictures)}" for own in right.values())] for part in (*_PARTS, "all")
    ]
    table = Table("named rightly", ("", *right), rows)
    experiment.show(
        SightReport(len(pictures), right, same), table, f"{same} of {len(pictures)} answers are the same"
    )


if __name__ == "__main__":
    run(main)
