"""What a plain training program calls on the model and the optimizer of an engine: right, or refused with a way out."""

import copy
import io
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import MismatchError, ModelError, OptimizerError
from tests.engine.expected import adamw
from tests.engine.models import curve, curve_batch, curve_loss
from tests.engine.oracle import share_of

TP = sw.Tensor(rules={"0": "column", "2": "row"})
LAYOUTS = {
    "one": (sw.Plan(), 1),
    "stage 0": (sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=0)), 2),
    "stage 1": (sw.Plan(mesh=sw.Mesh(dp_shard=2), precision=sw.Precision(compute="bfloat16")), 2),
    "whole": (sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(partition="whole")), 2),
    "stage 2": (sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2)), 2),
    "stage 3": (sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)), 2),
    "tp": (sw.Plan(mesh=sw.Mesh(tp=2), tensor=TP), 2),
    "pp": (sw.Plan(mesh=sw.Mesh(pp=2)), 2),
}
WHOLE_MODEL = ("one", "stage 0", "stage 1", "whole", "stage 2")
WHOLE_STATE = ("one", "stage 0")


class Normed(nn.Sequential):
    """With buffers that are saved, in a module that has no parameters."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4), nn.BatchNorm1d(4, affine=False))


def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return output.float().square().mean()


def on(layout: str, check: Callable[[sw.Engine], object]) -> list[Any]:
    """What `check` gives on each rank, of an engine after one update."""
    plan, ranks = LAYOUTS[layout]

    def run(channel: sw.Channel) -> object:
        torch.manual_seed(0)
        engine = sw.parallelize(Normed(), plan, optimizer=adamw, loss=loss, channel=channel)
        engine.step({"input": torch.randn(4, 8)})
        return check(engine)

    return sw.simulate(ranks, run)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_steps_inside_of_engine_step_alone(layout: str) -> None:
    def check(engine: sw.Engine) -> None:
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)  # wraps `step`, to count
        engine.optimizer.zero_grad()
        scaler: Any = torch.amp.GradScaler("cpu")
        scaler.scale(torch.ones(()))
        for step in (
            engine.optimizer.step,
            lambda: engine.optimizer.step(lambda: 0.0),
            lambda: scaler.step(engine.optimizer),
        ):
            with pytest.raises(OptimizerError, match=r"outside of engine\.step.* Call engine\.step\(batch\)"):
                step()
        before = {piece: tensor.clone() for piece, tensor in engine.state().items() if piece.name.endswith("exp_avg")}
        engine.step({"input": torch.ones(4, 8)})
        scheduler.step()
        assert before
        assert not any(torch.equal(engine.state()[piece], tensor) for piece, tensor in before.items())
        assert scheduler.get_last_lr() == [pytest.approx(1e-3)]
        with pytest.raises(OptimizerError, match=r"outside of engine\.step"):
            engine.optimizer.step()

    on(layout, check)


def test_a_refused_scaler_leaves_no_scale_behind_by_which_the_next_update_would_be_divided() -> None:
    def trained(disturb: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = curve()
        fused = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        engine = sw.parallelize(model, sw.Plan(), optimizer=fused, loss=curve_loss, channel=alone())
        if disturb:
            scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
            scaler.scale(curve_loss(model(curve_batch(1, 6)["x"]), curve_batch(1, 6))).backward()
            with pytest.raises(OptimizerError):
                scaler.step(fused)
        engine.step(curve_batch(1, 6))
        return [each.detach().clone() for each in model.parameters()]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_of_a_model_is_whole_or_refused_with_what_saves_it(layout: str, tmp_path: Any) -> None:
    names = list(Normed().state_dict())
    whole = {name: tuple(tensor.shape) for name, tensor in Normed().state_dict().items()}

    def check(engine: sw.Engine) -> None:
        model = engine.model
        assert engine.names() == names
        assert list(model.state_dict(keep_vars=True)) == names  # the parameters as they are here
        assert sum(each.numel() for each in model.parameters())
        around = nn.Sequential(model)
        ways: list[Callable[[], object]] = [
            model.state_dict,
            around.state_dict,
            lambda: torch.save(model, io.BytesIO()),
            lambda: pickle.dumps(around),
            lambda: sw.checkpoint.TorchState(model),
            lambda: sw.checkpoint.TorchState(around).state(),
        ]
        if layout in WHOLE_MODEL:
            assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == whole
            for way in ways:
                way()
            copied = copy.deepcopy(model).state_dict()
            assert all(torch.equal(copied[name], tensor) for name, tensor in model.state_dict().items())
            return
        for way in ways:
            with pytest.raises(ModelError, match=r"in parts|parts of it") as caught:
                way()
            for name in ("sw.save(path, engine)", "sw.full(engine)", "export_hf"):
                assert name in str(caught.value)
        for held in (model, around):
            with pytest.raises(ModelError, match=r"copied in parts.* sw\.full\(engine\) gives whole tensors"):
                copy.deepcopy(held)

    on(layout, check)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_saved_of_an_optimizer_is_whole_or_refused_with_what_saves_it(layout: str) -> None:
    def check(engine: sw.Engine) -> None:
        optimizer = engine.optimizer
        if layout in WHOLE_STATE:
            state = optimizer.state_dict()
            shapes = [tuple(each["exp_avg"].shape) for each in state["state"].values()]
            assert shapes == [tuple(each.shape) for each in Normed().parameters()]
            optimizer.load_state_dict(state)
            engine.step({"input": torch.ones(4, 8)})
            return
        with pytest.raises(OptimizerError, match=r"part of the optimizer state.*sw\.save\(path, engine\)"):
            optimizer.state_dict()
        with pytest.raises(OptimizerError, match=r"sw\.load\(path, engine\).*TorchState\(model, optimizer\)"):
            optimizer.load_state_dict({"state": {}, "param_groups": []})

    on(layout, check)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_group_of_what_is_not_the_models_is_refused_on_all_ranks(layout: str) -> None:
    def check(engine: sw.Engine) -> str:
        if engine.channel.rank == 0:
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        with pytest.raises(OptimizerError, match="Give add_param_group parameters that the model has now") as caught:
            engine.step({"input": torch.ones(4, 8)})
        return str(caught.value)

    assert len(set(on(layout, check))) == 1


def test_whole_values_given_to_a_model_that_is_cut_are_refused_with_what_loads_them() -> None:
    def check(engine: sw.Engine) -> None:
        with pytest.raises(RuntimeError, match=r"'0\.weight' is cut over ranks \(mesh\.tp\); load.*sw\.load"):
            engine.model.load_state_dict(Normed().state_dict())

    on("tp", check)


@pytest.mark.parametrize("layout", [*WHOLE_MODEL, "pp"])
def test_whole_values_given_to_a_model_that_is_not_cut_are_the_engines(layout: str) -> None:
    torch.manual_seed(3)
    other = Normed()

    def check(engine: sw.Engine) -> dict[str, torch.Tensor]:
        engine.model.load_state_dict(other.state_dict())
        return {name: tensor.float() for name, tensor in sw.full(engine)}

    expected = {name: tensor.float() for name, tensor in other.state_dict().items()}
    if layout == "stage 1":  # which computes in bfloat16
        expected |= {name: tensor.bfloat16().float() for name, tensor in other.named_parameters()}
    for values in on(layout, check):
        assert values.keys() == expected.keys()
        assert all(torch.equal(values[name], tensor) for name, tensor in expected.items())


def test_an_engine_of_another_layout_refuses_what_that_one_has_to() -> None:
    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        engine = sw.parallelize(Normed(), LAYOUTS["tp"][0], optimizer=adamw, loss=loss, channel=channel)
        batch = {"input": torch.randn(4, 8)}
        engine.step(batch)
        for layout in ("stage 0", "pp", "stage 1", "tp"):
            if layout == "pp":  # is refused: the old engine goes on as it was
                with pytest.raises(sw.ShardwiseError):
                    sw.relayout(engine, sw.Plan(mesh=sw.Mesh(dp_shard=2), tensor=TP, clip_grad_norm=-1.0))
            engine = sw.relayout(engine, LAYOUTS[layout][0])
            engine.step(batch if layout in ("tp", "pp") else share_of(batch, channel.rank, 2))
            if layout in WHOLE_MODEL:
                engine.model.state_dict()
            else:
                with pytest.raises(ModelError, match="parts of it"):
                    engine.model.state_dict()
            if layout in WHOLE_STATE:
                engine.optimizer.state_dict()
            else:
                with pytest.raises(OptimizerError):
                    engine.optimizer.state_dict()
            with pytest.raises(OptimizerError, match=r"outside of engine\.step"):
                engine.optimizer.step()

    sw.simulate(2, run)


@pytest.mark.parametrize("layout", ["stage 0", "stage 1", "whole", "stage 2"])
def test_data_ranks_that_were_written_to_otherwise_are_refused_and_alike_ones_go_on(layout: str) -> None:
    plan, ranks = LAYOUTS[layout]

    def run(channel: sw.Channel) -> str:
        torch.manual_seed(0)
        engine = sw.parallelize(Normed(), plan, optimizer=adamw, loss=loss, channel=channel)
        own = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        batch = {"input": torch.randn(4, 8)}
        dtype = next(engine.model.parameters()).dtype
        for seed in (7, channel.rank):  # alike, and each rank by its own gradient
            torch.manual_seed(seed)
            engine.model(torch.randn(4, 8).to(dtype)).float().square().mean().backward()
            own.step()
            own.zero_grad()
            if seed == 7:
                engine.step(batch)
        with pytest.raises(
            MismatchError, match=r"'0\.bias' was written to after parallelize. .* rank 0 and rank 1 now differ"
        ):
            engine.step(batch)
        if channel.rank:
            engine.model.load_state_dict(Normed().state_dict())
        with pytest.raises(MismatchError) as caught:
            engine.evaluate(batch)
        torch.manual_seed(5)
        engine.model.load_state_dict(Normed().state_dict())
        engine.step(batch)
        if channel.rank:  # the same values again: nothing differs
            engine.model.load_state_dict(engine.model.state_dict())
        engine.step(batch)
        return str(caught.value)

    assert len(set(sw.simulate(ranks, run))) == 1


def test_a_write_is_compared_although_the_state_was_asked_for_in_between() -> None:
    def run(channel: sw.Channel) -> None:
        torch.manual_seed(0)
        engine = sw.parallelize(Normed(), LAYOUTS["stage 0"][0], optimizer=adamw, loss=loss, channel=channel)
        torch.manual_seed(channel.rank)
        engine.model.load_state_dict(Normed().state_dict())
        engine.state()
        with torch.no_grad():
            list(engine.model.parameters())[-1].zero_()  # the same on both ranks
        with pytest.raises(MismatchError, match=r"was written to after parallelize. .* rank 0 and rank 1 now differ"):
            engine.step({"input": torch.ones(4, 8)})

    sw.simulate(2, run)
