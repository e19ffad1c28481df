"""The channel between GPUs: NCCL moves the tensors, the connections of the CPU channel compare, exchange and fail.

Each call goes two ways. The CPUs exchange its signature, while a kernel on a stream of its own moves the tensor::

    CPU            all_gather(x)     compute ...      work.wait()       compute ...
    connections    signature -> peers, <- peers
    NCCL's stream          [ wait for x ][ all-gather ]
    own stream     [ makes x ]      [ kernels ...  ]    [ wait for it ][ kernels that read the output ]

A kernel cannot say which rank it waits for, nor that two ranks mean different calls. The connections can.
"""

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from shardwise.comm.channel import (
    Channel,
    Signature,
    Work,
    all_gather_signature,
    alone,
    member_ranks,
    message_signature,
    reduce_scatter_signature,
)
from shardwise.errors import PeerError, PlanError


class _Native(Protocol):
    def __call__(
        self, output: torch.Tensor, input: torch.Tensor, *, group: dist.ProcessGroup, async_op: bool
    ) -> dist.Work: ...


def _native(new_name: str, old_name: str) -> _Native:
    """The collective under its name since torch 2.13, else under the one that 2.13 warns about."""
    function: _Native = getattr(dist, new_name, None) or getattr(dist, old_name)
    return function


class _NcclWork:
    """Ends on the GPU: `wait` makes the current stream wait and keeps what the kernel reads until then."""

    # Why tensors are kept: memory that is freed is given to the next tensor of the current stream, which knows nothing
    # of the stream on which the kernel still reads. After `wait` the current stream is behind that kernel.

    def __init__(
        self, work: dist.Work | None, signature: Signature, *kept: torch.Tensor, comparison: Work | None = None
    ) -> None:
        self._work = work
        self._signature = signature
        self._kept = kept
        self._comparison = comparison

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._comparison is not None:
            self._comparison.wait()
            self._comparison = None
        if self._work is not None:
            try:
                self._work.wait()
            except dist.DistError as error:
                raise PeerError(
                    f"{self._signature} failed: {error}",
                    operation=self._signature.operation,
                    purpose=self._signature.purpose,
                ) from error
        self._work = None
        self._kept = ()


class _Control(Channel, Protocol):
    """The channel of the same ranks on the CPU (a `ProcessChannel`)."""

    members: tuple[int, ...]
    """Their world ranks."""

    def subset(self, ranks: Sequence[int]) -> "_Control":
        """`over`, by its own type."""

    def compare(self, signature: Signature) -> Work:
        """Compare a collective with what the other ranks call."""

    def compare_message(self, signature: Signature, peer: int) -> Work:
        """Compare a message with what the other side calls."""


