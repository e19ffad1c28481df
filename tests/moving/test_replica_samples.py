"""What ranks hold under one name is alike, or no save is made: for each kind of state, dtype, stride and saver."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore

import shardwise as sw
from shardwise.checkpoint import AsyncSaver, TorchState
from shardwise.checkpoint.state_pieces import hold
from shardwise.checkpoint.states import State
from shardwise.errors import CheckpointError, PlanError
from tests.covering import covering

DTYPES = ["float32", "float8_e4m3fn", "bool", "complex64"]
SHAPES = {"a number": (), "small": (3, 5), "large": (70, 90), "without elements": (0, 3)}


def _values(dtype: str, shape: tuple[int, ...], other: bool) -> torch.Tensor:
    made = torch.arange(torch.Size(shape).numel()).remainder(2).view(shape)
    return (1 - made if other else made).to(getattr(torch, dtype))


def _as_piece(tensor: torch.Tensor) -> dict[sw.Piece, torch.Tensor]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {sw.Piece(name="w", dtype=dtype, global_shape=tuple(tensor.shape)): tensor}


def _by_piece(state: State) -> dict[sw.Piece, torch.Tensor]:
    return dict(hold(state).tensors)


KINDS: dict[str, Callable[[torch.Tensor], State]] = {
    "by name": lambda tensor: {"w": tensor, "other": torch.ones(2)},
    "by piece": _as_piece,
}
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda tensor: tensor,
    "apart": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0] if tensor.element_size() > 1 else tensor,
}
SAVERS = ["save", "AsyncSaver whole", "full", "full renamed", "stream again", "reshard"]
DEVICES = ["cpu", "fake"]
WAYS = covering(list(KINDS), DTYPES, list(SHAPES), list(STRIDES), SAVERS, DEVICES, [True, False])


def _saved(path: Path, state: State, channel: sw.Channel, saver: str, alike: State) -> None:
    """alike: what rank 0 holds, which a first call has in the place of this state."""
    if saver == "full":
        dict(sw.full(state, channel=channel))
    elif saver == "full renamed":
        dict(sw.full(state, channel=channel, rewrite=sw.Rewrite("w -> v")))
    elif saver == "AsyncSaver whole":
        with AsyncSaver(path, channel=channel, layout="whole") as background:
            background.save(state)
    elif saver in ("stream again", "reshard"):
        (piece,) = (each for each in _by_piece(state) if each.name == "w")
        room = {piece: torch.empty_like(_by_piece(alike)[piece]).contiguous()} if channel.rank == 1 else {}
        if saver == "reshard":
            sw.reshard(_by_piece(state), room, channel)
            return
        last = sw.stream(alike, room, channel=channel)
        sw.stream(state, room, channel=channel, last=last)
    else:
        sw.save(path, state, channel=channel)


@pytest.mark.parametrize(("kind", "dtype", "size", "strides", "saver", "device", "alike"), WAYS)
def test_no_rank_saves_values_that_differ(
    fake: str, tmp_path: Path, kind: str, dtype: str, size: str, strides: str, saver: str, device: str, alike: bool
) -> None:
    shape = SHAPES[size]

    def run(channel: sw.Channel) -> str:
        values = _values(dtype, shape, other=channel.rank == 2 and not alike)
        # Ranks may have the same values in other strides.
        made = [each.to(channel.device) for each in (values, _values(dtype, shape, other=False))]
        held, first = (STRIDES[strides](each) if channel.rank else each for each in made)
        try:
            _saved(tmp_path, KINDS[kind](held), channel, saver, KINDS[kind](first))
        except (CheckpointError, PlanError) as error:
            return str(error)
        return ""

    said = sw.simulate(3, run, device=device)
    if alike or 0 in shape:
        assert said == [""] * 3
    else:
        name = "v" if "renamed" in saver else "w"
        assert all(f"'{name}': ranks 0 and 2 hold different values" in each for each in said), said
        assert not list(tmp_path.glob("save-*/manifest.json"))


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("placements", [(Replicate(), Shard(0)), (Shard(1), Replicate()), (Replicate(), Replicate())])
def test_replicas_of_dtensors_are_compared(tmp_path: Path, placements: tuple[Placement, ...], alike: bool) -> None:
    states = []
    for rank in range(4):
        dist.init_process_group("fake", rank=rank, world_size=4, store=FakeStore())
        mesh = init_device_mesh("cpu", (2, 2))
        whole = torch.arange(2400.0).view(40, 60)
        local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
        # Rank 3 has other values than its replicas.
        made = DTensor.from_local(local + (rank == 3 and not alike), mesh, placements, run_check=False)
        states.append(dict(hold({"w": made}).tensors))
        dist.destroy_process_group()

    def run(channel: sw.Channel) -> str:
        try:
            sw.save(tmp_path, states[channel.rank], channel=channel)
        except CheckpointError as error:
            return str(error)
        return ""

    said = sw.simulate(4, run)
    assert all(each == "" if alike else "and 3 hold different values" in each for each in said), said


@pytest.mark.parametrize("what", ["parameter", "moment", "buffer"])
def test_buffers_of_data_ranks_may_differ_and_nothing_else(tmp_path: Path, what: str) -> None:
    def run(channel: sw.Channel) -> bool:
        torch.manual_seed(0)
        linear, norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        model = nn.Sequential(linear, norm)
        optimizer = torch.optim.AdamW(model.parameters())
        model.eval()(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            held = {
                "parameter": linear.weight,
                "moment": optimizer.state[linear.weight]["exp_avg"],
                "buffer": norm.running_mean,
            }[what]
            assert isinstance(held, torch.Tensor)
            held += channel.rank
        try:
            sw.save(tmp_path, TorchState(model, optimizer), channel=channel)
        except CheckpointError as error:
            return "hold different values" in str(error)
        return False

    assert sw.simulate(2, run) == [what != "buffer"] * 2
