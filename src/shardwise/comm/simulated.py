"""n ranks as threads of this process, one running at a time, so that a run is the same every time.

    rank 0   call wait (1)                     carry out (2), go on ... wait (1)
    rank 1                call wait (1)                                         go on ... end
    rank 2                             call wait (2: ready at once) ...

(1) A rank whose transfer lacks calls hands the baton to the next rank, in rank order, that can go on.
(2) A transfer is carried out, for all its ranks, at the first wait after its last call.

On devices a transfer is queued at its last call, on streams for transfers alone. They wait for what each rank had
queued when it called, and the stream of a rank that waits (1) waits for the end of the transfer there.

The random states of torch, `random` and numpy go with the baton, so that each rank draws as in its own process. Only
the holder of the baton touches the state of the world. Therefore nothing here is locked, and when no rank can go on,
that is known at once. `Group` and `MatchedCalls` bring the calls of the ranks together, compare them and move their
data. The rest is whose turn it is, and what a rank that stops means for the others.
"""

import random
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from shardwise.comm.accelerators import outlive_threads
from shardwise.comm.channel import (
    Channel,
    Signature,
    Work,
    all_gather_signature,
    gather,
    member_ranks,
    message_signature,
    reduce_scatter_signature,
    scatter_sum,
)
from shardwise.comm.device_sums import ExactSum, PartsMemory, Sums, hand_over_parts
from shardwise.comm.devices import make_current, simulated_devices
from shardwise.comm.hang_report import Whereabouts, lines_of, report
from shardwise.comm.tally import RankTally
from shardwise.comm.torch_private import cached_weights, is_in_forward_mode, restore_cached_weights
from shardwise.errors import CallMismatchError, ModelError, PeerError, PlanError, ShardwiseError, in_words

T = TypeVar("T")


_INTERRUPT_SECONDS = 0.1
"""How soon, at the latest, an interrupt of the caller is noticed."""

_FORWARD_MODE = (
    "torch has one forward-mode derivative at a time in a process, and simulated ranks would mix theirs: what runs "
    "inside of torch.func.jvp, jacfwd or hessian waits for other ranks. Take the derivative by grad, vjp or jacrev; "
    "or gather nothing inside (sharding stage 2); or start processes"
)


def simulate(
    world_size: int, fn: Callable[[Channel], T], *, timeout_seconds: float = 60.0, device: str = "cpu"
) -> list[T]:
    """Run `fn(channel)` on `world_size` simulated ranks in this process and return their results in rank order.

    `device`: the kind of device that ranks compute on ("cuda"). Rank r has the device of number r, which is the current
    device of its thread. There have to be as many devices as ranks.

    Every rank starts from the caller's random state (torch's CPU generator, `random`, numpy's global one) and goes on
    with its own. The caller's is put back at the end. Ranks share all else that is global to a process.

    Raises the error of the rank that failed first, with a note that names the rank. A `ShardwiseError` that all ranks
    raised alike has no note. Ranks that wait for each other get a `PeerError` at once. Raises `PeerError` also when a
    rank has made no call for `timeout_seconds` while others are unfinished. That rank is left behind on its daemon
    thread. Raises `PlanError` for less than one rank, for no time, and for devices that are not there.
    """
    if world_size < 1 or not timeout_seconds > 0:
        raise PlanError(
            f"simulate(world_size={world_size}, timeout_seconds={timeout_seconds}): give at least one rank and a time"
        )
    devices = simulated_devices(device, world_size)
    outlive_threads()
    callers_state = _RandomState()
    world = _World(devices, callers_state)
    results: dict[int, T] = {}

    num_threads = torch.get_num_threads()

    def body(channel: Channel) -> None:
        torch.set_num_threads(num_threads)  # a new thread would take all cores
        make_current(channel.device)
        results[channel.rank] = fn(channel)

    # Daemons: a rank that hangs is left behind, and must not keep the process from its end.
    threads = [
        threading.Thread(target=world.live, args=(rank, body), name=f"simulated rank {rank.number}", daemon=True)
        for rank in world.ranks
    ]
    for thread in threads:
        thread.start()
    try:
        world.watch(timeout_seconds)
        for thread in threads:
            thread.join()
    finally:
        # In this order: a rank that is left behind may still be running, and puts no random state back from now on.
        world.is_abandoned = True
        callers_state.restore()
    world.raise_if_failed()
    return [results[number] for number in range(world_size)]


