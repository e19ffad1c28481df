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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from shardwise.engine.tensor.atoms import Atoms, varies

_LARGEST_BARE = 1 << 20
"""Elements of a bare parameter that is followed element by element; larger ones are whole."""

_CONSTANT, _OF_PARAMETERS, _OF_ACTIVATIONS = range(3)
"""Where the gradient of a value goes: nowhere, to parameters alone, to what modules gave."""

CONSTANTS = frozenset({"zeros", "ones", "full", "scalar_tensor", "new_zeros", "new_ones", "new_full"})
"""Operations that give tensors with all elements alike."""


@dataclass(frozen=True, slots=True)
class Operation:
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


class Flow(TorchDispatchMode):
    """The mode under which a forward runs, without gradients."""

    def __init__(self, atoms: Atoms, parameters: Mapping[int, str], followed: Iterable[str]) -> None:
        """parameters: id of each -> the module that holds it. followed: modules of which only what they read and give
        counts."""
        super().__init__()  # type: ignore[no-untyped-call]
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

    # Operations ---------------------------------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        given = _tensors_in((args, kwargs))
        for each in given:
            if id(each) in self._parameters:
                self._read(each)
        output = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        operation = Operation(func, name, args, kwargs, given, output, _tensors_in(output))
        self._set_levels(operation)
        if self.cut(given):
            self._follow(operation)
        else:
            self._follow_whole(operation)
        return output

    def _follow(self, operation: Operation) -> None:
        # What is done is known by the operations; they are told of this mode, which they change.
        from shardwise.engine.tensor.operations import follow

        if any(each.numel() for each in operation.made):
            follow(self, operation)

    def _read(self, parameter: torch.Tensor) -> None:
        """A parameter is read by an operation outside of followed modules."""
        module = self._parameters[id(parameter)]
        self._levels.setdefault(parameter, _OF_PARAMETERS)
        if module in self._followed:
            self.read_outside.add(module)
        elif parameter not in self._numbers and 1 < parameter.numel() <= _LARGEST_BARE:
            assert isinstance(parameter, nn.Parameter)
            numbers = self.atoms.fresh(parameter.numel()).view(parameter.shape)
            self._numbers[parameter] = numbers
            self.bare[id(parameter)] = parameter, numbers

    def _set_levels(self, operation: Operation) -> None:
        level = max((self._levels.get(each, _CONSTANT) for each in operation.given), default=_CONSTANT)
        for each in operation.made:
            if operation.name != "detach" and level and each.is_floating_point():
                self._levels[each] = level

    def _follow_whole(self, operation: Operation) -> None:
        """Keep what is known of dims along which a whole tensor is alike."""
        name, given, made = operation.name, operation.given, operation.made
        if operation.is_writing:
            written = {each.untyped_storage()._cdata for each in made}
            for each in [each for each in self._alike if each.untyped_storage()._cdata in written]:
                del self._alike[each]
        elif name in CONSTANTS:
            for each in made:
                self._alike[each] = torch.zeros((), dtype=torch.int64).expand(each.shape)
        elif name == "expand" and given[0] not in self._alike:
            distinct = torch.arange(given[0].numel()).view(given[0].shape)
            self._alike[made[0]] = distinct.expand(made[0].shape)
        elif len(given) == 1 and (alike := self._alike.get(given[0])) is not None:
            from shardwise.engine.tensor.operations import moved

            answers = moved(operation, alike)
            for each, own in zip(made, answers or (), strict=False):
                self._alike[each] = own


def _tensors_in(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, torch.Tensor)]
