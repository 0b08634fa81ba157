"""The stages of sampling: a row for each, in their default order, the order of llama.cpp's chain.

From a row follow the names in `SamplingParams.samplers`, when a stage is on, what `mirostat` and `samplers`
switch off, and the numbers that a sampling record holds for it. `reference_sampling` defines what each does;
the CPU backend has a kernel for each, and the PyTorch backend for the common ones. Imports no NumPy, because
the command line reads this at each start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Literal, NamedTuple

_MIN_TEMPERATURE = 1e-6  # lower temperatures act as this one

# Codes in a record's `stages`, which END ends; the last two are what the field `mirostat` asks for
(
    END, PENALTIES, DRY, TOP_N_SIGMA, TOP_K, TYPICAL_P, TOP_P, MIN_P, XTC, TEMPERATURE,
    MIROSTAT_1, MIROSTAT_2,
) = range(12)  # fmt: skip
MAX_STAGES = 12


class Stage(NamedTuple):
    """One stage of sampling; the fields that it names are of SamplingParams.

    `kind`: an edit changes the logits of some tokens, and runs even where the largest logit wins. A filter is
    replaced by mirostat. `letter` is the stage's in llama.cpp's sequence of samplers. The stage is on if any
    of `switches` differs from its default and `condition` is true of the parameters. `numbers` are fields of
    a sampling record, as functions of the parameters.
    """

    code: int
    name: str
    letter: str
    kind: Literal["edit", "filter", "scale"]
    switches: tuple[str, ...]
    numbers: Mapping[str, Callable[[Any], float]] = {}
    condition: Callable[[Any], bool] = lambda params: True

    def is_on(self, params: Any) -> bool:
        """Return whether the stage changes anything with these SamplingParams."""
        off = type(params)  # its attributes are the fields' defaults
        is_set = any(getattr(params, name) != getattr(off, name) for name in self.switches)
        return is_set and self.condition(params)


def _copies(*names: str) -> dict[str, Callable[[Any], float]]:
    """Numbers of a record that are parameters of the same names."""
    return {name: attrgetter(name) for name in names}


STAGES = (
    # repetition (prompt and generated tokens), then presence and frequency (generated tokens)
    Stage(
        PENALTIES, "penalties", "e", "edit",
        ("repetition_penalty", "presence_penalty", "frequency_penalty"),
        _copies("repetition_penalty", "presence_penalty", "frequency_penalty"),
        lambda params: params.repeat_last_n != 0,
    ),
    # a growing penalty on tokens that would continue a repetition
    Stage(
        DRY, "dry", "d", "edit", ("dry_multiplier",),
        condition=lambda params: params.dry_penalty_last_n != 0,
    ),
    # keeps logits within n standard deviations of the largest
    Stage(
        TOP_N_SIGMA, "top_n_sigma", "s", "filter", ("top_n_sigma",), _copies("top_n_sigma"),
        lambda params: params.top_n_sigma > 0.0,
    ),
    # keeps the k most likely tokens
    Stage(TOP_K, "top_k", "k", "filter", ("top_k",), _copies("top_k")),
    # keeps tokens about as surprising as expected, with a share p of the probability
    Stage(TYPICAL_P, "typical_p", "y", "filter", ("typical_p",), _copies("typical_p")),
    # keeps the fewest most likely tokens whose probabilities reach p
    Stage(TOP_P, "top_p", "p", "filter", ("top_p",), _copies("top_p")),
    # keeps the tokens at least p times as likely as the most likely one
    Stage(
        MIN_P, "min_p", "m", "filter", ("min_p",),
        {"min_p_depth": lambda params: math.log(params.min_p) if params.min_p else 0.0},
    ),
    # takes out, with `xtc_probability`, all tokens above `xtc_threshold` but the least likely of them
    Stage(
        XTC, "xtc", "x", "filter", ("xtc_probability",), _copies("xtc_threshold"),
        lambda params: params.xtc_threshold <= 0.5,
    ),
    # divides the logits, with `dynatemp_range` by more the flatter they are
    Stage(
        TEMPERATURE, "temperature", "t", "scale", ("temperature", "dynatemp_range"),
        {
            "temperature": lambda params: max(params.temperature, _MIN_TEMPERATURE),
            "temperature_range": attrgetter("dynatemp_range"),
            "temperature_exponent": attrgetter("dynatemp_exponent"),
        },
    ),
)  # fmt: skip

EDITS = tuple(stage.code for stage in STAGES if stage.kind == "edit")
