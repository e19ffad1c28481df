"""The state of an engine as pieces: what a checkpoint saves, without any traffic."""

import math
from collections.abc import Sequence

import torch
from torch import nn

from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.inventory import Inventory
from shardwise.engine.optimizer_state import KnownOptimizer
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.plan import Parameter, Segment
from shardwise.plan.names import MASTER, state_name
from shardwise.space import Box, Piece


def state_of(
    inventory: Inventory,
    model: nn.Module,
    buffers: FlatParams,
    optimizers: Sequence[KnownOptimizer],
) -> dict[Piece, torch.Tensor]:
    """Everything this rank owns, as views: parameters, masters, optimizer state; buffers and unfused parameters whole.

    Names: a parameter's own name for its working copy, `optimizer/<parameter>/master` for a master held apart, and
    `optimizer/<parameter>/<key>` for the optimizer's state under torch's key. Raises OptimizerError for state that is
    neither a tensor nor a number.
    """
    state = state_of_model(inventory, model, buffers)
    owned_of = {owned.segment.name: owned for owned in buffers.owned}
    spec_of = {spec.name: spec for spec in inventory.specs}
    for known in optimizers:
        for name, key, tensor in known.entries(buffers.name_of()):
            owned = owned_of[name]
            if tensor.shape == owned.parameter.shape and key not in known.whole_keys:
                state |= placed(state_name(name, key), tensor, spec_of[name], owned.segment)
            else:
                state |= whole(state_name(name, key), tensor)
    return state


def state_of_model(inventory: Inventory, model: nn.Module, buffers: FlatParams) -> dict[Piece, torch.Tensor]:
    """The part of the state that does not depend on optimizers."""
    state: dict[Piece, torch.Tensor] = {}
    spec_of = {spec.name: spec for spec in inventory.specs}
    for bucket in buffers.buckets:
        for name, segment in bucket.segments.items():
            span = slice(segment.start, segment.start + segment.run.num_elements)
            state |= placed(name, bucket.part[span], spec_of[name], segment)
            if bucket.has_master:
                state |= placed(state_name(name, MASTER), bucket.master[span], spec_of[name], segment)
    for spec in inventory.specs:
        if not buffers.holds(spec.name) or not spec.num_elements:  # what has no elements is in nobody's part
            state |= placed(spec.name, inventory.parameters[spec.name].detach(), spec)
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in persistent and not buffer.is_meta:  # another stage has it
            state |= whole(name, buffer.detach())
    return state


def whole(name: str, tensor: torch.Tensor) -> dict[Piece, torch.Tensor]:
    """A tensor of which all elements are here."""
    return {Piece(name=name, dtype=dtype_name(tensor.dtype), global_shape=tuple(tensor.shape)): tensor}


def placed(
    name: str, tensor: torch.Tensor, spec: Parameter, segment: Segment | None = None
) -> dict[Piece, torch.Tensor]:
    """What a tensor holds that has an element for each of a parameter, or of a segment of it, as pieces with views.

    A parameter that is cut along tp has the pieces of its portion: several where that is made of several boxes.
    """
    dtype = dtype_name(tensor.dtype)
    run = None if segment is None else (segment.run.start, segment.run.stop)
    if run == (0, spec.num_elements):
        run = None
    local = tensor if run is not None else tensor.view(spec.shape)
    if spec.portion is None:
        return {Piece(name=name, dtype=dtype, global_shape=spec.shape, run=run): local}
    flat = tensor.view(-1)
    pieces = {}
    for piece, part in spec.portion.pieces(name, dtype, run):
        held = local
        if part is not None:
            block = flat[part.start : part.start + math.prod(part.block)].view(part.block)
            held = block[Box(part.offset, piece.shape).slices()]
        pieces[piece] = held
    return pieces
