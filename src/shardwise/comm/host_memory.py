"""Memory: which bytes a dense tensor takes, and whether two take the same."""

from collections.abc import Sequence

import torch

__all__ = ["extent", "first_shared", "share_elements", "span_elements"]


def span_elements(tensor: torch.Tensor) -> int:
    """Elements of memory from the first element of a tensor to its last; gaps count, and a tensor without has none."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor that has elements, and the one after its last; gaps are within."""
    start = tensor.data_ptr()
    return start, start + span_elements(tensor) * tensor.element_size()


def share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one device really share bytes (columns of one matrix interleave without sharing).

    Where their extents overlap and one has gaps, every byte is looked at: it takes as many on the CPU.
    """
    (start, stop), (other_start, other_stop) = extent(first), extent(second)
    if not (first.numel() and second.numel()) or max(start, other_start) >= min(stop, other_stop):
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    return first_shared([first, second]) is not None


def first_shared(tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
    """The positions of two tensors of one device that share bytes, None where no two do.

    Every byte of what they span together is looked at once, on the CPU: that takes as many.
    """
    spans = [extent(each) if each.numel() else None for each in tensors]
    known = [each for each in spans if each is not None]
    if len(known) < 2:
        return None
    begin = min(start for start, _ in known)
    touched = torch.zeros(max(stop for _, stop in known) - begin, dtype=torch.bool)

    def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
        size = tensor.element_size()
        strides = (*(size * each for each in tensor.stride()), 1)
        return touched.as_strided((*tensor.shape, size), strides, tensor.data_ptr() - begin)

    marked: list[int] = []
    for at, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        view = bytes_of(tensor)
        if bool(view.any()):
            for other in marked:
                touched.fill_(False)
                bytes_of(tensors[other]).fill_(True)
                if bool(bytes_of(tensor).any()):
                    return other, at
        view.fill_(True)
        marked.append(at)
    return None
