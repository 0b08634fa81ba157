"""Sound files of other formats than WAV, by FFmpeg in a process of its own; what is broken is named."""

from __future__ import annotations

import logging
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from kukri.errors import RequestError, UnsupportedError
from kukri.sound.bounds import RATE
from kukri.sound.files import decode_sound, read_sound_file
from tests.sound.encoded import FORMATS, encoded, encoded_tone, tone
from tests.sound.mutations import check_mutations


@pytest.mark.full(but=["flac"])
@pytest.mark.parametrize("name", FORMATS)
def test_a_tone_is_heard_in_every_format(name: str) -> None:
    """Catches a rate, a channel, or a format of numbers that is mistaken for another."""
    found, want = decode_sound(encoded_tone(name)), tone(RATE)
    assert abs(len(found) - RATE) < 1500
    # encoders of AAC begin with silence: the place is where both are most alike
    middle, far = want[4000:12000], FORMATS[name][3]
    shifts = [np.abs(found[start : start + len(middle)] - middle).max() for start in range(4000, 5400)]
    assert min(shifts) < far


@pytest.mark.full
def test_channels_are_mixed_and_values_clipped() -> None:
    both = decode_sound(encoded(tone(RATE), "flac", "flac", RATE, "stereo"))
    np.testing.assert_allclose(both, tone(RATE), atol=1e-4, rtol=0)
    loud = decode_sound(encoded(8 * tone(RATE), "matroska", "pcm_f32le", RATE))
    assert np.abs(loud).max() == 1


@pytest.mark.full
def test_silence_is_a_sound() -> None:
    assert not decode_sound(encoded(np.zeros(RATE, np.float32), "flac", "flac", RATE)).any()


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name in FORMATS if name not in ("m4a", "mp4")])
def test_of_a_damaged_file_the_rest_is_read_with_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data = encoded_tone(name, 4.0)
    cut_off = decode_sound(data[: len(data) // 2])
    assert 1.5 * RATE < len(cut_off) < 2.6 * RATE
    broken = bytearray(data)
    broken[len(data) // 2 :: 97] = bytes(len(broken[len(data) // 2 :: 97]))
    try:
        with caplog.at_level(logging.WARNING):
            assert len(decode_sound(broken)) > 1.5 * RATE
    except RequestError as error:
        pytest.fail(str(error))


def broken_files() -> dict[str, tuple[bytes, str]]:
    flac = encoded_tone("flac", 0.1)
    ten_hours = bytearray(flac)
    place = flac.index(b"fLaC") + 8 + 13  # how many samples it has
    ten_hours[place + 1 : place + 5] = struct.pack(">I", 36_000 * 44_100)
    channels = bytearray(encoded(tone(8000, 0.1), "matroska", "pcm_s16le", 8000))
    channels[channels.index(b"\x9f\x81\x01") + 2] = 64
    nothing = np.full(RATE // 4, np.nan, np.float32)
    return {
        "empty": (b"", "must not be empty"),
        "text": (b"what is said", "must be a sound file: WAV, FLAC"),
        "playlist": (b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "must be a sound file"),
        "picture": (b"\xff\xd8\xff\xe0" + bytes(1000), "must be a sound file"),
        "start": (flac[:20], "beginning is damaged"),
        "no frames": (flac[: flac.index(b"\xff\xf8")], "must have at least one sample"),
        "noise": (b"\xff\xfb" + np.random.default_rng(1).bytes(500), "beginning is damaged"),
        "ten hours": (bytes(ten_hours), "must last at most 2 hours, not 10.0"),
        "channels": (bytes(channels), "must have 1 to 8 channels, not 64"),
        "rate": (encoded(tone(8000, 0.1), "matroska", "pcm_s16le", 500), "samples a second, not 500"),
        "numbers": (encoded(nothing, "matroska", "pcm_f32le", RATE), "must hold finite numbers"),
    }


@pytest.mark.full
def test_what_is_broken_is_named() -> None:
    """Catches a raw exception, a format that is guessed, and memory that is taken by a claim of the file."""
    for name, (data, message) in broken_files().items():
        with pytest.raises(RequestError) as error:
            decode_sound(data)
        assert message in str(error.value), name


def test_without_pyav_the_command_that_installs_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kukri.sound.files.find_spec", lambda name: None)
    with pytest.raises(UnsupportedError, match=r"needs the package av: run `pip install .*audio"):
        decode_sound(b"fLaC" + bytes(100))


def test_a_decoder_that_dies_or_hangs_is_an_error_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a crash or a limit of the process that ends as a server's error."""
    pytest.importorskip("av")

    def ends(*args: object, **kwargs: object) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], -11, b"half", b"")

    def hangs(*args: object, **kwargs: object) -> None:
        raise subprocess.TimeoutExpired("decoder", 1)

    for run in (ends, hangs):
        monkeypatch.setattr("kukri.sound.files.subprocess.run", run)
        with pytest.raises(RequestError, match="within the limits"):
            decode_sound(b"fLaC" + bytes(100))


@pytest.mark.skipif(sys.platform == "win32", reason="its processes have no such limits")
def test_the_decoder_can_open_nothing() -> None:
    """Catches a file, a pipe or a connection that a sound file makes FFmpeg open."""
    program = (
        "import socket; from kukri.host.limits import forbid_files; forbid_files()\n"
        "for opened in (lambda: open('/dev/null'), socket.socket):\n"
        "    try: opened()\n"
        "    except OSError as error: print(error.errno)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert ended.stdout.split() == [b"24", b"24"]


@pytest.mark.skipif(not Path("/dev/zero").exists(), reason="this system has no such device")
def test_a_device_without_an_end_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a limit that is asked of the size that a file states."""
    monkeypatch.setattr("kukri.sound.files.MAX_FILE_BYTES", 1 << 20)
    with pytest.raises(RequestError, match="must have at most 1 MiB"):
        read_sound_file(Path("/dev/zero"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
def test_no_mutation_of_a_file_raises_anything_else(name: str) -> None:
    """Catches a crash, an error that no client could read, and a file that takes seconds."""
    check_mutations(name, 2000)
