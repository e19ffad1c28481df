"""What modules keep beside parameters, buffers and modules: generators, and tensors in the memory of parameters.

self.rng = torch.Generator()                put back by what runs a module aside (a trial, a proof, a recompute)
self.first_row = self.weight.data[0]        parameters move to flat buffers: it goes along, to the same elements;
                                            where the rank does not have them, reads are refused
"""

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, MutableSet
from functools import partial
from itertools import chain
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType, UnionType
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import nn

from shardwise.comm.local_tensors import share_elements, span_elements
from shardwise.comm.nested_values import is_plain
from shardwise.engine.forward.inventory import holds_values
from shardwise.engine.forward.layers import is_ours, package_of
from shardwise.engine.forward.sharded_parameters import functions_of_metadata
from shardwise.engine.forward.writes import form_of, holds_same, is_on_host, is_readable, is_small
from shardwise.engine.torch_private import (
    HOOKS_OF_MODULES,
    DisableTorchFunctionSubclass,
    forward_pre_hooks,
    tree_leaves,
)
from shardwise.errors import ModelError

Kept = TypeVar("Kept")

_DEPTH = 6
"""So deep are objects in objects looked through: a module may hold the whole program (its trainer, say)."""

_OF_EVERY_MODULE = vars(nn.Module()).keys()

_CONTAINERS = (OrderedDict, dict, list, set, deque)


def own_generators(model: nn.Module) -> list[torch.Generator]:
    """The generators that modules keep. Streams leave them alone: each continues as in one process."""
    return _kept_in((each for module in model.modules() for _, each in _attributes(module)), torch.Generator, {})


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    return ((key, each) for key, each in vars(module).items() if key not in _OF_EVERY_MODULE)


def _kept_in(held: Iterable[Any], kind: type[Kept] | UnionType, seen: dict[int, Any]) -> list[Kept]:
    """Objects of a kind in these, and in what they hold, without what was `seen`."""
    return [each for each in _reached(held, lambda each: isinstance(each, kind), seen) if isinstance(each, kind)]


def _reached(held: Iterable[Any], is_end: Callable[[Any], bool], seen: dict[int, Any]) -> Iterator[Any]:
    """These objects and what they hold: containers, attributes, closures; nothing inside of an end, or of a tensor."""
    level = list(held)
    for _ in range(_DEPTH):
        inside: list[Any] = []
        for each in level:
            if id(each) in seen or isinstance(each, nn.Module | type | ModuleType) or is_ours(each):
                continue
            seen[id(each)] = each
            yield each
            if not isinstance(each, torch.Tensor) and not is_end(each):
                inside += _inside(each)
        level = inside


def _inside(held: Any) -> Iterable[Any]:
    if isinstance(held, partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, MethodType):
        return [held.__self__, held.__func__]
    if isinstance(held, FunctionType):
        return [cell.cell_contents for cell in held.__closure__ or () if _is_full(cell)]
    items: Iterable[Any] = ()
    if isinstance(held, Mapping):
        items = held.values()
    elif isinstance(held, list | tuple | set | frozenset | deque):
        items = held
    return [*items, *getattr(held, "__dict__", {}).values()]


def _is_full(cell: CellType) -> bool:
    try:
        return cell.cell_contents is not None
    except ValueError:  # of a name that has no value yet
        return False


