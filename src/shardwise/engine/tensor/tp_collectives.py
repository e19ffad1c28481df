"""What moves between the ranks along `tp`, forward and backward.

Every movement is linear, and its backward is the movement that is its transpose:

    forward                         backward
    share    as it is               sum over the ranks        a whole value is read by each rank for itself
    total    sum over the ranks     as it is                  each rank has a part of a sum
    whole    parts are gathered     own part is taken         what follows is computed alike by all ranks
    part     own part is taken      parts are gathered        what comes before was computed alike by all ranks
    spread   parts are gathered     sum, own part is taken    gathered, and read by each rank for itself
    settle   sum, own part is taken parts are gathered        each rank has a part of a sum, goes on with a part

Sums are taken in rank order, by one rank for each element, so that all ranks have the same bits; half precision travels
as it is, is added in float32 and rounded once. What moved is no view, so that it may be written to in place. Fake
tensors do not travel: what comes of them has the right shape.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor

from shardwise.comm import Channel
from shardwise.plan.tensor_plan import Ranges

Movement = Callable[[torch.Tensor], torch.Tensor]

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

Kind = Literal["share", "tail", "total", "whole", "part", "spread", "settle", "once", "apart"]
"""`tail`: a value of which only the last is shared. `apart`: nothing moves; the value is of this rank's part alone."""

_HALVES = (torch.bfloat16, torch.float16)


