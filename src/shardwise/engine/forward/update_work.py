"""How much work the update of a matrix is, counted on tensors without memory: by shape, and for any optimizer.

    Newton-Schulz of m x n, m > n     products of n x m x n and n x n x n        grows as m n n
    a factored second moment          operations on single elements             grows as m n

What is balanced by it is a sum over matrices, so constants that all matrices have do not matter.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from shardwise.engine.forward.observe import Observed
from shardwise.engine.torch_private import tree_leaves

_PER_ELEMENT = 8
"""Products and sums in the time in which memory reads and writes one element: roughly, on devices and on the CPU."""

_SMALL = 64
"""The longest dim of parameters for trials with values."""

_DECOMPOSITIONS = frozenset({"linalg", "cholesky", "geqrf", "svd", "qr", "inverse", "orgqr", "ormqr"})
_SUMS = frozenset(
    {"sum", "mean", "prod", "std", "var", "var_mean", "norm", "linalg_vector_norm", "_foreach_norm", "_foreach_max"}
    | {"dot", "vdot", "cumsum", "any", "all", "max", "min", "amax", "amin", "aminmax", "argmax", "argmin"}
    | {"median", "sort", "topk", "kthvalue", "count_nonzero", "histc", "histogram", "bincount"}
)
_PER_DECOMPOSITION = 10
"""Work of a decomposition of m x n: so many times m n min(m, n)."""


def _work_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], made: Any) -> int:
    packet = func.overloadpacket
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=made))
    tensors = [each for each in tree_leaves((args, made)) if isinstance(each, torch.Tensor)]
    largest = max(tensors, key=torch.Tensor.numel, default=None)
    if largest is None:
        return 0
    if largest.dim() > 1 and _is_decomposition(packet.__name__):
        return _PER_DECOMPOSITION * largest.numel() * min(largest.shape[-2:])
    return _PER_ELEMENT * largest.numel()


def is_sum(operation: Any) -> bool:
    """Whether an operation of torch makes one number of several elements."""
    return operation in flop_registry or operation.__name__ in _SUMS or _is_decomposition(operation.__name__)


def _is_decomposition(name: str) -> bool:
    # By whole words: a square root has "qr" in its name.
    words = name.split("_")
    return "norm" not in words and not _DECOMPOSITIONS.isdisjoint(words)


def counted_work(shape: Sequence[int], update: Callable[[Sequence[torch.Tensor]], object]) -> int:
    """The work of `update`, which is given the values of a parameter and its gradients at three steps.

    An update that looks at values is tried on small parameters of this form, and its growth is taken from two of them.
    """
    whole = _count(shape, update, device="meta")
    if whole is not None:
        return whole
    longest = max(shape, default=1)
    small, half = (
        _count([max(1, size * most // max(longest, most)) for size in shape], update, device="cpu")
        for most in (_SMALL, _SMALL // 2)
    )
    if small is None or half is None:
        return max(1, math.prod(shape) * min(shape, default=1))
    # Whole numbers only: ranks on hosts of several kinds must find the same.
    growth = max(0, round(math.log2(small / half)))
    return int(small * max(longest, _SMALL) ** growth // _SMALL**growth)


def _count(shape: Sequence[int], update: Callable[[Sequence[torch.Tensor]], object], *, device: str) -> int | None:
    # Three steps: what an optimizer does in its first one only is not what it does.
    generator = torch.Generator().manual_seed(0)
    stretch = [
        torch.empty(tuple(shape), device=device) if device == "meta" else torch.randn(tuple(shape), generator=generator)
        for _ in range(4)
    ]
    work = Observed(_work_of)
    try:
        with work:
            update(stretch)
    except Exception:  # whatever an unknown optimizer raises
        return None
    return max(1, int(work.value))