class _RandomState:
    """The random states that are global to the process, and the weights of `parametrize.cached`, as they are now."""

    def __init__(self) -> None:
        self._torch = torch.get_rng_state()
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._weights = cached_weights()

    def restore(self) -> None:
        torch.set_rng_state(self._torch)
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        restore_cached_weights(self._weights)


def named(ranks: Sequence[int]) -> str:
    """The ranks in words: "rank 1", "ranks 0, 2"."""
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


@dataclass(kw_only=True, slots=True)
class RankCall:
    """What one rank gives to a transfer; tensors are flat."""

    signature: Signature
    output: torch.Tensor | None = None
    input: torch.Tensor | None = None
    parts: ExactSum | None = None
    """Between devices: the sum that each rank adds from parts."""
    value: bytes = b""
    stream: torch.Stream | None = None
    """Of a rank on a device: where the transfer runs."""
    made: torch.Event | None = None
    """What the rank had queued on its device when it called."""


class MatchedCalls:
    """The calls of several ranks that belong together."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self.calls: dict[int, RankCall] = {}
        self.is_ready = False
        """Every rank has called, so that no wait blocks any more."""
        self.values: list[bytes] = []
        """What an `exchange` gave."""
        self.moved: dict[int, torch.Event] = {}
        """When the data of a rank on a device have moved there."""
        self._difference = ""

    def missing(self) -> list[int]:
        """The ranks that have not called yet."""
        return [rank for rank in self.ranks if rank not in self.calls] if not self.is_ready else []

    def join(self, rank: int, call: RankCall) -> None:
        """Add the call of one rank; the last one brings the comparison."""
        self.calls[rank] = call
        self.is_ready = len(self.calls) == len(self.ranks)
        if self.is_ready:
            self._compare()

    def _compare(self) -> None:
        alike: dict[tuple[object, ...], list[int]] = {}
        texts: dict[tuple[object, ...], str] = {}
        for rank in self.ranks:
            signature = self.calls[rank].signature
            alike.setdefault(signature.compared, []).append(rank)
            texts.setdefault(signature.compared, str(signature))
        # Only noted here: each rank raises it in its own wait, as ranks of real processes do.
        if len(alike) > 1:
            lines = [f"  - {named(ranks)}: {texts[key]}" for key, ranks in alike.items()]
            self._difference = "\n".join(
                [f"calls of {named(self.ranks)} that meet differ; make the same calls in the same order:", *lines]
            )
            self.calls.clear()  # no data moves

    @property
    def differs(self) -> bool:
        """Whether the calls do not fit each other, so that no data will move."""
        return bool(self._difference)

    def carry_out(self) -> None:
        """Move the data unless it was done, and let go of the tensors; raises `MismatchError` when the calls differ."""
        # The first rank that waits moves the data of all: by then every rank has given its tensors away until it waits.
        if self._difference:
            raise CallMismatchError(self._difference)
        if not self.calls:
            return
        with ExitStack() as streams:
            for call in self.calls.values():
                if call.stream is not None and call.made is not None:
                    call.stream.wait_event(call.made)
                    streams.enter_context(call.stream)
            self._move([self.calls[rank] for rank in self.ranks])
        for rank, call in self.calls.items():
            if call.stream is not None:
                self.moved[rank] = call.stream.record_event()
        self.calls.clear()

    def _move(self, calls: Sequence[RankCall]) -> None:
        outputs = [call.output for call in calls if call.output is not None]
        inputs = [call.input for call in calls if call.input is not None]
        signature = calls[0].signature
        if signature.operation == "exchange":
            self.values = [call.value for call in calls]
        elif parts := [call.parts for call in calls if call.parts is not None]:
            hand_over_parts(parts)
        elif signature.operation == "reduce_scatter":
            scatter_sum(outputs, inputs, signature.counts)
        else:
            gather(outputs, inputs, signature.counts)


class Group:
    """The ranks of one channel: pairs the calls that belong together, in the order in which each rank makes them."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        self.ranks = ranks
        self._num_calls: dict[tuple[tuple[int, ...], int], int] = {}
        self._open: dict[tuple[tuple[int, ...], int], MatchedCalls] = {}

    def join(self, lane: tuple[int, ...], rank: int, call: RankCall) -> MatchedCalls:
        """Add the call to its transfer; a lane is (source, destination), or empty for collectives."""
        position = self._num_calls.get((lane, rank), 0)
        self._num_calls[lane, rank] = position + 1
        # The n-th call of one rank meets the n-th call of each other, whatever they are: only so can a difference show.
        transfer = self._open.setdefault((lane, position), MatchedCalls(lane or self.ranks))
        transfer.join(rank, call)
        if transfer.is_ready:
            del self._open[lane, position]
        return transfer


