"""The memory that a model takes, by the headers of its files, and the choice of options that fits."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from kukri.config import EngineConfig, KVType, ModelConfig
from kukri.dataclass import dataclass, fields, replace
from kukri.engine.engine import state_slots
from kukri.engine.kv_size import MIN_CONTEXT, KVCost, gib, most_kv_bytes
from kukri.errors import ConfigError, UnsupportedError
from kukri.formats import hub
from kukri.formats.checkpoint import check_packing
from kukri.formats.model_cache import cached_path
from kukri.formats.repos import alternatives, fetch_headers, parse_name
from kukri.host.hardware import available_bytes
from kukri.kernels import choose_backend
from kukri.kernels.cache import CacheLayout, without_windows
from kukri.kernels.paged_kv import PAGE_TOKENS, state_bytes
from kukri.kernels.vectors import in_vectors
from kukri.models import Model
from kukri.models.rope import with_scaling
from kukri.models.weights import Parameter
from kukri.opening.model_options import ModelOptions
from kukri.quant.mixes import FILE_TYPES
from kukri.quant.types import QUANT_TYPES, QuantType, fitting_type

if TYPE_CHECKING:  # modules that a start from a GGUF file does not need are imported where they are used
    from kukri.formats.headers import Headers, StoredTensor

_log = logging.getLogger("kukri.opening.memory")
_MAX_REQUESTS = 16  # side by side; more gain little on a CPU, whose steps are bound by arithmetic then
_LOGIT_ROWS = 64  # the most rows that a step computes besides its requests' rows
_EMBEDDING = re.compile(r"token_embd\.weight|(?:.+\.)?embed_tokens\.weight")
_LAYER_EMBEDDING = re.compile(r"per_layer_token_embd\.weight|(?:.+\.)?embed_tokens_per_layer\.weight")
# the options that a choice changes, in order; types that lose more must be asked for
_KV_TYPES: tuple[KVType, ...] = ("f16", "q8_0")
_PACKED = ("Q8_0", "Q6_K", "Q5_K", "Q4_K")
_FLOATS = ("F32", "F16", "BF16")
_ENOUGH = (32_768, 4_096, MIN_CONTEXT)  # tokens of context, for which all types are tried in turn
_CONTEXTS = (4_096, 32_768)  # tokens, of rows in the table of choices


@dataclass(frozen=True)
class Estimate:
    """Bytes that a model takes with its options besides keys and values, whose `cost` it has."""

    config: ModelConfig
    engine: EngineConfig
    context: int  # tokens of the longest request
    cost: KVCost
    weight_bytes: int  # tiles, and the rows of the embedding
    state_bytes: int  # recurrent states of requests and snapshots
    step_bytes: int  # activations and logits of the largest step


def estimate(headers: Headers, options: ModelOptions) -> Estimate:
    """The estimate for a model. Raises KukriError if it cannot run, or not with these options."""
    if headers.config is None or headers.problem is not None:
        raise headers.problem or UnsupportedError(f"{headers.path} is not a model that is supported")
    config = stretched(headers.config, options.rope_scaling, options.rope_factor)
    check_drafts(headers.path, config, options)
    context = min(options.max_context or config.max_context, config.max_context)
    engine, layout = engine_options(options), headers.cache_layout
    states = all_state_bytes(engine, layout, context)
    layout = layout if engine.prefix_dir is None else without_windows(layout)
    cost = KVCost.on_host(layout, engine.kv_type, engine.max_step_tokens)
    n_bytes = weight_bytes(headers.tensors, is_tied=config.tie_embeddings, quantize=options.quantize)
    n_bytes += sum(_file_bytes(Path(adapter).expanduser()) for adapter in options.adapters.values())
    if (draft := draft_file(options)) is not None:
        from kukri.formats.headers import read_headers

        small = read_headers(hub.resolve(draft, compares=False))
        is_tied = small.config is not None and small.config.tie_embeddings
        n_bytes += weight_bytes(small.tensors, is_tied=is_tied)
    n_values = (engine.max_requests + _LOGIT_ROWS) * config.n_vocab
    n_values += engine.max_step_tokens * (6 * config.d_model + 3 * config.d_ffn)
    return Estimate(config, engine, context, cost, n_bytes, states, 4 * n_values)


@dataclass(frozen=True)
class MemoryNeed:
    """Bytes that a model takes once it is loaded, with a KV pool for all its requests."""

    weight_bytes: int
    other_bytes: int
    kv_bytes: int  # size of the KV pool
    max_context: int | None  # as the options say, but for no more tokens than the model's context

    @property
    def n_bytes(self) -> int:
        """Bytes of all."""
        return self.weight_bytes + self.other_bytes + self.kv_bytes


def memory_need(options: ModelOptions, most_kv_bytes: int | None = None) -> MemoryNeed:
    """The memory that a model will take, of which `most_kv_bytes` for keys and values unless its options say.

    Reads only headers; a model that is not cached is fetched. Raises KukriError if it cannot run, or not with
    these options.
    """
    from kukri.formats.headers import read_headers

    path = hub.resolve(options.model, compares=False)
    check_packing(path, options.quantize, options.mmproj)
    found = estimate(read_headers(path), options)
    kv_bytes = options.kv_bytes
    if kv_bytes is None:
        kv_bytes = found.cost.n_bytes(found.cost.wanted(found.engine.max_requests, found.context))
        kv_bytes = kv_bytes if most_kv_bytes is None else min(kv_bytes, most_kv_bytes)
    max_context = found.context if options.max_context else None
    return MemoryNeed(found.weight_bytes, found.state_bytes + found.step_bytes, kv_bytes, max_context)


def engine_options(options: ModelOptions, backend: str = "cpu", device: str | None = None) -> EngineConfig:
    """The engine's options among a model's. Raises ConfigError."""
    named = {one.name: getattr(options, one.name, None) for one in fields(EngineConfig)}
    return EngineConfig(
        **{name: value for name, value in named.items() if value is not None}
        | {
            "backend": backend,
            "device": device,
            "max_requests": options.max_requests or _MAX_REQUESTS,
            "caches_prefixes": options.prefix_cache,
            "speculation": options.speculation or ("ngram" if options.draft_model is None else "draft"),
        }
    )


def weight_bytes(
    tensors: Iterable[StoredTensor | Parameter], *, is_tied: bool, quantize: str | None = None
) -> int:
    """Return the bytes of a model's weights in memory: tiles, and the rows of the embedding.

    Matrices that are packed to `quantize` while loading are there twice, because the model keeps their rows.
    """
    target: QuantType | None = None
    total = 0
    if quantize is not None:
        from kukri.formats.huggingface.weights import is_packed, packed_type

        target = packed_type(quantize)
    for tensor in tensors:
        if _LAYER_EMBEDDING.fullmatch(tensor.name):  # steps read their rows from the file
            continue
        shape, kind, rows = tensor.shape, QUANT_TYPES.get(tensor.type), tensor.n_bytes
        packed = target and is_packed(tensor.name, shape) and fitting_type(target, shape[-1])
        if packed:
            kind, rows = packed, prod(shape[:-1]) * packed.row_bytes(shape[-1])
        is_embedding = _EMBEDDING.fullmatch(tensor.name) is not None
        if packed or is_embedding:
            total += rows
        if not is_embedding or is_tied:
            if len(shape) < 2:  # float32 in every model
                rows = 4 * tensor.n_parameters
            elif kind is not None:
                rows = int(tensor.n_parameters * kind.tiles.bits_per_weight / 8)
            total += rows
    return total


def all_state_bytes(config: EngineConfig, layout: CacheLayout, context: int, page: int = PAGE_TOKENS) -> int:
    """Return the bytes of recurrent states and their snapshots, of which there are no more than pages."""
    n_pages = config.max_requests * -(-context // page)
    return state_slots(config, layout, n_pages) * state_bytes(in_vectors(layout))


def draft_file(options: ModelOptions) -> str | None:
    """Return the draft model that has separate files; None without one."""
    from kukri.engine.draft_kinds import is_own_part

    name = options.draft_model
    return None if name is None or is_own_part(name) else name


def _file_bytes(path: Path) -> int:
    """Bytes of a file, or of the files of a directory; 0 if there is none."""
    files = path.iterdir() if path.is_dir() else [path]
    return sum(file.stat().st_size for file in files if file.is_file())


def stretched(config: ModelConfig, kind: str | None, factor: float | None) -> ModelConfig:
    """The configuration with the RoPE scaling that the user chose."""
    if kind is None and factor is None:
        return config
    if kind is None or factor is None:
        raise ConfigError("'rope_scaling' and 'rope_factor' are required together: give both, or neither")
    return with_scaling(config, kind, factor)


def check_drafts(path: Path, config: ModelConfig, options: ModelOptions) -> None:
    """Raises ConfigError on a draft model for an encoder."""
    if options.draft_model is not None and not config.is_causal:
        raise ConfigError(f"'draft_model' is not supported: {path} is an encoder and generates no text")


# --- the choice


@dataclass(frozen=True)
class Choice:
    """Options with a weight type and a KV type, and a context that is wanted with them, in tokens."""

    options: ModelOptions
    weights: str  # the weight type
    context: int
    free_bytes: int
    found: Estimate

    @property
    def kv_type(self) -> KVType:
        """The KV type."""
        return self.found.engine.kv_type

    @property
    def most_kv_bytes(self) -> int:
        """Bytes of the largest KV pool that fits, or of the user's own."""
        taken = self.found.weight_bytes + self.found.state_bytes
        return self.options.kv_bytes or most_kv_bytes(self.free_bytes - taken)

    @property
    def longest(self) -> int:
        """Tokens of the longest context that fits."""
        return self.found.cost.longest(self.most_kv_bytes)

    @property
    def kv_bytes(self) -> int:
        """Bytes of the keys and values of one context."""
        return self.found.cost.n_bytes(self.found.cost.wanted(1, self.context))

    @property
    def n_bytes(self) -> int:
        """Bytes of all."""
        return self.found.weight_bytes + self.found.state_bytes + self.found.step_bytes + self.kv_bytes


