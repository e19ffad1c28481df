"""Which features have to be on one rank: atoms, what ties them together, and what each tensor of a forward has of them.

Every output of a linear map is an atom: a number that stands for one feature. A tensor computed from atoms has a number
for each of its elements, of the same shape. Dims along which all elements have one number have stride 0, so a batch of
tokens costs as much as one. What a computation brings together from several atoms ties them: they are one group, and
live on one rank.

    query   h0d0 h0d1 | h1d0 h1d1        scores of head 0 sum over d:  h0d0 - h0d1, with those of key: one group
    key     h0d0 h0d1 | h1d0 h1d1        scores of head 1:             another

Atom 0 is all ranks: what is tied to it is whole everywhere, and nothing of its group is cut.

`TensorFlow` keeps the atoms of each tensor, where its gradient goes, and along which dims a whole tensor is
alike. A rank with a part of something reads the same elements of a whole value as the other ranks do. So a dim along
which the whole value differs cannot be cut in what it meets. Where gradients go back from it to activations, each rank
would send its own, and what meets it is whole.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.engine.torch_private import schema_of, version_of

WHOLE = 0
"""The atom of what every rank has."""


@dataclass(slots=True)
class _Tie:
    """A place where atoms were tied, kept for the reasons in messages."""

    why: str
    numbers: torch.Tensor
    is_forbidding: bool = False
    is_expected: bool = False
    """Products of matrices tie what is in a head anyway: no reason why heads are one group."""


@dataclass(slots=True)
class Atoms:
    """All atoms of one forward, and their ties."""

    count: int = 1
    _pairs: list[torch.Tensor] = field(default_factory=list)
    """Tied since the groups were computed last."""
    _groups: torch.Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    _ties: list[_Tie] = field(default_factory=list)

    def fresh(self, count: int) -> torch.Tensor:
        """So many new atoms."""
        numbers = torch.arange(self.count, self.count + count, dtype=torch.int64)
        self.count += count
        return numbers

    def tie(self, one: torch.Tensor, other: torch.Tensor, why: str = "") -> None:
        """Element by element, the atoms of two tensors of one shape are one group."""
        # One element of a dim says it all where neither has other numbers along it: pairs are counted in features, not
        # in features times tokens.
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
        """All atoms along a dim are one group."""
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
        # Union-find on whole tensors: each pair of groups that differ is joined at the smaller number, then every atom
        # goes to the root of its group. Pairs that agree drop out; a loop in Python over pairs would take minutes for a
        # model.
        #
        #     atoms 1 2 3 4   pairs 1-2 3-4 2-3     groups 1 1 2 3 -> 1 1 1 1 by the inner loop
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
                # Negative keys, per atom: every whole feature is in group 0, and each has its own reason to be there.
                whole.setdefault(-atom, tie.why)
            found_here = torch.unique(of, return_counts=True)
            for group, count in zip(*(each.tolist() for each in found_here), strict=True):
                weight = (not tie.is_expected, count)
                # The tie over most atoms says most; what products tie is said only where there is nothing else.
                if group != WHOLE and (group not in found or weight > found[group][0]):
                    found[group] = (weight, tie.why)
        return {group: why for group, (_, why) in found.items()} | whole


def varies(numbers: torch.Tensor, dim: int) -> bool:
    """Whether the numbers differ along a dim."""
    # Stride 0 answers without looking at elements, and most dims have it.
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


_LARGEST_BARE = 1 << 20
"""Elements of a bare parameter that is followed. Larger ones are whole, since each element is an atom of 8 bytes."""

_CONSTANT, _OF_PARAMETERS, _OF_ACTIVATIONS = range(3)
"""Where the gradient of a value goes: nowhere, to parameters alone, to what modules gave."""


@dataclass(frozen=True, slots=True)
class TracedOperation:
    """One call of an operation of torch."""

    func: Any
    name: str
    """Without namespace and overload: `add_`."""
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    given: Sequence[torch.Tensor]
    output: Any
    made: Sequence[torch.Tensor]

    @property
    def is_writing(self) -> bool:
        """Whether it writes into the first tensor that it is given."""
        return bool(schema_of(self.func).is_mutable)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name; `default`: for operations that have none of this name."""
        for at, each in enumerate(schema_of(self.func).arguments):
            if each.name == name:
                return self.kwargs.get(name, self.args[at] if at < len(self.args) else each.default_value)
        return default


