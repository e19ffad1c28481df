"""A model's modules with none of its tensors: where initialisers run, while the model itself is left as it is.

    model                          skeleton
    block (Block) ------------->   block (Block)            same class, same plain attributes
      linear (Linear) --------->     linear (Linear)
        weight  o  (meta)              weight  o  a tensor of its own: without values, or real for a while

Every place has a tensor of its own, ties included: what an initialiser writes through the second name of a tie is lost.
That is what happens where modules are initialised first and tied afterwards.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from shardwise.errors import ModelError

_T = TypeVar("_T", bound=torch.Tensor)

_ABOUT_OTHER_VALUES = frozenset({"_is_hf_initialized"})
"""Attributes by which transformers tells that a tensor had values before it came to the meta device."""


@dataclass(eq=False, kw_only=True, slots=True)
class Place:
    """One attribute of one module that holds a parameter or a buffer."""

    number: int
    name: str
    """The first name by which the model reaches it."""
    module: nn.Module
    """Of the model."""
    attribute: str
    original: torch.Tensor
    """What the model holds there."""
    also: tuple[str, ...] = ()
    """Plain attributes of the module that hold the same object."""
    is_parameter: bool
    twin: nn.Module
    """The module of the skeleton that stands for `module`."""
    empty: torch.Tensor = field(init=False)
    """What the skeleton holds there between initialisations: like the original, without values."""

    def __post_init__(self) -> None:
        if self.is_plain:
            empty = torch.empty_like(self.original, device="meta")
        else:
            empty = torch.empty(self.original.shape, dtype=self.original.dtype, device="meta")
        self.empty = self.like(empty)

    @property
    def is_plain(self) -> bool:
        """Whether the tensor is dense and computes by the rules of all tensors; one that is not has values."""
        return _is_plain(self.original)

    @property
    def lacks_values(self) -> bool:
        """Whether the model has no values there."""
        return self.original.is_meta

    @property
    def num_bytes(self) -> int:
        """Of its values."""
        return self.original.numel() * self.original.element_size()

    def like(self, values: torch.Tensor) -> torch.Tensor:
        """A tensor for the skeleton, with the class and the attributes of the original."""
        if not self.is_plain:
            return nn.Parameter(values, requires_grad=False) if self.is_parameter else values
        made = with_values(self.original, values)
        for attribute in _ABOUT_OTHER_VALUES & vars(made).keys():
            delattr(made, attribute)
        return made

    def install(self, tensor: torch.Tensor) -> None:
        """Let the skeleton hold `tensor` there."""
        vars(self.twin)["_parameters" if self.is_parameter else "_buffers"][self.attribute] = tensor
        vars(self.twin).update(dict.fromkeys(self.also, tensor))

    def current(self) -> torch.Tensor | None:
        """What the skeleton holds there: an initialiser may have put another object in place of the one installed."""
        for held in (self.twin._parameters, self.twin._buffers, vars(self.twin)):
            if isinstance(tensor := held.get(self.attribute), torch.Tensor):
                return tensor
        return None

    def put(self, tensor: torch.Tensor) -> None:
        """Let the model hold `tensor` there."""
        vars(self.module)["_parameters" if self.is_parameter else "_buffers"][self.attribute] = tensor
        vars(self.module).update(dict.fromkeys(self.also, tensor))


class Skeleton:
    """The modules of a model, copied without tensors. Raises ModelError for tensors that cannot be given values."""

    def __init__(self, model: nn.Module) -> None:
        names = {module: name for name, module in model.named_modules()}
        for module, name in names.items():
            if isinstance(module, torch.jit.ScriptModule):
                raise ModelError(f"{name or 'the model'!r} is a script (torch.jit): give the module it was made from")
        self._twins = {module: _hollow(module) for module in names}
        for module, twin in self._twins.items():
            self._connect(module, twin)
        self.names: dict[nn.Module, str] = {self._twins[module]: name for module, name in names.items()}
        """The modules of the skeleton, and their first names."""
        self.root = self._twins[model]
        places: list[Place] = []
        problems: list[str] = []
        for module, name in names.items():
            self._take_places(module, name, places, problems)
        if problems:
            raise ModelError("\n".join(problems))
        self.places = tuple(places)
        self.first_of = _first_places(self.places)
        """The place under whose name the tensor of a place goes."""
        self.of_module: dict[nn.Module, list[Place]] = {}
        for place in places:
            self.of_module.setdefault(place.twin, []).append(place)

    def within(self, module: nn.Module) -> list[Place]:
        """The places of a module of the skeleton and of all in it."""
        return [place for each in module.modules() for place in self.of_module.get(each, ())]

    def _connect(self, module: nn.Module, twin: nn.Module) -> None:
        state = vars(twin)
        for attribute, value in vars(module).items():
            state[attribute] = self._translated(value)
        state["_modules"] = {name: self._twin(child) for name, child in module._modules.items()}
        state["_parameters"], state["_buffers"] = dict(module._parameters), dict(module._buffers)
        if "_non_persistent_buffers_set" in state:
            state["_non_persistent_buffers_set"] = set(state["_non_persistent_buffers_set"])

    def _translated(self, value: Any) -> Any:
        """An attribute, with the skeleton's modules in the place of the model's."""
        if type(value) in (list, tuple):
            return type(value)(self._twin(each) for each in value)
        if type(value) is dict:
            return {key: self._twin(each) for key, each in value.items()}
        return self._twin(value)

    def _twin(self, value: Any) -> Any:
        return self._twins.get(value, value) if isinstance(value, nn.Module) else value

    def _take_places(self, module: nn.Module, prefix: str, places: list[Place], problems: list[str]) -> None:
        held = [
            *((name, each, True) for name, each in module._parameters.items() if each is not None),
            *((name, each, False) for name, each in module._buffers.items() if each is not None),
        ]
        plain = {name: each for name, each in vars(module).items() if isinstance(each, torch.Tensor)}
        for attribute, tensor, is_parameter in held:
            name = _full(prefix, attribute)
            if (problem := _why_not(name, tensor)) is not None:
                problems.append(problem)
                continue
            also = tuple(other for other, each in plain.items() if each is tensor)
            place = Place(
                number=len(places),
                name=name,
                module=module,
                attribute=attribute,
                original=tensor,
                also=also,
                is_parameter=is_parameter,
                twin=self._twins[module],
            )
            places.append(place)
        for attribute, tensor in plain.items():
            if tensor.is_meta and not any(tensor is each for _, each, _ in held):
                problems.append(
                    f"{_full(prefix, attribute)!r} is a tensor without values (on the meta device) in a plain "
                    "attribute, which nobody initialises; make it a buffer, or build its module outside "
                    "torch.device('meta')"
                )


def with_values(original: _T, values: torch.Tensor) -> _T:
    """A tensor that views `values`, with the class, the `requires_grad` and the attributes of `original`.

    A parameter that is not gathered (stage 3) gives one of the class that it has when it is.
    """
    made: torch.Tensor
    if isinstance(original, nn.Parameter):
        kind = type(original)
        kind = kind.__bases__[0] if hasattr(kind, "_is_resting") else kind
        made = torch.Tensor._make_subclass(kind, values.detach(), original.requires_grad)
    else:
        made = values.detach().requires_grad_(original.requires_grad)
    vars(made).update(vars(original))
    return cast("_T", made)


def _full(prefix: str, attribute: str) -> str:
    return f"{prefix}.{attribute}" if prefix else attribute


def _hollow(module: nn.Module) -> nn.Module:
    """An object of the module's class with nothing in it."""
    return object.__new__(type(module))


