"""The memory of unloaded models, which the C library's allocator would keep, goes back to the system."""

from __future__ import annotations

import gc
import time
import weakref

from kukri.host.os_calls import return_free_memory
from kukri.server.models.served_model import ServedModel

_TRIES_TO_FREE = 20


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
    return_free_memory()
