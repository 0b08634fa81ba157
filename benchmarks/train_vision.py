"""Trains a small model that sees: `python -m benchmarks.train_vision DIR`. Needs PyTorch and transformers.

An encoder and a projector of 1.2 million parameters before the default model's text, in Idefics3's form, for
pictures of shapes and digits (`drawn_pictures.py`), so that nothing is downloaded. First the projector's
rows learn to be the embeddings of the answer's words, which needs no text model; then the answers
themselves are learned through the text, whose weights stay. DIR is a checkpoint as the hub's are:
`python -m benchmarks.sight DIR` says how often it answers rightly.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.drawn_pictures import COLOURS, COUNTS, KINDS, QUESTION, SIDE, Contents, draw
from benchmarks.harness import Experiment, model_path, run

_IMAGE = "<image>"
_MARKS = [_IMAGE, "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
_PATCH, _SCALE = 12, 2
_N_ROWS = (SIDE // _PATCH // _SCALE) ** 2
_ENCODER = {
    "hidden_size": 128, "intermediate_size": 512, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": SIDE, "patch_size": _PATCH,
}  # fmt: skip
_SIZES = {"size": {"longest_edge": SIDE}, "max_image_size": {"longest_edge": SIDE}}
# SmolLM2's own, with images among the parts of a message
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}{{ '<image>' }}{% else %}"
    "{{ part['text'] }}{% endif %}{% endfor %}{% endif %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_model(text: Path, folder: Path) -> tuple[Any, Any]:
    """The model before its training, with the weights of a text model's file, and its processor."""
    import torch

    tr: Any = import_module("transformers")
    command = [
        sys.executable,
        "-m",
        "kukri",
        "convert",
        str(text),
        str(folder / "text"),
        "--to",
        "hf",
        "-t",
        "F32",
    ]
    subprocess.run(command, check=True, capture_output=True)
    model_of_text = tr.AutoModelForCausalLM.from_pretrained(folder / "text", dtype=torch.float32)
    tokenizer = tr.AutoTokenizer.from_pretrained(folder / "text")
    tokenizer.add_special_tokens({"additional_special_tokens": _MARKS})
    tokenizer.chat_template = _TEMPLATE
    model_of_text.resize_token_embeddings(len(tokenizer))
    config = tr.Idefics3Config(
        text_config=model_of_text.config.to_dict(),
        vision_config=_ENCODER,
        scale_factor=_SCALE,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE),
        tie_word_embeddings=True,
    )
    torch.manual_seed(1)
    model = tr.Idefics3ForConditionalGeneration(config)
    model.model.text_model.load_state_dict(model_of_text.model.state_dict())
    model.tie_weights()
    for parameter in (*model.model.text_model.parameters(), *model.lm_head.parameters()):
        parameter.requires_grad_(False)
    pictures = tr.Idefics3ImageProcessorPil(**_SIZES, do_image_splitting=False)
    return model, tr.Idefics3Processor(pictures, tokenizer, image_seq_len=_N_ROWS, chat_template=_TEMPLATE)


def batches(seed: int, size: int) -> Iterator[tuple[Any, list[Contents]]]:
    """Pictures as pixel values [B, 3, SIDE, SIDE], and what is in them."""
    import torch

    random = np.random.default_rng(seed)
    while True:
        pictures, contents = zip(*(draw(random) for _ in range(size)))
        values = np.stack(pictures).transpose(0, 3, 1, 2).astype(np.float32) / 127.5 - 1
        yield torch.from_numpy(values), [*contents]


def rows_of(model: Any, pixels: Any) -> Any:
    """What the text reads of pictures: [B, rows, D]."""
    return model.model.connector(model.model.vision_model(pixels).last_hidden_state)


def improver(model: Any, rate: float, n_steps: int) -> Callable[[Any], None]:
    """A function that takes one of `n_steps` steps of the optimizer, given the loss."""
    import torch

    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=rate, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, n_steps)

    def improve(loss: Any) -> None:
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        schedule.step()

    return improve


