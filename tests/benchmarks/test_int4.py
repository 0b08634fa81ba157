"""The comparison of int4 products."""

from __future__ import annotations

import pytest

from benchmarks import int4
from kukri.errors import ConfigError
from kukri.kernels.cpu import CpuBackend


def test_every_way_multiplies_the_same_matrices() -> None:
    """Quants handed to PyTorch in another order; a way that is timed and computes something else."""
    backend = CpuBackend(2)
    refusal = int4.torch_refusal(2)
    found = int4.measure_shape(backend, 80, 512, 5, 2, with_torch=not refusal)
    backend.close()
    assert len(found) == (2 if refusal else 3), refusal
    fine, *coarse = found
    assert 0 < fine.activation_error < 0.01
    for way in found:
        assert way.activation_error < 0.02 < way.error < 0.2
        assert way.ms > 0
    for way in coarse:  # one scale for outliers and all
        assert way.outlier_error > 1.5 * fine.outlier_error
    if not refusal:
        assert coarse[0].activation_error == pytest.approx(coarse[1].activation_error, rel=0.1)


@pytest.mark.parametrize("text", ["", "5", "5x33", "axb", "32x32x32", "0x32"])
def test_shapes_that_are_none(text: str) -> None:
    """A traceback from an option."""
    with pytest.raises(ConfigError, match="shapes are written like"):
        int4._shapes(text)
