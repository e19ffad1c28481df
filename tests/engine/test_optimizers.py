"""Any torch optimizer, unchanged: what it does to slices and to whole parameters is what it does in one process."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import OptimizerError
from tests.covering import covering
from tests.engine.channels import SharesMemory
from tests.engine.loops import mean_square, share
from tests.engine.tower import on_ranks
from tests.oracle.batches import share_of, word_batch, word_loss
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.one_process import train_in_one_process, values_of
from tests.oracle.places import train
from tests.oracle.program import Program, plan_of, seeded
from tests.oracle.words import Curve, Words, curve_batch, curve_loss

BATCHES = [word_batch(seed, 24) for seed in range(3)]


class Matrices(nn.Module):
    """Matrices only, as Muon wants them: tall, wide and nearly square."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 13, bias=False)
        self.second = nn.Linear(13, 5, bias=False)
        self.third = nn.Linear(5, 11, bias=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(nn.functional.one_hot(words, 11).to(self.first.weight.dtype)))
        out: torch.Tensor = self.third(torch.tanh(self.second(hidden)))
        return out


class Lion(torch.optim.Optimizer):
    """What a user brings along (Chen et al., 2023, arXiv:2302.06675): element by element; one setting is a function."""

    def __init__(self, params: Iterable[Any], lr: float) -> None:
        def shape(values: torch.Tensor) -> torch.Tensor:
            return values.sign()

        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "shape": shape})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is not None:
                    momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                    direction = group["shape"](momentum * first + parameter.grad * (1 - first))
                    parameter.sub_(direction, alpha=group["lr"])
                    momentum.mul_(second).add_(parameter.grad, alpha=1 - second)


class Normed(torch.optim.Optimizer):
    """Steps of a length that follows the norm of a parameter (as LAMB's), or of all of them; by a share of it."""

    def __init__(self, params: Iterable[Any], lr: float, of_all: bool, share: float = 1.0) -> None:
        super().__init__(params, {"lr": lr})
        self.of_all = of_all
        self.share = share

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            held = [parameter for parameter in group["params"] if parameter.grad is not None]
            norms = [float(parameter.norm()) for parameter in held]
            for parameter, norm in zip(held, norms, strict=True):
                assert parameter.grad is not None
                length = math.hypot(*norms) if self.of_all else norm
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 - self.share + self.share * length))


ALL: dict[str, Any] = {
    name: partial(kind, lr=0.01)  # type: ignore[call-arg]
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)
    # The base class, and what is refused.
    if name not in ("Optimizer", "LBFGS", "SparseAdam")
}
OPTIMIZERS: dict[str, Any] = ALL | {
    "foreach": partial(torch.optim.AdamW, lr=0.01, foreach=True),
    "foreach sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, foreach=True),
    "fused": partial(torch.optim.AdamW, lr=0.01, fused=True),
    "fused sgd": partial(torch.optim.SGD, lr=0.01, momentum=0.9, fused=True),
    "fused adagrad": partial(torch.optim.Adagrad, lr=0.01, fused=True),
    "lr in a tensor": lambda each: torch.optim.AdamW(each, lr=torch.tensor(0.01)),
    "amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.1),
    "maximize": partial(torch.optim.SGD, lr=0.01, maximize=True, dampening=0.1, momentum=0.5),
    "centered": partial(torch.optim.RMSprop, lr=0.01, centered=True, momentum=0.9),
    "of somebody else": partial(Lion, lr=0.01),
    "looks at its whole parameter": partial(Normed, lr=0.01, of_all=False),
    "looks at all": partial(Normed, lr=0.01, of_all=True),
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one": ("single", {}),
    "slice": ("dp_shard=3", {}),
    "whole": ("dp_shard=3", {"partition": "whole"}),
    "stage 0": ("dp_shard=3", {"stage": 0}),
    "stage 3": ("dp_shard=2", {"stage": 3}),
    "owners of nothing": ("dp_shard=8", {"bucket_bytes": 1 << 20}),
    "whole, owners of nothing": ("dp_shard=8", {"partition": "whole"}),
}


def program_of(optimizer: str, layout: str) -> Program:
    given: dict[str, Any] = {"batches": BATCHES, "loss": word_loss, "optimizer": OPTIMIZERS[optimizer]}
    if optimizer == "Muon":
        return Program(make=seeded(Matrices), **given)
    if "nothing" in layout:  # four parameters
        given |= {"batches": [curve_batch(seed, 16) for seed in range(2)], "loss": curve_loss}
        return Program(make=seeded(Curve), **given)
    return Program(make=seeded(Words), **given)


