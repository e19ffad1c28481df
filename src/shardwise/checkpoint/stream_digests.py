"""Stream digests: what goes from one rank to another as one stream of bytes, in blocks with a checksum each.

Both ends read it from their own tensors, the giver what it has and the taker what has come. Equal checksums certify a
move. Before a move they say what need not travel::

    deliveries, in the order of the plan    | w[0:512]              | b | u[0:64]    |
    blocks of 256 KiB                       | 0     | 1     | 2     | 3     | 4      |
    checksums of the giver                  a       b       c       d       e
    checksums of the taker, before          a       b       x       d       e
    what travels                                            -------     the elements of block 2, which are of w and b

The bytes are those of the elements as the target has them. Deliveries begin at whole alignments, so that no block cuts
an element.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from shardwise.checkpoint.blocks import BlockSums
from shardwise.checkpoint.contents import BLOCK_BYTES, CHECKSUM_BYTES
from shardwise.checkpoint.elements import with_one_nan
from shardwise.comm import Channel
from shardwise.comm.local_tensors import bytes_of
from shardwise.moving.copies import fill, parts_of
from shardwise.moving.mover import Delivery, Mover, by_distance
from shardwise.plan.dtypes import aligned, itemsize_bytes
from shardwise.rewrite.metas import holds_nans
from shardwise.space import BlockPart, Move, Piece
from shardwise.space.moves import moves_between

Ends = tuple[int, int]
"""The rank that gives, and the one that takes; maybe the same one."""

Sums = dict[Ends, bytes]
"""The checksums of the blocks of each stream, one after the other."""


@dataclass(frozen=True, slots=True)
class PlacedDelivery:
    """A delivery, and which bytes of its stream it has."""

    delivery: Delivery[Piece, Piece]
    start: int
    num_elements: int

    @property
    def ends(self) -> Ends:
        """The stream that it is in."""
        return self.delivery.giver, self.delivery.taker

    @property
    def stop(self) -> int:
        """Where the next one begins."""
        return self.start + aligned(self.num_elements * self._itemsize)

    @property
    def blocks(self) -> range:
        """The blocks that have something of it."""
        return range(self.start // BLOCK_BYTES, -(-self.stop // BLOCK_BYTES))

    def elements_of(self, first: int, last: int) -> tuple[int, int]:
        """Its elements in the blocks from `first` up to `last`, which is not one of them."""
        start, stop = ((block * BLOCK_BYTES - self.start) // self._itemsize for block in (first, last))
        return max(start, 0), min(stop, self.num_elements)

    def some_at_a_time(self) -> Iterator[Sequence[Move]]:
        """Its moves, cut so that few elements are in memory twice."""
        step = _AT_ONCE_BYTES // self._itemsize
        if self.num_elements <= step:
            yield self.delivery.moves
            return
        for start in range(0, self.num_elements, step):
            yield list(moves_between(self.delivery.moves, start, min(start + step, self.num_elements)))

    @property
    def _itemsize(self) -> int:
        return itemsize_bytes(self.delivery.target.dtype)


Batches = Iterable[Sequence[PlacedDelivery]]
"""What this rank gives and takes, in the order of the plan."""


def placed(batches: Iterable[Iterable[Delivery[Piece, Piece]]]) -> list[list[PlacedDelivery]]:
    """The same batches, with the place of each delivery in its stream: both ends count alike."""
    stops: dict[Ends, int] = {}
    found: list[list[PlacedDelivery]] = []
    for batch in batches:
        found.append([])
        for each in batch:
            num_elements = sum(move.num_elements for move in each.moves)
            at = PlacedDelivery(each, stops.get((each.giver, each.taker), 0), num_elements)
            stops[at.ends] = at.stop
            found[-1].append(at)
    return found


ElementsOf = Callable[[Delivery[Piece, Piece], Sequence[Move]], Iterable[torch.Tensor]]
"""The elements of some moves of a delivery, in the dtype of its target."""

_AT_ONCE_BYTES = 16 * BLOCK_BYTES
"""So much is read at a time: what is strided, cast or on a device is copied first."""


def sums_of(batches: Batches, rank: int, which: int, elements: ElementsOf, *, one_nan: bool) -> Sums:
    """The checksums of streams of a rank: of those that it gives (`which` = 0), or of those that it takes (1).

    one_nan: take all NaNs for one, also where the plan casts nothing.
    """
    sums: dict[Ends, BlockSums] = {}
    for each in (each for batch in batches for each in batch if each.ends[which] == rank):
        stream = sums.setdefault(each.ends, BlockSums(BLOCK_BYTES))
        dtype = each.delivery.target.dtype
        # A cast may change the payload of a NaN, and in another way in the next copy.
        is_cast = holds_nans(dtype) and (one_nan or each.delivery.source.dtype != dtype)
        at = each.start
        for part in (part for moves in each.some_at_a_time() for part in elements(each.delivery, moves)):
            plain = part.cpu().contiguous()
            flat = plain.as_strided((plain.numel(),), (1,))  # not view(-1): a single element may have any stride
            for bits in with_one_nan(flat) if is_cast else (flat,):
                stream.add(bytes_of(bits.view(torch.uint8)))
                at += bits.nbytes
        stream.add(memoryview(bytes(each.stop - at)))
    return {ends: each.finish() for ends, each in sums.items()}


def num_blocks_of(sums: bytes) -> int:
    """How many blocks have these checksums."""
    return len(sums) // CHECKSUM_BYTES


def differing(mine: bytes, theirs: bytes) -> list[int]:
    """The blocks whose checksums differ, in increasing order."""
    if mine == theirs:
        return []
    starts = range(0, len(mine), CHECKSUM_BYTES)
    return [at // CHECKSUM_BYTES for at in starts if mine[at : at + CHECKSUM_BYTES] != theirs[at : at + CHECKSUM_BYTES]]


def changed_only(batches: Batches, changed: Mapping[Ends, Sequence[int]]) -> Iterator[list[Delivery[Piece, Piece]]]:
    """The same batches with the elements of some blocks alone: those that `changed` has of each stream."""
    blocks_of = {ends: frozenset(blocks) for ends, blocks in changed.items()}
    for batch in batches:
        yield [part for each in batch for part in _in_blocks(each, blocks_of[each.ends])]


def _in_blocks(each: PlacedDelivery, changed: frozenset[int]) -> Iterator[Delivery[Piece, Piece]]:
    """What a delivery has of some blocks; blocks that follow one another stay together."""
    first: int | None = None
    for block in (*each.blocks, each.blocks.stop):
        is_in = block in changed and block in each.blocks
        if is_in and first is None:
            first = block
        elif first is not None and not is_in:
            start, stop = each.elements_of(first, block)
            first = None
            if start < stop:  # else there is nothing but what fills up an alignment
                yield replace(each.delivery, moves=list(moves_between(each.delivery.moves, start, stop)))


def tell(channel: Channel, sums: Sums, awaited: Sums, *, by_taker: bool = False) -> tuple[Sums, int]:
    """Each giver tells its takers the checksums of its streams; `by_taker`: each taker tells its givers.

    sums: what this rank tells. awaited: its own of those that come, which are as many.
    Returns what came, and how many bytes came in messages.
    """
    own = channel.rank
    came = {ends: torch.empty(len(each), dtype=torch.uint8) for ends, each in awaited.items() if ends != (own, own)}
    sent = {ends: each for ends, each in sums.items() if ends != (own, own)}
    mover: Mover[Ends, Ends] = Mover(
        channel,
        take=lambda ends, moves: parts_of(torch.frombuffer(bytearray(sent[ends]), dtype=torch.uint8), moves),
        put=lambda ends, moves, elements: fill(came[ends], moves, elements),
        packs_on=torch.device("cpu"),
        purpose="digests of a stream",
    )
    deliveries = [_message(ends, len(each), by_taker=by_taker) for ends, each in (sent | came).items()]
    mover.run(by_distance(deliveries, channel))
    here = {ends: each for ends, each in sums.items() if ends == (own, own)}
    return here | {ends: bytes(bytes_of(each)) for ends, each in came.items()}, mover.received_bytes


def _message(ends: Ends, num_bytes: int, *, by_taker: bool) -> Delivery[Ends, Ends]:
    part = BlockPart(0, (num_bytes,), (0,))
    teller, listener = ends[::-1] if by_taker else ends
    return Delivery(teller, listener, ends, ends, torch.uint8, [Move((num_bytes,), part, part)])
