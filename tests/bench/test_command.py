"""What the programs of kukri.bench share."""

from __future__ import annotations

import io

import pytest

from kukri.bench.command import served_url
from kukri.errors import KukriError


def test_a_server_is_found_after_what_else_it_says() -> None:
    """Catches a bench that gives up where the server compiles its kernels first."""
    said = ["kukri: compiling kernels\n", "serving a on http://127.0.0.1:4321/v1, a page at …\n", "more\n"]
    stderr = io.StringIO("".join(said))
    assert served_url(stderr) == "http://127.0.0.1:4321"
    assert stderr.read() == "more\n"
    with pytest.raises(KukriError, match="no such file"):
        served_url(io.StringIO("error: no such file\n"))
