"""The state of an engine as pieces: what a checkpoint saves, without any traffic."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardwise.engine.buffers import FlatBuffers, Owned
from shardwise.engine.inventory import Inventory, dtype_name
from shardwise.plan import Segment
from shardwise.space import Piece


def state_of(
    inventory: Inventory,
    model: nn.Module,
    buffers: FlatBuffers,
    optimizers: Sequence[torch.optim.Optimizer],
) -> dict[Piece, torch.Tensor]:
    """Everything this rank owns, as views: parameters, masters, optimizer state; buffers and unfused parameters whole.

    Names: a parameter's own name for its working copy, `optimizer/<parameter>/master` for a master held apart, and
    `optimizer/<parameter>/<key>` for the optimizer's state under torch's key.
    """
    state: dict[Piece, torch.Tensor] = {}
    for name, segment, index in _segments(buffers):
        shape = inventory.parameters[name].shape
        span = slice(segment.start, segment.start + segment.run.num_elements)
        _add(state, name, buffers.part(index)[span], shape, segment)
        if buffers.has_masters(index):
            _add(state, f"optimizer/{name}/master", buffers.masters[index][span], shape, segment)
    for spec in inventory.specs:
        if not spec.fused or not spec.num_elements:  # what has no elements is in nobody's part
            _add(state, spec.name, inventory.parameters[spec.name].detach(), torch.Size(spec.shape), None)
    persistent = set(model.state_dict(keep_vars=True))
    for name, buffer in model.named_buffers():
        if name in persistent:
            _add(state, name, buffer.detach(), buffer.shape, None)
    owned_of: dict[torch.Tensor, Owned] = {owned.parameter: owned for owned in buffers.owned}
    for optimizer in optimizers:
        for parameter, entries in optimizer.state.items():
            owned = owned_of[parameter]
            shape = inventory.parameters[owned.segment.name].shape
            for key, value in entries.items():
                tensor = _tensor(value)
                along = tensor.shape == parameter.shape and key != "step"
                name = f"optimizer/{owned.segment.name}/{key}"
                _add(state, name, tensor, shape if along else tensor.shape, owned.segment if along else None)
    return state


def _segments(buffers: FlatBuffers) -> Iterator[tuple[str, Segment, int]]:
    for index, bucket in enumerate(buffers.ownership.buckets):
        for segment in bucket.segments(buffers.owner):
            yield segment.name, segment, index


def _tensor(value: Any) -> torch.Tensor:
    return value.detach() if isinstance(value, torch.Tensor) else torch.tensor(value)


def _add(
    state: dict[Piece, torch.Tensor], name: str, tensor: torch.Tensor, shape: torch.Size, segment: Segment | None
) -> None:
    whole = segment is None or segment.run.num_elements == shape.numel()
    run = None if whole or segment is None else (segment.run.start, segment.run.stop)
    piece = Piece(name=name, dtype=dtype_name(tensor.dtype), global_shape=tuple(shape), run=run)
    state[piece] = tensor.view(shape) if whole else tensor
