"""Output dtypes: floats of an exported model in one dtype, out of masters where a save has them."""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from shardwise.checkpoint.contents import Contents, StoredTensor, is_model_name
from shardwise.errors import CheckpointError
from shardwise.plan.dtypes import COMPUTE_DTYPES
from shardwise.plan.names import MASTER, state_name
from shardwise.rewrite import Rewrite
from shardwise.rewrite.spelling import quoted

__all__ = ["casting", "check_dtype", "main_dtype", "with_masters"]


def check_dtype(dtype: str) -> None:
    """Raise CheckpointError for what floats cannot be cast to."""
    if dtype not in COMPUTE_DTYPES:
        raise CheckpointError(
            f"dtype {dtype!r} (--dtype) was asked for; floats are written in {', '.join(COMPUTE_DTYPES)}, or as stored"
        )


def with_masters(contents: Contents, dtype: str) -> tuple[Contents, tuple[str, ...]]:
    """A checkpoint whose model has the values of its masters, and their names.

    A tensor that is stored in `dtype` keeps its own: a working copy is its master, rounded once.
    """
    tensors = dict(contents.tensors)
    used = []
    for name, tensor in contents.tensors.items():
        master = contents.tensors.get(state_name(name, MASTER))
        if master is not None and tensor.dtype in COMPUTE_DTYPES and tensor.dtype != dtype:
            pieces = tuple(replace(each, piece=replace(each.piece, name=name)) for each in master.pieces)
            tensors[name] = StoredTensor(name=name, dtype=master.dtype, shape=master.shape, pieces=pieces)
            used.append(master.name)
    return replace(contents, tensors=tensors), tuple(used)


def casting(outputs: Contents, dtype: str) -> Rewrite | None:
    """A rewrite that casts the model's floats which are in another dtype; None where there are none.

    A tie is cast under each of its names, and stays one.
    """
    dtypes = {name: tensor.dtype for name, tensor in outputs.tensors.items()}
    dtypes |= {alias: dtypes[name] for alias, name in outputs.aliases.items() if name in dtypes}
    names = [
        name
        for name, found in dtypes.items()
        if found in COMPUTE_DTYPES and found != dtype and is_model_name(name, outputs.format)
    ]
    return Rewrite([f"{quoted(name)} -> {quoted(name)}, dtype='{dtype}'" for name in names]) if names else None


def main_dtype(tensors: Iterable[StoredTensor]) -> str | None:
    """The dtype of most floats; None where there are none."""
    sizes: Counter[str] = Counter()
    for each in tensors:
        if each.dtype in COMPUTE_DTYPES:
            sizes[each.dtype] += math.prod(each.shape)
    return max(sizes, key=lambda dtype: sizes[dtype], default=None)
