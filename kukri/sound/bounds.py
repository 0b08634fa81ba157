"""The bounds of a sound file, whatever its format."""

from __future__ import annotations

from kukri.errors import RequestError

RATE = 16_000  # samples a second that models hear
MAX_FILE_BYTES = 128 << 20
MAX_CHANNELS = 8
MAX_SECONDS = 2 * 60 * 60
MIN_RATE, MAX_RATE = 1_000, 384_000  # samples a second


def check_facts(param: str, n_channels: int, rate: int) -> None:
    """Raises RequestError on channels and samples a second that are out of bounds."""
    if not 1 <= n_channels <= MAX_CHANNELS:
        raise RequestError.of(param, f"must have 1 to {MAX_CHANNELS} channels, not {n_channels}")
    if not MIN_RATE <= rate <= MAX_RATE:
        raise RequestError.of(param, f"must have {MIN_RATE} to {MAX_RATE} samples a second, not {rate}")


def check_length(param: str, seconds: float) -> None:
    """Raises RequestError on a sound that is too long."""
    if seconds > MAX_SECONDS:
        hours = f"{MAX_SECONDS // 3600} hours, not {seconds / 3600:.1f}"
        raise RequestError.of(param, f"must last at most {hours}")
