"""What counts as the same weights where processes must agree on a model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from kukri.engine.model_identity import weights_identity
from tests.tiny_gguf import random_arrays, tiny_config, write_tiny


@pytest.mark.parametrize("scale", [1, 40], ids=["whole", "sampled"])
def test_fine_tunes_of_one_size_are_other_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scale: int
) -> None:
    """Catches stages or replicas that mix a base model and its fine-tune, whose files have one size."""
    monkeypatch.setattr("kukri.engine.model_identity._SAMPLE_BYTES", 4096 // scale)
    monkeypatch.setattr("kukri.engine.model_identity._N_SAMPLES", 1024 // scale)
    config = tiny_config()
    arrays = random_arrays(config)
    identities = []
    for name in ("base", "copy", "layer", "embedding"):
        (tmp_path / name).mkdir()
        changed = dict(arrays)
        for tensor in arrays:
            if (name == "layer" and "layers.1" in tensor) or (name == "embedding" and "embed" in tensor):
                changed[tensor] = np.flip(arrays[tensor]).copy()
        path = write_tiny(tmp_path / name / "model.gguf", config, changed)
        identities.append(weights_identity(path, config, None))
    base, copy, *others = identities
    assert copy == base
    assert len({base, *others}) == 3
    assert weights_identity(tmp_path / "base" / "model.gguf", config, "q8_0") != base
