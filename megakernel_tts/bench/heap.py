"""Garbage collection while streams are measured on an event loop."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def frozen_heap() -> Iterator[None]:
    """Excludes existing objects from garbage collection, as a server does after its warm-up.

    They stay excluded afterwards if others were excluded before.
    """
    was_frozen = gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        if not was_frozen:
            gc.unfreeze()
