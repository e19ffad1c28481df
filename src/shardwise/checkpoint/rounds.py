"""Rounds: all ranks read in step, and hand on what others need, in memory that does not grow with the state."""

import json
from collections.abc import Mapping, Sequence

import torch

from shardwise.checkpoint.contents import Contents, StoredPiece
from shardwise.checkpoint.held import bytes_of, torch_dtype
from shardwise.checkpoint.read_plan import ReadPlan, Span, Wanted, exact_ranges
from shardwise.checkpoint.reading import BatchReader, batches_of
from shardwise.checkpoint.saves import reason
from shardwise.checkpoint.stores import Reader, Store
from shardwise.checkpoint.transfers import carry_out, message_bytes, pack, swap_messages, unpack
from shardwise.comm import Channel
from shardwise.comm.agreement import agree
from shardwise.errors import CheckpointError, ShardwiseError
from shardwise.space import Move, Piece, Run, moves

__all__ = ["read_exactly", "read_in_rounds"]

ONE_ROUND_BYTES = 16 << 20
"""Where no rank reads more, everything is read and agreed upon before anything is written."""

ONE_ROUND_BYTES_ALONE = 48 << 20
"""The same where there are no messages, which take as much again twice."""

ROUND_BYTES = 8 << 20
"""So much a rank reads in a round where there are several; a message out and one in are at most as large."""

ROUND_BYTES_ALONE = 4 << 20
"""The same where no other rank takes part: what has just been read is verified and copied out of the cache."""


def read_in_rounds(
    channel: Channel,
    store: Store,
    contents: Contents,
    stored: Sequence[StoredPiece],
    plan: ReadPlan,
    tensors: Sequence[torch.Tensor],
    *,
    verify: bool,
    twice: bool,
) -> int:
    """Fill this rank's wanted `tensors`; returns the bytes that this rank read.

    In each round every rank reads a batch, all agree that theirs is good, and only then it is used. With `twice` all
    rounds are read and verified before the first is used.
    Raises the same CheckpointError on all ranks; it says so when tensors have been written by then.
    """
    alone = channel.size == 1
    at_once, max_bytes = (ONE_ROUND_BYTES_ALONE, ROUND_BYTES_ALONE) if alone else (ONE_ROUND_BYTES, ROUND_BYTES)

    def cut(max_bytes: int) -> tuple[list[list[Span]], int]:
        """This rank's batches, and the largest number of them that a rank has."""
        batches = batches_of(plan.reads, stored, block_bytes=contents.block_bytes, max_bytes=max_bytes)
        counts = channel.exchange(str(len(batches)).encode(), purpose="number of rounds")
        return batches, max(map(int, counts))

    batches, num_rounds = cut(at_once)
    if num_rounds > 1:
        batches, num_rounds = cut(max_bytes)
    reader = BatchReader(store, contents, stored, verify=verify)
    handover = _Handover(channel, stored, plan, tensors)
    try:
        for dry in (True, False) if twice else (False,):
            for turn in range(num_rounds):
                batch = batches[turn] if turn < len(batches) else []
                read, by_rank = _agreed(channel, reader, batch, is_late=not dry and turn > 0)
                if not dry:
                    handover.use(read, by_rank)
    finally:
        reader.close()
    return reader.read_bytes


def _agreed(
    channel: Channel, reader: BatchReader, batch: Sequence[Span], *, is_late: bool
) -> tuple[dict[Span, torch.Tensor], list[list[Span]]]:
    """What this rank has read, and which spans each rank has; raises the same error on all ranks if one could not."""
    refusal: ShardwiseError | None = None
    read: dict[Span, torch.Tensor] = {}
    try:
        read = reader.read(batch)
    except CheckpointError as error:
        after = (
            "the target is partly overwritten by now: load a good checkpoint before using it, or give up"
            if is_late
            else "nothing of the target was changed"
        )
        refusal = CheckpointError(*error.problems, after)
    spans = json.dumps([(each.ordinal, each.first_block, each.last_block) for each in batch], separators=(",", ":"))
    answers = agree(channel, refusal, purpose="verdict on blocks that were read", value=spans.encode())
    return read, [[Span(*each) for each in json.loads(answer)] for answer in answers]


