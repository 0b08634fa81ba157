"""Opens a model to run: files, tokenizer, weights, backend and engine, by one set of options."""

from __future__ import annotations

import logging
import os
import platform
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, runtime_checkable

from kukri.config import EngineConfig, ModelConfig
from kukri.dataclass import dataclass, replace
from kukri.engine import Engine
from kukri.engine.engine import cache_type, engine_layout
from kukri.engine.kv_size import KVCost, choose_kv_size
from kukri.engine.model_identity import model_identity, weights_identity
from kukri.errors import ConfigError, FormatError
from kukri.formats import hub
from kukri.formats.checkpoint import Checkpoint, open_checkpoint
from kukri.kernels import choose_backend, make_backend
from kukri.kernels.backend import Backend
from kukri.models import Model, load_model
from kukri.opening.memory import (
    all_state_bytes,
    can_choose,
    check_drafts,
    engine_options,
    fitted,
    holds_enough,
    is_open_name,
    stretched,
    weight_bytes,
)
from kukri.opening.model_options import READERS, ModelOptions
from kukri.sampling import SamplingParams, default_params
from kukri.tasks.embedding import TextEncoder
from kukri.tasks.late_interaction import as_encoder
from kukri.tokenizer import Tokenizer, load_tokenizer

if TYPE_CHECKING:  # modules that only some models need are imported where they are used
    from kukri.engine.draft_model import DraftSource
    from kukri.engine.spans.encoder import SpanEncoder
    from kukri.sound.whisper import WhisperEncoder
    from kukri.stages.backend import StagedBackend
    from kukri.vision.encoder import VisionModel
    from kukri.vision.processors import ImageProcessor

logger = logging.getLogger("kukri.opening.loading")

# progress(bytes of weights ready, bytes of all): called now and then while a model is loaded
Progress = Callable[[int, int], None]


@runtime_checkable
class PacksWeights(Protocol):
    """A backend that tells how many bytes of weights it has just packed."""

    on_packed: Callable[[int], None] | None


@dataclass(frozen=True)
class ReadModel:
    """A model as its files state it, whose weights are mapped and not yet packed for a backend."""

    path: Path
    config: ModelConfig  # as the files state it
    tokenizer: Tokenizer
    model: Model
    vision: VisionModel | None  # the encoder of images, of a model that sees
    sound: WhisperEncoder | None  # the encoder of sound, of a model that hears
    image_processor: ImageProcessor | None  # prepares images for it
    mmproj: Path | None  # the encoder's file, if it is a separate one
    default_params: SamplingParams  # as the files advise
    text_encoder: TextEncoder


@dataclass(frozen=True)
class LoadedModel(ReadModel):
    """A model in memory, on its backend. A head for a task has no engine."""

    options: ModelOptions  # with the options that were chosen for the memory
    engine_config: EngineConfig
    backend: Backend
    engine: Engine


_MAX_SPARE_THREADS = 32  # allowed on any machine, though more than it has cores only slow it down
_MAX_TEXTS = 64  # most texts that an encoder reads side by side: short ones share a step
# models cut into stages
_STAGE_CONTEXT = 4096  # tokens for whose keys and values each stage should have room
_STAGE_OPTIONS = ("max_context", "rope_scaling", "rope_factor", "backend", "quantize")
_ALONE = ("adapters", "prefix_dir", *READERS)


def open_model(options: ModelOptions, progress: Progress | None = None) -> LoadedModel:
    """Loads a model and makes its engine. Raises KukriError on options or files that do not work.

    The size of the KV cache is logged; a context cut for want of free memory is a warning.
    """
    chooses = options.fit and can_choose(options)
    if chooses and is_open_name(options.model):  # before anything is downloaded
        return open_model(fitted(options), progress)
    n_cores = os.cpu_count() or 1
    if options.n_threads is not None and options.n_threads > max(n_cores, _MAX_SPARE_THREADS):
        raise ConfigError(
            f"'n_threads' (--threads) must be at most {n_cores}, the cores of this machine, not "
            f"{options.n_threads}: leave it out to use the cores that this process may use"
        )
    is_cut = options.stages != 1 or bool(options.devices)
    if is_cut:
        _check_stages(options)
    backend_name, device = choose_backend(options.backend, (options.devices or (options.device,))[-1])
    engine_config = engine_options(options, backend_name, device)
    if options.prefix_dir is None and options.prefix_bytes is not None:
        raise ConfigError("'prefix_bytes' (--prefix-size) requires 'prefix_dir' (--prefix-dir)")
    if options.devices or not isinstance(options.stages, int):
        # stages on several processors run at the same time; on one machine they take turns at its cores
        engine_config = replace(engine_config, max_in_flight=_n_stages(options))
    read = read_model(options)
    if chooses and read.config.is_causal and not holds_enough(engine_config, read.model):
        return open_model(fitted(options), progress)
    check_drafts(read.path, read.config, options)
    draft = None if options.draft_model is None else _draft_source(options.draft_model, options, read)
    if not read.config.is_causal:
        engine_config = replace(engine_config, max_requests=options.max_requests or _MAX_TEXTS)
    return _on_backend(options, read, draft, engine_config, progress)


