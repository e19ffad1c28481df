"""Names in modules and classes of other libraries, which one thread may give another function.

    thread A    with instead({(trl, "gather"): ours}) ........................      trl.gather calls ours
    thread B            with instead({(trl, "gather"): others}) ...........         trl.gather calls others
    thread C                                                                        trl.gather is what it was
    afterwards  trl.gather is what it was for all

A module has one function under a name for all threads: it asks who calls. The last thread that leaves puts the
original back.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

Place = tuple[Any, str]
"""A module or a class, and a name in it."""

_LOCK = threading.Lock()
_ORIGINALS: dict[Place, Callable[..., Any]] = {}
_BORROWERS: Counter[Place] = Counter()
_MEANT: ContextVar[Mapping[Place, Callable[..., Any]]] = ContextVar("borrowed names", default=MappingProxyType({}))


def original(place: Place) -> Any:
    """What a name means where no thread borrows it; None where there is no such name."""
    owner, name = place
    with _LOCK:
        return _ORIGINALS.get(place, getattr(owner, name, None))


@contextmanager
def instead(functions: Mapping[Place, Callable[..., Any]]) -> Iterator[None]:
    """Inside, each name means another function in this thread, which gets the original as its first argument."""
    with _LOCK:
        for place in functions:
            owner, name = place
            if not _BORROWERS[place]:
                _ORIGINALS[place] = getattr(owner, name)
                setattr(owner, name, _chosen(place, _ORIGINALS[place]))
            _BORROWERS[place] += 1
    token = _MEANT.set({**_MEANT.get(), **functions})
    try:
        yield
    finally:
        _MEANT.reset(token)
        with _LOCK:
            for place in functions:
                owner, name = place
                _BORROWERS[place] -= 1
                if not _BORROWERS[place]:
                    setattr(owner, name, _ORIGINALS.pop(place))


def _chosen(place: Place, own: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        meant = _MEANT.get().get(place)
        return own(*args, **kwargs) if meant is None else meant(own, *args, **kwargs)

    return call
