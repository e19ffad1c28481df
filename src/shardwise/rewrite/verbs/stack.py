"""Stack: tensors of one shape joined along a new dim, and one tensor parted along a dim that goes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.attributes import Attribute, ReadArgument, StatementArguments, Verb, integer
from shardwise.rewrite.verbs.operation import Operation, OpsRefusal, Work
from shardwise.rewrite.verbs.reshape import Reshape


# With an axis that is counted from the front, both are steps.
@dataclass(frozen=True, slots=True)
class Stack(Operation):
    """Join several tensors of one shape along a new dim, which is dim `axis` of the result."""

    axis: int

    def written(self) -> Iterator[str]:
        yield f"stack={self.axis}"

    def undone(self) -> "Unstack":
        return Unstack(self.axis)

    def take(self, work: Work) -> None:
        axis = work.axis(self.axis, new=True)
        work.check_alike(None)
        shape = (*work.shape[:axis], len(work.metas), *work.shape[axis:])
        # A stack of one tensor is a reshape, and its inverse needs nothing that splits.
        if len(work.metas) == 1:
            work.change([Reshape(shape)])
        else:
            work.make([Stack(axis)], [work.metas[0]._replace(shape=shape)], Unstack(axis))

    def applied(self, values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
        """The one result."""
        return [ViewedTensor.stack(values, self.axis)]


@dataclass(frozen=True, slots=True)
class Unstack(Operation):
    """Part one tensor into one per index of dim `axis`, which goes."""

    axis: int

    def written(self) -> Iterator[str]:
        yield f"stack={self.axis}"

    def undone(self) -> Stack:
        return Stack(self.axis)

    def take(self, work: Work) -> None:
        work.check_single("stack=")
        axis, count = work.axis(self.axis), work.num_results
        shape = work.shape
        if shape[axis] != count:
            raise OpsRefusal(
                f"{work.named(0)} has {shape[axis]} indices along dim {axis}, one tensor each, but {count} are named"
            )
        part = shape[:axis] + shape[axis + 1 :]
        if count == 1:
            work.change([Reshape(part)])
        else:
            work.make([Unstack(axis)], [work.metas[0]._replace(shape=part)] * count, Stack(axis))

    def applied(self, values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
        """One result for each index."""
        # This is the only step that makes several views of each view, and `crop` looks only at those near its index.
        (value,) = values
        indices = range(value.shape[self.axis])
        return [value.crop(self.axis, index, index + 1).drop_dim(self.axis) for index in indices]


def _read(stack: ReadArgument, arguments: StatementArguments) -> Stack | Unstack | None:
    names = arguments.names
    if not names.joins and not names.parts:
        what = "joins several tensors or parts one into several; for one tensor use reshape"
        arguments.find(stack, f"{stack.shown} {what}")
    if stack.integer is None:
        return None
    return Stack(stack.integer) if names.joins else Unstack(stack.integer)


STACK = Verb((Attribute("stack=0", integer()),), ("stack",), _read, makes=True)
