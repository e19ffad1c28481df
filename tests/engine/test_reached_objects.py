"""Ways in which a plain program reaches parameters, gradients, state and steps, under each kind of plan.

Each gives what one process gives, or is refused on all ranks. Nothing is silently something else.
"""

import copy
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace as Namespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, OptimizerError, ShardwiseError

BATCH = torch.arange(16.0).view(4, 4) / 10
DATA = sw.Mesh(dp_shard=2)
ZERO = {f"stage {stage}": sw.Plan(mesh=DATA, sharding=sw.Sharding(stage=stage)) for stage in (0, 1, 2, 3)}
PLANS: dict[str, sw.Plan] = {
    "one": sw.Plan(),
    "one bf16": sw.Plan(precision=sw.Precision(compute="bfloat16")),
    **ZERO,
    "whole": sw.Plan(mesh=DATA, sharding=sw.Sharding(partition="whole")),
    "bf16": sw.Plan(mesh=DATA, precision=sw.Precision(compute="bfloat16")),
    "merged": sw.Plan(mesh=DATA, merge=sw.Merge(microbatches=2)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2)),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"})),
    "pp tp": sw.Plan(mesh=sw.Mesh(pp=2, tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"})),
}

Log = list[float]
Put = Callable[[torch.optim.Optimizer, nn.Module, Log], object]
"""Puts code of the user around the steps of an optimizer."""


def build() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))


def loss(output: torch.Tensor, batch: object = None) -> torch.Tensor:
    return (output.float() - 3).square().mean()


