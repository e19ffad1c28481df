"""What the code of a model meets of sharded parameters (stage 3), whose values exist only while they are gathered.

    not gathered   class ShardedX: shape, dtype and gradient as ever; values by a separate read, or a refusal
    gathered       class X (nn.Parameter, ...), and torch knows of nothing
    afterwards     a view of it that a forward gave away is a copy (`copy_of_view`): the memory is gone

Operations that need values go to the reader of the buffers (`OutsideReads`); where no rank can gather, they are
refused.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from shardwise.comm.local_tensors import span_elements
from shardwise.engine.forward.writes import SeenTensor
from shardwise.engine.torch_private import BACKWARD_HOOKS, BASE, GRADIENT_HOOKS, IS_VIEW, DisableTorchFunctionSubclass
from shardwise.errors import ModelError

_MEMORY = frozenset({"data", BASE, "__cuda_array_interface__"})
# Attributes that look like metadata and are views: `weight.T` needs values.
_VALUES = _MEMORY | {"T", "mT", "H", "mH", "real", "imag", "__dict__"}

# A list of what is allowed, and not of what is refused: an operation that torch gains later is then treated as one that
# needs values, and gathers or is refused. The other way round it would read memory without bytes.
_ASKED = (
    *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "data_ptr", "storage_offset"),
    *("untyped_storage", "get_device", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj"),
    *("is_neg", "is_inference", "is_pinned", "is_shared", "is_same_size", "has_names", "requires_grad_", "__len__"),
    *("register_hook", "register_post_accumulate_grad_hook", "__hash__", IS_VIEW),
)


@functools.cache
def functions_of_metadata() -> frozenset[Any]:
    """The functions that ask a parameter for something else than its values."""
    found: set[Any] = {getattr(torch.Tensor, name) for name in _ASKED if hasattr(torch.Tensor, name)}
    found |= {torch.numel, torch.is_floating_point, torch.is_complex}
    for name in dir(torch.Tensor):
        attribute: Any = getattr(torch.Tensor, name, None)
        if name not in _VALUES and hasattr(attribute, "__get__") and hasattr(attribute, "__set__"):
            found.add(attribute.__get__)
    # Autograd and `zero_grad` set these on parameters that are not gathered.
    for name in ("grad", "requires_grad", BACKWARD_HOOKS, GRADIENT_HOOKS):
        found.add(getattr(torch.Tensor, name).__set__)
        found.add(getattr(torch.Tensor, name).__delete__)
    return frozenset(found)


@functools.cache
def functions_of_memory() -> frozenset[Any]:
    """The functions that give the memory of a parameter, or change it, in ways that no hook sees."""
    # `numpy` gives an array over memory that is freed behind its back. No copy can be put in its place, for a write to
    # the array shows in no version counter.
    names = ("numpy", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "storage", "set_", "share_memory_")
    found: set[Any] = {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}
    return frozenset(found | {getattr(torch.Tensor, name).__get__ for name in _MEMORY if hasattr(torch.Tensor, name)})


# One class for each kind of parameter: code that compares the types of two parameters finds them alike.
@functools.cache
def sharded_class(kind: type) -> type:
    """The class of parameters of class `kind` while they are not gathered."""

    def torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in functions_of_metadata():
            with DisableTorchFunctionSubclass():  # or this function would be called again
                return func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        taken = [each for each in _flattened(given) if hasattr(type(each), "_is_sharded_param")]
        writes = getattr(func, "__name__", "") in ("__set__", "__delete__", "set_", "share_memory_")
        if taken and not writes and (read := getattr(taken[0], "_reader", None)) is not None:
            output = read(func, args, kwargs or {}, taken, is_followed=func not in functions_of_memory())
            if output is not NotImplemented:
                return output
        raise _refusal(_in_words(func), given)

    def described(self: Any) -> str:
        name, unit = self._unit_place
        return f"Parameter {name!r} {list(self.shape)} {self.dtype}, not gathered (unit {unit!r})"

    body = {
        "__torch_function__": classmethod(torch_function),
        "__repr__": described,
        "__module__": kind.__module__,
        "_is_sharded_param": True,
        "_plain_class": kind,
    }
    return type(kind)(f"Sharded{kind.__name__}", (kind,), body)


def _in_words(func: Any) -> str:
    """What a program does that calls this function of torch."""
    name: str = getattr(func, "__name__", str(func))
    attribute = getattr(getattr(func, "__self__", None), "__name__", "")
    return {"__get__": f"to read .{attribute}", "__set__": f"to set .{attribute}"}.get(name, name)


def _refusal(what: str, args: Iterable[Any]) -> ModelError:
    name, unit = next(
        (each._unit_place for each in _flattened(args) if hasattr(type(each), "_is_sharded_param")), ("?", "?")
    )
    within = f"of unit {unit!r}" if unit else "of the model itself"
    return ModelError(
        f"{what} needs the values of parameter {name!r} {within}, which is cut over ranks (stage 3). It is gathered "
        "only for forwards of engine.step, evaluate, predict and generate. To read or write values outside of them use "
        "engine.whole(), or sw.full(engine) and sw.load. In a forward, operations on it give new tensors. Read its "
        "memory (data, numpy) after detach(), or name the module that reads it in sharding.units "
        "('.' is the model itself)"
    )


def _flattened(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flattened(value)
        else:
            yield value


_ALIGNMENT_BYTES = 64
"""At multiples of this torch allocates, on every device."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy that a forward has, where one process has a view of the parameter."""

    seen: SeenTensor
    name: str

    def check(self) -> None:
        """Raise ModelError where the forward wrote to it: one process would have changed the parameter."""
        if self.seen.is_written(self.seen.tensor):
            raise refusal_of_write(self.name)


def refusal_of_write(name: str) -> ModelError:
    """What to say of a write to a parameter that is gathered for a forward only."""
    return ModelError(
        f"a forward wrote to parameter {name!r}, which is a copy for the time of that forward (stage 3): the values "
        "are lost. Let forwards write to buffers, or use stage 2"
    )


def copy_of_view(view: torch.Tensor) -> torch.Tensor:
    """The values of a view in separate memory, with its strides and alignment: kernels round by them."""
    if not view.requires_grad:
        return _copied(view.detach())
    # `clone` would do for the values; but its strides and alignment are its own, and the last bits of results with it.
    copy: torch.Tensor = _CopyOfView.apply(view)  # type: ignore[no-untyped-call]
    # A view of a parameter says that it requires a gradient even where it is made without one.
    return copy if copy.requires_grad else copy.requires_grad_()


class _CopyOfView(torch.autograd.Function):
    """Passes the gradient on as it is."""

    @staticmethod
    def forward(ctx: Any, view: torch.Tensor) -> torch.Tensor:
        return _copied(view)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def _copied(view: torch.Tensor) -> torch.Tensor:
    # As far from a multiple of 64 bytes as the view is: vector kernels treat what comes before one in another way.
    lead = int(view.storage_offset()) % (_ALIGNMENT_BYTES // view.element_size())
    room = torch.empty(lead + span_elements(view), dtype=view.dtype, device=view.device)
    copy = torch.empty(0, dtype=view.dtype, device=view.device)
    copy.set_(room.untyped_storage(), lead, view.shape, view.stride())
    # A copy to an expanded tensor is refused, as several places are one in memory: narrowed to that one.
    target, source = copy, view
    for dim, stride in enumerate(view.stride()):
        if stride == 0 and view.shape[dim] > 1:  # expanded: one value for all places
            target, source = target.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    target.copy_(source)
    return copy
