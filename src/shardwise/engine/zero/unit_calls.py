"""Units that are gathered, and the calls whose backward needs them again (stage 3)."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn

from shardwise.comm import Work
from shardwise.engine.autograd_state import at_end_of_backward
from shardwise.plan.units import Unit


@dataclass(kw_only=True, slots=True, eq=False)
class GatheredUnit:
    """A unit on this rank."""

    number: int
    plan: Unit
    buckets: tuple[int, ...]
    reductions: tuple[int, ...]
    """The numbers of its buckets among those that are reduced."""
    parameters: tuple[tuple[nn.Parameter, type, type], ...]
    """Each with its class while it is gathered, and while it is not."""
    storages: frozenset[int]
    stage: int
    num_uses: int = 0
    """Forwards and backwards that need it now."""
    num_forwards: int = 0
    """The forwards among them: only in these its parameters can be read as those of any module."""
    is_resident: bool = False
    works: list[Work] = field(default_factory=list)

    def name_at(self, view: torch.Tensor) -> str:
        """The parameter of which `view` shows a part, while the unit is gathered."""
        place = view.untyped_storage()._cdata, view.storage_offset()
        for name, (parameter, _, _) in zip(self.plan.parameters, self.parameters, strict=True):
            start = parameter.storage_offset()
            if parameter.untyped_storage()._cdata == place[0] and start <= place[1] < start + parameter.numel():
                return name
        return self.plan.name

    def open(self) -> None:
        """Forwards that read its parameters follow."""
        for parameter, kind, _ in self.parameters:
            parameter.__class__ = kind

    def close(self) -> None:
        """No forward reads them any more."""
        for parameter, _, resting in self.parameters:
            parameter.__class__ = resting


class _Watcher(Protocol):
    """Who gathers for backwards."""

    def begin_backward(self, call: "UnitCall") -> None:
        """The backward of a call begins."""

    def end_backward(self, call: "UnitCall") -> None:
        """It has ended."""


class UnitCall:
    """One call of a module whose backward needs its units again."""

    __slots__ = ("_has_ended", "_watcher", "entered", "has_begun", "left", "microbatch", "starts_graph", "units")

    def __init__(self, watcher: _Watcher, units: Sequence[GatheredUnit], microbatch: int, entered: int) -> None:
        self.units = units
        self.microbatch = microbatch
        self.entered = entered
        """When its forward began, and ended, in the count of all calls."""
        self.left = entered
        self.starts_graph = False
        """Whether the graph of the backward begins with an input of the call."""
        self._watcher = watcher
        self.has_begun = False
        self._has_ended = False

    def begin(self, _: object = None) -> None:
        """The backward of the call begins."""
        if not self.has_begun:
            self.has_begun = True
            self._watcher.begin_backward(self)
            if self.starts_graph:
                at_end_of_backward(self.end)

    def resume(self) -> None:
        """The backward of the call needs the units, even if it seemed to have ended."""
        if self._has_ended:
            self._has_ended = False
            self._watcher.begin_backward(self)
            at_end_of_backward(self.end)
        self.begin()

    def end(self, _: object = None) -> None:
        """Everything in the call has its gradient, if it gets one."""
        if self.has_begun and not self._has_ended:
            self._has_ended = True
            self._watcher.end_backward(self)

    def close(self) -> list[GatheredUnit]:
        """The backward around it has ended; what it did not let go itself."""
        held = [] if self._has_ended or not self.has_begun else list(self.units)
        self.has_begun = self._has_ended = True
        return held


@dataclass(frozen=True, slots=True)
class Saved:
    """What autograd saved of a parameter in a call: a view of memory that is filled when the backward has begun."""

    tensor: torch.Tensor
    call: UnitCall


def unpack(saved: Any) -> torch.Tensor:
    """What autograd gets back of what it saved."""
    if isinstance(saved, Saved):
        saved.call.resume()
        return saved.tensor
    assert isinstance(saved, torch.Tensor)
    return saved
