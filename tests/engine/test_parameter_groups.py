"""Groups of parameters that steps update alone, by losses of their own: against plain loops in one process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm import alone
from tests.covering import pairwise
from tests.engine.loops import mean_square
from tests.engine.refusals import raise_of_all
from tests.engine.tower import DATA, on_ranks
from tests.oracle.program import seeded
from tests.refusals import Refusals

Batch = Mapping[str, torch.Tensor]
Figures = list[tuple[float, float]]
GROUPS: Mapping[str, Any] = {"generator": "g.*", "critic": ("d", "nothing.[a-z]*")}
RULES = sw.Tensor(rules={"g.0": "column", "g.2": "row", "d.0": "column", "d.2": "row"})
STAGES = sw.Pipeline(stages={"g": 0, "d": 1, "nothing": 1})


class Gan(nn.Module):
    """A generator and a critic; the forward is that of the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 6))
        self.d = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.nothing = nn.ParameterDict({"a": nn.Parameter(torch.ones(3))})  # no loss uses it

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.g(z)
        return made


gan = seeded(Gan)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, width, generator=generator) for name, width in (("z", 4), ("real", 6))}


def losses_of(model: Gan) -> list[tuple[str, Callable[..., torch.Tensor]]]:
    """Of one round: what is trained, and by which loss. Two of them call the critic; one needs no forward."""

    def tell_apart(fake: torch.Tensor, batch: Batch) -> torch.Tensor:
        real, made = model.d(batch["real"]), model.d(fake)
        return F.softplus(-real).mean() + F.softplus(made).mean()

    def penalty(batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model.d(batch["real"])
        return found.square().mean()

    def deceive(fake: torch.Tensor, _: Batch) -> torch.Tensor:
        return F.softplus(-model.d(fake)).mean()

    return [("critic", tell_apart), ("critic", penalty), ("generator", deceive)]


def optimizers_of(model: Gan) -> list[torch.optim.Optimizer]:
    """One of each part; the critic's has two groups, one of them with what nothing uses."""
    return [
        torch.optim.AdamW(model.g.parameters(), lr=0.01),
        torch.optim.SGD([{"params": model.d.parameters()}, {"params": model.nothing.parameters()}], lr=0.1),
    ]


def one_optimizer(model: Gan) -> list[torch.optim.Optimizer]:
    return [torch.optim.AdamW(model.parameters(), lr=0.01)]


def plain_rounds(
    rounds: int, *, ranks: int = 1, k: int = 1, optimizers: Any = optimizers_of
) -> tuple[Figures, dict[str, Any]]:
    """The plain loop in one process, in which the others' `requires_grad` is off."""
    model = gan()
    opt = optimizers(model)
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in opt]
    parts: dict[str, tuple[list[nn.Parameter], int]] = {
        "generator": ([*model.g.parameters()], 0),
        "critic": ([*model.d.parameters(), *model.nothing.parameters()], len(opt) - 1),
    }
    figures = []
    for number in range(rounds):
        for step, (group, loss) in enumerate(losses_of(model)):
            mine, at = parts[group]
            for each in model.parameters():
                each.requires_grad_(any(each is one for one in mine))
            opt[at].zero_grad()
            total = 0.0
            for rank in range(ranks):
                for part in range(k):
                    batch = batch_of(3 * number + step).items()
                    rows = {name: each[rank::ranks].chunk(k)[part] for name, each in batch}
                    value = loss(rows) if step == 1 else loss(model(rows["z"]), rows)
                    (value / (k * ranks) if k * ranks > 1 else value).backward()
                    total += value.item() / (k * ranks)
            norm = nn.utils.get_total_norm([each.grad for each in mine if each.grad is not None])
            opt[at].step()
            schedulers[at].step()
            figures.append((total, norm.item()))
    return figures, {name: each.detach().clone() for name, each in model.named_parameters()}


class Run:
    """An engine with the schedules of its optimizers."""

    def __init__(self, channel: sw.Channel, plan: sw.Plan, optimizers: Any = optimizers_of) -> None:
        model = gan()
        opt = optimizers(model)
        self.engine = sw.parallelize(model, plan, optimizer=opt, loss=mean_square, channel=channel, groups=GROUPS)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in opt]
        self.figures: Figures = []

    def rounds(self, count: int, *, first: int = 0) -> None:
        mesh = self.engine.plan.mesh
        rank, ranks = mesh.data_rank(self.engine.channel.rank), mesh.num_data_ranks
        for number in range(first, first + count):
            for step, (group, loss) in enumerate(losses_of(self.engine.model)):
                rows = {name: each[rank::ranks] for name, each in batch_of(3 * number + step).items()}
                report = self.engine.step(rows, only=group, loss=loss)
                self.schedulers[-1 if group == "critic" else 0].step()
                self.figures.append((report.loss, report.grad_norm))

    def found(self) -> tuple[Figures, dict[str, torch.Tensor]]:
        return self.figures, {name: values.cpu().clone() for name, values in sw.full(self.engine)}


