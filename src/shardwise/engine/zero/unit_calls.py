"""Units that are gathered, and the calls whose backward needs them again (stage 3).

A unit may be called several times before the first backward, and each call has its own backward:

    forward    call 1 of U   call 2 of U                              uses 1, 0, 1, 0
    backward                               call 2 of U   call 1 of U  uses 1, 0, 1, 0; reduced after call 1

    Residence of a unit    SHARDED --gather--> ARRIVING --wait--> GATHERED --free--> SHARDED      (by `Residency`)
    Backward of a call     TO_COME --begin--> RUNNING --end--> DONE --resume, for a saved tensor--> RUNNING

A backward that a forward or a loss runs itself is another task of autograd. It changes no state: the units are
gathered, and stay.
"""

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch
from torch import nn

from shardwise.comm import Work
from shardwise.engine.forward.counters import Counters
from shardwise.engine.forward.passes import Backward
from shardwise.engine.torch_private import at_end_of_backward, graph_task, storage_id
from shardwise.engine.zero.bucket_memory import ShardedBucket
from shardwise.plan.units import Unit


class Residence(enum.Enum):
    """Where the values of a unit are."""

    SHARDED = enum.auto()
    ARRIVING = enum.auto()
    """Memory is taken, and transfers were begun without a wait."""
    GATHERED = enum.auto()


@dataclass(kw_only=True, slots=True, eq=False)
class GatheredUnit:
    """A unit on this rank."""

    number: int
    plan: Unit
    buckets: tuple[ShardedBucket, ...]
    reductions: tuple[int, ...]
    """The numbers of its buckets among those that are reduced."""
    parameters: tuple[tuple[nn.Parameter, type, type], ...]
    """Each with its class while it is gathered, and while it is not."""
    storages: frozenset[int]
    stage: int
    num_forwards: int = field(init=False, default=0)
    """Forwards that need it now: only in these its parameters can be read as those of any module."""
    residence: Residence = field(init=False, default=Residence.SHARDED)
    works: list[Work] = field(init=False, default_factory=list)
    """Transfers that were begun for it and not waited for."""

    def name_at(self, view: torch.Tensor) -> str:
        """The parameter behind `view`, while the unit is gathered."""
        # By its place in memory: a view of a detached tensor knows no base.
        place = storage_id(view.untyped_storage()), view.storage_offset()
        for name, (parameter, _, _) in zip(self.plan.parameters, self.parameters, strict=True):
            start = parameter.storage_offset()
            if storage_id(parameter.untyped_storage()) == place[0] and start <= place[1] < start + parameter.numel():
                return name
        return self.plan.name

    def gather(self, counters: Counters) -> None:
        """Take memory and begin the transfers."""
        self.residence = Residence.ARRIVING
        for bucket in self.buckets:
            if (work := bucket.fill(counters, unit=self.plan.name)) is not None:
                self.works.append(work)

    def wait(self) -> None:
        """End the transfers: the values are here."""
        if self.works:
            for work in self.works:
                work.wait()
            self.works.clear()
        self.residence = Residence.GATHERED

    def free(self) -> None:
        """Give the memory back."""
        if self.residence is Residence.ARRIVING:
            self.wait()  # a transfer that nobody waited for would write to memory that others have by then
        self.residence = Residence.SHARDED
        for bucket in self.buckets:
            bucket.free()

    def open(self) -> None:
        """Forwards that read its parameters follow.

        The class of the parameters changes: they are plain ones while they are gathered.
        """
        # One class that looks up whether it is gathered would do without the swap. It would cost 11 us in every
        # operation that takes a parameter (measured with F.linear); the swap costs 0.2 us per parameter and call of a
        # module. And torch's modules leave their fused kernels where an argument has a torch function of its own.
        for parameter, kind, _ in self.parameters:
            parameter.__class__ = kind

    def close(self) -> None:
        """No forward reads them any more."""
        for parameter, _, sharded in self.parameters:
            parameter.__class__ = sharded


class _Watcher(Protocol):
    """Who gathers for backwards."""

    task: int
    """That of autograd in which the backward of a microbatch goes on, or went on last."""

    def hold(self, call: "UnitCall") -> None:
        """Such a backward needs the units of the call."""

    def begin_backward(self, call: "UnitCall") -> None:
        """The backward of a call begins."""

    def end_backward(self, call: "UnitCall") -> None:
        """It has ended."""


class UnitCall:
    """One call of a module whose backward needs its units again."""

    __slots__ = (
        *("_watcher", "backward", "entered", "has_hooks", "is_noticed", "left", "microbatch", "spans_around"),
        *("recomputes", "starts_graph", "units"),
    )

    def __init__(self, watcher: _Watcher, units: Sequence[GatheredUnit], microbatch: int, entered: int) -> None:
        self.units = units
        self.microbatch = microbatch
        self.entered = entered
        """When its forward began, and ended, in the count of all calls."""
        self.left = entered
        self.recomputes = graph_task() != -1
        """Whether its forward runs in a backward, whose next one inside is the one that counts (reentrant)."""
        self.has_hooks = False
        """Whether the hooks of saved tensors were installed for it."""
        self.spans_around: tuple[tuple[int, int, UnitCall], ...] = ()
        """During its forward: the memory of the calls around it."""
        self.starts_graph = False
        """Whether the graph of the backward begins with an input of the call."""
        self.is_noticed = True
        """Whether its backward did not go on to the end of the whole backward."""
        self._watcher = watcher
        self.backward = Backward.TO_COME

    def begin(self, _: object = None) -> None:
        """The backward of the call begins."""
        # Each output of the call and each saved tensor of it comes here; the first one counts.
        if graph_task() != self._watcher.task and not self.recomputes:
            self._watcher.hold(self)
        elif self.backward is Backward.TO_COME:
            self._begin()
            # No gradient of an input marks the end of such a call: that of a leaf is complete as soon as it is known,
            # before those of parameters that the call used earlier.
            if self.starts_graph:
                at_end_of_backward(self.end)

    def resume(self) -> None:
        """The backward of the call needs the units, even if it seemed to have ended."""
        # A value that a module keeps on itself may enter the loss past its outputs, and a call may have several inputs:
        # its end is a guess then. To gather once more costs time; to read memory without bytes would end the process.
        if self.backward is Backward.DONE and (graph_task() == self._watcher.task or self.recomputes):
            self._begin()
            at_end_of_backward(self.end)
        self.begin()

    def _begin(self) -> None:
        self.backward = Backward.RUNNING
        self._watcher.begin_backward(self)

    def end(self, _: object = None) -> None:
        """Everything in the call has its gradient, if it gets one."""
        if self.backward is Backward.RUNNING and (graph_task() == self._watcher.task or self.recomputes):
            self.backward = Backward.DONE
            self._watcher.end_backward(self)

    def close(self) -> list[GatheredUnit]:
        """The backward around it has ended; what it did not let go itself."""
        self.is_noticed = self.backward is not Backward.RUNNING
        held = [] if self.is_noticed else list(self.units)
        self.backward = Backward.DONE
        return held


# Autograd saves a weight to compute the gradient of an input. Kept as the tensor itself, it would be read after `free`;
# kept as a copy, it would hold all units until their backward, which is what stage 3 is there to avoid.
Saved: TypeAlias = tuple[torch.Tensor, UnitCall]
"""What autograd saved of a parameter in a call: a view of memory that is filled when the backward has begun."""
