"""Let requests without a seed draw fixed numbers in processes that tests start: Python runs this first."""

from __future__ import annotations

import os
import random
import sys


class FixedRandom(random.Random):
    """Draw what follows from the running test and the order in it, where kukri asks for a random start."""

    _last_test = ""
    _n_made = 0

    def __init__(self, x: object = None) -> None:
        # tempfile's names, for one, must stay random: only kukri's numbers follow from the test
        if x is None and sys._getframe(1).f_globals.get("__name__", "").startswith("kukri."):
            test = os.environ.get("PYTEST_CURRENT_TEST", "")
            FixedRandom._n_made = FixedRandom._n_made + 1 if test == FixedRandom._last_test else 0
            FixedRandom._last_test = test
            x = f"{os.environ.get('KUKRI_TEST_DRAWS', 0)} {test} {FixedRandom._n_made}"
        super().__init__(x)  # type: ignore[arg-type]


random.Random = FixedRandom  # type: ignore[misc]