class _Handover:
    """Puts what was read where it is wanted, on this rank and on others."""

    def __init__(
        self, channel: Channel, stored: Sequence[StoredPiece], plan: ReadPlan, tensors: Sequence[torch.Tensor]
    ) -> None:
        self._channel = channel
        self._stored = stored
        self._plan = plan
        self._tensors = tensors

    def use(self, read: Mapping[Span, torch.Tensor], by_rank: Sequence[Sequence[Span]]) -> None:
        """Carry out a round: `read` is what this rank has, `by_rank` the spans that each has."""
        own = self._channel.rank
        outgoing: dict[int, list[tuple[Move, torch.Tensor]]] = {}
        for span, elements in read.items():
            for rank in self._plan.needers(span):
                for index, parts in self._plan.transfers(span, rank):
                    for move in parts:
                        if rank == own:
                            carry_out(move, elements, self._tensors[index])
                        else:
                            outgoing.setdefault(rank, []).append((move, elements))
        if self._channel.size == 1:
            return
        awaited = {rank: self._awaited(spans) for rank, spans in enumerate(by_rank) if rank != own}
        swap_messages(
            self._channel,
            lambda rank: pack(outgoing.get(rank, [])),
            lambda rank: message_bytes((move, dtype.itemsize) for move, dtype, _ in awaited[rank]),
            lambda rank, message: unpack(message, awaited[rank]),
            purpose="blocks that another rank read",
        )

    def _awaited(self, spans: Sequence[Span]) -> list[tuple[Move, torch.dtype, torch.Tensor]]:
        """What this rank takes of the spans that another one has read."""
        return [
            (move, torch_dtype(self._stored[span.ordinal].piece.dtype), self._tensors[index])
            for span in spans
            for index, parts in self._plan.transfers(span, self._channel.rank)
            for move in parts
        ]


def read_exactly(
    channel: Channel,
    store: Store,
    stored: Sequence[StoredPiece],
    wanted: Sequence[Wanted],
    tensors: Sequence[torch.Tensor],
) -> int:
    """Fill this rank's wanted `tensors` from just the byte ranges that it needs, unverified; returns how many bytes.

    Raises the same CheckpointError on all ranks.
    """
    readers: dict[str, Reader] = {}
    refusal: ShardwiseError | None = None
    read_bytes = 0
    name = ""
    try:
        for ordinal, source, index, target in exact_ranges(stored, wanted):
            piece, name = stored[ordinal], stored[ordinal].file
            if name not in readers:
                readers[name] = store.open(name)
            dtype = torch_dtype(piece.piece.dtype)
            start = piece.start + source.start * dtype.itemsize
            _read_run(readers[name], start, dtype, tensors[index], wanted[index].piece, target)
            read_bytes += source.num_elements * dtype.itemsize
    except (OSError, EOFError) as error:
        refusal = CheckpointError(
            f"{store.location}/{name} cannot be read: {reason(error)}; the target may be partly overwritten by now: "
            "load a good checkpoint before using it, or give up"
        )
    finally:
        for reader in readers.values():
            reader.close()
    agree(channel, refusal, purpose="verdict on what was read")
    return read_bytes


def _read_run(reader: Reader, start: int, dtype: torch.dtype, tensor: torch.Tensor, piece: Piece, target: Run) -> None:
    """Read a run of a wanted piece's elements, which begins at byte `start` of a file."""
    if tensor.dtype == dtype and tensor.device.type == "cpu" and tensor.is_contiguous():
        memory = tensor.view(-1)[target.start : target.stop].view(torch.uint8)
        reader.read_into(bytes_of(memory), start)
        return
    step = ROUND_BYTES_ALONE // dtype.itemsize
    for first in range(target.start, target.stop, step):
        run = Run(first, min(first + step, target.stop))
        elements = torch.empty(run.num_elements, dtype=dtype)
        reader.read_into(bytes_of(elements.view(torch.uint8)), start + (first - target.start) * dtype.itemsize)
        part = piece.within(piece.elements.start + run.start, piece.elements.start + run.stop)
        for move in moves(part, piece):
            carry_out(move, elements, tensor)
