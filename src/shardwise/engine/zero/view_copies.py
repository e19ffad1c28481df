"""Copies of views of gathered parameters, which outlive the memory that they were views of (stage 3)."""

from dataclasses import dataclass
from typing import Any

import torch

from shardwise.errors import ModelError

_ALIGNMENT_BYTES = 64
"""At multiples of this torch allocates, on every device."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that a forward has, where one process has a view of the parameter."""

    tensor: torch.Tensor
    name: str
    version: int

    def check(self) -> None:
        """Raise ModelError where the forward wrote to it: one process would have changed the parameter."""
        if self.tensor._version != self.version:
            raise refusal_of_write(self.name)


def refusal_of_write(name: str) -> ModelError:
    """What to say of a write to a parameter that is gathered for a forward only."""
    return ModelError(
        f"parameter {name!r} was written to in a forward, where it is a copy for the time of that forward (stage 3), "
        "so that the values are lost; keep what forwards write in buffers, or use stage 2"
    )


def copy_of_view(view: torch.Tensor) -> torch.Tensor:
    """The values of a view in memory of their own, with its strides and alignment, by which kernels round."""
    if not view.requires_grad:
        return _copied(view.detach())
    copy: torch.Tensor = _CopyOfView.apply(view)  # type: ignore[no-untyped-call]
    # A view of a parameter says that it requires a gradient even where it is made without one.
    return copy if copy.requires_grad else copy.requires_grad_()


class _CopyOfView(torch.autograd.Function):
    """Passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return _copied(view)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _copied(view: torch.Tensor) -> torch.Tensor:
    lead = int(view.storage_offset()) % (_ALIGNMENT_BYTES // view.element_size())
    steps = [(size - 1) * stride for size, stride in zip(view.shape, view.stride(), strict=True)]
    extent = sum(steps) + 1 if view.numel() else 0
    room = torch.empty(lead + extent, dtype=view.dtype, device=view.device)
    copy = torch.empty(0, dtype=view.dtype, device=view.device)
    copy.set_(room.untyped_storage(), lead, view.shape, view.stride())
    target, source = copy, view
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:  # expanded: one value for all places
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return copy
