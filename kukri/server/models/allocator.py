"""The memory of unloaded models, which the C library's allocator would keep, goes back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
import weakref
from contextlib import suppress

from kukri.server.models.served_model import ServedModel

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # parameters of glibc's mallopt
_MMAP_BYTES = 1 << 20
_TRIES_TO_FREE = 20


def return_large_arrays() -> None:
    """Has glibc map large arrays one by one.

    Else, after the first that is freed, it puts larger and larger ones into heaps of each thread, whose ends
    it keeps: after a few models these hold more memory than a model.
    """
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            for option in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
                ctypes.CDLL(None).mallopt(option, _MMAP_BYTES)


def close_and_free(held: list[ServedModel]) -> None:
    """Closes the model, takes it out of the list, and frees its memory and the allocator's free lists.

    The list is for a thread to hold, which keeps its arguments until it has returned: the model with them.
    Another thread may hold the model for a moment more, or collect garbage, so that this one cannot.
    """
    llm = held.pop().llm
    left = weakref.ref(llm.engine)
    llm.close()
    del llm
    for _ in range(_TRIES_TO_FREE):
        gc.collect()
        if left() is None:
            break
        time.sleep(0.05)
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)
