"""Packed weights: frozen parameters in fewer bits, and the tensors that belong to them.

    what a model has                                                what is planned, moved and saved, by name
    w: Int8Tensor, a subclass around `qdata` and `scale`            w.qdata int8    w.scale float32
    w: uint8, w.quant_state: an object with `absmax` and `code`     w uint8         w.quant_state.absmax  ..code
    w: int8, w.CB: a view of w, module.state.SCB                    w int8          w.SCB

Each of these tensors is frozen, keeps its dtype and stays the same object: where a rank drops it, makes room for it or
has it in a flat buffer, its content changes. So whatever holds it (a module, a state of its kernels) goes on with it. A
subclass is a shell around its tensors, and is made anew where they come to another device.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm.local_tensors import dtype_name
from shardwise.engine.forward.aside import items_set
from shardwise.engine.forward.sharded_parameters import plain_class
from shardwise.engine.torch_private import (
    DisableTorchFunctionSubclass,
    is_traceable_wrapper_subclass,
    is_wrapped_by_transformation,
    mark_as_parameter,
    storage_id,
)
from shardwise.plan.dtypes import COMPUTE_DTYPES, is_complex

_DEPTH = 4
"""How deep objects are looked into for tensors."""

_OURS = ("_unit_place", "_reader")
"""Attributes of parameters at rest (stage 3)."""


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

    @property
    def weight(self) -> torch.Tensor:
        """The parameter, as it is there now."""
        module, attribute = self.place
        weight = module._parameters[attribute]
        assert weight is not None
        return weight


def is_shell(tensor: torch.Tensor) -> bool:
    """Whether a tensor is a subclass around others, which have its values."""
    return type(tensor) is not nn.Parameter and is_traceable_wrapper_subclass(tensor)


def is_packed(parameter: torch.Tensor) -> bool:
    """Whether no plan may cast a parameter: its elements are codes, which belong to other tensors."""
    if parameter.requires_grad:
        return False
    name = dtype_name(parameter.dtype)
    if is_shell(parameter) or not (name in COMPUTE_DTYPES or is_complex(name)):
        return True
    # Codes may be stored as floats: FSDP cuts tensors of one dtype only (`quant_storage` of bitsandbytes).
    is_plain = plain_class(type(parameter)) is nn.Parameter
    return not is_plain and any(True for _ in _tensors_in(_attributes(parameter), 0))


def carried_by(module: nn.Module, attribute: str, name: str) -> list[Carried]:
    """What belongs to the packed parameter of a module at `attribute`, each once, in an order that no use changes.

    name: the full name of the parameter.
    """
    parameter = module._parameters[attribute]
    assert parameter is not None
    within = is_shell(parameter)
    carried: dict[str, Carried] = {}
    seen = {id(parameter)}
    for path, tensor in _tensors_in(_inside(parameter), 0) if within else _around(module, parameter):
        if id(tensor) not in seen and f"{name}.{path}" not in carried:
            seen.add(id(tensor))
            carried[f"{name}.{path}"] = Carried(
                name=f"{name}.{path}",
                tensor=tensor,
                is_view=not within and _is_view(tensor, parameter),
                place=(module, attribute),
            )
    return [carried[each] for each in sorted(carried)]


def _around(module: nn.Module, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    held = list(_tensors_in(_attributes(parameter), 0))
    yield from held
    # Another parameter may have made the module's state: where peft merges a copy of a weight, it is that of the copy.
    if held:
        return
    # Some modules move what a parameter has to a state of their kernels, in their first forward: `state.SCB` there is
    # `SCB` of the parameter, under the same name.
    for key, value in () if module._modules else vars(module).items():
        if not key.startswith("_") and not isinstance(value, torch.Tensor | nn.Module):
            # Whole numbers there are none of its: places of outliers, say, which follow from the last input.
            yield from (
                (path, each)
                for path, each in _tensors_in(_members(value), 1)
                if each.is_floating_point() or _is_view(each, parameter)
            )


def _attributes(parameter: torch.Tensor) -> Mapping[str, Any]:
    return {key: value for key, value in vars(parameter).items() if key not in _OURS}


def _inside(shell: torch.Tensor) -> Mapping[str, torch.Tensor]:
    names, _ = shell.__tensor_flatten__()  # type: ignore[attr-defined]
    return {name: getattr(shell, name) for name in names}


def _tensors_in(members: Mapping[str, Any], depth: int) -> Iterator[tuple[str, torch.Tensor]]:
    for key, value in members.items():
        if isinstance(value, torch.Tensor):
            if is_shell(value):
                yield from ((f"{key}.{path}", each) for path, each in _tensors_in(_inside(value), depth + 1))
            elif value.layout == torch.strided and not isinstance(value, nn.Parameter) and not value.requires_grad:
                yield key, value
        elif depth < _DEPTH and (inner := _members(value)):
            yield from ((f"{key}.{path}", each) for path, each in _tensors_in(inner, depth + 1))


def _members(value: object) -> Mapping[str, Any]:
    """What an object holds by name; nothing of modules, classes, functions and plain values."""
    if isinstance(value, Mapping):
        return {key: each for key, each in value.items() if isinstance(key, str)}
    if isinstance(value, list | tuple):
        return {str(at): each for at, each in enumerate(value)}
    if isinstance(value, nn.Module | type) or callable(value):
        return {}
    return getattr(value, "__dict__", {})


def _is_view(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    # By the storage object: on the meta device and at rest (stage 3) there is no address.
    return 0 < tensor.numel() == parameter.numel() and shares_memory(tensor, parameter)


def all_carried(model: nn.Module) -> Iterator[Carried]:
    """What belongs to the packed weights of a model, under each name that it has."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module._parameters.items():
            if parameter is not None and is_packed(parameter):
                yield from carried_by(module, key, f"{prefix}.{key}" if prefix else key)


