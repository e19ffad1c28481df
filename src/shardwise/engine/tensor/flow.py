"""Follows atoms through the operations of a forward.

Beside its atoms, each tensor has what its gradient goes to, and, where it is whole, along which dims it is alike. A
rank that has a part of something reads the same elements of a whole value as the other ranks do. So a dim along which
the whole value differs cannot be cut in what it meets; and where gradients go back from it to activations, each rank
would send its own, so that what meets it is whole.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.engine.tensor.atoms import Atoms, varies

_LARGEST_BARE = 1 << 20
"""Elements of a bare parameter that is followed element by element; larger ones are whole."""

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
        return bool(self.func._schema.is_mutable)

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name; `default`: for operations that have none of this name."""
        for at, each in enumerate(self.func._schema.arguments):
            if each.name == name:
                return self.kwargs.get(name, self.args[at] if at < len(self.args) else each.default_value)
        return default


class TensorFlow:
    """What the tensors of a forward have."""

    def __init__(self, atoms: Atoms, parameters: Mapping[int, str], followed: Iterable[str]) -> None:
        """parameters: id of each -> the module that holds it. followed: modules of which only what they read and give
        counts."""
        self.atoms = atoms
        self.paused = 0
        self.where: list[str] = []
        """Names of the modules that run, from the outside in."""
        self.read_outside: set[str] = set()
        """Followed modules of which a parameter is read by others."""
        self.bare: dict[int, tuple[nn.Parameter, torch.Tensor]] = {}
        """Other parameters that were read, with an atom for each element."""
        self._parameters = parameters
        self._followed = frozenset(followed)
        self._numbers: Any = WeakIdKeyDictionary()
        self._alike: Any = WeakIdKeyDictionary()
        self._levels: Any = WeakIdKeyDictionary()

    # What tensors have --------------------------------------------------------------------------------------------

    def numbers(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The atoms of a tensor; None where it is whole on every rank."""
        found: torch.Tensor | None = self._numbers.get(tensor)
        return found

    def atoms_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The atoms of a tensor that has some."""
        found: torch.Tensor = self._numbers[tensor]
        return found

    def cut(self, tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        """Those that have atoms."""
        return [each for each in tensors if each in self._numbers]

    def set(self, tensor: torch.Tensor, numbers: torch.Tensor) -> None:
        """Give a tensor atoms."""
        self._numbers[tensor] = numbers

    def give(self, tensor: torch.Tensor, numbers: torch.Tensor | None) -> None:
        """Say what a followed module gives."""
        if numbers is not None:
            self._numbers[tensor] = numbers
        if tensor.is_floating_point():
            self._levels[tensor] = _OF_ACTIVATIONS

    def is_parameter(self, tensor: torch.Tensor) -> bool:
        """Whether it is one, or is made of parameters alone."""
        return bool(self._levels.get(tensor) == _OF_PARAMETERS)

    def is_activation(self, tensor: torch.Tensor) -> bool:
        """Whether its gradient goes to what modules gave."""
        return bool(self._levels.get(tensor) == _OF_ACTIVATIONS)

    def differs(self, whole: torch.Tensor, dim: int) -> bool:
        """Whether a whole value may differ along a dim."""
        if whole.shape[dim] < 2:
            return False
        alike = self._alike.get(whole)
        return alike is None or varies(alike, dim)

    # What ties ----------------------------------------------------------------------------------------------------

    def why(self, what: str) -> str:
        """`what`, and where."""
        return f"{what} in {self.where[-1] or 'the model itself'!r}" if self.where else what

    def along(self, numbers: torch.Tensor, dim: int, what: str, *, is_product: bool = False) -> None:
        """All that lies along a dim is one group."""
        self.atoms.tie_along(numbers, dim, self.why(f"{what} over dim {dim}"), is_expected=is_product)

    def forbid(self, numbers: torch.Tensor, what: str) -> None:
        """These are whole on every rank."""
        self.atoms.forbid(numbers, self.why(what))

    def meet(self, name: str, whole: torch.Tensor, numbers: torch.Tensor, dims: Iterable[int] | None = None) -> None:
        """A whole value meets what is cut. dims: of both, from the last (-1); None: all of the whole value."""
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
        elif parameter not in self._numbers and 1 < parameter.numel() <= _LARGEST_BARE:
            assert isinstance(parameter, nn.Parameter)
            numbers = self.atoms.fresh(parameter.numel()).view(parameter.shape)
            self._numbers[parameter] = numbers
            self.bare[id(parameter)] = parameter, numbers

    def set_levels(self, operation: TracedOperation) -> None:
        """Say where the gradients of what an operation makes go."""
        level = max((self._levels.get(each, _CONSTANT) for each in operation.given), default=_CONSTANT)
        for each in operation.made:
            if operation.name != "detach" and level and each.is_floating_point():
                self._levels[each] = level

    # Whole values -------------------------------------------------------------------------------------------------

    def alike(self, whole: torch.Tensor) -> torch.Tensor | None:
        """Numbers that are alike along the dims along which a whole tensor is known to be."""
        found: torch.Tensor | None = self._alike.get(whole)
        return found

    def set_alike(self, whole: torch.Tensor, numbers: torch.Tensor) -> None:
        """Say along which dims a whole tensor is alike."""
        self._alike[whole] = numbers

    def forget_alike(self, written: Sequence[torch.Tensor]) -> None:
        """Elements of these were written, and so those of what shares storage with them."""
        storages = {each.untyped_storage()._cdata for each in written}
        for each in [each for each in self._alike if each.untyped_storage()._cdata in storages]:
            del self._alike[each]