def test_these_are_the_optimizers_of_torch() -> None:
    assert {"SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "Rprop", "NAdam", "Adafactor", "Muon"} <= set(ALL)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_does_what_it_does_in_one_process(name: str, layout: str) -> None:
    program, (mesh, sharding) = program_of(name, layout), LAYOUTS[layout]
    plan = plan_of(program, mesh, k=1 if "nothing" in layout else 2, **sharding)
    if name == "looks at all" and layout not in ("one", "stage 0"):
        with pytest.raises(OptimizerError, match=r"Normed cannot update parameters one by one.*stage=0"):
            train(program, plan)
    else:
        assert_trains_like_one_process(program, plan)


@pytest.mark.parametrize("share", [1, 1e-5])
def test_an_optimizer_that_hardly_looks_beyond_its_element_is_found_out(share: float) -> None:
    of_all = partial(Normed, lr=0.01, of_all=True, share=share)
    program = Program(make=seeded(Words), batches=BATCHES, loss=word_loss, optimizer=of_all)
    with pytest.raises(OptimizerError, match="Normed cannot update parameters one by one"):
        train(program, plan_of(program, "dp_shard=2"))


def in_groups(model: nn.Module) -> list[dict[str, Any]]:
    """No decay for vectors and scalars; another learning rate for the embedding; names along."""
    named = dict(model.named_parameters())
    embedding = {"embedding.weight": named.pop("embedding.weight")}
    return [
        {"params": [item for item in named.items() if item[1].ndim > 1], "weight_decay": 0.3},
        {"params": [item for item in named.items() if item[1].ndim <= 1], "weight_decay": 0.0},
        {"params": list(embedding.items()), "lr": 0.002, "weight_decay": 0.1},
    ]


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(in_groups(model), lr=0.01)


def kind_of(name: str) -> Callable[[nn.Module], torch.optim.Optimizer]:
    settings: dict[str, Any] = {"momentum": 0.9} if name in ("SGD", "Muon") else {}
    return lambda model: ALL[name](model.parameters(), **settings)


BUILT: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "groups": grouped,
    **{name: kind_of(name) for name in ("SGD", "AdamW", "Adagrad", "NAdam", "ASGD", "Muon", "Adafactor")},
}


@pytest.mark.parametrize(
    ("name", "layout", "begins"),
    covering(list(BUILT), ["one", "slice", "whole", "stage 0"], [0, 2], strength=2),
)
def test_what_was_built_before_goes_on_with_its_groups_schedule_and_state(name: str, layout: str, begins: int) -> None:
    """`begins`: updates in one process before. One microbatch per rank: gradients are added in one order."""
    mesh, sharding = LAYOUTS[layout]
    batches = [word_batch(seed, 24) for seed in range(4)]
    plan = sw.Plan(mesh=sw.Mesh.parse(mesh), sharding=sw.Sharding(**{"bucket_bytes": 600, **sharding}))

    def built(updates: int) -> tuple[nn.Module, Any, Any]:
        model = seeded(Matrices if name == "Muon" else Words)()
        optimizer = BUILT[name](model)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
        for batch in batches[:updates]:
            train_in_one_process(model, optimizer, [batch], loss=word_loss, num_microbatches=plan.mesh.size)
            scheduler.step()
        return model, optimizer, scheduler

    def run(channel: sw.Channel) -> None:
        model, optimizer, scheduler = built(begins)
        groups = optimizer.param_groups
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=word_loss, channel=channel)
        assert engine.optimizer is optimizer
        assert all(one is other for one, other in zip(optimizer.param_groups, groups, strict=True))
        assert all(len(group["params"]) == len(group.get("param_names", group["params"])) for group in groups)
        for batch in batches[begins:]:
            engine.step(share(engine, batch))
            scheduler.step()
        assert scheduler.get_last_lr() == expected[2].get_last_lr()
        wanted = values_of(expected[0])
        assert [key for key, each in values_of(model).items() if not torch.equal(each, wanted[key])] == []

    expected = built(4)
    on_ranks(plan, run)


def test_the_trial_leaves_no_trace_in_the_optimizer() -> None:
    """An optimizer built before, with a scheduler in warm-up at 0, and a hook."""
    model, calls = seeded(Words)(), list[str]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 10)
    optimizer.register_step_pre_hook(lambda *_: calls.append("hook"))
    before = torch.get_rng_state()
    sw.parallelize(model, sw.Plan(), optimizer=optimizer, loss=word_loss)
    assert not calls
    assert not optimizer.state
    assert optimizer.param_groups[0]["lr"] == 0.0
    assert torch.equal(before, torch.get_rng_state())


def muon_and_adamw(parameters: list[nn.Parameter]) -> Any:
    matrices = [each for each in parameters if each.ndim == 2]
    rest = [each for each in parameters if each.ndim != 2]
    return [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)]


@pytest.mark.parametrize("layout", ["slice", "whole", "stage 0"])
@pytest.mark.parametrize("compute", ["float32", "bfloat16"])
def test_muon_takes_the_matrices_and_adamw_the_rest(layout: str, compute: str) -> None:
    """All layouts against one rank with as many microbatches, and that one against plain steps of both."""
    program = Program(make=seeded(Words), batches=BATCHES, loss=word_loss, optimizer=muon_and_adamw)
    mesh, sharding = LAYOUTS[layout]
    one = train(program, plan_of(program, k=3, precision=sw.Precision(compute=compute)))
    got = train(program, plan_of(program, mesh, precision=sw.Precision(compute=compute), **sharding))
    assert [key for key, each in one.states[-1].items() if not torch.equal(got.states[-1][key], each)] == []
    if compute == "float32":
        model = program.make()
        optimizers = muon_and_adamw(list(model.parameters()))
        for batch in BATCHES:
            model.zero_grad()
            for rank in range(3):
                (program.loss_of(model, share_of(batch, rank, 3)) / 3).backward()
            for optimizer in optimizers:
                optimizer.step()
        for name, value in values_of(model).items():
            torch.testing.assert_close(one.states[-1][name], value, rtol=1e-3, atol=1e-3)


