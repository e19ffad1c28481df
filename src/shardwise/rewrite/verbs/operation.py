"""Operations: what a statement does to tensors, as data, and the tensors on which it is worked out.

A statement takes the tensors of its left names, carries its operations out in order, and gives the results to its right
names. A `Change` makes another tensor of each. Other operations join several into one, or split one into several.

Carried out on a `Work`, operations come down to steps: shapes and dtypes are known then, and nothing is left open. So a
step says by itself what undoes it, and what it does to the views of tensors.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, NamedTuple, Protocol, TypeAlias

from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.strided_views import ViewedTensor

RECORDED: Final = "recorded"
"""Written for what an inverse takes from the tensors that the forward rewrite was applied to."""


class Operation(ABC):
    """What a statement does to tensors; subclasses are frozen data, and equal where they do the same."""

    __slots__ = ()
    rescales: ClassVar[bool] = False
    """Whether it multiplies or divides by scales."""

    @abstractmethod
    def written(self) -> Iterator[str]:
        """Its arguments, as they are written."""

    def written_last(self) -> Iterator[str]:
        """What stands once behind the arguments of all operations of a statement."""
        return iter(())

    @abstractmethod
    def undone(self) -> "Operation":
        """What undoes it, as far as text tells. What text does not tell is left to the record."""

    @property
    def loss(self) -> str:
        """What it loses, in words, as far as text tells; empty where that is nothing."""
        return ""

    def on_state(self, *, is_master: bool) -> "Operation | None":
        """What it does to optimizer state, which goes along with its parameter; None: nothing."""
        return self

    @abstractmethod
    def take(self, work: "Work") -> None:
        """Carry it out on what is worked on. Raises OpsRefusal where it does not fit."""


class Step(Protocol):
    """What is done to tensors of known shapes and dtypes. Steps are data, so that one and its inverse are compared."""

    def undone(self) -> "Step":
        """The step that leads back."""

    def applied(self, values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
        """What it makes of tensors of the shapes for which it was made."""


class Change(Operation):
    """What makes another tensor of each one."""

    __slots__ = ()

    @abstractmethod
    def fitted(self, meta: TensorMeta, name: str) -> "Fitted | None":
        """What it comes down to for one tensor; None: nothing. Raises OpsRefusal, which calls the tensor `name`."""

    @abstractmethod
    def changed(self, value: ViewedTensor) -> ViewedTensor:
        """What it makes of a tensor, once it was fitted."""

    def then(self, other: "Change") -> "Change":
        """One change for this and another of its kind after it."""
        # The result of this one is only passed through.
        return other

    def take(self, work: "Work") -> None:
        """Change each tensor."""
        work.change([self] * len(work.metas))


class Fitted(NamedTuple):
    """A change of one tensor."""

    change: Change
    """With nothing left open."""
    back: Change
    meta: TensorMeta
    """Of what it makes."""


@dataclass(frozen=True, slots=True)
class Each:
    """Tensor j is changed by `changes[j]`; one without a change stays as it is."""

    changes: tuple[Change | None, ...]
    back: tuple[Change | None, ...]
    """A step alone has to say how it is undone."""

    def undone(self) -> "Each":
        """The changes back."""
        return Each(self.back, self.changes)

    def applied(self, values: Sequence[ViewedTensor]) -> list[ViewedTensor]:
        """Each tensor with its change."""
        return [v if each is None else each.changed(v) for v, each in zip(values, self.changes, strict=True)]


def unknown(what: str, written: str) -> "OpsRefusal":
    """The refusal of what an inverse needs and text does not tell; `written`: how a user tells it."""
    return OpsRefusal(f"{what} not known. Check the inverse against the tensors of the rewrite, or write {written}")


class OpsRefusal(Exception):  # noqa: N818 - it is a verdict that travels upwards, no user sees it
    """Why operations do not fit. In `text`, `tensor_at(0)` stands for the name of the first left tensor."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    # A refusal is worked out once for all instances of a statement, before it is known which of them report it.
    def of(self, left: Sequence[str]) -> str:
        """The message for an instance with these left names."""
        return _TENSOR.sub(lambda match: left[int(match[1])], self.text)


_TENSOR = re.compile("\0([0-9]+)\0")


def tensor_at(place: int) -> str:
    """What stands for the name of a left tensor in the text of a refusal."""
    return f"\0{place}\0"


Degrees: TypeAlias = tuple[int | None, int | None]
"""For how many ranks along `tp` the fused tensor on the left is laid out, and that on the right.

None: no layout tells, so 1. 0: there is a layout, and it does not tell.
"""

OPEN: Degrees = (None, None)


class Cropped(NamedTuple):
    """A tensor loses its last elements along some dims."""

    old: tuple[int, ...]
    new: tuple[int, ...]
    fill: str | None
    """The value that they have, which the way back gives them. None: it is not known."""

    def __str__(self) -> str:
        return f"{list(self.old)} to {list(self.new)}"


