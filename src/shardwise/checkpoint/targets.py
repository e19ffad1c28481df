"""Targets: whether every tensor that a load fills can take its elements, found out before the first is written."""

import contextlib
import ctypes
import os
from collections.abc import Iterator
from itertools import pairwise
from operator import itemgetter

import torch

from shardwise.checkpoint.held import Held
from shardwise.comm.local_tensors import extent, span_elements
from shardwise.errors import CheckpointError, in_words
from shardwise.space import Piece

__all__ = ["check_targets"]

_LIBC = ctypes.CDLL(None)


def check_targets(held: Held) -> None:
    """Raise CheckpointError, with every finding, for targets that cannot be written, or whose elements share memory."""
    problems: list[str] = []
    spans: dict[torch.device, list[tuple[int, int, Piece]]] = {}
    with _probe() as is_writable:
        for piece, tensor in held.tensors.items():
            num_elements = tensor.numel()
            if (problem := _problem(piece, tensor)) is not None:
                problems.append(problem)
            elif num_elements and tensor.is_cpu and type(tensor) is torch.Tensor and not is_writable(tensor.data_ptr()):
                problems.append(
                    f"{piece} would be read into memory that can only be read, such as a file that was mapped so; give "
                    "it memory of its own: clone()"
                )
            elif not tensor.is_contiguous() and _shares_within(tensor):
                problems.append(
                    f"{piece} would be read into a tensor of shape {tuple(tensor.shape)} with strides "
                    f"{tensor.stride()}, whose elements share memory (expand()); give it memory of its own: clone()"
                )
            elif num_elements and span_elements(tensor) == num_elements:
                spans.setdefault(tensor.device, []).append((*extent(tensor), piece))
    problems += [
        f"{one[2]} and {other[2]} would be read into memory that they share; give each tensor memory of its own"
        for found in spans.values()
        for one, other in pairwise(sorted(found, key=itemgetter(0)))
        if other[0] < one[1]
    ]
    if problems:
        raise CheckpointError(*problems)


def _problem(piece: Piece, tensor: torch.Tensor) -> str | None:
    """Why torch would not write to a tensor."""
    if tensor.is_inference() and not torch.is_inference_mode_enabled():
        return (
            f"{piece} would be read into an inference tensor, which torch changes in inference mode only; load within "
            "torch.inference_mode(), or give it memory of its own outside: clone()"
        )
    if type(tensor) is not torch.Tensor:  # a kind of tensor may refuse anything: write nothing to it
        try:
            tensor[...].reshape(-1)[:0].copy_(torch.empty(0, dtype=tensor.dtype))
        except Exception as error:
            return (
                f"{piece} would be read into a {type(tensor).__name__}, which cannot be written: "
                f"{in_words(error)}; give a plain tensor"
            )
    return None


def _shares_within(tensor: torch.Tensor) -> bool:
    """Whether two indices of a tensor are one place in memory."""
    if span_elements(tensor) < tensor.numel():
        return True
    dims = sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    end = 1
    for stride, size in dims:
        if stride < end:  # rows that interlock: only their places tell
            break
        end += (size - 1) * stride
    else:
        return False
    places = torch.zeros(1, dtype=torch.int64)
    for stride, size in dims:
        places = (places[:, None] + torch.arange(size) * stride).reshape(-1)
    return len(torch.unique(places)) < tensor.numel()


class _IsWritable:
    """Asks the kernel, which refuses where the program would be killed."""

    def __init__(self, taken: int, given: int) -> None:
        self._taken, self._given = taken, given

    def __call__(self, address: int) -> bool:
        """Whether the byte at an address can be written: it goes through a pipe, and back to its place."""
        if _LIBC.write(self._given, ctypes.c_void_p(address), 1) != 1:
            return False
        if _LIBC.read(self._taken, ctypes.c_void_p(address), 1) == 1:
            return True
        os.read(self._taken, 1)
        return False


@contextlib.contextmanager
def _probe() -> Iterator[_IsWritable]:
    taken, given = os.pipe()
    try:
        yield _IsWritable(taken, given)
    finally:
        os.close(taken)
        os.close(given)
