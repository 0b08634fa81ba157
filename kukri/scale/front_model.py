"""A model whose engines are elsewhere: tokenizer, template and limits, without weights in memory."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import Any, cast

from kukri.config import EngineConfig
from kukri.engine import Request, RequestMaker
from kukri.engine.adapters import LoadedAdapter
from kukri.engine.drafting import checked_prediction, no_drafts
from kukri.engine.drafts import Drafts
from kukri.engine.model_identity import weights_identity
from kukri.errors import KukriError, RequestError
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
        """See SamplingBackend.choose."""
        raise AssertionError("replicas choose tokens")


class RemoteRequestMaker(RequestMaker):
    """Makes requests by the limits of replicas, which make their own drafts."""

    def __init__(self, model: ReadModel, facts: ReplicaFacts, adapters: tuple[str, ...] = ()) -> None:
        super().__init__(
            model.model.config,
            _ElsewhereSampling(),
            max_context=facts.max_context,
            n_pages=facts.n_pages,
            page_tokens=facts.page_tokens,
            eos_ids=model.tokenizer.eos_ids,
        )
        self._has_draft_model, self._adapters = facts.has_draft_model, adapters

    @property
    def why_no_images(self) -> str:
        """See RequestMaker.why_no_images. The encoder's rows stay in one process."""
        return "images are not supported with replicas: leave them out, or serve the model by kukri serve"

    @property
    def adapter_names(self) -> tuple[str, ...]:
        return self._adapters

    def _use_adapter(self, name: str, request: Request) -> None:
        if name not in self._adapters:
            known = ", ".join(self._adapters) or "none is loaded"
            raise RequestError(f"there is no adapter {name!r}: {known}", param="adapter")
        request.adapter = LoadedAdapter(name, cast(Any, None), -1)  # the replicas have it
        request.prefix_root = sha256(request.prefix_root + name.encode()).digest()

    def _drafts(self, params: SamplingParams, prompt: IntArray, client: str) -> Callable[[], Drafts | None]:
        checked_prediction(params, self._model_config.n_vocab, has_draft_model=self._has_draft_model)
        return no_drafts


class RemoteModel:
    """A model whose engines are elsewhere. Attributes: identity, and `models.served_model.OpenModel`'s."""

    memory_bytes = 0  # here

    def __init__(self, options: ModelOptions, facts: ReplicaFacts) -> None:
        """`facts` describe one of the replicas. Raises KukriError if its files differ from those here."""
        read = read_model(options)
        self.options, self.path, self.tokenizer = options, read.path, read.tokenizer
        self.default_params, self.text_encoder = read.default_params, read.text_encoder
        self.engine = RemoteRequestMaker(read, facts, tuple(options.adapters))
        self.engine_config = EngineConfig(max_requests=facts.max_requests)
        self.identity = weights_identity(read.path, read.config, options.quantize)
        if self.identity != facts.model:
            raise KukriError(
                f"{read.path} or the version of kukri differs from that on {facts.host}: "
                "use the same on all machines"
            )
        tokenizer = self.tokenizer
        self.chat_template = ChatTemplate(tokenizer.chat_template, tokenizer.bos_token, tokenizer.eos_token)

    def close(self) -> None:
        """Do nothing, because a model without weights holds nothing to release."""
