"""Snapshots: the bytes that this rank is going to write, copied while the state still has the values of the save.

    tensor in CPU memory    the caller copies it, and waits for that as long as memory takes: one copy
    tensor on a device      the copy is queued behind the kernels that the device was given; the caller goes on at once

    host      save: queue copies | step: launch kernels ............
    device    ... step before .. | copies to the host | kernels that change the state ...
    thread                       | wait for the copies .... | write the file

What the device is given later runs after the copies, so that the state may change as soon as `save` returns. For that,
the memory of the snapshot is page-locked: a device writes there without the host. It is made in blocks of one size,
because torch rounds each piece of page-locked memory up to a power of two.
"""

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from shardwise.checkpoint.safetensors_files import row_major_bytes
from shardwise.checkpoint.state_pieces import Held
from shardwise.comm.local_tensors import bytes_of
from shardwise.space import Piece

_BLOCK_BYTES = 64 << 20
"""Of page-locked memory."""


@dataclass(kw_only=True, slots=True)
class SnapshotCounters:
    """Bytes that snapshots have copied; `waited_bytes` over the bytes of a save is what it blocks for, in copies."""

    waited_bytes: int = 0
    """Copied by the caller of `save`, which waited."""
    queued_bytes: int = 0
    """Copied by devices, behind what they had to do. No caller waited."""


class Snapshot:
    """The memory of snapshots, which all saves use one after the other. It grows, and is kept until `release`.

    The states of a run have one size, and new memory would be faulted in page by page, or page-locked, at each save.
    """

    def __init__(self) -> None:
        self.counters = SnapshotCounters()
        self._blocks: list[torch.Tensor] = []
        self._is_locked = False
        self._at = 0
        """Bytes that were written since `begin`."""
        self._marks: list[torch.Event] = []

    @property
    def num_bytes(self) -> int:
        """Bytes of memory that it holds."""
        return sum(len(block) for block in self._blocks)

    def begin(self, num_bytes: int, *, from_device: bool) -> None:
        """Make room for so many bytes; what was written before is void. `from_device`: page-locked, if possible."""
        self._at = 0
        if from_device and not self._is_locked:
            self._blocks, self._is_locked = [], True
        if self._is_locked:
            try:
                while self.num_bytes < num_bytes:
                    self._blocks.append(torch.empty(_BLOCK_BYTES, dtype=torch.uint8, pin_memory=True))
                return
            except RuntimeError as error:  # the system gives no more of it
                warnings.warn(
                    f"a snapshot of {num_bytes} bytes got no page-locked memory ({error}); saves in the background "
                    "wait for their copies",
                    stacklevel=2,
                )
                self._blocks, self._is_locked = [], False
        if self.num_bytes < num_bytes:
            self._blocks = [torch.empty(num_bytes, dtype=torch.uint8)]

    def write(self, data: memoryview) -> None:
        """See `Sink.write`."""
        # frombuffer takes no empty buffer.
        if data:
            self._put(torch.frombuffer(data, dtype=torch.uint8), queued=False)

    def take(self, pieces: Sequence[Piece], held: Held) -> None:
        """Copy the bytes of pieces out of the tensors that hold them."""
        for piece in pieces:
            holding = held.piece_with(piece)
            tensor = held.tensors[holding]
            queued = self._is_locked and tensor.device.type != "cpu"
            room = tensor.device if queued else torch.device("cpu")
            for chunk in row_major_bytes(piece, holding, tensor, held.dtypes_of(holding), room=room):
                self._put(chunk, queued=queued)
        if self._is_locked:
            devices = {each.device for each in held.tensors.values() if each.device.type != "cpu"}
            self._marks = [torch.accelerator.current_stream(each).record_event() for each in devices]

    def wait(self) -> None:
        """Wait until devices have copied all; any thread may."""
        marks, self._marks = self._marks, []
        for mark in marks:
            mark.synchronize()

    def chunks(self) -> Iterator[memoryview]:
        """The bytes that were written since `begin`, in order."""
        left = self._at
        for block in self._blocks:
            if not left:
                return
            yield bytes_of(block[: min(left, len(block))])
            left -= min(left, len(block))

    def release(self) -> None:
        """Give the memory back, when all copies are done."""
        self.wait()
        self._blocks, self._at, self._is_locked = [], 0, False

    def _put(self, data: torch.Tensor, *, queued: bool) -> None:
        if queued:
            self.counters.queued_bytes += len(data)
        else:
            self.counters.waited_bytes += len(data)
        start, size = 0, len(self._blocks[0]) if self._blocks else 0
        while start < len(data):
            number, first = divmod(self._at, size)
            part = data[start : start + size - first]
            self._blocks[number][first : first + len(part)].copy_(part, non_blocking=queued)
            start += len(part)
            self._at += len(part)
