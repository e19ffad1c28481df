"""Parameters between steps, where this rank has a part of them (tp) or only a description (pp).

    with torch.no_grad(): each.clamp_(-1, 1)              element by element: right on parts
    sum(each.pow(2).sum() for each in model.parameters()) a sum over what is here: refused
    each.numpy()[:] = 0                                   the memory that is here; sums of the array are refused

Outside of a call of the engine they have the class `Part`, and so has what a program makes of them element by element.
Forwards that a program calls itself, and code of the engine, compute with parts as ever.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from shardwise.engine.part_watch import LEAVE, PartWatch
from shardwise.engine.wrapping import in_backward
from shardwise.engine.zero.sharded_params import functions_of_metadata
from shardwise.errors import ModelError


class ReadsBetweenSteps:
    """Of the parameters of a model that are not whole on this rank."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Those at rest (stage 3) and of other classes refuse more.
        self._parameters = [each for each in parameters if type(each) is nn.Parameter]

    def turn(self, *, on: bool) -> None:
        """Begin or end to watch."""
        for each in self._parameters:
            each.__class__ = _PartParameter if on else nn.Parameter

    @contextmanager
    def turned(self, around: AbstractContextManager[None], *, on: bool) -> Iterator[None]:
        """Watch inside of `around`, or not; the other way round behind it."""
        with around:
            self.turn(on=on)
            try:
                yield
            finally:
                self.turn(on=not on)


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"{what!r} of the model's parameters between steps, of which this rank has a part (mesh.tp), or which are on "
        "another rank (mesh.pp). Inside `with engine.whole():` the model is whole; sw.full(engine) gives whole "
        "weights, one after the other; engine.step(batch, norms=...) reports norms of gradients"
    )


def _followed(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """Carry out one function of torch."""
    kwargs = kwargs or {}
    name = getattr(func, "__name__", str(func))
    with torch._C.DisableTorchFunctionSubclass():
        if func in functions_of_metadata() or func == torch.Tensor.__repr__ or _is_of_a_forward():
            return func(*args, **kwargs)
        parts = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Part | _PartParameter)]
        is_elsewhere = any(each.is_meta for each in parts)
        if func == torch.Tensor.numpy and not is_elsewhere:
            return func(*args, **kwargs).view(_PartArray)
        if func in _REFUSED or (func in LEAVE and is_elsewhere):
            raise _refusal(name)
        # Parts of several parameters may meet, which are cut alike, or torch refuses their shapes. Of what is elsewhere
        # it makes other descriptions, and refuses what needs values.
        watch = PartWatch([(each, True, 0) for each in parts if not each.is_meta], refusal=_refusal)
        try:
            with watch:
                output = func(*args, **kwargs)
        except RuntimeError as error:
            raise _refusal(name) from error
    return tree_map(lambda each: each.as_subclass(Part) if type(each) is torch.Tensor else each, output)


_REFUSED: frozenset[Any] = frozenset(getattr(torch.Tensor, name) for name in ("tolist", "__array__", "__reduce_ex__"))


def _is_of_a_forward() -> bool:
    """Whether a forward or a backward goes on, or code of the engine asks: a rank computes with what it has."""
    if torch.compiler.is_compiling() or in_backward():
        return True
    frame = sys._getframe(2)
    nearest = ""
    while frame is not None:
        if frame.f_code is _CALL:
            return True
        package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
        nearest = nearest or ("" if package == "torch" else package)
        frame = frame.f_back  # type: ignore[assignment]
    return nearest == "shardwise"


_CALL = nn.Module._call_impl.__code__


class Part(torch.Tensor):
    """What a program made between steps of parameters that are not whole here."""

    __torch_function__: Any = classmethod(_followed)


class _PartParameter(nn.Parameter):
    """A parameter that is not whole here, between steps."""

    _plain_class = nn.Parameter
    __torch_function__: Any = classmethod(_followed)


class _PartArray(np.ndarray[Any, Any]):
    """The memory of a part, for NumPy."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if method != "__call__":
            raise _refusal(f"{ufunc.__name__}.{method} of NumPy")
        return self.__array_function__(ufunc, (), inputs, kwargs)

    def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda each: np.asarray(each) if type(each) is _PartArray else each, (args, kwargs))
        output = func(*args, **kwargs)
        if output is not None and np.shape(output) != self.shape:
            raise _refusal(f"{func.__name__} of NumPy")
        return None if output is None else np.asarray(output).view(_PartArray)

    def tolist(self) -> Any:
        raise _refusal("tolist of NumPy")
