"""States: what can be saved and loaded, and what else calls take.

A state says which pieces this rank has, as views of live tensors: asking copies nothing. The protocols:

    Mapping            tensors by name or by piece
    Stateful           .state()                            also an object of the user's own
    Ordered            .state() .names()                   the order of the model, for files made of its tensors
    Restorable         .state() .settings() .restore()     engines and `TorchState`: a load may need more than copies
    Numbering          .numbering()                        the same, for state whose parameters have numbers
    Positioned         .cursor() .check() .resume()        no state: `sw.Data`, whose position goes along
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, TypeAlias, runtime_checkable

import torch

from shardwise.errors import CheckpointError, DataError
from shardwise.plan.optimizer_entries import NumberedParameter
from shardwise.rewrite import Rewrite
from shardwise.space import Piece


# Checked by isinstance, for a state is a mapping or one of these; it looks for the methods only.
@runtime_checkable
class Stateful(Protocol):
    """Anything that says which pieces this rank holds."""

    def state(self) -> Mapping[Piece, torch.Tensor]:
        """The pieces and their elements: views, in the piece's box shape or flat, row-major."""


class Restoration(Protocol):
    """A load that is about to happen. Nothing of the target has changed yet."""

    @property
    def wanted(self) -> Mapping[Piece, torch.Tensor]:
        """What to read, and the tensors that take it."""

    @property
    def aliases(self) -> Mapping[str, str]:
        """Other names of wanted tensors (ties): alias -> name."""

    @property
    def accounted(self) -> Collection[str]:
        """Stored names that are not wanted because the target makes them from others."""

    @property
    def findings(self) -> Sequence[str]:
        """What of the stored settings does not fit the target; refuses the load unless it is `strict=False`."""

    @property
    def notes(self) -> Sequence[str]:
        """What the target decides where the checkpoint does not, and refuses nothing for."""

    def finish(self) -> None:
        """Make the values that were read the target's own. Called by all ranks together, once, after the last read."""


@runtime_checkable
class Restorable(Stateful, Protocol):
    """A Stateful that knows more than tensors: an engine, or a model with its optimizers."""

    def settings(self) -> Mapping[str, object]:
        """JSON values besides the tensors. Ranks may know different keys; keys that two know have equal values."""

    def restore(self, stored: Mapping[str, Piece], settings: Mapping[str, object]) -> Restoration:
        """Prepare to take over `stored` (every tensor as one piece) and `settings`, without changing anything."""


@runtime_checkable
class Numbering(Protocol):
    """A Restorable that knows how torch counts the parameters of its optimizers."""

    def numbering(self) -> Sequence[Sequence[Sequence[NumberedParameter]]]:
        """For each optimizer and each of its groups: all its parameters in the order in which it got them."""


@runtime_checkable
class Ordered(Stateful, Protocol):
    """A Stateful that knows in which order its model has its tensors; ranks hold them in others."""

    def names(self) -> Sequence[str]:
        """Names of the model's parameters and buffers in its own order, ties under each of their names."""


class Positioned(Protocol):
    """What knows how far a run has read its samples, such as `sw.Data`."""

    def cursor(self) -> Mapping[str, object]:
        """JSON values, the same on all ranks."""

    def check(self, cursor: Mapping[str, object]) -> None:
        """Raise DataError for a cursor that is not of these samples."""

    def resume(self, cursor: Mapping[str, object]) -> None:
        """Go on from there."""


class SeveralPositions:
    """Several of them by name, as one: its cursor has theirs."""

    def __init__(self, data: Mapping[str, Positioned]) -> None:
        self._data = dict(data)

    def cursor(self) -> Mapping[str, object]:
        """See `Positioned`."""
        return {name: dict(each.cursor()) for name, each in self._data.items()}

    def check(self, cursor: Mapping[str, object]) -> None:
        """See `Positioned`."""
        saved = sorted(cursor) if holds_several(cursor) else []
        if saved != sorted(self._data):
            has = f"those of {', '.join(saved)}" if saved else "one without a name"
            raise DataError(
                f"the save has cursors of other data: {has}, and data has {', '.join(sorted(self._data))}. Give the "
                "data of the saved run"
            )
        for name, each in self._data.items():
            try:
                each.check(cursor[name])  # type: ignore[arg-type]  # what is no cursor is refused there
            except DataError as error:
                raise DataError(f"{name}: {error}") from error

    def resume(self, cursor: Mapping[str, object]) -> None:
        """See `Positioned`."""
        for name, each in self._data.items():
            each.resume(cursor[name])  # type: ignore[arg-type]  # it was checked


SomeData: TypeAlias = Positioned | Mapping[str, Positioned]
"""What `save` and `load` take as data: one, or several by name."""


def positioned(data: SomeData) -> Positioned:
    """The data as one. Raises CheckpointError for what has no cursor."""
    given = {f"data[{name!r}]": each for name, each in data.items()} if isinstance(data, Mapping) else {"data": data}
    for name, each in given.items():
        if not all(hasattr(each, wanted) for wanted in ("cursor", "check", "resume")):
            raise CheckpointError(
                f"{name} is a {type(each).__name__}; give the sw.Data that the loop reads, or leave it out"
            )
    if not isinstance(data, Mapping):
        return data
    if strange := [name for name in data if not isinstance(name, str)]:
        raise CheckpointError(f"data has the key {strange[0]!r}; the names of several data are strings")
    if not data:
        raise CheckpointError("data is an empty dict; give a sw.Data, several by name, or leave it out")
    return SeveralPositions(data)


def holds_several(cursor: object) -> bool:
    """Whether it is a cursor of several data."""
    return isinstance(cursor, Mapping) and bool(cursor) and all(isinstance(each, Mapping) for each in cursor.values())


CURSOR_KEY = "sw.Data"
"""Of the cursor in the `extra` of a save."""


State: TypeAlias = Mapping[str, torch.Tensor] | Mapping[Piece, torch.Tensor] | Stateful
"""What `save` and `load` take: tensors (plain or DTensor) by name, tensors by piece, or an object with `state()`."""


def wrong_rewrite(rewrite: object) -> list[str]:
    """What is wrong with what was given as a rewrite: nothing for a rewrite, and for None."""
    if rewrite is None or isinstance(rewrite, Rewrite):
        return []
    return [f"rewrite is a {type(rewrite).__name__}; give sw.Rewrite(text)"]