def contents_kept(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """What puts back what containers hold that modules and their hooks keep, and values of small tensors in them.

    Attributes of objects stay as they are: others share them, as threads do a clock.
    """
    held = [each for module in modules for _, each in _attributes(module)]
    held += [
        hook
        for module in modules
        for key in HOOKS_OF_MODULES
        if (hooks := vars(module).get(key))
        for hook in hooks.values()
    ]
    undo: list[Callable[[], object]] = []
    for each in _reached(held, _is_no_container, {}):
        if isinstance(each, torch.Tensor):
            if type(each) is torch.Tensor and is_readable(each) and is_on_host(each) and is_small(each):
                undo.append(partial(_rewrite, each, each.detach().clone()))
        elif kind := next((kind for kind in _CONTAINERS if isinstance(each, kind)), None):
            # Its own ways to write: those of a class of the user may refuse or do more.
            undo.append(partial(_refill, kind, each, _items(kind, each)))

    def put_back() -> None:
        for do in undo:
            do()

    return put_back


def _is_no_container(held: Any) -> bool:
    return not isinstance(held, (*_CONTAINERS, UserDict, tuple, partial, FunctionType)) or package_of(held) == "torch"


def _items(kind: Any, container: Any) -> list[Any]:
    return list(kind.items(container) if issubclass(kind, dict) else kind.__iter__(container))


def _refill(kind: Any, container: Any, before: list[Any]) -> None:
    both = _items(kind, container), before
    now, then = ([*chain.from_iterable(each)] for each in both) if issubclass(kind, dict) else both
    # By identity: values may be tensors, which have no single truth.
    if len(now) == len(then) and all(map(is_, now, then)):
        return
    # Emptied and filled again, not replaced: others may hold the same object, as handles of hooks do.
    kind.clear(container)
    if issubclass(kind, dict):
        for key, value in before:
            kind.__setitem__(container, key, value)
    else:
        (kind.update if kind is set else kind.extend)(container, before)


def _rewrite(tensor: torch.Tensor, before: torch.Tensor) -> None:
    if form_of(tensor) != form_of(before):
        tensor.data = before
    elif not (holds_same(tensor, before) or tensor.is_inference() or span_elements(tensor) < tensor.numel()):
        tensor.data.copy_(before)  # torch refuses writes to the others


class _Moved(torch.Tensor):
    """A tensor that a module keeps in the memory of a parameter that is elsewhere now: it refuses to be read."""

    _why: str

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in functions_of_metadata():
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        raise ModelError(next(each._why for each in tree_leaves((args, kwargs)) if isinstance(each, _Moved)))

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"<{self._why}>"


_LEFT = "_shardwise_alias_of"
"""An attribute of tensors that stay behind with the values of a frozen parameter: its name, and their offset."""


class Alias(NamedTuple):
    """A tensor that a module keeps in the memory of a parameter."""

    name: str
    """Of the attribute that holds it."""
    tensor: torch.Tensor
    parameter: str
    shape: torch.Size
    """Of the parameter."""
    offset: int | None
    """Of its first element behind that of the parameter; None for what is no plain view of one parameter."""
    is_trained: bool
    """Whether the values change, and no hook before the module's forward may put others there (spectral norms do)."""


def aliases_in(model: nn.Module, parameters: Mapping[str, nn.Parameter]) -> list[Alias]:
    """Those of parameters, by name. Raises ModelError for NumPy arrays, which can neither go along nor refuse reads."""
    in_storage: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        if type(parameter) is nn.Parameter and holds_values(parameter):
            in_storage.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    own = {id(each) for each in (*model.parameters(), *model.buffers())}
    seen: dict[int, Any] = {}  # modules share a configuration, say
    found = []
    for prefix, module in model.named_modules():
        is_set = any(not is_ours(hook) for hook in forward_pre_hooks(module).values())
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
                left = vars(tensor).get(_LEFT, {})
                shared = in_storage.get(start, ()) if is_tensor else chain.from_iterable(in_storage.values())
                for name in left.keys() & parameters.keys() or shared:
                    if name in left or share_elements(parameters[name], tensor):
                        offset = left[name] if name in left else _offset_in(parameters[name], tensor)
                        is_trained = parameters[name].requires_grad and not is_set
                        place = ".".join(filter(None, (prefix, key)))
                        if is_trained and not is_tensor:
                            raise ModelError(
                                f"{place} (of {name}) is an array in the memory of a parameter, which moves. It would "
                                "keep the first values. Compute it from the parameter in forward, or in a property"
                            )
                        found.append(Alias(place, tensor, name, parameters[name].shape, offset, is_trained))
    return found


def _offset_in(parameter: torch.Tensor, tensor: torch.Tensor) -> int | None:
    offset = int(tensor.storage_offset() - parameter.storage_offset())
    is_inside = parameter.is_contiguous() and 0 <= offset <= parameter.numel() - span_elements(tensor)
    return offset if is_inside and tensor.is_leaf and tensor.dtype == parameter.dtype else None


def _shared(array: np.ndarray[Any, Any]) -> torch.Tensor | None:
    """A tensor in the memory of an array; None where torch has none."""
    is_fit = array.size and array.dtype.kind in "biufc" and array.dtype.isnative and min(array.strides, default=0) >= 0
    return torch.from_numpy(array) if is_fit and array.flags.writeable else None


@torch.no_grad()
def take_along(aliases: Collection[Alias], parameters: Mapping[str, nn.Parameter]) -> None:
    """Let them show the same elements of the parameters where these are now; where they cannot, they refuse reads."""
    for each in aliases:
        parameter, tensor = parameters.get(each.parameter), each.tensor
        is_whole = type(parameter) is nn.Parameter and holds_values(parameter) and parameter.shape == each.shape
        if parameter is not None and is_whole and each.offset is not None:
            values = parameter.detach()
            tensor.data = values.as_strided(tensor.size(), tensor.stride(), values.storage_offset() + each.offset)
            vars(tensor).pop(_LEFT, None)
        # Of a frozen one the values that were there stay good, also where the rank has a part of it now. Once it is
        # trained, `aliases_in` finds what was left.
        elif not each.is_trained:
            vars(tensor).setdefault(_LEFT, {})[each.parameter] = each.offset
        elif type(tensor) is not _Moved:
            tensor.data = tensor.new_empty(1).expand(tensor.size())  # the old memory goes
            tensor._why = (  # type: ignore[attr-defined]
                f"{each.name} (of {each.parameter}) was in the memory of that parameter. This rank has a part of it "
                "or nothing (tp, pp, stage 3), or it has another dtype. Read the parameter itself in forward, as "
                "`self.weight`, or make the attribute a property"
            )
            tensor.__class__ = _Moved


def held_tensors(thing: Any) -> list[torch.Tensor]:
    """The tensors in an object: in its attributes, and in what these hold."""
    found: dict[int, torch.Tensor] = {}
    seen: set[int] = set()
    pending = [thing]
    while pending:
        each = pending.pop()
        if isinstance(each, torch.Tensor):
            found[id(each)] = each
        elif id(each) not in seen and not is_plain(each) and not isinstance(each, nn.Module):
            seen.add(id(each))
            if isinstance(each, MutableMapping):
                pending += each.values()
            if isinstance(each, list | tuple | MutableSet):
                pending += each
            pending += getattr(each, "__dict__", {}).values() if not callable(each) else []
    return list(found.values())
