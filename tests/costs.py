"""What a call costs this thread's processor: in seconds, or in calls inside of it, which no neighbour changes."""

import gc
import sys
import time
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")

_TRIES = 3


def seconds_of(call: Callable[[], Result], limit: float) -> tuple[float, Result]:
    """The least processor seconds of up to three calls, and what the last call returned.

    Neighbours on the machine can only make a call slower, so the first call within `limit` counts. Only this thread's
    time does: a process of other tests has threads that still run. Their objects do not lengthen a garbage collection.
    """
    least = float("inf")
    for _ in range(_TRIES):
        gc.collect()
        gc.freeze()  # and not undone, which would undo that of tests/conftest.py
        begun = time.thread_time()
        result = call()
        seconds = time.thread_time() - begun
        least = min(least, seconds)
        if least < limit:
            break
    return least, result


def calls_in(call: Callable[[], object]) -> int:
    """How many functions a call calls, of Python and of C."""
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    gc.disable()  # a collection may call back
    sys.setprofile(see)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count
