"""How far two right programs may differ: zero where they do the same arithmetic, else a bound on rounding.

A sum of n terms in any order, each addition rounded with unit roundoff u, is off by at most (n - 1) u of the sum of the
terms' sizes (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 4.2). For long chains of operations
that bound grows far beyond what happens. Taking rounding errors for independent gives a factor c sqrt(n) u instead of
n u (Higham and Mary, SIAM J. Sci. Comput. 41(5), 2019), and that is what bounds values which were computed differently.

    layout                    outputs     gradients of a microbatch     mean gradients        update
    data ranks only           equal       equal                         (2n + 4) u            equal
    stages                    equal       4 (u sqrt(calls) + ..)        of their terms        equal
    ranks along tp            4 (u sqrt(calls) + 2^-24 sqrt(length)) of their size            equal

`Closeness` says how far two tensors are from each other, as a fraction of such a bound.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from shardwise.plan import Plan

UNIT_ROUNDOFF = {
    "float64": 2.0**-53,
    "complex128": 2.0**-53,
    "float32": 2.0**-24,
    "complex64": 2.0**-24,
    "float16": 2.0**-11,
    "bfloat16": 2.0**-8,
}
"""The largest relative error of one rounding, by dtype."""

# Chosen, not derived: wide enough for every right layout of the tests, narrow enough for their planted faults.
CONFIDENCE = 4.0
"""c above: how many standard deviations of a sum of independent roundings are allowed."""

ELEMENT_FACTOR = 8.0
"""How much more a single element may be off than the root mean square over all of them."""

UPDATE_ROUNDINGS = 16
"""Roundings that one update of one element by an optimizer is allowed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """The operations between a microbatch's inputs and one of its values."""

    num_calls: int
    """Calls of modules so far: each rounds its output to its dtype."""
    length: int
    """Their reduction lengths added up. That of a call is the largest size of a dim of its parameters and output."""
    roundoff: float
    """The largest of the dtypes that they gave."""

    @classmethod
    def beginning(cls) -> "Path":
        """Nothing was called yet."""
        return cls(num_calls=0, length=0, roundoff=0.0)

    def after(self, *, length: int, dtypes: Iterable[str]) -> "Path":
        """One call further on, which gave values of these dtypes."""
        roundoff = max((UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes), default=0.0)
        return Path(num_calls=self.num_calls + 1, length=self.length + length, roundoff=max(self.roundoff, roundoff))

    @property
    def deviation(self) -> float:
        """Allowed root mean square of the difference, relative to that of the value.

        What a call gives is rounded to its dtype, sums inside of it are taken in float32 at least.
        """
        inner = min(self.roundoff, UNIT_ROUNDOFF["float32"])
        return CONFIDENCE * (self.roundoff * math.sqrt(self.num_calls) + inner * math.sqrt(self.length))

    def there_and_back(self) -> "Path":
        """To a gradient: as much again in backward."""
        return Path(num_calls=2 * self.num_calls, length=2 * self.length, roundoff=self.roundoff)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorModel:
    """How the arithmetic of a layout differs from that of one process."""

    same_forward: bool
    """Every microbatch is computed by the same operations on the same numbers, on one rank."""
    same_up_to_order: bool
    """The same, but stages may add the gradients of a value with several uses in another order."""
    num_data_ranks: int
    sum_roundoff: float
    """Of the dtype in which gradients are added."""
    wire_roundoff: float
    """Of the dtype in which they travel between data ranks; 0 where they do not."""
    words: str
    """The effect of the layout on the arithmetic, in words."""

    @classmethod
    def of(cls, plan: Plan) -> "ErrorModel":
        """The model for a plan compared with one process."""
        mesh, precision = plan.mesh, plan.precision
        num_data_ranks = mesh.num_data_ranks
        added_in = max(UNIT_ROUNDOFF[precision.accumulate], UNIT_ROUNDOFF[precision.master])
        return cls(
            same_forward=mesh.pp * plan.pipeline.num_chunks * mesh.tp == 1,
            # Only tp computes parts of one operation on several ranks. Stages and data ranks compute whole
            # operations.
            same_up_to_order=mesh.tp == 1,
            num_data_ranks=num_data_ranks,
            sum_roundoff=min(added_in, UNIT_ROUNDOFF["float32"]) if precision.compute is None else added_in,
            wire_roundoff=UNIT_ROUNDOFF[precision.reduce] if num_data_ranks > 1 else 0.0,
            words=_words(plan),
        )

    def of_sum(self, num_terms: int) -> float:
        """Allowed difference of a mean gradient, relative to the mean of the sizes of its terms, per element.

        `num_terms` additions at most on either side, the division and the clip; and one rounding to travel.
        """
        return (2 * num_terms + 4) * self.sum_roundoff + self.wire_roundoff


