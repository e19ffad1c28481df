"""Private names of torch that this room uses: what each one is for, and why no public name does it.

Any release of torch may change them; tests/comm/test_torch_private.py says what breaks then.
"""

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch.autograd import forward_ad
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

# The process group of the program.


def default_store() -> Store:
    """The store of the process group that the program has initialised, through which its ranks have met."""
    return dist.distributed_c10d._get_default_store()


# Communicators that belong to no process group of the program: `new_group` makes those that it keeps for good.


class OneTensorCalls(Protocol):
    """What backends can with equal parts in one tensor; the public names are of process groups alone."""

    def _allgather_base(self, output: torch.Tensor, input: torch.Tensor, /) -> dist.Work:
        """See `all_gather_equal`."""

    def _reduce_scatter_base(self, output: torch.Tensor, input: torch.Tensor, /) -> dist.Work:
        """See `reduce_scatter_equal`."""


def all_gather_equal(communicator: OneTensorCalls, output: torch.Tensor, input: torch.Tensor) -> dist.Work:
    """Equal parts of all ranks, in rank order, into one tensor."""
    return communicator._allgather_base(output, input)


def reduce_scatter_equal(communicator: OneTensorCalls, output: torch.Tensor, input: torch.Tensor) -> dist.Work:
    """This rank's part of the sum of tensors that are cut into equal parts."""
    return communicator._reduce_scatter_base(output, input)


def can_make_backend(kind: str) -> bool:
    """Whether `made_backend` can."""
    return _plugin(kind) is not None or hasattr(_own_class(kind), "Options")


def made_backend(kind: str, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A backend such as nccl over a store: one of torch's own, or one that another package has registered."""
    plugin = _plugin(kind)
    if plugin is None:
        own_class = _own_class(kind)
        options = own_class.Options()
        options._timeout = timeout
        return own_class(store, rank, size, options)
    if not plugin.extended_api:
        return plugin.creator_fn(store, rank, size, timeout)
    plugin_options: Any = dist.distributed_c10d._DistributedBackendOptions()  # type: ignore[attr-defined]
    plugin_options.store = store
    plugin_options.group_rank, plugin_options.group_size = rank, size
    plugin_options.timeout = timeout
    return plugin.creator_fn(plugin_options, None)


def _own_class(kind: str) -> Any:
    return getattr(dist, f"ProcessGroup{kind.upper()}", None)


def _plugin(kind: str) -> Any:
    return getattr(dist.Backend, "_plugins", {}).get(kind.upper())


# Gloo between chosen addresses: the public way knows interfaces alone, by a variable of the environment.


def gloo_device(address: str) -> object:
    """A port of gloo at an address of this host, and the thread that serves it."""
    gloo: Any = dist.ProcessGroupGloo
    return gloo.create_device(hostname=address)


def gloo_group(store: Store, rank: int, size: int, device: object, *, timeout: timedelta) -> Any:
    """A group for messages alone, connected through one device."""
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    options._timeout = timeout
    options._threads = 1  # they carry out collectives, which are not used
    options._devices = [device]
    return gloo(store, rank, size, options)


# What a DTensor's ranks hold: torch has no public word for it.


def is_strided_cut(placement: object) -> bool:
    """Whether a placement cuts a dim that a later mesh dim has cut before, as that of FSDP over TP does."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return isinstance(placement, _StridedShard)


def cut_by_placement(placement: Any, tensor: torch.Tensor, num_parts: int) -> Sequence[torch.Tensor]:
    """The parts into which a placement cuts a tensor, by torch itself."""
    parts: Sequence[torch.Tensor]
    parts, _ = placement._split_tensor(tensor, num_parts, with_padding=False, contiguous=False)
    return parts


def orders_of_cuts(tensor: "DTensor") -> list[tuple[int, ...]]:
    """For each dim that several mesh dims cut in an order of their own, these mesh dims in that order."""
    return [tuple(mesh_dims) for _, mesh_dims in getattr(tensor._spec, "shard_order", None) or ()]


# What is global to a process, and that threads which are ranks would share.


def cached_weights() -> tuple[int, dict[Any, Any]]:
    """How many blocks of `parametrize.cached` are open, and the weights that they keep."""
    return parametrize._cache_enabled, dict(parametrize._cache)


def restore_cached_weights(state: tuple[int, dict[Any, Any]]) -> None:
    """Put back what `cached_weights` gave."""
    parametrize._cache_enabled, kept = state
    parametrize._cache = dict(kept)


def is_in_forward_mode() -> bool:
    """Whether forward derivatives are computed, whose level is that of all threads."""
    return forward_ad._current_level >= 0


def guard_cuda_devices() -> None:
    """Make the guard of torch 2.11 that the first FakeTensorMode makes else, on a thread that may end before it."""
    getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()


# Single tensors.


def sparse_parts(tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The indices and values of a COO tensor as it is: the public ones refuse one that is not coalesced."""
    return tensor._indices(), tensor._values()
