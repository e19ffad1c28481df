"""What ranks hold under one name is alike, or no save is made: for each kind of state, dtype, stride and saver."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint import AsyncSaver, TorchState
from shardwise.checkpoint.states import State
from shardwise.errors import CheckpointError
from tests.covering import covering

DTYPES = ["float32", "bfloat16", "float8_e4m3fn", "bool", "int64", "complex64"]
SHAPES = {"a number": (), "small": (3, 5), "large": (70, 90), "without elements": (0, 3)}


def _values(dtype: str, shape: tuple[int, ...], other: bool) -> torch.Tensor:
    made = torch.arange(torch.Size(shape).numel()).remainder(2).view(shape)
    return (1 - made if other else made).to(getattr(torch, dtype))


def _as_piece(tensor: torch.Tensor) -> dict[sw.Piece, torch.Tensor]:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return {sw.Piece(name="w", dtype=dtype, global_shape=tuple(tensor.shape)): tensor}


KINDS: dict[str, Callable[[torch.Tensor], State]] = {
    "by name": lambda tensor: {"w": tensor, "other": torch.ones(2)},
    "by piece": _as_piece,
}
STRIDES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dense": lambda tensor: tensor,
    "apart": lambda tensor: torch.stack([tensor, tensor], -1)[..., 0] if tensor.element_size() > 1 else tensor,
}
WAYS = covering(
    list(KINDS), DTYPES, list(SHAPES), list(STRIDES), ["save", "AsyncSaver", "whole", "full"], [True, False]
)


def _saved(path: Path, state: State, channel: sw.Channel, saver: str) -> None:
    if saver == "full":
        dict(sw.full(state, channel=channel))
    elif saver == "AsyncSaver":
        with AsyncSaver(path, channel=channel) as background:
            background.save(state)
    else:
        sw.save(path, state, channel=channel, layout="whole" if saver == "whole" else "pieces")


@pytest.mark.parametrize(("kind", "dtype", "size", "strides", "saver", "alike"), WAYS)
def test_no_rank_saves_values_that_differ(
    tmp_path: Path, kind: str, dtype: str, size: str, strides: str, saver: str, alike: bool
) -> None:
    shape = SHAPES[size]

    def run(channel: sw.Channel) -> str:
        values = _values(dtype, shape, other=channel.rank == 2 and not alike)
        # Ranks may have the same values in other strides.
        held = STRIDES[strides](values) if channel.rank else values
        try:
            _saved(tmp_path, KINDS[kind](held), channel, saver)
        except CheckpointError as error:
            return str(error)
        return ""

    said = sw.simulate(3, run)
    if alike or 0 in shape:
        assert said == [""] * 3
    else:
        assert all("'w': ranks 0 and 2 hold different values" in each for each in said), said
        assert not list(tmp_path.glob("save-*/manifest.json"))


def test_ways_out_keep_the_values_of_all(tmp_path: Path) -> None:
    def run(channel: sw.Channel) -> list[float]:
        own = torch.full((2, 2), float(channel.rank))
        part = sw.Piece(name="all", dtype="float32", global_shape=(4, 2), offset=(2 * channel.rank, 0), shape=(2, 2))
        sw.save(tmp_path / "names", {f"experts.{channel.rank}.w": own}, channel=channel)
        sw.save(tmp_path / "parts", {part: own}, channel=channel)
        sw.save(tmp_path / "one", {"mean": own} if channel.rank == 0 else {}, channel=channel)
        back = torch.empty(2, 2)
        found = []
        for name, target in (("names", {f"experts.{channel.rank}.w": back}), ("parts", {part: back})):
            sw.load(tmp_path / name, target, channel=channel, strict=False)
            found.append(float(back.mean()))
        return found

    assert sw.simulate(2, run) == [[0.0, 0.0], [1.0, 1.0]]


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
