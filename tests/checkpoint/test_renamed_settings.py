"""Optimizers behind a rewrite: groups and states follow their parameters, and what was trained apart does not join."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.small_states import same, same_tensor
from tests.engine.refusals import same_error_everywhere

REWRITE = sw.Rewrite("""
    q, k, v -> qkv, fused_qkv, num_heads=4, num_key_value_groups=2, axis=0
    gate, up -> gate_up, axis=0
    down^T -> project
    """)
APART = {"q": (8, 6), "k": (4, 6), "v": (4, 6), "gate": (5, 6), "up": (5, 6), "down": (6, 5), "norm": (6,)}
FUSED = {"qkv": (16, 6), "gate_up": (10, 6), "project": (5, 6), "norm": (6,)}


def model_of(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> nn.ParameterDict:
    numbers = torch.Generator().manual_seed(seed)
    return nn.ParameterDict({name: torch.randn(shape, generator=numbers) for name, shape in shapes.items()})


def trained(shapes: dict[str, tuple[int, ...]], updates: int) -> TorchState:
    """After so many updates."""
    model = model_of(shapes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(updates):
        sum(each.square().sum() for each in model.parameters()).backward()  # type: ignore[union-attr]
        optimizer.step()
    return TorchState(model, optimizer)


def grouped(shapes: dict[str, tuple[int, ...]], *slow: str) -> TorchState:
    """With a lower rate for some parameters."""
    model = model_of(shapes)
    fast = [each for name, each in model.items() if name not in slow]
    groups: list[dict[str, Any]] = [{"params": fast}, {"params": [model[name] for name in slow], "lr": 1e-4}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return TorchState(model, optimizer)


class Given:
    """A state that says what another one does, but for the number of updates of q."""

    def __init__(self, state: TorchState) -> None:
        self.settings = state.settings
        self._tensors = {piece: tensor.clone() for piece, tensor in state.state().items()}
        for piece, tensor in self._tensors.items():
            if piece.name == "optimizer/q/step":
                tensor.fill_(3)

    def state(self) -> dict[sw.Piece, torch.Tensor]:
        return self._tensors


def test_numbers_of_which_a_rewrite_makes_one_have_to_be_equal(tmp_path: Path) -> None:
    source: Any = Given(trained(APART, 2))
    checkpoint.save(tmp_path / "apart", source)
    targets = [trained(FUSED, 0) for _ in range(3)]

    def load(channel: Channel) -> None:
        sw.load(tmp_path / "apart", targets[channel.rank], rewrite=REWRITE, channel=channel)

    def save(channel: Channel) -> None:
        sw.save(tmp_path / "fused", source, rewrite=REWRITE, channel=channel)

    for call in (load, save):
        error = same_error_everywhere(3, call)
        said = "optimizer/q/step is 3.0 and optimizer/k/step is 2.0, and the rewrite makes one number of"
        assert isinstance(error, CheckpointError)
        assert said in str(error)
    assert not list(tmp_path.glob("fused/*"))
    fresh = {piece.name: tensor for piece, tensor in trained(FUSED, 0).state().items()}
    assert all(torch.equal(each, fresh[piece.name]) for target in targets for piece, each in target.state().items())


def test_tensors_that_were_trained_apart_do_not_become_one_unnoticed(tmp_path: Path) -> None:
    source, target = grouped(APART, "q"), grouped(FUSED)
    checkpoint.save(tmp_path, source)
    said = r"qkv is made of k, which group 0 of SGD trains, and q, which group 1 of SGD trains \(lr is 0.1 and 0.0001\)"
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path, target, rewrite=REWRITE)
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(tmp_path / "fused", source, rewrite=REWRITE)
    report = checkpoint.load(tmp_path, target, rewrite=REWRITE, strict=False).report
    assert any("qkv is made of k" in each for each in report.unexpected)
    checkpoint.load(tmp_path, dict(model_of(FUSED).state_dict()), rewrite=REWRITE)  # which has no groups


def test_groups_follow_their_parameters(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, grouped(APART, "gate", "up", "norm"))
    for slow in (("gate_up", "norm"), ("norm", "gate_up")):
        target = grouped(FUSED, *slow)
        checkpoint.load(tmp_path, target, rewrite=REWRITE)
        assert rates(target) == [0.1, 1e-4]
    with pytest.raises(CheckpointError, match="was several groups in the checkpoint"):
        checkpoint.load(tmp_path, grouped(FUSED, "norm"), rewrite=REWRITE)


def rates(state: TorchState) -> list[float]:
    return [group["settings"]["lr"] for group in state.settings()["optimizers"][0]["groups"]]


def test_a_conversion_takes_the_state_of_optimizers_and_their_groups_along(tmp_path: Path) -> None:
    for name, source in (("trained", trained(APART, 2)), ("grouped", grouped(APART, "gate", "up", "norm"))):
        checkpoint.save(tmp_path / name, source, step=4)
        checkpoint.convert(tmp_path / name, tmp_path / f"{name} fused", rewrite=REWRITE)
        assert checkpoint.open(tmp_path / f"{name} fused").step == 4
    loaded, converted = trained(FUSED, 0), trained(FUSED, 0)
    checkpoint.load(tmp_path / "trained", loaded, rewrite=REWRITE)
    checkpoint.load(tmp_path / "trained fused", converted)
    expected = {piece.name: tensor for piece, tensor in loaded.state().items()}
    assert same({piece.name: tensor for piece, tensor in converted.state().items()}, expected)
    target = grouped(FUSED, "gate_up", "norm")
    checkpoint.load(tmp_path / "grouped fused", target)
    assert rates(target) == [0.1, 1e-4]


def test_a_parameter_that_a_rewrite_adds_keeps_its_value_and_its_state(tmp_path: Path) -> None:
    source, target = trained(APART, 2), trained(FUSED, 1)
    checkpoint.save(tmp_path, source)
    before = {piece: tensor.clone() for piece, tensor in target.state().items()}
    rewrite = sw.Rewrite("q, k, v -> _; _ -> qkv; gate, up -> gate_up, axis=0; down^T -> project")
    report = checkpoint.load(tmp_path, target, rewrite=rewrite).report
    assert report.added == ("qkv",)
    assert {"q", "k", "v"} <= set(report.dropped)
    stored = {piece.name: tensor for piece, tensor in source.state().items()}
    for piece, tensor in target.state().items():
        if "qkv" in piece.name:
            assert same_tensor(tensor, before[piece])
        elif "project" in piece.name and tensor.dim():
            assert torch.equal(tensor, stored[piece.name.replace("project", "down")].T)
        elif "norm" in piece.name:
            assert torch.equal(tensor, stored[piece.name])
    assert any(piece.name == "optimizer/qkv/exp_avg" for piece in target.state())