def masters(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [each for group in optimizer.param_groups for each in group["params"]]


def clipped(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_(masters(optimizer), 0.1)


def clipped_by_numpy(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    norm = sum(float((each.grad.numpy() ** 2).sum()) for each in masters(optimizer)) ** 0.5
    for each in masters(optimizer):
        each.grad.mul_(min(1.0, 0.1 / norm))


def flat_values(parameters: Any) -> list[float]:
    return [value for each in parameters for value in each.detach().view(-1).tolist()]


def without_rows(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for each in masters(optimizer):
        if each.dim() == 2:
            each.grad[:2] = 0


def centralised(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for each in masters(optimizer):
        if each.grad.ndim > 1:
            each.grad.sub_(each.grad.mean(1, keepdim=True))


def of_one_length(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    for each in masters(optimizer):
        each.grad.div_(each.grad.norm())


def limited(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_value_(masters(optimizer), 0.01)
    for each in masters(optimizer):
        each.grad.mul_(torch.where(each.grad > 0, 2.0, 1.0))


@torch.no_grad()
def bounded(parameters: Any) -> None:
    for each in parameters:
        each.clamp_(-0.1, 0.1)


def dropped(model: nn.Module) -> None:
    for each in model.parameters():
        zeroed(each)


def zeroed(parameter: torch.Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.zero_()


def without_gradients(model: nn.Module) -> None:
    for each in model.parameters():
        assert each.grad is not None
        each.grad = each.grad * 0


def wrap(optimizer: torch.optim.Optimizer, model: nn.Module, log: Log) -> None:
    step = optimizer.step

    def clips(*args: Any, **kwargs: Any) -> Any:
        clipped(optimizer)
        return step(*args, **kwargs)

    optimizer.step = clips  # type: ignore[method-assign]


def norm_of(parameters: Any) -> float:
    return sum(float(each.grad.norm()) ** 2 for each in parameters)


HOOKS: dict[str, Put] = {
    "counts": lambda optimizer, _, log: optimizer.register_step_pre_hook(lambda *_: log.append(1)),
    "clips": lambda optimizer, *_: optimizer.register_step_pre_hook(clipped),
    "clips values": lambda optimizer, *_: optimizer.register_step_pre_hook(limited),
    "notes the norm": lambda optimizer, _, log: optimizer.register_step_pre_hook(
        lambda each, *_: log.append(norm_of(masters(each)))
    ),
    "clips by numpy": lambda optimizer, *_: optimizer.register_step_pre_hook(clipped_by_numpy),
    "notes values": lambda optimizer, _, log: optimizer.register_step_pre_hook(
        lambda each, *_: log.append(sum(abs(value) for value in flat_values(masters(each))))
    ),
    "divides by norms": lambda optimizer, *_: optimizer.register_step_pre_hook(of_one_length),
    "leaves out rows": lambda optimizer, *_: optimizer.register_step_pre_hook(without_rows),
    "centralises": lambda optimizer, *_: optimizer.register_step_pre_hook(centralised),
    "bounds": lambda optimizer, *_: optimizer.register_step_post_hook(lambda each, *_: bounded(masters(each))),
    "clips the model": lambda optimizer, model, _: optimizer.register_step_pre_hook(
        lambda *_: (nn.utils.clip_grad_norm_(model.parameters(), 0.1), None)[1]
    ),
    "drops the model's": lambda optimizer, model, _: optimizer.register_step_pre_hook(lambda *_: dropped(model)),
    "replaces the model's": lambda optimizer, model, _: optimizer.register_step_pre_hook(
        lambda *_: without_gradients(model)
    ),
    "bounds the model": lambda optimizer, model, _: optimizer.register_step_post_hook(
        lambda *_: bounded(model.parameters())
    ),
    "notes the model": lambda optimizer, model, log: optimizer.register_step_post_hook(
        lambda *_: log.append(sum(float(each.detach().sum()) for each in model.parameters()))
    ),
    "wraps step": wrap,
}
NEVER_REFUSED = {"counts", "clips values", "bounds"}
"""What goes element by element."""
ALWAYS_REFUSED = {"clips", "clips by numpy", "notes values", "notes the norm", "wraps step", "notes the model"}
"""What needs all, where no rank has it."""
HAVE_ALL = {"one", "one bf16", "stage 0"}


def plain(put: Put) -> tuple[list[torch.Tensor], Log]:
    model, log = build(), list[float]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    put(optimizer, model, log)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(BATCH)).backward()
        optimizer.step()
    return [each.detach() for each in model.parameters()], log


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after parallelize"])
@pytest.mark.parametrize("hook", HOOKS)
def test_code_around_a_step_sees_what_it_sees_in_one_process(hook: str, late: bool, plan: str) -> None:
    def run(channel: sw.Channel) -> tuple[list[torch.Tensor], Log]:
        model, log = build(), list[float]()

        def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            optimizer = torch.optim.SGD(parameters, lr=1.0)
            if not late:
                HOOKS[hook](optimizer, model, log)
            return optimizer

        engine = sw.parallelize(model, PLANS[plan], optimizer=sgd, loss=loss, channel=channel)
        assert log == [], "the trial of parallelize leaves no trace"
        if late:
            HOOKS[hook](engine.optimizer, model, log)
        return trained(engine, channel), log

    expected, noted = plain(HOOKS[hook])
    said = ""
    try:
        (values, _), *_ = results = sw.simulate(PLANS[plan].mesh.size, run)
    except (OptimizerError, ModelError) as error:
        said = str(error)
    if said:
        assert hook not in NEVER_REFUSED, said
        assert plan != "one" or hook == "replaces the model's", said
        assert "optimizer.param_groups" in said or "engine" in said
        return
    assert hook not in ALWAYS_REFUSED or plan in HAVE_ALL
    bound = 5e-2 if "bf16" in plan else 1e-5
    assert all(torch.allclose(one, other, atol=bound) for one, other in zip(values, expected, strict=True))
    assert all(log == pytest.approx(noted, rel=bound) for _, log in results)


def trained(engine: sw.Engine, channel: sw.Channel) -> list[torch.Tensor]:
    mesh = engine.plan.mesh
    for _ in range(2):
        engine.step({"input": BATCH.tensor_split(mesh.num_data_ranks)[mesh.data_rank(channel.rank)]})
    return [each.float() for each in sw.full_state_dict(engine).values()]


# Between steps ---------------------------------------------------------------------------------------------------


def engine_on(channel: sw.Channel, plan: str, kind: Any = torch.optim.AdamW) -> sw.Engine:
    engine = sw.parallelize(
        build(), PLANS[plan], optimizer=lambda parameters: kind(parameters, lr=0.1), loss=loss, channel=channel
    )
    trained(engine, channel)
    return engine


def by_numpy(parameter: torch.Tensor) -> None:
    parameter.detach().numpy()[:] = 0.5


WRITES: Mapping[str, Callable[[Any], object]] = {
    "fill_": lambda each: each.fill_(0.5),
    "copy_": lambda each: each.copy_(torch.full_like(each, 0.5)),
    "lerp_": lambda each: each.lerp_(torch.full_like(each, 0.5), 1.0),
    "data": lambda each: each.data.fill_(0.5),
    "data =": lambda each: setattr(each, "data", torch.full_like(each, 0.5)),
    "detach": lambda each: each.detach().fill_(0.5),
    "numpy": by_numpy,
    "foreach": lambda each: torch._foreach_copy_([each], [torch.full_like(each, 0.5)]),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_the_optimizer_s_parameters_is_in_the_model(write: str, plan: str) -> None:
    def run(channel: sw.Channel) -> tuple[float, float, list[torch.Tensor]]:
        engine = engine_on(channel, plan)
        with torch.no_grad():
            for each in masters(engine.optimizer):
                WRITES[write](each)
        saved = list(sw.full_state_dict(engine).values())
        mesh = engine.plan.mesh
        batch = {"input": BATCH.tensor_split(mesh.num_data_ranks)[mesh.data_rank(channel.rank)]}
        return engine.evaluate(batch).loss, engine.step(batch).loss, saved

    model = build()
    for each in model.parameters():
        nn.init.constant_(each, 0.5)
    expected = loss(model(BATCH)).item()
    for evaluated, stepped, saved in sw.simulate(PLANS[plan].mesh.size, run):
        assert evaluated == pytest.approx(expected, rel=2e-2 if "bf16" in plan else 1e-5)
        assert stepped == pytest.approx(evaluated, rel=1e-5)
        assert all(torch.equal(each, torch.full_like(each, 0.5)) for each in saved)


@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize("write", WRITES)
def test_what_is_written_to_a_tied_parameter_reaches_all_its_stages(write: str, compute: str | None) -> None:
    stages = {"0": 0, "2": 1}

    def run(channel: sw.Channel) -> tuple[float, float]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
        model[2].weight = model[0].weight
        plan = sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages=stages), precision=sw.Precision(compute=compute))
        engine = sw.parallelize(
            model, plan, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), loss=loss, channel=channel
        )
        engine.step({"input": BATCH})
        with torch.no_grad():
            for each in masters(engine.optimizer):
                WRITES[write](each)
        return engine.evaluate({"input": BATCH}).loss, engine.step({"input": BATCH}).loss

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    for each in model.parameters():
        nn.init.constant_(each, 0.5)
    expected = loss(model(BATCH)).item()
    for found in sw.simulate(2, run):
        assert found == pytest.approx([expected] * 2, rel=2e-2 if compute else 1e-5)


@pytest.mark.parametrize("plan", ["one", "one bf16", "stage 0", "stage 1", "bf16", "pp"])
def test_a_prediction_has_what_was_written_or_says_how_to_bring_it(plan: str) -> None:
    def run(channel: sw.Channel) -> Any:
        engine = engine_on(channel, plan)
        with torch.no_grad():
            for each in masters(engine.optimizer):
                each.fill_(0.5)
        return engine.predict({"input": BATCH})

    def goes_on(channel: sw.Channel) -> Any:
        engine = engine_on(channel, plan)
        with torch.no_grad():
            for each in masters(engine.optimizer):
                each.fill_(0.5)
        engine.evaluate({"input": BATCH})
        return engine.predict({"input": BATCH})

    if plan in ("stage 1", "bf16", "pp"):
        with pytest.raises(ModelError, match=r"engine\.evaluate\(batch\)"):
            sw.simulate(PLANS[plan].mesh.size, run)
    found = sw.simulate(PLANS[plan].mesh.size, goes_on if plan in ("stage 1", "bf16", "pp") else run)
    model = build()
    for each in model.parameters():
        nn.init.constant_(each, 0.5)
    assert all(torch.allclose(each.float(), model(BATCH), atol=5e-2 if "bf16" in plan else 1e-6) for each in found)


class TwoPoints(torch.optim.SGD):
    """Moves its parameters between two points, as schedule-free optimizers do for an evaluation."""

    @torch.no_grad()
    def eval(self) -> None:
        for each in masters(self):
            self.state[each]["other"] = each.clone()
            each.mul_(0.5)

    @torch.no_grad()
    def train(self) -> None:
        for each in masters(self):
            each.copy_(self.state[each].pop("other"))


@pytest.mark.parametrize("plan", PLANS)
def test_an_optimizer_that_moves_weights_for_an_evaluation(plan: str) -> None:
    def run(channel: sw.Channel) -> list[float]:
        engine = engine_on(channel, plan, TwoPoints)
        mesh, optimizer = engine.plan.mesh, engine.optimizer
        assert isinstance(optimizer, TwoPoints)
        batch = {"input": BATCH.tensor_split(mesh.num_data_ranks)[mesh.data_rank(channel.rank)]}
        losses = [engine.evaluate(batch).loss]
        optimizer.eval()
        losses.append(engine.evaluate(batch).loss)
        optimizer.train()
        return [*losses, engine.step(batch).loss]

    model = build()
    optimizer = TwoPoints(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(model(BATCH)).backward()
        optimizer.step()
    first = loss(model(BATCH)).item()
    optimizer.eval()
    expected = [first, loss(model(BATCH)).item(), first]
    for found in sw.simulate(PLANS[plan].mesh.size, run):
        assert found == pytest.approx(expected, rel=3e-2 if "bf16" in plan else 1e-5)


def test_ranks_that_write_unlike_values_are_refused() -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, "stage 0")
        with torch.no_grad():
            for each in masters(engine.optimizer):
                each.fill_(channel.rank)
        engine.step({"input": BATCH})

    with pytest.raises(ShardwiseError, match="rank 0 and rank 1 now differ"):
        sw.simulate(2, run)


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation, with the two steps of a loop that calls backward twice."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def first_step(self) -> None:
        for each in masters(self):
            if each.grad is not None:
                self.state[each]["old"] = each.clone()
                each.add_(each.grad, alpha=0.05)
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for each in masters(self):
            if each.grad is not None:
                each.sub_(each.grad, alpha=0.1)


class ClosedSam(Sam):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is not None
        with torch.enable_grad():
            closure()
        self.first_step()
        with torch.enable_grad():
            closure()


READS: Mapping[str, Callable[[torch.optim.Optimizer], object]] = {
    "first_step": lambda optimizer: optimizer.first_step(),  # type: ignore[attr-defined]
    "clip_grad_norm_": lambda optimizer: nn.utils.clip_grad_norm_(masters(optimizer), 1.0),
    "clip_grad_value_": lambda optimizer: nn.utils.clip_grad_value_(masters(optimizer), 1.0),
    "norm": lambda optimizer: masters(optimizer)[0].grad.norm(),
    "add_": lambda optimizer: masters(optimizer)[0].add_(masters(optimizer)[0].grad),
    "grad =": lambda optimizer: setattr(masters(optimizer)[0], "grad", torch.ones_like(masters(optimizer)[0])),
    "foreach": lambda optimizer: torch._foreach_norm([each.grad for each in masters(optimizer)]),
    "clone": lambda optimizer: masters(optimizer)[0].grad.clone(),
    "tolist": lambda optimizer: masters(optimizer)[0].grad.tolist(),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("read", READS)
def test_gradients_of_masters_outside_of_a_step_are_refused(read: str, plan: str) -> None:
    def run(channel: sw.Channel) -> None:
        optimizer = engine_on(channel, plan, Sam).optimizer
        with torch.no_grad():
            optimizer.zero_grad()
            optimizer.zero_grad(set_to_none=False)
            with pytest.raises(OptimizerError, match=r"outside of engine\.step.* Call engine\.step\(batch\)"):
                READS[read](optimizer)

    sw.simulate(PLANS[plan].mesh.size, run)


def test_a_step_that_asks_for_a_closure_is_refused() -> None:
    with pytest.raises(OptimizerError, match="needs a closure"):
        sw.parallelize(build(), sw.Plan(), optimizer=lambda ps: ClosedSam(ps, lr=0.1), loss=loss)


@pytest.mark.parametrize("plan", PLANS)
def test_state_of_the_model_s_parameters(plan: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, plan)
        state = engine.optimizer.state
        for each in engine.model.parameters():
            if plan in HAVE_ALL:
                assert each in state
                assert state[each]["exp_avg"].shape == each.shape
                assert state.get(each) is state[each]
            else:
                for ask in (state.__getitem__, state.get, state.__contains__):
                    with pytest.raises(OptimizerError, match=r"sw\.full_state_dict\(engine, optimizer=True\)"):
                        ask(each)
        assert state[torch.zeros(1)] == {}

    sw.simulate(PLANS[plan].mesh.size, run)


@pytest.mark.parametrize("plan", ["stage 1", "stage 2", "stage 3", "tp"])
def test_a_norm_of_parts_of_weights_is_refused(plan: str) -> None:
    def run(channel: sw.Channel) -> None:
        parameters = masters(engine_on(channel, plan).optimizer)
        part = max(parameters, key=lambda each: each.numel())
        assert (part * 2).shape == part.shape
        with pytest.raises(OptimizerError, match="norm"):
            part.norm()

    sw.simulate(2, run)


# Parameters of the model between steps ---------------------------------------------------------------------------


def in_turns(take: Callable[[Any], Any]) -> Callable[[nn.Module], Any]:
    """Of each parameter, as plain values."""
    return lambda model: [take(each) for each in model.parameters()]


@torch.no_grad()
def followed(model: nn.Module) -> float:
    copies = copy.deepcopy(list(model.parameters()))
    for average, each in zip(copies, model.parameters(), strict=True):
        average.lerp_(each.detach() * 2, 0.5)
    return sum(float(each.norm()) for each in copies)


def sum_by_hand(model: nn.Module) -> float:
    total = sum(each.detach().pow(2).sum() for each in model.parameters())
    return float(total)


LOOKS: Mapping[str, Callable[[nn.Module], Any]] = {
    "norm": in_turns(lambda each: each.norm().item()),
    "sum of squares": sum_by_hand,
    "data": in_turns(lambda each: float(each.data.view(-1).abs().max())),
    "total norm": lambda model: float(nn.utils.get_total_norm(model.parameters())),
    "vector": lambda model: nn.utils.parameters_to_vector(model.parameters()).tolist(),
    "tolist": in_turns(lambda each: each.view(-1).tolist()),
    "rows": in_turns(lambda each: each[0].sum().item()),
    "numpy": in_turns(lambda each: float((each.detach().numpy() ** 2).sum())),
    "numpy norm": in_turns(lambda each: float(np.linalg.norm(each.detach().numpy()))),
    "array": in_turns(lambda each: np.asarray(each.detach()).tolist()),
    "pickle": in_turns(lambda each: pickle.loads(pickle.dumps(each)).tolist()),
    "average": followed,
    "product": in_turns(lambda each: (each.view(-1) @ each.view(-1)).item()),
    "histogram": in_turns(lambda each: torch.histc(each.detach(), 4).tolist()),
    "averaged model": lambda model: [each.tolist() for each in torch.optim.swa_utils.AveragedModel(model).parameters()],
    "copied model": lambda model: [each.tolist() for each in copy.deepcopy(model).parameters()],
    "state dict": lambda model: [each.tolist() for each in model.state_dict().values()],
}


@pytest.mark.parametrize("plan", [each for each in PLANS if "bf16" not in each])
@pytest.mark.parametrize("look", LOOKS)
def test_what_is_computed_of_the_model_s_parameters_is_of_whole_ones_or_refused(look: str, plan: str) -> None:
    def run(channel: sw.Channel) -> Any:
        engine = engine_on(channel, plan)
        found, said = None, ""
        try:
            found = LOOKS[look](engine.model)
        except ModelError as error:
            said = str(error)
        assert not said or ("engine.whole()" in said and "sw.full(engine)" in said)
        assert not said or plan in ("stage 3", "tp", "pp", "pp tp")
        with engine.whole():
            whole = LOOKS[look](engine.model)
        trained(engine, channel)
        return found, whole

    (_, expected), *others = sw.simulate(PLANS[plan].mesh.size, run)
    for found, whole in ((_, expected), *others):
        assert torch.allclose(torch.tensor(flat(whole)), torch.tensor(flat(expected)))
        assert found is None or torch.allclose(torch.tensor(flat(found)), torch.tensor(flat(expected)))


NOT_OF_TENSORS = ("averaged model", "copied model", "state dict", "pickle")
"""Looks that take a model; pickles of optimizers are as they are."""
OF_ONE = ("tolist", "array")
"""What gives the values of one parameter: a whole one has them all."""


@pytest.mark.parametrize(
    "plan", ["one", "stage 0", "stage 1", "stage 2", "stage 3", "whole", "tp", "pp", "pp tp", "bf16"]
)
@pytest.mark.parametrize("look", [each for each in LOOKS if each not in NOT_OF_TENSORS])
def test_what_is_computed_of_the_optimizer_s_parameters_is_of_all_or_refused(look: str, plan: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, plan)
        names = Namespace(parameters=lambda: masters(engine.optimizer))
        if plan in HAVE_ALL:
            assert LOOKS[look](names) == LOOKS[look](engine.model)  # type: ignore[arg-type]
        elif look in OF_ONE and plan in ("pp", "whole"):
            LOOKS[look](names)  # type: ignore[arg-type]
        else:
            with pytest.raises(OptimizerError, match=r"of the optimizer's parameters.* sw\.full\(engine\)"):
                LOOKS[look](names)  # type: ignore[arg-type]
        trained(engine, channel)

    sw.simulate(PLANS[plan].mesh.size, run)


def test_a_whole_parameter_of_the_optimizer_is_read_alone() -> None:
    def run(channel: sw.Channel) -> list[Any]:
        engine = engine_on(channel, "pp" if channel.size == 2 else "one")
        with torch.no_grad():
            return [
                [
                    each.tolist(),
                    float(each.detach().numpy().flat[0]),
                    bool(torch.isfinite(each).all()),
                    (each * 2 / each.norm()).tolist(),
                    pickle.loads(pickle.dumps(each)).tolist(),
                ]
                for each in masters(engine.optimizer)
            ]

    (expected,) = sw.simulate(1, run)
    first, second = sw.simulate(2, run)
    assert np.allclose(flat(first + second), flat(expected), rtol=1e-6)


def flat(values: Any) -> list[float]:
    return [inner for each in values for inner in flat(each)] if isinstance(values, list) else [values]


ELEMENT_BY_ELEMENT: Mapping[str, Callable[[Any], object]] = {
    "clamp_": lambda each: each.clamp_(-0.05, 0.05),
    "data": lambda each: each.data.mul_(0.5),
    "foreach": lambda each: torch._foreach_mul_([each], 0.5),
    "lerp_": lambda each: each.lerp_(torch.zeros_like(each), 0.5),
    "decayed": lambda each: each.add_(each.detach().clone().sign(), alpha=-0.01),
    "where": lambda each: each.copy_(torch.where(each > 0, each, torch.zeros_like(each))),
}


@pytest.mark.parametrize("plan", ["one", "stage 1", "tp", "pp", "pp tp"])
@pytest.mark.parametrize("write", ELEMENT_BY_ELEMENT)
def test_what_goes_element_by_element_over_the_model_s_parameters_is_right_on_parts(write: str, plan: str) -> None:
    def run(channel: sw.Channel) -> list[torch.Tensor]:
        engine = sw.parallelize(
            build(), PLANS[plan], optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), loss=loss, channel=channel
        )
        with torch.no_grad():
            for each in engine.model.parameters():
                ELEMENT_BY_ELEMENT[write](each)
        return [each for _, each in sw.full(engine)]

    model = build()
    with torch.no_grad():
        for each in model.parameters():
            ELEMENT_BY_ELEMENT[write](each)
    for found in sw.simulate(PLANS[plan].mesh.size, run):
        assert all(torch.equal(one, other) for one, other in zip(found, model.parameters(), strict=True))


# Hooks of parameters ---------------------------------------------------------------------------------------------


def without_first_rows(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[:3] = 0
    return gradient


PARAMETER_HOOKS: Mapping[str, Callable[[torch.Tensor, Log], object]] = {
    "masks rows": lambda gradient, _: without_first_rows(gradient),
    "of one length": lambda gradient, _: gradient / gradient.norm(),
    "centralises": lambda gradient, _: gradient - gradient.mean(0),
    "clamps": lambda gradient, _: gradient.clamp(-0.01, 0.01),
    "looks": lambda gradient, log: log.append(float(gradient.norm())),
    "nothing": lambda gradient, _: None,
}


class Scaled(nn.Module):
    """Whole along tp, between two cut modules: each rank has a term of its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * self.scale


def build_scaled() -> nn.Module:
    model = build()
    model[1] = Scaled()  # type: ignore[operator]
    return model


def put_on_parameters(hook: str, is_accumulated: bool, model: nn.Module, log: Log) -> None:
    def seen(gradient: torch.Tensor) -> Any:
        found = PARAMETER_HOOKS[hook](gradient, log)
        return found if isinstance(found, torch.Tensor) else None

    def accumulated(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        if (found := seen(parameter.grad)) is not None:
            parameter.grad.copy_(found)

    for each in model.parameters():
        if each.dim() or hook in ("of one length", "clamps", "looks"):
            if is_accumulated:
                each.register_post_accumulate_grad_hook(accumulated)
            else:
                each.register_hook(seen)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after parallelize"])
@pytest.mark.parametrize("is_accumulated", [False, True], ids=["hook", "accumulated"])
@pytest.mark.parametrize("hook", PARAMETER_HOOKS)
def test_a_hook_of_a_parameter_gets_the_whole_gradient_under_tp(hook: str, is_accumulated: bool, late: bool) -> None:
    put = partial(put_on_parameters, hook, is_accumulated)
    plain_model, noted = build_scaled(), list[float]()
    put(plain_model, noted)
    optimizer = torch.optim.SGD(plain_model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        loss(plain_model(BATCH)).backward()
        optimizer.step()

    def run(channel: sw.Channel) -> tuple[list[torch.Tensor], Log]:
        model, log = build_scaled(), list[float]()
        if not late:
            put(model, log)
        plan = sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"0": "column", "2": "row"}))
        engine = sw.parallelize(
            model, plan, optimizer=lambda ps: torch.optim.SGD(ps, lr=0.1), loss=loss, channel=channel
        )
        if late:
            put(model, log)
        return trained(engine, channel), log

    try:
        results = sw.simulate(2, run)
    except OptimizerError:
        results = []
    if not results:
        assert is_accumulated
        assert hook not in ("clamps", "nothing")
        return
    for values, log in results:
        assert sorted(log) == pytest.approx(sorted(noted), rel=1e-4)
        for one, other in zip(values or results[0][0], plain_model.parameters(), strict=True):
            assert torch.allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("plan", [each for each in PLANS if "bf16" not in each and "tp" not in each])
def test_a_hook_that_was_put_behind_the_accumulation_later_sees_the_gradient(plan: str) -> None:
    def run(channel: sw.Channel) -> list[torch.Tensor]:
        model = build()
        engine = sw.parallelize(
            model, PLANS[plan], optimizer=lambda ps: torch.optim.SGD(ps, lr=1.0), loss=loss, channel=channel
        )
        for each in model.parameters():
            each.register_post_accumulate_grad_hook(zeroed)
        return trained(engine, channel)

    values, *_ = sw.simulate(PLANS[plan].mesh.size, run)
    assert all(torch.equal(one, other) for one, other in zip(values, build().parameters(), strict=True))


def test_a_matrix_that_is_whole_during_an_update_only_says_so_between_two() -> None:
    def run(channel: sw.Channel) -> None:
        model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Tanh(), nn.Linear(8, 4, bias=False))
        for each in model.parameters():
            nn.init.ones_(each)
        engine = sw.parallelize(
            model, PLANS["tp"], optimizer=lambda ps: torch.optim.Muon(ps, lr=0.1), loss=loss, channel=channel
        )
        trained(engine, channel)
        for each in masters(engine.optimizer):
            assert each.dim() == 2
            for look in (torch.Tensor.norm, torch.Tensor.zero_, torch.Tensor.detach):
                with pytest.raises(OptimizerError, match="whole here during an update only"), torch.no_grad():
                    look(each)
        trained(engine, channel)

    sw.simulate(2, run)
