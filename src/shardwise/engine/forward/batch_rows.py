"""In which dim of the tensors of a batch its rows are.

rows=0                            {"x": [8, 5], "y": [8], "scale": []}     dims 0, 0, none: it is for all rows
rows={"x": 1, "table": None}      {"x": [5, 8], "y": [8], "table": [9]}    dims 1, 0, none
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from shardwise.errors import BatchError
from shardwise.plan.names import matches, nearest

RowDims: TypeAlias = int | Mapping[str, int | None]
"""The dim of the rows, of all tensors or by names and globs; None: a tensor for all rows."""


class BatchRows:
    """Says where rows are."""

    def __init__(self, dims: RowDims = 0) -> None:
        """Of names that several globs mean, the first holds; of those that none means, dim 0."""
        self.usual = 0 if isinstance(dims, Mapping) else dims
        """The dim of what is not named."""
        self._named = dict(dims) if isinstance(dims, Mapping) else {}

    def check(self) -> None:
        """Raise BatchError for what is no dim."""
        for name, dim in {"": self.usual, **self._named}.items():
            if not (type(dim) is int and dim >= 0) and not (name and dim is None):
                raise BatchError(
                    f"rows{f' of {name!r}' if name else ''}: {dim!r} is no dim; give 0, 1, .. or a dict of them by "
                    "name or glob, where None means a tensor for all rows"
                )

    @property
    def described(self) -> str:
        """In words."""
        return f"rows={self._named}" if self._named else f"dim {self.usual}"

    def dims_of(self, leaves: Sequence[tuple[str, Any]]) -> list[int | None]:
        """For each leaf of a batch, with its name: the dim of its rows; None for what is for all rows.

        Raises BatchError for a tensor without that dim, and for a name or glob that means no entry.
        """
        if not self._named and not self.usual:
            return [0 if _has_dims(leaf) else None for _, leaf in leaves]
        names = [name for name, _ in leaves]
        for pattern in self._named:
            if not any(matches(pattern, name) for name in names):
                near = nearest(pattern, names)
                raise BatchError(
                    f"rows: {pattern!r} matches none of the entries {names}"
                    + (f"; the nearest is {near!r}" if near is not None else "")
                )
        return [self._dim_of(name, leaf) for name, leaf in leaves]

    def _dim_of(self, name: str, leaf: Any) -> int | None:
        if not _has_dims(leaf):
            return None
        found = [dim for pattern, dim in self._named.items() if matches(pattern, name)]
        dim = found[0] if found else self.usual
        if dim is not None and leaf.ndim <= dim:
            has = f"{leaf.ndim} dims" if getattr(leaf, "is_nested", False) else f"the shape {list(leaf.shape)}"
            raise BatchError(
                f"the batch's entry {name!r} has {has}, and no dim {dim} with rows. Say where "
                f"its rows are: parallelize(..., rows={{{name!r}: 0}}), or None for all rows; data.rows in a "
                "configuration"
            )
        return dim


def _has_dims(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor | np.ndarray) and leaf.ndim > 0


DIM_0 = BatchRows()
