"""Offline generation: text in, text out, from any number of threads.

Calls under way are in `kukri.calls.engine_calls`; models are opened in `kukri.opening.loading`.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack, cast, overload
from warnings import warn

from kukri.calls import MAX_ROUNDS
from kukri.calls.engine_calls import EngineCalls, Message, Prompt, is_chat, is_many
from kukri.calls.results import Chunk, Result
from kukri.config import Pooling
from kukri.engine import Engine
from kukri.errors import HookError, KukriError, RequestError, UnsupportedError, close_matches
from kukri.kernels.arrays import FloatArray
from kukri.kernels.cache import KVType
from kukri.kernels.taps import Hook
from kukri.models import Forward
from kukri.opening.loading import Progress, open_model
from kukri.opening.model_options import ModelKeywords, ModelOptions, check_names
from kukri.sampling import SamplingOptions, SamplingParams
from kukri.tasks.embedding import Ranked, check_pooling, ranked
from kukri.tasks.late_interaction import max_sim
from kukri.tokenizer import ChatTemplate

if TYPE_CHECKING:
    from kukri.calls.call_options import ChatOptions, GenerationOptions, HookOptions, Interventions
    from kukri.calls.conversation import Approve, Conversation, Tool
    from kukri.calls.decide import Decision, Normalization
    from kukri.calls.engine_calls import Call, Intervene
    from kukri.calls.speech import Speech, SpeechKeywords, Transcription
    from kukri.calls.transcribe import Sound
    from kukri.interp.cache import ActivationCache
    from kukri.interp.features.transcoders import Transcoders
    from kukri.interp.gradients.circuits import AttributionGraph
    from kukri.interp.hooks.listening import FwdHooks, NamesFilter, PointHook
    from kukri.interp.hooks.weights import Weights
    from kukri.interp.images import EncoderSession
    from kukri.interp.interventions.oracles import OracleForm
    from kukri.interp.session import ReturnType, Session
    from kukri.tasks.heads import Label, Span, TokenLabel
    from kukri.vision.image import ImagePrompt

logging.getLogger("kukri").addHandler(logging.NullHandler())  # programs decide what they show


class LLM:
    """A model loaded from a file, ready to generate. Threads may share it: their calls run as one batch.

    Whoever waits for an answer steps the engine for all, so a slow reader of a stream delays nobody. Hooks
    see the steps of every thread. A hook or logits processor must not call its own LLM: KukriError.

    Args:
        model: A known name, an `org/repo[:type]` of the Hugging Face hub, or the path of a .gguf file or of a
            directory with safetensors; None for the default model. Missing files are downloaded.
        options: The fields of `ModelOptions`, such as `max_context=8192`; its help lists them.
        progress: Called as progress(done, total), in bytes of weights, while they are loaded.

    Attributes:
        options: The model and its options, with which another process opens the same model.
        path: The file or directory.
        config: Sizes and facts of the model, as its file states them.
        engine_config: Options of the engine.
        tokenizer: Text to token ids and back.
        model: The model, with a transformers-style `forward`.
        engine: The engine below; only this LLM may step it.
        default_params: Sampling parameters of calls without `params`: as the model's files advise
            (generation_config.json, general.sampling.* of GGUF), else kukri's own defaults.
        image_processor: Prepares images for the model; None for one that reads text alone.
        speech: How the model transcribes sound; None for one that does not hear.
        calls: Calls in progress.
        text_encoder: Turns texts into vectors and scores, as the model's files say.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        progress: Progress | None = None,
        **options: Unpack[ModelKeywords],
    ) -> None:
        check_names(options, "LLM")
        given = ModelOptions(**{"model": model, **cast(dict[str, Any], options)})
        loaded = open_model(given, progress)
        self.options = loaded.options
        self.path, self.config, self.engine_config = loaded.path, loaded.config, loaded.engine_config
        self.tokenizer, self.model = loaded.tokenizer, loaded.model
        self.default_params, self.text_encoder = loaded.default_params, loaded.text_encoder
        self._backend = loaded.backend
        self.image_processor = loaded.image_processor
        self.speech: Speech | None = None
        if loaded.sound is not None:
            from kukri.calls.speech import Speech

            self.speech = Speech.of(self.path, self.tokenizer, self.config, loaded.sound.n_bands)
        self.calls = EngineCalls(loaded, keeps_raw=self.options.raw_answers)
        if self.options.has_readers:
            _ = self.interp  # the session checks them

    @overload
    def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[GenerationOptions]
    ) -> Result: ...

    @overload
    def generate(
        self,
        prompt: list[str] | list[list[int]] | list[ImagePrompt],
        params: SamplingParams | None = None,
        **options: Unpack[GenerationOptions],
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
        """Continues a prompt, text, token ids or an `ImagePrompt`: a Result. A list of prompts is one
        batch: a list of Results.

        `overrides` are fields of SamplingParams, set on top of `params` or, without these, of the model's
        `default_params`; `adapter` is the name of a loaded adapter, None for the model alone. A text gets the
        model's tokens around it (BOS, EOS), and control tokens spelled out in it count: to keep them text,
        give `tokenizer.encode(text, add_special=True)`. `interventions` steer only these requests, capture
        their activations and read them out (`kukri.interp.Intervention`, or the same as a dictionary). Raises
        RequestError on anything wrong with a prompt or the parameters, before a token is computed.
        """
        calls = self.calls.for_prompts(prompt, params, overrides, adapter, self.intervene(interventions))
        results = self.calls.run(calls)
        return results if is_many(prompt) else results[0]

    @overload
    def chat(
        self,
        messages: Sequence[Message],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> Result: ...

    @overload
    def chat(
        self,
        messages: Sequence[Sequence[Message]],
        params: SamplingParams | None = None,
        **options: Unpack[ChatOptions],
    ) -> list[Result]: ...

    def chat(
        self,
        messages: Any,
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        approve: Approve | None = None,
        max_rounds: int = MAX_ROUNDS,
        adapter: str | None = None,
        interventions: Interventions = (),
        **overrides: Unpack[SamplingOptions],
    ) -> Result | list[Result]:
        """Answers a conversation: messages of `role` and `content`, rendered by the model's chat template.
        A list of conversations is one batch: a list of Results.

        The Result has the answer's `text`, apart from its `reasoning` and `tool_calls`; its `messages` are
        all that came to the conversation. Control tokens come from the template alone: in the contents they
        stay text. The other arguments and errors are as in `generate`; a model without a chat template
        raises RequestError.

        `tools` are functions or schemas. Functions are described to the model by their signatures, type hints
        and docstrings, and called here, one after another, in up to `max_rounds` rounds, after which a call
        is a RequestError; a function's error is told to the model as text. Calls of schemas, dictionaries in
        OpenAI's form, are returned as `tool_calls`, and then no function of that answer is called.
        `tool_choice` is "auto", "none", "required", or the name of the tool that the first answer must call.

        `approve` is asked before each call of a function. It returns True to allow the call, False to decline
        it, or the text that the model reads as the call's result. Its errors end the conversation and are
        raised here; it may take its time, as the model's place is free meanwhile.
        """
        from kukri.calls.conversation import Conversation

        given: dict[str, Any] = {"adapter": adapter, "intervene": self.intervene(interventions)}
        given |= {"tools": tools, "approve": approve, "max_rounds": max_rounds, "tool_choice": tool_choice}
        checked, many = self.calls.params(params, overrides), is_many(messages)
        told = [Conversation(self.calls, one, checked, **given) for one in (messages if many else [messages])]
        while asked := [one for one in told if one.result is None]:
            results = self.calls.run([one.next_call() for one in asked])
            for one, result in zip(asked, results, strict=True):
                one.answer_calls(one.read(result))
        answers = [one.result for one in told if one.result is not None]
        return answers if many else answers[0]

    def chat_prompt(self, messages: Sequence[Message]) -> list[int] | ImagePrompt:
        """The prompt that `chat` makes of messages: for `generate`, or for a run with hooks or a cache."""
        found: list[int] | ImagePrompt = self.calls.chat_prompt(messages)
        return found

    def stream(
        self,
        prompt: Prompt | Sequence[Message],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        approve: Approve | None = None,
        max_rounds: int = MAX_ROUNDS,
        adapter: str | None = None,
        interventions: Interventions = (),
        **overrides: Unpack[SamplingOptions],
    ) -> Iterator[Chunk]:
        """Streams the answer to a prompt or to messages, as Chunks.

        The request is checked at once and starts when the first chunk is asked for; closing the iterator ends
        it. Chunks of an answer to messages tell its text, reasoning and tool calls apart; functions among
        `tools` are called between two answers. The other arguments and errors are as in `generate` and
        `chat`. Raises RequestError for a `best_of` above `n`, as the best answers are known only at the end.
        """
        checked, intervene = self.calls.params(params, overrides), self.intervene(interventions)
        if not is_chat(prompt):
            if tools:
                raise RequestError.of("tools", "requires messages: leave it out")
            return self.calls.chunks(self.calls.call(prompt, checked, adapter, intervene, streams=True))
        from kukri.calls.conversation import Conversation

        conversation = Conversation(
            self.calls, cast("Sequence[Message]", prompt), checked, tools, max_rounds, approve, tool_choice,
            adapter=adapter, intervene=intervene, streams=True,
        )  # fmt: skip
        return self._answers(conversation, conversation.next_call())

    def _answers(self, conversation: Conversation, call: Call) -> Iterator[Chunk]:
        """The chunks of a conversation's answers; `call` makes the first answer."""
        while True:
            for chunk in self.calls.chunks(call):
                if chunk.result is None:
                    yield chunk
                    continue
                last, asked = conversation.last_chunk(chunk)
                yield last
            if conversation.result is not None:
                return
            conversation.answer_calls(asked)
            call = conversation.next_call()

    @overload
    def transcribe(self, sound: Sound, **options: Unpack[SpeechKeywords]) -> Transcription: ...

    @overload
    def transcribe(self, sound: list[Any], **options: Unpack[SpeechKeywords]) -> list[Transcription]: ...

    def transcribe(
        self, sound: Sound | list[Any], **options: Unpack[SpeechKeywords]
    ) -> Transcription | list[Transcription]:
        """The speech in a sound: the path of a file, or samples from -1 to 1, of one channel at 16 kHz.

        A list of sounds is one batch. `options` are the fields of `kukri.calls.speech.SpeechOptions`. Raises
        UnsupportedError for a model that does not hear, RequestError on a sound or options that do not work.
        """
        from kukri.calls.speech import SpeechOptions
        from kukri.calls.transcribe import read_sound, transcribe

        if self.speech is None:
            raise UnsupportedError(f"sound is not supported by {self.path}: load a model such as Whisper")
        many = sound if isinstance(sound, list) else [sound]
        asked = SpeechOptions.of(options)
        found = transcribe(self.calls, self.speech, [read_sound(one) for one in many], asked)
        return found if isinstance(sound, list) else found[0]

    def load_adapter(self, name: str, path: str | os.PathLike[str]) -> None:
        """Loads a LoRA adapter, a PEFT directory or a GGUF file, under a name by which requests choose it.

        Running requests continue. Raises FormatError and UnsupportedError for files that are broken, of
        another model, or not plain LoRA, ConfigError on a name that is taken.
        """
        from kukri.formats.adapters import read_adapter

        adapter = read_adapter(Path(path).expanduser(), self.model)
        with self.calls.turns.alone():
            self.engine.load_adapter(name, adapter)

    def unload_adapter(self, name: str) -> None:
        """Unloads an adapter; running requests keep it to their end. Raises RequestError if it is unknown."""
        with self.calls.turns.alone():
            self.engine.unload_adapter(name)

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of the loaded adapters."""
        return self.engine.adapters.names

    def logits(self, token_ids: Sequence[int], *, adapter: str | None = None) -> FloatArray:
        """Logits float32 [T, V] of a text: row t predicts the token after `token_ids[: t + 1]`.

        Raises UnsupportedError for a model without a language model head, RequestError on bad token ids.
        """
        self.calls.check_generates()
        request = self.engine.maker.make_output_request(token_ids, "logits", adapter=adapter)
        (rows,) = self.calls.compute([request])
        return rows

    def decide(
        self,
        prompt: Prompt | Sequence[Message],
        choices: Sequence[str] | None = None,
        *,
        scores: tuple[int, int] | None = None,
        normalization: Normalization = "sequence",
        content_free: Prompt | Sequence[Message] | None = None,
        adapter: str | None = None,
    ) -> Decision:
        """How probable each choice is as the answer to a prompt or to messages: exactly, without sampling.

        The choices are texts, with `scores` the integers from the lowest to the highest, by default "yes" and
        "no". P(choice | prompt) is the product of the probabilities of its tokens; an answer that begins with
        several choices counts for the longest. `normalization` compares these ("sequence"), or their mean
        logarithm by "token" or "byte". With `content_free`, a prompt like this one that says nothing ("N/A"
        for its input), each is divided by its probability there. All are computed in one batch, which reads
        the prompt once. After a plain prompt a choice may have to begin with a space. Errors are as in
        `generate`, and RequestErrors about the choices.
        """
        from kukri.calls import decide

        texts = decide.checked_choices(choices, scores)
        prompts = [prompt] if content_free is None else [prompt, content_free]
        found = []
        for one in prompts:
            ids = self.calls.answer_prompt(one)
            question = decide.Question(self.tokenizer, ids, texts)
            told: dict[tuple[int, ...], float] = {}
            for part in question.batches(self.config.n_vocab):
                requests = [
                    self.engine.maker.make_output_request(
                        text, "logits", first_row=question.first_row, adapter=adapter
                    )
                    for text in question.texts[part]
                ]
                rows = self.calls.compute(requests)
                told |= question.token_logprobs(part, rows)
            found.append((question, question.logprobs(told)))
        return decide.decision(found[0][0], texts, found[0][1], normalization, *found[1:])

    def describe(self) -> dict[str, Any]:
        """Return what the model's files say of it, as `kukri inspect --json` prints it.

        Format, sizes, types, layers, configuration, memory of a token, modules and metadata, ready for JSON.
        """
        from kukri.opening.description import describe

        return describe(self.path)

    def answer(self, question: str, context: str, **options: int) -> list[Span]:
        """`extract` under its name of before 0.1, which sounds as if the model answered by itself."""
        warn("LLM.answer is deprecated: use LLM.extract", DeprecationWarning, stacklevel=2)
        return self.extract(question, context, **options)

    def extract(
        self, question: str, context: str, *, top_k: int = 1, max_answer_tokens: int = 15
    ) -> list[Span]:
        """Finds the `top_k` spans of the context that most probably answer the question, the best first.

        For checkpoints of `...ForQuestionAnswering`; others raise UnsupportedError.
        """
        from kukri.tasks import heads

        passage = heads.read_question(self.config, self.tokenizer, question, context)
        outputs = self._outputs(passage.ids)
        return heads.answers(passage, outputs, top_k=top_k, max_answer_tokens=max_answer_tokens)

    def classify(self, text: str) -> list[Label]:
        """Scores a text's labels, best first; for `...ForSequenceClassification`, else UnsupportedError."""
        from kukri.tasks import heads

        ids = heads.read_text(self.config, self.tokenizer, text)
        return heads.labels(self.config.head, self._outputs(ids)[heads.classified_row(self.config, ids)])

    def classify_tokens(self, text: str) -> list[TokenLabel]:
        """Labels each token of a text; for `...ForTokenClassification`, else UnsupportedError."""
        from kukri.tasks import heads

        passage = heads.read_tokens(self.config, self.tokenizer, text)
        return heads.token_labels(self.config.head, passage, self._outputs(passage.ids))

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
        """Embeds texts, with any checkpoint: float32 [n, D], or [D] for a single text.

        `pooling` is the mean over all tokens, the last or the first ("cls"), of the last hidden states;
        `normalize` makes vectors of length 1. None is what the model's files say (sentence-transformers' or
        GGUF's pooling type), else the mean, normalized. `prompt` is put before each text; `prompt_name`
        chooses one of the model's own ("query"). An encoder's vectors may be cut to `dimensions`. `adapter`
        is the name of a loaded adapter.

        Raises ContextLengthError for a text beyond the model's limit; with `truncate` it is cut, and a
        warning is logged.
        """
        if not isinstance(texts, Sequence):
            raise RequestError.of("texts", f"must be a text or a list of texts, not {type(texts).__name__}")
        many = [texts] if isinstance(texts, str) else texts
        check_pooling(pooling)
        encoder = self.text_encoder
        encoder.check_dimensions(dimensions)
        encoded = encoder.encode(many, prompt=prompt, prompt_name=prompt_name, truncate=truncate)
        requests = encoder.requests(self.calls.engine.maker, encoded.ids, pooling, adapter=adapter)
        vectors = encoder.vectors(self.calls.compute(requests), normalize, dimensions)
        return vectors[0] if isinstance(texts, str) else vectors

    def embed_tokens(
        self,
        texts: str | Sequence[str],
        *,
        prompt_name: str | None = None,
        normalize: bool = True,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> Any:
        """A vector for each token: float32 [tokens, width] for a text, a list of such for several.

        Of models with late interaction (ColBERT) they are a query's with `prompt_name="query"`, expanded as
        the files say, else a document's, without those of punctuation; `kukri.late_interaction.max_sim`
        compares the two. Of other models they are the last norm's outputs. Else as `embed`.
        """
        encoder = self.text_encoder
        many = [texts] if isinstance(texts, str) else texts
        encoded = encoder.encode_tokens(many, prompt_name=prompt_name, truncate=truncate)
        requests = encoder.token_requests(self.calls.engine.maker, encoded, adapter=adapter)
        vectors = encoder.token_vectors(encoded, self.calls.compute(requests), normalize=normalize)
        return vectors[0] if isinstance(texts, str) else vectors

    def rerank(
        self,
        query: str,
        documents: Sequence[str],
        *,
        top_n: int | None = None,
        instruction: str | None = None,
        truncate: bool = False,
        adapter: str | None = None,
    ) -> list[Ranked]:
        """Ranks documents by how well they answer the query: the `top_n` best, the best first.

        A cross-encoder (`...ForSequenceClassification` with one label) reads query and document together, and
        its score is what sentence-transformers gives. A model with late interaction (ColBERT) compares tokens
        by MaxSim, other models the cosine of their embeddings. Qwen3-Reranker scores by the probability of
        yes; `instruction` says what makes a document fit, in place of an answer to a web search. `truncate`
        and `adapter` are as in `embed`.
        """
        if isinstance(documents, str) or not isinstance(query, str):
            raise RequestError("'query' must be a text and 'documents' a list of texts", param="documents")
        if top_n is not None and top_n < 1:
            raise RequestError.of("top_n", f"must be at least 1, not {top_n}")
        encoder = self.text_encoder
        encoder.check_ranks(instruction)
        if encoder.is_cross_encoder:
            pairs = encoder.encode_pairs(query, documents, truncate=truncate, instruction=instruction)
            requests = encoder.pair_requests(self.calls.engine.maker, pairs.ids, adapter=adapter)
            scores = encoder.scores(self.calls.compute(requests))
        elif encoder.late is not None:
            asked, found = (
                self.embed_tokens(texts, prompt_name=name, truncate=truncate, adapter=adapter)
                for texts, name in ((query, "query"), (documents, "document"))
            )
            scores = [max_sim(asked, vectors) for vectors in found]
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
        """Adds hooks by their full names, such as `blocks.3.hook_resid_pre`, within the `with` block.

        A hook is called as hook(name, array) in each step, with float32 [tokens of the step, width]; it may
        edit the array in place or return a replacement, and must copy what it wants to keep. Raises HookError
        on a name that the model does not have (`hook_names` lists them).
        """
        for name, hook in hooks.items():
            if name not in self.hook_names:
                raise HookError(f"the hook {name!r} was not found{close_matches(name, self.hook_names)}")
            if not callable(hook):
                raise HookError(f"the hook on {name!r} must be callable, not a {type(hook).__name__}")
        listening = dict(hooks)
        with self.calls.turns.alone():
            listened: list[Forward | Engine] = [self.calls.engine, self.model.bound]
            for runner in listened:
                runner.add_hooks(listening)
        try:
            yield
        finally:
            with self.calls.turns.alone():
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
        interventions: Interventions = (),
    ) -> tuple[FloatArray | None, ActivationCache]:
        """Runs texts; returns (logits [batch, pos, V], activations), with TransformerLens' names and shapes.

        `prompt` is a text, token ids [T] or [batch, T], or a list of either; shorter ones are padded on the
        right with zeros. It may also be one `ImagePrompt`, which the engine runs: hooks see it in chunks, and
        those whose names begin with `vision.` are the encoder's (`LLM.vision`). `names` is a name, several,
        or a function of a name that says whether it is wanted; None is all. With `stop_at_layer` nothing from
        that layer on is computed, and the stream before it [batch, pos, D] takes the logits' place.
        `return_type` "loss" gives the mean loss in nats, None no result, and nothing after the last name is
        computed. `fwd_hooks` are as in `run_with_hooks`. `adapter` is the name of a loaded adapter, with
        which the model then runs. `interventions` edit before the hooks see a value: see
        `kukri.interp.Intervention`.
        """
        session = self._session(adapter)
        if _sees(prompt, stop_at_layer):
            from kukri.interp.images import run_images

            options = names, fwd_hooks, return_type, interventions, adapter
            return run_images(self, self.calls.compute, session, prompt, *options)
        return session.run_with_cache(prompt, names, stop_at_layer, fwd_hooks, return_type, interventions)

    def run_with_hooks(
        self,
        prompt: Any,
        *,
        fwd_hooks: FwdHooks = (),
        return_type: ReturnType = "logits",
        stop_at_layer: int | None = None,
        adapter: str | None = None,
        interventions: Interventions = (),
    ) -> FloatArray | None:
        """Runs texts with hooks that read and edit; returns the logits [batch, pos, V]: see `run_with_cache`.

        `fwd_hooks` are pairs (name, hook). A hook is called as hook(value, hook=point), once, with the whole
        batch [batch, pos, ...] in TransformerLens' shape; it edits the array in place or returns another.
        Raises HookError on a name that does not exist, or that can only be read.
        """
        session = self._session(adapter)
        if _sees(prompt, stop_at_layer):
            return self.run_with_cache(
                prompt,
                names=(),
                fwd_hooks=fwd_hooks,
                return_type=return_type,
                adapter=adapter,
                interventions=interventions,
            )[0]
        return session.run_with_hooks(prompt, fwd_hooks, return_type, stop_at_layer, interventions)

    @overload
    def generate_with_hooks(
        self, prompt: Prompt, params: SamplingParams | None = None, **options: Unpack[HookOptions]
    ) -> tuple[Result, ActivationCache]: ...

    @overload
    def generate_with_hooks(
        self,
        prompt: list[str] | list[list[int]] | list[ImagePrompt],
        params: SamplingParams | None = None,
        **options: Unpack[HookOptions],
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
        """Generates with hooks and captures for these requests only: (result, activations) of each prompt.

        A hook is called as hook(value [1, pos, ...], hook=point) for each chunk of the prompt and each token
        generated; `point.start` is the first one's position. `names` are captured of every token but the
        last, which is not an input. Other requests in the batch keep bit-identical tokens, drafts and
        prefixes; an error in a hook ends only its request. Scores and patterns can be captured, and take no
        hooks here.
        """
        hooks = list(fwd_hooks)
        calls = self.calls.for_prompts(prompt, params, overrides, adapter)
        taps = [self.interp.listen_to(call.requests, names, hooks) for call in calls]
        results = self.calls.run(calls)
        found = [(r, t.cache(call.requests[0])) for r, t, call in zip(results, taps, calls, strict=True)]
        return found if is_many(prompt) else found[0]

    def attribute(
        self, /, prompt: Any, transcoders: Transcoders | str | os.PathLike[str], **options: Any
    ) -> AttributionGraph:
        """The attribution graph of a prompt over transcoders, or their directory: see
        `kukri.interp.gradients.circuits.attribute`, whose options it takes.
        """
        from kukri.interp.gradients.circuits import attribute

        return attribute(self, prompt, transcoders, **options)

    def ask_about(
        self,
        activations: Any,
        question: str,
        *,
        layer: int | None = None,
        oracle: str | LLM | None = None,
        form: OracleForm | None = None,
        params: SamplingParams | None = None,
        **overrides: Unpack[SamplingOptions],
    ) -> Result:
        """Asks an oracle a question about activations, [n, d_model] or [d_model], for example
        `cache["resid_post", 8][0, -5:]`.

        The oracle is an adapter of this name, another LLM, or with None this model as it is. It reads each
        vector at a placeholder token, as `form` says: by default as activation oracles do (Karvonen et al.
        2025), told the `layer` of the activations. It runs in the batch of all other requests. Other
        arguments and errors are as in `generate`; RequestErrors also about activations and form.
        """
        from kukri.interp.interventions.oracles import ACTIVATION_ORACLE

        form = form or ACTIVATION_ORACLE
        edits = [form.injection(activations)]
        text = form.text(len(edits[0].vector), question, layer)
        llm, adapter = (oracle, None) if isinstance(oracle, LLM) else (self, oracle)
        if form.is_chat:
            messages = [{"role": "user", "content": text}]
            return llm.chat(messages, params, adapter=adapter, interventions=edits, **overrides)
        return llm.generate(text, params, adapter=adapter, interventions=edits, **overrides)

    def add_hook(self, name: Any, hook: PointHook) -> None:
        """Adds a hook to all later runs with a cache or hooks: see `run_with_hooks`, `reset_hooks`."""
        self.interp.added += self.interp.listen([(name, hook)])

    def reset_hooks(self) -> None:
        """Removes the hooks that `add_hook` added."""
        self.interp.added.clear()

    @cached_property
    def interp(self) -> Session:
        """The names, weights and runs of `kukri.interp` for this model."""
        from kukri.interp.interventions.catalog import Catalog
        from kukri.interp.session import Session

        def encode(text: str, add_special: bool = True) -> list[int]:
            return self.tokenizer.encode(text, add_special=add_special, parse_special=True)

        @contextmanager
        def alone() -> Iterator[None]:
            with self.calls.turns.alone():
                _ = self.calls.engine  # an error once closed
                yield

        options = self.options
        catalog = Catalog(self.config, **options.readers)
        kv_type: KVType | None = "f32" if options.kv_type == "f32" else None
        token_bytes = self.tokenizer.token_bytes
        return Session(self.model, self._backend, encode, token_bytes, alone, catalog, kv_type)

    @cached_property
    def vision(self) -> EncoderSession:
        """The activations of the encoder of images. Raises RequestError for a model that reads text alone."""
        from kukri.interp.images import EncoderSession

        return EncoderSession(self)

    def _session(self, adapter: str | None) -> Session:
        """The session about the model, with an adapter of this name or without."""
        return self.interp if adapter is None else self.interp.adapted(self.engine.adapters.get(adapter))

    def intervene(self, interventions: Interventions) -> Intervene | None:
        """Returns a function that adds interventions to new requests of a prompt; None without any."""
        if isinstance(interventions, Sequence) and not interventions:
            return None
        return lambda requests: self.interp.intervene(requests, interventions)

    @property
    def weights(self) -> Weights:
        """The weights under TransformerLens' names: `llm.weights.W_Q` [layer, head, d_model, d_head]."""
        return self.interp.weights

    @cached_property
    def hook_names(self) -> tuple[str, ...]:
        """All names that `hooks` takes, in the order of a step."""
        from kukri.models.trace import Trace

        return tuple(Trace(self.model).taps)

    @property
    def chat_template(self) -> ChatTemplate:
        """The model's chat template; using it raises RequestError if the file has none."""
        return self.calls.chat_template

    @property
    def memory_bytes(self) -> int:
        """Bytes of the weights and the KV cache. Raises KukriError after `close`."""
        cache = self.engine.runner.cache
        return sum(parameter.n_bytes for parameter in self.model.parameters) + cache.n_bytes

    @property
    def engine(self) -> Engine:
        """The engine below; only this LLM may step it.

        Raises KukriError after `close`.
        """
        return self.calls.engine

    def close(self) -> None:
        """Ends all calls under way with an error, and the backend's threads. Later calls raise KukriError."""
        with self.calls.turns.alone():
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
        raise KukriError("an LLM cannot be copied: share it between threads, or open another with LLM(model)")

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
        request = self.calls.engine.maker.make_output_request(token_ids, "logits", token_types=types)
        (rows,) = self.calls.compute([request])
        return rows


def _sees(prompt: Any, stop_at_layer: int | None) -> bool:
    """True for a prompt with images. Raises RequestError if it is to stop before the end."""
    from kukri.vision.image import ImagePrompt

    if isinstance(prompt, ImagePrompt) and stop_at_layer is not None:
        raise RequestError.of("stop_at_layer", "cannot be combined with images")
    return isinstance(prompt, ImagePrompt)


def _open(options: ModelOptions) -> LLM:
    return LLM(**vars(options))


def load(model: str | os.PathLike[str] | None = None, **options: Any) -> LLM:
    """`LLM(model, **options)` under its name of before 0.1."""
    warn("kukri.load is deprecated: use kukri.LLM", DeprecationWarning, stacklevel=2)
    return LLM(model, **options)
