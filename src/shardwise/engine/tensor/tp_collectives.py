"""What is exchanged between the ranks along `tp`, forward and backward: collectives that autograd knows.

Each is linear, and its backward is the collective that is its transpose:

    forward                                  backward                     the value
    copy_to_ranks    as it is                all_reduce                   is whole, each rank reads it for itself
    all_reduce       sum over the ranks      copy_to_ranks                is a rank's term of a sum
    all_gather       parts are gathered      scatter                      is a part; all ranks go on alike
    scatter          own part is taken       all_gather                   was computed alike by all ranks
    gather_to_ranks  parts are gathered      reduce_scatter               is a part; each rank reads all for itself
    reduce_scatter   sum, own part is taken  gather_to_ranks              is a rank's term; it goes on with a part

The column and row pair of a feed-forward block on 2 ranks, x (2, 5, 6), up 6 -> 32 and down 32 -> 6:

    rank 0   x (2, 5, 6) --copy_to_ranks-- up[0:16] --> (2, 5, 16) --> down[:, 0:16] --> (2, 5, 6) --+
             the same x                                                                   partial   (+)-- all_reduce
    rank 1   x (2, 5, 6) --copy_to_ranks-- up[16:32] -> (2, 5, 16) --> down[:, 16:32] -> (2, 5, 6) --+   y (2, 5, 6)

    forward communicates once, behind `down`; backward once, in front of `up`: the gradient of x is summed there.

All ranks end up with the same bits: one rank adds each element, in rank order (NCCL: in its own order), and gives the
sum to the others. Half precision travels as it is, is added in float32 and rounded once. Fake tensors are not sent: the
result has the right shape alone.
"""

import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, TypeVar

import torch

from shardwise.comm import Channel
from shardwise.engine.forward.transforms import refusal_of_transformed
from shardwise.engine.torch_private import COMPILER, FakeTensor, backward_class, is_transformed
from shardwise.plan.tensor_plan import Ranges

TensorMap = Callable[[torch.Tensor], torch.Tensor]

Given = ParamSpec("Given")
Answer = TypeVar("Answer")

Kind = Literal[
    "copy_to_ranks",
    "copy_last_to_ranks",
    "all_reduce",
    "all_gather",
    "scatter",
    "gather_to_ranks",
    "reduce_scatter",
    "on_first_rank",
    "own_part",
]
"""`copy_last_to_ranks`: the ranks read the last features each for itself. `own_part`: nothing is sent; the value is of
this rank's part alone."""


