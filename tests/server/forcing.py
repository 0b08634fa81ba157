"""Answers that a test decides: whatever is asked, the model says a given text."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

from kukri.server.models.served_model import ServedModel


def force(
    service: ServedModel,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    *,
    pause_s: float = 0.0,
    with_marks: bool = False,
) -> None:
    """Every answer is the text, a token every `pause_s`; a grammar that forbids one fails the request.

    With `with_marks`, control tokens that are written in the text are those tokens.
    """
    ids = service.tokenizer.encode(text, add_special=False, parse_special=with_marks)
    ids.append(min(service.tokenizer.eos_ids))
    params = type(service).params

    def forced_params(sampling):
        done = iter(ids)

        def processor(_, logits):
            time.sleep(pause_s)
            row = np.full_like(logits, -np.inf)
            i = next(done)
            row[i] = 0.0  # where a grammar forbids it, nothing is left and the request fails
            return row

        made = params(service, sampling)
        return replace(made, temperature=0.0, top_p=1.0, logits_processors=(processor,))

    monkeypatch.setattr(service, "params", forced_params)
