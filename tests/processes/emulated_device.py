"""A device that is none: the device channel over real processes, with gloo in the place of NCCL and its blocking facts.

What NCCL does and gloo does not, and what a program can hang on::

    connect     at the first call of a communicator; the host waits there for all members
    operations  of one communicator run in order, one after the other, on a thread that stands for its stream
    send        ends when the other side has received, never before
    abort       ends the operations wherever they wait; the results are not written, and nothing raises

Where the host waits at `wait`, tests that read tensors need nothing more. Otherwise it waits in `synchronize`, like a
host that reads a number from a GPU.
"""

import queue
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import BroadcastOptions
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from shardwise.comm.channel import Channel, Work
from shardwise.comm.communicators import Communicators, MakeCommunicator
from shardwise.comm.device_channel import DeviceChannel
from shardwise.comm.processes import ProcessChannel

HOST_PURPOSES = ("the next message of the pipeline",)
"""Of messages that real programs keep on the CPU: here all tensors are."""

GLOO_TIMEOUT = timedelta(seconds=60)


_own_stream: list["EmulatedWork"] = []
"""What the current stream of this process waits for."""


class EmulatedWork(dist.Work):
    """An operation on the stream of a communicator."""

    def __init__(self, *, waits_on_host: bool) -> None:
        super().__init__()
        self.ended = threading.Event()
        self._waits_on_host = waits_on_host

    def is_completed(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout: timedelta = GLOO_TIMEOUT) -> bool:
        _own_stream[:] = [work for work in _own_stream if not work.ended.is_set()] + [self]
        if self._waits_on_host:
            self.ended.wait()
        return True


