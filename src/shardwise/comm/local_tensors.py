"""Tensors of this rank as torch has them, in the words of pieces: dtype names, extents in memory, shards of DTensors.

A DTensor stores one local tensor per rank. FSDP2 over tensor parallel cuts a dim in strides, so that the local tensor
may be several boxes of the global one. 8 rows over 2 ranks, with `_StridedShard(0, split_factor=2)`::

    global rows     0 1 | 2 3 | 4 5 | 6 7
    rank 0          0 1         2 3              local rows: one tensor of 4 rows, two pieces
    rank 1                0 1         2 3        pieces w[2:4] and w[6:8]

Works with torch 2.11 to 2.13; a program without DTensors does not pay for the import of `torch.distributed.tensor`.
"""

import ctypes
import sys
from collections.abc import Sequence
from itertools import accumulate, product
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import torch

from shardwise.comm.torch_private import cut_by_placement, is_strided_cut, orders_of_cuts, sparse_parts
from shardwise.errors import CheckpointError
from shardwise.space import Piece


def dtype_name(dtype: torch.dtype) -> str:
    """The name that plans and pieces give a torch dtype: `torch.bfloat16` -> `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype of a name in a plan or a piece."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements are at strides of one memory; not so of sparse and nested tensors."""
    return tensor.layout is torch.strided and not tensor.is_nested