def can_choose(options: ModelOptions) -> bool:
    """True if a model is to run on this machine's CPU alone, for whose memory options are chosen."""
    backend, device = choose_backend(options.backend, options.device)
    is_whole = options.stages == 1 and not options.devices
    return options.fit and is_whole and device is None and backend in ("cpu", "portable")


def is_open_name(model: str | None) -> bool:
    """True for a repository of the hub that leaves a choice of files, or is not in the cache."""
    repo = None if model is None else parse_name(model)
    if model is None or repo is None or Path(model).exists():
        return False
    try:
        return cached_path(model).suffix == ".gguf" and repo.choice is None
    except UnsupportedError:
        return True


def holds_enough(config: EngineConfig, model: Model) -> bool:
    """True if the CPU's free memory holds a mapped model with all or enough of its context."""
    layout, context = model.cache_layout, config.max_context or model.config.max_context
    taken = weight_bytes(model.parameters, is_tied=model.config.tie_embeddings)
    taken += all_state_bytes(config, layout, context)
    cost = KVCost.on_host(layout, config.kv_type, config.max_step_tokens)
    longest = cost.longest(config.kv_bytes or most_kv_bytes(available_bytes() - taken))
    return longest >= (config.max_context or min(context, _ENOUGH[0]))


def fitted(options: ModelOptions) -> ModelOptions:
    """Return the options with the choice that fits the free memory, which is logged if it is not the default.

    Raises ConfigError if nothing fits, and KukriError if the model cannot run.
    """
    found: list[Choice] = []
    for one in _choices(options):
        found.append(one)
        if one.longest >= (options.max_context or min(one.context, _ENOUGH[0])):
            break  # headers of other files are not fetched
    if not found:
        return replace(options, fit=False)
    chosen, reason = _chosen(found, options)
    if reason:
        _log.warning("%s", reason)
    kv_bytes = options.kv_bytes
    if chosen is not found[0] and kv_bytes is None:  # so that loading has nothing left to say
        wanted = chosen.found.cost.wanted(chosen.found.engine.max_requests, chosen.context)
        kv_bytes = min(chosen.found.cost.n_bytes(wanted), chosen.most_kv_bytes)
    return replace(chosen.options, fit=False, kv_bytes=kv_bytes)


