"""What a plain training program calls on the model and the optimizer of an engine: right, or refused with a way out."""

import copy
import io
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import MismatchError, ModelError, OptimizerError
from tests.covering import pairwise
from tests.engine.loops import sgd, share
from tests.engine.refusals import same_error_everywhere
from tests.engine.tower import BATCH, HAVE_ALL, PLANS, engine_on, masters, on_ranks, plain, tower, train, trained
from tests.oracle.program import adamw, seeded
from tests.oracle.words import curve, curve_batch, curve_loss

WHOLE_MODEL = [*HAVE_ALL, "stage 1", "stage 2", "whole", "bf16", "merged"]
Log = list[float]
Act = Callable[[list[Any], nn.Module, Log], object]
"""Code of the user around a step: it has the optimizer's parameters, the model and a log."""


def by_numpy(parameters: list[Any], *_: Any) -> None:
    norm = sum(float((each.grad.numpy() ** 2).sum()) for each in parameters) ** 0.5
    for each in parameters:
        each.grad.mul_(min(1.0, 0.1 / norm))


def limited(parameters: list[Any], *_: Any) -> None:
    nn.utils.clip_grad_value_(parameters, 0.01)
    for each in parameters:
        each.grad.mul_(torch.where(each.grad > 0, 2.0, 1.0))


@torch.no_grad()
def bounded(parameters: Any, *_: Any) -> None:
    for each in parameters:
        each.clamp_(-0.1, 0.1)


def every(act: Callable[[Any], object], *, of_model: bool = False) -> Act:
    return lambda parameters, model, _: [act(each) for each in (model.parameters() if of_model else parameters)]


HOOKS: dict[str, tuple[str, Act]] = {
    "counts": ("pre", lambda parameters, _, log: log.append(1)),
    "clips": ("pre", lambda parameters, *_: nn.utils.clip_grad_norm_(parameters, 0.1)),
    "clips values": ("pre", limited),
    "notes the norm": ("pre", lambda ps, _, log: log.append(sum(float(each.grad.norm()) ** 2 for each in ps))),
    "clips by numpy": ("pre", by_numpy),
    "notes values": (
        "pre",
        lambda ps, _, log: log.append(sum(abs(value) for each in ps for value in each.detach().view(-1).tolist())),
    ),
    "divides by norms": ("pre", every(lambda each: each.grad.div_(each.grad.norm()))),
    "leaves out rows": ("pre", every(lambda each: each.dim() < 2 or each.grad.__setitem__(slice(2), 0))),
    "centralises": ("pre", every(lambda each: each.dim() < 2 or each.grad.sub_(each.grad.mean(1, keepdim=True)))),
    "bounds": ("post", bounded),
    "clips the model": ("pre", lambda _, model, __: nn.utils.clip_grad_norm_(model.parameters(), 0.1)),
    "drops the model's": ("pre", every(lambda each: each.grad.zero_(), of_model=True)),
    "replaces the model's": ("pre", every(lambda each: setattr(each, "grad", each.grad * 0), of_model=True)),
    "bounds the model": ("post", lambda _, model, __: bounded(model.parameters())),
    "notes the model": (
        "post",
        lambda _, model, log: log.append(sum(float(each.detach().sum()) for each in model.parameters())),
    ),
    "wraps step": ("around", lambda parameters, *_: nn.utils.clip_grad_norm_(parameters, 0.1)),
}
NEVER_REFUSED = {"counts", "clips values", "bounds"}
"""What goes element by element."""
ALWAYS_REFUSED = {"clips", "clips by numpy", "notes values", "notes the norm", "wraps step", "notes the model"}
"""What needs all, where no rank has it."""


def put(hook: str, optimizer: torch.optim.Optimizer, model: nn.Module, log: Log) -> torch.optim.Optimizer:
    when, act = HOOKS[hook]

    def hooked(*_: Any) -> None:
        act(masters(optimizer), model, log)

    if when == "pre":
        optimizer.register_step_pre_hook(hooked)
    elif when == "post":
        optimizer.register_step_post_hook(hooked)
    else:
        step: Any = optimizer.step

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            hooked()
            return step(*args, **kwargs)

        optimizer.step = wrapped  # type: ignore[method-assign]
    return optimizer