class _Moved(torch.autograd.Function):
    """A movement, with its transpose for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, kind: Kind, movement: Movement, transpose: Movement, module: str
    ) -> torch.Tensor:
        ctx.kind = kind
        ctx.module = module
        ctx.movements = (movement, transpose)
        return movement(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        movement, transpose = ctx.movements
        moved = _moved(gradients[0], _TRANSPOSES[ctx.kind], transpose, movement, ctx.module)
        return moved, None, None, None, None


_TRANSPOSES: dict[Kind, Kind] = {
    "share": "total",
    "tail": "total",
    "total": "share",
    "whole": "part",
    "part": "whole",
    "spread": "settle",
    "settle": "spread",
    "once": "once",
    "apart": "apart",
}


def movement_of(node: object) -> Kind | None:
    """What kind of movement a node of an autograd graph is the backward of; None for one that is none."""
    if not isinstance(node, _Moved._backward_cls):
        return None
    kind: Kind = node.kind  # type: ignore[attr-defined]
    return kind


def module_of(node: Any) -> str:
    """The name of the module whose rule asks for the movement that a node is the backward of."""
    name: str = node.module
    return name


def _moved(value: torch.Tensor, kind: Kind, movement: Movement, transpose: Movement, module: str) -> torch.Tensor:
    if torch.is_grad_enabled() and value.requires_grad:
        moved: torch.Tensor = _Moved.apply(value, kind, movement, transpose, module)  # type: ignore[no-untyped-call]
        return moved
    return movement(value)


class Movements:
    """The movements over one channel, for one purpose."""

    def __init__(self, channel: Channel, purpose: str, *, module: str = "") -> None:
        """module: the name of the one that they are for."""
        self._channel = channel
        self._purpose = purpose
        self.rank = channel.rank
        self.num_ranks = channel.size
        self._module = module
        self._move = uncompiled(_moved)

    def share(self, value: torch.Tensor) -> torch.Tensor:
        """The same value, which each rank reads for itself."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return self._moved(value, "share", _same, self.sum_of)

    def total(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values."""
        return self._moved(value, "total", self.sum_of, _same)

    def whole(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """All ranks' parts along `dim`, each where its ranges say."""
        return self._moved(value, "whole", self._gathering(dim, ranges), self._taking(dim, ranges))

    def part(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """This rank's part along `dim`."""
        return self._moved(value, "part", self._taking(dim, ranges), self._gathering(dim, ranges))

    def spread(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """All ranks' parts along `dim`, which each rank reads for itself."""
        return self._moved(value, "spread", self._gathering(dim, ranges), self._settling(dim, ranges))

    def settle(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """This rank's part along `dim` of the sum of all ranks' values."""
        return self._moved(value, "settle", self._settling(dim, ranges), self._gathering(dim, ranges))

    def share_last(self, value: torch.Tensor, size: int) -> torch.Tensor:
        """The same value, of which each rank reads the last `size` along the last dim for itself."""

        def sum_last(gradient: torch.Tensor) -> torch.Tensor:
            rest, last = gradient.split([gradient.shape[-1] - size, size], dim=-1)
            return torch.cat([rest, self.sum_of(last)], dim=-1)

        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return self._moved(value, "tail", _same, sum_last)

    def apart(self, value: torch.Tensor) -> torch.Tensor:
        """The same value, which each rank has of its own part."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return self._moved(value, "apart", torch.clone, _same)

    def on_first_rank(self, value: torch.Tensor) -> torch.Tensor:
        """The value on the first rank, zeros on the others; so for the gradient."""
        return self._moved(value, "once", *((_same, _same) if self.rank == 0 else (_zeros, _zeros)))

    def gathered(self, value: torch.Tensor) -> torch.Tensor:
        """All ranks' values, of one shape, in rank order along a new first dim; without a gradient."""
        output = value.new_empty((self.num_ranks, *value.shape))
        if self._travels(value):
            self._channel.all_gather(output.view(-1), _flat(value), purpose=self._purpose).wait()
        return output

    def _moved(self, value: torch.Tensor, kind: Kind, movement: Movement, transpose: Movement) -> torch.Tensor:
        return self._move(value, kind, movement, transpose, self._module)

    def _travels(self, value: torch.Tensor) -> bool:
        """Whether there is anything to move."""
        return self.num_ranks > 1 and value.numel() > 0 and not is_fake(value)

    def sum_of(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values, without a gradient."""
        if not self._travels(value):
            return value if self.num_ranks == 1 else torch.empty_like(value)
        flat = _flat(value)
        share, rest = divmod(flat.numel(), self.num_ranks)
        counts = [share + (at < rest) for at in range(self.num_ranks)]
        part = self._summed_part(flat, counts, [counts[self.rank]])
        total = flat.new_empty(value.shape)
        self._channel.all_gather(total.view(-1), part, counts=counts, purpose=self._purpose).wait()
        return total

    def _summed_part(self, flat: torch.Tensor, counts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """This rank's `counts` of the sum, in their shape."""
        dtype = torch.float32 if flat.dtype in _HALVES else flat.dtype
        part = torch.empty(shape, dtype=dtype, device=flat.device)
        self._channel.reduce_scatter(part.view(-1), flat, counts=counts, purpose=self._purpose).wait()
        return part.to(flat.dtype)

    def _taking(self, dim: int, ranges: Sequence[Ranges]) -> Movement:
        return lambda value: taken(value, dim, ranges[self.rank]).clone(memory_format=torch.contiguous_format)

    def _gathering(self, dim: int, ranges: Sequence[Ranges]) -> Movement:
        def gather(value: torch.Tensor) -> torch.Tensor:
            sizes = [_length(each) for each in ranges]
            output = value.new_empty(_resized(value, dim, sum(sizes)))
            if output.numel() == 0 or is_fake(value):
                return output
            others = value.numel() // sizes[self.rank] if sizes[self.rank] else output.numel() // sum(sizes)
            counts = [others * size for size in sizes]
            flat = value.new_empty(sum(counts))
            self._channel.all_gather(flat, _flat(value), counts=counts, purpose=self._purpose).wait()
            for part, size, held in zip(flat.split(counts), sizes, ranges, strict=True):
                shaped = part.view(_resized(value, dim, size))
                for (start, stop), piece in zip(held, shaped.split([b - a for a, b in held], dim), strict=True):
                    output.narrow(dim, start, stop - start).copy_(piece)
            return output

        return gather

    def _settling(self, dim: int, ranges: Sequence[Ranges]) -> Movement:
        def settle(value: torch.Tensor) -> torch.Tensor:
            shape = _resized(value, dim, _length(ranges[self.rank]))
            if not self._travels(value):
                return taken(value, dim, ranges[self.rank]) if self.num_ranks == 1 else value.new_empty(shape)
            parts = [taken(value, dim, held).reshape(-1) for held in ranges]
            counts = [part.numel() for part in parts]
            return self._summed_part(torch.cat(parts), counts, shape)

        return settle


def uncompiled(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """The function as compiled modules may call it: what it does is not compiled with them.

    Torch loads its compiler with the first module that is compiled, and not before for our sake: that takes seconds.
    """
    if "torch._dynamo" not in sys.modules:
        return function
    alone: Callable[Given, Answer] = torch.compiler.disable(function)
    return alone


def taken(value: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    """These ranges of a dim side by side: a view where it is one range, else a copy."""
    parts = [value.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def is_fake(value: torch.Tensor) -> bool:
    """Whether a tensor has a shape and no elements."""
    return isinstance(value, FakeTensor) or value.is_meta


def _same(value: torch.Tensor) -> torch.Tensor:
    return value.view_as(value)


def _zeros(value: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(value)


def _flat(value: torch.Tensor) -> torch.Tensor:
    return value.detach().reshape(-1).contiguous()


def _length(ranges: Ranges) -> int:
    return sum(stop - start for start, stop in ranges)


def _resized(value: torch.Tensor, dim: int, size: int) -> list[int]:
    shape = list(value.shape)
    shape[dim] = size
    return shape
