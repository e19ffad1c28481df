"""Which of the batches that a loop has got the engine was trained on: the cursor counts those.

    drawn          b0  b1  b2         the loop is one batch ahead: it moves the next one to a device meanwhile
    engine.step        b0  b1
    cursor         ---------->|       a save here makes a run that begins with b2

A batch is known again by the memory of its tensors and arrays, so a dict of some of them, or of views, is known too. A
step on a copy is not. It is counted where only one batch can be meant. Where the loop is ahead too, it could be any of
them, and the cursor is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias
from weakref import ref

import numpy as np
import torch

from shardwise.comm.nested_values import is_container, named_leaves
from shardwise.data.cursors import Cursor
from shardwise.errors import DataError

Memory: TypeAlias = torch.Tensor | np.ndarray[Any, Any]
"""What has the values of a batch."""


@dataclass(frozen=True, slots=True)
class _HandedOut:
    number: int
    after: Cursor
    tensors: tuple["ref[Memory]", ...]
    """Of the batch. Not held: what the loop has dropped takes no memory."""

    def living(self) -> set[int]:
        """The ids of its tensors that the program still has."""
        return {id(tensor) for tensor in (each() for each in self.tensors) if tensor is not None}

    def shared_with(self, memories: set[int]) -> int:
        return sum(tensor is not None and _memory(tensor) in memories for tensor in (each() for each in self.tensors))


class HandOuts:
    """What loops have got since a cursor, and what of it was trained on."""

    def __init__(self, begin: Cursor) -> None:
        self._done = self.drawn = begin
        """`drawn`: behind the last batch that was handed out."""
        self._num_drawn = self._num_trained = 0
        self._known: list[_HandedOut] = []
        """Those that the program had when it got the last one."""
        self._other_steps = 0
        """Steps on batches that are not known, while the loop was ahead."""
        self._has_stepped = self._is_over = self._is_left = False

    @property
    def cursor(self) -> Cursor:
        """Behind the last batch that was trained on. Raises DataError where that is not known."""
        if self._other_steps and not self._is_settled:
            raise DataError(
                f"engine.step has made {self._other_steps} steps on copies or on other batches, while the loop was "
                f"{self._num_drawn - self._num_trained} batches ahead. So the cursor cannot say which samples were "
                "trained on. Give engine.step the batch of the loop, which it moves to its device itself; make changes "
                "in collate; or get one batch for each step"
            )
        return self.known_cursor

    @property
    def known_cursor(self) -> Cursor:
        """The same; where it is not known, behind the last batch that is known to be trained on."""
        return self.drawn if self._is_settled else self._done

    @property
    def _is_settled(self) -> bool:
        return self._num_drawn == self._num_trained

    @property
    def next_epoch(self) -> int:
        """Of the first sample of the next loop."""
        return self.drawn.epoch if self._is_over else self.known_cursor.epoch

    def continued(self) -> "HandOuts":
        """For the next loop, which begins at `drawn`: batches that were not trained on come again.

        After a loop that went to the end of its epoch nothing comes again: the last batches may still be trained on.
        """
        found = self if self._is_over or self._is_settled else HandOuts(self.cursor)
        found._has_stepped = found._is_over = found._is_left = False
        return found

    def hand_out(self, batch: Any, after: Cursor) -> None:
        """A loop gets a batch."""
        self._num_drawn += 1
        self._known.append(_HandedOut(self._num_drawn, after, tuple(map(ref, _tensors(batch)))))
        self._known = self._held()
        self.drawn = after

    def on_step(self, batch: Any) -> bool:
        """The engine has made a step; whether on a batch that was handed out here."""
        memories = {_memory(tensor) for tensor in _tensors(batch)}
        found = sorted(((each.shared_with(memories), each) for each in tuple(self._known)), key=lambda pair: -pair[0])
        # A tensor that all batches have (a mask) says nothing: the batch that shares most is meant.
        if not found or not found[0][0] or (len(found) > 1 and found[0][0] == found[1][0]):
            return False
        self._has_stepped = True
        meant = found[0][1]
        # Several steps on one batch are one: and a batch that comes late was passed by a later one.
        if meant.number > self._num_trained:
            self._num_trained, self._done, self._other_steps = meant.number, meant.after, 0
        return True

    def on_other_step(self) -> None:
        """The engine has made a step on a batch that is not known here."""
        ahead = self._num_drawn - self._num_trained
        if not ahead or (self._is_left and ahead > 1):  # batches of a loop that was left are not trained on
            return
        self._has_stepped = True
        self._other_steps += 1
        if self._other_steps >= ahead:  # as many steps as batches: each was trained on
            self._num_trained, self._done, self._other_steps = self._num_drawn, self.drawn, 0

    def end(self, following: int) -> None:
        """The loop has come to the end of the epoch; `following`: the next one."""
        self._is_over = True
        # A stream has said only now that the epoch has no more samples.
        if self.drawn.epoch < following:
            self.drawn = Cursor(epoch=following)
        # A loop that does not train has dropped what it has read, but the last batch. One that is ahead has not.
        if not self._has_stepped and len(self._held()) <= 1:
            self._num_trained, self._done = self._num_drawn, self.drawn

    def _held(self) -> list[_HandedOut]:
        """Those that the program still has, the oldest first."""
        held: list[_HandedOut] = []
        later: set[int] = set()
        for each in reversed(self._known):
            living = each.living()
            # Tensors that came again (a mask, a buffer that is filled anew) are those of the later batch. Else a loop
            # of many steps would hold all its batches for one mask.
            if not living <= later:
                held.append(each)
            later |= living
        return held[::-1]

    def leave(self) -> None:
        """The loop was left, by a `break` or an error, if it was not over."""
        self._is_left = not self._is_over


def _tensors(batch: object) -> Iterator[Memory]:
    if isinstance(batch, Mapping) and not is_container(batch):
        batch = dict(batch)
    for _, leaf in named_leaves(batch):
        if isinstance(leaf, Mapping):
            yield from _tensors(leaf)
        elif isinstance(leaf, torch.Tensor | np.ndarray):
            yield leaf


def _memory(held: Memory) -> int:
    if isinstance(held, torch.Tensor):
        return held.untyped_storage()._cdata if held.layout is torch.strided else id(held)
    while isinstance(held.base, np.ndarray):  # of a view
        held = held.base
    return id(held)
