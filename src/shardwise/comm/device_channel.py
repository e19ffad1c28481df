"""The channel between devices: their backend moves tensors, the connections of the CPU channel compare and fail.

A kernel on a separate stream moves the tensor. The CPUs exchange the signature of a call that is made for the first
time; known calls go into a digest, which the next exchange compares (`call_log`)::

    CPU            all_gather(x)     compute ...      work.wait()       compute ...     exchange
    connections    signature, if new                                                    digest of all calls
    backend's stream       [ wait for x ][ all-gather ]
    own stream     [ makes x ]      [ kernels ...  ]    [ wait for it ][ kernels that read the output ]

A kernel cannot say which rank it waits for, nor that two ranks mean different calls. The connections can, and
`DeviceWatch` asks them while the device waits. The backend is the one that torch names for devices of this kind: NCCL,
XCCL, HCCL or another. `communicators` makes what it needs. Comments speak of NCCL, the best known one.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn, Protocol

import torch
import torch.distributed as dist

from shardwise.comm.agreement import exchange_parts
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
from shardwise.comm.communicators import Communicator, Communicators, DeviceLine, Launch
from shardwise.comm.device_sums import BackendSum, ExactSum, PartsMemory, Sums
from shardwise.comm.device_watch import DeviceWait, DeviceWatch, Witness, patience_seconds
from shardwise.comm.hosts import hosts_of
from shardwise.comm.messages import as_bytes
from shardwise.comm.rank_values import RankValues
from shardwise.comm.tally import RankTally, tally_of
from shardwise.comm.torch_private import all_gather_equal
from shardwise.errors import PeerError

_LOOK_SECONDS = 0.1
"""How often a host that waits for a communicator to be connected looks for lost ranks."""


_LAST_LOOK_SECONDS = 1.0
"""How long closing a channel waits for a call of another thread, to know whether a rank is lost."""


_MOST_UNWAITED = 64
"""Transfers without a wait, from which on those that have ended are forgotten."""


class _Control(Channel, Witness, Protocol):
    """The channel of the same ranks on the CPU (a `ProcessChannel`)."""

    members: tuple[int, ...]
    """Their world ranks."""

    @property
    def was_heard(self) -> bool:
        """Whether the program has got the error with which the channel ended."""

    def subset(self, ranks: Sequence[int]) -> "_Control":
        """`over`, by its own type."""

    def check(self, signature: Signature) -> None:
        """Raise if a rank is lost, or has given up."""

    def agree_on(self, signature: Signature) -> None:
        """Compare a collective with what the other ranks call; raise where they differ."""

    def note(self, signature: Signature) -> None:
        """A collective that was agreed on before is called again. Raise if a rank is lost, or has given up."""

    def compare_message(self, signature: Signature, peer: int) -> Work:
        """Compare a message with what the other side calls."""


class _DeviceWork:
    """Ends on the device: `wait` makes the current stream wait and keeps what the kernel reads until then."""

    # Why tensors are kept: memory that is freed is given to the next tensor of the current stream, which knows nothing
    # of the stream on which the kernel still reads. After `wait` the current stream is behind that kernel.

    def __init__(
        self,
        channel: "DeviceChannel",
        signature: Signature,
        launch: Launch,
        *kept: torch.Tensor,
        peers: Sequence[int],
        comparison: Work | None = None,
        finish: Callable[[], None] | None = None,
    ) -> None:
        """peers: world ranks without which it does not end. comparison: of a message, waited for; a collective agrees
        before it begins. finish: what the current stream has to do behind the transfer."""
        self._channel = channel
        self._signature = signature
        self._launch: Launch | None = launch
        self._comparison = comparison
        self._peers = peers
        self._kept = kept
        self._finish = finish

    @property
    def is_done(self) -> bool:
        """See `Work.is_done`. On the device, not only begun there."""
        if self._launch is None:
            return True
        return self._launch.has_ended and (self._comparison is None or self._comparison.is_done)

    @property
    def has_ended(self) -> bool:
        """Whether the device has nothing to do for it any more."""
        return self._launch is None or self._launch.has_ended or self._launch.error is not None

    def watched(self) -> DeviceWait:
        """For a channel that closes before anybody has waited."""
        wait = DeviceWait(self._signature, self._channel.control, self._peers, _at_once)
        wait.passed = lambda: self.has_ended
        return wait

    def wait(self) -> None:
        """See `Work.wait`."""
        if self._launch is None:
            return
        if self._comparison is not None:
            self._comparison.wait()
        self._channel.wait_for(self._launch, self._signature, self._peers)
        if self._finish is not None:
            self._finish()
        self._launch = None
        self._kept, self._finish = (), None
        self._channel.unwaited.discard(self)


class DeviceChannel:
    """The channel of the ranks of `control` for tensors on `device`.

    Calls are compared over `control`. A collective with a new signature begins only when it is known to agree. Of a
    message, which may meet its other side much later, the wait makes sure. A lost peer is known at the next call, and
    ends what the device waits for.
    """

    progresses_alone = True

    def __init__(
        self,
        control: _Control,
        device: torch.device,
        communicators: Communicators,
        *,
        timeout_seconds: float,
        whole: "DeviceChannel | None" = None,
        sums: Sums = "exact",
    ) -> None:
        """communicators: shared by a channel and its parts. whole: the channel that this is a part of. sums: how
        it adds (`device_sums`)."""
        self.rank = control.rank
        self.size = control.size
        self.device = device
        self.control = control
        self.tally: RankTally = tally_of(control)
        self._communicators = communicators
        self._timeout_seconds = timeout_seconds
        self.sums: Sums = sums
        self._parts = PartsMemory()
        self._whole = whole
        self._watch: DeviceWatch = (
            DeviceWatch(communicators, timeout_seconds=timeout_seconds) if whole is None else whole._watch
        )
        self._channels: dict[tuple[tuple[int, ...], Sums], DeviceChannel] = {} if whole is None else whole._channels
        self._channels[control.members, sums] = self
        self._known: set[Signature] = set()
        self._peers = [member for rank, member in enumerate(control.members) if rank != control.rank]
        self._name = ".".join(map(str, control.members))
        self._lines: dict[str, DeviceLine] = {} if whole is None else whole._lines
        self.unwaited: set[_DeviceWork] = set() if whole is None else whole.unwaited
        """Transfers without a wait so far; those that have ended may be gone."""

    @property
    def hosts(self) -> Sequence[str]:
        """The name of each rank's host; empty where it is unknown."""
        return hosts_of(self.control)

    def over(self, ranks: Sequence[int]) -> Channel:
        """See `Channel.over`."""
        member_ranks(self, ranks)
        return self._of(self.control.subset(ranks), self.sums)

    def summing(self, sums: Sums) -> Channel:
        """The channel of the same ranks that adds so. To close it closes this one."""
        return self._of(self.control, sums)

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`. Between the CPUs."""
        return self.control.share(num_bytes)

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        """See `Channel.exchange`. Between the CPUs."""
        with self._counting_wait():
            return self.control.exchange(value, purpose=purpose)

    def exchange_parts(self, parts: Sequence[bytes], *, purpose: str) -> list[RankValues]:
        """See `agreement.exchange_parts`. Between the CPUs."""
        with self._counting_wait():
            return exchange_parts(self.control, parts, purpose=purpose)

    @contextmanager
    def _counting_wait(self) -> Iterator[None]:
        """Around an exchange, for which the device may wait."""
        reached = self._event() if self.tally.is_open else None
        self.tally.last = None
        yield
        if reached is not None and (passed := self._event()) is not None:
            # As long as the device has something to do, both events pass together: only a device that idles waits.
            self.tally.waited_on_device(reached, passed, self.tally.last)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.all_gather`."""
        signature = all_gather_signature(self, output, input, purpose=purpose, counts=counts)
        self.tally.count(signature, self.rank)
        if self.size == 1:
            return alone(self.device).all_gather(output, input, purpose=purpose)
        # As bytes: NCCL does not know all dtypes.
        whole, own = as_bytes(output), as_bytes(input)

        def begin(communicator: Communicator) -> dist.Work:
            # One kernel straight into the output, where the parts are equal.
            if len(set(signature.counts)) == 1:
                return all_gather_equal(communicator, whole, own)
            parts = torch.split(whole, [count * input.element_size() for count in signature.counts])
            return communicator.allgather([list(parts)], [own])

        return self._collective(signature, begin, output, input)

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        """See `Channel.reduce_scatter` and, for the two ways to add, `device_sums`."""
        signature = reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts)
        self.tally.count(signature, self.rank)
        if self.size == 1:
            return alone(self.device).reduce_scatter(output, input, purpose=purpose)
        total: ExactSum | BackendSum
        if self.sums == "exact":
            total = ExactSum(output, input, signature, self.rank, self._parts)
        else:
            total = BackendSum(output, input, signature, self._parts)
        return self._collective(signature, total.begin, output, input, finish=total.finish)

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        """See `Channel.send`."""
        if tensor.device.type != self.device.type:
            return self.control.send(tensor, destination, purpose=purpose)
        signature = message_signature(self, "send", tensor, destination, purpose=purpose)
        self.tally.count(signature, self.rank)
        content = as_bytes(tensor)
        return self._message(signature, lambda communicator: communicator.send([content], 1, 0), tensor, destination)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        """See `Channel.receive`."""
        if tensor.device.type != self.device.type:
            return self.control.receive(tensor, source, purpose=purpose)
        signature = message_signature(self, "receive", tensor, source, purpose=purpose)
        self.tally.count(signature, self.rank)
        content = as_bytes(tensor)
        return self._message(signature, lambda communicator: communicator.recv([content], 0, 0), tensor, source)

    def abort(self, reason: str) -> None:
        """See `Channel.abort`. What the device waits for ends, here and on the peers."""
        self.control.abort(reason)
        self._communicators.abort()

    def close(self) -> None:
        """See `Channel.close`. The communicators belong to the first channel; those made by `over` hold nothing.

        Waits for transfers without a wait so far: the backend would, without an end. Raises what ended a transfer, if
        no call has: the program has read numbers that mean nothing.
        """
        if self._whole is not None:
            if self.control is self._whole.control:  # the same ranks, which add in the other way
                self._whole.close()
        else:
            if not self.control.has_failed(patience_seconds=_LAST_LOOK_SECONDS):
                for work in list(self.unwaited):
                    self._watch.add(work.watched())
            self._watch.drain()
            self._watch.stop()
            self.unwaited.clear()
            # Communicators of a lost rank cannot be taken down together with it.
            if self.control.has_failed(patience_seconds=_LAST_LOOK_SECONDS):
                self._communicators.abort()
            else:
                self._communicators.close()
            self.control.close()
            if self._watch.given_up is not None and not self.control.was_heard:
                self.control.check(self._watch.given_up.signature)

    def wait_for(self, launch: Launch, signature: Signature, awaited: Sequence[int]) -> None:
        """Make the current stream wait for an operation; raise PeerError where it cannot begin or has failed."""
        began = time.monotonic()
        while not launch.done.wait(_LOOK_SECONDS):
            if time.monotonic() - began >= patience_seconds(self.control, awaited, self._timeout_seconds):
                self.control.judge(signature, awaited)
            self.control.check(signature)
        reached = self._event()
        wait = DeviceWait(signature, self.control, awaited, self._mark() if reached is None else reached.query)
        self._watch.add(wait)
        try:
            if launch.work is None:
                self._fail(signature, launch.error)
            try:
                launch.work.wait()
            except RuntimeError as error:  # what the errors of torch.distributed have in common, gloo's too
                self._fail(signature, error)
            passed = self._event()
            wait.passed = self._mark() if passed is None else passed.query
            if reached is not None and passed is not None:
                self.tally.waited_on_device(reached, passed, awaited[0] if len(awaited) == 1 else None)
        finally:
            if wait.passed is None:
                wait.passed = _at_once
        if self._communicators.has_ended:
            self._fail(signature, None)

    def _fail(self, signature: Signature, error: BaseException | None) -> NoReturn:
        self._communicators.abort()
        self.control.check(signature)  # raises what the connections know, which is more
        text = f"{signature} failed: {error or 'the channel has ended'}"
        raise PeerError(text, operation=signature.operation, purpose=signature.purpose) from error

    def _of(self, control: _Control, sums: Sums) -> "DeviceChannel":
        if (control.members, sums) not in self._channels:
            type(self)(
                control,
                self.device,
                self._communicators,
                timeout_seconds=self._timeout_seconds,
                whole=self._whole or self,
                sums=sums,
            )
        return self._channels[control.members, sums]

    def _collective(
        self,
        signature: Signature,
        begin: Callable[[Communicator], dist.Work],
        *kept: torch.Tensor,
        finish: Callable[[], None] | None = None,
    ) -> Work:
        # Ranks whose signatures differ must not begin: their kernels would wait for each other on the devices. So a new
        # one is waited for. To wait each time would hold the CPU back from the device at every call of every step, and
        # messages to all ranks cost more than the call. A known signature that a rank calls at the wrong time is found
        # by the next exchange, which is before the update, or by the watch over what the device waits for.
        if signature in self._known:
            self.control.note(signature)
        else:
            self.control.agree_on(signature)
            self._known.add(signature)
        launch = Launch(begin, self._follower)
        self._line(self._name, self.rank, self.size).start(launch)
        return self._noted(_DeviceWork(self, signature, launch, *kept, peers=self._peers, finish=finish))

    def _message(
        self, signature: Signature, begin: Callable[[Communicator], dist.Work], tensor: torch.Tensor, peer: int
    ) -> Work:
        # Not waited for here: the other side may call much later, and this rank must not stop until then.
        comparison = self.control.compare_message(signature, peer)
        ends = (self.rank, peer) if signature.operation == "send" else (peer, self.rank)
        launch = Launch(begin, self._follower)
        self._line(f"{self._name}/{ends[0]}>{ends[1]}", ends.index(self.rank), 2).start(launch)
        peers = [self.control.members[peer]]
        return self._noted(_DeviceWork(self, signature, launch, tensor, peers=peers, comparison=comparison))

    def _noted(self, work: _DeviceWork) -> Work:
        # A program that lets go of messages, as it may of those that it sends, keeps few of them here.
        if len(self.unwaited) >= _MOST_UNWAITED:
            self.unwaited.difference_update([each for each in self.unwaited if each.has_ended])
        self.unwaited.add(work)
        return work

    def _line(self, name: str, rank: int, size: int) -> DeviceLine:
        if name not in self._lines:
            self._lines[name] = DeviceLine(lambda: self._communicators.connect(name, rank, size))
        return self._lines[name]

    def _event(self) -> torch.Event | None:
        """Where the current stream is; None where there is none, because the tensors are in the host's memory."""
        return None if self.device.type == "cpu" else self.tally.event(self.device)

    def _mark(self) -> Callable[[], bool]:
        """Whether the current stream has come as far as this call."""
        mark = torch.accelerator.current_stream(self.device).record_event()
        return mark.query

    def _follower(self) -> Callable[[], None]:
        """What makes another thread go on behind the work that the current stream has now."""
        mark = torch.accelerator.current_stream(self.device).record_event()

        def follow() -> None:
            stream = torch.Stream(self.device)
            stream.wait_event(mark)
            torch.accelerator.set_stream(stream)  # of this thread alone

        return follow


def _at_once() -> bool:
    return True
