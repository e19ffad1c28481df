"""Engines that load and save through a rewrite: parameters, masters, optimizer state, ties and groups, exactly."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import AsyncSaver, TorchState
from shardwise.checkpoint.arrangement import FileLayout
from shardwise.comm import Channel
from shardwise.errors import CheckpointError
from tests.checkpoint.fused_models import (
    FUSING,
    LAYOUTS,
    Apart,
    Fused,
    Whole,
    adamw,
    engine_of,
    fused,
    model_of,
    plan_of,
    train,
    wholes,
)
from tests.checkpoint.small_states import same_tensor
from tests.checkpoint.test_matrix import masters_of
from tests.engine.models import word_batch, word_loss

Saved = tuple[Path, Whole]


def state_of(engine: sw.Engine) -> dict[sw.Piece, torch.Tensor]:
    return {piece: tensor.clone() for piece, tensor in engine.state().items()}


def check_equal(got: Whole, expected: Whole) -> None:
    """As any precision has it: masters instead of working copies."""
    got, expected = masters_of(got), masters_of(expected)
    assert got.keys() == expected.keys()
    for name, tensor in got.items():
        assert same_tensor(tensor, expected[name].contiguous()), name


def save_apart(path: Path, layout: str, *, rewrite: sw.Rewrite | None = None, files: FileLayout = "pieces") -> Whole:
    """A save of an engine that has made two updates with a learning rate of its own; its whole state."""
    plan = plan_of(Apart, **LAYOUTS[layout])

    def run(channel: Channel) -> dict[sw.Piece, torch.Tensor]:
        engine = engine_of(Apart, plan, channel, lr=0.05)
        train(engine, channel, range(2))
        sw.save(path, engine, extra={"step": 2}, rewrite=rewrite, layout=files, channel=channel)
        return state_of(engine)

    return wholes(sw.simulate(plan.mesh.size, run))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Saved]:
    """One save of `Apart` per layout."""
    paths = {name: tmp_path_factory.mktemp("apart") for name in LAYOUTS}
    return {name: (path, save_apart(path, name)) for name, path in paths.items()}


@pytest.fixture(scope="module")
def saved_fused(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Saved]:
    """The same under the names of `Fused`."""
    paths = {name: tmp_path_factory.mktemp("fused") for name in LAYOUTS}
    layouts: dict[str, FileLayout] = {name: "whole" if at % 2 else "pieces" for at, name in enumerate(LAYOUTS)}
    return {
        name: (path, save_apart(path, name, rewrite=sw.Rewrite(FUSING), files=layouts[name]))
        for name, path in paths.items()
    }


def load_engine(
    path: Path,
    kind: type[torch.nn.Module],
    layout: str,
    rewrite: sw.Rewrite | None,
    *,
    updates: int = 0,
    next_updates: int = 0,
) -> tuple[Whole, list[float], list[float]]:
    """The state of an engine that has loaded, the learning rates of its groups, and the losses of its next updates."""
    plan = plan_of(kind, **LAYOUTS[layout])

    def run(channel: Channel) -> tuple[dict[sw.Piece, torch.Tensor], list[float], list[float]]:
        engine = engine_of(kind, plan, channel, seed=5)
        train(engine, channel, range(updates))
        assert sw.load(path, engine, rewrite=rewrite, channel=channel) == {"step": 2}
        rates = [group["settings"]["lr"] for group in engine.settings()["optimizers"][0]["groups"]]
        return state_of(engine), rates, train(engine, channel, range(2, 2 + next_updates))

    results = sw.simulate(plan.mesh.size, run)
    return wholes(state for state, _, _ in results), results[0][1], results[0][2]


NAMES = list(LAYOUTS)
PAIRS = [(source, NAMES[at - behind]) for at, source in enumerate(NAMES) for behind in (0, 1, 3)]
"""Each layout into itself, and into two others: the other direction of each of these pairs is none of them."""


@pytest.mark.parametrize(("source", "target"), PAIRS)
def test_what_was_saved_apart_loads_fused_from_any_layout_into_any_other(
    source: str, target: str, saved: Mapping[str, Saved]
) -> None:
    path, whole = saved[source]
    got, rates, losses = load_engine(path, Fused, target, sw.Rewrite(FUSING), next_updates=2)
    check_equal(got, fused(whole))
    assert rates == [0.05, 3e-3]
    _, _, plain = load_engine(path, Apart, target, None, next_updates=2)
    assert losses == pytest.approx(plain, rel=2e-2 if "bf16" in target else 1e-5)


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_save_through_a_rewrite_is_what_plain_torch_makes_of_the_state(
    source: str, saved_fused: Mapping[str, Saved]
) -> None:
    path, whole = saved_fused[source]
    catalogue = checkpoint.open(path)
    expected = fused(whole)
    assert set(catalogue.tensors) == set(expected)
    for name, tensor in expected.items():
        assert same_tensor(catalogue.read(name), tensor.contiguous()), name
    assert dict(catalogue.contents.aliases) == {"logits.weight": "words.weight"}
    assert checkpoint.verify(path).good


@pytest.mark.parametrize("source", LAYOUTS)
def test_a_save_through_a_rewrite_loads_plainly_and_back_through_the_inverse(
    source: str, saved_fused: Mapping[str, Saved]
) -> None:
    path, whole = saved_fused[source]
    for target, updates in (("whole-bf16", 0), ("stages", 1)):  # without and with optimizer state to replace
        got, rates, _ = load_engine(path, Fused, target, None, updates=updates)
        check_equal(got, fused(whole))
        assert rates == [0.05, 3e-3]
        got, rates, _ = load_engine(path, Apart, target, sw.Rewrite(FUSING).inverse(), updates=updates)
        check_equal(got, whole)
        assert rates == [0.05, 3e-3]


def torch_state(kind: type[torch.nn.Module], updates: int, lr: float = 1e-2) -> tuple[torch.nn.Module, TorchState]:
    model = model_of(kind)
    optimizer = adamw(list(model.parameters()), lr)
    for update in range(updates):
        batch = word_batch(update, 8)
        word_loss(model(batch["words"]), batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, TorchState(model, optimizer)


def test_a_plain_model_and_its_optimizer_load_what_an_engine_saved(saved: Mapping[str, Saved]) -> None:
    path, whole = saved["three-bf16"]
    model, state = torch_state(Fused, 0)
    report = checkpoint.load(path, state, rewrite=sw.Rewrite(FUSING)).report
    assert report.missing + report.unexpected == ()
    check_equal(wholes([state.state()]), fused(whole))
    plain = model_of(Fused)
    checkpoint.load(path, plain.state_dict(), rewrite=sw.Rewrite(FUSING))
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in plain.state_dict().items())


def test_the_save_of_a_plain_model_is_fused_too_and_ranks_are_replicas(tmp_path: Path) -> None:
    _, state = torch_state(Apart, 2)
    sw.simulate(2, lambda channel: sw.save(tmp_path, state, rewrite=sw.Rewrite(FUSING), channel=channel))
    catalogue = checkpoint.open(tmp_path)
    expected = fused(wholes([state.state()]))
    assert {name: catalogue.read(name).shape for name in expected} == {name: t.shape for name, t in expected.items()}
    assert all(same_tensor(catalogue.read(name), tensor.contiguous()) for name, tensor in expected.items())
    other, fresh = torch_state(Fused, 0, lr=1.0)
    checkpoint.load(tmp_path, fresh)
    assert fresh.settings()["optimizers"][0]["groups"][0]["settings"]["lr"] == 1e-2
    assert other.get_parameter("qkv.weight").shape == (16, 6)


@pytest.mark.parametrize("files", ["pieces", "whole"])
def test_saves_in_the_background_go_through_a_rewrite(files: FileLayout, tmp_path: Path) -> None:
    plan = plan_of(Apart, dp_shard=2)

    def run(channel: Channel) -> list[dict[sw.Piece, torch.Tensor]]:
        engine = engine_of(Apart, plan, channel)
        states = []
        with AsyncSaver(tmp_path, layout=files, rewrite=sw.Rewrite(FUSING), channel=channel) as saver:
            for step in range(3):
                train(engine, channel, [step])
                saver.save(engine, step=step)
                states.append(state_of(engine))
        return states

    by_rank = sw.simulate(2, run)
    for step, states in enumerate(zip(*by_rank, strict=True)):
        catalogue = checkpoint.open(tmp_path, step=step)
        for name, tensor in fused(wholes(states)).items():
            assert same_tensor(catalogue.read(name), tensor.contiguous()), (step, name)


def test_the_record_of_a_save_has_the_rewrite_and_the_metas_of_its_sources(saved_fused: Mapping[str, Saved]) -> None:
    settings = checkpoint.open(saved_fused["slices"][0]).contents.settings
    assert sw.Rewrite(settings["rewrite"]["text"]) == sw.Rewrite(FUSING)
    assert settings["rewrite"]["sources"]["q.weight"] == [[8, 6], "float32"]
    assert settings["rewrite"]["sources"]["scale"] == [[6], "float32"]
    assert not any(name.startswith("optimizer/") for name in settings["rewrite"]["sources"])


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
