"""Runs of whole texts with TransformerLens' names: what `LLM.run_with_cache` and `LLM.run_with_hooks` do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any, Literal, cast

import numpy as np

from kukri.engine import Request
from kukri.engine.spans.embedding_spans import EmbeddingSpans
from kukri.errors import RequestError
from kukri.interp.cache import ActivationCache
from kukri.interp.hooks.hook_names import LOGITS, Point
from kukri.interp.hooks.hook_values import Encode, Rows
from kukri.interp.hooks.hook_values import Model as Values
from kukri.interp.hooks.listening import FwdHooks, Listening, Names, NamesFilter, StepListener
from kukri.interp.interventions.catalog import Catalog
from kukri.interp.interventions.intervention import Intervention, resolve
from kukri.interp.interventions.positions import Prompt, TokenBytes
from kukri.interp.interventions.read_limiter import ReadLimiter
from kukri.interp.interventions.request_taps import InterventionTaps, RequestTaps
from kukri.interp.tapes.frozen_tape import FrozenTape
from kukri.interp.tapes.image_tapes import SeeingTape
from kukri.interp.tapes.tape import Matrices, Shared, Tape, Variable
from kukri.interp.text_runner import TextRunner
from kukri.kernels.arrays import FloatArray, IntArray
from kukri.kernels.backend import Backend
from kukri.kernels.cache import KVType
from kukri.kernels.rope_rows import RopeRows
from kukri.kernels.weight_handles import RopeFrequencies
from kukri.models import Adapter, Model
from kukri.models.trace import Trace

Interventions = Sequence[Intervention | Mapping[str, Any]]
ReturnType = Literal["logits", "loss"] | None
_N_ADAPTED = 4  # sessions of adapters that are kept
_STEP_ROWS = 2048  # texts that are only read share steps of about this many tokens


class Session(Names):
    """The interpretability side of one model. `alone()` is entered for each run: no engine step meets it.

    Attributes: config, trace, values, weights, points (every name), texts (the runner), catalog (control
    vectors and what reads activations).
    """

    def __init__(
        self,
        model: Model,
        backend: Backend,
        encode: Encode,
        token_bytes: TokenBytes,
        alone: Callable[[], AbstractContextManager[None]],
        catalog: Catalog | None = None,
        kv_type: KVType | None = None,
        adapter: Adapter | None = None,
    ) -> None:
        """`kv_type` is the type of keys and values in runs; None is the backend's `exact_kv_type`.

        With an `adapter` the session is about the model as it changes it.
        """
        kv_type = kv_type or backend.exact_kv_type
        self.alone, self.model, self._token_bytes = alone, model, token_bytes
        self.trace = Trace(model, None if adapter is None else adapter.updates)
        self._matrices = Shared(Matrices, model.n_parameters)
        self._ropes: dict[RopeFrequencies, RopeRows] = {}
        self.values = Values(model.config, self.trace, kv_type, encode, self._adjusted)
        self.config, self.points, self.weights = model.config, self.values.points, self.values.weights
        self.texts = TextRunner(model, backend, kv_type, adapter)
        self.catalog = Catalog(model.config) if catalog is None else catalog
        self.catalog.backend = backend
        self.catalog.check(self.values)
        self.added: list[Listening] = []  # by add_hook
        self._adapted: dict[Adapter, Session] = {}  # the adapters used last
        self._limiter = ReadLimiter()

    def adapted(self, adapter: Adapter | None) -> Session:
        """The session about the model with an adapter; hooks that are added to one are added to both."""
        if adapter is None:
            return self
        made = self._adapted.pop(adapter, None)
        if made is None:
            texts = self.texts
            made = Session(
                self.model,
                texts.backend,
                self.values.encode,
                self._token_bytes,
                self.alone,
                self.catalog,
                texts.kv_type,
                adapter,
            )
            made.added = self.added
        self._adapted[adapter] = made
        for oldest in [*self._adapted][:-_N_ADAPTED]:
            self._adapted.pop(oldest, None)
        return made

    def values_of(self, request: Request) -> Values:
        """The sources of a request's values: its adapter's weights too."""
        loaded = request.adapter
        return self.adapted(None if loaded is None else loaded.adapter).values

    def _adjusted(self, logits: FloatArray) -> FloatArray:
        """Logits of the head as the model's code caps or divides them."""
        adjust = getattr(self.model, "adjust_logits", None)
        return logits if adjust is None else adjust(Tape(Matrices(), {}), Variable(logits)).x

    @cached_property
    def _order(self) -> dict[str, int]:
        """Taps by their place in a step."""
        return {name: i for i, name in enumerate([*self.trace.taps, LOGITS])}

    def tokens(self, prompt: Any) -> list[IntArray]:
        """The token ids of a text, of ids [T] or [B, T], or of a list of either. Raises RequestError."""
        if isinstance(prompt, str):
            many: list[Any] = [self.values.encode(prompt)]
        elif (
            isinstance(prompt, (list, tuple))
            and prompt
            and isinstance(prompt[0], (str, list, tuple, np.ndarray))
        ):
            many = [self.values.encode(one) if isinstance(one, str) else one for one in prompt]
        else:
            array = np.asarray(prompt)
            many = list(array) if array.ndim == 2 else [array]
        texts: list[IntArray] = []
        for one in many:
            ids = np.asarray(one)
            if ids.ndim != 1 or not len(ids) or ids.dtype.kind not in "iu":
                raise RequestError.of("prompt", "must be a text or token ids (integers), at least one")
            if ids.min() < 0 or ids.max() >= self.config.n_vocab:
                raise RequestError(f"token ids must be from 0 to {self.config.n_vocab - 1}", param="prompt")
            texts.append(ids.astype(np.int32))
        if not texts:
            raise RequestError.of("prompt", "is required: give at least one")
        return texts

    def run_with_cache(
        self,
        prompt: Any,
        names: NamesFilter = None,
        stop_at_layer: int | None = None,
        fwd_hooks: FwdHooks = (),
        return_type: ReturnType = "logits",
        interventions: Interventions = (),
    ) -> tuple[FloatArray | None, ActivationCache]:
        """See LLM.run_with_cache."""
        texts = self.tokens(prompt)
        wanted = self.select(names)
        stop = None if stop_at_layer is None else self._stop(stop_at_layer)
        if stop is not None:
            wanted = [point for point in wanted if self._is_before(point, stop)]
        keep = {tap for point in wanted for tap in point.needs} - {LOGITS}
        output, kept = self._run(texts, fwd_hooks, keep, stop, return_type, wanted, interventions)
        rows = Rows(np.array([len(ids) for ids in texts], np.int32))
        cache = ActivationCache(self.values, kept, rows, np.concatenate(texts), [p.name for p in wanted])
        return output, cache

    def run_with_hooks(
        self,
        prompt: Any,
        fwd_hooks: FwdHooks = (),
        return_type: ReturnType = "logits",
        stop_at_layer: int | None = None,
        interventions: Interventions = (),
    ) -> FloatArray | None:
        """See LLM.run_with_hooks."""
        stop = None if stop_at_layer is None else self._stop(stop_at_layer)
        return self._run(self.tokens(prompt), fwd_hooks, set(), stop, return_type, (), interventions)[0]

    def tape(self, given: Mapping[str, FloatArray] | None = None) -> Any:
        """A run with gradients: a Tape, or a TorchTape on the device if the LLM runs on PyTorch."""
        if self.texts.backend.name not in ("torch", "gpu"):
            return self.array_tape(given)
        from kukri.interp.tapes.torch_tape import TorchTape

        return TorchTape(self._constants(), self.model.cache_layout, given)

    def array_tape(self, given: Mapping[str, FloatArray] | None = None) -> Tape:
        """A run with gradients in NumPy, whatever the LLM runs on."""
        return Tape(self._matrices(), self._ropes, given)

    def seeing_tape(self, spans: EmbeddingSpans) -> SeeingTape:
        """A run of a prompt with images whose rows are known."""
        return SeeingTape(self._matrices(), self._ropes, spans)

    def frozen_tape(
        self, reads: Sequence[str], writes: Sequence[str], skips: Mapping[int, Any]
    ) -> FrozenTape:
        """A run whose attention patterns, norms and MLPs are constants: see FrozenTape."""
        return FrozenTape(self._matrices(), self._ropes, reads, writes, skips)

    @cached_property
    def _constants(self) -> Shared[Any]:
        """The model in float32 on the device."""
        import torch

        from kukri.kernels.pytorch.constants import DeviceConstants

        device = self.texts.backend.device  # type: ignore[attr-defined]
        return Shared(lambda: DeviceConstants(device, torch.float32, sys.maxsize), self.model.n_parameters)

    def listen_to(self, requests: Sequence[Request], names: NamesFilter, fwd_hooks: FwdHooks) -> RequestTaps:
        """Makes a new request listen: see LLM.generate_with_hooks. Raises HookError, RequestError."""
        if len(requests) > 1:
            raise RequestError("hooks require a single answer: leave 'n' and 'best_of' at 1", param="n")
        wanted = [point for point in self.select(names) if names is not None or point.form != "logits"]
        taps = RequestTaps(self.values_of(requests[0]), wanted, [*self.added, *self.listen(fwd_hooks)])
        requests[0].listen(taps)
        return taps

    def intervene(
        self,
        requests: Sequence[Request],
        interventions: Interventions,
        max_bytes: int | None = None,
    ) -> list[InterventionTaps]:
        """Apply interventions to the new requests for one prompt. Raises RequestError."""
        first = requests[0]
        prompt = Prompt(first.prompt, self._token_bytes)
        found = resolve(interventions, self.values, self.catalog, prompt)
        if len(requests) > 1 and (found.captures or found.readings):
            raise RequestError("captures and readouts require 'n' and 'best_of' to be 1", param="n")
        values = self.values_of(first)
        made = [InterventionTaps(values, found, max_bytes, self._limiter) for _ in requests]
        for request, taps in zip(requests, made):
            request.listen(taps)
        return made

    def _run(
        self,
        texts: list[IntArray],
        fwd_hooks: FwdHooks,
        keep: set[str],
        stop: str | None,
        return_type: ReturnType,
        wanted: Sequence[Point],
        interventions: Interventions,
    ) -> tuple[FloatArray | None, dict[str, FloatArray]]:
        """The output, padded, and the taps to keep, as rows."""
        require_return_type(return_type)
        hooks = [*self.added, *self.listen(fwd_hooks)]
        steered = self.steered(texts, interventions)
        if stop is not None:
            keep = keep | {stop}
        needs_logits = stop is None and (
            return_type is not None
            or any(point.form == "logits" for point in wanted)
            or any(h.point.layer is None and h.point.edit_tap != "hook_embed" for h in hooks)
        )
        last = stop
        if not needs_logits and last is None:
            seen = keep.union({h.point.edit_tap for h in hooks}, *(taps.names for taps in steered))
            last = max(seen, key=self._order.__getitem__, default=self.trace.taps[0])
            keep = keep | {last}
        kept: dict[str, list[FloatArray]] = {}
        outputs: list[FloatArray] = []
        with self.alone():
            # hooks see the whole batch; a run that is only read may take several steps
            for group in [texts] if hooks else _groups(texts):
                edits, steered = steered[: len(group)], steered[len(group) :]
                found = self._step(group, hooks, edits, keep, last, needs_logits, outputs)
                for tap, x in found.items():
                    kept.setdefault(tap, []).append(x)
        joined = {tap: parts[0] if len(parts) == 1 else np.concatenate(parts) for tap, parts in kept.items()}
        rows = Rows(np.array([len(ids) for ids in texts], np.int32))
        if stop is not None:
            return rows.padded(joined[stop]), joined
        if not needs_logits:
            return None, joined
        joined[LOGITS] = outputs[0] if len(outputs) == 1 else np.concatenate(outputs)
        if return_type == "logits":
            return rows.padded(joined[LOGITS]), joined
        return (text_loss(joined[LOGITS], texts) if return_type == "loss" else None), joined

    def _step(
        self,
        texts: list[IntArray],
        hooks: list[Listening],
        steered: list[InterventionTaps],
        keep: set[str],
        last: str | None,
        needs_logits: bool,
        outputs: list[FloatArray],
    ) -> dict[str, FloatArray]:
        """Runs some texts, and adds their logits to the outputs."""
        pieces = self.texts.whole(texts)
        rows = Rows(np.array([len(ids) for ids in texts], np.int32))
        listener = StepListener(self.values, rows, np.concatenate(texts), hooks, keep)
        taps = listener.names.union(*(one.names for one in steered))
        ends = np.cumsum(rows.lengths)
        for edits, length in zip(steered, rows.lengths):
            edits.begin(0, length)

        def show(tap: str, x: FloatArray) -> None:
            n = len(x) // ends[-1]  # rows of a token
            for edits, end, length in zip(steered, ends, rows.lengths):
                edits(tap, x[n * (end - length) : n * end])
            listener(tap, x)

        none = np.zeros(0, np.int32)
        logits = self.texts.run(
            pieces, taps, show if steered else listener, logit_rows=None if needs_logits else none, stop=last
        )
        if needs_logits:
            listener(LOGITS, logits)
            outputs.append(logits)
        return {tap: x for tap, x in listener.kept.items() if tap in keep}

    def steered(self, texts: list[IntArray], interventions: Interventions) -> list[InterventionTaps]:
        """The edits of each text; [] if there are none. Raises RequestError."""
        if isinstance(interventions, Sequence) and not interventions:
            return []
        many = [
            resolve(interventions, self.values, self.catalog, Prompt(ids, self._token_bytes)) for ids in texts
        ]
        if any(found.captures or found.readings for found in many):
            raise RequestError.of("interventions", "of a run cannot capture: use names")
        return [InterventionTaps(self.values, found) for found in many]

    def _stop(self, layer: int) -> str:
        """The tap of the stream before a layer. Raises RequestError."""
        n = self.config.n_layers
        at = layer + n if layer < 0 else layer
        if not 0 <= at <= n:
            raise RequestError.of("stop_at_layer", f"must be from {-n} to {n}, not {layer}")
        return f"blocks.{at}.hook_resid_pre" if at < n else f"blocks.{n - 1}.hook_resid_post"

    def _is_before(self, point: Point, stop: str) -> bool:
        """True if a point belongs to the embedding, or to a layer before the tap that ends a run."""
        if point.layer is None:
            return point.form != "logits" and not point.name.startswith(("ln_final", "unembed"))
        tap = f"blocks.{point.layer}.hook_resid_post"
        return self._order[tap] < self._order[stop] or tap == stop


