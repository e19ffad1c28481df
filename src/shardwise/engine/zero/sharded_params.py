"""Parameters at rest: whole working copies exist only while they are gathered (stage 3).

    owner 0   | run of bucket 0 | run of bucket 1 | ..      in memory that the peers read where it lies, if they can
    owner 1   | run of bucket 0 | run of bucket 1 | ..
                     |
                     +--> whole bucket 0, on every rank, from `fill` to `free`; the parameters are views of it

A parameter that is not gathered says what it is (shape, dtype, gradient). Operations that need its values go to the
reader of the buffers; where nobody can gather, they are refused.
"""

import functools
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate
from typing import Any

import torch

from shardwise.comm import Channel, Work
from shardwise.comm.dtypes import torch_dtype
from shardwise.engine.counters import Counters
from shardwise.engine.inventory import Inventory
from shardwise.engine.zero.flat_params import FlatParams
from shardwise.engine.zero.view_copies import refusal_of_write
from shardwise.errors import ModelError
from shardwise.plan import Bucket, Ownership, Segment, Slot

_MEMORY = frozenset({"data", "_base", "__cuda_array_interface__"})
_VALUES = _MEMORY | {"T", "mT", "H", "mH", "real", "imag", "__dict__"}

_ASKED = (
    *("size", "dim", "ndimension", "stride", "numel", "nelement", "element_size", "data_ptr", "storage_offset"),
    *("untyped_storage", "get_device", "is_floating_point", "is_complex", "is_signed", "is_contiguous", "is_conj"),
    *("is_neg", "is_inference", "is_pinned", "is_shared", "is_same_size", "has_names", "requires_grad_", "__len__"),
    *("register_hook", "register_post_accumulate_grad_hook", "__hash__", "_is_view"),
)


@functools.cache
def functions_of_metadata() -> frozenset[Any]:
    """The functions that ask a parameter for something else than its values."""
    found: set[Any] = {getattr(torch.Tensor, name) for name in _ASKED if hasattr(torch.Tensor, name)}
    found |= {torch.numel, torch.is_floating_point, torch.is_complex}
    for name in dir(torch.Tensor):
        attribute: Any = getattr(torch.Tensor, name, None)
        if name not in _VALUES and hasattr(attribute, "__get__") and hasattr(attribute, "__set__"):
            found.add(attribute.__get__)
    for name in ("grad", "requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks"):
        found.add(getattr(torch.Tensor, name).__set__)
        found.add(getattr(torch.Tensor, name).__delete__)
    return frozenset(found)


@functools.cache
def _unfollowed() -> frozenset[Any]:
    """The functions that give the memory of a parameter, or change it, in ways that nobody sees."""
    names = ("numpy", "__array__", "__dlpack__", "__reduce_ex__", "__deepcopy__", "storage", "set_", "share_memory_")
    found: set[Any] = {getattr(torch.Tensor, name) for name in names if hasattr(torch.Tensor, name)}
    return frozenset(found | {getattr(torch.Tensor, name).__get__ for name in _MEMORY if hasattr(torch.Tensor, name)})


