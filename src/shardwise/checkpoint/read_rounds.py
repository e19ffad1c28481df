"""Rounds: all ranks read in step, and hand on what others need, in memory that does not grow with the state.

First come the blocks that others need too. A rank reads a batch of them into one half of its buffer and
verifies it. All agree that theirs are good. Then each takes what it needs out of all buffers::

    rank 0   read 0a | agree | take 0a, 0b | read 1a | agree | take 1a, 1b | read 2a | ...
    rank 1   read 0b | agree | take 0b, 0a | read 1b | agree | take 1b, 1a | read 2b | ...
    halves        0                             1                               0

Ranks of one host see each other's buffers. Others get messages from the mover. Then each rank reads the blocks that it
alone needs, straight into the target if that has the order of the file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby

import torch
import xxhash

from shardwise.checkpoint.contents import Contents, StoredPiece
from shardwise.checkpoint.read_plan import BlockSpan, ReadPlan
from shardwise.checkpoint.reading import BatchReader, batches_of, buffer_bytes, elements_of
from shardwise.checkpoint.safetensors_files import plain_bytes
from shardwise.checkpoint.stores import Store
from shardwise.checkpoint.windows import ReadTarget, fill_exactly
from shardwise.comm import Channel
from shardwise.comm.agreement import a_list, agreed, understood
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import CheckpointError, MismatchError
from shardwise.moving.copies import parts_of
from shardwise.moving.mover import Delivery, Mover, by_distance
from shardwise.space.moves import runs_of

ONE_ROUND_BYTES = 16 << 20
"""Where no rank reads more, everything is read and agreed upon before anything is written."""

ONE_ROUND_BYTES_ALONE = 48 << 20
"""The same where there are no messages, which take as much again twice."""

ROUND_BYTES = 8 << 20
"""So much a rank reads in a round for others. A message out and one in are at most as large."""

OWN_BYTES = 1 << 20
"""So much it reads at a time for itself alone: it is verified and copied out of the cache."""

IN_PLACE_BYTES = 4 << 20
"""So much it reads at a time straight into a tensor: nothing has to stay in the cache but what is verified."""

OWN_BATCHES = 256
"""After so many of those it waits for the others, so that none waits for it longer than the channel allows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadTraffic:
    """What a rank has read, and how it got what others have read."""

    read_bytes: int
    """Bytes of data files that this rank has read."""
    received_bytes: int
    """Bytes in messages from other ranks."""
    in_place: bool
    """Whether ranks took what they needed out of the memory of those that had read it, without messages."""


def read_in_rounds(
    channel: Channel,
    store: Store,
    contents: Contents,
    stored: Sequence[StoredPiece],
    plan: ReadPlan,
    targets: Sequence[ReadTarget],
    *,
    verify: bool,
    twice: bool,
) -> ReadTraffic:
    """Fill this rank's `targets`, one for each piece that the plan has as wanted here.

    In each round every rank reads a batch, all agree that theirs is good, and only then it is used. With `twice` all
    rounds are read and verified before the first is used.
    Raises the same CheckpointError on all ranks; it says so when tensors have been written by then.
    """
    handover = _Handover(channel, contents.block_bytes, stored, plan, targets)
    rounds = _Rounds(channel, plan, stored, contents.block_bytes, handover, store.parallel_reads)
    reader = BatchReader(store, contents, stored, verify=verify)
    buffers = _Buffers(channel, rounds.num_bytes)
    number = 0
    try:
        # The first time nothing is used: with verify="first" the target is touched only once everything has been
        # verified.
        for dry in (True, False) if twice else (False,):
            for turn, batch in enumerate(rounds.handed):
                # Counted over both passes: the half that this rank writes now is never the one that others may still
                # read.
                own = buffers.own(number)
                read, by_rank = _agreed(channel, reader, batch, own, is_late=not dry and turn > 0)
                if not dry:
                    handover.use(read, by_rank, buffers.of_all(number))
                number += 1
            for batches in rounds.own:
                _read_for_itself(channel, reader, batches, None if dry else handover, is_late=not dry)
    finally:
        reader.close()
    return ReadTraffic(read_bytes=reader.read_bytes, received_bytes=handover.received_bytes, in_place=buffers.in_place)


