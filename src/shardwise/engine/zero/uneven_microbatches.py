"""Whose turn it is: microbatches that some data ranks compute and others do not, in step with each other."""

import enum
from collections.abc import Sequence
from types import TracebackType
from typing import Protocol, Self


class Joint(enum.Enum):
    """Which data ranks compute a microbatch."""

    NONE = enum.auto()
    SOME = enum.auto()
    ALL = enum.auto()


class Sharded(Protocol):
    """What is gathered and reduced while microbatches are computed (stages 2 and 3), by all data ranks together."""

    @property
    def gathers(self) -> bool:
        """Whether forwards gather something (stage 3)."""

    def begin_pass(self, *, trains: bool, is_agreed: bool = True) -> None:
        """Forwards of some microbatches follow, and their backwards too where it `trains`. `is_agreed`: the ranks have
        exchanged something since parameters were last written."""

    def begin_microbatch(self, *, is_joint: bool) -> None:
        """Its forward follows, or (with stages) its backward. Not `is_joint`: some data ranks skip it."""

    def microbatch_done(self, stage: int | None = None) -> None:
        """The backward of a microbatch has ended; on one of this rank's stages, or (None) on all."""

    def skip_microbatch(self) -> None:
        """Other data ranks compute a microbatch that this rank does not."""

    def end_pass(self, *, has_failed: bool = False) -> None:
        """No more forwards and backwards follow, perhaps because one raised."""


class UnevenMicrobatches:
    """The microbatches of one pass, numbered over all that any data rank computes."""

    def __init__(
        self,
        sharded: Sharded | None,
        counted: Sequence[int],
        joint: Sequence[Joint],
        *,
        trains: bool = True,
        is_agreed: bool = True,
    ) -> None:
        """`counted`: the microbatches that this rank computes. `joint`: who computes each."""
        self._sharded = sharded
        self._counted = counted
        self._joint = joint
        self._trains = trains
        self._is_agreed = is_agreed
        self._next = 0

    def __enter__(self) -> Self:
        if self._sharded is not None:
            self._sharded.begin_pass(trains=self._trains, is_agreed=self._is_agreed)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._sharded is None:
            return
        if kind is None:
            self._skip_to(len(self._joint))
        self._sharded.end_pass(has_failed=kind is not None)

    def begin(self, number: int) -> None:
        """The rank goes on to the `number`-th microbatch that it computes: to its forward, or (with stages) to a
        backward."""
        at = self._counted[number]
        if self._sharded is not None and self._next <= at:
            self._skip_to(at)
            self._next = at + 1
            self._sharded.begin_microbatch(is_joint=self._joint[at] is Joint.ALL)

    def done(self, stage: int | None = None) -> None:
        """Its backward has ended (in a pass that does not train, its forward); see `Sharded.microbatch_done`."""
        if self._sharded is not None:
            self._sharded.microbatch_done(stage)

    def _skip_to(self, end: int) -> None:
        assert self._sharded is not None
        for at in range(self._next, end):
            if self._joint[at] is not Joint.NONE:
                self._sharded.skip_microbatch()
        self._next = max(self._next, end)
