"""A load into an engine: what this rank wants of a checkpoint, and what happens once it has it.

[1] prepare   changes nothing: masters, buffers and unfused parameters are wanted in place; optimizer state in
              place where the live tensor fits, else in fresh ones
[2] (whoever loads gathers all verdicts, then writes what is wanted)
[3] finish    optimizer state and settings become the optimizers' own; masters are cast into the working copies,
              and every bucket is gathered
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from shardwise.comm.local_tensors import dtype_name, torch_dtype
from shardwise.engine.computation import Computation
from shardwise.engine.counters import Counters
from shardwise.engine.inventory import Inventory
from shardwise.engine.model_buffers import ModelBuffers
from shardwise.engine.optimizer_state import KnownOptimizer
from shardwise.engine.pipeline.stage_ties import StageTies
from shardwise.engine.state import placed, state_of_model, whole
from shardwise.engine.zero.flat_params import FlatParams, Owned
from shardwise.errors import CheckpointError
from shardwise.plan.optimizer_entries import (
    LiveParameter,
    OptimizerEntry,
    has_updated,
    names_without_elements,
    plan_optimizers,
)
from shardwise.plan.saved_settings import origin_of, take_over
from shardwise.space import Piece


class EngineRestoration:
    """A load into an engine that is about to happen. Nothing has changed yet."""

    def __init__(
        self,
        *,
        inventory: Inventory,
        aliases: Mapping[str, str],
        model: nn.Module,
        buffers: FlatParams,
        ties: StageTies,
        computation: Computation,
        model_buffers: ModelBuffers,
        optimizers: Sequence[KnownOptimizer],
        counters: Counters,
        stopping_peers: Callable[[], AbstractContextManager[None]],
        stored: Mapping[str, Piece],
        settings: Mapping[str, Any],
        origin: dict[str, Any],
    ) -> None:
        """`origin`: takes what the settings say of the rewrite by which the values were made."""
        self._origin = origin
        self._found_origin = origin_of(settings)
        self._spec_of = {spec.name: spec for spec in inventory.specs}
        self._buffers = buffers
        self._ties = ties
        self._computation = computation
        self._random = _random_of(settings)
        self._model_buffers = model_buffers
        self._optimizers = optimizers
        self._counters = counters
        self._stopping_peers = stopping_peers
        self._pending_buffers = model_buffers.changed()
        self.aliases: Mapping[str, str] = aliases
        """Other names of wanted tensors (ties): alias -> name."""
        self._trained = list(_trained(buffers, optimizers))
        self._plan = plan_optimizers(
            [known.named() for known in optimizers],
            [self._live(known, owned) for known, _, owned in self._trained],
            self.aliases,
            stored=stored,
            settings=settings,
        )
        self.findings: Sequence[str] = self._plan.findings
        """What of the stored settings does not fit."""
        cast = buffers.cast_from_masters()
        shapes = {spec.name: spec.global_shape for spec in inventory.specs}
        empty = names_without_elements(shapes, self.aliases, stored=stored, settings=settings)
        self.accounted: Collection[str] = empty | {name for name in cast if 0 not in shapes[name]}
        """Names that are not read: working copies, made from masters, and parameters without elements."""
        self.wanted: dict[Piece, torch.Tensor] = {
            piece: tensor
            for piece, tensor in state_of_model(inventory, model, buffers).items()
            if piece.name not in self.accounted
        }
        """What to read, and the tensors that take it."""
        self._taken: dict[str, dict[str, torch.Tensor]] = {}
        for known, group, owned in self._trained:
            self._want_state(known, group, owned)

    def finish(self) -> None:
        """Make the values that were read the engine's own; one all-gather per bucket, which all ranks call together."""
        with self._stopping_peers(), torch.no_grad():
            for known, taken in zip(self._optimizers, self._plan.over.settings, strict=True):
                for group, settings in zip(known.optimizer.param_groups, taken, strict=True):
                    take_over(group, settings)
            for known, _, owned in self._trained:
                if not self._plan.replaces_state_of(owned.segment.name):
                    continue
                known.optimizer.state.pop(owned.parameter, None)
                if state := self._plan.state_of(owned.segment.name, self._taken[owned.segment.name]):
                    known.optimizer.state[owned.parameter] = state
            self._buffers.publish_restored(self._counters)
            self._ties.publish_restored()
            if self._random is not None:
                self._computation.random.seed, self._computation.step = self._random
            self._origin.clear()
            self._origin.update(self._found_origin)
            self._model_buffers.agreed_unless(self._pending_buffers)

    def _live(self, known: KnownOptimizer, owned: Owned) -> LiveParameter:
        state = known.optimizer.state.get(owned.parameter, {})
        return LiveParameter(
            name=owned.segment.name,
            shape=self._spec_of[owned.segment.name].global_shape,
            dtype=dtype_name(owned.parameter.dtype),
            has_state=has_updated(state),
            whole_keys=known.whole_keys,
        )

    def _want_state(self, known: KnownOptimizer, group: Mapping[str, Any], owned: Owned) -> None:
        """Make room for the state of a parameter."""
        name = owned.segment.name
        live = known.optimizer.state.get(owned.parameter, {})
        self._taken[name] = {}
        for entry in self._plan.entries.get(name, ()):
            tensor = _room_for(entry, live.get(entry.key), group, owned.parameter)
            if entry.along:
                self.wanted |= placed(entry.whole.name, tensor, self._spec_of[name], owned.segment)
            else:
                self.wanted |= whole(entry.whole.name, tensor)
            self._taken[name][entry.key] = tensor


def _random_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Seed and step of the checkpoint's random numbers; None where it has none."""
    if "random" not in settings:
        return None
    random = settings["random"]
    found = [random.get(key) for key in ("seed", "step")] if isinstance(random, dict) else []
    match found:
        case [int(seed), int(step)]:
            return seed, step
    raise CheckpointError(
        f"the checkpoint's settings have random={random!r}, which is not a seed and a step; it was not written by an "
        "engine, or was changed since"
    )


def _trained(
    buffers: FlatParams, optimizers: Sequence[KnownOptimizer]
) -> Iterator[tuple[KnownOptimizer, Mapping[str, Any], Owned]]:
    """Everything that is trained here, with its optimizer and group."""
    owned_of = {owned.parameter: owned for owned in buffers.owned}
    for known in optimizers:
        for group in known.optimizer.param_groups:
            for parameter in group["params"]:
                yield known, group, owned_of[parameter]


def _room_for(entry: OptimizerEntry, live: Any, group: Mapping[str, Any], parameter: torch.Tensor) -> torch.Tensor:
    """The live tensor where it can take the entry, else a fresh one."""
    dtype = torch_dtype(entry.whole.dtype)
    shape = parameter.shape if entry.along else torch.Size(entry.whole.global_shape)
    if isinstance(live, torch.Tensor) and live.dtype == dtype and live.shape == shape and live.is_contiguous():
        return live
    if isinstance(live, torch.Tensor):
        device = live.device
    else:
        device = torch.device("cpu") if entry.on_host(group) else parameter.device
    return torch.zeros(shape, dtype=dtype, device=device)
