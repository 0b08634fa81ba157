"""The in-cache speeds of weight types."""

from __future__ import annotations

import pytest

from benchmarks import weight_types


def test_every_type_has_a_speed_for_each_number_of_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """Would catch a product that is not run, or whose time does not grow with the tokens."""
    monkeypatch.setattr(weight_types, "MEASURED", ("Q4_0",))
    rates = weight_types.measure_in_cache(1, lambda text: None)
    assert list(rates["Q4_0"]) == [str(n) for n in weight_types.IN_CACHE_TOKENS]
    assert rates["Q4_0"]["1"] > 1.5 * rates["Q4_0"]["16"] > 0


def test_every_type_can_be_measured() -> None:
    """A form of tiles that no file has, which ended the benchmark after all others were prepared."""
    for name in weight_types.MEASURED:
        assert weight_types.random_weight(name, 1 << 18).shape[1] == weight_types.N_IN
