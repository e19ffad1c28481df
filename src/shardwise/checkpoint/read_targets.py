"""Read targets: where in memory elements of stored tensors go, neighbours together.

A tensor that is split into thousands of columns is thousands of stored pieces, of which every batch that is read has
something. Planned one by one they cost more than their bytes. Where outputs of one size lie one after the other in
memory, columns side by side are one target.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from shardwise.checkpoint.tensor_bytes import cast_through, is_plain
from shardwise.comm.torch_dtypes import torch_dtype
from shardwise.moving.copies import part_of, put
from shardwise.space import Move, Piece

__all__ = ["ReadTarget", "joined"]


@dataclass(frozen=True, slots=True)
class ReadTarget:
    """A stored piece, and the memory that takes its elements."""

    source: Piece
    view: torch.Tensor
    """Of the shape of the piece, with the strides that it has in the output."""
    dtypes: tuple[str, ...]
    """Those that the values pass through, from the stored one to that of the view; one only: they are copied."""
    folded: int | None = None
    """A dim of the piece that is two of the view: which of several outputs, and the index in it."""

    def memory(self, dtype: str) -> torch.Tensor | None:
        """The view, where its bytes are just the stored ones in their order, so that a file can be read into it."""
        is_plainly_stored = len(self.dtypes) == 1 and self.view.dtype == torch_dtype(dtype) and self.folded is None
        return self.view if is_plainly_stored and is_plain(self.view) else None

    def fill(self, moves: Iterable[Move], elements: Iterable[torch.Tensor]) -> None:
        """Put the elements of each of some moves into the piece where they belong, cast as they have to be."""
        # The last cast is the copy itself. The others are made here, of a part at a time: a chain such as float32 ->
        # bfloat16 -> float32 rounds, which no single cast does.
        between = [torch_dtype(each) for each in self.dtypes[1:-1]]
        for move, taken in zip(moves, elements, strict=True):
            for memory, source in self.copies(move, taken):
                put(memory, cast_through(source, between))

    def copies(self, move: Move, taken: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """What is copied, (target, source), where `taken` are the elements of a move into the piece."""
        if self.folded is None:
            yield part_of(self.view, move.target, move.shape), taken
            return
        dim = self.folded
        box = [slice(first, first + size) for first, size in zip(move.target.offset, move.shape, strict=True)]
        view = self.view[(*box[:dim], slice(None), slice(None), *box[dim + 1 :])]
        size = view.shape[dim + 1]
        begin, stop = box[dim].start, box[dim].stop
        start = begin
        while start < stop:  # a part of one output, several whole ones, a part
            at, first = divmod(start, size)
            whole = 0 if first else (stop - start) // size
            length = whole * size or min(size - first, stop - start)
            source = taken.narrow(dim, start - begin, length)
            if whole:
                yield view.narrow(dim, at, whole), source.unflatten(dim, (whole, size))
            else:
                yield view.select(dim, at).narrow(dim, first, length), source
            start += length


class _Neighbours:
    """Targets that follow one another along a dim of their source, at even distances in memory."""

    __slots__ = ("_dim", "_distance", "_first", "_last", "_num")

    def __init__(self, target: ReadTarget) -> None:
        self._first = self._last = target
        self._num = 1
        self._dim = self._distance = 0
        """Known from the second target on."""

    def takes(self, target: ReadTarget) -> bool:
        """Add a target, if it is the next one."""
        last = self._last
        ours, theirs = last.source, target.source
        if ours.shape != theirs.shape or ours.run is not None or theirs.run is not None or last.dtypes != target.dtypes:
            return False
        if last.view.dtype != target.view.dtype or last.view.stride() != target.view.stride():
            return False
        steps = [dim for dim, (a, b) in enumerate(zip(ours.offset, theirs.offset, strict=True)) if a != b]
        if len(steps) != 1 or theirs.offset[steps[0]] != ours.offset[steps[0]] + ours.shape[steps[0]]:
            return False
        distance = int(target.view.storage_offset()) - int(last.view.storage_offset())
        if distance <= 0 or (self._num > 1 and (self._dim, self._distance) != (steps[0], distance)):
            return False
        self._dim, self._distance = steps[0], distance
        self._last = target
        self._num += 1
        return True

    def target(self) -> ReadTarget:
        """All of them as one."""
        first, dim = self._first, self._dim
        if self._num == 1:
            return first
        shape, strides = first.source.shape, tuple(first.view.stride())
        source = replace(first.source, shape=(*shape[:dim], self._num * shape[dim], *shape[dim + 1 :]))
        if shape[dim] == 1:
            strides = (*strides[:dim], self._distance, *strides[dim + 1 :])
        elif self._distance != shape[dim] * strides[dim]:
            view = first.view.as_strided(
                (*shape[:dim], self._num, *shape[dim:]), (*strides[:dim], self._distance, *strides[dim:])
            )
            return replace(first, source=source, view=view, folded=dim)
        return replace(first, source=source, view=first.view.as_strided(source.shape, strides))


def joined(targets: Iterable[ReadTarget]) -> list[ReadTarget]:
    """The same elements in as few targets as neighbours allow. All lie in one memory."""
    rows: list[_Neighbours] = []
    latest: dict[str, _Neighbours] = {}
    for target in targets:
        row = latest.get(target.source.name)
        if row is None or not row.takes(target):
            row = latest[target.source.name] = _Neighbours(target)
            rows.append(row)
    return [row.target() for row in rows]
