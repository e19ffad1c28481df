"""A plain model with its torch optimizers is a state by names, which an engine takes over, and gives back."""

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import shardwise as sw
from shardwise import checkpoint
from shardwise.checkpoint import TorchState, export_hf
from shardwise.errors import CheckpointError, OptimizerError
from tests.checkpoint.cut_tensors import tensors_of
from tests.checkpoint.layouts import masters_of
from tests.checkpoint.small_states import same
from tests.engine.checkpoints import (
    OPTIMIZERS,
    SLICES,
    WHOLE,
    Mixed,
    engine_of,
    plan_of,
    train,
)
from tests.oracle.batches import points, square_loss
from tests.oracle.one_process import train_in_one_process
from tests.oracle.program import Optimizers, adamw, seeded


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Every tensor here is tiny."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def model_and_optimizer(optimizer: Optimizers, *, steps: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = seeded(Mixed)()
    trainer = optimizer(list(model.parameters()))
    train_in_one_process(model, trainer, [points(at, 24) for at in range(steps)], loss=square_loss)
    return model, trainer


def differences(a: Path, b: Path) -> list[str]:
    """Of tensors and ties and of what optimizers are set to."""
    found = checkpoint.diff(a, b)
    settings = [each.place for each in found.extra if each.place.startswith(("settings.optimizers", "settings.ties"))]
    return [each.name for each in found.tensors] + settings


@pytest.mark.parametrize(("sharding", "compute"), [(SLICES, None), (WHOLE, "bfloat16")])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_engines_and_plain_models_take_each_others_state(
    optimizer: str, sharding: sw.Sharding, compute: str | None, tmp_path: Path
) -> None:
    plan, make = plan_of(2, sharding, compute=compute), OPTIMIZERS[optimizer]

    def given(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan, make)
        train(engine, channel, range(2))
        sw.save(tmp_path / "engine", engine, channel=channel)

    def taken(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan, make, seed=1)
        sw.load(tmp_path / "plain", engine, channel=channel)
        sw.save(tmp_path / "again", engine, channel=channel)
        train(engine, channel, range(2, 3))

    sw.simulate(2, given)
    model, trainer = model_and_optimizer(make)
    for each in model.state_dict().values():
        each.fill_(3)  # so that nothing is right because it was before
    sw.load(tmp_path / "engine", TorchState(model, trainer))
    sw.save(tmp_path / "plain", TorchState(model, trainer))
    sw.simulate(2, taken)
    assert differences(tmp_path / "engine", tmp_path / "again") == []
    engine, plain = (masters_of(tensors_of(tmp_path / name)) for name in ("engine", "plain"))
    del plain["nothing"]  # has no elements, and no master of it is anywhere
    engine.pop("nothing", None)
    assert same(plain, engine)


@pytest.mark.parametrize("how", ["compiled inside", "compiled outside of data parallelism"])
def test_wrappers_leave_no_trace_in_names(how: str, tmp_path: Path) -> None:
    plain, trainer = model_and_optimizer(adamw, steps=1)
    sw.save(tmp_path / "plain", TorchState(plain, trainer))
    model: Any = copy.deepcopy(plain)
    if how == "compiled inside":
        model.first = torch.compile(model.first, backend="eager")
    else:
        model = torch.compile(nn.DataParallel(model), backend="eager")
    state = TorchState(model, adamw(list(model.parameters())))
    sw.load(tmp_path / "plain", state)
    sw.save(tmp_path / "wrapped", state)
    assert differences(tmp_path / "plain", tmp_path / "wrapped") == []


class NamedLikeWrappers(nn.Module):
    """Modules whose own names are those of wrappers."""

    def __init__(self) -> None:
        super().__init__()
        self.module = nn.Linear(2, 2, bias=False)
        self._orig_mod = nn.Linear(2, 2, bias=False)


def test_names_that_only_look_like_wrappers_stay() -> None:
    assert {piece.name for piece in TorchState(NamedLikeWrappers()).state()} == {"module.weight", "_orig_mod.weight"}


def test_several_optimizers_keep_their_own(tmp_path: Path) -> None:
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
    sw.save(tmp_path / "a", TorchState(model, first, second))
    fresh = trainers(0.5)
    sw.load(tmp_path / "a", TorchState(model, *fresh))
    assert [each.param_groups[0]["lr"] for each in fresh] == [0.25, 0.25]
    sw.save(tmp_path / "b", TorchState(model, *fresh))
    assert differences(tmp_path / "a", tmp_path / "b") == []


