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
from shardwise.errors import MismatchError, ModelError, OptimizerError
from tests.covering import covering
from tests.engine.loops import sgd, share
from tests.engine.refusals import same_error_everywhere
from tests.engine.tower import (
    BATCH,
    HAVE_ALL,
    PLANS,
    away_from_three,
    engine_on,
    masters,
    on_ranks,
    plain,
    tower,
    train,
    trained,
)
from tests.oracle.program import adamw, seeded

WHOLE_MODEL = [*HAVE_ALL, "stage 1", "stage 2", "whole", "bf16", "merged"]
Log = list[float]
Act = Callable[[list[Any], nn.Module, Log], object]
"""Code of the user around a step: it has the optimizer's parameters, the model and a log."""


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
ALWAYS_REFUSED = {"clips", "notes the norm", "wraps step", "notes the model"}
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


HOOKED = ["one", "stage 0", "stage 2", "whole", "stage 3", "bf16", "pp tp"]


@pytest.mark.parametrize(("hook", "late", "name"), covering(list(HOOKS), [False, True], HOOKED, strength=2))
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


@pytest.mark.parametrize("name", [each for each in PLANS if "bf16" not in each])
def test_an_optimizer_steps_inside_of_engine_step_alone(name: str) -> None:
    """A refused call leaves no trace: no update, and no scale by which the next one would be divided."""
    fused = partial(torch.optim.AdamW, lr=0.1, fused=True)

    def run(channel: sw.Channel) -> list[torch.Tensor]:
        engine = engine_on(channel, name, fused)
        train(engine, [BATCH])
        scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1)  # wraps `step`, to count
        engine.optimizer.zero_grad()
        scaler: Any = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        for step in (
            engine.optimizer.step,
            lambda: engine.optimizer.step(lambda: 0.0),
            lambda: scaler.step(engine.optimizer),
        ):
            with pytest.raises(OptimizerError, match=r"outside of engine\.step.* Call engine\.step\(batch\)"):
                step()
        values = trained(engine, 1)
        scheduler.step()
        assert scheduler.get_last_lr() == [pytest.approx(0.01)]
        return values

    for one, other in zip(on_ranks(name, run)[0], plain(fused)[0].parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-5)


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
def test_what_is_saved_of_a_model_and_of_its_optimizer_is_whole_or_refused_with_what_saves_it(name: str) -> None:
    whole = {key: tuple(tensor.shape) for key, tensor in normed().state_dict().items()}

    def run(channel: sw.Channel) -> None:
        engine = after_an_update(channel, name)
        model, around = engine.model, nn.Sequential(engine.model)
        assert engine.names() == list(model.state_dict(keep_vars=True)) == list(whole)
        ways: list[Callable[[], object]] = [
            model.state_dict,
            around.state_dict,
            lambda: torch.save(model, io.BytesIO()),
            lambda: pickle.dumps(around),
            lambda: sw.checkpoint.TorchState(model),
            lambda: sw.checkpoint.TorchState(around).state(),
            lambda: copy.deepcopy(model),
            lambda: copy.deepcopy(around),
        ]
        for way in ways:
            if name in WHOLE_MODEL:
                way()
                continue
            with pytest.raises(ModelError, match=r"in parts|parts of it") as caught:
                way()
            is_copy = "copied in parts" in str(caught.value)
            said = () if is_copy else ("sw.save(path, engine)", "export_hf")
            assert all(key in str(caught.value) for key in ("sw.full(engine)", *said))
        if name in WHOLE_MODEL:
            assert {key: tuple(tensor.shape) for key, tensor in model.state_dict().items()} == whole
            copied = copy.deepcopy(model).state_dict()
            assert all(torch.equal(copied[key], tensor) for key, tensor in model.state_dict().items())
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
        engine = engine_on(channel, "bf16")
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

WRITES: dict[str, Callable[[Any, float], object]] = {
    "fill_": lambda each, to: each.fill_(to),
    "copy_": lambda each, to: each.copy_(torch.full_like(each, to)),
    "lerp_": lambda each, to: each.lerp_(torch.full_like(each, to), 1.0),
    "data": lambda each, to: each.data.fill_(to),
    "data =": lambda each, to: setattr(each, "data", torch.full_like(each, to)),
    "detach": lambda each, to: each.detach().fill_(to),
    "numpy": lambda each, to: each.detach().numpy().fill(to),
    "foreach": lambda each, to: torch._foreach_copy_([each], [torch.full_like(each, to)]),
}


@torch.no_grad()
def write_to(parameters: Any, to: float, way: str = "fill_") -> None:
    for each in parameters:
        WRITES[way](each, to)


def filled(model: nn.Module, to: float) -> nn.Module:
    write_to(model.parameters(), to)
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


