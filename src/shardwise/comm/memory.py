"""Memory: which bytes a dense tensor takes, and whether two take the same."""

import torch

__all__ = ["extent", "share_elements"]


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The address of the first byte of a tensor that has elements, and the one after its last; gaps are within."""
    span = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    return tensor.data_ptr(), tensor.data_ptr() + span * tensor.element_size()


def share_elements(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Whether two tensors of one device really share bytes (columns of one matrix interleave without sharing).

    Where their extents overlap and one has gaps, every byte is looked at: it takes as many on the CPU.
    """
    (start, stop), (other_start, other_stop) = extent(first), extent(second)
    if not (first.numel() and second.numel()) or max(start, other_start) >= min(stop, other_stop):
        return False
    if first.is_contiguous() and second.is_contiguous():
        return True
    begin = min(start, other_start)
    touched = torch.zeros(max(stop, other_stop) - begin, dtype=torch.bool)
    for tensor in (first, second):
        size = tensor.element_size()
        view = touched.as_strided(
            (*tensor.shape, size), (*(size * each for each in tensor.stride()), 1), tensor.data_ptr() - begin
        )
        if bool(view.any()):
            return True
        view.fill_(True)
    return False
