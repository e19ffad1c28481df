"""Metas: what a rewrite knows of a tensor, which is all but its elements."""

from collections.abc import Mapping
from operator import index
from typing import Any, NamedTuple

from shardwise.errors import RewriteError
from shardwise.plan.dtypes import ITEMSIZE_BYTES

__all__ = ["TensorMeta", "metas_of"]


class TensorMeta(NamedTuple):
    """Shape, dtype and layout of a tensor."""

    shape: tuple[int, ...]
    dtype: str
    """By torch's name for it: "float32"."""
    degrees: tuple[int, ...] = ()
    """Into how many equal boxes tensor parallelism cuts each dim; 0 where something cuts it and it is not known what.

    () is not cut at all.
    """


def metas_of(tensors: Mapping[str, Any], what: str = "tensors") -> dict[str, TensorMeta]:
    """Return the metas of tensors by name; `what` they are called in messages.

    A value is a TensorMeta, a shape (its dtype is then "float32"), a pair (shape, dtype), or anything with `shape` and
    `dtype`: a tensor of torch or numpy, a `StoredTensor`. Raises RewriteError for anything else.

    >>> metas_of({"w": (2, 3), "b": ((3,), "bfloat16")})["b"]
    TensorMeta(shape=(3,), dtype='bfloat16', degrees=())
    """
    if not isinstance(tensors, Mapping):
        raise RewriteError(f"{what} are a mapping of names to tensors or shapes, not {tensors!r:.100}")
    metas = {}
    problems = []
    good: set[TensorMeta] = set()  # few differ among many
    for name, value in tensors.items():
        try:
            meta = value if type(value) is TensorMeta else _meta_of(value)
            if meta not in good:
                _check(meta)
                good.add(meta)
        except (TypeError, ValueError) as error:
            problems.append(f"{name}: {error}")
            continue
        if not isinstance(name, str):
            problems.append(f"{name!r:.100} is no name of a tensor: names are text")
            continue
        metas[name] = meta
    if problems:
        raise RewriteError(*problems, about=what)
    return metas


def _meta_of(value: Any) -> TensorMeta:
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        return TensorMeta(tuple(map(int, value.shape)), _dtype(value.dtype))
    match value:
        case (tuple() | list() as shape, dtype):
            return TensorMeta(_shape(shape, value), _dtype(dtype))
        case _:
            return TensorMeta(_shape(value, value), "float32")


def _shape(shape: Any, value: Any) -> tuple[int, ...]:
    try:
        return tuple(map(index, shape))
    except TypeError:
        raise TypeError(
            f"give a tensor, a shape such as (2, 3), or a pair (shape, dtype), not {value!r:.100}"
        ) from None


def _dtype(dtype: Any) -> str:
    """The name of a dtype, which may be one of torch's own."""
    return str(dtype).removeprefix("torch.")


def _check(meta: TensorMeta) -> None:
    """Raise ValueError for what no tensor has."""
    if any(size < 0 for size in meta.shape):
        raise ValueError(f"shape {list(meta.shape)} has a negative size")
    if meta.dtype not in ITEMSIZE_BYTES:
        raise ValueError(f"there is no dtype {meta.dtype!r:.100}; one is called as by torch, such as 'float32'")
