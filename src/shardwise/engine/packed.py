"""Packed weights: frozen parameters in fewer bits, and the tensors that belong to them.

    what a model has                                                what is planned, moved and saved, by name
    w: Int8Tensor, a subclass around `qdata` and `scale`            w.qdata int8    w.scale float32
    w: uint8, w.quant_state: an object with `absmax` and `code`     w uint8         w.quant_state.absmax  ..code
    w: int8, w.CB: a view of w, module.state.SCB                    w int8          w.SCB

Each of these tensors is frozen, keeps its dtype and stays the same object: where a rank drops it, makes room for it or
has it in a flat buffer, its content changes. So whatever holds it (a module, a state of its kernels) goes on with it. A
subclass is a shell around its tensors, and is made anew where they come to another device.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from shardwise.engine.parameter_kinds import (
    DEPTH,
    Carried,
    ParameterKind,
    Swapped,
    attributes_of,
    inner_by_path,
    is_packed,
    is_shell,
    members_of,
    rebuilt,
    shares_memory,
    tensors_in,
)
from shardwise.engine.torch_private import DisableTorchFunctionSubclass, mark_as_parameter


class PackedWeights(ParameterKind):
    """Packed weights of a model.

    Kernels of CPUs may pack codes in another way in evaluation mode: they cannot train with these, and no checkpoint
    holds them. A frozen bias of such a module may get other memory, in the dtype in which it computes. And what
    dequantises a weight may put another object around its memory. What is `kept` is put back after all of these.
    """

    @override
    def carried_by(self, module: nn.Module, attribute: str, name: str) -> list[Carried]:
        parameter = module._parameters[attribute]
        assert parameter is not None
        within = is_shell(parameter)
        carried: dict[str, Carried] = {}
        seen = {id(parameter)}
        for path, tensor in inner_by_path(parameter).items() if within else _around(module, parameter):
            if id(tensor) not in seen and f"{name}.{path}" not in carried:
                seen.add(id(tensor))
                carried[f"{name}.{path}"] = Carried(
                    name=f"{name}.{path}",
                    tensor=tensor,
                    is_view=not within and _is_view(tensor, parameter),
                    place=(module, attribute),
                )
        return [carried[each] for each in sorted(carried)]

    @override
    @torch.no_grad()
    def put_in(self, model: nn.Module, carried: Collection[Carried], contents: Mapping[str, torch.Tensor]) -> Swapped:
        swapped = list({each.tensor: contents[each.name] for each in carried if not each.is_view}.items())
        for tensor, content in swapped:
            torch.utils.swap_tensors(tensor, content)
        views = [(each.tensor, getattr(*each.place)) for each in carried if each.is_view]
        return swapped + self.settle(model, views)

    @override
    @torch.no_grad()
    def settle(self, model: nn.Module, views: Collection[tuple[torch.Tensor, torch.Tensor]]) -> Swapped:
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

    @override
    def kept(self, model: nn.Module) -> Callable[[], None]:
        kept: list[tuple[nn.Module, str, nn.Parameter, torch.Tensor, list[tuple[dict[str, Any], dict[str, Any]]]]] = []
        for module in model.modules():
            held = {key: each for key, each in module._parameters.items() if each is not None}
            packed = {key for key, each in held.items() if is_packed(each)}
            for key, each in held.items() if packed else ():
                if not each.requires_grad and not is_shell(each):  # shells are never packed anew
                    belonging = [(it, dict(it)) for it in _dicts_in(each)] if key in packed else []
                    with DisableTorchFunctionSubclass():  # at rest or not
                        kept.append((module, key, each, each.detach(), belonging))

        def restore() -> None:
            with DisableTorchFunctionSubclass():
                for module, key, parameter, values, belonging in kept:
                    there = module._parameters.get(key)
                    if there is not None and there is not parameter and shares_memory(there, parameter):
                        module._parameters[key] = parameter
                    if not shares_memory(parameter, values):
                        parameter.data = values
                        for attributes, before in belonging:
                            attributes.clear()
                            attributes.update(before)

        return restore


def _around(module: nn.Module, parameter: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    held = list(tensors_in(attributes_of(parameter)))
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
                for path, each in tensors_in(members_of(value), 1)
                if each.is_floating_point() or _is_view(each, parameter)
            )


def _is_view(tensor: torch.Tensor, parameter: torch.Tensor) -> bool:
    # By the storage object: on the meta device and at rest (stage 3) there is no address.
    return 0 < tensor.numel() == parameter.numel() and shares_memory(tensor, parameter)


def _dicts_in(weight: torch.Tensor) -> Iterator[dict[str, Any]]:
    """The attributes of the objects that belong to a weight, and its own."""
    reached: list[tuple[object, int]] = [(each, 1) for each in attributes_of(weight).values()]
    yield vars(weight)
    for value, depth in reached:
        members = members_of(value)
        if isinstance(members, dict) and not isinstance(value, torch.Tensor | list | tuple | dict):
            yield members
        if depth < DEPTH and not isinstance(value, torch.Tensor):
            reached += [(each, depth + 1) for each in members.values()]