@pytest.mark.parametrize(("hook", "late", "name"), pairwise(list(HOOKS), [False, True], list(PLANS)))
def test_code_around_a_step_sees_what_it_sees_in_one_process(hook: str, late: bool, name: str) -> None:
    def run(channel: sw.Channel) -> tuple[list[torch.Tensor], Log]:
        model, log = tower(), list[float]()

        def sgd(parameters: Any) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=1.0)
            return optimizer if late else put(hook, optimizer, model, log)

        engine = engine_on(channel, name, sgd, model=model)
        assert log == [], "the trial of parallelize leaves no trace"
        if late:
            put(hook, engine.optimizer, model, log)
        return trained(engine), log

    noted, model = list[float](), tower()
    plain(lambda given: put(hook, torch.optim.SGD(given, lr=1.0), model, noted), model=model)
    said, results = "", list[Any]()
    try:
        results = on_ranks(name, run)
    except (OptimizerError, ModelError) as error:
        said = str(error)
    if said:
        assert hook not in NEVER_REFUSED
        assert name != "one" or hook == "replaces the model's"
        assert "optimizer.param_groups" in said or "engine" in said
        return
    values = results[0][0]
    assert hook not in ALWAYS_REFUSED or name in HAVE_ALL
    bound = 5e-2 if "bf16" in name else 1e-5
    assert all(torch.allclose(one, other, atol=bound) for one, other in zip(values, model.parameters(), strict=True))
    assert all(log == pytest.approx(noted, rel=bound) for _, log in results)


@pytest.mark.parametrize("name", PLANS)
def test_an_optimizer_steps_inside_of_engine_step_alone(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, name, adamw)
        train(engine, [BATCH])
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
        train(engine, [BATCH])
        scheduler.step()
        assert before
        assert not any(torch.equal(engine.state()[piece], tensor) for piece, tensor in before.items())
        assert scheduler.get_last_lr() == [pytest.approx(1e-3)]
        with pytest.raises(OptimizerError, match=r"outside of engine\.step"):
            engine.optimizer.step()

    on_ranks(name, run)


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


def normed() -> nn.Sequential:
    """With buffers that are saved, in a module that has no parameters."""
    return seeded(lambda: nn.Sequential(*tower(), nn.BatchNorm1d(4, affine=False)))()


LAYOUTS = [each for each in PLANS if each != "merged"]
"""A norm of batches wants several rows in each microbatch."""


def after_an_update(channel: sw.Channel, name: str) -> sw.Engine:
    """Of two ranks, the engine comes out of a relayout; what it is under does not show where it came from."""
    comes_from = {"tp": "stage 1", "stage 0": "stage 3", "stage 2": "tp", "whole": "pp", "pp": "stage 0"}
    engine = engine_on(channel, comes_from.get(name, name), adamw, model=normed())
    train(engine, [BATCH])
    return sw.relayout(engine, PLANS[name]) if name in comes_from else engine


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_saved_of_a_model_is_whole_or_refused_with_what_saves_it(name: str) -> None:
    whole = {key: tuple(tensor.shape) for key, tensor in normed().state_dict().items()}

    def run(channel: sw.Channel) -> None:
        engine = after_an_update(channel, name)
        model = engine.model
        assert engine.names() == list(model.state_dict(keep_vars=True)) == list(whole)
        around = nn.Sequential(model)
        ways: list[Callable[[], object]] = [
            model.state_dict,
            around.state_dict,
            lambda: torch.save(model, io.BytesIO()),
            lambda: pickle.dumps(around),
            lambda: sw.checkpoint.TorchState(model),
            lambda: sw.checkpoint.TorchState(around).state(),
        ]
        if name in WHOLE_MODEL:
            assert {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()} == whole
            for way in ways:
                way()
            copied = copy.deepcopy(model).state_dict()
            assert all(torch.equal(copied[key], tensor) for key, tensor in model.state_dict().items())
            return
        for way in ways:
            with pytest.raises(ModelError, match=r"in parts|parts of it") as caught:
                way()
            assert all(key in str(caught.value) for key in ("sw.save(path, engine)", "sw.full(engine)", "export_hf"))
        for held in (model, around):
            with pytest.raises(ModelError, match=r"copied in parts.* sw\.full\(engine\) gives whole tensors"):
                copy.deepcopy(held)

    on_ranks(name, run)


