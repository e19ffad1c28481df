"""Code of the user around an update, where this rank has parts: what sees a part for the whole is refused.

    for each in group["params"]: each.grad.clamp_(-1, 1)      element by element: right on parts
    clip_grad_norm_(group["params"], 1.0)                     a norm of what is here: refused
    each.grad.mul_(1 / each.grad.norm())                      right where parameters are whole, refused on slices

Hooks are not tried at `parallelize`: a norm that is only logged changes no update, and a trial would be seen.
"""

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from shardwise.engine.torch_private import TorchDispatchMode, optimizer_hooks, schema_of, storage_id, tree_leaves
from shardwise.errors import OptimizerError, ShardwiseError

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
        given = [each for each in tree_leaves((args, kwargs)) if torch.is_tensor(each)]
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
        made = [each for each in tree_leaves(output) if torch.is_tensor(each)]
        sums = is_sum(func.overloadpacket)
        self.has_summed |= sums
        takes_less = sums or any(each.numel() < min(followed) for each in made)
        if takes_less and max(followed) > 1 and not of_all.isdisjoint(self._parts):
            raise self._refusal(name)
        for at, each in enumerate(made):
            # What is true or false of elements is no number of them.
            if each.dtype != torch.bool and not self.roots_of(each):
                self._made[_storage(each)] = each, roots[at] if is_each else of_all
        return output

    def refuse_unseen(self, func: Any, tensor: torch.Tensor) -> None:
        """Refuse a function that takes values out of torch, where no operation is seen, or gives a part's shape."""
        if func in _SHAPES and id(tensor) in self._slices:
            raise self._refusal(getattr(getattr(func, "__self__", func), "__name__", "the shape"))
        if func in LEAVE and self.roots_of(tensor):
            raise self._refusal(func.__name__)

    def roots_of(self, tensor: torch.Tensor) -> _Roots:
        """Of what parameters its values are, by their numbers."""
        if (made := self._made.get(_storage(tensor))) is not None:
            return made[1]
        address = tensor.data_ptr() if tensor.numel() and tensor.device.type != "meta" else 0
        at = bisect_right(self._starts, address) - 1
        return frozenset([self._spans[at][2]]) if at >= 0 and address < self._spans[at][1] else frozenset()

    def _refuse_stale(self, func: Any, given: Sequence[torch.Tensor]) -> None:
        is_write = any(each.alias_info and each.alias_info.is_write for each in schema_of(func).arguments)
        is_stale = any(_storage(each) in self._stale and not self._is_held(each) for each in given)
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


def _storage(tensor: torch.Tensor) -> int:
    return int(storage_id(tensor.untyped_storage()))


def _refusal(name: str) -> OptimizerError:
    return OptimizerError(
        f"a hook around an update takes {name!r} over what is here of parameters or gradients, and {PART}"
    )
