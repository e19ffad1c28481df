"""Edges of the engine: what the core does not import, and knows by a protocol; tests/edges.py takes each away.

edge            known as           comes from                          without it
averages        `StateEntry`       `parallelize`, where a plan asks    such a plan is an error
generation      `ModelCall`        `Engine.generate`                   so is this call
metrics         `OutputObserver`   `Engine.evaluate(metrics=...)`      so are metrics
telemetry       `StepObserver`     `Engine`                            reports have no times of ranks
packed          `ParameterKind`    `kind_in`, for a model with some    such a model is an error
adapted_maps    `AdaptedMap`       `tensor_outline`, the same          so is this one, under tp
tensor/proof    `RegionProof`      `parallelize`, where a plan asks    such a plan is an error
model_records   `SavedRecord`      `Engine`                            saves do not say how the model came about
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

import torch

from shardwise.comm.rank_values import RankValues
from shardwise.engine.forward.batches import Microbatch
from shardwise.engine.step.reports import RankTimes
from shardwise.space import Piece


class StepObserver:
    """Sees the steps of a rank, and adds two parts to the message that closes each. This one has nothing to add."""

    def begin(self) -> None:
        """A step begins."""

    def packed(self) -> Sequence[bytes]:
        """What this rank adds, as it closes a step."""
        return [b"", b""]

    def end(self) -> None:
        """The step ends."""

    @staticmethod
    def times(parts: Sequence[RankValues]) -> tuple[RankTimes, ...]:
        """What ranks did with their time, from what all have added."""
        return ()


Metric: TypeAlias = Any
"""f(output, microbatch) -> a number or tensor; a torchmetrics object, for batches (inputs, target); or (such an object,
f(output, microbatch) -> what its `update` takes: a tuple, a dict of keyword arguments, or one value)."""


class OutputObserver(Protocol):
    """Sees the outputs of an evaluation, and adds to its report."""

    def begin(self) -> None:
        """Raise for what cannot be observed; ranks agree on that."""

    def see(self, output: Any, microbatch: Microbatch) -> None:
        """See the model's output for a microbatch."""

    def packed(self) -> Sequence[bytes]:
        """JSON of names, which must be the same on all ranks, and what this rank has under them."""

    def results(self, states: RankValues, data_ranks: Sequence[int]) -> dict[str, Any]:
        """By name, from what all ranks have."""


Gather: TypeAlias = Literal["each", "once"]
"""When stage 3 gathers for `generate`: for each call of the model, or once before all."""

Prompts: TypeAlias = Mapping[str, Any] | torch.Tensor | None
"""What a rank generates from: a tensor, or tensors by name; None: it has no rows."""

Seeds: TypeAlias = int | Sequence[int] | None
"""One from which all draws go on; or one for each of several prompts."""


ModelCall: TypeAlias = tuple[Callable[[], Any] | None, int | None]
"""A call of a method of the model, None where this rank has no rows for it; and its seed, None: draws go on."""


class RegionProof(Protocol):
    """Compares modules that tensor parallelism cuts with whole ones, as layers around their forwards."""

    def judging(self, *, by_all: bool) -> AbstractContextManager[None]:
        """Modules run inside. by_all: on all ranks. Raises ModelError for what is refused."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryRestoration:
    """A load into an entry of the state."""

    wanted: Mapping[Piece, torch.Tensor]
    """What to read, and the tensors that take it."""
    notes: Sequence[str]
    """What the load decides, and refuses nothing for."""
    finish: Callable[[], None]
    """Called once everything was read."""


class StateEntry(Protocol):
    """What a rank has besides weights and the state of optimizers, and may put where the weights are."""

    are_in: bool
    """Whether it is where the weights are."""

    @property
    def num_averaged(self) -> int:
        """How many updates are in it."""

    def refuse_inside(self, call: str) -> None:
        """Raise ModelError for a call that needs the weights, while they are not in their place."""

    def pieces(self) -> dict[Piece, torch.Tensor]:
        """What a checkpoint has of it, as views."""

    def settings(self) -> dict[str, Any]:
        """What the settings of a checkpoint have of it."""

    def update(self, step: int, found_inf: torch.Tensor | None) -> None:
        """See the update of a step. found_inf: on the device, 1 where it has skipped that; None: there was one."""

    def restoration(
        self, stored: Mapping[str, Piece], settings: Mapping[str, Any], aliases: Mapping[str, str]
    ) -> EntryRestoration:
        """Prepare to take over a checkpoint, without changing anything. Raises CheckpointError."""
