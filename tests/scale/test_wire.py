"""Sampling parameters on their way to another process."""

from __future__ import annotations

import json

from kukri.sampling import SamplingParams
from kukri.sampling.params import TokenSet
from kukri.scale.wire import params_from_json, params_to_json


def test_breakers_that_are_sets_of_tokens_arrive_as_their_tokens() -> None:
    """Catches a set that JSON cannot hold, or that a replica takes for one sequence of tokens."""
    sent = SamplingParams(dry_multiplier=1, dry_sequence_breakers=[TokenSet([3, 1]), (5, 6)], seed=2**64 - 1)
    found = params_from_json(json.loads(json.dumps(params_to_json(sent))))
    assert found.dry_sequence_breakers == ((1,), (3,), (5, 6))
    assert (found.seed, found.dry_multiplier) == (2**64 - 1, 1.0)