def learn_words(model: Any, tokenizer: Any, n_steps: int, say: Any) -> None:
    """Trains encoder and projector: row i becomes the embedding of the answer's token i, or a blank."""
    import torch

    def ids_of(contents: Contents) -> list[int]:
        ids: list[int] = tokenizer(f" {contents}")["input_ids"]
        return [*ids, *[blank] * (_N_ROWS - len(ids))]

    (blank,) = tokenizer("\n")["input_ids"]
    every = [Contents(a, b, c) for a in COUNTS for b in COLOURS for c in KINDS]
    words = sorted({one for contents in every for one in ids_of(contents)})
    index = {one: i for i, one in enumerate(words)}
    known = model.get_input_embeddings().weight[words].detach()
    spread = known.var()
    improve = improver(model, 1e-3, n_steps)
    started_s = time.perf_counter()
    for step, (pixels, contents) in zip(range(1, n_steps + 1), batches(1, 64)):
        wanted = torch.tensor([[index[one] for one in ids_of(each)] for each in contents])
        rows = rows_of(model, pixels)
        squares = rows.pow(2).sum(-1, keepdim=True) - 2 * rows @ known.T + known.pow(2).sum(-1)
        distances = squares / (known.shape[1] * spread)  # [B, rows, words]
        named = torch.nn.functional.cross_entropy(-8 * distances.flatten(0, 1), wanted.flatten())
        loss = named + 0.2 * distances.gather(2, wanted[..., None]).mean()
        improve(loss)
        if step % 100 == 0:
            right = (distances.argmin(-1) == wanted).all(1).float().mean()
            say(f"words, step {step}: {loss:.3f}, {right:.0%} right, {time.perf_counter() - started_s:.0f} s")


def learn_answers(model: Any, processor: Any, n_steps: int, batch: int, say: Any) -> None:
    """Trains encoder and projector by the text's own answers."""
    import torch

    tokenizer = processor.tokenizer
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": QUESTION}]}]
    asked = processor.apply_chat_template(messages, add_generation_prompt=True)
    blank = np.zeros((SIDE, SIDE, 3), np.uint8)
    prompt = processor(text=asked, images=[blank])["input_ids"][0]
    improve = improver(model, 3e-4, n_steps)
    started_s = time.perf_counter()
    for step, (pixels, contents) in zip(range(1, n_steps + 1), batches(2, batch)):
        answers = [[*tokenizer(str(one))["input_ids"], tokenizer.eos_token_id] for one in contents]
        longest = max(map(len, answers))
        padded = [[*answer, *[tokenizer.eos_token_id] * (longest - len(answer))] for answer in answers]
        labels = [[-100] * len(prompt) + a + [-100] * (longest - len(a)) for a in answers]
        ids = torch.tensor([[*prompt, *answer] for answer in padded])
        loss = model(input_ids=ids, pixel_values=pixels[:, None], labels=torch.tensor(labels)).loss
        improve(loss)
        if step % 10 == 0:
            say(f"answers, step {step}: {loss:.3f}, {time.perf_counter() - started_s:.0f} s")


def save(model: Any, processor: Any, folder: Path) -> None:
    """Writes the checkpoint, weights in float16."""
    import torch

    model.generation_config.eos_token_id = processor.tokenizer.eos_token_id
    model.to(torch.float16).save_pretrained(folder)
    processor.tokenizer.save_pretrained(folder)
    stated = {
        "image_processor_type": "Idefics3ImageProcessor",
        "do_image_splitting": False,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        **_SIZES,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    own = {"processor_class": "Idefics3Processor", "image_seq_len": _N_ROWS}
    (folder / "processor_config.json").write_text(json.dumps(own))


def main() -> None:
    """Trains and saves."""
    experiment = Experiment("train_vision", "Trains a small model that sees.")
    experiment.options.add_argument("folder", type=Path, metavar="DIR")
    experiment.count("-w", "--word-steps", 1600, "steps, of 64 pictures, that learn words")
    experiment.count("-a", "--answer-steps", 150, "steps that learn answers")
    experiment.count("-b", "--batch", 8, "pictures of a step that learns answers")
    given = experiment.parse()
    import torch

    torch.set_num_threads(given.threads)
    started_s = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        model, processor = make_model(model_path(given.model, SIDE), Path(scratch))
        n_trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        experiment.say(f"{n_trained:,} parameters are trained")
        learn_words(model, processor.tokenizer, given.word_steps, experiment.say)
        learn_answers(model, processor, given.answer_steps, given.batch, experiment.say)
        save(model, processor, given.folder)
    took_s = time.perf_counter() - started_s
    experiment.show(
        {"parameters": n_trained, "s": took_s}, f"{given.folder}: {n_trained:,} parameters, {took_s:.0f} s"
    )


if __name__ == "__main__":
    run(main)