class EmulatedCommunicator:
    """The part of `torch.distributed.Backend` that the channel uses."""

    def __init__(self, store: Store, rank: int, size: int, *, waits_on_host: bool) -> None:
        self._place = store, rank, size
        self._rank = rank
        self._size = size
        self._waits_on_host = waits_on_host
        self._gloo: Any = None
        self._aborted = False
        self.bytes_sent = 0
        """Of parts of sums, to all peers together."""
        self._given: queue.SimpleQueue[tuple[Callable[[], None], EmulatedWork]] = queue.SimpleQueue()
        self._pending: list[EmulatedWork] = []

    def allgather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor]) -> dist.Work:
        (parts,), (own,) = outputs, inputs

        def run() -> None:
            for rank, part in enumerate(parts):
                if rank == self._rank and part.data_ptr() != own.data_ptr():
                    part.copy_(own)
                self._broadcast(part, rank)

        return self._begin(run)

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor) -> dist.Work:
        return self.allgather([list(output.chunk(self._size))] if len(output) else [[]], [input])

    def reduce_scatter(self, outputs: list[torch.Tensor], inputs: list[list[torch.Tensor]]) -> dist.Work:
        (output,), (parts,) = outputs, inputs
        self.bytes_sent += sum(part.nbytes for peer, part in enumerate(parts) if peer != self._rank)

        def run() -> None:
            own = torch.cat(parts)
            total: torch.Tensor | None = None
            for rank in range(self._size):
                term = own.clone()
                self._broadcast(term.view(torch.uint8), rank)
                total = term if total is None else total + term
            assert total is not None
            output.copy_(total.split([len(part) for part in parts])[self._rank])

        return self._begin(run)

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor) -> dist.Work:
        return self.reduce_scatter(
            [output], [list(input.split(len(output)))] if len(output) else [[input] * self._size]
        )

    def alltoall(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> dist.Work:
        self.bytes_sent += sum(part.nbytes for peer, part in enumerate(inputs) if peer != self._rank)

        def run() -> None:
            outputs[self._rank].copy_(inputs[self._rank])
            works = [
                move([parts[peer]], peer, 2)
                for move, parts in ((self._gloo.send, inputs), (self._gloo.recv, outputs))
                for peer in range(self._size)
                if peer != self._rank and len(parts[peer])
            ]
            for work in works:
                work.wait()

        return self._begin(run)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> dist.Work:
        (tensor,) = tensors

        def run() -> None:
            self._gloo.send([tensor], destination, 0).wait()
            self._gloo.recv([torch.empty(1)], destination, 1).wait()  # that it has been received

        return self._begin(run)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> dist.Work:
        (tensor,) = tensors

        def run() -> None:
            self._gloo.recv([tensor], source, 0).wait()
            self._gloo.send([torch.empty(1)], source, 1).wait()

        return self._begin(run)

    def abort(self) -> None:
        self._aborted = True
        for work in self._pending:
            work.ended.set()

    def shutdown(self) -> None:
        assert all(work.ended.is_set() for work in self._pending), "taken down in the middle of an operation"
        self._given.put((self._stop, EmulatedWork(waits_on_host=False)))

    def _begin(self, run: Callable[[], None]) -> dist.Work:
        if self._gloo is None:
            self._gloo = self._connected()  # the host waits here for the others
            threading.Thread(target=self._stream, name="emulated stream", daemon=True).start()
        work = EmulatedWork(waits_on_host=self._waits_on_host)
        self._pending = [each for each in self._pending if not each.ended.is_set()] + [work]
        if self._aborted:
            work.ended.set()
        self._given.put((run, work))
        return work

    def _connected(self) -> Any:
        return dist.ProcessGroupGloo(*self._place, GLOO_TIMEOUT)

    def _stream(self) -> None:
        with torch.inference_mode():
            while not self._aborted:
                run, work = self._given.get()
                try:
                    run()
                except (RuntimeError, StopIteration):
                    return  # the other side is gone, and the operation never ends
                work.ended.set()

    def _stop(self) -> None:
        raise StopIteration

    def _broadcast(self, part: torch.Tensor, rank: int) -> None:
        if len(part):
            options = BroadcastOptions()
            options.rootRank = rank
            self._gloo.broadcast([part], options).wait()


class _FromHost:
    """Gloo for tensors of a device: what it sends is read there, and what it receives is written there."""

    def __init__(self, gloo: Any) -> None:
        self._gloo = gloo

    def broadcast(self, tensors: list[torch.Tensor], options: BroadcastOptions) -> "_ToDevice":
        (tensor,) = tensors
        host = tensor.cpu()
        return _ToDevice(self._gloo.broadcast([host], options), host, tensor)

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> "_ToDevice":
        (tensor,) = tensors
        host = tensor.cpu()
        return _ToDevice(self._gloo.send([host], destination, tag), host, None)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> "_ToDevice":
        (tensor,) = tensors
        host = torch.empty(tensor.shape, dtype=tensor.dtype)
        return _ToDevice(self._gloo.recv([host], source, tag), host, tensor)


class _ToDevice:
    """A transfer of the host's memory, and where its result goes."""

    def __init__(self, work: Any, host: torch.Tensor, target: torch.Tensor | None) -> None:
        self._work, self._host, self._target = work, host, target

    def wait(self) -> None:
        self._work.wait()
        if self._target is not None:
            self._target.copy_(self._host)


class FakeCommunicator(EmulatedCommunicator):
    """The same for tensors of the fake device: operations run on a stream of their own, behind that of the call."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device) -> None:
        super().__init__(store, rank, size, waits_on_host=True)
        self._own_stream = torch.Stream(device)

    def _connected(self) -> Any:
        return _FromHost(super()._connected())

    def _begin(self, run: Callable[[], None]) -> dist.Work:
        called = torch.accelerator.current_stream(self._own_stream.device).record_event()

        def on_stream() -> None:
            torch.accelerator.set_device_index(self._own_stream.device.index)
            with self._own_stream:
                self._own_stream.wait_event(called)
                run()
                self._own_stream.synchronize()  # so that a stream that waits for the host waits for the device too

        return super()._begin(on_stream)


class EmulatedDeviceChannel(DeviceChannel):
    """The device channel, whose tensors are those of the CPU."""

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        if purpose in HOST_PURPOSES:
            return self.control.send(tensor, destination, purpose=purpose)
        return super().send(tensor, destination, purpose=purpose)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        if purpose in HOST_PURPOSES:
            return self.control.receive(tensor, source, purpose=purpose)
        return super().receive(tensor, source, purpose=purpose)

    def _mark(self) -> Callable[[], bool]:
        before = list(_own_stream)
        return lambda: all(work.ended.is_set() for work in before)

    def _follower(self) -> Callable[[], None]:
        return lambda: None


def synchronize() -> None:
    """What a host does that reads a result: wait until its stream has come so far."""
    for work in _own_stream:
        work.ended.wait()


def on_fake_device(control: Channel, *, timeout_seconds: float) -> Channel:
    """The device channel itself, for tensors of the fake device of this rank, in a process that finds such devices."""
    assert isinstance(control, ProcessChannel)
    device = torch.device("fake", control.rank)
    torch.accelerator.set_device_index(control.rank)

    def make(store: Store, rank: int, size: int) -> FakeCommunicator:
        return FakeCommunicator(store, rank, size, device)

    return DeviceChannel(control, device, _communicators(make, control.rank), timeout_seconds=timeout_seconds)


def _communicators(make: MakeCommunicator, rank: int) -> Communicators:
    store = dist.distributed_c10d._get_default_store()
    number = store.add(f"emulated/{rank}", 1)  # the n-th ones of all ranks belong together
    return Communicators(make, PrefixStore(f"emulated/channel/{number}", store))


def emulated(control: Channel, *, timeout_seconds: float, waits_on_host: bool) -> Channel:
    """The device channel over the channel of the CPUs, in a process with a process group."""
    assert isinstance(control, ProcessChannel)

    def make(store: Store, rank: int, size: int) -> EmulatedCommunicator:
        return EmulatedCommunicator(store, rank, size, waits_on_host=waits_on_host)

    communicators = _communicators(make, control.rank)
    return EmulatedDeviceChannel(control, torch.device("cpu"), communicators, timeout_seconds=timeout_seconds)