def table_of_choices(options: ModelOptions) -> tuple[list[Choice], Choice | None, str]:
    """Return the choices at several contexts, the one of them that `fitted` takes, and why; "": by default.

    None is taken if nothing fits. Raises UnsupportedError for an encoder, and KukriError if the model cannot
    run.
    """
    found, chosen = list(_choices(options)), None
    if not found:
        raise UnsupportedError(f"{options.model!r} is not supported by fit: an encoder has no choice")
    try:
        chosen, reason = _chosen(found, options)
        chosen = replace(chosen, context=min(chosen.context, chosen.longest))
    except ConfigError as error:
        reason = str(error)
    rows = []
    for one in found:
        contexts = {one.context} if options.max_context else {*_CONTEXTS, one.context}
        if chosen is not None and chosen.options == one.options:
            contexts.add(chosen.context)
        rows += [replace(one, context=n) for n in sorted(contexts) if n <= one.context]
    return rows, chosen, reason


def _chosen(found: list[Choice], options: ModelOptions) -> tuple[Choice, str]:
    """Return the first choice with enough context, and why it is not the default; "" if it is.

    The first of `found` is the default. Raises ConfigError if none fits.
    """
    first, name, free = found[0], options.model or hub.DEFAULT_MODEL, gib(found[0].free_bytes)
    for enough in (options.max_context,) if options.max_context else _ENOUGH:
        one = next((one for one in found if one.longest >= min(enough, one.context)), None)
        if one is None:
            continue
        what = f"{one.options.model or name}: {one.weights} weights"
        if one is first:
            reason = f"{what} are chosen, because the name leaves it open and {free} of memory are free"
            return one, "" if one.options.model == options.model else reason
        less = f"hold {first.longest:,} tokens" if first.longest >= MIN_CONTEXT else "do not fit"
        return one, (
            f"{what}, {one.kv_type} keys and values and {min(one.longest, one.context):,} of {one.context:,} "
            f"tokens of context are chosen, because {free} of memory are free, where {first.weights} and "
            f"{first.kv_type} {less}; --quantize, --kv-type and --max-context choose otherwise"
        )
    best, small = max(found, key=lambda one: one.longest), min(found, key=lambda one: one.found.weight_bytes)
    if options.max_context and best.longest >= MIN_CONTEXT:
        raise ConfigError(
            f"'max_context' (--max-context) must be at most {best.longest:,} for {name!r} in {free} of free "
            f"memory, with {best.weights} weights and {best.kv_type} keys and values, because "
            f"{best.context:,} tokens take {gib(best.n_bytes)}"
        )
    kv_bytes = replace(small, context=MIN_CONTEXT).kv_bytes
    raise ConfigError(
        f"{name!r} is not supported in {free} of free memory, because {small.weights} weights take "
        f"{gib(small.found.weight_bytes)} and {MIN_CONTEXT} tokens {gib(kv_bytes)}: choose a model with at "
        f"most {gib(small.free_bytes - 2 * kv_bytes)} of weights"
    )


