"""A plain model with its torch optimizers is a state by names, which an engine takes over, and gives back."""

import copy
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.states import Restorable
from shardwise.checkpoint.torch_state import TorchRestoration, TorchState
from shardwise.errors import CheckpointError, OptimizerError
from tests.engine.checkpoints import (
    OPTIMIZERS,
    SLICES,
    WHOLE,
    Mixed,
    Saved,
    after,
    assert_same_bits,
    engine_of,
    load,
    plan_of,
    saved,
    snapshot,
    train,
)
from tests.oracle.batches import points, square_loss
from tests.oracle.program import Optimizers, adamw


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Every tensor here is tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def saved_of(state: TorchState) -> Saved:
    tensors = {piece.name: tensor.clone() for piece, tensor in state.state().items()}
    return Saved(tensors=tensors, settings=json.loads(json.dumps(state.settings(), allow_nan=False)))


def take(state: TorchState, checkpoint: Saved, *, findings: Iterable[str] = ()) -> TorchRestoration:
    """The plain loader: by name, a master before its working copy."""
    restoration = state.restore(checkpoint.stored(), checkpoint.settings)
    assert list(restoration.findings) == list(findings)
    for piece, target in restoration.wanted.items():
        master = f"optimizer/{piece.name}/master"
        source = checkpoint.tensors[master if master in checkpoint.tensors else piece.name]
        assert source.dtype == target.dtype
        target.copy_(source)
    restoration.finish()
    return restoration


