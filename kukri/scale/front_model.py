"""A model whose engines are elsewhere: tokenizer, template and limits, without weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

from kukri.config import EngineConfig
from kukri.engine import Request, RequestMaker
from kukri.engine.adapters import LoadedAdapter, unknown_adapter
from kukri.engine.drafting import checked_prediction, no_drafts
from kukri.engine.model_identity import weights_identity
from kukri.engine.pages import PoolSize
from kukri.errors import KukriError
from kukri.kernels.arrays import IntArray
from kukri.kernels.backend import Logits
from kukri.kernels.sampling_record import SamplingRecords
from kukri.opening.loading import ReadModel, read_model
from kukri.opening.model_options import ModelOptions
from kukri.sampling import SamplingParams
from kukri.scale.facts import ReplicaFacts
from kukri.tokenizer import ChatTemplate


class _ElsewhereSampling:
    """Sampling of requests whose tokens replicas choose."""

    def choose(self, records: SamplingRecords, logits: Logits) -> None:
        raise AssertionError("replicas choose tokens")


class _RemoteAdapters:
    """The adapters of replicas, which hold their weights."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names

    def use(self, name: str, request: Request) -> None:
        if name not in self.names:
            raise unknown_adapter(name, self.names)
        request.use_adapter(LoadedAdapter(name, cast(Any, None), -1), name.encode())


class RemoteRequestMaker(RequestMaker):
    """Makes requests by the limits of replicas, which make their own drafts."""

    def __init__(self, model: ReadModel, facts: ReplicaFacts, adapters: tuple[str, ...] = ()) -> None:
        super().__init__(
            model.model.config,
            _ElsewhereSampling(),
            pools=[PoolSize(facts.n_pages, facts.page_tokens)],
            adapters=_RemoteAdapters(adapters),
            drafts=self._check_drafts,
            max_context=facts.max_context,
            eos_ids=model.tokenizer.eos_ids,
        )
        self._has_draft_model = facts.has_draft_model

    def why_unread(self, noun: str) -> str:
        """See RequestMaker.why_unread. An encoder's rows stay in one process."""
        return f"{noun}s are not supported with replicas: leave them out, or serve the model by kukri serve"

    def _check_drafts(self, params: SamplingParams, prompt: IntArray, client: str) -> Callable[[], None]:
        """Raise RequestError for drafts that the replicas cannot make."""
        checked_prediction(params, self._model_config.n_vocab, has_draft_model=self._has_draft_model)
        return no_drafts


class RemoteEngine(NamedTuple):
    """What stands here for the engines of replicas."""

    maker: RequestMaker


class RemoteModel:
    """A model whose engines are elsewhere. Attributes: identity, and `models.served_model.OpenModel`'s."""

    memory_bytes = 0  # here

    def __init__(self, options: ModelOptions, facts: ReplicaFacts) -> None:
        """`facts` describe one of the replicas. Raises KukriError if its files differ from those here."""
        read = read_model(options)
        self.options, self.path, self.tokenizer = options, read.path, read.tokenizer
        self.default_params, self.text_encoder = read.default_params, read.text_encoder
        self.engine = RemoteEngine(RemoteRequestMaker(read, facts, tuple(options.adapters)))
        self.engine_config = EngineConfig(max_requests=facts.max_requests)
        self.identity = weights_identity(read.path, read.config, options.quantize)
        if self.identity != facts.model:
            raise KukriError(f"{read.path} and the version of kukri must be the same as on {facts.host}")
        tokenizer = self.tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    def close(self) -> None:
        """Do nothing, because a model without weights holds nothing to release."""