def _on_backend(
    options: ModelOptions,
    read: ReadModel,
    draft: DraftSource | None,
    engine_config: EngineConfig,
    progress: Progress | None,
) -> LoadedModel:
    """Loads a model that has been read onto the configuration's backend, and makes its engine."""
    tokenizer, model = read.tokenizer, read.model
    backend = make_backend(engine_config.backend, engine_config.n_threads, engine_config.device)
    local = backend
    if options.stages != 1 or options.devices:
        backend = _staged(options, read, engine_config, local)
    model.bind(backend)
    models = [model] if draft is None else [model, draft.model]
    if progress is not None:
        _report_packing(backend, models, progress)
    engine_config = _sized(engine_config, models, backend)
    identity = b""
    if options.prefix_dir is not None and read.config.is_causal:
        kv_type, directory = cache_type(engine_config, backend), Path(options.prefix_dir).expanduser()
        files = (read.path, *([read.mmproj] if read.mmproj else []))
        identity = model_identity(files, model.config, options.quantize, kv_type, backend, directory)
    engine = Engine(
        model,
        backend,
        engine_config,
        eos_ids=tokenizer.eos_ids,
        draft=None if draft is None else draft._replace(backend=local),
        identity=identity,
        encoders=_encoders(read, backend) if backend is local else (),
    )
    for name, adapter in options.adapters.items():
        from kukri.formats.adapters import read_adapter

        engine.load_adapter(name, read_adapter(Path(adapter).expanduser(), model))
    if not engine.maker.encoders:
        read = replace(read, image_processor=None)
    return LoadedModel(
        **vars(read), options=options, engine_config=engine_config, backend=backend, engine=engine
    )


def _encoders(read: ReadModel, backend: Backend) -> list[SpanEncoder]:
    """The encoders of what the model reads besides text."""
    if read.sound is not None:
        from kukri.engine.spans.sounds import SoundEncoder

        return [SoundEncoder(read.sound, backend)]
    if read.vision is None:
        return []
    from kukri.engine.spans.images import ImageEncoder

    return [ImageEncoder(read.vision, backend)]


def read_model(options: ModelOptions) -> ReadModel:
    """Reads a model's files, without its weights. Raises KukriError on files that do not work."""
    path = hub.resolve(options.model)
    mmproj = None if options.mmproj is None else Path(options.mmproj).expanduser()
    with open_checkpoint(path, options.quantize, mmproj) as checkpoint:
        defaults = default_params(checkpoint.sampling or hub.known_sampling(path))
        config = _config(checkpoint, options)
        tokenizer = load_tokenizer(checkpoint.tokenizer)
        if options.chat_template is not None:
            tokenizer.chat_template = options.chat_template
        if tokenizer.n_vocab != config.n_vocab:
            raise FormatError(
                f"the tokenizer has {tokenizer.n_vocab} tokens, but the embedding must have as many rows, "
                f"not {config.n_vocab}",
                path=path,
            )
        used = _within(config, options.max_context)
        model = load_model(checkpoint.weights(used), used)
        vision = checkpoint.load_vision()
        image_processor = None if vision is None else checkpoint.image_processor()
        sound = checkpoint.load_sound()
        text_encoder = TextEncoder(
            model, tokenizer, checkpoint.embedding, checkpoint.dense, options.max_context
        )
    return ReadModel(
        *(path, config, tokenizer, model, vision, sound, image_processor, checkpoint.mmproj, defaults),
        text_encoder,
    )


