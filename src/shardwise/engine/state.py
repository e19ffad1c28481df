"""The state of an engine as pieces: what a checkpoint saves, without any traffic."""

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from shardwise.engine.buffers import FlatBuffers
from shardwise.engine.inventory import Inventory, dtype_name
from shardwise.engine.optimizer_state import KnownOptimizer
from shardwise.plan import Segment
from shardwise.plan.state_names import MASTER, state_name
from shardwise.space import Piece


def state_of(
    inventory: Inventory,
    model: nn.Module,
    buffers: FlatBuffers,
    optimizers: Sequence[KnownOptimizer],
) -> dict[Piece, torch.Tensor]:
    """Everything this rank owns, as views: parameters, masters, optimizer state; buffers and unfused parameters whole.

    Names: a parameter's own name for its working copy, `optimizer/<parameter>/master` for a master held apart, and
    `optimizer/<parameter>/<key>` for the optimizer's state under torch's key. Raises OptimizerError for state that is
    neither a tensor nor a number.
    """
    state = state_of_model(inventory, model, buffers)
    owned_of = {owned.segment.name: owned for owned in buffers.owned}
    for known in optimizers:
        for name, key, tensor in known.entries(buffers.name_of()):
            owned = owned_of[name]
            along = tensor.shape == owned.parameter.shape and key not in known.whole_keys
            shape, segment = (inventory.parameters[name].shape, owned.segment) if along else (tensor.shape, None)
            piece, held = placed(state_name(name, key), tensor, shape, segment)
            state[piece] = held
    return state


def state_of_model(inventory: Inventory, model: nn.Module, buffers: FlatBuffers) -> dict[Piece, torch.Tensor]:
    """The part of the state that does not depend on optimizers."""
    state: dict[Piece, torch.Tensor] = {}

    def add(name: str, tensor: torch.Tensor, shape: torch.Size, segment: Segment | None = None) -> None:
        piece, held = placed(name, tensor, shape, segment)
        state[piece] = held

    for name, segment, index in _segments(buffers):
        shape = inventory.parameters[name].shape
        span = slice(segment.start, segment.start + segment.run.num_elements)
        add(name, buffers.part(index)[span], shape, segment)
        if buffers.has_masters(index):
            add(state_name(name, MASTER), buffers.masters[index][span], shape, segment)
    for spec in inventory.specs:
        if not spec.fused or not spec.num_elements:  # what has no elements is in nobody's part
            add(spec.name, inventory.parameters[spec.name].detach(), torch.Size(spec.shape))
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in persistent and not buffer.is_meta:  # another stage has it
            add(name, buffer.detach(), buffer.shape)
    return state


def placed(name: str, tensor: torch.Tensor, shape: torch.Size, segment: Segment | None) -> tuple[Piece, torch.Tensor]:
    """The piece that a tensor holds of the whole of `shape`, and the tensor as a view in the form for pieces.

    segment: which elements it has; None: all.
    """
    whole = segment is None or segment.run.num_elements == shape.numel()
    run = None if whole or segment is None else (segment.run.start, segment.run.stop)
    piece = Piece(name=name, dtype=dtype_name(tensor.dtype), global_shape=tuple(shape), run=run)
    return piece, tensor.view(shape) if whole else tensor


def _segments(buffers: FlatBuffers) -> Iterator[tuple[str, Segment, int]]:
    for index, bucket in enumerate(buffers.ownership.buckets):
        for segment in bucket.segments(buffers.owner):
            yield segment.name, segment, index
