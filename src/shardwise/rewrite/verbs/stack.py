"""Stack: tensors of one shape joined along a new dim, and one tensor parted along a dim that goes."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.rewrite.verbs.arrange import fuse, unfuse
from shardwise.rewrite.verbs.attributes import Attribute, ReadArgument, StatementArguments, Verb, integer
from shardwise.rewrite.verbs.operation import Each, Operation, OpsRefusal, Step, Work
from shardwise.rewrite.verbs.reshape import Reshape


@dataclass(frozen=True, slots=True)
class Stack(Operation):
    """Join several tensors of one shape along a new dim, which is dim `axis` of the result."""

    axis: int

    def written(self) -> Iterator[str]:
        yield f"stack={self.axis}"

    def undone(self) -> "Unstack":
        return Unstack(self.axis)

    def take(self, work: Work) -> None:
        axis, count = work.axis(self.axis, new=True), len(work.metas)
        work.check_alike(None)
        shape, thin = work.shape, (*work.shape[:axis], 1, *work.shape[axis:])
        # A stack of one tensor is a reshape, and its inverse needs nothing that splits.
        if count == 1:
            work.change([Reshape(thin)])
            return
        steps: list[Step] = [Each((Reshape(thin),) * count, (Reshape(shape),) * count), fuse(axis, (1,) * count, 1)]
        made = (*shape[:axis], count, *shape[axis:])
        work.make(steps, [work.metas[0]._replace(shape=made)], Unstack(axis))


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
        part, thin = shape[:axis] + shape[axis + 1 :], (*shape[:axis], 1, *shape[axis + 1 :])
        if count == 1:
            work.change([Reshape(part)])
            return
        steps: list[Step] = [unfuse(axis, (1,) * count, 1), Each((Reshape(part),) * count, (Reshape(thin),) * count)]
        work.make(steps, [work.metas[0]._replace(shape=part)] * count, Stack(axis))


def _read(stack: ReadArgument, arguments: StatementArguments) -> Stack | Unstack | None:
    names = arguments.names
    if not names.joins and not names.parts:
        what = "joins several tensors or parts one into several; for one tensor use reshape"
        arguments.find(stack, f"{stack.shown} {what}")
    if stack.integer is None:
        return None
    return Stack(stack.integer) if names.joins else Unstack(stack.integer)


STACK = Verb((Attribute("stack=0", integer()),), ("stack",), _read, makes=True)
