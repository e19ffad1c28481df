"""Reshape: the same elements in another shape."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.attributes import Attribute, ReadArgument, StatementArguments, Verb, integers, listed
from shardwise.rewrite.verbs.operation import Change, Fitted, OpsRefusal, unknown


@dataclass(frozen=True, slots=True)
class Reshape(Change):
    """The same row-major elements in another shape; one size may be -1. None: as recorded (only in inverses)."""

    shape: tuple[int, ...] | None

    def written(self) -> Iterator[str]:
        yield f"reshape={listed(self.shape)}"

    def undone(self) -> "Reshape":
        return Reshape(None)

    def fitted(self, meta: TensorMeta, name: str) -> Fitted | None:
        if self.shape is None:
            raise unknown(f"the shape of {name} before the reshape is", "reshape='[..]'")
        elements, known = prod(meta.shape), prod(size for size in self.shape if size != -1)
        # With a size of 0 beside it, -1 could be any number: it is refused rather than guessed.
        fits = elements == known if -1 not in self.shape else known != 0 and elements % known == 0
        if not fits:
            raise OpsRefusal(
                f"{name} has {elements} elements {list(meta.shape)}, which do not make up {list(self.shape)}"
            )
        shape = tuple([elements // known if size == -1 else size for size in self.shape])
        same = shape == meta.shape
        return None if same else Fitted(Reshape(shape), Reshape(meta.shape), meta._replace(shape=shape))

    def changed(self, value: ViewedTensor) -> ViewedTensor:
        assert self.shape is not None, "it was fitted"
        return value.reshape(self.shape)


def _fault(shape: tuple[int, ...]) -> str:
    if shape.count(-1) > 1:
        return "only one size can be -1, the rest"
    return "sizes are not negative, but for one -1" if min(shape, default=0) < -1 else ""


def _read(reshape: ReadArgument, arguments: StatementArguments) -> Reshape | None:
    return None if reshape.value is None else Reshape(reshape.integers)


RESHAPE = Verb(
    (Attribute("reshape='[4,-1]'", integers(_fault), recordable=True, repeatable=True),), ("reshape",), _read
)
