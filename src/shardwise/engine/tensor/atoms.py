"""Which features have to be on one rank: atoms, and what ties them together.

Every output of a linear map is an atom: a number that stands for one feature. A tensor computed from atoms has a number
for each of its elements, of the same shape (strides of 0 along dims that all have alike, so that it costs nothing).
What a computation brings together from several atoms ties them: they are one group, and live on one rank.

    query   h0d0 h0d1 | h1d0 h1d1        scores of head 0 sum over d:  h0d0 - h0d1, with those of key: one group
    key     h0d0 h0d1 | h1d0 h1d1        scores of head 1:             another

Atom 0 is all ranks: what is tied to it is whole everywhere, and nothing of its group is cut.
"""

from dataclasses import dataclass, field

import torch

WHOLE = 0
"""The atom of what every rank has."""


@dataclass(slots=True)
class _Tie:
    """A place where atoms were tied, for the reasons that are said of it."""

    why: str
    numbers: torch.Tensor
    is_forbidding: bool = False
    is_expected: bool = False
    """As of products of matrices, which tie what is in a head: not what makes heads one."""


@dataclass(slots=True)
class Atoms:
    """All atoms of one forward, and their ties."""

    count: int = 1
    _pairs: list[torch.Tensor] = field(default_factory=list)
    """Tied since groups were last asked for."""
    _groups: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    _ties: list[_Tie] = field(default_factory=list)

    def fresh(self, count: int) -> torch.Tensor:
        """So many new atoms."""
        numbers = torch.arange(self.count, self.count + count, dtype=torch.int64)
        self.count += count
        return numbers

    def tie(self, one: torch.Tensor, other: torch.Tensor, why: str = "") -> None:
        """Element by element, the atoms of two tensors of one shape are one group."""
        dims = [dim for dim in range(one.dim()) if not (one.stride(dim) or other.stride(dim))]
        for dim in dims:
            one, other = one.narrow(dim, 0, min(1, one.shape[dim])), other.narrow(dim, 0, min(1, one.shape[dim]))
        pairs = torch.stack([one.reshape(-1), other.reshape(-1)])
        pairs = pairs[:, pairs[0] != pairs[1]]
        if pairs.numel():
            self._pairs.append(torch.unique(pairs, dim=1) if pairs.shape[1] > 1 else pairs)
        if why:
            self._ties.append(_Tie(why, one))

    def tie_along(self, numbers: torch.Tensor, dim: int, why: str, *, is_expected: bool = False) -> None:
        """All that lies along a dim is one group."""
        if varies(numbers, dim):
            first = numbers.narrow(dim, 0, 1)
            self.tie(numbers, first.expand_as(numbers))
            self._ties.append(_Tie(why, numbers, is_expected=is_expected))

    def forbid(self, numbers: torch.Tensor, why: str) -> None:
        """These are whole on every rank."""
        self.tie(numbers, torch.zeros((), dtype=torch.int64).expand_as(numbers))
        self._ties.append(_Tie(why, numbers, is_forbidding=True))

    def groups(self) -> torch.Tensor:
        """The group of each atom: the smallest atom in it."""
        groups = torch.cat([self._groups, torch.arange(len(self._groups), self.count, dtype=torch.int64)])
        pairs, self._pairs = self._pairs, []
        one, other = torch.cat(pairs, dim=1) if pairs else (groups[:0], groups[:0])
        while one.numel():
            low, high = torch.minimum(groups[one], groups[other]), torch.maximum(groups[one], groups[other])
            apart = low != high
            one, other = one[apart], other[apart]
            groups.scatter_reduce_(0, high[apart], low[apart], "amin")
            while not torch.equal(further := groups[groups], groups):
                groups = further
        self._groups = groups
        return groups

    def reasons(self, groups: torch.Tensor) -> dict[int, str]:
        """What tied most of each group together, by the group; of what is whole, by each of its atoms."""
        found: dict[int, tuple[tuple[bool, int], str]] = {}
        whole: dict[int, str] = {}
        for tie in self._ties:
            members = torch.unique(tie.numbers)
            of = groups[members]
            for atom in members[of == WHOLE].tolist() if tie.is_forbidding else ():
                whole.setdefault(-atom, tie.why)
            for group, count in zip(*_counted(of), strict=True):
                weight = (not tie.is_expected, count)
                if group != WHOLE and (group not in found or weight > found[group][0]):
                    found[group] = (weight, tie.why)
        return {group: why for group, (_, why) in found.items()} | whole


def _counted(groups: torch.Tensor) -> tuple[list[int], list[int]]:
    values, counts = torch.unique(groups, return_counts=True)
    return values.tolist(), counts.tolist()


def varies(numbers: torch.Tensor, dim: int) -> bool:
    """Whether the numbers differ along a dim."""
    if numbers.shape[dim] < 2 or numbers.stride(dim) == 0:
        return False
    return not torch.equal(numbers, numbers.narrow(dim, 0, 1).expand_as(numbers))


def slim(numbers: torch.Tensor) -> torch.Tensor:
    """The same numbers with a stride of 0 along dims in which they are alike, holding no more than they need."""
    shape = numbers.shape
    if not numbers.numel():
        return numbers
    for dim in range(numbers.dim()):
        if numbers.stride(dim) and not varies(numbers, dim):
            numbers = numbers.narrow(dim, 0, 1)
    for dim, size in enumerate(shape):
        if numbers.shape[dim] == size and numbers.stride(dim) == 0:
            numbers = numbers.narrow(dim, 0, 1)
    return numbers.contiguous().expand(shape)
