"""Hashes of the logits of GGUF files on the portable backend, for comparing processors.

Run as a program with files: prints JSON, the hash by file, and the name of the backend's arithmetic. Needs no
more than kukri itself.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np

from kukri.formats.gguf.config import model_config
from kukri.formats.gguf.reader import GGUFFile
from kukri.formats.gguf.weights import GGUFWeights
from kukri.kernels import make_backend
from kukri.models import load_model


def logits_hash(path, backend):
    """A hash of the logits of 40 tokens, in chunks of 1, 20 and 19."""
    file = GGUFFile(Path(path))
    config = model_config(file)
    model = load_model(GGUFWeights(file, config), config)
    model.bind(backend)
    ids = np.random.RandomState(3).randint(0, config.n_vocab, (1, 40))
    cache, digest = model.new_cache(1, 64), hashlib.sha256()
    for start, stop in ((0, 1), (1, 21), (21, 40)):
        logits = model.forward(ids[:, start:stop], cache=cache)
        assert np.isfinite(logits).all(), path
        digest.update(logits.tobytes())
    return digest.hexdigest()[:16]


def main(paths):
    """Prints the hashes."""
    backend = make_backend("portable", 2)
    hashes = {path: logits_hash(path, backend) for path in paths}
    print(json.dumps({"arithmetic": backend.arithmetic, **hashes}))


if __name__ == "__main__":
    main(sys.argv[1:])
