"""The process that fetches a model: a line of stdin is its name, lines of stdout are JSON.

These are [done_bytes, total_bytes] now and then, and last null or a text, the error. It is a process of its
own because the downloads of `hf_xet` cannot be ended otherwise; it ends when its stdin does.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from threading import Thread
from typing import Any

from kukri.errors import KukriError
from kukri.formats import hub

_TELL_S = 0.5  # from one word of progress to the next
_GRACE_S = 5.0  # to tidy up when it is to end


def main() -> None:
    """Fetches the model that stdin names."""
    name = sys.stdin.readline().rstrip("\n")
    Thread(target=_end_with_stdin, daemon=True).start()
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    told_s = 0.0

    def tell(n_done: int, n_bytes: int) -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= _TELL_S:
            told_s = time.monotonic()
            _write([n_done, n_bytes])

    try:
        hub.pull(name, progress=tell)
        _write(None)
    except KukriError as error:
        _write(str(error))
    except KeyboardInterrupt:
        sys.exit(130)


def _write(line: Any) -> None:
    print(json.dumps(line), flush=True)


def _end_with_stdin() -> None:
    """Interrupts the download at the end of stdin, as Ctrl-C would: what it started ends with it."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE_S)
    os._exit(130)


if __name__ == "__main__":
    main()