def test_two_optimizers_have_no_single_one_and_a_rank_holds_its_slice_of_their_state() -> None:
    def run(channel: sw.Channel) -> int:
        program = Program(make=seeded(Words), batches=BATCHES, loss=word_loss, optimizer=muon_and_adamw)
        engine = program.engine(plan_of(program, "dp_shard=3", partition="whole"), channel)
        assert [type(each).__name__ for each in engine.optimizers] == ["Muon", "AdamW"]
        with pytest.raises(sw.ShardwiseError, match=r"2 optimizers; use engine\.optimizers"):
            _ = engine.optimizer
        engine.step(share(engine, BATCHES[0]))
        states = [state for each in engine.optimizers for state in each.state.values()]
        return sum(
            each.numel() for state in states for key, each in state.items() if key in ("exp_avg", "momentum_buffer")
        )

    held = sw.simulate(3, run)
    used = [each for name, each in seeded(Words)().named_parameters() if not name.startswith("unused")]
    assert sum(held) == sum(each.numel() for each in used)
    assert max(held) < sum(held) * 0.6


# Optimizers that keep gradients, or give parameters other memory ----------------------------------------------------


class InPlace(torch.optim.Optimizer):
    """Updates in place, and keeps nothing. `whole`: by the norm of what it updates."""

    def __init__(self, parameters: Iterable[nn.Parameter], whole: bool) -> None:
        super().__init__(parameters, {"lr": 0.05, "whole": whole})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.update(parameter, group, self.state[parameter])

    def way(self, gradient: torch.Tensor, group: Mapping[str, Any]) -> torch.Tensor:
        way = gradient / (gradient.norm() + 1e-7) if group["whole"] else gradient.sign()
        return way * float(group["lr"])

    def update(self, parameter: nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        parameter.sub_(self.way(parameter.grad, group))  # type: ignore[arg-type]


class GradientIsKept(InPlace):
    """The last gradient is the tensor that backward made, and the first one is the momentum."""

    def update(self, parameter: nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        gradient = parameter.grad
        assert gradient is not None
        change = gradient - state.get("last", 0)
        state["momentum"] = state["momentum"].mul(0.9).add(change) if "momentum" in state else gradient.view_as(change)
        state["last"] = gradient
        parameter.sub_(self.way(state["momentum"], group))


class ValuesAreReplaced(InPlace):
    """New values are a new tensor, and the old one is kept; now and then it goes back half of the way."""

    def update(self, parameter: nn.Parameter, group: Mapping[str, Any], state: dict[str, Any]) -> None:
        assert parameter.grad is not None
        change = parameter.data - state["before"] if "before" in state else 0.0
        state["before"] = parameter.data
        state["number"] = state.get("number", 0) + 1
        parameter.data = parameter.data - self.way(parameter.grad, group) + 0.3 * change
        if state["number"] % 3 == 0:
            parameter.data = parameter.data.lerp(state["before"], 0.5)


def wide_matrices() -> nn.Sequential:
    """Of so many bytes that matrices along tp are updated in several rounds."""
    sizes = [6, 256, 300, 256, 6]
    return seeded(lambda: nn.Sequential(*(nn.Linear(one, other, bias=False) for one, other in pairwise(sizes))))()


def rows_of(step: int) -> dict[str, torch.Tensor]:
    return {"input": torch.randn(8, 6, generator=torch.Generator().manual_seed(step))}


@pytest.mark.parametrize("kind", [GradientIsKept, ValuesAreReplaced])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("layout", ["single", "tp=2", "dp_shard=2"])
def test_an_optimizer_may_keep_gradients_and_replace_values(kind: type[InPlace], whole: bool, layout: str) -> None:
    mesh = sw.Mesh.parse(layout)
    rules = {"0": "column", "1": "row", "2": "column", "3": "row"} if mesh.tp > 1 else None

    def run(channel: sw.Channel) -> list[float]:
        model = wide_matrices()
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=mesh, tensor=sw.Tensor(rules=rules)),
            optimizer=kind(model.parameters(), whole),
            loss=mean_square,
            channel=SharesMemory(channel) if mesh.tp > 1 else channel,
        )
        return [engine.step(share(engine, rows_of(step))).loss for step in range(5)]

    model = wide_matrices()
    batches = [rows_of(step) for step in range(5)]
    wanted = train_in_one_process(model, kind(model.parameters(), whole), batches, loss=mean_square).losses
    found = sw.simulate(mesh.size, run)[0]
    assert found == (wanted if mesh.size == 1 else pytest.approx(wanted, rel=1e-5))