def is_close(one: tuple[Figures, dict[str, Any]], other: tuple[Figures, dict[str, Any]]) -> None:
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=2e-6, atol=1e-6)
    for name, values in one[1].items():
        torch.testing.assert_close(other[1][name], values, rtol=0, atol=2e-7)


@pytest.mark.parametrize("optimizers", [optimizers_of, one_optimizer])
def test_one_rank_alternates_as_a_plain_loop_does_to_the_bit(optimizers: Any) -> None:
    run = Run(alone(), sw.Plan(), optimizers)
    run.rounds(3)
    (figures, values), (expected, wanted) = run.found(), plain_rounds(3, optimizers=optimizers)
    assert figures == expected
    assert [name for name, each in values.items() if not torch.equal(each, wanted[name])] == []


@pytest.mark.parametrize(
    ("mesh", "stage", "k", "bucket_bytes", "on_device"),
    pairwise(
        ["dp_shard=2", "pp=2", "tp=2", "pp=2,dp_shard=2", "dp_shard=2,tp=2"],
        [0, 1, 2, 3],
        [1, 2],
        [64, 1 << 20],
        [False, True],
    ),
)
def test_ranks_alternate_as_a_plain_loop_does(
    mesh: str, stage: int, k: int, bucket_bytes: int, on_device: bool, fake: str
) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=bucket_bytes),
        merge=sw.Merge(microbatches=k),
        pipeline=STAGES if "pp" in mesh else sw.Pipeline(),
        tensor=RULES if "tp" in mesh else sw.Tensor(),
    )

    def run(channel: sw.Channel) -> Any:
        made = Run(channel, plan)
        made.rounds(2)
        return made.found()

    found = on_ranks(plan, run, device=fake) if on_device else on_ranks(plan, run)
    assert all(each[0] == found[0][0] for each in found)
    is_close(plain_rounds(2, ranks=plan.mesh.num_data_ranks, k=k), found[0])


def counts_of(engine: sw.Engine[Gan], *args: Any, **kwargs: Any) -> list[int]:
    before, counters = [getattr(engine.counters, name) for name in COUNTED], engine.counters
    engine.step(*args, **kwargs)
    return [getattr(counters, name) - count for name, count in zip(COUNTED, before, strict=True)]


COUNTED = ("reduce_scatters", "all_gathers", "cast_elements")


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_without_a_trained_parameter_are_neither_reduced_nor_cast_nor_sent(stage: int) -> None:
    plan = sw.Plan(
        mesh=DATA,
        sharding=sw.Sharding(stage=stage, bucket_bytes=1),  # a bucket for each parameter
        precision=sw.Precision(compute="bfloat16"),
    )

    def run(channel: sw.Channel) -> list[list[int]]:
        engine = Run(channel, plan).engine
        (_, critic), _, (_, generator) = losses_of(engine.model)
        batch = {name: each.bfloat16() for name, each in batch_of(channel.rank).items()}
        turns: list[tuple[Any, Any]] = [
            ("critic", critic), ("generator", generator), (("generator", "critic"), critic)
        ]  # fmt: skip
        return [counts_of(engine, batch, only=only, loss=loss) for only, loss in turns]

    counts = sw.simulate(2, run)
    # Four parameters in each part, and one that nothing uses in the critic's group.
    assert [each[:2] for each in counts[0]] == [[5, 5], [4, 4], [9, 9]]
    elements = [sum(each[at][2] for each in counts) for at in range(3)]
    of_g, of_d = 4 * 8 + 8 + 8 * 6 + 6, 6 * 8 + 8 + 8 + 1
    assert elements == [of_d + 3, of_g, of_d + 3 + of_g]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_step_leaves_out_does_not_move_and_predictions_follow(stage: int) -> None:
    """What a step counts on masters of the other groups is its own, and no write from outside."""
    plan = sw.Plan(
        mesh=DATA,
        sharding=sw.Sharding(stage=stage),
        precision=sw.Precision(compute="bfloat16"),
        clip_grad_norm=0.1,
    )

    def run(channel: sw.Channel) -> None:
        engine = Run(channel, plan).engine
        losses = [loss for _, loss in losses_of(engine.model)]
        batch = {name: each.bfloat16() for name, each in batch_of(channel.rank).items()}
        for _ in range(2):
            engine.step(batch, only="critic", loss=losses[0])
            engine.step(batch, only="generator", loss=losses[2])
        for group, loss, letter in (("critic", losses[1], "d"), ("generator", losses[2], "g")):
            before = {piece: values.clone() for piece, values in engine.state().items()}
            engine.step(batch, only=group, loss=loss)
            engine.predict({"z": batch["z"]})
            moved = {
                piece.name.removeprefix("optimizer/")[0]
                for piece, values in engine.state().items()
                if not torch.equal(values, before[piece])
            }
            assert moved <= {letter}
            assert {piece.name[0] for piece in engine.gradients()} <= {letter, "n" if letter == "d" else letter}
            assert all(each.requires_grad for each in engine.model.parameters())

    sw.simulate(2, run)


