"""Two tensors: equal, within a bound, or not, and where they differ most."""

import math
from dataclasses import dataclass

import torch

from shardwise.train.verification.error_model import ELEMENT_FACTOR


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """How far two tensors of one shape are from each other, as a fraction of what is allowed; above 1 is too far."""

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
    bounds = ELEMENT_FACTOR * deviation * (sizes + size)
    nearest = by_element(ours, theirs, bounds)
    limit = deviation * size
    root = _root_mean_square(differences)
    if not limit or root / limit <= nearest.ratio:
        return nearest
    at = int(differences.argmax())
    return Closeness(ratio=root / limit, at=at, allowed=limit, ours=ours[at].item(), theirs=theirs[at].item())


def _differences(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Absolute differences; 0 where both are the same infinity or nan, infinite where one is not finite."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    differences = (ours - theirs).abs().nan_to_num(float("inf"), float("inf"), float("inf"))
    return torch.where(same, torch.zeros_like(differences), differences)


def _root_mean_square(sizes: torch.Tensor) -> float:
    """Of what is not negative; without squares that leave the range of the dtype."""
    largest = float(sizes.max())
    if not 0 < largest < math.inf:
        return largest
    return largest * float((sizes / largest).square().mean().sqrt())


def factor_between(ours: torch.Tensor, theirs: torch.Tensor) -> float | None:
    """The number that ours are to be multiplied by to come nearest to theirs; None where ours are zero."""
    square = float((ours.conj() * ours).real.sum())
    return float((ours.conj() * theirs).real.sum()) / square if square else None
