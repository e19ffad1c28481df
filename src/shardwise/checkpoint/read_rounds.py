"""Rounds: all ranks read in step, and hand on what others need, in memory that does not grow with the state.

First come the blocks that others need too. A rank reads a batch of them into one half of its buffer and
verifies it. All agree that theirs are good. Then each takes what it needs out of all buffers::

    rank 0   read 0a | agree | take 0a, 0b | read 1a | agree | take 1a, 1b | read 2a | ...
    rank 1   read 0b | agree | take 0b, 0a | read 1b | agree | take 1b, 1a | read 2b | ...
    halves        0                             1                               0

Once something was used, a rank takes its own out of each stretch as soon as that is verified, while it is in the cache.
Ranks of one host see each other's buffers. Others get messages from the mover. Then each rank reads the blocks that it
alone needs, straight into the target if that has the order of the file.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, groupby
from typing import NamedTuple

import torch

from shardwise.checkpoint.contents import Contents, StoredPiece
from shardwise.checkpoint.read_plan import ReadPlan, StoredSpan
from shardwise.checkpoint.reading import (
    Batch,
    BatchReader,
    BegunRead,
    DataFiles,
    GrowingBuffer,
    batches_of,
    buffer_bytes,
    elements_of,
)
from shardwise.checkpoint.safetensors_files import plain_bytes
from shardwise.checkpoint.windows import ExactMoves, ReadTarget, fill_exactly, is_in_strips
from shardwise.comm import Channel
from shardwise.comm.agreement import a_list, agreed, json_as, of_form, understood
from shardwise.comm.digests import checksum
from shardwise.comm.local_tensors import torch_dtype
from shardwise.errors import CheckpointError, MismatchError
from shardwise.moving.copies import parts_of
from shardwise.moving.mover import Delivery, Mover, by_distance
from shardwise.plan.dtypes import aligned
from shardwise.space.moves import runs_of

ONE_ROUND_BYTES = 16 << 20
"""Where no rank reads more, everything is read and agreed upon before anything is written."""

ONE_ROUND_BYTES_ALONE = 48 << 20
"""The same where there are no messages, which take as much again twice."""

ROUND_BYTES = 4 << 20
"""So much a rank reads in a round for others. A message out and one in are at most as large.

