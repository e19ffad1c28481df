"""Masters as code of the user meets them: the parameters of an optimizer that has an engine.

in engine.step      class nn.Parameter: gradients are there, and torch knows of nothing
between two steps   class Master: writes are taken note of; a gradient, or a sum over a part, is refused in words
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardwise.comm.digests import digest_of_values
from shardwise.engine.forward.part_watch import ONE_ROOT, PART, Held, carried_out
from shardwise.engine.forward.sharded_parameters import functions_of_memory, functions_of_metadata
from shardwise.engine.forward.writes import Content, is_on_host
from shardwise.engine.torch_private import (
    DisableTorchFunctionSubclass,
    make_wrapper_subclass,
    tree_leaves,
    version_of,
)
from shardwise.errors import OptimizerError

NO_GRADIENT = (
    "outside of engine.step the engine's optimizer has none. Call engine.step(batch), which computes gradients and "
    "updates; plan.clip_grad_norm clips, engine.step(batch, norms=...) reports norms, and engine.gradients() gives "
    "those of the last step. An optimizer that takes two backwards for an update (SAM) cannot have an engine"
)


class GradientElsewhere(torch.Tensor):
    """What stands for a gradient that is not here: it has a shape, and refuses to be read or written."""

    _why: str

    @staticmethod
    def of(parameter: torch.Tensor, why: str) -> "GradientElsewhere":
        """In the shape of a parameter. why: in words, with what to do instead."""
        with DisableTorchFunctionSubclass():
            made: GradientElsewhere = make_wrapper_subclass(
                GradientElsewhere, parameter.shape, dtype=parameter.dtype, device=parameter.device
            )
        made._why = why
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """What asks for no values is let through, and `zero_grad` between steps."""
        if func in functions_of_metadata():
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        why = next(each._why for each in tree_leaves((args, kwargs)) if isinstance(each, GradientElsewhere))
        if why is NO_GRADIENT and getattr(func, "__name__", "") in ("zero_", "detach_", "_foreach_zero_"):
            return args[0]
        raise OptimizerError(f"{getattr(func, '__name__', func)} of a gradient: {why}")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """The same below autograd."""
        return cls.__torch_function__(func, types, args, kwargs)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"GradientElsewhere({list(self.shape)})"


class MasterMemory:
    """What shows writes from outside to the masters of a bucket.

        a write                              shown by
        p.mul_(2), an optimizer              the count of writes that torch keeps, which masters share
        p.data, torch._foreach_*_, DLPack    the reach for the memory, as a master announces it (`is_reached`)
        p.detach().numpy()[0] = 1            a digest of all values before the first touch in this interval
        by a view that was kept for long     their values when the engine wrote them last; read if code had a master

    Digests are of memory of the host: no device is waited for.
    """

    def __init__(self, master: torch.Tensor) -> None:
        """master: what the masters of the bucket view."""
        self._master = master
        self._version = 0
        self._known: Content | None = None
        """What it held when the engine wrote it last."""
        self._touched: str | None = None
        """A digest of it before the first touch since."""
        self.is_reached = False
        """Whether somebody was given a master's memory in a way in which no write is counted."""
        self.is_touched = False
        """Whether somebody did anything with one since it was known: perhaps an array of numpy was made of a view."""
        self.is_shown = False
        """Whether somebody ever did: views of it may have been kept."""
        self.has_others = False
        """Whether other ranks update other parameters, or other elements."""

    def note(self) -> None:
        """What is there now is what is to be there."""
        self._version, self._touched = version_of(self._master), None
        self.is_reached = self.is_touched = False
        self._known = Content(self._master) if self.is_shown and is_on_host(self._master) else None

    def touch(self, *, reaches: bool) -> None:
        """Somebody is about to do something with a master. reaches: in a way in which no write is counted."""
        if not self.is_touched:
            self.is_reached |= not self._is_as_known()
            self.is_touched = self.is_shown = True
            self._touched = digest_of_values(self._master) if is_on_host(self._master) else None
        self.is_reached |= reaches

    def is_written(self, *, reads: bool) -> bool:
        """Whether something was written since. reads: also as values show it."""
        if self.is_reached or version_of(self._master) != self._version:
            return True
        if not (reads and self.is_shown):
            return False
        is_touched = self._touched is not None and digest_of_values(self._master) != self._touched
        return is_touched or not self._is_as_known()

    def _is_as_known(self) -> bool:
        return self._known is None or self._known.holds_for(self._master)


