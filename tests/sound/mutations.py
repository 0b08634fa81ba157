"""Decodes mutated sound files: `python -m tests.sound.mutations FORMAT [N]`, 2,000 unless told otherwise.

All are decoded in one process, so that none can hide a crash behind the end of its own.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from importlib import import_module
from io import BytesIO

import numpy as np

from kukri.errors import RequestError
from kukri.sound.decoder_process import Decoder
from kukri.sound.files import format_of
from tests.sound.encoded import FORMATS, encoded_tone

MOST_S = 5  # of processor time for a file


def mutated(data: bytes, seed: int) -> bytes:
    """A file with some bytes changed, repeated, dropped or cut off; half of the time near its beginning."""
    random = np.random.default_rng(seed)
    found = bytearray(data)
    for _ in range(random.integers(1, 12)):
        place = int(random.integers(min(len(found), 200) if random.integers(2) else len(found)))
        match random.integers(5):
            case 0:
                found[place : place + 4] = random.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"])
            case 1:
                del found[place : place + int(random.integers(1, 40))]
            case 2:
                found[place:place] = found[place : place + int(random.integers(1, 400))]
            case _:
                found[place : place + 1] = random.bytes(1)
        if not found:
            break
    return bytes(found[: random.integers(len(found) + 1)] if random.integers(4) == 0 else found)


def check_mutations(name: str, n: int) -> Counter[str]:
    """Decode `n` mutated files of a format; returns how many there are of each outcome."""
    av, data, found = import_module("av"), encoded_tone(name, 0.5), Counter[str]()
    for seed in range(n):
        file = mutated(data, seed)
        form = format_of(file[:12])
        if form is None:
            found["no sound file"] += 1
            continue
        decoder, began_s = Decoder(av, "file"), time.process_time()
        try:
            n_bytes = sum(len(piece) for piece in decoder.pieces(BytesIO(file), form))
            assert n_bytes % 4 == 0
            found["damaged" if decoder.n_damaged else "whole"] += 1
        except RequestError as error:
            found[str(error)] += 1
        assert time.process_time() - began_s < MOST_S, f"the mutation {seed} of {name} takes too long"
    return found


if __name__ == "__main__":
    for one in sys.argv[1:2] or FORMATS:
        print(one, dict(check_mutations(one, int((sys.argv[2:] or ["2000"])[0]))), flush=True)