Each page of a buffer is a fault, and each round an exchange: for 128 MiB, twice 8 MiB take 4,400 faults of 4
microseconds and 16 exchanges of 270, twice 4 MiB take 2,200 and 32, and stay in the cache.
"""

OWN_BYTES = 1 << 20
"""So much it reads at a time for itself alone: it is verified and copied out of the cache."""

IN_PLACE_BYTES = 4 << 20
"""So much it reads at a time straight into a tensor: nothing has to stay in the cache but what is verified."""

OWN_BATCHES = 256
"""After so many of those it waits for the others, so that none waits for it longer than the channel allows."""


class RoundNeeds(NamedTuple):
    """What a rank says of its rounds, in an exchange."""

    at_once: int
    """Batches where all is read as one."""
    at_once_bytes: int
    """Of the largest of these."""
    handed: int
    """Batches of what others need too."""
    handed_bytes: int
    own: int
    """Groups of batches of what no other needs."""
    prefers_blocks: bool
    """Whether it would read blocks for others rather than just the bytes that it needs."""
    has_cheap_blocks: bool
    digest: str
    """Of the places of what is stored: spans name a stored piece by its position."""


class ReadRounds:
    """This rank's part in filling the targets of all ranks. All make the same calls, and first `agree_on_rounds`.

    In each round every rank reads a batch, all agree that theirs is good, and only then it is used.
    """

    handed: list[list[StoredSpan]]
    """Batches that all ranks read in step, because others need something of them."""
    own: list[list[Batch]]
    """Then batches that no other rank needs, in groups; ranks wait for each other between groups."""
    received_bytes = 0
    """Bytes in messages from other ranks."""
    in_place = False
    """Whether ranks took what they needed out of the memory of those that had read it, without messages."""

    def __init__(
        self,
        channel: Channel,
        files: DataFiles,
        contents: Contents,
        stored: Sequence[StoredPiece],
        plan: ReadPlan,
        targets: Sequence[ReadTarget],
        *,
        verify: bool,
        may_read_exactly: bool,
    ) -> None:
        """targets: one for each piece that the plan has as wanted here.

        may_read_exactly: whether a rank may read just the bytes that it needs, and none for others.
        """
        self._channel, self._files, self._contents = channel, files, contents
        self._stored, self._plan, self._targets = stored, plan, targets
        self._verify = verify
        self._handover = _Handover(channel, plan, targets)
        self.handed, self.own = [], []
        self._exact = ExactMoves.of(stored, targets) if may_read_exactly else []
        self._max_bytes: int | None = None
        self._is_exact = may_read_exactly
        self._at_once: list[list[StoredSpan]] = []
        self._num_bytes = 0
        """Bytes of the largest batch of any rank, which all read in step."""
        self._hands_on = True
        """Whether a rank needs something of what another one reads."""
        if may_read_exactly:
            # Without checksums there is no reason to read whole blocks, and nothing has to be sent. Strips of some KiB
            # in files that are not at hand are an exception, because each costs a call: all read blocks then, unless
            # one would read noticeably more than it needs, or as much as takes longer than the strips.
            thin, self._max_bytes = is_in_strips(self._exact, files)
            # Over a network blocks are read side by side, ranges one after the other.
            self._is_exact = not thin and not files.num_ahead
        self.needs = RoundNeeds(0, 0, 0, 0, 0, False, False, _digest(stored))
        """What the other ranks have to know."""
        if not self._is_exact:
            self.plan_blocks()

    def plan_blocks(self) -> None:
        """Find the batches of blocks of this rank, and what others have to know of them."""
        # What is small is read as one batch: then every rank knows that all of it is good before its target changes.
        self._at_once = self._cut(
            self._plan.reads, ONE_ROUND_BYTES_ALONE if self._channel.size == 1 else ONE_ROUND_BYTES
        )
        self.handed = self._cut(self._plan.handed_reads, ROUND_BYTES)
        batches = list(self._own_batches())
        self.own = [batches[start : start + OWN_BATCHES] for start in range(0, len(batches), OWN_BATCHES)]
        self.needs = RoundNeeds(
            len(self._at_once),
            _largest(self._at_once),
            len(self.handed),
            _largest(self.handed),
            len(self.own),
            not self._is_exact,
            self._max_bytes is None or self._plan.read_bytes <= self._max_bytes,
            self.needs.digest,
        )

    def settle(self, needs: Sequence[RoundNeeds]) -> None:
        """Make as many rounds as others. needs: those of all ranks."""
        # All ranks have to make the same number of exchanges, and their buffers have one size, so that each can view
        # the others'. The largest number of any rank: the others take part in the last rounds with nothing.
        most = RoundNeeds(*[max(column) for column in zip(*needs, strict=True)])
        self._is_exact = not (most.prefers_blocks and all(each.has_cheap_blocks for each in needs))
        self._hands_on = most.handed > 0
        # One round for all, or for none: a rank that used its only batch at once would have changed its target when
        # another one finds damage in its second.
        if most.at_once <= 1:
            self.handed, self.own, self._num_bytes = self._at_once, [], most.at_once_bytes
            num_handed, num_own = most.at_once, 0
        else:
            self._num_bytes, num_handed, num_own = most.handed_bytes, most.handed, most.own
        self.handed += [[] for _ in range(num_handed - len(self.handed))]
        self.own += [[] for _ in range(num_own - len(self.own))]

    def fill(self, *, twice: bool) -> None:
        """Fill the targets. With `twice` all rounds are read and verified before the first is used.

        Raises the same CheckpointError on all ranks; it says so when tensors have been written by then.
        """
        if self._is_exact:
            with agreed(self._channel, purpose="verdict on the bytes read"), _naming_damage(is_late=True):
                fill_exactly(self._files, self._exact)
            return
        handover = self._handover
        buffers = _Buffers(self._channel, self._num_bytes, self._files.num_ahead > 0, is_shared=self._hands_on)
        number = 0
        with BatchReader(self._files, self._contents, verify=self._verify) as reader:
            # The first time nothing is used: with verify="first" the target is touched only once everything has been
            # verified.
            for dry in (True, False) if twice else (False,):
                begun = reader.begin(self.handed[0], buffers.own(number)) if self.handed else None
                for turn in range(len(self.handed)):
                    assert begun is not None
                    # Once something was used a target is partly overwritten whatever comes: this rank need not wait
                    # for the verdict of others to take its own out of the cache.
                    is_late = not dry and turn > 0
                    takes_own = is_late and not self._files.num_ahead
                    read, by_rank = self._agreed(reader, begun, is_late=is_late, takes_own=takes_own)
                    # Counted over both passes: the half that this rank writes now is never the one that others may
                    # still read.
                    if turn + 1 < len(self.handed):
                        begun = reader.begin(self.handed[turn + 1], buffers.own(number + 1))
                    if not dry:
                        if not takes_own:
                            handover.take(read)
                        if self._hands_on:
                            handover.use(read, by_rank, buffers.of_all(number))
                    number += 1
                for batches in self.own:
                    self._read_for_itself(reader, batches, dry=dry)
        self.received_bytes = handover.received_bytes
        self.in_place = buffers.in_place

    def _cut(self, spans: Sequence[StoredSpan], max_bytes: int) -> list[list[StoredSpan]]:
        return batches_of(spans, block_bytes=self._contents.block_bytes, max_bytes=max_bytes)

    def _own_batches(self) -> Iterator[Batch]:
        """What this rank reads for itself alone."""
        # At hand in parts that stay in the cache. From afar in fewer, each of which is a request.
        own_bytes = IN_PLACE_BYTES if self._files.num_ahead else OWN_BYTES
        # A large span may be read straight into its tensor. Small ones would each cost a call, so that they are read
        # together and copied.
        for is_large, spans in groupby(self._plan.own_reads, lambda span: buffer_bytes([span]) >= own_bytes):
            if not is_large:
                yield from ((batch, None) for batch in self._cut(list(spans), own_bytes))
                continue
            for span in spans:
                for batch in self._cut([span], 2 * own_bytes if self._files.num_ahead else IN_PLACE_BYTES):
                    memory = self._handover.memory_of(batch[0])
                    parts = self._cut(batch, own_bytes) if memory is None else [batch]
                    yield from ((each, memory) for each in parts)

    def _agreed(
        self, reader: BatchReader, begun: BegunRead, *, is_late: bool, takes_own: bool
    ) -> tuple[dict[StoredSpan, torch.Tensor], list[list[StoredSpan]]]:
        """What this rank has read, and which spans each rank has. Raises the same error on all if one could not."""
        purpose = "verdict on blocks that were read"
        with agreed(self._channel, purpose=purpose) as agreement, _naming_damage(is_late=is_late):
            read = reader.finish(begun, self._handover.take if takes_own else None)
            # The spans go with the verdict: who reads what is planned, but how it is cut into batches is each rank's
            # own affair, and this tells it without a message more.
            spans = [(each.ordinal, each.start, each.stop) for each in begun.batch[0]]
            agreement.value = json.dumps(spans, separators=(",", ":")).encode()
        return read, understood(agreement.values, self._spans_in, purpose=purpose)

    def _spans_in(self, answer: bytes) -> list[StoredSpan]:
        rows = of_form(a_list(answer), list[tuple[int, int, int]])
        return [StoredSpan(ordinal, start, stop, self._stored[ordinal]) for ordinal, start, stop in rows]

    def _read_for_itself(self, reader: BatchReader, batches: Sequence[Batch], *, dry: bool) -> None:
        """Read, verify and use batches that no other rank needs; raises the same error on all if one could not."""
        purpose = "verdict on blocks that each rank read for itself"
        with agreed(self._channel, purpose=purpose), _naming_damage(is_late=not dry):
            # Bytes that lie in the target as they do in the file need no copy: they are verified where they are wanted.
            for begun in reader.ahead((spans, None if dry else memory) for spans, memory in batches):
                read = reader.finish(begun)
                if not dry:
                    self._handover.take(read)


def agree_on_rounds(channel: Channel, rounds: Sequence[ReadRounds], findings: Sequence[str], *, about: str) -> None:
    """Let all ranks make the same rounds. They are in the order in which they are carried out.

    Raises CheckpointError, the same on all ranks, with the findings of all.
    """
    purpose = "findings on the files, and rounds"
    for is_first in (True, False):
        mine = [list(findings), [each.needs for each in rounds]]
        answers = channel.exchange(json.dumps(mine).encode(), purpose=purpose)
        findings_of, needs_of = zip(*understood(answers, cache(_said_in), purpose=purpose), strict=True)
        if found := list(dict.fromkeys(chain.from_iterable(findings_of))):
            raise CheckpointError(*found, about=about)
        # Ranks that would read exactly have not planned blocks. Where others would not, all say what blocks they need.
        if not is_first or len({tuple(each.prefers_blocks for each in needs) for needs in needs_of}) == 1:
            break
        for each in rounds:
            each.plan_blocks()
    for each, needs in zip(rounds, zip(*needs_of, strict=True), strict=True):
        # The exchange is made anyway, and the digest in it is cheap.
        if len({of_rank.digest for of_rank in needs}) > 1:
            raise MismatchError(
                "ranks have not found the same stored pieces in the same order, and would mix up the pieces that "
                "they read; nothing was changed. This is a fault of shardwise: please report it"
            )
        each.settle(needs)


def _said_in(answer: bytes) -> tuple[list[str], list[RoundNeeds]]:
    """Findings of a rank, and what it needs."""
    rows = list[tuple[int, int, int, int, int, bool, bool, str]]
    findings, needs = json_as(tuple[list[str], rows])(answer)
    return findings, [RoundNeeds(*each) for each in needs]


def _largest(batches: Sequence[Sequence[StoredSpan]]) -> int:
    return max(map(buffer_bytes, batches), default=0)


def _digest(stored: Sequence[StoredPiece]) -> str:
    """Equal where ranks mean the same by the position of a stored piece."""
    places = "\n".join(f"{each.file} {each.start} {each.piece.name}" for each in stored)
    return checksum(places.encode()).hex()


class _Buffers:
    """The buffers into which batches are read: two by turns, where ranks share memory or batches are read ahead.

    A rank that has agreed on round k knows that all have used up round k - 1, and may write its buffer again.
    """

    def __init__(self, channel: Channel, num_bytes: int, reads_ahead: bool, *, is_shared: bool) -> None:
        # The second half begins where elements may, of any dtype.
        self._num_bytes = num_bytes = aligned(num_bytes)
        self._rank = channel.rank
        # Two halves: one is read into while slower ranks still take from the other. Over a network, or where each rank
        # reads for itself alone, nobody looks into it.
        self._shared = channel.share(2 * num_bytes) if is_shared and num_bytes else None
        # Without shared memory one half suffices at hand: messages have been packed before the next batch is read.
        self._num_halves = 2 if self._shared is not None or reads_ahead else 1
        # Of huge pages, where there are any: each small one is a fault, and those of 16 MiB cost more than the read.
        self._alone = GrowingBuffer().room(0 if self._shared is not None else self._num_halves * num_bytes)

    @property
    def in_place(self) -> bool:
        """Whether all ranks see the buffers of all."""
        return self._shared is not None

    def own(self, number: int) -> torch.Tensor:
        """This rank's buffer of a round."""
        return self._half(self._alone if self._shared is None else self._shared[self._rank], number)

    def of_all(self, number: int) -> list[torch.Tensor] | None:
        """Every rank's buffer of a round; None where they cannot be seen."""
        return None if self._shared is None else [self._half(each, number) for each in self._shared]

    def _half(self, memory: torch.Tensor, number: int) -> torch.Tensor:
        start = number % self._num_halves * self._num_bytes
        return memory[start : start + self._num_bytes]


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
        plan: ReadPlan,
        targets: Sequence[ReadTarget],
    ) -> None:
        self._channel = channel
        self._plan = plan
        self._targets = targets
        self._read: Mapping[StoredSpan, torch.Tensor] = {}
        """What this rank has read in the round."""
        self._mover: Mover[StoredSpan, int] = Mover(
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
        read: Mapping[StoredSpan, torch.Tensor],
        by_rank: Sequence[Sequence[StoredSpan]],
        buffers: Sequence[torch.Tensor] | None,
    ) -> None:
        """Take what others have read: `read` is what this rank has, `by_rank` the spans that each has in its buffer."""
        own = self._channel.rank
        if buffers is None:
            self._read = read
            self._mover.run(by_distance(self._deliveries(by_rank), self._channel), num_under_way=1)
            return
        for shift in range(1, self._channel.size):  # each begins with its neighbour: not all read one rank's memory
            rank = (own + shift) % self._channel.size
            self.take(elements_of(by_rank[rank], buffers[rank]))

    def take(self, read: Mapping[StoredSpan, torch.Tensor]) -> None:
        """Take the elements that this rank needs out of spans, read here or elsewhere."""
        for span, elements in read.items():
            for index, parts in self._plan.transfers(span, self._channel.rank):
                self._targets[index].fill(parts, parts_of(elements, parts))

    def memory_of(self, span: StoredSpan) -> torch.Tensor | None:
        """The bytes of a tensor that are just the bytes of a span, where this rank needs them once and as they are."""
        transfers = self._plan.transfers(span, self._channel.rank)
        if len(transfers) != 1:
            return None
        ((index, moves),) = transfers
        tensor = self._targets[index].memory(span.stored.piece.dtype)
        if tensor is None:
            return None
        # One run on both sides: then the bytes of the span are, in their order, bytes of the tensor.
        source, target = next(runs_of(moves))
        whole = source.num_elements == sum(move.num_elements for move in moves)
        memory = plain_bytes(tensor, target.start, target.stop)
        return memory if whole and memory.numel() == span.stop - span.start else None

    def _deliveries(self, by_rank: Sequence[Sequence[StoredSpan]]) -> Iterator[Delivery[StoredSpan, int]]:
        """What others need of this rank's spans, and what it needs of theirs."""
        own = self._channel.rank
        for giver, spans in enumerate(by_rank):
            for span in spans:
                dtype = torch_dtype(span.stored.piece.dtype)
                # Both ends list a message's deliveries in the same order, that of the spans: it is how they understand
                # its bytes.
                for taker in self._plan.needers(span) if giver == own else [own]:
                    if taker != giver:
                        for index, parts in self._plan.transfers(span, taker):
                            yield Delivery(giver, taker, span, index, dtype, parts)
