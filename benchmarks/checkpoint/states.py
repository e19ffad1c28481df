"""States to save: a transformer and its optimizer, held by ranks as rows, as columns, or as slices of flat buffers.

Every element has a value that follows from its tensor and its place, so that any part can be checked alone.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardwise.comm import Channel
from shardwise.space import Piece

__all__ = [
    "Kind",
    "Spec",
    "Specs",
    "State",
    "World",
    "check",
    "flat",
    "local_bytes",
    "locals_of",
    "poison",
    "sharded",
    "slices",
]

Kind = Literal["blocks", "large"]
"""Which tensors make up a state: those of transformer blocks, most of them small, or matrices of 8 MiB."""
LARGE_SHAPE = (1026, 2046)
"""A matrix of 8 MiB whose sides no power of two divides."""
NUM_LAYERS = 12
"""Of states from 12 MiB on; smaller ones, for a try, have fewer."""
GROUPS = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")

State = Mapping[str, torch.Tensor]
Held = State | Mapping[Piece, torch.Tensor]
Layout = Literal["rows", "columns", "slices", "flat"]


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The ranks that save and load together, as this one sees them."""

    rank: int
    size: int
    mesh: DeviceMesh
    channel: Channel


@dataclass(frozen=True, kw_only=True, slots=True)
class Spec:
    """A tensor of float32."""

    name: str
    shape: tuple[int, ...]
    salt: int
    """What its elements have in common."""

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    def values(self, rows: range, columns: range | None = None) -> torch.Tensor:
        """Elements of a box; without `columns` all of them. The bits are place plus salt."""
        width = math.prod(self.shape[1:])
        columns = range(width) if columns is None else columns
        first = torch.arange(rows.start, rows.stop, dtype=torch.int32)[:, None] * width
        bits = first + torch.arange(columns.start, columns.stop, dtype=torch.int32) + self.salt
        return bits.view(torch.float32).view(len(rows), *(() if len(self.shape) == 1 else (len(columns),)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Specs:
    """All tensors of a state: parameters, and two moments of each."""

    groups: tuple[tuple[Spec, ...], ...]

    @classmethod
    def of_bytes(cls, num_bytes: int, kind: Kind = "blocks") -> "Specs":
        """A state of about this many bytes.

        "blocks": blocks of 16 tensors, 10 of them small, and an embedding for the rest. "large": matrices of 8 MiB.
        """
        budget = num_bytes // 4 // len(GROUPS)
        if kind == "large":
            count = max(1, budget // math.prod(LARGE_SHAPE))
            return cls.of_shapes({f"layers.{layer}.weight": LARGE_SHAPE for layer in range(count)})
        num_layers = max(1, min(NUM_LAYERS, num_bytes >> 20))
        hidden = max(16, int(math.sqrt(0.8 * budget / (12 * num_layers))) // 16 * 16)
        shapes: dict[str, tuple[int, ...]] = {}
        for layer in range(num_layers):
            shapes |= {f"layers.{layer}.{name}": shape for name, shape in _block(hidden).items()}
        shapes["norm.weight"] = (hidden,)
        rest = budget - sum(math.prod(shape) for shape in shapes.values())
        shapes = {"embedding.weight": (max(8, rest // hidden), hidden), **shapes}
        return cls.of_shapes(shapes)

    @classmethod
    def of_shapes(cls, shapes: Mapping[str, tuple[int, ...]]) -> "Specs":
        """A state with these parameters."""
        groups = [
            tuple(
                Spec(name=f"{group}.{name}", shape=shape, salt=7919 * (at * len(shapes) + number))
                for number, (name, shape) in enumerate(shapes.items())
            )
            for at, group in enumerate(GROUPS)
        ]
        return cls(groups=tuple(groups))

    def __iter__(self) -> Iterator[Spec]:
        for group in self.groups:
            yield from group

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole state."""
        return 4 * sum(spec.num_elements for spec in self)


def _block(hidden: int) -> dict[str, tuple[int, ...]]:
    wide = 4 * hidden
    shapes: dict[str, tuple[int, ...]] = {}
    for name, rows, columns in (
        ("attention.query", hidden, hidden),
        ("attention.key", hidden, hidden),
        ("attention.value", hidden, hidden),
        ("attention.output", hidden, hidden),
        ("mlp.up", wide, hidden),
        ("mlp.down", hidden, wide),
    ):
        shapes |= {f"{name}.weight": (rows, columns), f"{name}.bias": (rows,)}
    for name in ("norm1", "norm2"):
        shapes |= {f"{name}.weight": (hidden,), f"{name}.bias": (hidden,)}
    return shapes


def part(length: int, rank: int, size: int) -> range:
    """What `rank` has of a dimension that is cut as torch cuts it."""
    step = -(-length // size)
    return range(min(rank * step, length), min((rank + 1) * step, length))


def sharded(specs: Specs, world: World, *, columns: bool = False) -> dict[str, torch.Tensor]:
    """DTensors by name, cut along rows, or matrices along columns."""
    state: dict[str, torch.Tensor] = {}
    for spec in specs:
        dim = int(columns and len(spec.shape) > 1)
        held = part(spec.shape[dim], world.rank, world.size)
        values = spec.values(held) if dim == 0 else spec.values(range(spec.shape[0]), held)
        stride = torch.empty(spec.shape, device="meta").stride()
        state[spec.name] = DTensor.from_local(
            values, world.mesh, [Shard(dim)], run_check=False, shape=torch.Size(spec.shape), stride=stride
        )
    return state


def flat(specs: Specs, world: World) -> dict[str, torch.Tensor]:
    """One 1-d DTensor per group, all its tensors one after the other, in equal parts."""
    state: dict[str, torch.Tensor] = {}
    for name, group in zip(GROUPS, specs.groups, strict=True):
        length = sum(spec.num_elements for spec in group)
        held = part(length, world.rank, world.size)
        buffer = torch.empty(len(held))
        for spec, first, run in _runs(group, held):
            values = spec.values(range(spec.shape[0])).view(-1)
            buffer[first : first + len(run)] = values[run.start : run.stop]
        state[name] = DTensor.from_local(
            buffer, world.mesh, [Shard(0)], run_check=False, shape=torch.Size((length,)), stride=(1,)
        )
    return state


def _runs(group: tuple[Spec, ...], held: range) -> Iterator[tuple[Spec, int, range]]:
    """What a part of a flat buffer has of each tensor: its place in the part, and which elements of the tensor."""
    start = 0
    for spec in group:
        first, last = max(start, held.start), min(start + spec.num_elements, held.stop)
        if first < last:
            yield spec, first - held.start, range(first - start, last - start)
        start += spec.num_elements


def slices(specs: Specs, world: World, buffers: State) -> dict[Piece, torch.Tensor]:
    """The parts of the flat buffers as pieces of the tensors in them; views of `buffers`, which are those of `flat`."""
    pieces: dict[Piece, torch.Tensor] = {}
    for name, group in zip(GROUPS, specs.groups, strict=True):
        buffer = local(buffers[name])
        length = sum(spec.num_elements for spec in group)
        for spec, first, run in _runs(group, part(length, world.rank, world.size)):
            piece = Piece(name=spec.name, dtype="float32", global_shape=spec.shape, run=(run.start, run.stop))
            pieces[piece] = buffer[first : first + len(run)]
    return pieces


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of a tensor."""
    if isinstance(tensor, DTensor):
        held = tensor.to_local()
        assert isinstance(held, torch.Tensor)
        return held
    return tensor


def locals_of(state: Held) -> list[torch.Tensor]:
    """What this rank holds of every tensor."""
    return [local(tensor) for tensor in state.values()]


def local_bytes(state: Held) -> int:
    """Bytes of what this rank holds."""
    return sum(tensor.nbytes for tensor in locals_of(state))


def poison(state: Held) -> None:
    """Overwrite everything with a value that no element has."""
    for tensor in locals_of(state):
        tensor.fill_(-1.0)


def check(world: World, state: Held, expected: Held) -> None:
    """Raise RuntimeError unless the state has the bits of `expected`."""
    wrong = [
        str(key)
        for key, found, right in zip(state, locals_of(state), locals_of(expected), strict=True)
        if not torch.equal(found.view(torch.int32), right.view(torch.int32))
    ]
    if wrong:
        raise RuntimeError(f"rank {world.rank} of {world.size}: {len(wrong)} tensors are wrong, as {wrong[0]}")