class _Collective(torch.autograd.Function):
    """A collective, with its transpose for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, value: torch.Tensor, kind: Kind, run: TensorMap, transpose: TensorMap, module: str
    ) -> torch.Tensor:
        # `kind` and `module` are for `summed_gradients`, which reads the graph and names modules in refusals.
        ctx.kind = kind
        ctx.module = module
        ctx.maps = (run, transpose)
        return run(value)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None, None, None, None]:
        run, transpose = ctx.maps
        # Through `_applied` again, so that under create_graph the gradient has a graph too: the transpose of the
        # transpose is the collective itself.
        gradient = _applied(gradients[0], _TRANSPOSES[ctx.kind], transpose, run, ctx.module)
        return gradient, None, None, None, None


_TRANSPOSES: dict[Kind, Kind] = {
    "copy_to_ranks": "all_reduce",
    "copy_last_to_ranks": "all_reduce",
    "all_reduce": "copy_to_ranks",
    "all_gather": "scatter",
    "scatter": "all_gather",
    "gather_to_ranks": "reduce_scatter",
    "reduce_scatter": "gather_to_ranks",
    "on_first_rank": "on_first_rank",
    "own_part": "own_part",
}


def collective_of(node: object) -> Kind | None:
    """The collective whose backward a node of an autograd graph is; None for another node."""
    if not isinstance(node, backward_class(_Collective)):
        return None
    kind: Kind = node.kind  # type: ignore[attr-defined]
    return kind


def module_of(node: Any) -> str:
    """The name of the module whose rule asks for the collective of a node."""
    name: str = node.module
    return name


def _applied(value: torch.Tensor, kind: Kind, run: TensorMap, transpose: TensorMap, module: str) -> torch.Tensor:
    if is_transformed():
        raise refusal_of_transformed(
            f"module {module!r}, which is cut over ranks along tp, is called",
            "Take the derivative by torch.autograd.grad, or leave the module out of tensor.rules",
        )
    if torch.is_grad_enabled() and value.requires_grad:
        output: torch.Tensor = _Collective.apply(value, kind, run, transpose, module)  # type: ignore[no-untyped-call]
        return output
    return run(value)


class TpCollectives:
    """The collectives over one channel, for one purpose.

    All ranks of the channel call the same ones in the same order. What was sent or taken is no view of the input, so
    that the model may write to it in place. A copy to ranks is a view, and torch refuses a write to it.
    """

    def __init__(self, channel: Channel, purpose: str, *, module: str = "") -> None:
        """module: the name of the module that asks for them."""
        self._channel = channel
        self._purpose = purpose
        self.rank = channel.rank
        self.num_ranks = channel.size
        self._module = module
        self._apply = uncompiled(_applied)

    def copy_to_ranks(self, value: torch.Tensor) -> torch.Tensor:
        """The same value, which each rank reads for itself."""
        # Forward sends nothing. Without a gradient there is no backward either, and a node would be waste.
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return self._applied(value, "copy_to_ranks", _same, self.sum_of)

    def copy_last_to_ranks(self, value: torch.Tensor, size: int) -> torch.Tensor:
        """The same value, whose last `size` features each rank reads for itself."""

        # The features before the last are read by all ranks alike (a norm and a column behind it that has its own
        # `copy_to_ranks`): their gradient is complete already, and a second sum would multiply it.
        def sum_last(gradient: torch.Tensor) -> torch.Tensor:
            rest, last = gradient.split([gradient.shape[-1] - size, size], dim=-1)
            return torch.cat([rest, self.sum_of(last)], dim=-1)

        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return self._applied(value, "copy_last_to_ranks", _same, sum_last)

    def all_reduce(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values."""
        return self._applied(value, "all_reduce", self.sum_of, _same)

    def all_gather(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """All ranks' parts along `dim`, each where its ranges say."""
        return self._applied(value, "all_gather", self._gathering(dim, ranges), self._taking(dim, ranges))

    def scatter(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """This rank's part along `dim` of a value that every rank has."""
        return self._applied(value, "scatter", self._taking(dim, ranges), self._gathering(dim, ranges))

    def gather_to_ranks(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """All ranks' parts along `dim`, which each rank reads for itself."""
        return self._applied(value, "gather_to_ranks", self._gathering(dim, ranges), self._scattering_sum(dim, ranges))

    def reduce_scatter(self, value: torch.Tensor, dim: int, ranges: Sequence[Ranges]) -> torch.Tensor:
        """This rank's part along `dim` of the sum of all ranks' values."""
        return self._applied(value, "reduce_scatter", self._scattering_sum(dim, ranges), self._gathering(dim, ranges))

    def own_part(self, value: torch.Tensor) -> torch.Tensor:
        """The same value, marked in the graph as this rank's part."""
        if not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return self._applied(value, "own_part", torch.clone, _same)

    def on_first_rank(self, value: torch.Tensor) -> torch.Tensor:
        """The value on the first rank, zeros on the others; so for the gradient."""
        # A copy: torch would refuse a write to a view on the first rank, and the others would go on without it.
        return self._applied(value, "on_first_rank", *((torch.clone, _same) if self.rank == 0 else (_zeros, _zeros)))

    def gathered(self, value: torch.Tensor) -> torch.Tensor:
        """All ranks' values, of one shape, in rank order along a new first dim; without a gradient."""
        output = value.new_empty((self.num_ranks, *value.shape))
        if self._is_sent(value):
            self._channel.all_gather(output.view(-1), _flat(value), purpose=self._purpose).wait()
        return output

    def sum_of(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of all ranks' values, without a gradient."""
        if not self._is_sent(value):
            return value if self.num_ranks == 1 else torch.empty_like(value)
        # A reduce-scatter and an all-gather: one rank adds each element, and the others get its result. Replicas that
        # added for themselves, in orders of their own, would drift apart in the last bits.
        #
        #     7 elements on 3 ranks, counts 3 2 2     rank 0 adds 0:3, rank 1 adds 3:5, rank 2 adds 5:7, all get 0:7
        flat = _flat(value)
        share, rest = divmod(flat.numel(), self.num_ranks)
        counts = [share + (at < rest) for at in range(self.num_ranks)]
        part = self._summed_part(flat, counts, [counts[self.rank]])
        total = flat.new_empty(value.shape)
        self._channel.all_gather(total.view(-1), part, counts=counts, purpose=self._purpose).wait()
        return total

    def _applied(self, value: torch.Tensor, kind: Kind, run: TensorMap, transpose: TensorMap) -> torch.Tensor:
        return self._apply(value, kind, run, transpose, self._module)

    def _is_sent(self, value: torch.Tensor) -> bool:
        """Whether there is anything to send."""
        # Ranks of a pipeline run the modules of other stages on fake tensors, to learn what shapes they give.
        return self.num_ranks > 1 and value.numel() > 0 and not is_fake(value)

    def _summed_part(self, flat: torch.Tensor, counts: Sequence[int], shape: Sequence[int]) -> torch.Tensor:
        """This rank's `counts` of the sum, in their shape."""
        # The channel adds in the dtype of its output. Half precision is rounded once, behind the last addition, and
        # not after each: otherwise the error would grow with the number of ranks.
        dtype = torch.float32 if is_half(flat) else flat.dtype
        part = torch.empty(shape, dtype=dtype, device=flat.device)
        self._channel.reduce_scatter(part.view(-1), flat, counts=counts, purpose=self._purpose).wait()
        return part.to(flat.dtype)

    def _taking(self, dim: int, ranges: Sequence[Ranges]) -> TensorMap:
        # A copy even of one range: torch refuses a write in place to a view that an autograd function made, and a view
        # would keep the memory of the whole.
        return lambda value: taken(value, dim, ranges[self.rank]).clone(memory_format=torch.contiguous_format)

    def _gathering(self, dim: int, ranges: Sequence[Ranges]) -> TensorMap:
        def gather(value: torch.Tensor) -> torch.Tensor:
            sizes = [_length(each) for each in ranges]
            output = value.new_empty(_resized(value, dim, sum(sizes)))
            if output.numel() == 0 or is_fake(value):
                return output
            # A rank without a position (3 positions on 4 ranks) gives nothing, and cannot divide by its own size.
            others = value.numel() // sizes[self.rank] if sizes[self.rank] else output.numel() // sum(sizes)
            counts = [others * size for size in sizes]
            flat = value.new_empty(sum(counts))
            self._channel.all_gather(flat, _flat(value), counts=counts, purpose=self._purpose).wait()
            # The parts arrive rank by rank, each in its own row-major order. They are copied to their places: only a
            # gather along the first dim, with one range per rank, would need no copy.
            for part, size, held in zip(flat.split(counts), sizes, ranges, strict=True):
                shaped = part.view(_resized(value, dim, size))
                for (start, stop), piece in zip(held, shaped.split([b - a for a, b in held], dim), strict=True):
                    output.narrow(dim, start, stop - start).copy_(piece)
            return output

        return gather

    def _scattering_sum(self, dim: int, ranges: Sequence[Ranges]) -> TensorMap:
        def scatter_sum(value: torch.Tensor) -> torch.Tensor:
            shape = _resized(value, dim, _length(ranges[self.rank]))
            if not self._is_sent(value):
                return taken(value, dim, ranges[self.rank]) if self.num_ranks == 1 else value.new_empty(shape)
            parts = [taken(value, dim, held).reshape(-1) for held in ranges]
            counts = [part.numel() for part in parts]
            return self._summed_part(torch.cat(parts), counts, shape)

        return scatter_sum


def uncompiled(function: Callable[Given, Answer]) -> Callable[Given, Answer]:
    """The function as compiled modules may call it: what it does is not compiled with them."""
    # torch.compiler.disable would load torch's compiler, which takes seconds. It is loaded with the first module that
    # is compiled; before that nothing can be compiled, and the function may stay as it is.
    if COMPILER not in sys.modules:
        return function
    alone: Callable[Given, Answer] = torch.compiler.disable(function)
    return alone


def taken(value: torch.Tensor, dim: int, ranges: Ranges) -> torch.Tensor:
    """These ranges of a dim side by side: a view where it is one range, else a copy."""
    parts = [value.narrow(dim, start, stop - start) for start, stop in ranges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def is_half(value: torch.Tensor) -> bool:
    """Whether it is in half precision."""
    return value.dtype in (torch.bfloat16, torch.float16)


def widened(value: torch.Tensor) -> torch.Tensor:
    """Half precision as float32; everything else as it is."""
    return value.float() if is_half(value) else value


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
