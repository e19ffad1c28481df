"""Saved tensors of modules in host memory: copied out behind their forward, copied back ahead of their backward.

    forward    run 0 |  run 1          |  run 2          |        the loss; the last module is never copied out
    side              out 0             out 1
    freed                             0                 1

    backward   run 2         |  run 1         |  run 0
    side        back 1          back 0

At one time the device has the saved tensors of two modules: that which runs, and the one before or after it. Every copy
of a rank goes over one side stream, in order, so that a host block is free as soon as its copy back has been given to
the stream. Streams wait for each other on the device, and the host for none of them.

Not moved: parameters and buffers, storages below 4 KiB, small views of large storages (rows of a batch).
"""

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import nn
from typing_extensions import override

from shardwise.engine.activations.saved_meter import SavedMeter, storages_of
from shardwise.engine.forward.layers import Forward, OfEngine, Place
from shardwise.engine.forward.passes import Passes
from shardwise.engine.forward.passes import unpack as unpack_parameter
from shardwise.engine.forward.randomness import KeyedRandom
from shardwise.engine.torch_private import (
    COMPILER,
    is_transformed,
    pop_saved_hooks,
    push_saved_hooks,
    skip_code,
    storage_id,
    top_saved_hooks,
    version_of,
)
from shardwise.errors import ModelError

LEAST_BYTES = 4096
"""A copy of less costs more than it saves."""
_LEAST_SHARE = 4
"""A view of less than one in so many bytes of its storage keeps what others hold anyway."""