def _config(checkpoint: Checkpoint, options: ModelOptions) -> ModelConfig:
    """The configuration that a model runs with, its context aside."""
    config = stretched(checkpoint.config, options.rope_scaling, options.rope_factor)
    return as_encoder(config, checkpoint.embedding.late)


def read_weights(path: Path, options: ModelOptions) -> tuple[ModelConfig, Model]:
    """A model without its tokenizer, its weights mapped, and the configuration. Raises KukriError."""
    with open_checkpoint(path, options.quantize) as checkpoint:
        config = _config(checkpoint, options)
        used = _within(config, options.max_context)
        return config, load_model(checkpoint.weights(used), used)


def _check_stages(options: ModelOptions) -> None:
    """Raises ConfigError on options that a model in several processes does not take."""
    given = [name for name in _ALONE if getattr(options, name)]
    if given:
        names = ", ".join(given)
        raise ConfigError(f"{names} cannot be combined with stages (--stages)")
    if options.devices and options.device is not None:
        raise ConfigError("'device' cannot be combined with 'devices' (--devices), one for each stage")


def _draft_source(name: str | os.PathLike[str], options: ModelOptions, read: ReadModel) -> DraftSource:
    """Reads what drafts for a model. Raises KukriError if it cannot."""
    from kukri.engine.draft_kinds import LargerModel, read_draft_source
    from kukri.models.next_token import RowReader

    larger = LargerModel(read.path, options.quantize, read.model, read.tokenizer)
    source = read_draft_source(name, larger)
    if isinstance(source.model, RowReader) and (options.stages != 1 or options.devices):
        raise ConfigError("this draft model cannot be combined with stages (--stages)")
    return source


def _n_stages(options: ModelOptions) -> int:
    """The stages of a model on devices or elsewhere."""
    if isinstance(options.stages, int):
        return len(options.devices)
    return len(options.stages) + 1 if isinstance(options.stages, tuple) else options.stages.n_stages