class NcclChannel:
    """The channel of the ranks of `control` for tensors on `device`.

    Each call is compared over `control`. A collective with a new signature begins only when it is known to agree; of a
    new message, which may meet its other side much later, the wait makes sure. A lost peer is known at the next call; a
    kernel that waits for it on the GPU is ended by NCCL's own timeout.
    """

    progresses_alone = True

    def __init__(self, control: _Control, device: torch.device) -> None:
        self.rank = control.rank
        self.size = control.size
        self.device = device
        self._control = control
        self._known: set[Signature] = set()
        self._channels: dict[tuple[int, ...], Channel] = {control.members: self}
        # Groups number their ranks by world rank, whatever the order of the members:
        #
        #     channel.over([2, 0])    rank 0 here is world rank 2, rank 1 is world rank 0
        #     output of all_gather    [ part of 2 | part of 0 ]
        #     list for the group      [ part of 0, part of 2 ]     _by_world_rank = [1, 0]
        self._by_world_rank = sorted(range(self.size), key=control.members.__getitem__)
        # NCCL runs the operations of a communicator in order, so two ranks that both send first would wait for ever on
        # one. Messages to higher and to lower world ranks have a group each. All ranks make the three in this order.
        self._group, self._upward, self._downward = (self._new_group() for _ in range(3))

    def _new_group(self) -> dist.ProcessGroup:
        members = sorted(self._control.members)
        world = dist.group.WORLD
        if world is not None and world.bound_device_id is not None and len(members) < dist.get_world_size():
            raise PlanError(
                f"a channel over ranks {members} was asked for, but the process group is bound to a device, and then "
                "only all ranks together can make groups; call init_process_group without device_id"
            )
        # Only the members take part: ranks outside do not know that this channel is made.
        group = dist.new_group(members, backend="nccl", use_local_synchronization=True)
        assert isinstance(group, dist.ProcessGroup)
        return group

    def over(self, ranks: Sequence[int]) -> Channel:
        """See `Channel.over`."""
        members = tuple(self._control.members[rank] for rank in member_ranks(self, ranks))
        if members not in self._channels:
            if len(members) == 1:
                self._channels[members] = alone(self.device)  # NCCL needs no group for it
            else:
                channel = NcclChannel(self._control.subset(ranks), self.device)
                channel._channels = self._channels
                self._channels[members] = channel
        return self._channels[members]

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`. Between the CPUs."""
        return self._control.share(num_bytes)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """See `Channel.exchange`. Between the CPUs."""
        return self._control.exchange(value, purpose=purpose)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.all_gather`."""
        signature = all_gather_signature(self, output, input, purpose=purpose, counts=counts)
        self._compare(signature)
        # One kernel straight into the output, where the output is what the group would make of equal parts.
        if self._is_plain(signature):
            native = _native("all_gather_single", "all_gather_into_tensor")
            return _NcclWork(native(output, input, group=self._group, async_op=True), signature, output, input)
        parts = torch.split(output, list(signature.counts))
        ordered = [parts[rank] for rank in self._by_world_rank]
        return _NcclWork(dist.all_gather(ordered, input, group=self._group, async_op=True), signature, output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.reduce_scatter`. NCCL sums in the dtype that travels, so a narrower input is widened first."""
        signature = reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts)
        self._compare(signature)
        source = input.to(output.dtype)  # held by the work until its end, as nobody else holds it
        if self._is_plain(signature):
            native = _native("reduce_scatter_single", "reduce_scatter_tensor")
            return _NcclWork(native(output, source, group=self._group, async_op=True), signature, output, source)
        parts = torch.split(source, list(signature.counts))
        ordered = [parts[rank] for rank in self._by_world_rank]
        work = dist.reduce_scatter(output, ordered, group=self._group, async_op=True)
        return _NcclWork(work, signature, output, source)

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """See `Channel.send`."""
        if tensor.device.type == "cpu":
            return self._control.send(tensor, destination, purpose=purpose)
        signature = message_signature(self, "send", tensor, destination, purpose=purpose)
        # Not waited for here: the other side may call much later, and this rank must not stop until then.
        comparison = self._control.compare_message(signature, destination)
        sender, receiver = self._control.members[self.rank], self._control.members[destination]
        work = dist.isend(tensor, group=self._direction(sender, receiver), dst=receiver)
        return _NcclWork(work, signature, tensor, comparison=comparison)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """See `Channel.receive`."""
        if tensor.device.type == "cpu":
            return self._control.receive(tensor, source, purpose=purpose)
        signature = message_signature(self, "receive", tensor, source, purpose=purpose)
        comparison = self._control.compare_message(signature, source)
        sender, receiver = self._control.members[source], self._control.members[self.rank]
        work = dist.irecv(tensor, group=self._direction(sender, receiver), src=sender)
        return _NcclWork(work, signature, tensor, comparison=comparison)

    def abort(self, reason: str) -> None:
        """See `Channel.abort`. Peers learn it at their next call."""
        self._control.abort(reason)

    def close(self) -> None:
        """See `Channel.close`. The process group stays: the program that made it may still use it."""
        self._control.close()

    def _direction(self, sender: int, receiver: int) -> dist.ProcessGroup:
        return self._upward if sender < receiver else self._downward

    def _is_plain(self, signature: Signature) -> bool:
        """Whether all parts are equal and in the order of the group."""
        return len(set(signature.counts)) == 1 and self._by_world_rank == list(range(self.size))

    def _compare(self, signature: Signature) -> None:
        # Ranks whose signatures differ must not begin: their kernels would wait for each other on the GPUs. So a new
        # one is waited for. To wait each time would hold the CPU back from the GPU at every call of every step; a known
        # signature that a rank calls at the wrong time is found by a later call, before the update.
        work = self._control.compare(signature)
        if signature not in self._known:
            work.wait()
            self._known.add(signature)