class Counting(torch.optim.SGD):
    """Counts its steps in each group, whether or not there is anything to do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def test_only_optimizers_and_groups_with_something_trained_step() -> None:
    def run(channel: sw.Channel) -> list[int]:
        model = gan()
        critic: list[Any] = [*model.d.parameters(), *model.nothing.parameters()]
        optimizer = Counting([{"params": [*model.g.parameters()]}, {"params": critic}], lr=0.1)
        engine = sw.parallelize(model, sw.Plan(mesh=DATA), optimizer=optimizer, channel=channel, groups=GROUPS)
        for group, loss in losses_of(model):
            engine.step(batch_of(channel.rank), only=group, loss=loss)
        counts = [group["count"] for group in optimizer.param_groups]
        model.d.requires_grad_(False)  # not left out by `only`: the plain loop goes on to step it
        engine.step(batch_of(channel.rank), loss=mean_square)
        return counts + [group["count"] for group in optimizer.param_groups]

    assert sw.simulate(2, run) == [[1, 2, 2, 3]] * 2


def test_groups_and_frozen_parameters_go_on_after_a_relayout() -> None:
    def run(channel: sw.Channel, *, moves: bool) -> tuple[Figures, dict[str, torch.Tensor]]:
        made = Run(channel, sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)))
        made.rounds(1)
        made.engine.model.d[0].requires_grad_(False)
        made.rounds(1, first=1)
        if moves:
            made.engine = sw.relayout(made.engine, sw.Plan(mesh=sw.Mesh(pp=2), pipeline=STAGES))
            assert not any(each.requires_grad for each in made.engine.model.d[0].parameters())
        made.rounds(1, first=2)
        made.engine.model.d[0].requires_grad_(True)
        made.rounds(1, first=3)
        return made.found()

    is_close(run(alone(), moves=False), sw.simulate(2, lambda channel: run(channel, moves=True))[0])


def test_groups_may_overlap_a_step_may_name_several_and_its_loss_is_that_of_the_call() -> None:
    model, plain = gan(), gan()
    groups = {"first": ("g.0", "d.0"), "middle": ("g.2", "d.0.bias")}
    engine = sw.parallelize(
        model, sw.Plan(), optimizer=torch.optim.AdamW(model.parameters()), channel=alone(), loss=broken, groups=groups
    )
    opt = torch.optim.AdamW(plain.parameters())
    turns: list[tuple[Any, tuple[str, ...]]] = [
        (None, ()), ("first", ("2.",)), ("middle", ("g.0", "d.0.w", "d.2")), (("first", "middle"), ("d.2",))
    ]  # fmt: skip
    for only, frozen in turns:
        for name, each in plain.named_parameters():
            each.requires_grad_(not any(part in name for part in frozen))
        opt.zero_grad()
        loss = plain.d(plain(batch_of(0)["z"])).square().mean()
        loss.backward()
        opt.step()
        assert (
            engine.step(batch_of(0), only=only, loss=lambda fake, _: model.d(fake).square().mean()).loss == loss.item()
        )
        assert all(map(torch.equal, model.parameters(), plain.parameters()))
    with pytest.raises(ZeroDivisionError):
        engine.step(batch_of(0), only="first")
    assert all(each.requires_grad for each in model.parameters())


def broken(*_: object) -> torch.Tensor:
    raise ZeroDivisionError


def stepping(on_all: bool = True, **step: Any) -> Callable[[], None]:
    def run(channel: sw.Channel) -> None:
        engine = Run(channel, sw.Plan(mesh=DATA)).engine
        try:
            engine.step(batch_of(0), **(step if channel.rank or on_all else {}))
        finally:
            assert all(each.requires_grad for each in engine.model.parameters())
            engine.step(batch_of(0))

    return lambda: raise_of_all(2, run)


def grouped(groups: Any, **step: Any) -> Callable[[], None]:
    def call() -> None:
        model = gan()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sw.parallelize(model, sw.Plan(), optimizer=optimizer, channel=alone(), groups=groups).step(batch_of(0), **step)

    return call


REFUSED = Refusals(
    "engine.parameter_groups",
    {
        "no such group": stepping(only="painter"),
        "no group": stepping(only=()),
        "a number": stepping(only=3),
        "nested names": stepping(only=["critic", ["generator"]]),
        "a loss that is no function": stepping(loss=3),
        "a group on one rank": stepping(False, only="generator"),
        "no such parameter": grouped({"painter": "brush.*"}),
        "no names": grouped({"painter": []}),
        "a number for names": grouped({"painter": 3}),
        "an engine without groups": grouped(None, only="generator"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_step_can_train_is_refused(case: str) -> None:
    REFUSED.check(case)
