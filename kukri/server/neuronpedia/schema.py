"""The bodies of requests to Neuronpedia's servers (schemas/openapi/inference and apps/graph there).

A *source* is a layer's features, "8-mlps"; sources that differ in their layer alone are a source set, "mlps".
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from kukri.errors import RequestError
from kukri.sampling.fields import MAX_COUNT
from kukri.server.body import Body, Refused
from kukri.server.bounds import MOST_FEATURES

MOST_RESULTS = 1000
_Text = Annotated[str, Field(min_length=1)]
_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Index = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Numbers = Annotated[list[float], Field(min_length=1, max_length=1 << 17)]
_Results = Annotated[int, Field(ge=1, le=MOST_RESULTS)]
SteerType = Literal["STEERED", "DEFAULT"]


class PromptBody(Body):
    """What all requests about a prompt have."""

    prompt: _Text
    model: _Name | None = None


class SingleBody(PromptBody):
    """Activations of one feature, or along a vector at a hook."""

    source: _Name | None = None
    index: _Index | None = None
    vector: _Numbers | None = None
    hook: _Name | None = None

    @model_validator(mode="after")
    def _is_one(self) -> SingleBody:
        given = [value is not None for value in (self.source, self.index, self.vector, self.hook)]
        if given not in ([True, True, False, False], [False, False, True, True]):
            raise RequestError.of("source", "and 'index' or 'vector' and 'hook' are required")
        return self


class AllBody(PromptBody):
    """The most active features of a source set."""

    source_set: _Name
    selected_sources: Annotated[list[_Name], Field(max_length=256)] | None = None
    sort_by_token_indexes: Annotated[list[_Index], Field(max_length=1024)] | None = None
    ignore_bos: bool = True
    feature_filter: Annotated[list[_Index], Field(max_length=MOST_RESULTS)] | None = None
    num_results: _Results | None = None


class TopkByTokenBody(PromptBody):
    """The most active features of a source at each token."""

    source: _Name
    top_k: Annotated[int, Field(ge=1, le=256)] | None = None
    ignore_bos: bool = True


class Feature(Body):
    """A feature of a source."""

    model: _Name | None = None
    source: _Name
    index: _Index


class CosineBody(Body):
    """The features of a source whose directions are most like a feature's, or a vector."""

    feature: Feature | None = None
    vector: _Numbers | None = None
    model: _Name | None = None
    source: _Name
    num_results: _Results

    @model_validator(mode="after")
    def _is_one(self) -> CosineBody:
        if (self.feature is None) == (self.vector is None):
            raise RequestError("either 'feature' or 'vector' is required, not both", param="feature")
        return self


class SteerFeature(Feature):
    """A feature to steer by."""

    strength: float
    steering_vector: _Numbers | None = None


class SteerVector(Body):
    """A vector to steer by."""

    steering_vector: _Numbers
    hook: _Name
    strength: float


class SteerBody(Body):
    """What completions and chats that are steered have in common."""

    model: _Name | None = None
    steer_method: Literal["SIMPLE_ADDITIVE", "ORTHOGONAL_DECOMP"] = "SIMPLE_ADDITIVE"
    normalize_steering: bool = False
    types: Annotated[list[SteerType], Field(min_length=1, max_length=2)]
    features: Annotated[list[SteerFeature], Field(min_length=1, max_length=32)] | None = None
    vectors: Annotated[list[SteerVector], Field(min_length=1, max_length=32)] | None = None
    n_completion_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    strength_multiplier: float = 1.0
    freq_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: int | float | None = None
    stream: bool | None = None
    n_logprobs: Annotated[int, Field(ge=0, le=10)] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> SteerBody:
        if (self.features is None) == (self.vectors is None):
            raise RequestError("either 'features' or 'vectors' is required, not both", param="features")
        return self


class SteerCompletionBody(SteerBody):
    """A text to continue, steered."""

    prompt: _Text


class SteerMessage(Body):
    """A message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: str


class SteerChatBody(SteerBody):
    """A chat to answer, steered. `steer_special_tokens` False leaves control tokens of the prompt alone."""

    prompt: Annotated[list[SteerMessage], Field(min_length=1)]
    steer_special_tokens: bool = True
    is_assistant_axis: Literal[False] | None = None


class GraphPromptBody(Body):
    """A text, or a chat that is to be answered."""

    prompt: str = ""
    messages: Annotated[list[SteerMessage], Field(min_length=1)] | None = None
    model_id: _Name | None = None

    @property
    def model(self) -> str | None:
        """The name of the model, as other bodies have it."""
        return self.model_id

    @model_validator(mode="after")
    def _is_one(self) -> GraphPromptBody:
        if (self.messages is None) == (not self.prompt):
            raise RequestError("either 'prompt' or 'messages' is required, not both", param="prompt")
        return self


class SalientBody(GraphPromptBody):
    """How many of the likeliest next tokens are meant."""

    max_n_logits: Annotated[int, Field(ge=1, le=100)] = 10
    desired_logit_prob: Annotated[float, Field(gt=0, le=1)] = 0.95


class GraphFeature(Body):
    """A feature that is set to what it is at `token_active_position` plus `delta`, or to 0, at
    `steer_position` or at the tokens of the answer.
    """

    layer: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    index: _Index
    token_active_position: _Index
    steer_position: _Index | None = None
    steer_generated_tokens: bool = False
    delta: float | None = None
    ablate: bool = False

    @model_validator(mode="after")
    def _is_one(self) -> GraphFeature:
        if self.ablate == (self.delta is not None):
            raise RequestError("either 'delta' or 'ablate' is required, not both", param="delta")
        if self.steer_generated_tokens == (self.steer_position is not None):
            raise RequestError(
                "either 'steer_position' or 'steer_generated_tokens' is required, not both",
                param="steer_position",
            )
        return self


class GraphSteerBody(GraphPromptBody):
    """A prompt continued as it is and with features of a graph set: `n_tokens`, each with the `top_k`
    likeliest. `transcoder` names the transcoders if the server has several.
    """

    refused: ClassVar[Refused] = {
        "freeze_attention": ((False,), "interventions change the attention already (see GraphMeasure)"),
    }
    transcoder: _Name | None = None
    features: Annotated[list[GraphFeature], Field(max_length=64)]
    n_tokens: Annotated[int, Field(ge=1, le=MAX_COUNT)] = 10
    top_k: Annotated[int, Field(ge=1, le=20)] = 5
    temperature: Annotated[float, Field(ge=0, le=100)] = 0.0
    freq_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    seed: int | None = None


class GraphBody(SalientBody):
    """An attribution graph. `transcoder` names the transcoders if the server has several."""

    refused: ClassVar[Refused] = {
        "signed_url": ((), "the graph is the response, and the server sends it to no other address"),
        "enable_qk_tracing": ((False,), "attention patterns always come from the unchanged run"),
    }
    ignored: ClassVar[frozenset[str]] = frozenset({"batch_size", "user_id", "qk_top_fraction", "qk_topk"})
    transcoder: _Name | None = None
    node_threshold: Annotated[float, Field(ge=0, le=1)] = 0.8
    edge_threshold: Annotated[float, Field(ge=0, le=1)] = 0.98
    slug_identifier: _Name = "graph"
    max_feature_nodes: Annotated[int, Field(ge=0, le=MOST_FEATURES)] = 2048
    compress: bool = False
