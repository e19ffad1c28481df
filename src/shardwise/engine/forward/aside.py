"""What objects hold for a while, and what they held before: a module that runs aside has no trace of it afterwards."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from typing import Any

from torch import nn


@contextmanager
def attributes_set(holder: object, values: Mapping[str, object]) -> Iterator[None]:
    """The object, a module say, has these attributes meanwhile."""
    saved = {key: getattr(holder, key) for key in values}
    try:
        for key, value in values.items():
            setattr(holder, key, value)
        yield
    finally:
        for key, value in saved.items():
            setattr(holder, key, value)


@contextmanager
def items_set(places: Iterable[tuple[dict[str, Any], str, Any]]) -> Iterator[None]:
    """Dicts have these values under these keys meanwhile: (dict, key, value)."""
    saved = [(held, key, held.get(key), value) for held, key, value in places]
    for held, key, _, value in saved:
        held[key] = value
    try:
        yield
    finally:
        for held, key, before, _ in saved:
            held[key] = before


def kept_attributes(
    modules: Iterable[nn.Module], *, names: Collection[str] | None = None, contents: bool = False
) -> Callable[[], None]:
    """What puts back the attributes that modules have now. names: of those; None: all.

    contents: it puts back the items of dicts and sets, too.
    """
    saved: list[tuple[dict[str, Any], dict[str, Any], list[tuple[Any, Any]]]] = []
    for each in modules:
        before = {key: held for key, held in vars(each).items() if names is None or key in names}
        kept = [(held, copy(held)) for held in before.values() if contents and isinstance(held, dict | set)]
        saved.append((vars(each), before, kept))

    def put_back() -> None:
        for attributes, before, kept in saved:
            for key in list(attributes) if names is None else attributes.keys() & names:
                del attributes[key]
            attributes.update(before)
            # Emptied and filled again, not replaced: others may hold the same object, as handles of hooks do.
            for held, content in kept:
                held.clear()
                held.update(content)

    return put_back
