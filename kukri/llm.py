"""Offline generation: text in, text out, from any number of threads.

Calls under way are in `kukri.calls`; models are opened in `kukri.loading`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

from kukri.calls import EngineCalls, Message, Prompt, close_matches, is_many
from kukri.config import Pooling, Speculation
from kukri.embedding import Ranked, check_pooling, ranked
from kukri.engine import Engine
from kukri.errors import HookError, KukriError, RequestError
from kukri.formats.adapters import read_adapter
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVType
from kukri.kernels.taps import Hook
from kukri.loading import BackendName, ModelOptions, Progress, open_model
from kukri.models import Forward, tap_names
from kukri.results import Chunk, Result
from kukri.sampling import SamplingOptions, SamplingParams
from kukri.tokenizer import ChatTemplate

if TYPE_CHECKING:
    from kukri.calls import Intervene
    from kukri.interp.cache import ActivationCache
    from kukri.interp.interventions import Intervention
    from kukri.interp.listening import PointHook
    from kukri.interp.session import FwdHooks, NamesFilter, ReturnType, Session
    from kukri.interp.weights import Weights
    from kukri.stages.sources import StagePlacer
    from kukri.tasks import Label, Span, TokenLabel

    Interventions = Sequence[Intervention | Mapping[str, Any]]


class LLM:
    """A model loaded from a file, ready to generate. Threads may share it: their calls run as one batch.

    `model` is a known name, the path of a .gguf file or of a directory with safetensors, or None for the
    default model; a known name is fetched when it is not in the cache. `quantize`, "Q8_0", "Q4_K" …, packs a
    directory's matrices while they are loaded. `max_context` (tokens) limits prompt and answer together, None
    for the model's own limit, or less if memory is short, which is logged as a warning; `n_threads` None
    takes the cores this process may use. `device` is "cpu", "cuda", "cuda:1", "mps", "xpu", or "auto" for the
    first GPU if there is one; all but the CPU need PyTorch (`pip install "kukri[gpu]"`). `backend` follows
    from it, but "torch" runs on PyTorch on the CPU too, and "reference" in NumPy, for checks. A prompt is
    read in steps of `max_step_tokens`. Up to `max_requests` requests, None for 16, run side by side, in a KV
    cache of `kv_bytes`; None takes what as many contexts need, as far as memory is free. Its numbers are
    float16, q8_0, q4, float32, or fp8 on the torch and gpu backends. `rope_scaling`, "linear", "dynamic" or
    "yarn", stretches the model's context `rope_factor` times. `adapters` are LoRA adapters by name,
    directories of PEFT or GGUF files, which requests choose by `adapter`. `speculation` computes drafts
    beside a token, which change none, unless a request says otherwise: "ngram" looks them up in the text,
    "draft" runs `draft_model`, a small model of the same tokens; "off" does without. `chat_template` is the
    source of a Jinja template to use instead of the file's. Keys and values of prompts and answers are saved
    in `prefix_dir`, up to `prefix_bytes` (4 GiB), and read back by later processes whose prompts begin alike.
    `control_vectors`, `probes` and `saes` are files by names of their own, which interventions speak of:
    GGUF, .safetensors, and directories of SAELens. `stages` cuts the model by layers: into so many processes
    on this machine, into those of `kukri stage` that listen at addresses "host:port" and this one, or into
    those of `kukri.scale.pipeline.RayStages`; `devices` into a process for each device. `progress(done,
    total)`, in bytes of weights, is called while these are loaded.

    Whoever waits for an answer steps the engine for all, so a slow reader of a stream delays nobody. Hooks
    see the steps of every thread. A hook or logits processor must not call its own LLM: KukriError.

    Calls without `params` sample by `default_params`: as the model's files advise (generation_config.json,
    general.sampling.* of GGUF), else by kukri's own defaults. Keyword arguments are set on top of these.

    Attributes: options, path, config (of the file), engine_config, tokenizer, model, engine, default_params,
    calls (under way), text_encoder.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        max_context: int | None = None,
        n_threads: int | None = None,
        backend: BackendName | None = None,
        device: str | None = None,
        max_step_tokens: int = 512,
        max_requests: int | None = None,
        kv_bytes: int | None = None,
        kv_type: Literal["f16", "q8_0", "q4", "fp8", "f32"] = "f16",
        quantize: str | None = None,
        rope_scaling: str | None = None,
        rope_factor: float | None = None,
        speculation: Speculation | None = None,
        draft_model: str | os.PathLike[str] | None = None,
        chat_template: str | None = None,
        adapters: Mapping[str, str | os.PathLike[str]] | None = None,
        prefix_dir: str | os.PathLike[str] | None = None,
        prefix_bytes: int | None = None,
        control_vectors: Mapping[str, Any] | None = None,
        probes: Mapping[str, Any] | None = None,
        saes: Mapping[str, Any] | None = None,
        stages: int | Sequence[str] | StagePlacer = 1,
        devices: Sequence[str] = (),
        progress: Progress | None = None,
    ) -> None:
        self.options = ModelOptions(
            model=None if model is None else os.fspath(model),
            max_context=max_context,
            n_threads=n_threads,
            backend=backend,
            device=device,
            max_step_tokens=max_step_tokens,
            max_requests=max_requests,
            kv_bytes=kv_bytes,
            kv_type=kv_type,
            quantize=quantize,
            rope_scaling=rope_scaling,
            rope_factor=rope_factor,
            speculation=speculation,
            draft_model=None if draft_model is None else os.fspath(draft_model),
            chat_template=chat_template,
            adapters={name: os.fspath(path) for name, path in (adapters or {}).items()},
            prefix_dir=None if prefix_dir is None else os.fspath(prefix_dir),
            prefix_bytes=prefix_bytes,
            control_vectors=control_vectors,
            probes=probes,
            saes=saes,
            stages=tuple(stages) if isinstance(stages, Sequence) else stages,
            devices=tuple(devices),
        )
        loaded = open_model(self.options, progress)
        self.path, self.config, self.engine_config = loaded.path, loaded.config, loaded.engine_config
        self.tokenizer, self.model = loaded.tokenizer, loaded.model
        self.default_params, self.text_encoder = loaded.default_params, loaded.text_encoder
        self._backend = loaded.backend
        self.calls = EngineCalls(loaded)
        if control_vectors or probes or saes:
            _ = self.interp  # which checks them

    @overload
    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        interventions: Interventions = (),
        **overrides: Unpack[SamplingOptions],
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        interventions: Interventions = (),
        **overrides: Unpack[SamplingOptions],
    ) -> list[Result]: ...

    def generate(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        interventions: Interventions = (),
        **overrides: Unpack[SamplingOptions],
    ) -> Result | list[Result]:
        """The Result that continues a prompt, text or token ids; for a list of prompts, a list of Results.

        `overrides` are fields of SamplingParams, set on top of `params` or, without these, of the model's
        `default_params`; `adapter` is the name of a loaded adapter, None for the model alone. A text gets the
        model's tokens around it (BOS, EOS); control tokens spelled out in it stay text. `interventions` steer
        these requests alone, capture their activations and read them out (`kukri.interp.Intervention`, or the
        same as a dictionary). Raises RequestError on anything wrong with a prompt or the parameters, before a
        token is computed.
        """
        calls = self.calls.for_prompts(prompt, params, overrides, adapter, self.intervene(interventions))
        results = self.calls.run(calls)
        return results if is_many(prompt) else results[0]

    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        interventions: Interventions = (),
        **overrides: Unpack[SamplingOptions],
    ) -> Result:
        """The model's answer to a conversation: messages of `role` and `content`, by its own chat template.

        Control tokens come from the template alone: in the contents they stay text.
        """
        call = self.calls.for_chat(messages, params, overrides, adapter, self.intervene(interventions))
        return self.calls.run([call])[0]

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        adapter: str | None = None,
        interventions: Interventions = (),
        **overrides: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """The Chunks of the answer to a prompt or to messages, as they come.

        The request is checked at once and starts with the first chunk; closing the iterator ends it. Raises
        RequestError for a `best_of` above `n`, as the best answers are known at the end.
        """
        intervene = self.intervene(interventions)
        return self.calls.chunks(self.calls.for_stream(prompt, params, overrides, adapter, intervene))

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA adapter, a directory of PEFT or a GGUF file, that requests may choose by the name.

        Requests that run go on. Raises FormatError and UnsupportedError for files that are broken, of another
        model, or no plain LoRA, ConfigError on a name that is taken.
        """
        adapter = read_adapter(Path(path).expanduser(), self.model)
        with self.calls.alone():
            self.engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; requests that run with it end with it. Raises RequestError without it."""
        with self.calls.alone():
            self.engine.unload_adapter(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return self.engine.adapters.names

    def logits(self, token_ids: Sequence[int], *, adapter: str | None = None) -> FloatArray:
        """Logits float32 [T, V]: row t is about the token after `token_ids[: t + 1]`."""
        self.calls.check_generates()
        request = self.engine.make_output_request(token_ids, "logits", adapter=adapter)
        (rows,) = self.calls.compute([request])
        return rows

    def answer(
        self, question: str, context: str, *, top_k: int = 1, max_answer_tokens: int = 15
    ) -> list[Span]:
        """The `top_k` spans of the context that most probably answer the question, the best first.

        For checkpoints of `...ForQuestionAnswering`; others raise UnsupportedError.
        """
        from kukri import tasks

        return tasks.answer(
            self.model,
            self._outputs,
            self.tokenizer,
            question,
            context,
            top_k=top_k,
            max_answer_tokens=max_answer_tokens,
        )

    def classify(self, text: str) -> list[Label]:
        """Every label of a text with its score, the best first; for `...ForSequenceClassification`."""
        from kukri import tasks

        return tasks.classify(self.model, self._outputs, self.tokenizer, text)

    def classify_tokens(self, text: str) -> list[TokenLabel]:
        """A label for each token of a text, with its place; for `...ForTokenClassification`."""
        from kukri import tasks

        return tasks.classify_tokens(self.model, self._outputs, self.tokenizer, text)

    def embed(
        self,
        texts: str | Sequence[str],
        *,
        pooling: Pooling | None = None,
        normalize: bool | None = None,
        prompt: str | None = None,
        prompt_name: str | None = None,
        truncate: bool = False,
        dimensions: int | None = None,
        adapter: str | None = None,
    ) -> FloatArray:
        """A vector for each text, float32 [n, D], or [D] for a single text; any checkpoint has them.

        `pooling` is the mean over all tokens, the last or the first ("cls"), of the last hidden states;
        `normalize` makes vectors of length 1. None is what the model's files say: sentence-transformers' or
        GGUF's pooling type, else the mean, normalized. `prompt` is put before each text, or one of the
        model's own by `prompt_name` ("query"). An encoder's vectors may be cut to `dimensions`. `adapter` is
        the name of a loaded adapter.

        Raises ContextLengthError for a text beyond the model's limit; with `truncate` it is cut, and a
        warning is logged.
        """
        if not isinstance(texts, Sequence):
            raise RequestError(
                f"texts must be str or a list of them, not {type(texts).__name__}", param="texts"
            )
        many = [texts] if isinstance(texts, str) else texts
        check_pooling(pooling)
        encoder = self.text_encoder
        encoder.check_dimensions(dimensions)
        encoded = encoder.encode(many, prompt=prompt, prompt_name=prompt_name, truncate=truncate)
        requests = encoder.requests(self.calls.engine, encoded.ids, pooling, adapter=adapter)
        vectors = encoder.vectors(self.calls.compute(requests), normalize, dimensions)
        return vectors[0] if isinstance(texts, str) else vectors

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[Ranked]:
        """The documents by how well they answer the query, the best first, `top_n` of them.

        A cross-encoder (`...ForSequenceClassification` with one label) reads query and document together, and
        its score is what sentence-transformers gives; of other models it is the cosine of their embeddings.
        `truncate` and `adapter` are those of `embed`.
        """
        if isinstance(documents, str) or not isinstance(query, str):
            raise RequestError("query must be a text and documents a list of texts", param="documents")
        if top_n is not None and top_n < 1:
            raise RequestError(f"top_n must be at least 1, not {top_n}", param="top_n")
        encoder = self.text_encoder
        encoder.check_ranks()
        if encoder.is_cross_encoder:
            pairs = encoder.encode_pairs(query, documents, truncate=truncate)
            requests = encoder.pair_requests(self.calls.engine, pairs.ids, adapter=adapter)
            scores = encoder.scores(self.calls.compute(requests))
        else:
            for_query, for_document = encoder.rank_prompts()
            asked, found = (
                self.embed(texts, normalize=True, prompt_name=name, truncate=truncate, adapter=adapter)
                for texts, name in ((query, for_query), (documents, for_document))
            )
            scores = [float(vector @ asked) for vector in found]
        return ranked(documents, scores, top_n)

    @contextmanager
    def hooks(self, hooks: Mapping[str, Hook]) -> Iterator[None]:
        """Within the `with` block, each hook listens on its full name, such as `blocks.3.hook_resid_pre`.

        A hook is called as hook(name, array) in each step, with float32 [tokens of the step, width]; it may
        edit the array in place or return a replacement, and must copy what it wants to keep. Raises HookError
        on a name that the model does not have (`hook_names` lists them).
        """
        for name, hook in hooks.items():
            if name not in self.hook_names:
                raise HookError(f"the model has no hook {name!r}{close_matches(name, self.hook_names)}")
            if not callable(hook):
                raise HookError(f"the hook on {name} is a {type(hook).__name__} and cannot be called")
        listening = dict(hooks)
        with self.calls.alone():
            listened: list[Forward | Engine] = [self.calls.engine, self.model.bound]
            for runner in listened:
                runner.add_hooks(listening)
        try:
            yield
        finally:
            with self.calls.alone():
                for runner in listened:
                    runner.remove_hooks(listening)

    def run_with_cache(
        self,
        prompt: Any,
        *,
        names: NamesFilter = None,
        stop_at_layer: int | None = None,
        fwd_hooks: FwdHooks = (),
        return_type: ReturnType = "logits",
        adapter: str | None = None,
    ) -> tuple[FloatArray | None, ActivationCache]:
        """(logits [batch, pos, V], the activations of each name), with TransformerLens' names and shapes.

        `prompt` is a text, token ids [T] or [batch, T], or a list of either; shorter ones are padded on the
        right with zeros. `names` is a name, several, or a function of a name that says whether it is wanted;
        None is all. With `stop_at_layer` nothing from that layer on is computed, and the stream before it
        [batch, pos, D] takes the logits' place. `return_type` "loss" gives the mean loss in nats, None
        nothing, and then what comes after the last name is not computed. `fwd_hooks` are those of
        `run_with_hooks`. `adapter` is the name of a loaded adapter: the activations, and what is computed of
        them, are those of the model with it.
        """
        session = self._session(adapter)
        return session.run_with_cache(prompt, names, stop_at_layer, fwd_hooks, return_type)

    def run_with_hooks(
        self,
        prompt: Any,
        *,
        fwd_hooks: FwdHooks = (),
        return_type: ReturnType = "logits",
        stop_at_layer: int | None = None,
        adapter: str | None = None,
    ) -> FloatArray | None:
        """The logits [batch, pos, V] of a run that hooks read and edit: see `run_with_cache`.

        `fwd_hooks` are pairs (name, hook). A hook is called as hook(value, hook=point), once, with the whole
        batch [batch, pos, ...] in TransformerLens' shape; it edits the array in place or returns another.
        Raises HookError on a name that does not exist, or that can only be read.
        """
        return self._session(adapter).run_with_hooks(prompt, fwd_hooks, return_type, stop_at_layer)

    @overload
    def generate_with_hooks(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        fwd_hooks: FwdHooks = (),
        names: NamesFilter = (),
        adapter: str | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> tuple[Result, ActivationCache]: ...

    @overload
    def generate_with_hooks(
        self,
        prompt: list[str] | list[list[int]],
        params: SamplingParams | None = None,
        *,
        fwd_hooks: FwdHooks = (),
        names: NamesFilter = (),
        adapter: str | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> list[tuple[Result, ActivationCache]]: ...

    def generate_with_hooks(
        self,
        prompt: Any,
        params: SamplingParams | None = None,
        *,
        fwd_hooks: FwdHooks = (),
        names: NamesFilter = (),
        adapter: str | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Any:
        """`generate`, with hooks and captures of these requests alone: (result, activations) of each prompt.

        A hook is called as hook(value [1, pos, ...], hook=point) for each chunk of the prompt and each token
        generated; `point.start` is the first one's position. `names` are captured of every token but the
        last, which is no input. Requests beside them in the batch keep their tokens to the bit, drafts and
        prefixes; an error in a hook ends its request alone. Scores and patterns are read, and take no hooks
        here.
        """
        hooks = list(fwd_hooks)
        calls = self.calls.for_prompts(prompt, params, overrides, adapter)
        taps = [self.interp.listen_to(call.requests, names, hooks) for call in calls]
        results = self.calls.run(calls)
        found = [(r, t.cache(call.requests[0])) for r, t, call in zip(results, taps, calls, strict=True)]
        return found if is_many(prompt) else found[0]

    def add_hook(self, name: Any, hook: PointHook) -> None:
        """Adds a hook to all runs with a cache or hooks to come: see `run_with_hooks`, `reset_hooks`."""
        self.interp.added += self.interp.listen([(name, hook)])

    def reset_hooks(self) -> None:
        """Removes what `add_hook` added."""
        self.interp.added.clear()

    @cached_property
    def interp(self) -> Session:
        """The names, weights and runs of `kukri.interp` for this model."""
        from kukri.interp.interventions import Catalog
        from kukri.interp.session import Session

        def encode(text: str, add_special: bool = True) -> list[int]:
            return self.tokenizer.encode(text, add_special=add_special)

        @contextmanager
        def alone() -> Iterator[None]:
            with self.calls.alone():
                _ = self.calls.engine  # an error once closed
                yield

        options = self.options
        catalog = Catalog(self.config, options.control_vectors, options.probes, options.saes)
        kv_type: KVType | None = "f32" if options.kv_type == "f32" else None
        return Session(self.model, self._backend, encode, alone, catalog, kv_type)

    def _session(self, adapter: str | None) -> Session:
        """The session about the model, with an adapter of this name or without."""
        return self.interp if adapter is None else self.interp.adapted(self.engine.adapters.get(adapter))

    def intervene(self, interventions: Interventions) -> Intervene | None:
        """A function that gives a prompt's new requests their interventions; None if there are none."""
        if isinstance(interventions, Sequence) and not interventions:
            return None
        return lambda requests: self.interp.intervene(requests, interventions)

    @property
    def weights(self) -> Weights:
        """The weights under TransformerLens' names: `llm.weights.W_Q` [layer, head, d_model, d_head]."""
        return self.interp.weights

    @cached_property
    def hook_names(self) -> tuple[str, ...]:
        """Every name that a hook may listen on, in the order of a step."""
        return tuple(tap_names(self.model))

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; using it raises RequestError if the file has none."""
        return self.calls.chat_template

    @property
    def engine(self) -> Engine:
        """The engine below, to be stepped by this LLM alone.

        Raises KukriError after `close`.
        """
        return self.calls.engine

    def close(self) -> None:
        """Ends all calls under way, with an error, and the backend's threads. The LLM is of no use after."""
        with self.calls.alone():
            self.calls.close()
            self.model.bind(None)
            close = getattr(self._backend, "close", None)
            if close is not None:
                close()

    def __repr__(self) -> str:
        state = "" if self.calls.is_open else ", closed"
        where = self.engine_config.device or self.engine_config.backend
        return f"LLM({str(self.path)!r}, {self.config.architecture}, {where}{state})"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled by its options: another process opens the same model."""
        return _open, (self.options,)

    def __copy__(self) -> LLM:
        raise KukriError("an LLM is not copied: threads may share one, and kukri.load() opens another")

    def __deepcopy__(self, memo: Any) -> LLM:
        return self.__copy__()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _outputs(self, token_ids: list[int]) -> FloatArray:
        """The outputs of the model's head for each token: float32 [T, width]."""
        types = self.text_encoder.token_types(token_ids)
        request = self.calls.engine.make_output_request(token_ids, "logits", token_types=types)
        (rows,) = self.calls.compute([request])
        return rows


def _open(options: ModelOptions) -> LLM:
    return LLM(**vars(options))


def load(model: str | os.PathLike[str] | None = None, **options: Any) -> LLM:
    """Opens an LLM: the same as `LLM(model, **options)`."""
    return LLM(model, **options)
