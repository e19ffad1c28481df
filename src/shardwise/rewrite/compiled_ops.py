"""Compiled operations: what the operations of a statement do to tensors of given metas, checked and as steps.

Instances of one statement are alike: `layers.0` and `layers.31` have the same shapes. So what a statement does to given
metas is worked out once, as `CompiledOps` (or an `OpsRefusal`) that name no tensors.

Figure 1. `q, k -> qk, axis=0` for layers of equal shapes, from text to strided views::

    Statement       layers.$L.q, layers.$L.k -> layers.$L.qk      Concat(0)             parsed (syntax)
    instances       layers.0: q, k -> qk    layers.1: q, k -> qk                        expanded (expansion)
    CompiledOps     metas (2, 4), (2, 4)  -> Arrange(0, (2, 2), (((0, 0, 2), (1, 0, 2)),))    once for both
    Form            rows 0:2 of source 0, rows 2:4 of source 1                          once for both (nodes)
    Node            the form, with leaves ("layers.0.q", "layers.0.k")                  one for each
    StridedView     [0:2] of layers.0.q, [2:4] of layers.0.k                            when asked
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

from shardwise.rewrite.metas import TensorMeta, keeps_values
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.cast import Cast
from shardwise.rewrite.verbs.operation import Cropped, Degrees, Each, Making, Operation, OpsRefusal, Step, Work
from shardwise.rewrite.verbs.permute import Permute
from shardwise.rewrite.verbs.quantise import Rescaling


@dataclass(frozen=True, slots=True)
class InverseOps:
    """What undoes operations on tensors of given metas, as operations that say everything."""

    after: tuple[tuple[Operation, ...], ...]
    """For each result what is done with it first."""
    join_or_split: Operation | None
    """What makes the tensors of the results."""
    before: tuple[tuple[Operation, ...], ...]
    """For each tensor what is done with it last."""

    @property
    def alike(self) -> tuple[Operation, ...] | None:
        """All in one go, where that is the same for all results and for all tensors; else None."""
        if len(set(self.after)) > 1 or len(set(self.before)) > 1:
            return None
        join_or_split = () if self.join_or_split is None else (self.join_or_split,)
        return (*self.after[0], *join_or_split, *self.before[0])


_NO_INVERSE = InverseOps((), None, ())


@dataclass(frozen=True, eq=False)
class CompiledOps:
    """What operations do to tensors of given metas, whatever the tensors are called."""

    steps: tuple[Step, ...]
    results: tuple[TensorMeta, ...]
    inverse: InverseOps = _NO_INVERSE
    cropped: tuple[Cropped, ...] = ()
    making: Making | None = None
    _undoing: "dict[CompiledOps, bool]" = field(default_factory=dict, init=False, repr=False)

    @cached_property
    def undo(self) -> tuple[Step, ...]:
        """The steps that lead back."""
        return tuple([step.undone() for step in reversed(self.steps)])

    @cached_property
    def narrowed(self) -> list[tuple[str, str]]:
        """Casts (from, to) that do not keep all values."""
        # One chain may narrow and widen again: float32 -> bfloat16 -> float32 ends in its dtype and has lost the
        # values. So each pair counts, not the two ends.
        pairs = [zip(step.back, step.changes, strict=True) for step in self.steps if isinstance(step, Each)]
        casts = [(old.to, new.to) for old, new in chain(*pairs) if isinstance(old, Cast) and isinstance(new, Cast)]
        return [(old, new) for old, new in dict.fromkeys(casts) if old and new and not keeps_values(old, new)]

    @cached_property
    def rescaling(self) -> Rescaling | None:
        """What takes scales, or makes them: on the way back others are made of the values."""
        return next((step for step in self.steps if isinstance(step, Rescaling)), None)

    @property
    def does_nothing(self) -> bool:
        """Whether there is nothing to undo either: what is laid out as it was may be laid out anew on the way back."""
        return not self.steps and self.inverse.join_or_split is None

    @cached_property
    def halves(self) -> "tuple[CompiledOps, CompiledOps]":
        """What is done before the operation that joins or splits, which there is, and after it."""
        assert self.making is not None, "an operation joins or splits"
        before, after = self.steps[: self.making.start], self.steps[self.making.stop :]
        return CompiledOps(before, self.making.taken), CompiledOps(after, self.results)

    def undone_by(self, other: "CompiledOps") -> bool:
        """Whether other operations, on what these made, do nothing but lead back; what was lost does not."""
        found = self._undoing.get(other)
        if found is None:
            # A pair of casts leads back by its steps alone. After a narrowing cast the values are others, so the nodes
            # have to be others too: a proof that took them for the same would prove nothing.
            loses = self.narrowed or self.cropped or self.rescaling
            found = self._undoing[other] = not loses and self.undo == other.steps
        return found


def compile_ops(
    operations: Sequence[Operation],
    transposed: Sequence[bool],
    metas: Sequence[TensorMeta],
    num_results: int,
    degrees: Degrees,
) -> CompiledOps | OpsRefusal:
    """Return what operations do to tensors with these metas, or why they do not fit.

    `transposed` tells of each tensor whether all its dims are reversed first; `degrees` are the numbers of ranks for
    which a fused left and a fused right tensor are laid out. A degree that is not known (None) is 1, and stays open on
    the way back.
    """
    work = Work(metas, num_results, degrees)
    try:
        # `^T` stands at a name, so it comes before every operation, whatever their order.
        work.change([Permute(None) if each else None for each in transposed])
        for operation in operations:
            if work.ended:
                raise OpsRefusal(work.ended)
            operation.take(work)
        # The count of names is checked last: until then an operation may still join or split.
        if len(work.metas) != num_results:
            what = f"{len(work.metas)} tensors are to become {num_results}"
            raise OpsRefusal(f"{what}: say how, by axis=, stack= or a fused_ operation")
    except OpsRefusal as refusal:
        # The refusal is kept as a value. Its traceback would keep every frame of this call alive with it.
        return refusal.with_traceback(None)
    # Without an operation that joins or splits there is one phase, and it belongs to the tensors that went in.
    after, before = (work.back, work.before) if work.before is not None else ([[]], work.back)
    inverse = InverseOps(tuple(map(tuple, after)), work.join_or_split, tuple(map(tuple, before)))
    return CompiledOps(tuple(work.steps), tuple(work.metas), inverse, tuple(work.cropped), work.making)


def apply_steps(steps: Sequence[Step], values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
    """Return what the steps make of tensors of the shapes for which they were made."""
    current = list(values)
    for step in steps:
        current = step.applied(current)
    return current