class PinnedBlocks:
    """Blocks of pinned host memory that are used again: to pin memory takes longer than to fill it.

    Copies to and from them go over one stream, so a block may be given back at once.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[torch.Tensor]] = {}
        self.num_bytes = 0
        """Of all blocks, free ones included."""

    def take(self, num_bytes: int) -> torch.Tensor:
        """Bytes on the host, at least so many."""
        size = size_of_block(num_bytes)
        if free := self._free.get(size):
            return free.pop()
        self.num_bytes += size
        return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)

    def give_back(self, block: torch.Tensor) -> None:
        """What is in the block is not needed any more."""
        self._free.setdefault(block.numel(), []).append(block)


def size_of_block(num_bytes: int) -> int:
    """Of few sizes, so that blocks fit again: at most an eighth larger than asked.

    >>> size_of_block(100), size_of_block(5000), size_of_block(1 << 20)
    (512, 5120, 1048576)
    """
    step = max(512, 1 << max(0, (num_bytes - 1).bit_length() - 4))
    return -(-num_bytes // step) * step


class HostTransfers:
    """What one rank has moved to the host, and the stream on which it moves."""

    def __init__(self, model: nn.Module, device: torch.device, passes: Passes, microbatch: Callable[[], int]) -> None:
        """microbatch: gives the one that this rank works on, where a schedule mixes several."""
        self.device = device
        self.passes = passes
        """Knows what autograd keeps of gathered parameters (stage 3)."""
        self._microbatch = microbatch
        self.blocks = PinnedBlocks()
        self.num_bytes = 0
        """Copied to the host so far."""
        self._model = model
        self._stream = torch.Stream(device)
        self.known: weakref.WeakValueDictionary[int, HostCopyOfStorage] = weakref.WeakValueDictionary()
        """By storage, while that is held here."""
        self._last: HostForward | None = None
        """The last call of all, which nothing was copied of yet."""
        self._before: weakref.WeakValueDictionary[int, HostForward] = weakref.WeakValueDictionary()
        """The last call of each microbatch."""

    def begin(self) -> "HostForward":
        """The forward of a module begins: what the one before it saved is copied out meanwhile."""
        if self._last is not None:
            self._last.copy_out()
        number = self._microbatch()
        call = HostForward(self, self._before.get(number))
        self._before[number] = call
        return call

    def end(self, call: "HostForward") -> None:
        """It has ended: what the one before it saved is on the host, or the device waits until it is."""
        if self._last is not None:
            self._last.let_go()
        self._last = call

    @cached_property
    def parameters(self) -> frozenset[int]:
        """The storages of parameters and buffers."""
        return storages_of(self._model)

    def on_side(self, copies: Iterable[Callable[[], None]]) -> torch.Event:
        """Make copies on the side stream, after what the current stream has been given so far."""
        self._stream.wait_event(self.current().record_event())
        with self._stream:
            for copy in copies:
                copy()
            return self._stream.record_event()

    def current(self) -> torch.Stream:
        """The stream on which this thread computes."""
        return torch.accelerator.current_stream(self.device)


class HostForward:
    """One forward of one module, and what it saved.

    saved --copy_out--> leaving --let_go--> away --bring_back--> coming --need--> here, until autograd has used it
    """

    def __init__(self, transfers: HostTransfers, before: "HostForward | None") -> None:
        self._transfers = transfers
        self._before = None if before is None else weakref.ref(before)
        self._saved: list[weakref.ref[HostCopyOfStorage]] = []
        """Weak: what backward has used is let go at once."""
        self._leaving: list[HostCopyOfStorage] = []
        """Held until the copies have been made."""
        self._event: torch.Event | None = None
        """Of the copies that were begun last."""
        self._waited: set[int] = set()
        """Streams that wait for them."""

    def pack(self, tensor: torch.Tensor) -> object:
        """What autograd keeps instead of a saved tensor."""
        transfers = self._transfers
        if not isinstance(kept := transfers.passes.pack_saved(tensor), torch.Tensor):
            return kept
        if type(tensor) is not torch.Tensor or tensor.device != transfers.device or tensor.layout != torch.strided:
            return kept
        if tensor.is_quantized or tensor.is_conj() or tensor.is_neg():  # more than a storage and its strides
            return kept
        storage = tensor.untyped_storage()
        size, key = storage.nbytes(), storage_id(storage)
        if size < LEAST_BYTES or tensor.nbytes * _LEAST_SHARE < size or key in transfers.parameters:
            return kept
        copy = transfers.known.get(key)
        if copy is None or copy.version != version_of(tensor):  # written to in between, it is another value
            copy = transfers.known[key] = HostCopyOfStorage(transfers, tensor)
            self._saved.append(weakref.ref(copy))
        return SavedView(copy, self, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def copy_out(self) -> None:
        """Begin to copy to the host."""
        if not self._leaving and (here := [each for each in self._alive() if not each.is_away]):
            self._leaving = here
            self._copy(each.copy_out for each in here)

    def let_go(self) -> None:
        """Free on the device what is copied."""
        if self._leaving:
            self._wait()
            for each in self._leaving:
                each.let_go()
            self._leaving = []

    def need(self) -> None:
        """Its backward asks for what was saved: it is on the device from here on, and that of the call before soon."""
        self.bring_back()
        self._wait()
        self._leaving = []
        before, self._before = None if self._before is None else self._before(), None
        if before is not None:
            before.bring_back()

    def bring_back(self) -> None:
        """Begin to copy back to the device."""
        if away := [each for each in self._alive() if each.is_away]:
            for each in away:
                each.take_room()  # on the stream that reads it, which the side stream waits for
            copied = self._copy(each.copy_back for each in away)
            for each in away:
                each.coming = self._transfers.current(), copied

    def _alive(self) -> list["HostCopyOfStorage"]:
        return [each for at in self._saved if (each := at()) is not None]

    def _copy(self, copies: Iterable[Callable[[], None]]) -> torch.Event:
        self._event = self._transfers.on_side(copies)
        self._waited.clear()
        return self._event

    def _wait(self) -> None:
        if self._event is not None and (stream := self._transfers.current()).stream_id not in self._waited:
            stream.wait_event(self._event)
            self._waited.add(stream.stream_id)


class HostCopyOfStorage:
    """A storage that autograd saved views of; on the device, on the host, or both."""

    def __init__(self, transfers: HostTransfers, tensor: torch.Tensor) -> None:
        """`tensor`: views all of it, or a part."""
        storage = tensor.untyped_storage()
        self._transfers = transfers
        self._key = storage_id(storage)
        self.version = version_of(tensor)
        self._original: torch.Tensor | None = tensor.detach()
        """Counts writes with the tensor, and while it is the one on the device."""
        self._shape = tuple(tensor.shape)
        self._is_written = False
        self.bytes: torch.Tensor | None = torch.empty(0, dtype=torch.uint8, device=transfers.device).set_(storage)
        """On the device."""
        self._size = storage.nbytes()
        self._block: torch.Tensor | None = None
        self.coming: tuple[torch.Stream, torch.Event] | None = None
        """The stream of the memory that is filled, and what it has to wait for; None where somebody has waited."""

    def check(self) -> None:
        """Raise ModelError for a value that is not the saved one any more, as torch does where nothing is moved."""
        if self._is_written or self._has_new_version:
            raise ModelError(
                f"a tensor of shape {self._shape} that a forward saved for backward was written to in "
                "place afterwards. Write to a copy of it"
            )

    @property
    def _has_new_version(self) -> bool:
        return self._original is not None and version_of(self._original) != self.version

    @property
    def is_away(self) -> bool:
        """Whether it is on the host alone."""
        return self.bytes is None

    def copy_out(self) -> None:
        """To the host, on the current stream."""
        self.check()
        assert self.bytes is not None
        self._block = self._transfers.blocks.take(self._size)
        self._block[: self._size].copy_(self.bytes, non_blocking=True)
        self._transfers.num_bytes += self._size

    def let_go(self) -> None:
        """Free it on the device."""
        self._is_written = self._has_new_version  # while it was copied: nobody knows which value came
        self.bytes = self._original = None
        # Another storage may get its number.
        if self._transfers.known.get(self._key) is self:
            del self._transfers.known[self._key]

    def take_room(self) -> None:
        """Memory on the device, without values."""
        self.bytes = torch.empty(self._size, dtype=torch.uint8, device=self._transfers.device)

    def copy_back(self) -> None:
        """Into that memory, on the current stream."""
        assert self.bytes is not None
        assert self._block is not None
        self.bytes.copy_(self._block[: self._size], non_blocking=True)
        self._give_back()

    def _give_back(self) -> None:
        if self._block is not None:
            self._transfers.blocks.give_back(self._block)
            self._block = None

    def __del__(self) -> None:
        # The graph is gone, perhaps without a backward. A copy that is on its way comes before the block's next one. On
        # the device it has to come before the next owner of the memory, which it would overwrite.
        self._give_back()
        if self.coming is not None:
            stream, copied = self.coming
            stream.wait_event(copied)


class SavedView(NamedTuple):
    """What autograd keeps of a tensor in a storage that may be on the host."""

    moved: HostCopyOfStorage
    call: HostForward
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def unpack(saved: Any) -> torch.Tensor:
    """What autograd gets back of what it saved."""
    if type(saved) is not SavedView:
        return unpack_parameter(saved)
    moved, call, dtype, size, stride, offset = saved
    call.need()
    moved.coming = None
    moved.check()
    assert moved.bytes is not None
    empty = torch.empty(0, dtype=dtype, device=moved.bytes.device)
    return empty.set_(moved.bytes.untyped_storage(), offset, size, stride)


class Offloaded(OfEngine):
    """What the forward of a module saves for backward waits on the host."""

    place = Place.OFFLOAD

    def __init__(self, transfers: HostTransfers, random: KeyedRandom) -> None:
        self._transfers = transfers
        self._random = random

    @override
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(self.forward, args, kwargs)

    def run(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a forward, of this layer or of one that measures it."""
        transfers = self._transfers
        # Inside of the user's hooks, or of a checkpoint, nothing is saved here.
        around = top_saved_hooks(True)
        is_ours = around is None or isinstance(getattr(around[0], "__self__", None), Passes | SavedMeter)
        if not torch.is_grad_enabled() or self._random.is_suspended or not is_ours or is_transformed():
            return forward(*args, **kwargs)
        if COMPILER in sys.modules:
            skip_code(HostForward.pack.__code__)
        call = transfers.begin()
        push_saved_hooks(call.pack, unpack)
        try:
            return forward(*args, **kwargs)
        finally:
            pop_saved_hooks()
            transfers.end(call)
