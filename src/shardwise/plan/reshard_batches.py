"""Batches of a reshard: what travels together, so that no rank has more than the plan's bytes of messages in memory.

    rank 0   start 0 | start 1 | finish 0 | start 2 | finish 1 | ...

Two batches are under way at a time, and each has messages out and in: a batch has a quarter of the bytes for either.
A tensor that needs more is cut: each batch has as large a part of all its shares, so that all of its ranks are busy.
A rank that has nothing in a batch goes on to its next one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.plan.dtypes import ALIGNMENT_BYTES, aligned, itemsize_bytes
from shardwise.plan.routes import ReshardPlan, Route

__all__ = ["MIN_MAX_BYTES", "Lot", "batches_of", "stretch_bytes"]

_WAYS = 4
"""In and out, for each of two batches."""

MIN_MAX_BYTES = _WAYS * ALIGNMENT_BYTES
"""One element of the widest dtype each way, in two batches."""


@dataclass(frozen=True, slots=True)
class Lot:
    """One of equal parts of every share of a tensor, or of one of its shares."""

    tensor: int
    """Position in the plan's `tensors`."""
    part: int = 0
    num_parts: int = 1
    share: int | None = None
    """Position in the route's `shares`; None is all of them."""

    def stretch(self, num_elements: int) -> tuple[int, int]:
        """The first element of the part of a share that has so many, and the element after its last."""
        return num_elements * self.part // self.num_parts, num_elements * (self.part + 1) // self.num_parts


def stretch_bytes(num_elements: int, dtype: str) -> int:
    """The bytes of so many elements in a message."""
    return aligned(num_elements * itemsize_bytes(dtype))


_Traffic = Sequence[tuple[int, int, int]]
"""(rank, bytes out, bytes in)"""

_Item = tuple[int | None, int, int, _Traffic]
"""Share, part, number of parts, and what it adds to the messages of ranks."""


def batches_of(plan: ReshardPlan, *, in_order: bool = False) -> Iterator[list[Lot]]:
    """Return what travels together, batch by batch; the same for all ranks.

    in_order: all of a share goes before anything of the next share of the same tensor.
    """
    limit = plan.max_bytes // _WAYS // ALIGNMENT_BYTES * ALIGNMENT_BYTES
    items: dict[int, list[_Item]] = {}
    out, into = [0] * plan.num_ranks, [0] * plan.num_ranks
    batch: list[Lot] = []
    for tensor, (_, at) in enumerate(plan.tensors):
        if at not in items:
            items[at] = _items(plan.routes[at], limit, in_order=in_order)
        for share, part, num_parts, traffic in items[at]:
            if any(out[rank] + sent > limit or into[rank] + received > limit for rank, sent, received in traffic):
                yield batch
                batch = []
                out, into = [0] * plan.num_ranks, [0] * plan.num_ranks
            for rank, sent, received in traffic:
                out[rank] += sent
                into[rank] += received
            batch.append(Lot(tensor, part, num_parts, share))
    if batch:
        yield batch


def _items(route: Route, limit: int, *, in_order: bool) -> list[_Item]:
    """The parts of a tensor that fit into a batch."""
    every = range(len(route.shares))
    if not in_order and (items := _cut(route, every, None, limit)):
        return items
    items = []
    for share in every:
        parts = _cut(route, [share], share, limit)
        assert parts, "one element fits: a plan has at least MIN_MAX_BYTES"
        items += parts
    return items


def _cut(route: Route, shares: Sequence[int], share: int | None, limit: int) -> list[_Item]:
    """Some shares in as few equal parts as fit into a batch; none where even single elements do not."""
    most = max((route.shares[at].num_elements for at in shares), default=1)
    if not _fits(_traffic(route, shares, Lot(0, most - 1, most)), limit):  # the last part has one of every share
        return []
    whole = _traffic(route, shares, Lot(0))
    num_parts = max((-(-max(sent, received) // limit) for _, sent, received in whole), default=1)
    while (items := _parts(route, shares, share, min(num_parts, most), limit)) is None:
        num_parts += max(1, num_parts // 8)
    return items


def _parts(route: Route, shares: Sequence[int], share: int | None, num_parts: int, limit: int) -> list[_Item] | None:
    """Some shares in so many parts; None where one of them does not fit into a batch."""
    items: list[_Item] = []
    for part in range(num_parts):
        traffic = _traffic(route, shares, Lot(0, part, num_parts))
        if not _fits(traffic, limit):
            return None
        items.append((share, part, num_parts, traffic))
    return items


def _fits(traffic: _Traffic, limit: int) -> bool:
    return all(sent <= limit and received <= limit for _, sent, received in traffic)


def _traffic(route: Route, shares: Sequence[int], lot: Lot) -> _Traffic:
    sums: dict[int, list[int]] = {}
    for at in shares:
        share = route.shares[at]
        giver, taker = route.ranks(share)
        if giver != taker:
            start, stop = lot.stretch(share.num_elements)
            num_bytes = stretch_bytes(stop - start, route.wire_dtype(share))
            sums.setdefault(giver, [0, 0])[0] += num_bytes
            sums.setdefault(taker, [0, 0])[1] += num_bytes
    return [(rank, sent, received) for rank, (sent, received) in sums.items()]