def _groups(texts: list[IntArray]) -> list[list[IntArray]]:
    """The texts in order, in groups of about _STEP_ROWS tokens."""
    groups: list[list[IntArray]] = [[]]
    n = 0
    for ids in texts:
        if groups[-1] and n + len(ids) > _STEP_ROWS:
            groups.append([])
            n = 0
        groups[-1].append(ids)
        n += len(ids)
    return groups


def require_return_type(value: ReturnType) -> None:
    """Raises RequestError on a `return_type` that does not exist."""
    if value not in ("logits", "loss", None):
        raise RequestError.of("return_type", f"must be logits, loss or None, not {value!r}")


def text_loss(logits: FloatArray, texts: Sequence[IntArray]) -> FloatArray:
    """The mean cross-entropy (nats) of each text's tokens after its first."""
    losses: list[float] = []
    start = 0
    for ids in texts:
        rows = logits[start : start + len(ids) - 1].astype(np.float64)
        top = rows.max(axis=1, initial=-np.inf)
        total = np.log(np.exp(rows - top[:, None]).sum(axis=1)) + top
        losses += (total - rows[np.arange(len(rows)), ids[1:]]).tolist()
        start += len(ids)
    return cast("FloatArray", np.float32(np.mean(losses) if losses else np.nan))