def inner_by_path(shell: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors inside a shell by their paths."""
    return dict(_tensors_in(_inside(shell), 0))


def rebuilt(shell: torch.Tensor, parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """A shell like another, around tensors that are given by their paths."""
    names, context = shell.__tensor_flatten__()  # type: ignore[attr-defined]
    inner: dict[str, torch.Tensor] = {}
    for name in names:
        if is_shell(within := getattr(shell, name)):
            lead = f"{name}."
            own = {path.removeprefix(lead): each for path, each in parts.items() if path.startswith(lead)}
            inner[name] = rebuilt(within, own)
        else:
            inner[name] = parts[name]
    made = type(shell).__tensor_unflatten__(inner, context, shell.shape, shell.stride())  # type: ignore[attr-defined]
    assert isinstance(made, torch.Tensor)
    return made


def inner_tensors(parameter: torch.Tensor) -> list[torch.Tensor]:
    """The tensors inside a shell; nothing of another parameter."""
    return list(inner_by_path(parameter).values()) if is_shell(parameter) else []


def first_tensor(parameter: torch.Tensor) -> torch.Tensor:
    """The tensor that is gathered for a packed weight: the first inside a shell, else the weight."""
    return next(iter(inner_tensors(parameter)), parameter)


# Other content for the same objects -------------------------------------------------------------------------------

Swapped = list[tuple[torch.Tensor, torch.Tensor]]
"""Tensors that got another content, and what has theirs of before."""


@torch.no_grad()
def put_in(model: nn.Module, carried: Collection[Carried], contents: Mapping[str, torch.Tensor]) -> Swapped:
    """Give the tensors of packed weights another content by name; their views, and shells, go with them."""
    swapped: Swapped = []
    for tensor, content in {each.tensor: contents[each.name] for each in carried if not each.is_view}.items():
        torch.utils.swap_tensors(tensor, content)
        swapped.append((tensor, content))
    views = [(each.tensor, each.weight) for each in carried if each.is_view]
    return swapped + settle_packed(model, views)


def put_back(swapped: Swapped) -> None:
    """Undo `put_in`, after the weights themselves are what they were."""
    for tensor, content in reversed(swapped):
        torch.utils.swap_tensors(tensor, content)


def shells_aside(model: nn.Module) -> AbstractContextManager[None]:
    """Modules hold no shells inside: torch would put others in their place, around other tensors."""
    return items_set(
        (module._parameters, key, None)
        for module in model.modules()
        for key, each in module._parameters.items()
        if each is not None and is_shell(each)
    )


@torch.no_grad()
def move_carried(tensors: Collection[torch.Tensor], device: torch.device) -> None:
    """Move tensors to a device; the objects stay."""
    for each in tensors:
        if not each.is_meta and each.device != device:
            torch.utils.swap_tensors(each, each.to(device))


@torch.no_grad()
def settle_packed(model: nn.Module, views: Collection[tuple[torch.Tensor, torch.Tensor]]) -> Swapped:
    """Let views of packed weights show what these are now, and shells say that they are where their tensors are."""
    swapped: Swapped = []
    for view, parameter in views:
        if not _is_view(view, parameter):
            with DisableTorchFunctionSubclass():  # at rest or not
                made = parameter.detach().view(view.shape)
            torch.utils.swap_tensors(view, made)
            swapped.append((view, made))
    for shell in filter(is_shell, list(model.parameters())):
        inner = inner_by_path(shell)
        if next(iter(inner.values())).device != shell.device:
            made = rebuilt(shell, inner)
            # Not nn.Parameter(made), which is around views of the tensors.
            mark_as_parameter(made)
            torch.utils.swap_tensors(shell, made)
            swapped.append((shell, made))
    return swapped


@dataclass(frozen=True, kw_only=True, slots=True)
class _Kept:
    """A frozen parameter of a module that holds packed weights."""

    place: tuple[nn.Module, str]
    parameter: nn.Parameter
    storage: int
    values: torch.Tensor
    belonging: list[tuple[dict[str, Any], dict[str, Any]]]
    """The attributes of the objects that belong to it, and what they were."""


class PackedPlaces:
    """Where packed weights are, and what belongs to them, to undo what a forward makes of it.

    Kernels of CPUs may pack codes in another way in evaluation mode: they cannot train with these, and no checkpoint
    holds them. A frozen bias of such a module may get other memory, in the dtype in which it computes. And what
    dequantises a weight may put another object around its memory.
    """

    def __init__(self, model: nn.Module) -> None:
        """Of the weights as they are now, in memory or in flat buffers; shells are never packed anew."""
        self._kept: list[_Kept] = []
        for module in model.modules():
            held = {key: each for key, each in module._parameters.items() if each is not None}
            packed = {key for key, each in held.items() if is_packed(each)}
            for key, each in held.items() if packed else ():
                if each.requires_grad or is_shell(each):
                    continue
                with DisableTorchFunctionSubclass():  # at rest or not
                    kept = _Kept(
                        place=(module, key),
                        parameter=each,
                        storage=storage_id(each.untyped_storage()),
                        values=each.detach(),
                        belonging=[(it, dict(it)) for it in _dicts_in(each)] if key in packed else [],
                    )
                self._kept.append(kept)

    def restore(self) -> None:
        """Put back the tensors that were, with what belonged to them, where a forward has put others."""
        if self._kept:
            with DisableTorchFunctionSubclass():
                for kept in self._kept:
                    (module, key), parameter = kept.place, kept.parameter
                    there = module._parameters.get(key)
                    if there is not None and there is not parameter and shares_memory(there, parameter):
                        module._parameters[key] = parameter
                    if storage_id(parameter.untyped_storage()) != kept.storage:
                        parameter.data = kept.values
                        for attributes, before in kept.belonging:
                            attributes.clear()
                            attributes.update(before)


def shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors, gathered or at rest, are in one piece of memory."""
    if is_shell(one) or is_shell(other) or is_wrapped_by_transformation(one):
        return False
    return bool(storage_id(one.untyped_storage()) == storage_id(other.untyped_storage()))


def _dicts_in(weight: torch.Tensor) -> Iterator[dict[str, Any]]:
    """The attributes of the objects that belong to a weight, and its own."""
    reached: list[tuple[object, int]] = [(each, 1) for each in _attributes(weight).values()]
    yield vars(weight)
    for value, depth in reached:
        members = _members(value)
        if isinstance(members, dict) and not isinstance(value, torch.Tensor | list | tuple | dict):
            yield members
        if depth < _DEPTH and not isinstance(value, torch.Tensor):
            reached += [(each, depth + 1) for each in members.values()]
