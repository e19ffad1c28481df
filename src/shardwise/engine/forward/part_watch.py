"""Code of the user that computes with parts, around an update or between steps: what sees a part for the whole.

    for each in group["params"]: each.grad.clamp_(-1, 1)      element by element: right on parts
    clip_grad_norm_(group["params"], 1.0)                     a norm of what is here: refused
    each.grad.mul_(1 / each.grad.norm())                      right where parameters are whole, refused on slices

Hooks are not tried at `parallelize`: a norm that is only logged changes no update, and a trial would be seen.

Between steps, where this rank has a part of the parameters (tp) or only a description (pp):

    with torch.no_grad(): each.clamp_(-1, 1)              element by element: right on parts
    sum(each.pow(2).sum() for each in model.parameters()) a sum over what is here: refused

Outside of a call of the engine parameters have the class `Part`, and so has what a program makes of them element by
element. Forwards that a program calls itself, and code of the engine, compute with parts as ever.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from shardwise.engine.forward.layers import in_backward
from shardwise.engine.forward.sharded_parameters import functions_of_metadata
from shardwise.engine.torch_private import (
    CALL_CODE,
    DisableTorchFunctionSubclass,
    TorchDispatchMode,
    optimizer_hooks,
    schema_of,
    storage_of,
    tensor_leaves,
    tree_leaves,
    tree_map,
)
from shardwise.errors import ModelError, OptimizerError, ShardwiseError, in_words

PART = (
    "this rank has a part of the parameter, or of the parameters. plan.clip_grad_norm clips by the norm of all, and "
    "engine.step(batch, norms=...) reports norms; sw.full(engine) gives whole weights. Or use sw.Sharding(stage=0) "
    "(sharding.stage) without mesh.tp and mesh.pp"
)
"""What to do instead of looking at parts."""

_JOINS = ("stack", "cat", "_local_scalar_dense")
"""Operations by which values of a parameter leave it."""

_DECOMPOSITIONS = frozenset({"linalg", "cholesky", "geqrf", "svd", "qr", "inverse", "orgqr", "ormqr"})
_SUMS = frozenset(
    {"sum", "mean", "prod", "std", "var", "var_mean", "norm", "linalg_vector_norm", "_foreach_norm", "_foreach_max"}
    | {"dot", "vdot", "cumsum", "any", "all", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin"}
    | {"median", "sort", "topk", "kthvalue", "count_nonzero", "histc", "histogram", "bincount"}
)

_Roots = frozenset[int]

Held: TypeAlias = tuple[torch.Tensor, bool, int]
"""A tensor of this rank, whether it is a part of one, and a number that it shares with what it may meet."""


def is_product(operation: Any) -> bool:
    """Whether an operation of torch multiplies or decomposes matrices."""
    # By whole words: a square root has "qr" in its name.
    words = operation.__name__.split("_")
    return operation in flop_registry or ("norm" not in words and not _DECOMPOSITIONS.isdisjoint(words))


def is_sum(operation: Any) -> bool:
    """Whether an operation of torch makes one number of several elements."""
    return operation.__name__ in _SUMS or is_product(operation)


class PartWatch(TorchDispatchMode):
    """Follows values of parameters and gradients, and refuses what needs more of them than is here."""

    def __init__(
        self,
        held: Sequence[Held],
        *,
        stale: Collection[int] = (),
        refusal: Callable[[str], ShardwiseError] | None = None,
    ) -> None:
        """held: parameters and gradients, or what was made of them. stale: storages that have no new values before the
        update is over, but for what is held of them. refusal: what to say of an operation; None: of one in a hook
        around an update."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._spans = sorted((each.data_ptr(), each.data_ptr() + each.nbytes, root) for each, _, root in held)
        self._starts = [start for start, *_ in self._spans]
        self._parts = frozenset(root for _, is_part, root in held if is_part)
        self._slices = {id(each): each for each, is_part, _ in held if is_part}
        """What has another shape than the parameter or its gradient, by id."""
        self._stale = stale
        self._refusal = refusal or _refusal
        self._made: dict[int, tuple[torch.Tensor, _Roots]] = {}
        """By storage what was made of them. Kept, so that no other tensor takes its memory."""
        self._on = ExitStack()
        self._is_on = False
        self.is_before = True
        """Whether the update is still to come."""
        self.has_summed = False
        """Whether an operation has made one number of several elements."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Carry out one operation."""
        kwargs = kwargs or {}
        given = tensor_leaves((args, kwargs))
        self._refuse_stale(func, given)
        roots = [self.roots_of(each) for each in given]
        followed = [each.numel() for each, of in zip(given, roots, strict=True) if of]
        if not followed:
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        is_each = name.startswith("_foreach")
        of_all = frozenset().union(*roots)
        if name in _JOINS or (len(of_all) > 1 and not is_each):
            raise self._refusal(name)
        output = func(*args, **kwargs)
        made = tensor_leaves(output)
        sums = is_sum(func.overloadpacket)
        self.has_summed |= sums
        takes_less = sums or any(each.numel() < min(followed) for each in made)
        if takes_less and max(followed) > 1 and not of_all.isdisjoint(self._parts):
            raise self._refusal(name)
        for at, each in enumerate(made):
            # What is true or false of elements is no number of them.
            if each.dtype != torch.bool and not self.roots_of(each):
                self._made[storage_of(each)] = each, roots[at] if is_each else of_all
        return output

    def refuse_unseen(self, func: Any, tensor: torch.Tensor) -> None:
        """Refuse a function that takes values out of torch, where no operation is seen, or gives a part's shape."""
        if func in _SHAPES and id(tensor) in self._slices:
            raise self._refusal(getattr(getattr(func, "__self__", func), "__name__", "the shape"))
        if func in LEAVE and self.roots_of(tensor):
            raise self._refusal(func.__name__)

    def roots_of(self, tensor: torch.Tensor) -> _Roots:
        """Of what parameters its values are, by their numbers."""
        if (made := self._made.get(storage_of(tensor))) is not None:
            return made[1]
        address = tensor.data_ptr() if tensor.numel() and tensor.device.type != "meta" else 0
        at = bisect_right(self._starts, address) - 1
        return frozenset([self._spans[at][2]]) if at >= 0 and address < self._spans[at][1] else frozenset()

    def _refuse_stale(self, func: Any, given: Sequence[torch.Tensor]) -> None:
        is_write = schema_of(func).is_mutable
        is_stale = any(storage_of(each) in self._stale and not self._is_held(each) for each in given)
        if is_stale and (is_write or not self.is_before):
            raise OptimizerError(
                f"{func.overloadpacket.__name__} of the model's parameters in a hook of an optimizer: they get their "
                "new values once all ranks have updated. Do it after engine.step(batch), or with the parameters in "
                "optimizer.param_groups"
            )

    def _is_held(self, tensor: torch.Tensor) -> bool:
        at = bisect_right(self._starts, tensor.data_ptr()) - 1
        return at >= 0 and tensor.data_ptr() + tensor.nbytes <= self._spans[at][1]

    def turn(self, on: bool) -> None:
        """Begin or end to watch."""
        if on != self._is_on:
            self._is_on = on
            if on:
                self._on.enter_context(self)
                self._on.enter_context(_Unseen(self))
            else:
                self._on.close()

    @contextmanager
    def around(self, optimizer: torch.optim.Optimizer) -> Iterator[None]:
        """Watch what a step runs before and after the optimizer's own."""
        before: Any = optimizer_hooks(optimizer, "step_pre", {})
        after: Any = optimizer_hooks(optimizer, "step_post", {})

        def begin(*_: Any) -> None:
            self.turn(False)
            self.is_before = False

        before[self] = begin  # the last one
        hooks = {self: lambda *_: self.turn(True), **after}  # the first one
        after.clear()
        after.update(hooks)
        self.turn(True)
        try:
            yield
        finally:
            self.turn(False)
            self._made.clear()
            del before[self], after[self]


class _Unseen(TorchFunctionMode):
    """Sees functions that no operation of a dispatch mode shows."""

    def __init__(self, watch: PartWatch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in LEAVE or func in _SHAPES:
            self._watch.refuse_unseen(func, args[0])
        return func(*args, **(kwargs or {}))


LEAVE: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in ("numpy", "tolist", "__array__", "__dlpack__")
)


_SHAPES: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name) for name in ("dim", "ndimension", "size", "numel", "nelement", "stride", "__len__")
) | {getattr(torch.Tensor, name).__get__ for name in ("shape", "ndim")}


def _refusal(name: str) -> OptimizerError:
    return OptimizerError(
        f"a hook around an update takes {name!r} over what is here of parameters or gradients, and {PART}"
    )


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


def _refusal_between(what: str) -> ModelError:
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
    refusal = staticmethod(_refusal_between)
    is_part, root, is_sum = True, ONE_ROOT, False
    __torch_function__ = Part.__torch_function__