class Making(NamedTuple):
    """How tensors were joined or split: which of the steps do so, and of what they make what."""

    start: int
    stop: int
    taken: tuple[TensorMeta, ...]
    made: tuple[TensorMeta, ...]


class Work:
    """Shapes and dtypes of tensors while operations are gone through from left to right, and the steps so far."""

    def __init__(self, metas: Sequence[TensorMeta], num_results: int, degrees: Degrees) -> None:
        self.metas = [TensorMeta(meta.shape, meta.dtype) for meta in metas]
        self.num_results = num_results
        self.degrees = degrees
        self.steps: list[Step] = []
        self.cropped: list[Cropped] = []
        self.ended = ""
        """Why no other operation can follow; empty where one can."""
        self.making: Making | None = None
        self.join_or_split: Operation | None = None
        """What undoes the operation that joins or splits, once it was gone through."""
        self.back: list[list[Change]] = [[] for _ in metas]
        """What undoes the operations since then, for each tensor, in the order in which it undoes."""
        self.before: list[list[Change]] | None = None
        """What undoes those before it."""

    def change(self, changes: Sequence[Change | None]) -> None:
        """Change each tensor for itself."""
        fitted = [
            None if each is None else each.fitted(self.metas[at], self.named(at)) for at, each in enumerate(changes)
        ]
        # What changes nothing leaves no step, so that tensors stay the same nodes, and nothing has to be undone.
        if not any(fitted):
            return
        self.steps.append(Each(tuple([f and f.change for f in fitted]), tuple([f and f.back for f in fitted])))
        for at, found in enumerate(fitted):
            if found is not None:
                self.metas[at] = found.meta
                back = self.back[at]
                if back and type(back[0]) is type(found.back):
                    back[0] = found.back.then(back[0])
                else:
                    back.insert(0, found.back)

    def make(self, steps: Sequence[Step], metas: Sequence[TensorMeta], back: Operation) -> None:
        """Make other tensors, by the steps of an operation that joins or splits, which `back` undoes."""
        self.making = Making(len(self.steps), len(self.steps) + len(steps), tuple(self.metas), tuple(metas))
        self.steps += steps
        # What undoes the earlier operations is put aside for the tensors that were there. The new ones begin with
        # nothing to undo.
        self.join_or_split, self.before = back, self.back
        self.metas = list(metas)
        self.back = [[] for _ in metas]

    # What operations ask

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the first tensor."""
        return self.metas[0].shape

    def named(self, place: int) -> str:
        """A tensor as it is called in messages."""
        return tensor_at(place) if self.before is None else "the result"

    def axis(self, axis: int | None, *, new: bool = False) -> int:
        """The dim of the first tensor that is meant, counted from the front; `new`: a dim that it gets."""
        rank = len(self.shape) + new
        # AOA's default: the fused dim of weights that are stored (in, out).
        if axis is None:
            axis = 1 if rank > 1 else 0
        if not -rank <= axis < rank:
            dims = f"{rank} dims" if rank != 1 else "one dim"
            made = f" would have {dims} then" if new else f" has {dims}: {list(self.shape)}"
            raise OpsRefusal(f"there is no dim {axis} in {self.named(0)}, which{made}")
        return axis % rank

    def sizes(self, axis: int) -> tuple[int, ...]:
        """Of all tensors along a dim."""
        return tuple([meta.shape[axis] for meta in self.metas])

    def check_single(self, what: str) -> None:
        """Raise OpsRefusal for several tensors."""
        if len(self.metas) != 1:
            raise OpsRefusal(f"{what} parts one tensor, but there are {len(self.metas)}")

    def check_alike(self, axis: int | None) -> None:
        """Raise OpsRefusal unless all tensors have one dtype, and one shape but for a dim."""
        (first, dtype, *_), *others = self.metas
        # Tensors of different dtypes are not promoted here. The statement has to say the cast, or its inverse would not
        # know it.
        for place, (shape, other, *_) in enumerate(others, 1):
            same = len(shape) == len(first) and all(
                a == b for dim, (a, b) in enumerate(zip(shape, first, strict=True)) if dim != axis
            )
            if not same:
                besides = "" if axis is None else f" but for dim {axis}"
                raise OpsRefusal(
                    f"tensors that are joined have the same shape{besides}, but {tensor_at(0)} has {list(first)} "
                    f"and {tensor_at(place)} has {list(shape)}"
                )
            if other != dtype:
                raise OpsRefusal(
                    f"tensors that are joined have the same dtype, but {tensor_at(0)} has {dtype} and "
                    f"{tensor_at(place)} has {other}: cast one of them in a statement before"
                )