@dataclass(frozen=True, slots=True)
class _MasterPlace:
    memory: MasterMemory | None
    """None for a matrix that is whole during an update only: see `MatrixUpdates`."""
    is_part: bool


class Master(nn.Parameter):
    """A master between two steps of its engine."""

    _place: _MasterPlace | None = None

    @property
    def grad(self) -> Any:
        """None where there may be none; what refuses to be read where a plain program has one."""
        return _GRAD.__get__(self) if self._place is None else GradientElsewhere.of(self, NO_GRADIENT)

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        if self._place is None:
            _GRAD.__set__(self, value)
        elif value is not None:
            raise OptimizerError(f"p.grad = ... sets a gradient: {NO_GRADIENT}")

    @grad.deleter
    def grad(self) -> None:
        pass

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Take note of what may write without a count, and refuse what sees a part for the whole."""
        with DisableTorchFunctionSubclass():
            if func in functions_of_metadata():
                return func(*args, **(kwargs or {}))
            if func == _SET_DATA:  # the memory stays the engine's
                return args[0].detach().copy_(args[1].detach())
            held: list[Held] = []
            for each in tree_leaves((args, kwargs)):
                if not isinstance(each, Master) or each._place is None:
                    continue
                if (memory := each._place.memory) is None:
                    raise OptimizerError(
                        f"{getattr(func, '__name__', func)} needs the values of a matrix {list(each.shape)} of the "
                        "optimizer, which is whole here during an update only: between two, its parts are on several "
                        "ranks. sw.full(engine) gives it, and engine.whole() takes writes"
                    )
                # Torch counts no write of those to lists under the mode that follows parts.
                memory.touch(reaches=_writes_to_lists(func) or func in functions_of_memory())
                if memory.has_others:
                    is_part = each._place.is_part
                    held.append((each, is_part, ONE_ROOT if is_part else id(each)))
        return carried_out(func, args, kwargs, held, _refusal)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """As a plain parameter: the engine is no part of it."""
        return nn.Parameter(self.detach(), self.requires_grad).__reduce_ex__(protocol)


def _writes_to_lists(func: Any) -> bool:
    """Whether it is one of `torch._foreach_*_`, `torch._fused_*_`: those without the last underscore only read."""
    name: str = getattr(func, "__name__", "")
    return name.startswith("_") and name.endswith("_") and not name.startswith("__")


def _refusal(what: str) -> OptimizerError:
    return OptimizerError(f"{what} of the optimizer's parameters: {PART}")


_GRAD: Any = torch.Tensor.grad
_SET_DATA: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


def master(values: torch.Tensor, memory: MasterMemory | None, *, is_part: bool) -> Master:
    """A parameter that views `values`. memory: None where it has none between steps. is_part: of what the model has."""
    made: Any = nn.Parameter(values)
    made._place = _MasterPlace(memory, is_part)
    made.__class__ = Master
    return made  # type: ignore[no-any-return]


def open_masters(masters: Iterable[nn.Parameter], *, shown: bool) -> None:
    """From here on they are plain parameters. shown: code of the user around the update sees them."""
    for each in masters:
        if shown and isinstance(each, Master) and each._place is not None and each._place.memory is not None:
            each._place.memory.is_shown = True
        each.__class__ = nn.Parameter


def close_masters(masters: Iterable[nn.Parameter]) -> None:
    """From here on they have no gradients: these were views of an arena that the next update may lay out anew."""
    for each in masters:
        each.grad = None
        each.__class__ = Master
