"""Fused: tensors of which one has parts in turns: query, key and value, or gate and up.

`fused_qkv` takes turns group by group: the query heads of a group, its key head, its value head. `fused_qkv_old` and
`fused_ffn` do so rank by rank along `tp`, so that how it is laid out depends on their number, the degree.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final

from shardwise.rewrite.verbs.arrange import arrange, fuse, unfuse
from shardwise.rewrite.verbs.attributes import (
    Attribute,
    ReadArgument,
    StatementArguments,
    Verb,
    integer,
    listed,
)
from shardwise.rewrite.verbs.operation import Degrees, Operation, OpsRefusal, Work


@dataclass(frozen=True, slots=True)
class Fused(Operation):
    """One tensor is made of several, or several of one; or one of one, laid out for another degree."""

    word: str
    """Its attribute."""
    axis: int | None
    """None: 1, or 0 of a tensor with one dim."""
    sources: int
    """Left names. One is a fused tensor; several are not fused."""
    targets: int
    """Right names."""
    heads: tuple[int, int] | None = None
    """Of query, and of key and value each; None: these are gate and up."""
    source_degree: int | None = None
    """Of a fused left tensor; None: as its layout has it, else 1."""
    target_degree: int | None = None
    """The same of a fused right tensor."""
    sizes: tuple[int, ...] | None = None
    """Of query, key and value along the dim; None: what they have, and in a fused tensor those of heads of one size."""

    @property
    def is_per_rank(self) -> bool:
        """Whether ranks take turns, so that there are degrees."""
        return self.word != "fused_qkv"

    @property
    def degrees(self) -> Degrees:
        """Of the left, and of the right."""
        return self.source_degree, self.target_degree

    def written(self) -> Iterator[str]:
        yield self.word
        values = dict(zip(_HEADS, self.heads or (None, None), strict=True))
        values |= {"axis": self.axis, "src_tp": self.source_degree, "dst_tp": self.target_degree}
        yield from (f"{word}={value}" for word, value in values.items() if value is not None)
        if self.sizes is not None:
            yield f"sizes={listed(self.sizes)}"

    def undone(self) -> "Fused":
        source, target = self.degrees
        return replace(self, sources=self.targets, targets=self.sources, source_degree=target, target_degree=source)

    def take(self, work: Work) -> None:
        axis = work.axis(self.axis)
        work.check_alike(axis)
        sizes = self._sizes_of_gate_and_up(work, axis) if self.heads is None else self._sizes_of_heads(work, axis)
        # Three tensors on a side are not fused, and have no degree. Groups are not ranks.
        known = [n == 1 and self.is_per_rank for n in (self.sources, self.targets)]
        left, right = (degree if is_known else None for degree, is_known in zip(work.degrees, known, strict=True))
        self._check_degree(left, axis, sizes, "left", "src_tp")
        self._check_degree(right, axis, sizes, "right", "dst_tp")
        # The inverse says the axis and, where they are not the obvious ones, the sizes: it shall not depend on
        # defaults.
        unlike = None if self.heads is None or _by_heads(sum(sizes), *self.heads) == sizes else sizes
        back = replace(self, axis=axis, source_degree=left, target_degree=right, sizes=unlike).undone()
        # From one degree to the same nothing moves. Still the inverse names the operation: an open side may have a
        # layout on the way back, and then elements do move; a degree that is said tells those of other statements.
        if self.sources == self.targets and (left or 1) == (right or 1):
            work.make([], work.metas, back)
            return
        # Between two degrees the way is through the unfused tensors: there are two ways to and from them, and not one
        # for each pair of degrees.
        groups = 1 if self.is_per_rank or self.heads is None else self.heads[1]
        steps = [unfuse(axis, sizes, left or groups)] if self.sources == 1 else []
        steps += [fuse(axis, sizes, right or groups)] if self.targets == 1 else []
        arrange(work, steps, back)

    def _check_degree(self, degree: int | None, axis: int, sizes: tuple[int, ...], side: str, attribute: str) -> None:
        """Raise OpsRefusal where what is fused cannot be laid out for so many ranks."""
        # None says that nothing tells a degree, and 1 is meant.
        if degree is None:
            return
        # 0: a layout cuts the tensor, and FSDP may have done so as well as tensor parallelism. To guess would be to
        # shuffle rows silently.
        if not degree:
            raise OpsRefusal(
                f"the {side} tensor is cut along dim {axis} by its layout, which has no number of ranks for the "
                f"fusing. Write {attribute}= with the tensor-parallel degree, or {attribute}=1 if data parallelism "
                "cuts it"
            )
        what = f"the {side} tensor is fused for tensor-parallel degree {degree}"
        if self.heads is not None and any(each % degree for each in self.heads):
            named = " and ".join(f"{word}={each}" for word, each in zip(_HEADS, self.heads, strict=True))
            raise OpsRefusal(f"{what}, which does not divide {named}")
        if self.heads is None and sizes[0] % degree:
            each = f"of size {sizes[0]} each, {sum(sizes)} together, along dim {axis}"
            raise OpsRefusal(f"{what}. It does not divide gate and up {each}")

    def _sizes_of_gate_and_up(self, work: Work, axis: int) -> tuple[int, ...]:
        """Along the axis, whether they are fused or not."""
        gate, *up = work.sizes(axis)
        if not up and gate % 2:
            raise OpsRefusal(
                f"{work.named(0)} has size {gate} along dim {axis}, which is not divisible into gate and up: check "
                f"axis="
            )
        if up and gate != up[0]:
            raise OpsRefusal(f"gate and up have the same size, but along dim {axis} they have {gate} and {up[0]}")
        return (gate, gate) if up else (gate // 2, gate // 2)

    def _sizes_of_heads(self, work: Work, axis: int) -> tuple[int, ...]:
        """Of query, key and value along the axis, whether they are fused or not."""
        assert self.heads is not None, "gate and up have none"
        num_heads, num_groups = self.heads
        # One size: a fused tensor is there. Three: query, key and value are.
        there = work.sizes(axis)
        by_size = _by_heads(sum(there), num_heads, num_groups)
        if len(there) == 1 and self.sizes is None:
            if by_size is None:
                raise OpsRefusal(
                    f"{work.named(0)} has size {there[0]} along dim {axis}, which its {num_heads} query heads and "
                    f"twice {num_groups} key-value heads do not divide. Check axis=, num_heads= and "
                    "num_key_value_groups=, or give the sizes of query, key and value by sizes='[..]'"
                )
            return by_size
        sizes = there if self.sizes is None else self.sizes
        if sizes != there and (sum(sizes),) != there:
            raise OpsRefusal(f"sizes says {list(sizes)} along dim {axis}, but there is {' and '.join(map(str, there))}")
        wrong = _fault_of_heads(sizes, num_heads, num_groups)
        if wrong is not None:
            raise OpsRefusal(f"along dim {axis}, {wrong}")
        # Multi-head latent attention has value heads of their own size. Fused without `sizes`, such a tensor would part
        # into heads of one size on the way back, without an error and wrongly.
        if self.sizes is None and by_size not in (None, sizes):
            raise OpsRefusal(
                f"along dim {axis}, value heads have another size than key heads, and the fused tensor could also "
                f"consist of heads of one size. Write sizes='{list(sizes)}', so that it can be split again"
            )
        return sizes


def _by_heads(size: int, num_heads: int, num_groups: int) -> tuple[int, int, int] | None:
    """The sizes of query, key and value in a fused tensor of heads of one size; None where these do not divide it."""
    heads = num_heads + 2 * num_groups
    if size % heads:
        return None
    head = size // heads
    return num_heads * head, num_groups * head, num_groups * head


def _fault_of_heads(sizes: tuple[int, ...], num_heads: int, num_groups: int) -> str | None:
    """Say why query, key and value of these sizes do not consist of so many heads; None where they do.

    Query and key have heads of one size; those of value may have another.
    """
    query, key, value = sizes
    for what, size, heads in (("query", query, num_heads), ("key", key, num_groups), ("value", value, num_groups)):
        if size % heads:
            return f"the {what} has {size}, which {heads} heads do not divide"
    if query // num_heads != key // num_groups:
        return (
            f"query heads have size {query // num_heads}, key heads {key // num_groups}, and they must be equal; check "
            f"num_heads={num_heads}, num_key_value_groups={num_groups}"
        )
    return None


# Its text

_FORMS: Final[Mapping[str, Mapping[tuple[int, int], str]]] = {
    "fused_qkv": {(3, 1): "'q, k, v -> qkv'", (1, 3): "'qkv -> q, k, v'"},
    "fused_qkv_old": {(3, 1): "'q, k, v -> qkv'", (1, 3): "'qkv -> q, k, v'", (1, 1): "'qkv -> qkv'"},
    "fused_ffn": {(2, 1): "'gate, up -> fused'", (1, 2): "'fused -> gate, up'", (1, 1): "'fused -> fused'"},
}
"""By how many names stand on the left and on the right: these decide the direction, for there is no word for parting.
"""

_HEADS: Final[Mapping[str, str]] = {
    "num_heads": "the number of query heads",
    "num_key_value_groups": "the number of key-value heads",
}


def _read(fused: ReadArgument, arguments: StatementArguments) -> Fused | None:
    names, forms = arguments.names, _FORMS[fused.word]
    *most, last = forms.values()
    listed_forms = f"{', '.join(most)} or {last}"
    # A star does not say how many names it stands for, and a fused operation takes three or two.
    if names.stars:
        what = f"needs its tensors one by one, as in {listed_forms}; a star stands for any number"
        arguments.find(fused, f"{fused.word} {what}")
        return None
    if names.counts not in forms:
        arguments.find(fused, f"{fused.word} is for {listed_forms}; here are {names.amount}")
        return None
    left, right = names.counts
    degrees = _degree("src_tp", left, "left", arguments), _degree("dst_tp", right, "right", arguments)
    if fused.word == "fused_ffn":
        return Fused(fused.word, arguments.integer("axis"), left, right, None, *degrees)
    heads = _heads(fused, arguments)
    if heads is None:
        return None
    return Fused(fused.word, arguments.integer("axis"), left, right, heads, *degrees, _sizes_of_three(arguments))


def _sizes_of_three(arguments: StatementArguments) -> tuple[int, ...] | None:
    """The sizes of query, key and value, where they are arguments."""
    given = arguments.once.get("sizes")
    if given is None or given.value is None:
        return None
    if given.integers is None or len(given.integers) != 3:
        arguments.find(given, f"{given.shown} is not three sizes; give those of query, key and value")
        return None
    return given.integers


def _degree(word: str, count: int, side: str, arguments: StatementArguments) -> int | None:
    """The degree of the fused tensor of one side, which is fused where it is one."""
    if word in arguments.once and count > 1:
        what = f"the degree of a fused tensor on the {side}, where {count} tensors stand that are not fused"
        arguments.find(arguments.once[word], f"{arguments.once[word].shown} is {what}; leave it out")
    return arguments.integer(word)


def _heads(fused: ReadArgument, arguments: StatementArguments) -> tuple[int, int] | None:
    missing = [word for word in _HEADS if word not in arguments.once]
    for word in missing:
        arguments.find(fused, f"{fused.word} needs {word}=..., {_HEADS[word]}")
    heads, groups = (arguments.integer(word) for word in _HEADS)
    if heads is None or groups is None:
        return None
    # Each key-value head serves equally many query heads: that is what a group is.
    if heads % groups:
        what = f"{heads} query heads cannot be shared evenly among {groups} key-value heads"
        arguments.find(arguments.once["num_heads"], f"{what}; num_heads is a multiple of num_key_value_groups")
        return None
    return heads, groups


_COUNT = integer(lambda number: "at least 1" if number < 1 else "")

FUSED = Verb(
    (
        *(Attribute(word) for word in _FORMS),
        Attribute("num_heads=32", _COUNT, owners=("fused_qkv", "fused_qkv_old")),
        Attribute("num_key_value_groups=8", _COUNT, owners=("fused_qkv", "fused_qkv_old")),
        Attribute("src_tp=2", _COUNT, owners=("fused_qkv_old", "fused_ffn")),
        Attribute("dst_tp=2", _COUNT, owners=("fused_qkv_old", "fused_ffn")),
    ),
    tuple(_FORMS),
    _read,
    makes=True,
    at_axis=True,
)