def _staged(options: ModelOptions, read: ReadModel, config: EngineConfig, local: Backend) -> StagedBackend:
    """The backend of a model that is cut into stages, the last of them on `local`. Raises KukriError."""
    from kukri.kernels.cpu.run.read_speed import measure_read_speed
    from kukri.stages.backend import StagedBackend
    from kukri.stages.cut import StageRoom
    from kukri.stages.pipeline import SPEED_TEST, open_pipeline
    from kukri.stages.sources import stage_source

    kv_type, layout = cache_type(config, local), read.model.cache_layout
    page_bytes = [local.page_bytes([layer], kv_type) for layer in layout]
    n_context = min(options.max_context or read.model.config.max_context, _STAGE_CONTEXT)
    n_pages = -(-n_context // local.page_tokens)
    if options.kv_bytes is not None:
        n_pages = options.kv_bytes // max(sum(page_bytes), 1)
    n_bytes = sum(parameter.n_bytes for parameter in read.model.parameters) + n_pages * sum(page_bytes)
    n_devices, n_layers = len(options.devices), read.config.n_layers
    source = stage_source(options.stages, n_devices, n_layers, n_bytes, options.n_threads)
    pipeline = open_pipeline(source)
    try:
        n_own = len(pipeline) + 1  # stages of this machine
        if source.is_remote:
            rooms = [
                *pipeline.rooms,
                StageRoom(
                    local.free_bytes(), measure_read_speed(config.n_threads, *SPEED_TEST), platform.node()
                ),
            ]
            devices: list[str | None] = [options.device] * len(pipeline)
        else:
            names = options.devices or [config.device or ""] * n_own
            backends = [make_backend(config.backend, device=name or None) for name in names]
            rooms = [StageRoom(b.free_bytes(), memory=name) for b, name in zip(backends, names)]
            devices = [name or None for name in names[:-1]]
        model = options.model if source.is_remote else str(read.path)
        opened = {"model": model, "n_threads": None if source.is_remote else config.n_threads}
        opened |= {name: getattr(options, name) for name in _STAGE_OPTIONS}
        identity = weights_identity(read.path, read.config, options.quantize)
        openings = [{"options": {**opened, "device": device}, "identity": identity} for device in devices]
        cache_bytes = [n_pages * n for n in page_bytes]
        return StagedBackend(local, read.model, pipeline, openings, cache_bytes, rooms)
    except BaseException:
        pipeline.close()
        source.close()
        raise


def _sized(config: EngineConfig, models: list[Model], backend: Backend) -> EngineConfig:
    """The configuration with a KV pool, and a context, that the free memory holds."""
    kv_type = cache_type(config, backend)
    if config.kv_bytes is None and not models[0].config.is_causal:
        config = replace(config, kv_bytes=_encoder_kv_bytes(config, models[0], backend))
    cost = KVCost.of(backend, engine_layout(models[0], config), kv_type, config.max_step_tokens)
    both = cost.with_others([backend.page_bytes(m.cache_layout, kv_type) for m in models[1:]])
    free_bytes = backend.free_bytes()
    if config.device is None:
        n_bytes = sum(weight_bytes(m.parameters, is_tied=m.config.tie_embeddings) for m in models)
    else:
        n_bytes = sum(parameter.n_bytes for m in models for parameter in m.parameters)
        _check_fits(config, n_bytes, both.page_bytes, free_bytes)
    context = config.max_context or models[0].config.max_context
    n_bytes += all_state_bytes(config, models[0].cache_layout, context, backend.page_tokens)
    size = choose_kv_size(
        cost=both,
        model_context=models[0].config.max_context,
        max_context=config.max_context,
        max_requests=config.max_requests,
        kv_bytes=config.kv_bytes,
        free_bytes=free_bytes - n_bytes,  # yet to be taken
    )
    sizes = both.pool_sizes(size.n_bytes, config.max_requests, size.max_context)
    logger.info(
        "KV cache: %.2f GiB for %d tokens, %d requests at a time of up to %d",
        *(size.n_bytes / 2**30, sizes[0] * backend.page_tokens, config.max_requests, size.max_context),
    )
    if size.note:
        logger.log(logging.WARNING if config.kv_bytes is None else logging.INFO, "%s", size.note)
    return replace(config, max_context=size.max_context, kv_bytes=cost.n_bytes(sizes[-len(cost.pools) :]))


def _check_fits(config: EngineConfig, weight_bytes: int, page_bytes: int, free_bytes: int) -> None:
    """Raises ConfigError if a device cannot hold the weights and a KV cache, of the size chosen or a page."""
    kv_bytes = config.kv_bytes or page_bytes
    if weight_bytes + kv_bytes > free_bytes:
        raise ConfigError(
            f"{config.device} must have more than {free_bytes / 2**30:.2f} GiB of free memory for "
            f"{weight_bytes / 2**30:.2f} GiB of weights and a KV cache of {kv_bytes / 2**30:.2f} GiB "
            "or more: choose a smaller weight type, a smaller --kv-memory (kv_bytes), or --device cpu "
            "(device)"
        )


def _encoder_kv_bytes(config: EngineConfig, encoder: Model, backend: Backend) -> int:
    """Return the bytes of an encoder's cache: pages for the texts of one step, which then frees them."""
    n_tokens = max(config.max_step_tokens, config.max_context or encoder.config.max_context)
    n_pages = n_tokens // backend.page_tokens + config.max_requests
    return n_pages * backend.page_bytes(encoder.cache_layout, cache_type(config, backend))


def _report_packing(backend: Backend, models: list[Model], progress: Progress) -> None:
    """Has the backend, if it packs weights, tell how much is packed."""
    if not isinstance(backend, PacksWeights):
        return
    total = sum(parameter.n_bytes for m in models for parameter in m.parameters)
    done = 0

    def add(n_bytes: int) -> None:
        nonlocal done
        done += n_bytes
        progress(min(done, total), total)

    progress(0, total)
    backend.on_packed = add


def _within(config: ModelConfig, max_context: int | None) -> ModelConfig:
    """The configuration with the context that will be used, so that tables are no longer than that."""
    if max_context is None:
        return config
    if max_context > config.max_context:
        remedy = "use --rope-scaling with --rope-factor (rope_scaling, rope_factor)"
        if not config.rope.rotary_dim:
            remedy = f"use at most {config.max_context}"
        raise ConfigError(
            f"'max_context' must be at most the model's {config.max_context} tokens, not {max_context}: "
            f"{remedy}"
        )
    return replace(config, max_context=max_context)
