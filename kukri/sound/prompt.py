"""A sound ready for its encoder, and a prompt that begins with it: what the engine takes."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import ClassVar

from kukri.dataclass import dataclass
from kukri.kernels.arrays import FloatArray
from kukri.models.spans import check_spans


@dataclass(frozen=True, eq=False)
class SoundInput:
    """One window of sound as the encoder takes it. The array is not written to."""

    noun: ClassVar[str] = "sound"

    features: FloatArray  # float32 [frames, bands]
    n_tokens: int  # places that it takes before the text
    digest: bytes  # 32 bytes: a hash of the features

    @classmethod
    def of(cls, features: FloatArray, n_tokens: int) -> SoundInput:
        """The input of features [frames, bands]."""
        return cls(features, n_tokens, sha256(features.tobytes()).digest())


@dataclass(frozen=True, eq=False)
class SoundPrompt:
    """A prompt of a sound and the text after it. `token_ids` begin with a placeholder for each place."""

    token_ids: Sequence[int]
    sound: SoundInput

    def __post_init__(self) -> None:
        """Checks that the tokens have the places of the sound."""
        check_spans(self)

    @classmethod
    def of(cls, sound: SoundInput, text: Sequence[int]) -> SoundPrompt:
        """The prompt of a sound and the token ids of a text."""
        return cls([*[0] * sound.n_tokens, *text], sound)

    @property
    def inputs(self) -> tuple[SoundInput]:
        """The sound."""
        return (self.sound,)

    @property
    def spans(self) -> tuple[tuple[int, int, int]]:
        """The places of the sound, which come first."""
        return ((0, self.sound.n_tokens, 0),)

    @property
    def text(self) -> Sequence[int]:
        """The tokens after the sound."""
        return self.token_ids[self.sound.n_tokens :]

    def __len__(self) -> int:
        """Tokens of the prompt, placeholders included."""
        return len(self.token_ids)