@dataclass(kw_only=True, slots=True)
class _SimulatedRank:
    """What the world knows of one rank."""

    number: int
    device: torch.device
    random_state: _RandomState
    tally: RankTally = field(default_factory=RankTally)
    since_s: float = 0.0
    """When it got the baton."""
    ran_s: float = 0.0
    """How long it has had the baton, up to when it gave it away."""
    gate: threading.Lock = field(default_factory=threading.Lock)
    """Released by the rank that hands this one the baton."""
    thread: int | None = None
    last_call: Signature | None = None
    called_s: float = field(default_factory=time.monotonic)
    """When it made its last call."""
    waits_in: MatchedCalls | None = None
    has_returned: bool = False
    error: BaseException | None = None
    channels: "dict[tuple[tuple[int, ...], str], _SimulatedChannel]" = field(default_factory=dict)
    """By members, and by the kind of device between which they move tensors."""

    @property
    def has_ended(self) -> bool:
        return self.has_returned or self.error is not None

    def whereabouts(self) -> Whereabouts:
        """For the report of a hang."""
        last = self.last_call
        call = f"{last.operation} for {last.purpose!r}" if last is not None else ""
        note = "has finished" if self.has_returned else ""
        if self.error is not None:
            note = f"stopped with {in_words(self.error)}"
        return Whereabouts(
            rank=self.number,
            call=call,
            awaited=() if self.waits_in is None else tuple(self.waits_in.missing()),
            seconds=time.monotonic() - self.called_s,
            lines=() if self.has_ended else lines_of(self.thread),
            note=note,
        )

    def __str__(self) -> str:
        last = f"last call: {self.last_call}" if self.last_call else "no call yet"
        if self.has_returned:
            return f"rank {self.number} has finished ({last})"
        if self.error is not None:
            return f"rank {self.number} stopped with {type(self.error).__name__}"
        if self.waits_in is None or self.waits_in.is_ready:
            return f"rank {self.number} waits for no other rank ({last})"
        return f"rank {self.number} waits for {named(self.waits_in.missing())} in {self.last_call}"


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stop:
    """Why no transfer completes any more: one rank stopped, or (rank None) none can go on."""

    rank: int | None
    text: str


