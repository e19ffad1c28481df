"""Shared memory without names: a descriptor passed over a Unix socket, so nothing can stay behind in /dev/shm.

A sender owns a pool of equal slots in one or more segments. It alone writes them; peers map them and read. Segments
beyond the first exist only as long as messages need them. Memory that was lent to tensors is read by the peers where
it is, without a copy into a slot. The life of a slot, with two readers::

    free ----take----> copied into ----CHUNK to both----> readers 2 --CONSUMED--> readers 1 --CONSUMED--> free
          by the owner             over the sockets                 from either           from the other

Memory has no lock. A reader looks only after the CHUNK frame, and the owner writes only after all CONSUMED frames.
Frames pass through the kernel, which orders the writes before them. In memory of `Channel.share` peers may write too.
"""

import mmap
import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import torch

SLOT_BYTES = 1 << 20
"""Bytes of one chunk: small enough for the cache, large enough that the copy takes longer than the notification."""

BASE_SLOTS = 16
"""Slots of the first segment, which is kept. On a busy machine ranks seldom run at the same time. A message of this
size is published in one turn and read in another, not in lockstep (measured: 2 to 3 times faster than 4 MiB).
"""

RETAINED_SLOTS = 16
"""Idle slots of further segments kept for the next burst."""


def map_segment(descriptor: int, num_bytes: int) -> torch.Tensor:
    """Map the memory behind a descriptor as bytes, and close the descriptor; unmapped with its last view."""
    # The tensor keeps the mapping alive, and the mapping needs no descriptor: what is left open is lost for good.
    try:
        return torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
    finally:
        os.close(descriptor)


class ChunkSlot:
    """A place for one chunk; `readers` are the ranks that have not consumed it yet."""

    __slots__ = ("index", "memory", "outbound", "readers", "segment")

    def __init__(self, segment: "SharedSegment", index: int, memory: torch.Tensor) -> None:
        self.segment = segment
        self.index = index
        self.memory = memory
        self.readers: set[int] = set()
        # The message in the slot, by which the switchboard finds whose window has room again. An `object`, because
        # messages are built upon this file.
        self.outbound: object = None


class SharedSegment:
    """One stretch of anonymous shared memory that this rank writes and its peers read."""

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        # The name is for /proc alone. When the last process that maps the memory ends, killed or not, it is gone.
        self.descriptor = os.memfd_create(f"shardwise-{number}")
        os.ftruncate(self.descriptor, num_bytes)
        self.slots: list[ChunkSlot] = []
        self.num_used = 0

    def cut(self) -> None:
        """Make slots of it."""
        memory = map_segment(os.dup(self.descriptor), self.num_bytes)
        self.slots = [ChunkSlot(self, index, part) for index, part in enumerate(memory.split(SLOT_BYTES))]

    def close(self) -> None:
        """Give the memory back; it lives on until its readers have unmapped it too."""
        os.close(self.descriptor)
        self.slots = []


@dataclass(frozen=True, kw_only=True, slots=True)
class Lent:
    """A segment that is the memory of tensors, for as long as one of them lives."""

    segment: SharedSegment
    start: int
    """The address of its first byte here."""
    mapping: "weakref.ref[mmap.mmap]"


class SlotPool:
    """The slots that this rank may write. The most recently used free slot is taken first: it is still in the cache."""

    def __init__(self) -> None:
        self._segments: dict[int, SharedSegment] = {}
        self._free: list[ChunkSlot] = []
        self._lent: dict[int, Lent] = {}
        self._next_number = 0

    @property
    def num_slots(self) -> int:
        """Slots that exist, free or not."""
        return sum(len(segment.slots) for segment in self._segments.values())

    def take(self, *, grow: int) -> ChunkSlot | None:
        """A free slot, or with `grow` > 0 one of a new segment of that many slots, else None."""
        if not self._free:
            # A refusal is no deadlock: who is refused has a chunk on its way, and comes back when it is consumed.
            if self._segments and not grow:
                return None
            self._add_segment(max(grow, 0 if self._segments else BASE_SLOTS))
        slot = self._free.pop()
        slot.segment.num_used += 1
        return slot

    def lend(self, num_bytes: int) -> torch.Tensor:
        """Zeroed bytes that the peers can read in place; given back when no tensor views them any more."""
        segment = SharedSegment(self._number(), num_bytes)
        # Views of the memory, and views of views, keep the mapping alive, and nobody says when the last one goes. So
        # the pool holds the mapping weakly and looks now and then (`release_idle`).
        mapping = mmap.mmap(segment.descriptor, num_bytes)
        memory = torch.frombuffer(mapping, dtype=torch.uint8)
        self._lent[segment.number] = Lent(segment=segment, start=memory.data_ptr(), mapping=weakref.ref(mapping))
        return memory

    def locate(self, source: torch.Tensor) -> tuple[SharedSegment, int] | None:
        """The lent segment that holds flat bytes, and where in it they begin; None for other memory."""
        # By address: a message is any view of the memory, such as one bucket of many. Few segments are lent at a time.
        # One that is gone, and not given back yet, has no address: the kernel may have given it to the next.
        address = source.data_ptr()
        for lent in self._lent.values():
            is_inside = lent.start <= address and address + len(source) <= lent.start + lent.segment.num_bytes
            if is_inside and lent.mapping() is not None:
                return lent.segment, address - lent.start
        return None

    def _add_segment(self, num_slots: int) -> None:
        segment = SharedSegment(self._number(), num_slots * SLOT_BYTES)
        segment.cut()
        self._segments[segment.number] = segment
        self._free.extend(reversed(segment.slots))  # slots are taken from the end

    def _number(self) -> int:
        """A number that no segment has, and as long as possible none had: readers may still hear of its end."""
        # Frames give a segment 16 bits.
        while (number := self._next_number) in self._segments or number in self._lent:
            self._next_number = (number + 1) & 0xFFFF
        self._next_number = (number + 1) & 0xFFFF
        return number

    def find(self, segment: int, index: int) -> ChunkSlot:
        """The slot that a peer names."""
        return self._segments[segment].slots[index]

    def give_back(self, slot: ChunkSlot) -> None:
        """Make a slot free whose readers have all consumed it."""
        slot.outbound = None
        slot.segment.num_used -= 1
        self._free.append(slot)

    def release_idle(self) -> Sequence[int]:
        """Drop wholly free segments beyond the first and the retained, and lent ones whose tensors are gone.

        Returns their numbers for the readers.
        """
        if not self._lent and len(self._segments) < 2:
            return ()  # asked with every message that moves
        released = []
        for number, lent in list(self._lent.items()):
            if lent.mapping() is None:
                released.append(number)
                self._lent.pop(number).segment.close()
        # Slots beyond those kept go segment by segment, since memory is given back by segment only.
        spare = self.num_slots - BASE_SLOTS - RETAINED_SLOTS
        for segment in list(self._segments.values())[1:]:
            if spare > 0 and not segment.num_used:
                spare -= len(segment.slots)
                released.append(segment.number)
                self._free = [slot for slot in self._free if slot.segment is not segment]
                del self._segments[segment.number]
                segment.close()
        return tuple(released)

    def close(self) -> None:
        """Give all memory back."""
        for segment in (*self._segments.values(), *(lent.segment for lent in self._lent.values())):
            segment.close()
        self._segments.clear()
        self._lent.clear()
        self._free.clear()