def _words(plan: Plan) -> str:
    mesh, num_stages = plan.mesh, plan.mesh.pp * plan.pipeline.num_chunks
    bound = f"{CONFIDENCE:g} (u sqrt(c) + 2^-24 sqrt(n)) of its size"
    if mesh.tp > 1:
        lines = [
            f"outputs, losses and gradients of each microbatch: {mesh.tp} ranks along tp add rounded parts. A value "
            f"after c calls of modules, with reduction lengths of sum n, is within {bound} (root mean square). An "
            f"element is within {ELEMENT_FACTOR:g} times that, gradients with 2c and 2n; u = 2^-24 in float32, 2^-8 "
            "in bfloat16"
        ]
    elif num_stages > 1:
        lines = [
            f"outputs and losses: the same arithmetic on {num_stages} stages, zero. Gradients of each microbatch: "
            "values with uses on several stages are added in another order. Values before them, after c calls of "
            f"modules with reduction lengths of sum n, are within {bound}, with 2c and 2n"
        ]
    else:
        lines = ["outputs, losses and gradients of each microbatch: the same arithmetic, zero"]
    num_data_ranks = mesh.num_data_ranks
    num_terms = num_data_ranks * plan.merge.microbatches
    order = f", added on {num_data_ranks} data ranks first" if num_data_ranks > 1 else ""
    lines.append(
        f"mean gradients: {num_terms} microbatches{order}: each element within {2 * num_terms + 4} u of the mean of "
        "its terms' sizes; u is that of the summing dtype"
        + (f", and 2^{round(math.log2(UNIT_ROUNDOFF[plan.precision.reduce]))} to travel" if num_data_ranks > 1 else "")
    )
    lines.append("updated parameters and optimizer state, from the layout's own gradients: the same arithmetic, zero")
    return "\n".join(lines)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """How far two tensors of one shape are from each other, as a fraction of the bound. Above 1 is too far."""

    ratio: float
    """Infinite where a difference is not finite; never nan."""
    at: int
    """The row-major element that is furthest off."""
    allowed: float
    """There."""
    ours: object
    """In one process, there."""
    theirs: object
    """Under the layout, there."""

    @property
    def is_far(self) -> bool:
        """Whether rounding does not explain it."""
        # So that a nan, which is on no side of 1, would count as far.
        return not self.ratio <= 1


EQUAL = Closeness(ratio=0.0, at=0, allowed=0.0, ours=0.0, theirs=0.0)


def by_element(ours: torch.Tensor, theirs: torch.Tensor, allowed: torch.Tensor) -> Closeness:
    """Each element within its own bound. All are flat; values in float64 or complex128.

    A bound that is not finite, as where one process has an infinity, allows no difference.
    """
    if not ours.numel():
        return EQUAL
    differences = _differences(ours, theirs)
    allowed = torch.where(allowed.isfinite(), allowed, 0.0)
    # Not 0 / 0: a bound of zero and no difference is what equal values have.
    ratios = torch.where(differences == 0, 0.0, differences / allowed)
    at = int(ratios.argmax())
    return Closeness(
        ratio=float(ratios[at]),
        at=at,
        allowed=float(allowed[at]),
        ours=ours[at].item(),
        theirs=theirs[at].item(),
    )


def by_size(ours: torch.Tensor, theirs: torch.Tensor, deviation: float, *, least_size: float = 0.0) -> Closeness:
    """The root mean square of the difference within `deviation` of that of the values, and no element far outside.

    least_size: what the values would be if the terms that they are sums of did not cancel; finite.
    """
    if not ours.numel():
        return EQUAL
    differences = _differences(ours, theirs)
    sizes = ours.abs().nan_to_num(0.0, 0.0, 0.0)
    size = max(_root_mean_square(sizes), least_size)
    # Of its own size and of that of all: an element that is zero by cancelling has the rounding of the terms that
    # cancelled.
    bounds = ELEMENT_FACTOR * deviation * (sizes + size)
    nearest = by_element(ours, theirs, bounds)
    limit = deviation * size
    root = _root_mean_square(differences)
    # Many small differences that are alike exceed the root mean square, a single large one the bound of its element.
    if not limit or root / limit <= nearest.ratio:
        return nearest
    at = int(differences.argmax())
    return Closeness(ratio=root / limit, at=at, allowed=limit, ours=ours[at].item(), theirs=theirs[at].item())


def _differences(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Absolute differences; 0 where both are the same infinity or nan, infinite where one is not finite."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    # A nan on one side only is as far off as an infinity: every comparison with it would else be false.
    differences = (ours - theirs).abs().nan_to_num(float("inf"), float("inf"), float("inf"))
    return torch.where(same, torch.zeros_like(differences), differences)


def _root_mean_square(sizes: torch.Tensor) -> float:
    """Of values that are not negative; without squares that leave the range of the dtype."""
    largest = float(sizes.max())
    if not 0 < largest < math.inf:
        return largest
    return largest * float((sizes / largest).square().mean().sqrt())


def factor_between(ours: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """The factor that brings ours nearest to theirs; None where ours are zero."""
    square = float((ours.conj() * ours).real.sum())
    return float((ours.conj() * theirs).real.sum()) / square if square else None
