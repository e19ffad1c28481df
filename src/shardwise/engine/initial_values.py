"""Parameters that wait for their values: of a model built on the meta device, or on its way to another plan.

[1] the whole model is planned without values
[2] each rank takes room for what it computes with, and no more
[3] a `ValueSource` gives whole tensors, one after the other, and each rank keeps its portions and runs of them
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from typing import Protocol

import torch
from torch import nn

from shardwise.comm.local_tensors import torch_dtype
from shardwise.engine.inventory import Inventory
from shardwise.engine.meta_init import with_values
from shardwise.engine.pipeline.stage_ties import StageTies
from shardwise.engine.tensor.tensor_decision import portion_of
from shardwise.engine.zero.flat_params import FlatParams

BufferPlace = tuple[nn.Module, str]
"""A module and the name under which it holds a buffer."""


class ValueSource(Protocol):
    """Where values come from."""

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The names and whole values of `wanted`, one after the other, in any order."""


class Later:
    """Of values that come by a load: nothing comes now."""

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """See `ValueSource`."""
        return iter(())


@torch.no_grad()
def give_room(
    inventory: Inventory, held: Collection[str], buffers: Iterable[BufferPlace], device: torch.device
) -> Inventory:
    """Put parameters on `device` in the place of those of `held` that have no values, and buffers likewise.

    What moves to a flat buffer takes no memory before. Returns the inventory with the parameters that are there now.
    """
    fresh: dict[str, nn.Parameter] = {}
    for spec in inventory.specs:
        old = inventory.parameters[spec.name]
        if spec.name in held and old.is_meta:
            room = torch.empty(() if spec.fused else spec.shape, dtype=torch_dtype(spec.dtype), device=device)
            fresh[spec.name] = with_values(old, room.expand(spec.shape))
    for module, attribute, name in inventory.places:
        if name in fresh:
            setattr(module, attribute, fresh[name])  # not register_parameter: recurrent modules keep lists of theirs
    rooms: dict[torch.Tensor, torch.Tensor] = {}
    for module, attribute in buffers:
        buffer = module._buffers[attribute]
        if buffer is not None and buffer.is_meta:
            module._buffers[attribute] = rooms.setdefault(buffer, torch.empty_like(buffer, device=device))
    return replace(
        inventory,
        parameters={**inventory.parameters, **fresh},
        name_of={**inventory.name_of, **{each: name for name, each in fresh.items()}},
    )


def fill(
    source: ValueSource,
    waiting: Collection[str],
    *,
    held: Inventory,
    model: nn.Module,
    buffers: FlatParams,
    ties: StageTies,
) -> None:
    """Keep of each tensor that `source` gives what this rank has of it.

    waiting: names of parameters and buffers. held: the parameters with which this rank computes.
    """
    spec_of = {spec.name: spec for spec in held.specs}
    buffer_of = dict(model.named_buffers())
    with torch.no_grad():
        for name, tensor in source.values(waiting):
            if (spec := spec_of.get(name)) is None:
                buffer_of[name].copy_(tensor)
                continue
            local = tensor if spec.portion is None else portion_of(tensor, spec.portion)
            if not buffers.write(name, local) and not ties.write(name, local):
                held.parameters[name].copy_(local)
