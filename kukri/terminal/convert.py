"""`kukri convert` and `kukri quantize`: a model as a file of another format or type."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kukri.errors import ConfigError, UnsupportedError, brief_list
from kukri.formats import hub
from kukri.formats.checkpoint import Checkpoint, open_checkpoint
from kukri.formats.convert import (
    Conversion,
    Step,
    of_directory,
    open_gguf,
    requantized,
    weighed,
    with_importance,
    with_recipe,
    write,
)
from kukri.formats.gguf.mmproj_writer import write_mmproj
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.huggingface.directory import TokenizerFiles
from kukri.formats.huggingface.writer import write_directory
from kukri.formats.imatrix import read_imatrix
from kukri.formats.losses import losses
from kukri.formats.sampling_advice import advice_keys, generation_keys
from kukri.models import load_model
from kukri.models.weights import TakenWeights
from kukri.quant.blocks import dequantize
from kukri.quant.recipes import Recipe, recipe_named, shipped_recipes
from kukri.terminal.files import check_parent
from kukri.terminal.output import n_bytes_text, say
from kukri.terminal.progress import progress_bar
from kukri.terminal.tables import print_facts, print_table
from kukri.tokenizer import load_tokenizer

FLOATS = ("F32", "F16", "BF16")


def convert_model(
    source: Path,
    target: Path,
    recipe: str | None,
    *,
    dry_run: bool,
    as_json: bool,
    imatrix: Path | None = None,
) -> None:
    """Writes a model as a GGUF file, or prints the plan for it.

    `recipe` is a mix or the path of a recipe; None keeps the types of a GGUF file, or of a directory with
    packed weights, and of another directory the one that most of its weights are in. `imatrix` names a file
    of importances.
    """
    wanted = None if recipe is None else recipe_named(recipe)
    with opened(source, imatrix) as conversion:
        is_packed = any(step.source.block_size > 1 for step in conversion.steps)
        if wanted is None and source.is_dir() and not is_packed:
            wanted = Recipe(_usual_type(conversion))
        plan = conversion if wanted is None else with_recipe(conversion, wanted)
        _note_unmeasured(plan, imatrix)
        if not dry_run:
            check_target(source, target)
            with progress(plan) as on_tensor:
                write(plan, target, on_tensor)
            _write_encoder(source, target)
        _report(plan, target, dry_run=dry_run, as_json=as_json)


def _note_losses(checkpoint: Checkpoint, to: str) -> None:
    for loss in losses(checkpoint.config, checkpoint.embedding, to):
        say(f"note: {loss}")


def _write_encoder(source: Path, target: Path) -> None:
    """Writes the encoder of images of a directory, if one runs, next to the text's file."""
    if not source.is_dir():
        return
    with open_checkpoint(source) as checkpoint:
        if checkpoint.vision is None:
            return
        processor = checkpoint.image_processor()
        if processor is None:
            say(
                f"the encoder of images is left out: {source} has no preprocessor_config.json, "
                "which says how they are prepared",
            )
            return
        break_id = load_tokenizer(checkpoint.tokenizer).vocabulary.id_of.get("[IMG_BREAK]")
        others = {}
        if break_id is not None:  # Pixtral's, which llama.cpp puts at the ends of rows itself
            shape = (checkpoint.config.n_vocab, checkpoint.config.d_model)
            rows = checkpoint.weights(checkpoint.config).matrix("model.embed_tokens.weight", shape)
            others["v.token_embd.img_break"] = dequantize(rows.data[break_id : break_id + 1], rows.type)[0]
        path = target.with_name(f"mmproj-{target.name}")
        try:
            write_mmproj(source, checkpoint.config.d_model, path, processor, others)
        except UnsupportedError as error:
            say(f"the encoder of images is left out: {error}")
            return
    say(f"wrote {path}: the encoder of images")


def source_path(model: str | None) -> Path:
    """The file or directory of a model to convert, fetched by name if it is not a path."""
    return hub.resolve(model)


def quantized_file(source: Path, target: Path, recipe: str, imatrix: Path | None) -> int:
    """Writes a model by a mix or recipe, in silence -> bytes of its tensors."""
    with opened(source, imatrix) as conversion:
        plan = with_recipe(conversion, recipe_named(recipe))
        _note_unmeasured(plan, imatrix)
        write(plan, target, lambda step: None)
        return sum(step.n_bytes for step in plan.steps)


def convert_to_directory(source: Path, target: Path, dtype: str | None, *, as_json: bool) -> None:
    """Writes a GGUF model as a safetensors directory; `dtype` None keeps floats and makes the rest F16."""
    from kukri.tokenizer.huggingface_writer import tokenizer_files

    if source.is_dir():
        raise ConfigError(f"{source} must be a GGUF file, because --to hf makes a directory")
    if target.exists():
        raise ConfigError(f"{target} already exists: name a new directory")
    if dtype is not None and dtype.upper() not in FLOATS:
        raise ConfigError(f"a safetensors directory must hold {', '.join(FLOATS)}, not {dtype!r}")
    with open_checkpoint(source) as checkpoint:
        weights = TakenWeights(checkpoint.weights(checkpoint.config))
        types = {p.type for p in load_model(weights, checkpoint.config).parameters if len(p.shape) > 1}
        kept = types.pop() if len(types) == 1 else "F16"
        made = dtype.upper() if dtype else kept if kept in FLOATS else "F16"
        assert isinstance(checkpoint.tokenizer, GGUFFile)
        text = tokenizer_files(checkpoint.tokenizer)
        text["generation_config.json"] |= generation_keys(checkpoint.sampling)
        n_tensors = len(weights.matrices) + sum(len(experts.weights) for experts in weights.stacks.values())
        with progress_bar(n_tensors) as advance:
            write_directory(target, checkpoint.config, weights, made, text, lambda name: advance(1, name))
        _note_losses(checkpoint, "hf")
    if as_json:
        print(json.dumps({"path": str(target), "type": made, "tensors": n_tensors}))
    else:
        print_facts([("wrote", str(target)), ("type", made)])


