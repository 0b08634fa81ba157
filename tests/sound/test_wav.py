"""WAV files: every form that is read, resampling, and what is hostile or broken, named."""

from __future__ import annotations

import io
import struct
import time
import wave
from pathlib import Path

import numpy as np
import pytest

from kukri.errors import RequestError
from kukri.kernels.arrays import FloatArray
from kukri.sound.bounds import RATE
from kukri.sound.files import read_sound_file
from kukri.sound.samples import resampled
from kukri.sound.wav import decode_wav


def tone(rate: int, seconds: float = 0.5, hertz: float = 440) -> FloatArray:
    return (0.5 * np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate)).astype(np.float32)


def file(body: bytes, form: int = 1, channels: int = 1, rate: int = RATE, bits: int = 16) -> bytes:
    """A WAV file of these facts."""
    width = channels * bits // 8
    facts = struct.pack("<HHIIHH", form, channels, rate, (rate * width) % 2**32, width % 2**16, bits)
    parts = b"LIST\x03\0\0\0abc\0fmt \x10\0\0\0" + facts + b"data" + struct.pack("<I", len(body)) + body
    return b"RIFF" + struct.pack("<I", len(parts) + 4) + b"WAVE" + parts


GOOD = file(np.zeros(100, "<i2").tobytes())


def test_every_form_holds_the_same_sound() -> None:
    want = tone(RATE)
    of_24 = np.rint(want.astype(np.float64) * 2**23).astype("<i4").view(np.uint8).reshape(-1, 4)[:, :3]
    forms = {
        (1, 8): np.rint(want * 128 + 128).astype("u1"),
        (1, 16): np.rint(want * 2**15).astype("<i2"),
        (1, 24): of_24,
        (1, 32): np.rint(want.astype(np.float64) * 2**31).astype("<i4"),
        (3, 32): want,
        (3, 64): want.astype("<f8"),
    }
    for (form, bits), numbers in forms.items():
        found = decode_wav(file(numbers.tobytes(), form, bits=bits))
        np.testing.assert_allclose(found, want, atol=2.0 ** (1 - bits) if form == 1 else 0, rtol=0)


def test_files_of_the_standard_library_are_read_and_channels_mixed(tmp_path: Path) -> None:
    both = np.stack([tone(RATE), np.zeros(RATE // 2, np.float32)], axis=1)
    made = io.BytesIO()
    with wave.open(made, "wb") as opened:
        opened.setparams((2, 2, RATE, 0, "NONE", ""))
        opened.writeframes(np.rint(both * 2**15).astype("<i2").tobytes())
    path = tmp_path / "a.wav"
    path.write_bytes(made.getvalue())
    np.testing.assert_allclose(read_sound_file(path), both.mean(axis=1), atol=1e-4, rtol=0)


@pytest.mark.full(but=["8000"])
@pytest.mark.parametrize("rate", [8000, 22050, 44100, 48000])
def test_resampling_keeps_a_tone_and_drops_what_is_too_high(rate: int) -> None:
    """Catches a shift, and pieces that do not fit together after a minute."""
    found = resampled(tone(rate, 62), rate)
    want = tone(RATE, 62)
    assert len(found) == len(want)
    np.testing.assert_allclose(found[400:-400], want[400:-400], atol=2e-3, rtol=0)
    if rate == 48000:
        assert np.abs(resampled(tone(rate, 1, 12_000), rate)[400:-400]).max() < 2e-3


def test_a_file_that_is_cut_off_gives_what_is_there() -> None:
    whole = file(np.rint(tone(RATE) * 2**15).astype("<i2").tobytes())
    assert len(decode_wav(whole[: len(whole) // 2 + 1])) == len(decode_wav(whole)) // 2 - 14


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (GOOD[:20], "must have the part fmt before its end"),
        (GOOD[:52], "must have the part data before its end"),
        (file(b""), "must have at least one sample"),
        (file(b"\0" * 64, form=7, bits=8), "must hold integers or floats, not form 7 of 8 bits"),
        (file(b"\0" * 64, bits=12), "not form 1 of 12 bits"),
        (file(b"\0" * 64, channels=0), "must have 1 to 8 channels, not 0"),
        (file(b"\0" * 256, channels=64), "must have 1 to 8 channels, not 64"),
        (file(b"\0" * 64, rate=1), "must have 1000 to 384000 samples a second, not 1"),
        (file(b"\0" * 64, rate=2**32 - 1), "not 4294967295"),
        (file(np.full(8, np.nan, "<f4").tobytes(), 3, bits=32), "must hold finite numbers"),
        (file(bytes(36_000_000), rate=1000, bits=8), "must last at most 2 hours, not 10.0"),
    ],
)
def test_what_is_broken_is_named_at_once(data: bytes, message: str) -> None:
    began_s = time.process_time()
    with pytest.raises(RequestError, match=message):
        decode_wav(data, "file")
    assert time.process_time() - began_s < 1


@pytest.mark.full
def test_no_mutation_of_a_file_raises_anything_else() -> None:
    random = np.random.default_rng(5)
    for _ in range(2000):
        data = bytearray(GOOD)
        for place in random.integers(0, 70, random.integers(1, 6)):
            data[place] = random.integers(256)
        try:
            found = decode_wav(bytes(data[: random.integers(1, len(data) + 1)]))
        except RequestError:
            continue
        assert np.isfinite(found).all()
