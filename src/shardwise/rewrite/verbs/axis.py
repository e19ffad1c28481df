"""Axis: tensors joined one after the other along a dim, and one tensor cut along it."""

from collections.abc import Iterator
from dataclasses import dataclass

from shardwise.rewrite.verbs.arrange import arrange, fuse, unfuse
from shardwise.rewrite.verbs.attributes import (
    Attribute,
    ReadArgument,
    StatementArguments,
    Verb,
    integer,
    integers,
    listed,
)
from shardwise.rewrite.verbs.operation import RECORDED, Operation, OpsRefusal, Work, unknown


@dataclass(frozen=True, slots=True)
class Concat(Operation):
    """Join several tensors along a dim. `sizes`: what each has there, verified; None: whatever it has."""

    axis: int
    sizes: tuple[int, ...] | None = None

    def written(self) -> Iterator[str]:
        yield f"axis={self.axis}"
        if self.sizes is not None:
            yield f"sizes={listed(self.sizes)}"

    def undone(self) -> "Split":
        return Split(self.axis, self.sizes, recorded=self.sizes is None)

    def take(self, work: Work) -> None:
        axis = work.axis(self.axis)
        work.check_alike(axis)
        actual = work.sizes(axis)
        if self.sizes not in (None, actual):
            asked = list(self.sizes or ())
            raise OpsRefusal(f"sizes says {asked} along dim {axis}, but the tensors have {list(actual)} there")
        # A star may stand for one tensor only, and joining one tensor changes nothing. Neither does the way back.
        if len(actual) > 1:
            arrange(work, [fuse(axis, actual, 1)], Split(axis, None if len(set(actual)) == 1 else actual))


@dataclass(frozen=True, slots=True)
class Split(Operation):
    """Part one tensor along a dim. None: in equal parts, or as recorded (`recorded`, only in inverses)."""

    axis: int
    sizes: tuple[int, ...] | None = None
    recorded: bool = False

    def written(self) -> Iterator[str]:
        yield f"axis={self.axis}"
        if self.recorded or self.sizes is not None:
            yield f"sizes={listed(None if self.recorded else self.sizes)}"

    def undone(self) -> Concat:
        return Concat(self.axis, self.sizes)

    def take(self, work: Work) -> None:
        work.check_single("a split")
        axis = work.axis(self.axis)
        size, parts = work.shape[axis], work.num_results
        sizes = self.sizes
        # `recorded` comes from an inverse of text whose target is not known. Equal parts would be a guess that often
        # fits.
        if sizes is None and self.recorded and parts > 1:
            raise unknown(f"the sizes of the {parts} parts of {work.named(0)} along dim {axis} are", "sizes='[..]'")
        if sizes is None:
            if size % parts:
                raise OpsRefusal(
                    f"{work.named(0)} has size {size} along dim {axis}, which is not divisible into {parts} equal "
                    f"parts: say which by sizes='[..]'"
                )
            sizes = (size // parts,) * parts
        if len(sizes) != parts or sum(sizes) != size:
            raise OpsRefusal(
                f"sizes {list(sizes)} are {len(sizes)} parts with {sum(sizes)} together, but {work.named(0)} has size "
                f"{size} along dim {axis} and becomes {parts} tensors"
            )
        if parts > 1:
            arrange(work, [unfuse(axis, sizes, 1)], Concat(axis))


def _read(axis: ReadArgument, arguments: StatementArguments) -> Concat | Split | None:
    names, sizes = arguments.names, arguments.once.get("sizes")
    joins_or_parts, count = names.joins or names.parts, max(names.counts)
    wanted = sizes.integers if sizes is not None else None
    recorded = sizes is not None and sizes.value == RECORDED
    if sizes is not None and not joins_or_parts:
        arguments.find(sizes, f"{sizes.shown} is for several tensors on one side; here one becomes one")
    elif sizes is not None and wanted is not None and not names.stars and len(wanted) != count:
        arguments.find(sizes, f"{sizes.shown} has {len(wanted)} sizes for {count} tensors; give one for each")
    if axis.integer is None or not joins_or_parts:
        return None  # with one tensor on either side AOA's axis says nothing
    if names.parts:
        return Split(axis.integer, wanted, recorded=recorded)
    if sizes is not None and recorded:
        arguments.find(sizes, f"{sizes.shown}: only a split needs recorded sizes; leave them out")
    return Concat(axis.integer, wanted)


def _fault(sizes: tuple[int, ...]) -> str:
    return "sizes are not negative" if min(sizes, default=0) < 0 else ""


AXIS = Verb(
    (
        Attribute("axis=0", integer()),
        Attribute("sizes='[3,5]'", integers(_fault), recordable=True),
    ),
    ("axis",),
    _read,
    makes=True,
)