class _World:
    """The ranks, and whose turn it is."""

    def __init__(self, devices: Sequence[torch.device], random_state: _RandomState) -> None:
        self.ranks = [
            _SimulatedRank(number=number, device=device, random_state=random_state)
            for number, device in enumerate(devices)
        ]
        self.is_abandoned = False
        """The caller has gone: its random states are no longer for the ranks to change."""
        self._holder = self.ranks[0]
        self._groups: dict[tuple[tuple[int, ...], str], Group] = {}
        self._stop: _Stop | None = None
        self._failed: list[_SimulatedRank] = []
        self._returned_early: set[int] = set()
        """Ranks that returned although nothing had stopped: a rank that waits for one of them waits in vain."""
        self._all_ended = threading.Lock()
        self._last_movement = time.monotonic()
        # A closed gate is a locked lock: its rank waits in a second `acquire` until another thread releases it.
        for lock in (self._all_ended, *(rank.gate for rank in self.ranks)):
            lock.acquire()

    # Called on a rank's thread, with the baton.

    def live(self, rank: _SimulatedRank, body: Callable[[Channel], None]) -> None:
        """The life of one rank, from its first baton to handing on its last."""
        rank.thread = threading.get_ident()
        self._take_baton(rank)
        try:
            body(self.channel(rank, tuple(range(len(self.ranks))), rank.device))
            rank.has_returned = True
            # A rank that returns after a stop may have caught its error; who waits for it hears the reason of the stop.
            if self._stop is None:
                self._returned_early.add(rank.number)
        except BaseException as error:
            rank.error = error
            self._failed.append(rank)
            self.stop(rank.number, f"rank {rank.number} stopped with {in_words(error)}")
        if all(other.has_ended for other in self.ranks):
            self._all_ended.release()
        else:
            self._give_baton(self._next_after(rank))

    def channel(self, rank: _SimulatedRank, members: tuple[int, ...], device: torch.device) -> "_SimulatedChannel":
        """The channel of `rank` among the `members`; the same object for the same members and kind of device."""
        kept = members, device.type
        if kept not in rank.channels:
            group = self._groups.setdefault(kept, Group(members))
            rank.channels[kept] = _SimulatedChannel(self, rank, group, device)
        return rank.channels[kept]

    def call(self, rank: _SimulatedRank, signature: Signature) -> None:
        """Note what the rank does; raises `PeerError` when the world has stopped."""
        self._last_movement = rank.called_s = time.monotonic()
        rank.last_call = signature
        self._raise_if_stopped(signature)

    def wait(self, rank: _SimulatedRank, signature: Signature, transfer: MatchedCalls) -> None:
        """Let others run until the transfer is ready, then carry it out."""
        # A transfer that is ready completes even after a stop: what peers gave is not taken back.
        self._last_movement = rank.called_s = time.monotonic()
        rank.last_call = signature
        # One rank runs at a time: a wait is for those that run meanwhile, and not for the last of them alone.
        ran_s = [] if transfer.is_ready else [other.ran_s for other in self.ranks]
        while not transfer.is_ready:
            if returned := self._returned(transfer):
                text = f"{signature} cannot complete: {named(returned)} finished without a matching call"
                raise _peer_error(text, returned[0], signature)
            self._raise_if_stopped(signature)
            rank.waits_in = transfer
            successor = self._next_after(rank)
            # The own turn again: this rank goes round the loop once more and finds what has stopped the world.
            if successor is not rank:
                if is_in_forward_mode():
                    raise ModelError(_FORWARD_MODE)
                rank.random_state = _RandomState()
                self._give_baton(successor)
                self._take_baton(rank)
            rank.waits_in = None
        for other, before_s in zip(self.ranks, ran_s, strict=False):
            if other is not rank and other.ran_s > before_s:
                rank.tally.waited(other.number, other.ran_s - before_s)
        transfer.carry_out()

    def stop(self, rank: int | None, text: str) -> None:
        """Let only those transfers complete whose calls were all made. The first reason counts."""
        self._stop = self._stop or _Stop(rank=rank, text=text)

    def _give_baton(self, rank: _SimulatedRank) -> None:
        now_s = rank.tally.now_s()
        self._holder.ran_s += now_s - self._holder.since_s
        rank.since_s = now_s
        self._holder = rank
        self._last_movement = time.monotonic()
        rank.gate.release()

    def _take_baton(self, rank: _SimulatedRank) -> None:
        rank.gate.acquire()
        # These states are global to the process: with the baton goes the right to set them.
        if not self.is_abandoned:
            rank.random_state.restore()

    def _next_after(self, rank: _SimulatedRank) -> _SimulatedRank:
        """The next rank that can go on. When there is none, the next one, with the world stopped for that reason."""
        following = [*self.ranks[rank.number + 1 :], *self.ranks[: rank.number + 1]]
        alive = [other for other in following if not other.has_ended]
        for other in alive:
            if self._can_go_on(other):
                return other
        self.stop(None, f"no rank can go on:\n{self._whereabouts()}")
        return alive[0]

    def _can_go_on(self, rank: _SimulatedRank) -> bool:
        # After a stop every rank can go on: it raises, and its `finally` blocks run.
        transfer = rank.waits_in
        return transfer is None or transfer.is_ready or self._stop is not None or bool(self._returned(transfer))

    def _returned(self, transfer: MatchedCalls) -> list[int]:
        return [number for number in transfer.missing() if number in self._returned_early]

    def _raise_if_stopped(self, signature: Signature) -> None:
        if self._stop is not None:
            rank, text = self._stop.rank, self._stop.text
            raise _peer_error(text if rank is None else f"{signature} cannot complete: {text}", rank, signature)

    def _whereabouts(self) -> str:
        return "\n".join(f"  - {rank}" for rank in self.ranks)

    # Called on the caller's thread.

    def watch(self, timeout_seconds: float) -> None:
        """Let the ranks run and return when all have ended; raises `PeerError` when nothing moves for too long."""
        deadline = time.monotonic() + timeout_seconds
        try:
            self._give_baton(self.ranks[0])  # from here on an interrupt may come, and must stop the ranks
            # A signal that comes just before the lock blocks is handled when it returns: wait in small portions.
            while not self._all_ended.acquire(timeout=_INTERRUPT_SECONDS):
                if time.monotonic() < max(deadline, self._last_movement + timeout_seconds):
                    continue
                # The last rank may compute as long as it likes: nobody waits for it but the caller.
                self._raise_if_others_wait(timeout_seconds)
                deadline = time.monotonic() + timeout_seconds
        except BaseException as error:
            self.stop(None, f"the caller of simulate stopped with {in_words(error)}")
            raise

    def raise_if_failed(self) -> None:
        """Raise the verdict that all ranks share, or else the error of the rank that failed first."""
        if not self._failed:
            return
        first = self._failed[0]
        if self._stop is not None and self._stop.rank is not None and self.ranks[self._stop.rank].error is not None:
            first = self.ranks[self._stop.rank]
        assert first.error is not None
        # Where all ranks have refused alike, the note "raised by rank 0" would only mislead.
        verdicts = {(type(rank.error), str(rank.error)) for rank in self.ranks}
        if len(verdicts) > 1 or not isinstance(first.error, ShardwiseError):
            first.error.add_note(f"raised by rank {first.number} of {len(self.ranks)} simulated ranks")
        raise first.error

    def _raise_if_others_wait(self, timeout_seconds: float) -> None:
        holder = self._holder
        if all(rank.has_ended for rank in self.ranks if rank is not holder):
            return
        print(report([rank.whereabouts() for rank in self.ranks], waited_seconds=timeout_seconds), file=sys.stderr)
        text = f"rank {holder.number} made no call for {timeout_seconds} s while others wait:\n{self._whereabouts()}"
        raise _peer_error(text, holder.number, holder.last_call)