def test_state_of_a_parameter_frozen_since_is_left_out(tmp_path: Path) -> None:
    model, trainer = model_and_optimizer(adamw, steps=1)
    model.get_parameter("out.bias").requires_grad_(False)
    sw.save(tmp_path, TorchState(model, trainer))
    assert not any(name.startswith("optimizer/out.bias/") for name in checkpoint.open(tmp_path).tensors)
    sw.load(tmp_path, TorchState(model, trainer))


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


# Wrappers around modules: the names differ by them only


Wrap = Callable[[nn.Module], nn.Module]


def blocks(wrap: Wrap) -> nn.Sequential:
    """The last block has the matrix of the first."""
    torch.manual_seed(0)
    made = [nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.BatchNorm1d(4)) for _ in range(3)]
    made[2][0].weight = made[0][0].weight
    return nn.Sequential(*map(wrap, made), nn.Linear(4, 1))


def plain(module: nn.Module) -> nn.Module:
    return module


def recomputed(module: nn.Module) -> nn.Module:
    return checkpoint_wrapper(module)


class Kept(nn.Module):
    """A wrapper whose child has the name that torch's compiler gives."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._orig_mod = module

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._orig_mod(x)
        return out


def run(wrap: Wrap, steps: range, *, load: Path | None = None, save: Path | None = None) -> list[float]:
    """Losses of an engine."""
    engine = sw.parallelize(blocks(wrap), sw.Plan(), optimizer=adamw, loss=square_loss)
    if load is not None:
        sw.load(load, engine)
    batches = [points(step, 8) for step in steps]
    losses = [engine.step({"input": batch["x"], "y": batch["y"]}).loss for batch in batches]
    if save is not None:
        sw.save(save, engine)
    return losses


@pytest.mark.parametrize(("one", "other"), [(plain, recomputed), (recomputed, plain), (Kept, recomputed)])
def test_a_run_goes_on_with_other_wrappers(tmp_path: Path, one: Wrap, other: Wrap) -> None:
    """Parameters, optimizer state, buffers and ties."""
    expected = run(one, range(4))
    run(one, range(2), save=tmp_path)
    assert run(other, range(2, 4), load=tmp_path) == expected[2:]


def test_two_stored_tensors_of_one_name_do_not_silently_become_one(tmp_path: Path) -> None:
    sw.save(str(tmp_path), {"a.w": torch.zeros(2), "a._orig_mod.w": torch.ones(2)})
    model = nn.ModuleDict({"a": nn.Module()})
    model["a"].w = nn.Parameter(torch.zeros(2))
    with pytest.raises(CheckpointError, match=r"a\._orig_mod\.w"):
        sw.load(str(tmp_path), TorchState(model))


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
def test_files_for_other_programs_have_the_names_of_the_plain_model(tmp_path: Path, dtype: str | None) -> None:
    run(Kept, range(1), save=tmp_path / "save")
    report = export_hf(str(tmp_path / "save"), str(tmp_path / "hf"), dtype=dtype)
    assert report.certificate is not None
    model, kept = blocks(plain), blocks(Kept)
    sw.load(str(tmp_path / "save"), TorchState(kept))
    files = load_file(tmp_path / "hf" / "model.safetensors")
    assert set(files) | set(report.aliases) == set(model.state_dict())
    for (name, _), values in zip(model.named_parameters(), kept.parameters(), strict=True):
        assert torch.equal(files[name], values.detach().to(files[name].dtype))
    # A rewrite says names itself, and a save keeps them.
    named = sw.Rewrite(["'3.weight' -> 'top.weight'"])
    export_hf(str(tmp_path / "save"), str(tmp_path / "named"), named)
    assert "0._orig_mod.0.bias" in load_file(tmp_path / "named" / "model.safetensors")


def test_names_of_a_mapping_are_its_own_and_two_of_one_plain_name_stay(tmp_path: Path) -> None:
    given = {"a._orig_mod.w": torch.zeros(2), "b._orig_mod.w": torch.ones(2), "b.w": torch.ones(1)}
    assert set(dict(sw.full(given))) == set(given)
    sw.save(str(tmp_path / "save"), given)
    export_hf(str(tmp_path / "save"), str(tmp_path / "hf"))
    assert set(load_file(tmp_path / "hf" / "model.safetensors")) == {"a.w", "b._orig_mod.w", "b.w"}
