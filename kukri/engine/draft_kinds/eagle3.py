"""EAGLE-3's layers (`kukri.models.eagle3`)."""

from __future__ import annotations

from collections.abc import Sequence

from kukri.engine.draft_kinds.kind import DraftKind
from kukri.engine.draft_model import DraftSetup, DraftSource, ModelDrafts
from kukri.engine.layer_drafts import LayerModel
from kukri.formats.huggingface.eagle3 import is_eagle3, read_eagle3
from kukri.kernels.arrays import FloatArray
from kukri.kernels.backend import Logits
from kukri.kernels.step import rows_batch
from kukri.models.eagle3 import Eagle3

LAYER_TYPE: str | None = "Q8_0"  # the layer is packed to it: half the bytes, and no answer differs


class EagleModel(LayerModel):
    """Computes drafts by EAGLE-3's layer, whose head has a part of the tokens."""

    layer: Eagle3

    def __init__(self, layer: Eagle3, setup: DraftSetup) -> None:
        super().__init__(layer, setup)
        self._reduce = self._compiled(self.layer.reduced, self._runner.limits.max_tokens)

    def _read(self, rows: FloatArray) -> FloatArray:
        return self._reduce(rows_batch(rows)).numpy().copy()

    def _chosen(self, logits: Logits, drafting: Sequence[ModelDrafts]) -> Sequence[int]:
        return [int(self.layer.to_target[token]) for token in super()._chosen(logits, drafting)]


EAGLE3 = DraftKind(
    lambda path, larger: DraftSource(read_eagle3(path, larger.model, LAYER_TYPE), EagleModel), is_eagle3
)
