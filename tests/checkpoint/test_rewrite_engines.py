"""Engines that load and save through a rewrite: parameters, masters, optimizer state, ties and groups, exactly."""

from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.fused_models import (
    FUSING,
    Apart,
    Fused,
    adamw,
    fused,
    model_of,
    wholes,
)
from tests.checkpoint.small_states import same_tensor
from tests.engine.models import word_batch, word_loss


def torch_state(kind: type[torch.nn.Module], updates: int, lr: float = 1e-2) -> tuple[torch.nn.Module, TorchState]:
    model = model_of(kind)
    optimizer = adamw(list(model.parameters()), lr)
    for update in range(updates):
        batch = word_batch(update, 8)
        word_loss(model(batch["words"]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, TorchState(model, optimizer)


class Given:
    """A state that says what another one does, with other numbers."""

    def __init__(self, state: TorchState, **numbers: float) -> None:
        self._settings = state.settings()
        self._tensors = {piece: tensor.clone() for piece, tensor in state.state().items()}
        for piece, tensor in self._tensors.items():
            if piece.name in numbers:
                tensor.fill_(numbers[piece.name])

    def state(self) -> dict[sw.Piece, torch.Tensor]:
        return self._tensors

    def settings(self) -> dict[str, Any]:
        return self._settings


def test_numbers_of_which_a_rewrite_makes_one_have_to_be_equal(tmp_path: Path) -> None:
    """q has made more updates than k and v: its step is another."""
    source = Given(torch_state(Apart, 2)[1], **{"optimizer/q.weight/step": 3})
    checkpoint.save(tmp_path / "apart", source)
    model, target = torch_state(Fused, 0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    said = "optimizer/q.weight/step is 3.0 and optimizer/k.weight/step is 2.0, and the rewrite makes one number of"
    for size in (1, 3):
        states = [target] + [torch_state(Fused, 0)[1] for _ in range(size - 1)]

        def load(channel: Channel, states: list[TorchState] = states) -> None:
            with pytest.raises(CheckpointError, match=said):
                sw.load(tmp_path / "apart", states[channel.rank], rewrite=sw.Rewrite(FUSING), channel=channel)

        sw.simulate(size, load)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())

    def save(channel: Channel) -> None:
        with pytest.raises(CheckpointError, match=said):
            sw.save(tmp_path / "fused", source, rewrite=sw.Rewrite(FUSING), channel=channel)

    sw.simulate(2, save)
    assert not list(tmp_path.glob("fused/*"))


def grouped(model: torch.nn.Module, slow: tuple[str, ...]) -> TorchState:
    """With a lower rate for some parameters, and state."""
    parameters = dict(model.named_parameters())
    groups: list[dict[str, Any]] = [
        {"params": [each for name, each in parameters.items() if name not in slow]},
        {"params": [parameters[name] for name in slow], "lr": 1e-4},
    ]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    return TorchState(model, optimizer)


def test_tensors_that_were_trained_apart_do_not_become_one_unnoticed(tmp_path: Path) -> None:
    source = grouped(model_of(Apart), ("q.weight",))
    checkpoint.save(tmp_path, source)
    said = (
        "qkv.weight is made of k.weight, which group 0 of SGD trains, and q.weight, which group 1 of SGD trains "
        r"\(lr is 0.1 and 0.0001\)"
    )
    target = grouped(model_of(Fused, 1), ())
    with pytest.raises(CheckpointError, match=said):
        checkpoint.load(tmp_path, target, rewrite=sw.Rewrite(FUSING))
    with pytest.raises(CheckpointError, match=said):
        checkpoint.save(tmp_path / "fused", source, rewrite=sw.Rewrite(FUSING))
    report = checkpoint.load(tmp_path, target, rewrite=sw.Rewrite(FUSING), strict=False).report
    assert any("qkv.weight is made of k.weight" in each for each in report.unexpected)
    plain = model_of(Fused)
    checkpoint.load(tmp_path, plain.state_dict(), rewrite=sw.Rewrite(FUSING))  # which has no groups


def test_groups_follow_their_parameters(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, grouped(model_of(Apart), ("gate.weight", "up.weight", "norm.bias")))
    for slow in (("gate_up.weight", "norm.bias"), ("norm.bias", "gate_up.weight")):
        target = grouped(model_of(Fused, 1), slow)
        checkpoint.load(tmp_path, target, rewrite=sw.Rewrite(FUSING))
        assert [group["settings"]["lr"] for group in target.settings()["optimizers"][0]["groups"]] == [0.1, 1e-4]
    with pytest.raises(CheckpointError, match="was several groups in the checkpoint"):
        checkpoint.load(tmp_path, grouped(model_of(Fused, 1), ("norm.bias",)), rewrite=sw.Rewrite(FUSING))


def test_a_parameter_that_a_rewrite_adds_keeps_its_value_and_its_state(tmp_path: Path) -> None:
    _, source = torch_state(Apart, 2)
    checkpoint.save(tmp_path, source)
    more = "\nq.weight, k.weight, v.weight -> _; _ -> qkv.weight"
    text = FUSING.replace("q.weight, k.weight, v.weight -> qkv.weight, fused_qkv", "#") + more
    model, target = torch_state(Fused, 1)
    before = {piece: tensor.clone() for piece, tensor in target.state().items()}
    report = checkpoint.load(tmp_path, target, rewrite=sw.Rewrite(text)).report
    assert report.added == ("qkv.weight",)
    assert {"q.weight", "k.weight", "v.weight"} <= set(report.dropped)
    expected = fused(wholes([source.state()]))
    for piece, tensor in target.state().items():
        kept = "qkv.weight" in piece.name
        assert same_tensor(tensor, before[piece] if kept else expected[piece.name].contiguous()), piece
    assert any(piece.name == "optimizer/qkv.weight/exp_avg" for piece in target.state())
    assert model.get_parameter("qkv.weight").shape == (16, 6)