def dense_parts(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """What a tensor of another layout is made of: indices and values, or one tensor for each row of a nested one."""
    if is_dense(tensor):
        return [tensor]
    if tensor.is_nested:
        return tensor.unbind()
    if tensor.layout is torch.sparse_coo:
        return sparse_parts(tensor)
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return [tensor.to_dense()]


def span_elements(tensor: torch.Tensor) -> int:
    """Elements of memory from the first element of a tensor to its last. Gaps count, and a tensor without has none."""
    if not tensor.numel():
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def bytes_of(flat: torch.Tensor) -> memoryview:
    """The memory of a tensor on the CPU from its first element to its last, as flat bytes."""
    # Not by `numpy()`: torch refuses to resize a storage for ever after, and observers resize their buffers.
    memory: Any = (ctypes.c_char * (span_elements(flat) * flat.element_size())).from_address(flat.data_ptr())
    memory.tensor = flat  # which has to live as long as the view
    return memoryview(memory).cast("B")


def bits_of(tensor: torch.Tensor) -> "np.ndarray[Any, Any]":
    """The elements of a tensor on the CPU, of 1 to 8 bytes, as whole numbers with their bits."""
    return np.asarray(_Memory(tensor))


class _Memory:
    """Tells numpy where elements are, and keeps them there: not by `numpy()`, see `bytes_of`."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        size = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple([stride * size for stride in tensor.stride()]),
            "typestr": f"<i{size}",
        }


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
    # Without gaps the extents say all. With gaps they may interleave, as the columns of a matrix do.
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
    # One mark per byte, and each tensor marks its own through a view with its own strides: torch does the arithmetic of
    # shapes and strides, whatever they are.
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
        # Another tensor has these bytes. Marking one at a time finds which: only the message needs to know.
        if bool(view.any()):
            for other in marked:
                touched.fill_(False)
                bytes_of(tensors[other]).fill_(True)
                if bool(bytes_of(tensor).any()):
                    return other, at
        view.fill_(True)
        marked.append(at)
    return None


if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_IndexRange = tuple[int, int]
"""Consecutive indices of one dim: the first, and the one after the last."""


def is_dtensor(value: object) -> "TypeGuard[DTensor]":
    """Whether a value is a DTensor."""
    # Nobody can have made one before the module was imported.
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def local_tensor(tensor: "DTensor") -> torch.Tensor:
    """Return what this rank stores of a DTensor, outside of autograd; no elements outside of its mesh."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return tensor.to_local().detach()
    return tensor.to_local().detach()  # the context above costs more than the call


def local_pieces(name: str, tensor: "DTensor") -> list[tuple[Piece, torch.Tensor]]:
    """Return the pieces of a DTensor that this rank holds, each with the part of the local tensor that holds it.

    The parts are views in the shape of the piece's box, with any strides. Replicas have equal pieces. A rank outside
    the mesh, or whose shard is empty, has none. One whose shard is strided (FSDP2 over tensor parallel) may have many.
    A tensor without elements is one whole piece on every rank of the mesh.
    Raises `CheckpointError` for summands (`Partial`), and for local tensors that are not what the placements say.
    """
    _check_readable(name, tensor)
    if tensor.device_mesh.get_coordinate() is None:
        return []
    held = _local_indices(name, tensor)
    local = local_tensor(tensor)
    lengths = tuple(_length(ranges) for ranges in held)
    if tuple(local.shape) != lengths:
        raise CheckpointError(
            f"{name} is a DTensor of shape {tuple(tensor.shape)} with placements {tensor.placements}. They give this "
            f"rank a local tensor of shape {lengths}, but it has {tuple(local.shape)}; make it with distribute_tensor"
        )
    if 0 in tensor.shape:  # its name must not be lost
        return [(_piece(name, tensor, None, None), local.new_empty(tensor.shape))]
    return _boxed(name, tensor, local, held)


def _local_indices(name: str, tensor: "DTensor") -> list[list[_IndexRange]]:
    """Which indices of each dim of a DTensor the local tensor of this rank has, in its order, as ranges.

    Raises `CheckpointError` for summands (`Partial`), and for a rank outside of the mesh.
    """
    coordinate = tensor.device_mesh.get_coordinate()
    _check_readable(name, tensor)
    if coordinate is None:
        raise CheckpointError(f"{name} is a DTensor on {tensor.device_mesh}, in which this rank is not")
    # In the order of the mesh dims: each placement cuts what those before it have left of the dim.
    held: list[list[_IndexRange]] = [[(0, size)] for size in tensor.shape]
    for mesh_dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dim = placement.dim  # type: ignore[attr-defined]
            share = _share(placement, _length(held[dim]), tensor.device_mesh.size(mesh_dim), coordinate[mesh_dim])
            held[dim] = _selected(held[dim], share)
    return held


def _check_readable(name: str, tensor: "DTensor") -> None:
    unknown = [placement for placement in tensor.placements if not (placement.is_replicate() or _is_cut(placement))]
    if unknown:
        raise CheckpointError(
            f"{name} is a DTensor with placement {unknown[0]}, which holds no elements; call redistribute() with "
            "Shard and Replicate placements first"
        )
    # Cuts in another order than the placements' would put elements elsewhere without a trace.
    for mesh_dims in orders_of_cuts(tensor):
        if list(mesh_dims) != sorted(mesh_dims):
            raise CheckpointError(
                f"{name} is a DTensor that its mesh dims cut in the order {mesh_dims}; first redistribute() it with "
                "placements in the order of the mesh"
            )


def _is_cut(placement: Any) -> bool:
    from torch.distributed.tensor.placement_types import Shard

    return isinstance(placement, Shard) or is_strided_cut(placement)


def _share(placement: Any, size: int, num_parts: int, part: int) -> list[_IndexRange]:
    """The positions among `size` that a placement gives to `part` of `num_parts`, split by torch itself."""
    shape = (1,) * placement.dim + (size,)
    if not is_strided_cut(placement):
        # Only lengths count, so that a tensor of one repeated element will do, however long the dim.
        parts = cut_by_placement(placement, torch.empty(1).expand(shape), num_parts)
        stops = list(accumulate(each.size(placement.dim) for each in parts))
        return [(stops[part - 1] if part else 0, stops[part])]
    # A strided shard says which indices it has only by giving them: split the indices themselves, and look for steps.
    parts = cut_by_placement(placement, torch.arange(size).view(shape), num_parts)
    indices = parts[part].flatten()
    breaks = (indices.diff() != 1).nonzero().flatten()
    firsts = [*indices[:1].tolist(), *indices[breaks + 1].tolist()]
    lasts = [*indices[breaks].tolist(), *indices[-1:].tolist()]
    return [(first, last + 1) for first, last in zip(firsts, lasts, strict=True)]


def _selected(held: Sequence[_IndexRange], positions: Sequence[_IndexRange]) -> list[_IndexRange]:
    """The indices at these positions of `held`; ranges that meet become one."""
    selected: list[_IndexRange] = []
    for start, stop in positions:
        passed = 0
        for first, end in held:
            low, high = max(start - passed, 0), min(stop - passed, end - first)
            passed += end - first
            if low >= high:
                continue
            if selected and selected[-1][1] == first + low:
                selected[-1] = (selected[-1][0], first + high)
            else:
                selected.append((first + low, first + high))
    return selected


def _length(ranges: Sequence[_IndexRange]) -> int:
    return sum(stop - start for start, stop in ranges)


def _boxed(
    name: str, tensor: "DTensor", local: torch.Tensor, held: Sequence[Sequence[_IndexRange]]
) -> list[tuple[Piece, torch.Tensor]]:
    """Every choice of one range per dim is a box; its place in the local tensor is that of its ranges."""
    places = [accumulate((stop - start for start, stop in ranges), initial=0) for ranges in held]
    choices = [list(zip(ranges, where, strict=False)) for ranges, where in zip(held, places, strict=True)]
    pieces = []
    for choice in product(*choices):
        offset = tuple(start for (start, _), _ in choice)
        shape = tuple(stop - start for (start, stop), _ in choice)
        # A view: a load writes through it into the DTensor.
        part = local[tuple(slice(at, at + size) for (_, at), size in zip(choice, shape, strict=True))]
        pieces.append((_piece(name, tensor, offset, shape), part))
    return pieces


def _piece(name: str, tensor: "DTensor", offset: tuple[int, ...] | None, shape: tuple[int, ...] | None) -> Piece:
    return Piece(
        name=name, dtype=dtype_name(tensor.dtype), global_shape=tuple(tensor.shape), offset=offset, shape=shape
    )