def model_and_optimizer(optimizer: Optimizers, *, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Mixed()
    return model, optimizer(list(model.parameters()))


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for at in numbers:
        optimizer.zero_grad()
        batch = points(at, 24)
        loss = square_loss(model(batch["x"]), batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def without_masters(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Masters in the place of working copies; nobody owns what has no elements."""
    named = {name: value for name, value in tensors.items() if not name.endswith("/master")}
    named |= {name.split("/")[1]: value for name, value in tensors.items() if name.endswith("/master")}
    return {name: value for name, value in named.items() if "nothing" not in name.split("/")}


@pytest.mark.parametrize(("sharding", "compute"), [(SLICES, None), (WHOLE, "bfloat16")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_engines_and_plain_models_take_each_others_state(
    optimizer: str, sharding: sw.Sharding, compute: str | None
) -> None:
    plan = plan_of(2, sharding, compute=compute)
    checkpoint = after(plan, OPTIMIZERS[optimizer], 2)
    model, trainer = model_and_optimizer(OPTIMIZERS[optimizer], seed=1)
    take(TorchState(model, trainer), checkpoint)
    plain = saved_of(TorchState(model, trainer))

    def run(channel: sw.Channel) -> Any:
        engine = engine_of(channel, plan, OPTIMIZERS[optimizer], seed=1)
        load(engine, plain)
        held = snapshot(engine)
        train(engine, channel, range(2, 3))
        return held

    again = saved(sw.simulate(2, run))
    assert_same_bits(without_masters(plain.tensors), without_masters(checkpoint.tensors))
    assert_same_bits(again.tensors, {name: checkpoint.tensors[name] for name in again.tensors})
    for key in ("optimizers", "ties"):
        assert plain.settings[key] == checkpoint.settings[key]
    assert again.settings["optimizers"] == checkpoint.settings["optimizers"]


def test_the_state_is_views_by_the_names_of_the_state_dict() -> None:
    model, trainer = model_and_optimizer(adamw)
    steps(model, trainer, range(1))
    restorable: Restorable = TorchState(model, trainer)
    state = {piece.name: tensor for piece, tensor in restorable.state().items()}
    weights = {name: value for name, value in model.state_dict().items() if name != "again.weight"}
    assert {name for name in state if not name.startswith("optimizer/")} == weights.keys()
    assert all(state[name].data_ptr() == value.data_ptr() for name, value in weights.items())
    assert restorable.settings()["ties"] == {"again.weight": "first.weight"}
    parameters = dict(model.named_parameters())
    for name, value in state.items():
        if name.startswith("optimizer/"):
            _, parameter, key = name.split("/")
            assert value.data_ptr() == trainer.state[parameters[parameter]][key].data_ptr()


def wrapped(model: nn.Module, how: str) -> nn.Module:
    if how == "compiled":
        return torch.compile(model, backend="eager")  # type: ignore[return-value]
    if how == "compiled inside":
        model.first = torch.compile(model.get_submodule("first"), backend="eager")  # type: ignore[assignment]
        return model
    if how == "data parallel":
        return nn.DataParallel(model)
    return torch.compile(nn.DataParallel(model), backend="eager")  # type: ignore[return-value]


@pytest.mark.parametrize("how", ["compiled", "compiled inside", "data parallel", "both"])
def test_wrappers_leave_no_trace_in_names(how: str) -> None:
    plain, trainer = model_and_optimizer(adamw)
    steps(plain, trainer, range(1))
    model = wrapped(copy.deepcopy(plain), how)
    its_trainer = adamw(list(model.parameters()))
    checkpoint = saved_of(TorchState(plain, trainer))
    take(TorchState(model, its_trainer), checkpoint)
    again = saved_of(TorchState(model, its_trainer))
    assert_same_bits(again.tensors, checkpoint.tensors)
    assert again.settings == checkpoint.settings


class NamedLikeWrappers(nn.Module):
    """Modules whose own names are those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self._orig_mod = nn.Linear(2, 2, bias=False)


def test_names_that_only_look_like_wrappers_stay() -> None:
    assert {piece.name for piece in TorchState(NamedLikeWrappers()).state()} == {"module.weight", "_orig_mod.weight"}


def test_several_optimizers_keep_their_own() -> None:
    model, _ = model_and_optimizer(adamw)

    def trainers(rate: float) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
        trained = [each for each in model.parameters() if each.requires_grad]
        matrices, others = ([each for each in trained if (each.ndim > 1) == flag] for flag in (True, False))
        return torch.optim.SGD(matrices, lr=rate, momentum=0.5), torch.optim.AdamW(others, lr=rate)

    first, second = trainers(0.25)
    batch = points(0, 8)
    square_loss(model(batch["x"]), batch).backward()
    first.step()
    second.step()
    checkpoint = saved_of(TorchState(model, first, second))
    fresh = trainers(0.5)
    take(TorchState(model, *fresh), checkpoint)
    assert [each.param_groups[0]["lr"] for each in fresh] == [0.25, 0.25]
    assert_same_bits(saved_of(TorchState(model, *fresh)).tensors, checkpoint.tensors)


def test_state_of_a_parameter_frozen_since_is_left_out() -> None:
    model, trainer = model_and_optimizer(adamw)
    steps(model, trainer, range(1))
    model.get_parameter("out.bias").requires_grad_(False)
    checkpoint = saved_of(TorchState(model, trainer))
    assert not any(name.startswith("optimizer/out.bias/") for name in checkpoint.tensors)
    take(TorchState(model, trainer), checkpoint)


def test_optimizers_that_do_not_fit_the_model_are_refused() -> None:
    model, trainer = model_and_optimizer(adamw)
    with pytest.raises(OptimizerError, match=r"1 parameters of AdamW are not the model's, the first of shape \[3\]"):
        TorchState(model, adamw([nn.Parameter(torch.zeros(3))]))
    with pytest.raises(OptimizerError, match=r"'again\.bias' is trained twice, by several optimizers"):
        TorchState(model, trainer, adamw(list(model.parameters())))


class WithExtraState(nn.Linear):
    def get_extra_state(self) -> Mapping[str, int]:
        return {"calls": 3}

    def set_extra_state(self, state: Any) -> None:
        pass


class WithMadeUpState(nn.Linear):
    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[prefix + "doubled"] = self.weight * 2


@pytest.mark.parametrize(("kind", "name"), [(WithExtraState, "inner._extra_state"), (WithMadeUpState, "inner.doubled")])
def test_entries_that_a_load_could_not_write_are_refused_by_name(kind: type[nn.Linear], name: str) -> None:
    model = nn.ModuleDict({"inner": kind(2, 2)})
    with pytest.raises(CheckpointError, match=f"'{name}' in model.state_dict.. is no parameter and no buffer"):
        TorchState(model)


@pytest.mark.parametrize("engine", [False, True])
def test_one_saved_group_has_no_settings_for_several(tmp_path: Path, engine: bool) -> None:
    def groups(model: nn.Module, split: bool) -> torch.optim.Optimizer:
        weight, bias = model.parameters()
        given: list[Any] = [{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}] if split else [weight, bias]
        return torch.optim.AdamW(given, lr=0.5 if split else 0.1, weight_decay=0.2)

    model = nn.Linear(2, 2)
    sw.save(tmp_path, TorchState(model, groups(model, split=False)))
    again = nn.Linear(2, 2)
    optimizer = groups(again, split=True)
    state: Any = TorchState(again, optimizer)
    if engine:
        state = sw.parallelize(again, sw.Plan(), optimizer=optimizer, loss=lambda output, _: output.sum())
        [optimizer] = state.optimizers
    with pytest.raises(CheckpointError, match=r"were one group.* weight_decay is 0.2 and 0.0: make one group"):
        sw.load(tmp_path, state)
    report = sw.load(tmp_path, state, strict=False).report
    assert any("were one group" in each for each in report.unexpected)
    # What the checkpoint says for both is taken over; what differs here stays.
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.2, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.1]


class Tabled(torch.optim.Optimizer):
    """Has a table for each parameter, or one for all, as optimizers with packed moments have."""

    def __init__(self, parameters: Any, *, shared: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.tables = [torch.zeros(3) for _ in range(2)] if not shared else [torch.zeros(3)] * 2

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for at, each in enumerate(each for group in self.param_groups for each in group["params"]):
            self.state[each] = {"table": self.tables[at], "moment": each.clone()}


@pytest.mark.parametrize("engine", [False, True])
def test_a_tensor_that_the_state_of_several_parameters_shares_takes_what_each_of_them_had(
    tmp_path: Path, engine: bool
) -> None:
    def updated(shared: bool) -> tuple[Any, Tabled]:
        model = nn.Linear(2, 2)
        optimizer = Tabled(model.parameters(), shared=shared)
        if engine:
            made = sw.parallelize(model, sw.Plan(), optimizer=optimizer, loss=lambda output, _: output.sum())
            made.step({"input": torch.ones(1, 2)})
            return made, optimizer
        optimizer.step()
        return TorchState(model, optimizer), optimizer

    saved, optimizer = updated(shared=False)
    for number, each in enumerate(optimizer.state.values()):
        each["table"].fill_(number)
    sw.save(tmp_path, saved)
    target, optimizer = updated(shared=True)
    sw.load(tmp_path, target)
    assert [each["table"].tolist() for each in optimizer.state.values()] == [[0.0] * 3, [1.0] * 3]
