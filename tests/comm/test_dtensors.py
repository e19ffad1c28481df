"""Pieces of DTensors, against the values that torch itself puts on every rank."""

import itertools
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwise.comm.local_tensors import local_pieces, local_tensor
from shardwise.errors import CheckpointError
from shardwise.space import Piece, check_cover
from tests.covering import covering

Held = list[tuple[Piece, torch.Tensor]]


@pytest.fixture
def be_rank() -> Iterator[Callable[[int, int], None]]:
    """Makes this process a rank of a world whose collectives do nothing; torch still cuts values as that rank would."""

    def become(rank: int, world_size: int) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())

    yield become
    if dist.is_initialized():
        dist.destroy_process_group()


def numbered(shape: Sequence[int]) -> torch.Tensor:
    return torch.arange(torch.Size(shape).numel()).view(tuple(shape))


def cuts(ndim: int) -> list[Placement]:
    strided = [_StridedShard(dim, split_factor=factor) for dim in range(ndim) for factor in (2, 3)]
    return [Replicate(), *(Shard(dim) for dim in range(ndim)), *strided]


def check_pieces(shape: Sequence[int], held: Held, dtensor: DTensor, whole: torch.Tensor) -> None:
    local = local_tensor(dtensor)
    for piece, part in held:
        assert (piece.name, piece.dtype, piece.global_shape, piece.run) == ("w", "int64", tuple(shape), None)
        assert part.shape == piece.shape
        assert torch.equal(part, whole[piece.box.slices()])
        assert not part.numel() or part.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert sum(piece.num_elements for piece, _ in held) == local.numel()


def mergeable(held: Held) -> bool:
    """Whether two boxes differ in one dim only and meet there."""
    for (a, _), (b, _) in itertools.permutations(held, 2):
        differ = [dim for dim, pair in enumerate(zip(a.box.offset, b.box.offset, strict=True)) if pair[0] != pair[1]]
        if len(differ) == 1 and a.box.stop[differ[0]] == b.box.offset[differ[0]]:
            return True
    return False


@pytest.mark.parametrize(
    ("shape", "mesh_shape"),
    [
        *itertools.product([(), (0,), (1,), (7,), (16,), (5, 4), (3, 0)], [(1,), (3,), (3, 2)]),
        *(((7,), (2, 2, 2)), ((5, 4), (2, 2, 2)), ((2, 1, 5), (2, 2))),
    ],
)
def test_all_ranks_together_hold_exactly_what_torch_gives_them(
    be_rank: Callable[[int, int], None], shape: tuple[int, ...], mesh_shape: tuple[int, ...]
) -> None:
    world_size = torch.Size(mesh_shape).numel()
    whole = numbered(shape)
    choices = covering(*[cuts(len(shape))] * len(mesh_shape), strength=2)
    held: dict[tuple[Placement, ...], dict[Piece, None]] = {choice: {} for choice in choices}
    for rank in range(world_size):
        be_rank(rank, world_size)
        mesh = init_device_mesh("cpu", mesh_shape)
        for placements in choices:
            dtensor = distribute_tensor(whole, mesh, placements, src_data_rank=None)
            mine = local_pieces("w", dtensor)
            check_pieces(shape, mine, dtensor, whole)
            assert not mergeable(mine)
            held[placements].update(dict.fromkeys(piece for piece, _ in mine))
    for pieces in held.values():
        assert pieces
        assert check_cover(pieces) == []


def test_what_is_written_into_the_parts_is_in_the_dtensor(be_rank: Callable[[int, int], None]) -> None:
    be_rank(0, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    parameter = torch.nn.Parameter(torch.zeros(9, 4))
    placements = [_StridedShard(0, split_factor=2), Shard(1)]
    dtensor = distribute_tensor(parameter, mesh, placements, src_data_rank=None)
    assert dtensor.requires_grad
    held = local_pieces("w", dtensor)
    assert len(held) == 2
    for number, (_, part) in enumerate(held, 1):
        assert not part.requires_grad
        part.fill_(number)
    assert local_tensor(dtensor)[:, 0].tolist() == [1, 1, 1, 2, 2]


def test_local_tensors_of_any_strides_are_taken(be_rank: Callable[[int, int], None]) -> None:
    be_rank(1, 2)
    mesh = init_device_mesh("cpu", (2,))
    whole = numbered((4, 6))
    local = whole[2:].t().contiguous().t()
    dtensor = DTensor.from_local(local, mesh, [Shard(0)], shape=whole.shape, stride=(1, 4), run_check=False)
    [(piece, part)] = local_pieces("w", dtensor)
    assert str(piece) == "w[2:4, 0:6]"
    assert torch.equal(part, whole[2:])
    assert part.data_ptr() == local.data_ptr()


def test_a_rank_outside_the_mesh_holds_nothing(be_rank: Callable[[int, int], None]) -> None:
    be_rank(1, 2)
    mesh = DeviceMesh("cpu", [0])
    assert local_pieces("w", distribute_tensor(numbered((4, 2)), mesh, [Shard(0)], src_data_rank=None)) == []
    assert local_pieces("w", distribute_tensor(numbered((4, 2)), mesh, [Replicate()], src_data_rank=None)) == []


@pytest.mark.parametrize("rank", [0, 1])
def test_summands_are_refused_on_every_rank(be_rank: Callable[[int, int], None], rank: int) -> None:
    be_rank(rank, 2)
    dtensor = DTensor.from_local(torch.ones(2), DeviceMesh("cpu", [0]), [Partial()], run_check=False)
    with pytest.raises(CheckpointError, match=r"w is a DTensor with placement .*redistribute\(\)"):
        local_pieces("w", dtensor)


def test_a_local_tensor_that_is_not_what_its_placement_says_is_refused(be_rank: Callable[[int, int], None]) -> None:
    be_rank(0, 2)
    mesh = init_device_mesh("cpu", (2,))
    dtensor = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size([8]), stride=(1,), run_check=False)
    with pytest.raises(CheckpointError, match=r"a local tensor of shape \(4,\), but it has \(3,\)"):
        local_pieces("w", dtensor)
    empty = DTensor.from_local(torch.ones(3), mesh, [Shard(0)], shape=torch.Size([0]), stride=(1,), run_check=False)
    with pytest.raises(CheckpointError, match=r"a local tensor of shape \(0,\), but it has \(3,\)"):
        local_pieces("w", empty)


def test_cuts_in_another_order_than_the_placements_are_refused(be_rank: Callable[[int, int], None]) -> None:
    be_rank(0, 4)
    mesh = init_device_mesh("cpu", (2, 2))
    dtensor = distribute_tensor(numbered((8,)), mesh, [Shard(0), Shard(0)], src_data_rank=None)
    assert len(local_pieces("w", dtensor)) == 1
    dtensor._spec.shard_order = tuple(entry._replace(mesh_dims=(1, 0)) for entry in dtensor._spec.shard_order)
    with pytest.raises(CheckpointError, match=r"cut in the order \(1, 0\)"):
        local_pieces("w", dtensor)