def _why_not(name: str, tensor: torch.Tensor) -> str | None:
    """What is wrong with a tensor that is to be given values, if anything is."""
    if is_lazy(tensor):
        return f"{name!r} has no shape before the first forward; build its module with all its sizes given"
    if tensor.is_meta and not _is_plain(tensor):
        return (
            f"{name!r} is a {type(tensor).__name__} of layout {tensor.layout} without values (on the meta device); "
            "only plain dense tensors are initialised: build its module outside torch.device('meta')"
        )
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Not so are sparse tensors, DTensors and tensors of quantising classes."""
    return tensor.layout == torch.strided and type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def _first_places(places: tuple[Place, ...]) -> Mapping[Place, Place]:
    """Of each place the first one that holds the same tensor, be it as another object that shares its storage."""
    first: dict[tuple[object, ...], Place] = {}
    by_storage: dict[int, Place] = {}
    found: dict[Place, Place] = {}
    for place in places:
        tensor = place.original
        if not place.lacks_values or tensor.numel() == 0:
            found[place] = first.setdefault((id(tensor),), place)
            continue
        storage = tensor.untyped_storage()._cdata
        key = (storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype)
        found[place] = first.setdefault(key, place)
        other = by_storage.setdefault(storage, place)
        if found[other] is not found[place]:
            raise ModelError(
                f"{other.name!r} and {place.name!r}, which have no values yet, share a part of one storage; make one "
                "of them a tensor of its own, or build their modules outside torch.device('meta')"
            )
    return found
