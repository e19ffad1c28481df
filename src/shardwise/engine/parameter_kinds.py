"""Kinds of parameters: plain ones, and packed ones, which are worth nothing without the tensors that belong to them.

The folder `packed` has what packed ones need. It is imported for models with packed parameters only.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.torch_private import is_traceable_wrapper_subclass, is_wrapped_by_transformation, storage_id
from shardwise.plan.dtypes import COMPUTE_DTYPES, is_complex

DEPTH = 4
"""How deep objects are looked into for tensors."""

AT_REST = ("_unit_place", "_reader")
"""Attributes of parameters at rest (stage 3), which refer to their engine."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Carried:
    """A tensor that belongs to a packed parameter."""

    name: str
    """Full name: that of the parameter, and the path from it."""
    tensor: torch.Tensor
    is_view: bool
    """Whether it shows the very elements of the parameter: it has no values to keep, and follows the parameter."""
    place: tuple[nn.Module, str]
    """The module that holds the parameter, and its attribute."""


Swapped: TypeAlias = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that got another content, and what has theirs of before."""


class ParameterKind:
    """What a model's parameters need besides their values. Plain ones, as here, need nothing."""

    def carried_by(self, module: nn.Module, attribute: str, name: str) -> list[Carried]:
        """What belongs to the packed parameter of this full name, each once, in an order that no use changes."""
        return []

    def put_in(self, model: nn.Module, carried: Collection[Carried], contents: Mapping[str, torch.Tensor]) -> Swapped:
        """Give the tensors of packed weights another content by name; their views, and shells, go with them."""
        return []

    def settle(self, model: nn.Module, views: Collection[tuple[torch.Tensor, torch.Tensor]]) -> Swapped:
        """Point views at the memory that packed weights have now, and rebuild shells whose tensors have moved."""
        return []

    def kept(self, model: nn.Module) -> Callable[[], None]:
        """What undoes what a forward makes of the weights as they are now."""
        return lambda: None


def plain_class(kind: type) -> type:
    """The class of parameters in forwards that have class `kind` outside of them."""
    return getattr(kind, "_plain_class", kind)


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether no plan may cast a parameter: its elements are codes, which belong to other tensors."""
    if parameter.requires_grad:
        return False
    name = dtype_name(parameter.dtype)
    if is_shell(parameter) or not (name in COMPUTE_DTYPES or is_complex(name)):
        return True
    # Codes may be stored as floats: FSDP cuts tensors of one dtype only (`quant_storage` of bitsandbytes).
    is_plain = plain_class(type(parameter)) is nn.Parameter
    return not is_plain and any(True for _ in tensors_in(attributes_of(parameter)))


def is_shell(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass around others, which have its values."""
    return type(tensor) is not nn.Parameter and is_traceable_wrapper_subclass(tensor)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, gathered or at rest, are in one piece of memory."""
    if is_shell(one) or is_shell(other) or is_wrapped_by_transformation(one):
        return False
    return bool(storage_id(one.untyped_storage()) == storage_id(other.untyped_storage()))


def attributes_of(parameter: torch.Tensor) -> Mapping[str, Any]:
    """What a program has put on a parameter."""
    return {key: value for key, value in vars(parameter).items() if key not in AT_REST}


def members_of(value: object) -> Mapping[str, Any]:
    """What an object holds by name; nothing of modules, classes, functions and plain values."""
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return {str(at): each for at, each in enumerate(value)}
    if isinstance(value, nn.Module | type) or callable(value):
        return {}
    return getattr(value, "__dict__", {})


def tensors_in(members: Mapping[str, Any], depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """The plain tensors in what an object has by name, by their paths."""
    for key, value in members.items():
        if isinstance(value, torch.Tensor):
            if is_shell(value):
                yield from ((f"{key}.{path}", each) for path, each in inner_by_path(value).items())
            elif value.layout == torch.strided and not isinstance(value, nn.Parameter) and not value.requires_grad:
                yield key, value
        elif depth < DEPTH and (inner := members_of(value)):
            yield from ((f"{key}.{path}", each) for path, each in tensors_in(inner, depth + 1))


def inner_by_path(tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors inside a shell by their paths; nothing of another tensor."""
    names, _ = tensor.__tensor_flatten__() if is_shell(tensor) else ((), None)  # type: ignore[attr-defined]
    return dict(tensors_in({name: getattr(tensor, name) for name in names}))


def rebuilt(shell: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A shell like another, around tensors that are given by their paths."""
    names, context = shell.__tensor_flatten__()  # type: ignore[attr-defined]
    inner = {}
    for name in names:
        own = {path[len(name) + 1 :]: each for path, each in parts.items() if path.startswith(f"{name}.")}
        inner[name] = rebuilt(getattr(shell, name), own) if own else parts[name]
    made = type(shell).__tensor_unflatten__(inner, context, shell.shape, shell.stride())  # type: ignore[attr-defined]
    assert isinstance(made, torch.Tensor)
    return made