def _choices(options: ModelOptions) -> Iterator[Choice]:
    """The choices that options leave, the default first; none of an encoder."""
    free_bytes = available_bytes()
    for headers, weights, given in _weights(options):
        for kv_type in (options.kv_type,) if options.kv_type else _KV_TYPES:
            one = replace(given, kv_type=kv_type)
            try:
                found = estimate(headers, one)
            except UnsupportedError:  # heads that are not whole blocks
                if kv_type == (options.kv_type or _KV_TYPES[0]):
                    raise
                continue
            if found.config.is_causal:
                yield Choice(one, weights, found.context, free_bytes, found)


def _weights(options: ModelOptions) -> Iterator[tuple[Headers, str, ModelOptions]]:
    """The headers, weight type and options of each of a model's files, or of types to pack weights to."""
    repo = parse_name(options.model) if options.model is not None and is_open_name(options.model) else None
    if repo is None:
        yield from _packings(hub.resolve(options.model, compares=False), options)
        return
    from tempfile import TemporaryDirectory

    for name in alternatives(repo):
        named = options if name == repo else replace(options, model=str(name))
        with TemporaryDirectory(prefix="kukri-fit-") as folder:
            yield from list(_packings(fetch_headers(name, Path(folder)), named))


def _packings(path: Path, options: ModelOptions) -> Iterator[tuple[Headers, str, ModelOptions]]:
    from kukri.formats.headers import read_headers

    check_packing(path, options.quantize, options.mmproj)
    headers, counts = read_headers(path), dict[str, int]()
    for tensor in headers.tensors:
        counts[tensor.type] = counts.get(tensor.type, 0) + tensor.n_parameters
    most = max(counts, key=lambda kind: counts[kind], default="-")
    stored = FILE_TYPES.get(headers.stated.get("general.file_type", -1), most)
    yield headers, options.quantize or stored, options
    if path.is_dir() and options.quantize is None and stored in _FLOATS:
        for kind in _PACKED:
            yield headers, kind, replace(options, quantize=kind)
