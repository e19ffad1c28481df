"""Parameters between steps, where this rank has a part of them (tp) or only a description (pp).

    with torch.no_grad(): each.clamp_(-1, 1)              element by element: right on parts
    sum(each.pow(2).sum() for each in model.parameters()) a sum over what is here: refused

Outside of a call of the engine they have the class `Part`, and so has what a program makes of them element by element.
Forwards that a program calls itself, and code of the engine, compute with parts as ever.
"""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from shardwise.engine.forward.layers import in_backward
from shardwise.engine.forward.part_watch import LEAVE, Held, PartWatch
from shardwise.engine.forward.sharded_parameters import functions_of_metadata
from shardwise.engine.torch_private import CALL_CODE, DisableTorchFunctionSubclass, tree_leaves, tree_map
from shardwise.errors import ModelError, ShardwiseError, in_words

Refusal: TypeAlias = Callable[[str], ShardwiseError]
"""What to say of an operation, by its name."""

ONE_ROOT = 0
"""Of all parts: they may meet. Torch refuses their shapes unless they are cut in the same way."""


class ReadsBetweenSteps:
    """Of the parameters of a model that are not whole on this rank."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        # Those at rest (stage 3) and of other classes refuse more.
        self._parameters = [each for each in parameters if type(each) is nn.Parameter]
        self._is_on = False

    def turn(self, *, on: bool) -> None:
        """Begin or end to watch."""
        self._is_on = on
        for each in self._parameters:
            each.__class__ = _PartParameter if on else nn.Parameter

    @contextmanager
    def turned(self, around: AbstractContextManager[None], *, on: bool) -> Iterator[None]:
        """Watch inside of `around`, or not; behind it as before."""
        with around:
            before = self._is_on
            self.turn(on=on)
            try:
                yield
            finally:
                self.turn(on=before)


def _refusal(what: str) -> ModelError:
    return ModelError(
        f"{what!r} of the model's parameters between steps: this rank has a part of them (mesh.tp), or another rank "
        "has them (mesh.pp). Inside `with engine.whole():` the model is whole; sw.full(engine) gives whole "
        "weights, one after the other; engine.step(batch, norms=...) reports norms of gradients"
    )


def carried_out(func: Any, args: Any, kwargs: Any, held: Sequence[Held], refusal: Refusal) -> Any:
    """What a function of torch gives; what it makes of tensors of `held` is a `Part`.

    held: what it takes of parameters. Raises `refusal(name)` where it needs more of them than is here.
    """
    kwargs = kwargs or {}
    with DisableTorchFunctionSubclass():
        if not held or func in functions_of_metadata() or func == torch.Tensor.__repr__ or _is_of_a_forward():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        has_parts = any(is_part for _, is_part, _ in held)
        has_sums = any(getattr(each, "is_sum", False) for each, *_ in held)
        is_elsewhere = any(each.is_meta for each, *_ in held)
        if func in _VALUES and not has_parts and not has_sums:
            # A file must not name the class of a `Part`.
            plain = tree_map(lambda each: each.as_subclass(torch.Tensor) if type(each) is Part else each, args)
            return func(*plain, **kwargs)
        # An array of numpy can be written to, which nothing shows.
        if func in _REFUSED or func == torch.Tensor.numpy or (func in LEAVE and (is_elsewhere or has_sums)):
            raise refusal(name)
        if func == torch.Tensor.__deepcopy__:  # torch's own asks for the same class, which is given to results below
            func, args = torch.clone, args[:1]
        # Of a description (meta) torch makes another one, and refuses what needs values.
        watch = PartWatch([each for each in held if not each[0].is_meta], refusal=refusal)
        try:
            with watch:
                output = func(*args, **kwargs)
        except RuntimeError as error:
            if not has_parts:
                raise
            raise refusal(f"{name} ({in_words(error)})") from error

    def made(each: Any) -> Any:
        if type(each) is not torch.Tensor or (each.dtype == torch.bool and not has_parts):
            return each
        root = min(watch.roots_of(each) or {root for *_, root in held})
        counts = [whole.numel() for whole, _, of in held if of == root and not getattr(whole, "is_sum", False)]
        is_sum = not counts or (watch.has_summed and each.numel() < max(counts))
        return Part.of(each, refusal, has_parts, root, is_sum)

    return tree_map(made, output)


_REFUSED: frozenset[Any] = frozenset(getattr(torch.Tensor, name) for name in ("tolist", "__array__", "__reduce_ex__"))
_VALUES = _REFUSED | {getattr(torch.Tensor, name) for name in ("item", "__float__", "__int__", "__dlpack__")}
"""What gives the values of a tensor to Python: a whole parameter has them all."""


def _is_of_a_forward() -> bool:
    """Whether a forward, a backward or code of the engine asks: these compute with what the rank has."""
    if torch.compiler.is_compiling() or in_backward():
        return True
    frame = sys._getframe(3)
    nearest = ""
    while frame is not None:
        name = str(frame.f_globals.get("__name__", ""))
        if frame.f_code is CALL_CODE or name == _ENGINE:
            return True
        package = name.partition(".")[0]
        nearest = nearest or ("" if package == "torch" else package)
        frame = frame.f_back  # type: ignore[assignment]
    return nearest == "shardwise"


_ENGINE = "shardwise.engine.engine"
"""A step of it may run code of the user: an optimizer's, say, with state that was made between steps."""


class Part(torch.Tensor):
    """What a program made between steps of parameters that are not whole here, or not all here."""

    refusal: Refusal
    is_part: bool
    root: int
    is_sum: bool

    @staticmethod
    def of(made: torch.Tensor, refusal: Refusal, is_part: bool, root: int, is_sum: bool) -> "Part":
        """The same values. refusal: what to say of an operation that needs more. is_part, root: see `PartWatch`.
        is_sum: whether its elements are sums of several elements of a parameter."""
        part = made.as_subclass(Part)
        part.refusal, part.is_part, part.root, part.is_sum = refusal, is_part, root, is_sum
        return part

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Follow it."""
        parts = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Part | _PartParameter)]
        return carried_out(func, args, kwargs, [(each, each.is_part, each.root) for each in parts], parts[0].refusal)


class _PartParameter(nn.Parameter):
    """A parameter that is not whole here, between steps."""

    _plain_class = nn.Parameter
    refusal = staticmethod(_refusal)
    is_part, root, is_sum = True, ONE_ROOT, False
    __torch_function__ = Part.__torch_function__
