"""Writes `SamplingOptions` of kukri/sampling/params.py from the fields of `SamplingParams`.

`python packaging/sampling_options.py`; tests/sampling/test_params.py fails while it is not what this writes.
Type checkers read the keyword arguments of `LLM.generate` there, and cannot derive them from a dataclass.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

from kukri.sampling import SamplingParams

SOURCE = Path(__file__).resolve().parents[1] / "kukri" / "sampling" / "params.py"
_OPTIONS = re.compile(r"(class SamplingOptions\([^\n]*\n[^\n]*\n\n)(?:    \w+: [^\n]*\n)+")


def written(source: str) -> str:
    """Return the module's source with an option for each field."""
    options = "".join(f"    {field.name}: {field.type}\n" for field in fields(SamplingParams))
    return _OPTIONS.sub(lambda match: match[1] + options, source)


if __name__ == "__main__":
    SOURCE.write_text(written(SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