def _peer_error(text: str, rank: int | None, signature: Signature | None) -> PeerError:
    if signature is None:
        return PeerError(text, rank=rank)
    return PeerError(text, rank=rank, operation=signature.operation, purpose=signature.purpose)


class _SimulatedWork:
    def __init__(self, world: _World, rank: _SimulatedRank, call: RankCall, transfer: MatchedCalls) -> None:
        self._world = world
        self._rank = rank
        self._signature = call.signature
        self._transfer = transfer
        # The transfer lets go of them when the host has queued it, which is earlier than its end on a device.
        self._kept = (call.output, call.input, call.parts) if call.stream is not None else ()
        self._total = call.parts

    @property
    def is_done(self) -> bool:
        return self._transfer.is_ready

    def wait(self) -> None:
        self._world.wait(self._rank, self._signature, self._transfer)
        if (moved := self._transfer.moved.get(self._rank.number)) is not None:
            device, tally = self._rank.device, self._rank.tally
            reached = tally.event(device)
            torch.accelerator.current_stream(device).wait_event(moved)
            others = [rank for rank in self._transfer.ranks if rank != self._rank.number]
            tally.waited_on_device(reached, tally.event(device), others[0] if len(others) == 1 else None)
        if self._total is not None:
            self._total.finish()
        self._kept, self._total = (), None


