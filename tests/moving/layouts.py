"""Random ways to lay tensors over ranks, and the values that every piece of them has."""

import math
from collections.abc import Sequence

import torch
from hypothesis import strategies as st

from shardwise.comm.local_tensors import torch_dtype
from shardwise.moving.live_states import stored_shape
from shardwise.space import Mesh, Piece
from tests.space.layouts import Cut, Layout, Placement, Replicate, Shard

State = dict[Piece, torch.Tensor]

Side = list[list[Piece]]
"""The pieces of every rank."""


def whole_values(dtype: str, shape: Sequence[int]) -> torch.Tensor:
    """A tensor in which every element has other bits than its neighbours, NaNs among them."""
    num_bytes = math.prod(shape) * torch_dtype(dtype).itemsize
    generator = torch.Generator().manual_seed(num_bytes)
    if dtype == "bool":
        return torch.randint(2, tuple(shape), generator=generator).bool()
    data = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)
    return data.view(torch_dtype(dtype)).view(tuple(shape))


TENSORS = (
    ("w", "float32", (6, 5)),
    ("b", "bfloat16", (7,)),
    ("scale", "float8_e4m3fn", (3, 4)),
    ("mask", "bool", (2, 3, 4)),
    ("phase", "complex64", (5, 2)),
    ("wide", "complex128", (3,)),
    ("step", "int64", ()),
    ("none", "float32", (0, 3)),
)
WHOLES = {name: whole_values(dtype, shape) for name, dtype, shape in TENSORS}
"""Of every size of elements; the last has none."""


def values(piece: Piece, whole: torch.Tensor) -> torch.Tensor:
    """What a holder of the piece stores."""
    box = whole[piece.box.slices()]
    if piece.run is None:
        return box.clone()
    return box.reshape(-1)[piece.run.start : piece.run.stop].clone()


def bits(tensor: torch.Tensor) -> list[int]:
    """The bytes, to compare NaNs too."""
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # single elements may have any stride, and keep it
    flat.view(tensor.shape).copy_(tensor)
    found: list[int] = flat.view(torch.uint8).tolist()
    return found


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with gaps between the elements."""
    view = torch.empty((*tensor.shape, 2), dtype=tensor.dtype)[..., 1]
    view.copy_(tensor)
    return view


@st.composite
def sides(draw: st.DrawFn, num_ranks: int, tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> Side:
    """Each tensor laid over some of the ranks, in a mesh of its own: replicated, cut along dims, in runs."""
    side: Side = [[] for _ in range(num_ranks)]
    for name, dtype, shape in tensors:
        members = draw(st.permutations(range(num_ranks)))[: draw(st.integers(1, num_ranks))]
        sizes = [size for size in range(1, len(members) + 1) if len(members) % size == 0]
        tp = draw(st.sampled_from(sizes))
        mesh = Mesh(dp_shard=len(members) // tp, tp=tp)
        placements: dict[str, Placement] = {}
        dims: list[Placement] = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
        placements["tp"] = draw(st.sampled_from(dims))
        placements["dp_shard"] = draw(st.sampled_from(dims))
        layout = Layout(mesh, placements)
        if "tp" in placements and draw(st.booleans()):
            layout = _with_cut(draw, mesh, placements["tp"], shape)
        for at, rank in enumerate(members):
            side[rank].append(layout.piece(at, name=name, dtype=dtype, global_shape=shape))
    return side


def _with_cut(draw: st.DrawFn, mesh: Mesh, tp: Placement, shape: tuple[int, ...]) -> Layout:
    """In uneven runs along dp_shard, of what tp leaves; of all where that differs in size."""
    left = {
        Layout(mesh, {"tp": tp}).piece(rank, name="", dtype="", global_shape=shape).num_elements
        for rank in range(mesh.tp)
    }
    if len(left) > 1:
        tp, left = Replicate(), {math.prod(shape)}
    (size,) = left
    inner = sorted(draw(st.lists(st.integers(0, size), min_size=mesh.dp_shard - 1, max_size=mesh.dp_shard - 1)))
    return Layout(mesh, {"tp": tp, "dp_shard": Cut((0, *inner, size))})


def state_of(pieces: Sequence[Piece], wholes: dict[str, torch.Tensor]) -> State:
    """What a rank holds; flat where a piece has a run."""
    return {piece: values(piece, wholes[piece.name]) for piece in pieces}


def empty_state(pieces: Sequence[Piece]) -> State:
    """Room for what a rank wants, full of something else."""
    state = {}
    for piece in pieces:
        tensor = torch.empty(stored_shape(piece), dtype=torch_dtype(piece.dtype))
        tensor.view(-1).view(torch.uint8).fill_(1)
        state[piece] = tensor
    return state
