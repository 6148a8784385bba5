"""How a server's interpreter shares its time: among threads, and with the search for unreachable cycles."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

# A step of a GPU takes 1 to 5 ms: Python's own 5 ms, which the engine's thread would wait for each time, double that.
SWITCH_S = 0.001
YOUNG_OBJECTS = 10_000  # made before young ones are looked through; Python's own 700 are half a request


@contextmanager
def without_collections() -> Iterator[None]:
    """For imports: almost all that they make stays, and looking through it again and again takes an eighth of them."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def tune_for_serving() -> None:
    """Called when the models are loaded: all that is there now is left out of collections.

    A full one would walk through it, 20 to 50 ms in which no thread runs, and many requests at once bring it about.
    """
    sys.setswitchinterval(SWITCH_S)
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    gc.collect()
    gc.freeze()


def collect_everything_again() -> None:
    """Called when a model was unloaded: it may have left cycles among what was there at the start."""
    gc.unfreeze()