class _SimulatedChannel:
    def __init__(self, world: _World, rank: _SimulatedRank, group: Group, device: torch.device) -> None:
        self.device = device
        # Transfers of devices run apart from their kernels, on a stream per channel, from the last call on.
        self._stream = torch.Stream(device) if device.type != "cpu" else None
        self.progresses_alone = self._stream is not None
        self.rank = group.ranks.index(rank.number)
        self.size = len(group.ranks)
        self.sums: Sums | None = None if device.type == "cpu" else "exact"
        self._parts = PartsMemory()
        self._world = world
        self._world_rank = rank
        self._group = group

    @property
    def tally(self) -> RankTally:
        """See `Tallied`."""
        return self._world_rank.tally

    def over(self, ranks: Sequence[int]) -> Channel:
        members = tuple(self._group.ranks[rank] for rank in member_ranks(self, ranks))
        return self._world.channel(self._world_rank, members, self.device)

    def summing(self, sums: Sums) -> Channel:
        """This channel: there is no library that could add."""
        return self

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """See `Channel.allocate`."""
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.device)

    def share(self, num_bytes: int) -> Sequence[torch.Tensor] | None:
        """See `Channel.share`. Simulated ranks stand for ranks that share nothing."""
        return None

    def exchange(self, value: bytes, *, purpose: str) -> list[bytes]:
        signature = Signature(operation="exchange", purpose=purpose)
        transfer = self._join(RankCall(signature=signature, value=value))
        tally, device = self.tally, self.device
        reached = tally.event(device) if device.type != "cpu" and tally.is_open else None
        tally.last = None
        self._world.wait(self._world_rank, signature, transfer)
        if reached is not None:
            tally.waited_on_device(reached, tally.event(device), tally.last)
        others = sum(map(len, transfer.values)) - len(value)
        tally.moved(sent_bytes=len(value) * (self.size - 1), received_bytes=others)
        return list(transfer.values)

    def all_gather(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        signature = all_gather_signature(self, output, input, purpose=purpose, counts=counts)
        return self._issue(RankCall(signature=signature, output=output, input=input))

    def reduce_scatter(
        self, output: torch.Tensor, input: torch.Tensor, *, purpose: str, counts: Sequence[int] | None = None
    ) -> Work:
        signature = reduce_scatter_signature(self, output, input, purpose=purpose, counts=counts)
        if self.sums is None:
            return self._issue(RankCall(signature=signature, output=output, input=input))
        # As between real devices, which cannot read each other's memory.
        total = ExactSum(output, input, signature, self.rank, self._parts)
        return self._issue(RankCall(signature=signature, parts=total))

    def send(self, tensor: torch.Tensor, destination: int, *, purpose: str) -> Work:
        if self._is_on_host(tensor):
            return self._on_host().send(tensor, destination, purpose=purpose)
        # A lane of its own per pair and direction, so that messages do not count among the collectives.
        signature = message_signature(self, "send", tensor, destination, purpose=purpose)
        lane = (self._world_rank.number, self._group.ranks[destination])
        return self._issue(RankCall(signature=signature, input=tensor.view(-1)), lane)

    def receive(self, tensor: torch.Tensor, source: int, *, purpose: str) -> Work:
        if self._is_on_host(tensor):
            return self._on_host().receive(tensor, source, purpose=purpose)
        signature = message_signature(self, "receive", tensor, source, purpose=purpose)
        lane = (self._group.ranks[source], self._world_rank.number)
        return self._issue(RankCall(signature=signature, output=tensor.view(-1)), lane)

    def abort(self, reason: str) -> None:
        number = self._world_rank.number
        self._world.stop(number, f"rank {number} stopped: {reason}")

    def close(self) -> None:
        """Nothing is held beyond the transfers in flight."""

    def _is_on_host(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu" != self.device.type

    def _on_host(self) -> "_SimulatedChannel":
        """The channel of the same ranks for messages on the CPU, which are matched apart."""
        return self._world.channel(self._world_rank, self._group.ranks, torch.device("cpu"))

    def _join(self, call: RankCall, lane: tuple[int, ...] = ()) -> MatchedCalls:
        self._world.call(self._world_rank, call.signature)
        return self._group.join(lane, self._world_rank.number, call)

    def _issue(self, call: RankCall, lane: tuple[int, ...] = ()) -> Work:
        self.tally.count(call.signature, self.rank)
        if self._stream is not None:
            call.stream = self._stream
            call.made = torch.accelerator.current_stream(self.device).record_event()
        transfer = self._join(call, lane)
        if self._stream is not None and transfer.is_ready and not transfer.differs:
            transfer.carry_out()
        return _SimulatedWork(self._world, self._world_rank, call, transfer)
