"""Whether a tensor was written to: by the count of writes that torch keeps for it, and by what it holds.

    a write                                                      `_version`   content
    p.mul_(2), load_state_dict, torch._foreach_*, optimizers     another      another
    p.data.mul_(2), numpy, DLPack, untyped_storage, kernels      the same     another
    of others, batch norms of torch (running statistics)

The count costs no read. Content is compared whole up to `_MOST_BYTES`, and above by elements spread over the tensor; on
the host by a digest, which takes no memory and less time than a copy (3 to 5 microseconds a look).
Where that is not enough, everything is compared in the looks 1, 2, 64, 128, 256, .. (`is_due`). A program that writes
past the count mostly does so in its first steps, and is compared whole ever after.
"""

from typing import TypeAlias

import numpy as np
import torch
import xxhash

from shardwise.comm.local_tensors import bytes_of, is_dense, span_elements
from shardwise.engine.torch_private import version_of

_MOST_BYTES = 1 << 17
"""Compared whole."""

_NUM_SPREAD = 1 << 10
"""Elements that are compared of a larger tensor."""

_AT_ONCE = 1 << 20
"""Elements that are compared with casts in one piece of memory."""

_FIRST_LOOKS, _LATER_LOOKS = 2, 64

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""What tensors of so many bytes per element are read as: a NaN is like itself then."""


def is_due(num_looks: int) -> bool:
    """Whether the look of this number compares everything."""
    return num_looks <= _FIRST_LOOKS or (num_looks >= _LATER_LOOKS and num_looks & (num_looks - 1) == 0)


def is_readable(tensor: torch.Tensor) -> bool:
    """Whether it has plain memory, at present."""
    kind = type(tensor)
    is_plain = kind is torch.Tensor or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    is_here = is_plain and not tensor.is_meta and not hasattr(kind, "_is_sharded_param")
    return is_here and is_dense(tensor) and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def bits_in(flat: torch.Tensor) -> torch.Tensor:
    """Flat elements as whole numbers."""
    return flat.view(_BITS[flat.element_size()])


def spread_over(num_elements: int) -> int:
    """From each element that is compared to the next; odd, so that it does not keep to one column of a matrix."""
    return max(num_elements // _NUM_SPREAD, 1) | 1


def is_small(tensor: torch.Tensor) -> bool:
    """Whether it is compared whole."""
    return tensor.numel() * tensor.element_size() <= _MOST_BYTES


def is_on_host(tensor: torch.Tensor | None) -> bool:
    """Whether a look at its values waits for no device."""
    return tensor is not None and tensor.device.type == "cpu"


def holds_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors hold the same in all elements, as far as they can be read. Waits for a device."""
    if form_of(one) != form_of(other):
        return False
    if not (is_readable(one) and is_readable(other)) or torch.equal(one, other):
        return True
    return torch.equal(*(bits_in(each.detach().contiguous().view(-1)) for each in (one, other)))  # a NaN is like itself


class Content:
    """What a tensor held at a time."""

    __slots__ = ("_kept", "is_whole")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.is_whole = is_small(tensor)
        """Whether all of it is compared in each look."""
        self._kept = _kept_of(tensor)

    def holds_for(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor holds the same, as far as it is compared. Waits for a device."""
        if self._kept is None or (now := _kept_of(tensor)) is None:
            return True
        if isinstance(self._kept, torch.Tensor) and isinstance(now, torch.Tensor):
            return holds_same(self._kept, now)
        return self._kept == now


def _kept_of(tensor: torch.Tensor) -> torch.Tensor | tuple["Form | None", int] | None:
    """What tells its values from others: a digest on the host, a copy on a device; None for what cannot be read."""
    if not is_readable(tensor):
        return None
    if tensor.device.type == "cpu":
        return form_of(tensor), _digest(tensor)
    return (tensor.detach() if is_small(tensor) else _spread(tensor)).clone()


def _digest(tensor: torch.Tensor) -> int:
    """Of values in the host's memory, in the order of rows: all of them, or some."""
    if is_small(tensor):
        rows = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
        return xxhash.xxh3_64_intdigest(bytes_of(rows))
    # Where they are: to put a large tensor into the order of its rows would copy all of it.
    size = tensor.element_size()
    strides = [size * stride for stride in tensor.stride()]
    elements = np.ndarray(tensor.shape, f"V{size}", bytes_of(tensor), strides=strides)
    return xxhash.xxh3_64_intdigest(elements.flat[:: spread_over(elements.size)].tobytes())


def _spread(tensor: torch.Tensor) -> torch.Tensor:
    """Some bits of its memory, whatever the strides: gaps between the elements count."""
    bits = bits_in(tensor.detach().as_strided((span_elements(tensor),), (1,)))
    return bits[:: spread_over(bits.numel())]


Form: TypeAlias = tuple[torch.Size, torch.dtype]


def form_of(tensor: torch.Tensor | None) -> Form | None:
    """What has to be equal before values can be."""
    return None if tensor is None else (tensor.shape, tensor.dtype)


class SeenTensor:
    """A tensor as it was, or the lack of one."""

    __slots__ = ("content", "form", "tensor", "version")

    def __init__(self, tensor: torch.Tensor | None, *, content: bool = True) -> None:
        """content: also what it holds."""
        self.tensor = tensor
        """The object itself: the id of one that is gone may be another's."""
        self.form = form_of(tensor)
        self.version = 0 if tensor is None else version_of(tensor)
        self.content = None if tensor is None or not content else Content(tensor)

    def is_counted(self, now: torch.Tensor | None) -> bool:
        """Whether it is another object, or torch has counted a write to it."""
        return now is not self.tensor or (now is not None and version_of(now) != self.version)

    def is_written(self, now: torch.Tensor | None) -> bool:
        """Whether something was written to it, in whatever way."""
        return self.is_counted(now) or not (now is None or self.content is None or self.content.holds_for(now))


def differ_from_cast(part: torch.Tensor, master: torch.Tensor) -> bool:
    """Whether some element is not the cast of its master. Waits for a device."""
    pairs = zip(part.split(_AT_ONCE), master.split(_AT_ONCE), strict=True)
    return any(bool(_differences(*each).any()) for each in pairs)


def take_what_differs(part: torch.Tensor, master: torch.Tensor) -> None:
    """Give the master the elements of the working copy that are not its cast. The others keep all their bits."""
    differ = _differences(part, master).to(master.device)
    master.copy_(torch.where(differ, part.to(master.device).to(master.dtype), master))


def _differences(part: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    cast = master.to(part.device).to(part.dtype)
    return (part != cast).logical_and_((part == part).logical_or_(cast == cast))  # a NaN is like another