@functools.cache
def sharded_class(kind: type) -> type:
    """The class of parameters of class `kind` while they are not gathered."""

    def torch_function(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in functions_of_metadata():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        given = (*args, *(kwargs or {}).values())
        taken = [each for each in _flattened(given) if hasattr(type(each), "_is_resting")]
        is_followed = func not in _unfollowed() and getattr(func, "__name__", "") not in ("__set__", "__delete__")
        if taken and is_followed and (read := getattr(taken[0], "_reader", None)) is not None:
            output = read(func, args, kwargs or {}, taken)
            if output is not NotImplemented:
                return output
        raise _refusal(getattr(func, "__name__", str(func)), given)

    def described(self: Any) -> str:
        name, unit = self._rests_in
        return f"Parameter {name!r} {list(self.shape)} {self.dtype}, not gathered (unit {unit!r})"

    body = {
        "__torch_function__": classmethod(torch_function),
        "__repr__": described,
        "__module__": kind.__module__,
        "_is_resting": True,
    }
    return type(kind)(f"Resting{kind.__name__}", (kind,), body)


def _refusal(what: str, args: Iterable[Any]) -> ModelError:
    name, unit = next((each._rests_in for each in _flattened(args) if hasattr(type(each), "_is_resting")), ("?", "?"))
    within = f"of unit {unit!r}" if unit else "of the model itself"
    return ModelError(
        f"{what} needs the values of parameter {name!r} {within}, which is cut over ranks (stage 3) and gathered only "
        f"for forwards of engine.step, evaluate and predict; to read values outside of them use engine.state() or "
        f"sw.full(engine), to write them sw.load. In a forward, operations on it give new tensors: read its memory "
        f"(data, numpy) after detach(), or name the module that reads it in sharding.units ('.' is the model itself)"
    )


def _flattened(values: Iterable[Any]) -> Iterable[Any]:
    for value in values:
        if isinstance(value, list | tuple):
            yield from _flattened(value)
        else:
            yield value


class ShardedParams(FlatParams):
    """`FlatParams` whose buckets with a unit are at rest until they are filled. Parameters without one are whole."""

    def __init__(
        self,
        inventory: Inventory,
        ownership: Ownership,
        owners: Channel,
        *,
        unit_of: dict[str, str],
        keep_shapes: bool,
        waiting: Collection[str] = (),
    ) -> None:
        """`unit_of`: parameter -> its unit."""
        resting = [(index, bucket) for index, bucket in enumerate(ownership.buckets) if bucket.slots[0].name in unit_of]
        self._unit_of = unit_of
        self._runs: dict[int, torch.Tensor] = {}
        self._sources: dict[int, list[torch.Tensor]] = {}
        """For each bucket what to read of every owner, where all share memory."""
        self._targets: dict[int, list[torch.Tensor]] = {}
        self._lay_out(resting, owners)
        super().__init__(inventory, ownership, owners, keep_shapes=keep_shapes, waiting=waiting)
        self._kinds: dict[str, type] = {}
        for _, bucket in resting:
            for slot in bucket.slots:
                parameter = self._parameters[slot.name]
                self._kinds[slot.name] = type(parameter)
                parameter.__dict__["_rests_in"] = (slot.name, unit_of[slot.name])
                parameter.__class__ = sharded_class(type(parameter))

    @property
    def reads_in_place(self) -> bool:
        """Whether what peers have is read where it lies, without their doing: they must not write meanwhile."""
        return bool(self._sources)

    def _lay_out(self, resting: Sequence[tuple[int, Bucket]], owners: Channel) -> None:
        """Memory for the runs of all buckets: every owner's lie one after the other."""
        starts = [
            list(accumulate((_part_bytes(bucket, owner) for _, bucket in resting), initial=0))
            for owner in range(owners.size)
        ]
        num_bytes = max(each[-1] for each in starts)
        shared = owners.share(num_bytes) if num_bytes and owners.device.type == "cpu" else None
        own = owners.allocate(starts[owners.rank][-1]) if shared is None else shared[owners.rank]
        for at, (index, bucket) in enumerate(resting):
            self._runs[index] = _run(own, bucket, starts[owners.rank][at], owners.rank)
            if shared is not None:
                self._sources[index] = [
                    _run(memory, bucket, starts[owner][at], owner) for owner, memory in enumerate(shared)
                ]

    def part(self, index: int) -> torch.Tensor:
        """The owned part of a working buffer: at rest, where it has a unit."""
        return self._runs[index] if index in self._runs else super().part(index)

    def is_held_whole(self, index: int) -> bool:
        """See `FlatParams`."""
        return index not in self._runs

    def kind_of(self, name: str) -> type | None:
        """The class of a parameter while it is gathered; None for one that is held whole."""
        return self._kinds.get(name)

    def read_by(self, reader: Callable[..., Any]) -> None:
        """Let `reader` carry out operations on parameters at rest; see `OutsideReads`."""
        for name in self._kinds:
            self._parameters[name].__dict__["_reader"] = reader

    @torch.no_grad()
    def fill(self, index: int, counters: Counters, *, unit: str) -> Work | None:
        """Begin to gather a bucket; None where it is gathered already."""
        working = self.working[index]
        working.untyped_storage().resize_(working.numel() * working.element_size())
        counters.all_gathers += 1
        if sources := self._sources.get(index):
            for target, source in zip(self._targets[index], sources, strict=True):
                target.copy_(source)
            return None
        return self._owners.all_gather(
            working,
            self._runs[index],
            counts=self.ownership.buckets[index].counts,
            purpose=f"parameters of unit {unit!r}, bucket {index}",
        )

    def free(self, index: int) -> None:
        """Give the memory of a gathered bucket back; views of it are filled with the next `fill`."""
        self.working[index].untyped_storage().resize_(0)

    def storage_of(self, index: int) -> int:
        """What tells the memory of a bucket from that of other tensors, gathered or not."""
        address: int = self.working[index].untyped_storage()._cdata
        return address

    def moved(self) -> list[str]:
        """See `FlatParams`."""
        with torch._C.DisableTorchFunctionSubclass():
            return super().moved()

    def adopt_writes(self) -> None:
        """See `FlatParams`. Raises ModelError for writes to what was gathered, which are lost."""
        with torch._C.DisableTorchFunctionSubclass():
            for name in self._kinds:
                if self._parameters[name]._version != self._placed[name][1]:
                    raise refusal_of_write(name)
            super().adopt_writes()

    def _place_of(self, name: str) -> int:
        if name not in self._unit_of:
            return super()._place_of(name)
        address: int = self._parameters[name].untyped_storage()._cdata
        return address

    def _room(self, index: int, num_bytes: int) -> torch.Tensor:
        if index not in self._runs:
            return super()._room(index, num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._owners.device)

    def _write(self, index: int, slot: Slot, segment: Segment | None, values: torch.Tensor) -> None:
        if index not in self._runs:
            super()._write(index, slot, segment, values)
        elif segment is not None:
            span = slice(segment.start, segment.start + segment.run.num_elements)
            part = values.reshape(-1)[segment.run.start : segment.run.stop]
            self.part(index)[span].copy_(part)
            self.masters[index][span].copy_(part)

    def _fill(self, index: int, bucket: Bucket, waiting: Collection[str], *, keep_shapes: bool) -> None:
        super()._fill(index, bucket, waiting, keep_shapes=keep_shapes)
        if index in self._runs:
            self._targets[index] = list(self.working[index].split(list(bucket.counts)))
            self.free(index)


def _part_bytes(bucket: Bucket, owner: int) -> int:
    """Bytes of an owner's run, up to where the next one may begin."""
    return -(-bucket.counts[owner] * torch_dtype(bucket.working).itemsize // 64) * 64


def _run(memory: torch.Tensor, bucket: Bucket, start: int, owner: int) -> torch.Tensor:
    dtype = torch_dtype(bucket.working)
    return memory[start : start + bucket.counts[owner] * dtype.itemsize].view(dtype)
