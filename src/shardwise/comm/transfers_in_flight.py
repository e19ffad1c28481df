"""What a call waits for: messages on their way out, and an intake that fills, or sums into, the output."""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from shardwise.comm.call_signatures import Signature
from shardwise.comm.messages import Inbound, MessageChunk, Outbound
from shardwise.comm.shared_memory import SLOT_BYTES


class Intake(Protocol):
    """The receiving side of a transfer."""

    def advance(self) -> bool:
        """Use the chunks that have come; whether there were any."""

    @property
    def awaited(self) -> list[int]:
        """World ranks of which something is still to come; empty when complete."""


class TransferInFlight:
    """A call in flight: the `Work` of the process channel. `wait` is the switchboard's."""

    __slots__ = ("_intake", "_outbounds", "_wait", "signature")

    def __init__(
        self,
        signature: Signature,
        outbounds: Sequence[Outbound],
        intake: Intake | None,
        wait: Callable[["TransferInFlight"], None],
    ) -> None:
        self.signature = signature
        self._outbounds = outbounds
        self._intake = intake
        self._wait = wait

    def advance(self) -> bool:
        """Do what can be done now; whether there was anything."""
        moved = False
        for outbound in self._outbounds:
            moved |= outbound.advance()
        if self._intake is not None:
            moved |= self._intake.advance()
        return moved

    @property
    def awaited(self) -> list[int]:
        """World ranks that the transfer waits for; empty when it is complete."""
        ranks = [] if self._intake is None else self._intake.awaited
        return ranks + [rank for outbound in self._outbounds for rank in outbound.awaited]

    @property
    def is_done(self) -> bool:
        """Whether the tensors are the caller's again."""
        return not self.awaited

    def wait(self) -> None:
        """See `Work.wait`."""
        self._wait(self)


class MessageFilling:
    """Each message is copied to its place; places may be anywhere and messages come in any order."""

    def __init__(self, places: Sequence[tuple[Inbound, torch.Tensor]]) -> None:
        self._open = list(places)

    def advance(self) -> bool:
        """See `Intake`."""
        moved = False
        for place in tuple(self._open):
            inbound, target = place
            while inbound.chunks:
                chunk = inbound.take()
                content = chunk.tensor()
                target[chunk.offset : chunk.offset + len(content)].copy_(content)
                chunk.consumed()
                moved = True
            if inbound.is_complete:
                self._open.remove(place)
        return moved

    @property
    def awaited(self) -> list[int]:
        """See `Intake`."""
        return [inbound.source for inbound, _ in self._open]


class Collecting:
    """Messages whose lengths only their senders know, as byte strings."""

    def __init__(self, inbounds: Sequence[Inbound]) -> None:
        self._open = list(inbounds)
        self.values: dict[int, bytearray] = {inbound.source: bytearray() for inbound in inbounds}
        """World rank to what it sent; whole once nothing is awaited."""

    def advance(self) -> bool:
        """See `Intake`."""
        moved = False
        for inbound in tuple(self._open):
            while inbound.chunks:
                chunk = inbound.take()
                content = chunk.content
                self.values[inbound.source] += content.numpy().data if isinstance(content, torch.Tensor) else content
                chunk.consumed()
                moved = True
            if inbound.is_complete:
                self._open.remove(inbound)
        return moved

    @property
    def awaited(self) -> list[int]:
        """See `Intake`."""
        return [inbound.source for inbound in self._open]


class Summing:
    """The sum in rank order, one cache-sized region after the other.

    `terms[r]` is the message of rank r, or this rank's own part as a tensor; all are cut into chunks at the same
    elements. Region by region, ((r0 + r1) + r2) ... in the dtype of `output`. `output` may be the own part itself: then
    the partial sums stay in a scratch chunk, and the last addition writes the region after everybody has read it.
    """

    def __init__(self, output: torch.Tensor, terms: Sequence[Inbound | torch.Tensor], dtype: torch.dtype) -> None:
        self._output = output
        self._terms = terms
        self._dtype = dtype
        self._region_elements = SLOT_BYTES // dtype.itemsize
        self._start = 0  # first element of the current region
        self._num_added = 0  # terms in the sum of the current region
        own = next(term for term in terms if isinstance(term, torch.Tensor))
        aliased = own.numel() > 0 and own.data_ptr() == output.data_ptr()
        self._scratch = (
            torch.empty(min(self._region_elements, len(output)), dtype=output.dtype)
            if aliased and len(terms) > 2
            else None
        )
        self._same_dtype = dtype == output.dtype
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
            elif term.chunks:
                chunk = term.take()
                self._add(chunk.tensor().view(self._dtype), chunk)
            else:
                break
            moved = True
        return moved

    @property
    def _stop(self) -> int:
        return min(self._start + self._region_elements, len(self._output))

    def _add(self, values: torch.Tensor, chunk: MessageChunk | None) -> None:
        region = self._output[self._start : self._stop]
        is_last = self._num_added == len(self._terms) - 1
        partial = region if self._scratch is None or is_last else self._scratch[: len(region)]
        if self._num_added == 0 and self._same_dtype and not is_last:
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
        missing = [t.source for t in self._terms if isinstance(t, Inbound) and not t.is_complete and not t.chunks]
        return missing or ([term.source] if isinstance(term, Inbound) else [])
