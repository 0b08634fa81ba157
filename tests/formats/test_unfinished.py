"""Files that appear whole or not at all, and what killed writers leave."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from kukri.formats.unfinished import unfinished

_KILLED = """
import os, signal, sys
from pathlib import Path
from kukri.formats.unfinished import unfinished
with unfinished(Path(sys.argv[1])) as path:
    path.write_bytes(bytes(1000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_writer_left_goes_with_the_next_file(tmp_path: Path) -> None:
    """Catches files of a model's size that stay forever because nobody writes the same name again."""
    subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path / "a.gguf")], check=False)
    assert len(list(tmp_path.iterdir())) == 1
    (tmp_path / ".b.gguf.1.part").touch()  # some other program's
    with unfinished(tmp_path / "c.gguf") as path, unfinished(tmp_path / "d.gguf") as other:
        path.write_text("c")
        other.write_text("d")
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [".b.gguf.1.part", "c.gguf", "d.gguf"]
