"""The norm of the whole gradient, and the clip by it: every element counts once, whoever holds it.

Squares that the ranks of a mesh of 2 owners, 2 replicas and tp = 2 count; `w` is cut along tp, `b` is whole on both:

                 tp 0            tp 1
    owner 0      w 9  + b 16     w 1       the b of tp 1 is the same tensor once more
    owner 1      w 4  + b 4      w 2
    replicas     0               0         of the same masters; so for both owners

    exchange     25 + 8 + 1 + 2 = 36       norm 6.0 on every rank

Squares are summed in float64, which makes the float32 norm independent of the cut. Where one data rank has whole
gradients the norm is that of one process to the last bit, and so is taken as torch takes it: norms of the parameters
first, then the norm of these, in torch's order (`norms_of`, `norm_of_norms`).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce

import torch
from torch import nn
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

_BLOCK_ELEMENTS = 1 << 18
"""Elements converted to float64 at a time: 2 MiB, which stay in cache."""


def divide_and_square(gradients: Iterable[tuple[torch.Tensor, bool]], divisor: int, device: torch.device) -> float:
    """Divide the gradients in place, and sum |g|^2 over all elements of those that count: (gradient, whether it does).

    The sum is taken in float64, so that it does not depend on how elements are cut over ranks; both are done block by
    block, while a block is in the cache.
    """
    block = torch.empty(_BLOCK_ELEMENTS, dtype=torch.float64, device=device)
    total = torch.zeros((), dtype=torch.float64, device=device)
    # One pass over memory for the division and the sum: gradients are too large for the cache, and each pass over
    # them costs as much as the arithmetic.
    for gradient, counts in gradients:
        for part in gradient.view(-1).split(_BLOCK_ELEMENTS // 2 if gradient.is_complex() else _BLOCK_ELEMENTS):
            if divisor > 1:
                part.div_(divisor)
            if not counts:
                continue
            real = torch.view_as_real(part).view(-1) if part.is_complex() else part
            double = block[: real.numel()].copy_(real)
            # Stays a tensor: a Python float per block would wait for the device each time.
            total += torch.dot(double, double)
    return float(total)


def norm_dtype(gradients: Iterable[torch.dtype]) -> torch.dtype:
    """The dtype in which torch takes their norm in one process: the widest, real, float32 at least."""
    return reduce(torch.promote_types, (each.to_real() for each in gradients), torch.float32)


def norm_of(squares: Sequence[float], dtype: torch.dtype) -> float:
    """The 2-norm from the ranks' sums of squares, rounded to `dtype`: the same on every rank, for every partition.

    The sum is exact up to float64 rounding of each rank's share, some 1e-16 of it, far below half a float32 step.
    """
    # fsum rounds once, so that the order and the number of the ranks do not matter.
    total = math.fsum(squares) if all(math.isfinite(each) for each in squares) else math.nan
    return float(torch.tensor(math.sqrt(total), dtype=dtype)) if math.isfinite(total) else math.nan


def norms_of(gradients: Sequence[torch.Tensor]) -> list[float]:
    """The 2-norm of each gradient, as `torch.nn.utils.get_total_norm` takes it on its way."""
    norms = [torch.empty(0)] * len(gradients)
    for alike in _groups(gradients):
        for at, norm in zip(alike, torch._foreach_norm([gradients[at] for at in alike]), strict=True):
            # Back in the order of the parameters, by which the ranks of other stages are merged with these.
            norms[at] = norm
    # One copy to the host for all norms. float64 holds any float32 norm exactly, for the way through the message.
    return torch.stack([norm.double() for norm in norms]).tolist() if norms else []


def norm_of_norms(norms: Mapping[int, float], dtypes: Sequence[torch.dtype], device: torch.device) -> float:
    """The 2-norm of gradients of which only the norms are known, to the bit that of `norm_in_one_process`.

    `norms`: from `norms_of`, by the number of the parameter. `dtypes`: of the gradients of all parameters.
    """
    if not norms:
        return 0.0
    known = sorted(norms)
    # The gradients themselves are on other stages. Torch groups tensors by dtype before it stacks their norms, and
    # the order of the stack decides the last bit: tensors without elements make it group alike.
    stand_ins = [torch.empty(0, dtype=dtypes[at], device=device) for at in known]
    order = [known[at] for alike in _groups(stand_ins) for at in alike]
    stacked = torch.stack([torch.tensor(norms[at], dtype=dtypes[at].to_real(), device=device) for at in order])
    norm = float(torch.linalg.vector_norm(stacked))
    return norm if math.isfinite(norm) else math.nan


def norm_in_one_process(gradients: Sequence[torch.Tensor]) -> float:
    """The 2-norm as `torch.nn.utils.clip_grad_norm_` takes it, bit for bit; nan when it is not finite."""
    norm = float(torch.nn.utils.get_total_norm(gradients))
    return norm if math.isfinite(norm) else math.nan


def _groups(tensors: Sequence[torch.Tensor]) -> list[list[int]]:
    """The numbers of tensors of one dtype each, in the order in which torch goes through them."""
    grouped = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True) if tensors else {}
    return [indices for _, indices in grouped.values()]


def clip(parameters: Sequence[nn.Parameter], *, norm: float, max_norm: float, dtype: torch.dtype) -> None:
    """Scale the gradients by min(1, max_norm / (norm + 1e-6)), as `torch.nn.utils.clip_grad_norm_` does."""
    if parameters:
        # In the dtype that torch would have: min(1, max / (norm + 1e-6)) is rounded in it.
        total = torch.tensor(norm, dtype=dtype, device=parameters[0].device)
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