class TensorFlow:
    """The atoms, gradients and alike dims of the tensors of one forward."""

    def __init__(self, atoms: Atoms, parameters: Mapping[int, str], followed: Iterable[str]) -> None:
        """parameters: id of each -> the module that holds it. followed: modules that are seen from the outside only."""
        self.atoms = atoms
        self.paused = 0
        self.where: list[str] = []
        """Names of the modules that run, from the outside in."""
        self.read_outside: set[str] = set()
        """Followed modules with a parameter that others read."""
        self.bare: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        """Other parameters that were read, with an atom for each element."""
        self._parameters = parameters
        self._followed = frozenset(followed)
        # By identity and weakly: tensors of a forward die, and Python gives their ids to others.
        self.numbers: Any = WeakIdKeyDictionary()
        """The atoms of each tensor that is not whole on every rank."""
        self._alike: Any = WeakIdKeyDictionary()
        """Of whole tensors: numbers that are alike along the dims along which they are; with the version."""
        self._levels: Any = WeakIdKeyDictionary()

    # What tensors have --------------------------------------------------------------------------------------------

    def cut(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that have atoms."""
        return [each for each in tensors if each in self.numbers]

    def give(self, tensor: torch.Tensor, numbers: torch.Tensor | None) -> None:
        """Say what a followed module gives."""
        if numbers is not None:
            self.numbers[tensor] = numbers
        if tensor.is_floating_point():
            self._levels[tensor] = _OF_ACTIVATIONS

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether it is one, or is made of parameters alone."""
        return bool(self._levels.get(tensor) == _OF_PARAMETERS)

    def is_activation(self, tensor: torch.Tensor) -> bool:
        """Whether its gradient goes to what modules gave."""
        return bool(self._levels.get(tensor) == _OF_ACTIVATIONS)

    def alike(self, whole: torch.Tensor) -> torch.Tensor | None:
        """Numbers that are alike along the dims along which a whole tensor is known to be."""
        numbers, version = self._alike.get(whole, (None, 0))
        if numbers is not None and version == version_of(whole):  # views count the writes to their base
            found: torch.Tensor = numbers
            return found
        # A mask that is built as (1, 1, tokens, tokens) and expanded over heads is alike along the heads, whatever its
        # values are. A tensor of full size is taken for different everywhere.
        if whole.layout != torch.strided or all(whole.stride()):
            return None
        sizes = [size if stride else 1 for size, stride in zip(whole.shape, whole.stride(), strict=True)]
        return torch.arange(math.prod(sizes)).view(sizes).expand(whole.shape)

    def set_alike(self, whole: torch.Tensor, numbers: torch.Tensor) -> None:
        """Say along which dims a whole tensor is alike."""
        self._alike[whole] = numbers, version_of(whole)

    def differs(self, whole: torch.Tensor, dim: int) -> bool:
        """Whether a whole value may differ along a dim."""
        return whole.shape[dim] > 1 and ((alike := self.alike(whole)) is None or varies(alike, dim))

    # What ties ----------------------------------------------------------------------------------------------------

    def why(self, what: str) -> str:
        """`what`, and where."""
        return f"{what} in {self.where[-1] or 'the model itself'!r}" if self.where else what

    def along(self, numbers: torch.Tensor, dim: int, what: str, *, is_product: bool = False) -> None:
        """All atoms along a dim are one group."""
        self.atoms.tie_along(numbers, dim, self.why(f"{what} over dim {dim}"), is_expected=is_product)

    def forbid(self, numbers: torch.Tensor, what: str) -> None:
        """These are whole on every rank."""
        self.atoms.forbid(numbers, self.why(what))

    def meet(self, name: str, whole: torch.Tensor, numbers: torch.Tensor, dims: Iterable[int] | None = None) -> None:
        """A whole value meets what is cut. dims: of both, from the last (-1); None: all of the whole value."""
        # rank 0: part * w, rank 1: part * w. Backward gives w the sum over this rank's part only, and nothing adds
        # the two: no rule puts a `copy_to_ranks` in the middle of a forward.
        if self.is_activation(whole):
            self.forbid(numbers, f"'{name}' with a whole value that has a gradient")
            return
        for dim in range(-whole.dim(), 0) if dims is None else dims:
            if self.differs(whole, whole.dim() + dim):
                if numbers.dim() < -dim:
                    self.forbid(numbers, f"'{name}' with a whole value")
                    return
                self.along(numbers, numbers.dim() + dim, f"'{name}' with a whole value")

    # Parameters and gradients -------------------------------------------------------------------------------------

    def read(self, parameter: torch.Tensor) -> None:
        """A parameter, or another tensor, is read by an operation outside of followed modules."""
        if (module := self._parameters.get(id(parameter))) is None:
            return
        self._levels.setdefault(parameter, _OF_PARAMETERS)
        if module in self._followed:
            self.read_outside.add(module)
        # A single number scales all features alike, on every rank.
        elif parameter not in self.numbers and 1 < parameter.numel() <= _LARGEST_BARE:
            assert isinstance(parameter, nn.Parameter)
            numbers = self.atoms.fresh(parameter.numel()).view(parameter.shape)
            self.numbers[parameter] = numbers
            self.bare[id(parameter)] = parameter, numbers

    def set_levels(self, operation: TracedOperation) -> None:
        """Say where the gradients of what an operation makes go."""
        level = max((self._levels.get(each, _CONSTANT) for each in operation.given), default=_CONSTANT)
        for each in operation.made:
            if operation.name != "detach" and level and each.is_floating_point():
                self._levels[each] = level