@pytest.mark.parametrize("name", WRITTEN)
def test_what_is_written_to_the_optimizer_s_parameters_is_in_the_model_and_in_all_its_stages(name: str) -> None:
    make = tied if name in TIED else tower
    rel = 2e-2 if "bf" in name else 1e-5

    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, WRITTEN[name], sgd if name in TIED else torch.optim.AdamW, model=make())
        for at, way in enumerate(WRITES):
            train(engine, [BATCH])
            to = (2 + at) / 8
            if way == "numpy" and name not in HAVE_ALL:
                with pytest.raises(OptimizerError, match="numpy of the optimizer's parameters"):
                    write_to(masters(engine.optimizer), to, way)
                continue
            write_to(masters(engine.optimizer), to, way)
            full = sw.full_state_dict(engine).values()
            assert all(torch.equal(each, torch.full_like(each, to)) for each in full), way
            expected = away_from_three(filled(make(), to)(BATCH["input"])).item()
            if at % 2:
                assert engine.evaluate(share(engine, BATCH)).loss == pytest.approx(expected, rel=rel), way
            assert engine.step(share(engine, BATCH)).loss == pytest.approx(expected, rel=rel), way

    on_ranks(WRITTEN[name], run)


KEEPS: dict[str, Callable[[Any], Any]] = {
    "data": lambda each: each.data,
    "numpy": lambda each: torch.from_numpy(each.detach().numpy()),
}


@pytest.mark.parametrize(
    ("name", "way"),
    [(name, way) for way in KEEPS for name in ("one", "one bf16", "stage 0", "stage 1", "bf16", "pp", "tied bfloat16")],
)
def test_what_is_written_later_through_views_that_a_hook_kept_is_in_the_model(name: str, way: str) -> None:
    """No call of torch shows such a write: neither a count, nor a master that somebody does something with."""
    if way == "numpy" and name not in HAVE_ALL:  # refused of parts
        return
    make = tied if name in TIED else tower
    rel = 2e-2 if "bf" in name else 1e-5

    def run(channel: sw.Channel) -> None:
        kept: list[Any] = []

        def keeping(parameters: Any) -> torch.optim.Optimizer:
            optimizer = sgd(parameters)
            optimizer.register_step_pre_hook(lambda *_: kept.extend(map(KEEPS[way], masters(optimizer))))
            return optimizer

        engine = engine_on(channel, WRITTEN[name], keeping, model=make())
        for to in (0.25, 0.5):
            train(engine, [BATCH] * 2)
            for each in kept:
                each.fill_(to)
            expected = away_from_three(filled(make(), to)(BATCH["input"])).item()
            assert engine.step(share(engine, BATCH)).loss == pytest.approx(expected, rel=rel)

    on_ranks(WRITTEN[name], run)


@pytest.mark.parametrize("name", ["one bf16", "bf16"])
def test_a_look_at_the_optimizer_s_parameters_does_not_undo_what_is_written_to_the_model(name: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, name)
        for to in (0.25, 0.5):
            train(engine, [BATCH])
            [each.detach() for each in masters(engine.optimizer)]
            for each in engine.model.parameters():
                each.data.fill_(to)
            expected = away_from_three(filled(tower(), to)(BATCH["input"])).item()
            assert engine.step(share(engine, BATCH)).loss == pytest.approx(expected, rel=2e-2)

    on_ranks(name, run)


READS: dict[str, Callable[[Any], object]] = {
    "add": lambda given: torch._foreach_add(given, 1.0),
    "lerp": lambda given: torch._foreach_lerp(given, given, 0.5),
    "sqrt": torch._foreach_sqrt,
}


@pytest.mark.parametrize("name", ["stage 1", "bf16", "pp"])
def test_operators_of_lists_that_only_read_are_no_writes(name: str) -> None:
    """A prediction would be refused after a write, and the next step would send all weights."""

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = engine_on(recorded, name)
        train(engine, [BATCH])
        with torch.no_grad():
            for read in READS.values():
                read(masters(engine.optimizer))
        engine.predict(BATCH)
        train(engine, [BATCH])
        assert "written parameters" not in " ".join(call.purpose for call in recorded.calls)

    on_ranks(name, run)


@pytest.mark.parametrize("name", ["one", "one bf16", "stage 0", "stage 1", "bf16", "pp"])
def test_a_prediction_has_what_was_written_or_says_how_to_bring_it(name: str) -> None:
    def run(channel: sw.Channel, *, evaluates: bool) -> None:
        engine = engine_on(channel, name)
        train(engine, [BATCH])
        write_to(masters(engine.optimizer), 0.5)
        if evaluates:
            engine.evaluate(BATCH)
        expected = filled(tower(), 0.5)(BATCH["input"])
        assert torch.allclose(engine.predict(BATCH).float(), expected, atol=5e-2 if "bf16" in name else 1e-6)

    if name not in HAVE_ALL:
        with pytest.raises(ModelError, match=r"engine\.evaluate\(batch\)"):
            on_ranks(name, partial(run, evaluates=False))
    on_ranks(name, partial(run, evaluates=name not in HAVE_ALL))
