"""What becomes of the messages that a call takes in: they fill places, are kept as values, or are summed in order."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch

from shardwise.comm.process.messages import Inbound, MessageChunk, Outbound
from shardwise.comm.process.shared_memory import SLOT_BYTES


class MessageFilling:
    """Each message is copied to its place; places may be anywhere and messages come in any order."""

    def __init__(
        self,
        places: Sequence[tuple[Inbound, torch.Tensor]],
        passed_on: Mapping[Inbound, Sequence[Outbound]] = MappingProxyType({}),
    ) -> None:
        """passed_on: the messages that give other ranks what one brings, out of its place."""
        self._open = list(places)
        self._passed_on = passed_on

    def advance(self) -> bool:
        """See `Intake`."""
        moved = False
        # Chunks of one message come in order, but each knows its place, so that the messages may come in any order.
        for opened in tuple(self._open):
            inbound, target = opened
            num_bytes = target.numel()
            while inbound.fits(num_bytes, target=target):
                chunk = inbound.take()
                content = chunk.tensor()
                is_whole = content.numel() == num_bytes
                place = target if is_whole else target[chunk.offset : chunk.offset + content.numel()]
                if content.data_ptr() != place.data_ptr():  # gloo has received into the place itself
                    place.copy_(content)
                for outbound in self._passed_on.get(inbound, ()):
                    outbound.has_come(chunk.offset + content.numel())
                chunk.consumed()
                moved = True
            if inbound.is_complete:
                self._open.remove(opened)
        return moved

    @property
    def awaited(self) -> list[int]:
        """See `Intake`."""
        return [inbound.source for inbound, _ in self._open]


class Collecting:
    """Messages whose lengths only their senders know, as byte strings."""

    def __init__(self, inbounds: Sequence[Inbound]) -> None:
        self._open = list(inbounds)
        self.values: dict[int, bytearray | memoryview] = {inbound.source: bytearray() for inbound in inbounds}
        """World rank to what it sent; whole once nothing is awaited."""
        self.last: int | None = None
        """The one whose message was whole last."""

    def advance(self) -> bool:
        """See `Intake`."""
        moved = False
        for inbound in tuple(self._open):
            while inbound.is_next_here():
                chunk = inbound.take()
                content, value = chunk.content, self.values[inbound.source]
                if isinstance(content, memoryview) and len(content) == inbound.total:
                    self.values[inbound.source] = content  # memory of its own, which came whole
                else:
                    assert isinstance(value, bytearray)
                    value += content.numpy().data if isinstance(content, torch.Tensor) else content
                chunk.consumed()
                moved = True
            if inbound.is_complete:
                self._open.remove(inbound)
                self.last = inbound.source
        return moved

    @property
    def awaited(self) -> list[int]:
        """See `Intake`."""
        return [inbound.source for inbound in self._open]


class Summing:
    """The sum in rank order, one cache-sized region after the other.

    `terms[r]` is the message of rank r, or this rank's own part as a tensor. All are cut into chunks at the same
    elements. Region by region, ((r0 + r1) + r2) ... in the dtype of `output`. `output` may be the own part itself: then
    the partial sums stay in a scratch chunk, and the last addition writes the region after this rank has read it.

    Rank 1 of 3 sums 2.5 MiB in six additions, in any order of messages::

        region              0 to 1 MiB         1 to 2 MiB         2 to 2.5 MiB
        term of rank 0      chunk 0  held      chunk 1  held      chunk 2  held
        term of rank 1      own part  (1)      own part  (3)      own part  (5)
        term of rank 2      chunk 0   (2)      chunk 1   (4)      chunk 2   (6)

    Until chunk 0 of rank 0 is there, nothing is added: chunks of rank 2 wait in their slots, and its window holds it
    back. To add what comes first would be quicker now and then, but the sum would depend on who was quicker.
    """

    def __init__(self, output: torch.Tensor, terms: Sequence[Inbound | torch.Tensor], dtype: torch.dtype) -> None:
        self._output = output
        self._terms = terms
        self._dtype = dtype
        self._region_elements = SLOT_BYTES // dtype.itemsize
        self._start = 0  # first element of the current region
        self._num_added = 0  # terms in the sum of the current region
        # With two terms the one addition reads both and writes the region: no partial sum needs a place.
        own = next(term for term in terms if isinstance(term, torch.Tensor))
        aliased = own.numel() > 0 and own.data_ptr() == output.data_ptr()
        self._scratch = (
            torch.empty(min(self._region_elements, len(output)), dtype=output.dtype)
            if aliased and len(terms) > 2
            else None
        )
        self._same_dtype = dtype == output.dtype
        # torch adds bfloat16 to float32 in float32 within one kernel. Where the promoted dtype is not that of the
        # output, a term is converted on its own.
        self._widens = torch.promote_types(dtype, output.dtype) == output.dtype
        self._held: tuple[torch.Tensor, MessageChunk | None] | None = None
        """The first term of a region: it is read together with the second, which saves writing it."""
        self._done = False

    def advance(self) -> bool:
        """See `Intake`."""
        moved = False
        while not self._done:
            term = self._terms[self._num_added]
            if isinstance(term, torch.Tensor):
                self._add(term[self._start : self._stop], None)
            elif term.fits(len(self._output) * self._dtype.itemsize, self._dtype.itemsize):
                self._add(*self._region_of(term))
            else:
                break
            moved = True
        return moved

    @property
    def _stop(self) -> int:
        return min(self._start + self._region_elements, len(self._output))

    def _region_of(self, term: Inbound) -> tuple[torch.Tensor, MessageChunk | None]:
        """The values of the current region, and the chunk if they are its last."""
        chunk = term.chunks[0]
        values = chunk.tensor().view(self._dtype)
        first = self._start - chunk.offset // self._dtype.itemsize
        end = min(first + self._region_elements, len(values))
        return values[first:end], term.take() if end == len(values) else None

    def _add(self, values: torch.Tensor, chunk: MessageChunk | None) -> None:
        region = self._output[self._start : self._stop]
        is_last = self._num_added == len(self._terms) - 1
        partial = region if self._scratch is None or is_last else self._scratch[: len(region)]
        if self._num_added == 0 and self._same_dtype and not is_last:
            # Not acknowledged yet: its sender must not overwrite what the next addition reads.
            self._held = (values, chunk)
        else:
            if self._num_added == 0:
                partial.copy_(values)
            elif self._held is not None:
                first, first_chunk = self._held
                torch.add(first, values, out=partial)
                self._held = None
                if first_chunk is not None:
                    first_chunk.consumed()
            else:
                summed = values if self._same_dtype or self._widens else values.to(region.dtype)
                torch.add(region if self._scratch is None else self._scratch[: len(region)], summed, out=partial)
            if chunk is not None:
                chunk.consumed()
        self._num_added += 1
        if is_last:
            self._num_added = 0
            self._start = self._stop
            self._done = self._start == len(self._output)

    @property
    def awaited(self) -> list[int]:
        """See `Intake`."""
        if self._done:
            return []
        term = self._terms[self._num_added]
        # All ranks that have given nothing to add now, not only the next in order: a lost one is noticed at once.
        missing = [
            t.source for t in self._terms if isinstance(t, Inbound) and not t.is_complete and not t.is_next_here()
        ]
        return missing or ([term.source] if isinstance(term, Inbound) else [])
