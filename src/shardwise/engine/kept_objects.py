"""What modules keep beside parameters, buffers and modules: generators, and tensors in the memory of parameters.

self.rng = torch.Generator()                put back by what runs a module aside (a trial, a proof, a recompute)
self.first_row = self.weight.data[0]        parameters move to flat buffers: it goes along, to the same elements;
                                            where the rank would not have them it is refused
"""

from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType, UnionType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import nn

from shardwise.comm.local_tensors import share_elements
from shardwise.engine.inventory import holds_values
from shardwise.engine.wrapping import is_ours
from shardwise.errors import ModelError, few_of
from shardwise.plan import Plan

Kept = TypeVar("Kept")

_DEPTH = 6
"""So deep are objects in objects looked through: a module may hold the whole program (its trainer, say)."""

_OF_EVERY_MODULE = vars(nn.Module()).keys()


def own_generators(model: nn.Module) -> list[torch.Generator]:
    """The generators that modules keep. Streams leave them alone: as in one process, each goes on from call to call."""
    return _kept_in((each for module in model.modules() for _, each in _attributes(module)), torch.Generator, {})


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, each) for key, each in vars(module).items() if key not in _OF_EVERY_MODULE)


def _kept_in(held: Iterable[Any], kind: type[Kept] | UnionType, seen: dict[int, Any]) -> list[Kept]:
    """Objects of a kind in these, and in what they hold: containers, attributes, closures; without what was `seen`."""
    found: list[Kept] = []
    level = list(held)
    for _ in range(_DEPTH):
        inside: list[Any] = []
        for each in level:
            if id(each) in seen or isinstance(each, nn.Module | type | ModuleType) or is_ours(each):
                continue
            seen[id(each)] = each
            if isinstance(each, kind):
                found.append(each)
            elif not isinstance(each, torch.Tensor):
                inside += _inside(each)
        level = inside
    return found


def _inside(held: Any) -> Iterable[Any]:
    if isinstance(held, Mapping):
        return held.values()
    if isinstance(held, list | tuple | set | frozenset | deque):
        return held
    if isinstance(held, partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, MethodType):
        return [held.__self__, held.__func__]
    if isinstance(held, FunctionType):
        return [cell.cell_contents for cell in held.__closure__ or () if _is_full(cell)]
    return getattr(held, "__dict__", {}).values()


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that has no value yet
        return False


@dataclass(frozen=True, kw_only=True, slots=True)
class Alias:
    """A tensor that a module keeps, in the memory of a parameter."""

    name: str
    """Of the attribute that holds it."""
    tensor: torch.Tensor
    parameter: str
    shape: torch.Size
    """Of the parameter."""
    offset: int
    """Of its first element behind that of the parameter."""
    goes_along: bool
    """Whether it can show the same elements elsewhere: a tensor of one dtype and without a graph."""
    is_trained: bool
    """Whether the values change, and no hook before the module's forward may put others there (spectral norms do)."""


def aliases_under(plan: Plan, model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Alias]:
    """Those of parameters, by name. Raises ModelError for those that would show old values under a plan."""
    aliases = _aliases_in(model, parameters)
    has_parts = plan.mesh.tp * plan.mesh.pp > 1 or (plan.sharding.stage == 3 and plan.mesh.num_data_ranks > 1)
    if stale := [each for each in aliases if each.is_trained and (has_parts or not each.goes_along)]:
        names = few_of([f"{each.name} (of {each.parameter})" for each in stale])
        why = "a rank has parts of the model under tp, pp and stage 3" if has_parts else "of another dtype, or arrays"
        raise ModelError(
            f"{names}: attributes of modules are in the memory of parameters, which move, and would show their first "
            f"values for ever ({why}). Compute them from the parameter in forward, or in a property"
        )
    return aliases


def _aliases_in(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Alias]:
    in_storage: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        if type(parameter) is nn.Parameter and holds_values(parameter):
            in_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    own = {id(each) for each in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}  # modules share a configuration, say
    found = []
    for prefix, module in model.named_modules():
        is_set = any(not is_ours(hook) for hook in module._forward_pre_hooks.values())
        for key, kept in _attributes(module):
            each: Any
            for each in _kept_in([kept], torch.Tensor | np.ndarray, seen):
                is_tensor = isinstance(each, torch.Tensor)
                tensor: Any = each if is_tensor else _shared(each)
                # Tensors of other classes and layouts are no plain views of memory.
                is_view = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
                if not is_view or id(tensor) in own or not holds_values(tensor):
                    continue
                # An array begins anywhere in the memory of a parameter.
                start = tensor.untyped_storage().data_ptr()
                for name in in_storage.get(start, ()) if is_tensor else chain.from_iterable(in_storage.values()):
                    parameter = parameters[name]
                    if share_elements(parameter, tensor):
                        along = is_tensor and tensor.is_leaf and tensor.dtype == parameter.dtype
                        found.append(
                            Alias(
                                name=".".join(filter(None, (prefix, key))),
                                tensor=tensor,
                                parameter=name,
                                shape=parameter.shape,
                                offset=int(tensor.storage_offset() - parameter.storage_offset()),
                                goes_along=along and parameter.is_contiguous(),
                                is_trained=parameter.requires_grad and not is_set,
                            )
                        )
    return found


def _shared(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor in the memory of an array; None where torch has none."""
    is_fit = array.size and array.dtype.kind in "biufc" and array.dtype.isnative and min(array.strides, default=0) >= 0
    return torch.from_numpy(array) if is_fit and array.flags.writeable else None


@torch.no_grad()
def take_along(aliases: Collection[Alias], parameters: Mapping[str, nn.Parameter]) -> None:
    """Let them show the same elements of the parameters where these are now."""
    for each in aliases:
        parameter = parameters.get(each.parameter)
        # Of a frozen one the values that were there stay good, also where the rank has a part of it now.
        is_whole = type(parameter) is nn.Parameter and not parameter.is_meta and parameter.shape == each.shape
        if parameter is not None and each.goes_along and is_whole:
            values, tensor = parameter.detach(), each.tensor
            tensor.data = values.as_strided(tensor.size(), tensor.stride(), values.storage_offset() + each.offset)