def show_recipes() -> None:
    """Prints the recipes that come with kukri."""
    names = shipped_recipes()
    for name in names:
        print(f"{name:<{max(map(len, names)) + 2}}{recipe_named(name).about}")


@contextmanager
def opened(source: Path, imatrix: Path | None = None) -> Iterator[Conversion]:
    """The model's conversion as it is, with the importances in a file."""
    matrix = None if imatrix is None else read_imatrix(imatrix)
    with _as_it_is(source) as conversion:
        if matrix is None or imatrix is None:
            yield conversion
        else:
            yield with_importance(conversion, matrix, imatrix)


@contextmanager
def _as_it_is(source: Path) -> Iterator[Conversion]:
    if not source.is_dir():
        with open_gguf(source) as conversion:
            yield conversion
        return
    from kukri.formats.gguf.config import deep_keys
    from kukri.formats.sentence_transformers import dense_tensors, gguf_keys
    from kukri.tokenizer.gguf_writer import tokenizer_metadata

    with open_checkpoint(source) as checkpoint:
        assert isinstance(checkpoint.tokenizer, TokenizerFiles)
        config, dense = checkpoint.config, checkpoint.dense
        text = tokenizer_metadata(checkpoint.tokenizer) | gguf_keys(config, checkpoint.embedding, dense)
        text |= advice_keys(checkpoint.sampling)
        if checkpoint.vision is not None and checkpoint.vision.deep_layers:  # llama.cpp adds their rows
            text |= deep_keys(config, len(checkpoint.vision.deep_layers))
        _note_losses(checkpoint, "gguf")
        yield of_directory(source, config, checkpoint.weights(config), text, dense_tensors(config, dense))


def _usual_type(conversion: Conversion) -> str:
    """The type that most bytes of the matrices are in."""
    n_bytes: dict[str, int] = {}
    for step in conversion.steps:
        n_bytes[step.source.name] = n_bytes.get(step.source.name, 0) + step.source_bytes
    return max(n_bytes, key=n_bytes.__getitem__)


def check_target(source: Path, target: Path) -> None:
    """Raises ConfigError for a file that cannot be written, or is the source."""
    if target.is_dir():
        raise ConfigError(f"{target} must be a file, not a directory")
    if target.exists() and target.samefile(source):
        raise ConfigError(f"{target} must not be the input: write to another file")
    check_parent(target)


@contextmanager
def progress(plan: Conversion) -> Iterator[Callable[[Step], None]]:
    """A progress bar of bytes read."""
    with progress_bar(sum(step.source_bytes for step in plan.steps)) as advance:
        yield lambda step: advance(step.source_bytes, f"{step.name} ({step.target.name})")


def _note_unmeasured(plan: Conversion, imatrix: Path | None) -> None:
    """Says on stderr which matrices are quantized without importances, if others have some."""
    steps = weighed(plan.steps)
    lacking = [step.name for step in steps if step.importance is None]
    if imatrix is not None and lacking:
        say(
            f"note: {imatrix} has importances for {len(steps) - len(lacking)} of {len(steps)} matrices that "
            f"are quantized; the others are quantized without: {brief_list(lacking, 3)}",
        )


def _report(plan: Conversion, target: Path, *, dry_run: bool, as_json: bool) -> None:
    before, after = (sum(sizes) for sizes in zip(*((s.source_bytes, s.n_bytes) for s in plan.steps)))
    if as_json:
        tensors = [
            {
                "name": s.name,
                "shape": s.shape,
                "from": s.source.name,
                "to": s.target.name,
                "n_bytes": s.n_bytes,
            }
            for s in plan.steps
        ]
        facts = {"path": str(target), "written": not dry_run, "n_bytes_before": before, "n_bytes": after}
        print(json.dumps({**facts, "tensors": tensors}, ensure_ascii=False))
        return
    if dry_run:
        rows = [
            [s.name, " x ".join(map(str, s.shape)), s.source.name, s.target.name, n_bytes_text(s.n_bytes)]
            for s in plan.steps
        ]
        print_table(f"{len(rows)} tensors", ["tensor", "shape", "from", "to", "size"], rows)
        print()
    n_weights = sum(s.n_bytes * 8 / s.target.bits_per_weight for s in plan.steps)
    facts_ = [
        ("would write" if dry_run else "wrote", str(target)),
        ("weights", f"{n_bytes_text(before)} before, {n_bytes_text(after)} after"),
        ("bits", f"{8 * after / n_weights:.2f} per weight"),
    ]
    print_facts(facts_)
    if own := [key for key in plan.metadata if "kukri." in key]:
        say(f"note: other programs ignore kukri's own keys: {', '.join(own)}")
    if twice := requantized(plan.steps):
        say(
            f"note: {len(twice)} tensors were quantized already: their errors add up; convert from the"
            " original weights where you can",
        )
