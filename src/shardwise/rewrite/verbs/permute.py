"""Permute: the dims of each tensor in another order."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shardwise.rewrite.metas import TensorMeta
from shardwise.rewrite.strided_views import ViewedTensor
from shardwise.rewrite.verbs.attributes import Attribute, ReadArgument, StatementArguments, Verb, integers, listed
from shardwise.rewrite.verbs.operation import Change, Fitted, OpsRefusal


@dataclass(frozen=True, slots=True)
class Permute(Change):
    """Dim i of the result is dim `dims[i]` of the tensor; None reverses all dims."""

    dims: tuple[int, ...] | None

    def written(self) -> Iterator[str]:
        yield f"permute={listed(self.dims or ())}"

    def undone(self) -> "Permute":
        return self if self.dims is None else Permute(inverted(self.dims))

    def fitted(self, meta: TensorMeta, name: str) -> Fitted | None:
        rank = len(meta.shape)
        dims = tuple(range(rank))[::-1] if self.dims is None else self.dims
        if len(dims) != rank:
            raise OpsRefusal(f"permute {list(dims)} is for {len(dims)} dims, but {name} has {rank}: {list(meta.shape)}")
        shape = tuple([meta.shape[dim] for dim in dims])
        same = dims == tuple(range(rank))
        return None if same else Fitted(Permute(dims), Permute(inverted(dims)), meta._replace(shape=shape))

    def changed(self, value: ViewedTensor) -> ViewedTensor:
        assert self.dims is not None, "it was fitted"
        return value.permute(self.dims)

    def then(self, other: Change) -> Change:
        assert isinstance(other, Permute), "of its kind"
        assert self.dims is not None, "it was fitted"
        return Permute(tuple([self.dims[dim] for dim in other.dims or ()]))


def inverted(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the dims that permute back."""
    return tuple(sorted(range(len(dims)), key=dims.__getitem__))


def _fault(dims: tuple[int, ...]) -> str:
    wanted = ", ".join(map(str, range(len(dims))))
    is_order = sorted(dims) == list(range(len(dims)))
    return "" if is_order else f"no permutation; {len(dims)} dims are {wanted}, each once, and '[]' reverses all"


def _read(permute: ReadArgument, arguments: StatementArguments) -> Permute | None:
    return None if permute.integers is None else Permute(permute.integers or None)


PERMUTE = Verb((Attribute("permute='[1,0]'", integers(_fault), repeatable=True),), ("permute",), _read)
