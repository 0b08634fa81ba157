"""The benchmark of images, on a tiny model."""

from __future__ import annotations

import numpy as np

from benchmarks.images import _N_STREAMS, Pair, _encode_s, _files, _gaps, _turns
from benchmarks.make_model import SHAPES
from kukri import LLM

TINY = Pair(
    SHAPES["tiny"],
    {
        "model_type": "idefics3",
        "vision_config": {
            **{"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 3, "num_hidden_layers": 2},
            **{"image_size": 32, "patch_size": 8},
        },
        "scale_factor": 2,
    },
    {
        "image_processor_type": "Idefics3",
        **{"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 32}},
    },
    {},
)


def test_pictures_are_encoded_and_known_again():
    """Catches files that do not open, a second turn that encodes again, and streams that are not timed."""
    pictures = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), np.uint8)
    with (
        _files(TINY) as (text, mmproj),
        LLM(text, mmproj=mmproj, n_threads=1, max_requests=_N_STREAMS + 1) as llm,
    ):
        assert _encode_s(llm, pictures[0]) > 0
        n_before = llm.engine.encodings.n_encoded
        assert min(_turns(llm, pictures[1])) > 0
        assert llm.engine.encodings.n_encoded == n_before + 1
        assert len(_gaps(llm, pictures[2])) >= _N_STREAMS
