"""How far what a cut module gives is from what the whole one gives, and how far rounding alone brings it."""

from collections.abc import Sequence
from typing import Literal

import torch
import xxhash
from torch import nn

from shardwise.engine.tensor.apart import CopiedInputs, Parameters

_FACTOR, _COARSE_FACTOR = 64.0, 8.0
"""A plan is refused where outputs differ more than this times what rounding makes of them.

Rounding is measured: every input and parameter is changed by up to one last digit. A sum over ranks takes another order
of the same additions, and changes no result by more than a few such roundings; wrong plans change a thousandth or more.
So the factor is generous where digits are fine (float32, as which half precision is computed, and float64), and small
where a forward insists on coarse ones.
"""

PERTURBATION = 0.1
"""How much parameters are changed before outputs are compared: what begins as zeros or ones would hide faults."""

_CHANGED = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
"""Dtypes in which torch calculates; values of others are taken as they are."""

Leaf = Literal["alike", "part", "unlike"]
"""A tensor of the cut module: of the whole one's shape, the part of this rank, or something else."""


def differ(tensors: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """The largest relative difference (2-norms) between floating tensors and those of the same place; inf where one of
    them is not finite and the other is."""
    return max((_difference(*pair) for pair in zip(tensors, others, strict=True)), default=0.0)


def _difference(one: torch.Tensor, other: torch.Tensor) -> float:
    if not (one.is_floating_point() or one.is_complex()) or one.numel() == 0:
        return 0.0
    wide = torch.complex128 if one.is_complex() else torch.float64
    one, other = one.to(wide), other.to(wide)
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()):
        return torch.inf
    one, other = one[finite], other[finite]
    apart, size = float((one - other).abs().norm()), float(other.abs().norm())
    return apart / size if size else apart


def factor_of(eps: float) -> float:
    """How many times the rounding is allowed, where the coarsest value has this precision."""
    return _FACTOR if eps <= torch.finfo(torch.float32).eps else _COARSE_FACTOR


def finest_eps(tensors: Sequence[torch.Tensor]) -> float:
    """The precision of the finest dtype among what a module gives."""
    floats = [each.dtype for each in tensors if each.is_floating_point() or each.is_complex()]
    return min((torch.finfo(dtype).eps for dtype in floats), default=torch.finfo(torch.float32).eps)


def leaf_of(
    cut: torch.Tensor, whole: torch.Tensor, sizes: Sequence[tuple[int, ...]], rank: int
) -> tuple[Leaf, torch.Tensor]:
    """What a tensor of the cut module is, and what it is compared with; `sizes`: its shapes on all ranks."""
    if len({*sizes, tuple(whole.shape)}) == 1:
        return "alike", whole
    dims = [dim for dim, size in enumerate(whole.shape) if cut.dim() == whole.dim() and cut.shape[dim] != size]
    if len(dims) == 1 and all(len(each) == whole.dim() for each in sizes):
        (dim,) = dims
        along = [each[dim] for each in sizes]
        if sum(along) == whole.shape[dim]:
            return "part", whole.narrow(dim, sum(along[:rank]), along[rank])
    return "unlike", cut


def perturbed(value: torch.Tensor, name: str, attempt: int) -> torch.Tensor:
    """Other values of the same kind: signs stay, and what is zero everywhere is not any more."""
    if value.dtype not in _CHANGED or value.numel() == 0:
        return value
    noise = _uniform(value, f"{name} {attempt}")
    if bool(value.any()):
        return value * (1 + PERTURBATION * noise)
    return PERTURBATION * noise


def rounded(
    inputs: CopiedInputs, parameters: Parameters, eps: float
) -> tuple[CopiedInputs, dict[nn.Parameter, torch.Tensor]]:
    """Inputs and parameters, each changed by up to one last digit of this precision."""
    numbers = iter(range(1 << 30))

    def change(value: torch.Tensor) -> torch.Tensor:
        if value.dtype not in _CHANGED:
            return value
        return value * (1 + eps * _uniform(value, f"rounding {next(numbers)}"))

    return inputs.changed(change), {each: change(value) for each, value in parameters.items()}


def _uniform(like: torch.Tensor, key: str) -> torch.Tensor:
    """Numbers between -1 and 1, the same on every rank."""
    generator = torch.Generator(like.device).manual_seed(xxhash.xxh3_64_intdigest(key.encode()) >> 1)
    noise = torch.empty(like.shape, dtype=torch.float32, device=like.device)
    return noise.uniform_(-1, 1, generator=generator).to(like.dtype)