@pytest.mark.parametrize("name", LAYOUTS)
def test_what_is_saved_of_an_optimizer_is_whole_or_refused_with_what_saves_it(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = after_an_update(channel, name)
        if name in HAVE_ALL:
            state = engine.optimizer.state_dict()
            shapes = [each["exp_avg"].shape for each in state["state"].values()]
            assert shapes == [each.shape for each in tower().parameters()]
            engine.optimizer.load_state_dict(state)
            train(engine, [BATCH])
            return
        with pytest.raises(OptimizerError, match=r"part of the optimizer state.*sw\.save\(path, engine\)"):
            engine.optimizer.state_dict()
        with pytest.raises(OptimizerError, match=r"sw\.load\(path, engine\).*TorchState\(model, optimizer\)"):
            engine.optimizer.load_state_dict({"state": {}, "param_groups": []})

    on_ranks(name, run)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_group_of_what_is_not_the_models_is_refused_on_all_ranks(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = after_an_update(channel, name)
        if channel.rank == 0:
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
        train(engine, [BATCH])

    error = same_error_everywhere(PLANS[name].mesh.size, run)
    assert isinstance(error, OptimizerError)
    assert "Give add_param_group parameters that the model has now" in str(error)


@pytest.mark.parametrize("name", ["stage 0", "bf16", "whole", "stage 2"])
def test_data_ranks_that_were_written_to_otherwise_are_refused_and_alike_ones_go_on(name: str) -> None:
    def run(channel: sw.Channel) -> str:
        engine = engine_on(channel, name)
        own = torch.optim.SGD(engine.model.parameters(), lr=0.1)
        dtype = next(engine.model.parameters()).dtype
        for seed in (7, channel.rank):  # alike, and each rank by its own gradient
            rows = torch.randn(4, 4, generator=torch.Generator().manual_seed(seed))
            engine.model(rows.to(dtype)).float().square().mean().backward()
            own.step()
            own.zero_grad()
            if seed == 7:
                train(engine, [BATCH])
        differ = r"'0\.bias' was written to after parallelize. .* rank 0 and rank 1 now differ"
        with pytest.raises(MismatchError, match=differ):
            train(engine, [BATCH])
        if channel.rank:
            engine.model.load_state_dict(tower().state_dict())
        with pytest.raises(MismatchError) as caught:
            engine.evaluate(BATCH)
        engine.model.load_state_dict(tower().state_dict())
        train(engine, [BATCH])
        if channel.rank:  # the same values again: nothing differs
            engine.model.load_state_dict(engine.model.state_dict())
        train(engine, [BATCH])
        return str(caught.value)

    assert len(set(sw.simulate(2, run))) == 1


def test_a_write_is_compared_although_the_state_was_asked_for_in_between() -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, "stage 0")
        with torch.no_grad():
            for each in engine.model.parameters():
                each.mul_(1 + channel.rank)
            engine.state()
            list(engine.model.parameters())[-1].zero_()  # the same on both ranks
        train(engine, [BATCH])

    error = same_error_everywhere(2, run)
    assert "was written to after parallelize. " in str(error)
    assert "rank 0 and rank 1 now differ" in str(error)


# The optimizer's parameters, between steps --------------------------------------------------------------------------

WRITES: dict[str, Callable[[Any], object]] = {
    "fill_": lambda each: each.fill_(0.5),
    "copy_": lambda each: each.copy_(torch.full_like(each, 0.5)),
    "lerp_": lambda each: each.lerp_(torch.full_like(each, 0.5), 1.0),
    "data": lambda each: each.data.fill_(0.5),
    "data =": lambda each: setattr(each, "data", torch.full_like(each, 0.5)),
    "detach": lambda each: each.detach().fill_(0.5),
    "numpy": lambda each: each.detach().numpy().fill(0.5),
    "foreach": lambda each: torch._foreach_copy_([each], [torch.full_like(each, 0.5)]),
}


@torch.no_grad()
def write_to(parameters: Any, way: str) -> None:
    for each in parameters:
        WRITES[way](each)


def halves(model: nn.Module) -> nn.Module:
    write_to(model.parameters(), "fill_")
    return model


def tied() -> nn.Sequential:
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    return model


TIED = {
    f"tied {compute}": sw.Plan(
        mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"0": 0, "2": 1}), precision=sw.Precision(compute=compute)
    )
    for compute in ("float32", "bfloat16")
}
WRITTEN = PLANS | TIED


@pytest.mark.parametrize(("way", "name"), pairwise(list(WRITES), list(WRITTEN)))
def test_what_is_written_to_the_optimizer_s_parameters_is_in_the_model_and_in_all_its_stages(
    way: str, name: str
) -> None:
    make = tied if name in TIED else tower

    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, WRITTEN[name], sgd if name in TIED else torch.optim.AdamW, model=make())
        train(engine, [BATCH])
        write_to(masters(engine.optimizer), way)
        assert all(torch.equal(each, torch.full_like(each, 0.5)) for each in sw.full_state_dict(engine).values())
        evaluated, stepped = engine.evaluate(share(engine, BATCH)).loss, engine.step(share(engine, BATCH)).loss
        assert evaluated == pytest.approx(expected, rel=2e-2 if "bf" in name else 1e-5)
        assert stepped == pytest.approx(evaluated, rel=1e-5)

    expected = (halves(make())(BATCH["input"]) - 3).square().mean().item()
    on_ranks(WRITTEN[name], run)


@pytest.mark.parametrize("name", ["one", "one bf16", "stage 0", "stage 1", "bf16", "pp"])
def test_a_prediction_has_what_was_written_or_says_how_to_bring_it(name: str) -> None:
    def run(channel: sw.Channel, *, evaluates: bool) -> None:
        engine = engine_on(channel, name)
        train(engine, [BATCH])
        write_to(masters(engine.optimizer), "fill_")
        if evaluates:
            engine.evaluate(BATCH)
        found = engine.predict(BATCH)
        assert torch.allclose(found.float(), halves(tower())(BATCH["input"]), atol=5e-2 if "bf16" in name else 1e-6)

    if name not in HAVE_ALL:
        with pytest.raises(ModelError, match=r"engine\.evaluate\(batch\)"):
            on_ranks(name, partial(run, evaluates=False))
    on_ranks(name, partial(run, evaluates=name not in HAVE_ALL))
