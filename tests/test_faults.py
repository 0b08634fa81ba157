"""The faults that `tests.faults` puts into the package by hand."""

from __future__ import annotations

import ast

from tests.faults import ROOT, chosen


def test_faults_by_hand_fit_the_package() -> None:
    """Catches code that changed under a fault, which would end hours of trying faults with an assertion."""
    for fault in chosen():
        ast.parse((ROOT / fault.file).read_text().replace(fault.old, fault.new))
