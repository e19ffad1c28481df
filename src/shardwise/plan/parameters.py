"""The parameters of a model as the planners see them: names, shapes, dtypes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from shardwise.errors import PlanError
from shardwise.plan.dtypes import CHECKPOINT_ONLY_DTYPES, ITEMSIZE_BYTES, is_complex, promote
from shardwise.plan.names import any_matches, unmatched
from shardwise.plan.specs import Precision
from shardwise.space import Portion


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One parameter of the model; names that share its storage (ties) are aliases of the first."""

    name: str
    aliases: tuple[str, ...] = ()
    shape: tuple[int, ...]
    """Of the tensor that this rank computes with."""
    dtype: str
    """The dtype in which the model was built."""
    trainable: bool = True
    working: str
    """The dtype that forward and backward read."""
    master: str
    """The dtype in which the owner updates it and a checkpoint holds it."""
    portion: Portion | None = None
    """Which part of it the ranks along this tensor-parallel coordinate have; None: all of it."""

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the whole parameter."""
        return self.shape if self.portion is None else self.portion.global_shape

    @property
    def num_elements(self) -> int:
        """Number of elements, 1 for a scalar."""
        return math.prod(self.shape)

    @property
    def fused(self) -> bool:
        """Whether it lives in a flat buffer: it is trained, or it computes in another dtype than it came in."""
        return self.trainable or self.working != self.dtype


def describe(
    *,
    name: str,
    aliases: Sequence[str],
    shape: Sequence[int],
    dtype: str,
    trainable: bool,
    precision: Precision,
    beside_statistics: bool = False,
) -> Parameter:
    """The parameter with the dtypes that `precision` gives it.

    Working copies of real floating parameters take `precision.compute`, unless `keep` names them; other dtypes stay. A
    master is never narrower than the working copy; a frozen parameter keeps its values as they were given. A parameter
    that works `beside_statistics` (of a batch norm, which are never cast) is kept like those that `keep` names.
    """
    if dtype not in ITEMSIZE_BYTES or dtype in CHECKPOINT_ONLY_DTYPES:
        raise PlanError(f"parameter {name!r} has dtype {dtype}, which no plan can hold; convert it before parallelize")
    if dtype not in ("float16", "bfloat16", "float32", "float64") and not is_complex(dtype):
        working = master = dtype  # integers and the like: never trained, never cast
    else:
        kept = beside_statistics or any_matches(precision.keep, (name, *aliases))
        wanted = dtype if precision.compute is None or is_complex(dtype) else precision.compute
        working = promote(precision.master, wanted) if kept else wanted
        master = promote(precision.master, working) if trainable else promote(dtype, working)
    return Parameter(
        name=name,
        aliases=tuple(aliases),
        shape=tuple(shape),
        dtype=dtype,
        trainable=trainable,
        working=working,
        master=master,
    )


def check_keep(precision: Precision, names: Sequence[str]) -> None:
    """Raise PlanError when a `keep` pattern means no parameter."""
    if findings := unmatched(precision.keep, names, role="precision.keep"):
        raise PlanError(*findings)