_OwnBatch = tuple[list[BlockSpan], torch.Tensor | None]
"""Spans that are read together, and for a single one maybe the memory of the target that takes its bytes."""


class _Rounds:
    """What this rank reads when: as many rounds on every rank, though some of them are empty."""

    handed: list[list[BlockSpan]]
    """Batches that all ranks read in step, because others need something of them."""
    own: list[list[_OwnBatch]]
    """Then batches that no other rank needs, in groups; ranks wait for each other between groups."""
    num_bytes: int
    """Bytes of the largest batch of any rank that others may look into."""

    def __init__(
        self,
        channel: Channel,
        plan: ReadPlan,
        stored: Sequence[StoredPiece],
        block_bytes: int,
        handover: "_Handover",
        num_parallel: int,
    ) -> None:
        # So that as many reads are under way.
        own_bytes, in_place_bytes = OWN_BYTES * num_parallel, IN_PLACE_BYTES * num_parallel

        def cut(spans: Sequence[BlockSpan], max_bytes: int) -> list[list[BlockSpan]]:
            return batches_of(spans, stored, block_bytes=block_bytes, max_bytes=max_bytes)

        def largest(batches: Sequence[Sequence[BlockSpan]]) -> int:
            return max((buffer_bytes(batch, stored, block_bytes=block_bytes) for batch in batches), default=0)

        # What is small is read as one batch: then every rank knows that all of it is good before its target changes.
        at_once = cut(plan.reads, ONE_ROUND_BYTES_ALONE if channel.size == 1 else ONE_ROUND_BYTES)
        self.handed = cut(plan.handed_reads, ROUND_BYTES)
        batches: list[_OwnBatch] = []
        # A large span may be read straight into its tensor. Small ones would each cost a call, so that they are read
        # together and copied.
        for is_large, spans in groupby(plan.own_reads, lambda span: largest([[span]]) >= OWN_BYTES):
            # Small tensors together, in as few reads as possible; they are copied out of the cache.
            if not is_large:
                batches += [(batch, None) for batch in cut(list(spans), own_bytes)]
                continue
            for span in spans:
                for batch in cut([span], in_place_bytes):
                    memory = handover.memory_of(batch[0])
                    # What has to be copied afterwards is read in parts that stay in the cache.
                    pieces = cut(batch, own_bytes) if memory is None else [batch]
                    batches += [(each, memory) for each in pieces]
        step = max(1, OWN_BATCHES // num_parallel)
        self.own = [batches[start : start + step] for start in range(0, len(batches), step)]
        # All ranks have to make the same number of exchanges, and their buffers have one size, so that each can view
        # the others'.
        own = [len(at_once), largest(at_once), len(self.handed), largest(self.handed), len(self.own)]
        answers = channel.exchange(json.dumps([own, _digest(stored)]).encode(), purpose="number of rounds")
        counts_of, digests = zip(*understood(answers, _counts_in, purpose="number of rounds"), strict=True)
        # Spans name a stored piece by its position. The exchange is made anyway, and the digest in it is cheap.
        if len(set(digests)) > 1:
            raise MismatchError(
                "ranks have not found the same stored pieces in the same order, and would mix up the pieces that "
                "they read; nothing was changed. This is a fault of shardwise: please report it"
            )
        # The largest number of any rank: the others take part in the last rounds with nothing.
        counts = [max(column) for column in zip(*counts_of, strict=True)]
        # One round for all, or for none: a rank that used its only batch at once would have changed its target when
        # another one finds damage in its second.
        if counts[0] <= 1:
            self.handed, self.own, self.num_bytes = at_once, [], counts[1]
            num_handed, num_own = counts[0], 0
        else:
            self.num_bytes, num_handed, num_own = counts[3], counts[2], counts[4]
        self.handed += [[] for _ in range(num_handed - len(self.handed))]
        self.own += [[] for _ in range(num_own - len(self.own))]


def _counts_in(packed: bytes) -> tuple[list[int], str]:
    """What a rank says of its rounds: five numbers, and the digest of what is stored."""
    (at_once, largest_at_once, handed, largest_handed, own), digest = a_list(packed)
    return [int(each) for each in (at_once, largest_at_once, handed, largest_handed, own)], str(digest)


def _digest(stored: Sequence[StoredPiece]) -> str:
    """Equal where ranks mean the same by the position of a stored piece."""
    places = "\n".join(f"{each.file} {each.start} {each.piece.name}" for each in stored)
    return str(xxhash.xxh3_64_hexdigest(places.encode()))


def _read_for_itself(
    channel: Channel,
    reader: BatchReader,
    batches: Sequence[_OwnBatch],
    handover: "_Handover | None",
    *,
    is_late: bool,
) -> None:
    """Read, verify and use batches that no other rank needs; raises the same error on all ranks if one could not."""
    with agreed(channel, purpose="verdict on blocks that each rank read for itself"), _naming_damage(is_late=is_late):
        for batch, memory in batches:
            # Bytes that lie in the target as they do in the file need no copy: they are verified where they are wanted.
            if memory is not None and handover is not None:
                reader.read_to(batch[0], memory)
                continue
            read = reader.read(batch)
            if handover is not None:
                handover.take(read)


class _Buffers:
    """The buffers into which batches are read: one, or where ranks share memory two by turns.

    A rank that has agreed on round k knows that all have used up round k - 1, and may write its buffer again.
    """

    def __init__(self, channel: Channel, num_bytes: int) -> None:
        self._num_bytes = num_bytes
        self._rank = channel.rank
        # Two halves: one is read into while slower ranks still take from the other. Alone, or over a network, nobody
        # looks into it.
        self._shared = channel.share(2 * num_bytes) if channel.size > 1 and num_bytes else None
        self._alone = torch.empty(num_bytes if self._shared is None else 0, dtype=torch.uint8)

    @property
    def in_place(self) -> bool:
        """Whether all ranks see the buffers of all."""
        return self._shared is not None

    def own(self, number: int) -> torch.Tensor:
        """This rank's buffer of a round."""
        # Without shared memory one half suffices: messages have been packed before the next batch is read.
        return self._alone if self._shared is None else self._half(self._shared[self._rank], number)

    def of_all(self, number: int) -> list[torch.Tensor] | None:
        """Every rank's buffer of a round; None where they cannot be seen."""
        return None if self._shared is None else [self._half(each, number) for each in self._shared]

    def _half(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        start = number % 2 * self._num_bytes
        return memory[start : start + self._num_bytes]


def _agreed(
    channel: Channel, reader: BatchReader, batch: Sequence[BlockSpan], buffer: torch.Tensor, *, is_late: bool
) -> tuple[dict[BlockSpan, torch.Tensor], list[list[BlockSpan]]]:
    """What this rank has read, and which spans each rank has. Raises the same error on all ranks if one could not."""
    with agreed(channel, purpose="verdict on blocks that were read") as agreement, _naming_damage(is_late=is_late):
        read = reader.read(batch, buffer)
        # The spans go with the verdict: who reads what is planned, but how it is cut into batches is each rank's own
        # affair, and this tells it without a message more.
        spans = [(each.ordinal, each.first_block, each.last_block) for each in batch]
        agreement.value = json.dumps(spans, separators=(",", ":")).encode()
    return read, understood(agreement.values, _spans_in, purpose="verdict on blocks that were read")


def _spans_in(answer: bytes) -> list[BlockSpan]:
    spans = [BlockSpan(*each) for each in a_list(answer)]
    if not all(type(number) is int for each in spans for number in (each.ordinal, each.first_block, each.last_block)):
        raise TypeError("no spans")
    return spans


@contextmanager
def _naming_damage(*, is_late: bool) -> Iterator[None]:
    """Errors inside say what they mean for the target."""
    try:
        yield
    except CheckpointError as error:
        after = (
            "the target is partly overwritten by now: load a good checkpoint before using it, or give up"
            if is_late
            else "nothing of the target was changed"
        )
        raise CheckpointError(*error.problems, after) from error


class _Handover:
    """Puts what was read where it is wanted, on this rank and on others."""

    def __init__(
        self,
        channel: Channel,
        block_bytes: int,
        stored: Sequence[StoredPiece],
        plan: ReadPlan,
        targets: Sequence[ReadTarget],
    ) -> None:
        self._channel = channel
        self._block_bytes = block_bytes
        self._stored = stored
        self._plan = plan
        self._targets = targets
        self._read: Mapping[BlockSpan, torch.Tensor] = {}
        """What this rank has read in the round."""
        self._mover: Mover[BlockSpan, int] = Mover(
            channel,
            take=lambda span, moves: parts_of(self._read[span], moves),
            put=lambda index, moves, elements: targets[index].fill(moves, elements),
            packs_on=torch.device("cpu"),
            purpose="blocks that another rank read",
        )

    @property
    def received_bytes(self) -> int:
        """Bytes in messages from other ranks."""
        return self._mover.received_bytes

    def use(
        self,
        read: Mapping[BlockSpan, torch.Tensor],
        by_rank: Sequence[Sequence[BlockSpan]],
        buffers: Sequence[torch.Tensor] | None,
    ) -> None:
        """Carry out a round: `read` is what this rank has, `by_rank` the spans that each has in its buffer."""
        own = self._channel.rank
        self.take(read)
        if self._channel.size == 1:
            return
        if buffers is None:
            self._read = read
            self._mover.run(by_distance(self._deliveries(by_rank), self._channel), num_under_way=1)
            return
        for shift in range(1, self._channel.size):  # each begins with its neighbour: not all read one rank's memory
            rank = (own + shift) % self._channel.size
            self.take(elements_of(by_rank[rank], buffers[rank], self._stored, block_bytes=self._block_bytes))

    def take(self, read: Mapping[BlockSpan, torch.Tensor]) -> None:
        """Take the elements that this rank needs out of spans, read here or elsewhere."""
        for span, elements in read.items():
            for index, parts in self._plan.transfers(span, self._channel.rank):
                self._targets[index].fill(parts, parts_of(elements, parts))

    def memory_of(self, span: BlockSpan) -> torch.Tensor | None:
        """The bytes of a tensor that are just the bytes of a span, where this rank needs them once and as they are."""
        transfers = self._plan.transfers(span, self._channel.rank)
        if len(transfers) != 1:
            return None
        ((index, moves),) = transfers
        tensor = self._targets[index].memory(self._stored[span.ordinal].piece.dtype)
        if tensor is None:
            return None
        # One run on both sides: then the bytes of the span are, in their order, bytes of the tensor.
        source, target = next(runs_of(moves))
        whole = source.num_elements == sum(move.num_elements for move in moves)
        memory = plain_bytes(tensor, target.start, target.stop)
        return memory if whole and memory.numel() == self._num_bytes(span) else None

    def _num_bytes(self, span: BlockSpan) -> int:
        stored = self._stored[span.ordinal]
        return min(span.last_block * self._block_bytes, stored.num_bytes) - span.first_block * self._block_bytes

    def _deliveries(self, by_rank: Sequence[Sequence[BlockSpan]]) -> Iterator[Delivery[BlockSpan, int]]:
        """What others need of this rank's spans, and what it needs of theirs."""
        own = self._channel.rank
        for giver, spans in enumerate(by_rank):
            for span in spans:
                dtype = torch_dtype(self._stored[span.ordinal].piece.dtype)
                # Both ends list a message's deliveries in the same order, that of the spans: it is how they understand
                # its bytes.
                for taker in self._plan.needers(span) if giver == own else [own]:
                    if taker != giver:
                        for index, parts in self._plan.transfers(span, taker):
                            yield Delivery(giver, taker, span, index, dtype, parts)


def read_exactly(
    channel: Channel,
    store: Store,
    stored: Sequence[StoredPiece],
    targets: Sequence[ReadTarget],
) -> ReadTraffic:
    """Fill this rank's `targets` from just the byte ranges that it needs, unverified.

    Raises the same CheckpointError on all ranks.
    """
    with agreed(channel, purpose="verdict on the bytes read"), _naming_damage(is_late=True):
        read_bytes = fill_exactly(store, stored, targets)
    return ReadTraffic(read_bytes=read_bytes, received_bytes=0, in_place=False)
