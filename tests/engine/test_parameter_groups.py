"""Groups of parameters that steps update alone, by losses of their own: against plain loops in one process."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm import alone
from shardwise.errors import MismatchError, ModelError, PlanError
from tests.covering import pairwise
from tests.engine.refusals import same_error_everywhere

Batch = Mapping[str, torch.Tensor]
Figures = list[tuple[float, float]]
GROUPS: Mapping[str, Any] = {"generator": "g.*", "critic": ("d", "nothing.[a-z]*")}
RULES = {"g.0": "column", "g.2": "row", "d.0": "column", "d.2": "row"}


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


def gan() -> Gan:
    torch.manual_seed(0)
    return Gan()


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


def plain_rounds(rounds: int, *, ranks: int = 1, k: int = 1, one: bool = False) -> tuple[Figures, dict[str, Any]]:
    """The plain loop in one process, in which the others' `requires_grad` is off."""
    model = gan()
    opt = [torch.optim.AdamW(model.parameters(), lr=0.01)] if one else optimizers_of(model)
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
                    rows = {
                        name: each[rank::ranks].chunk(k)[part] for name, each in batch_of(3 * number + step).items()
                    }
                    given = (rows,) if step == 1 else (model(rows["z"]), rows)
                    value = loss(*given)
                    (value / (k * ranks) if k * ranks > 1 else value).backward()
                    total += value.item() / (k * ranks)
            norm = nn.utils.get_total_norm([each.grad for each in mine if each.grad is not None])
            opt[at].step()
            schedulers[at].step()
            figures.append((total, norm.item()))
    return figures, {name: each.detach().clone() for name, each in model.named_parameters()}


def broken(*_: object) -> torch.Tensor:
    raise ZeroDivisionError


def engine_of(channel: sw.Channel, plan: sw.Plan, *, one: bool = False) -> tuple[sw.Engine[Gan], list[Any]]:
    model = gan()
    opt = [torch.optim.AdamW(model.parameters(), lr=0.01)] if one else optimizers_of(model)
    engine = sw.parallelize(
        model, plan, optimizer=opt, loss=lambda output, _: output.square().mean(), channel=channel, groups=GROUPS
    )
    return engine, [torch.optim.lr_scheduler.StepLR(each, 2, gamma=0.5) for each in opt]


def rounds_of(engine: sw.Engine[Gan], schedulers: list[Any], rounds: int, *, first: int = 0) -> Figures:
    figures = []
    rank, ranks = engine.plan.mesh.data_rank(engine.channel.rank), engine.plan.mesh.num_data_ranks
    for number in range(first, first + rounds):
        for step, (group, loss) in enumerate(losses_of(engine.model)):
            rows = {name: each[rank::ranks] for name, each in batch_of(3 * number + step).items()}
            report = engine.step(rows, only=group, loss=loss)
            schedulers[-1 if group == "critic" else 0].step()
            figures.append((report.loss, report.grad_norm))
    return figures


def whole(engine: sw.Engine[Gan]) -> dict[str, torch.Tensor]:
    return {name: values.clone() for name, values in sw.full(engine)}


def is_close(one: tuple[Figures, dict[str, Any]], other: tuple[Figures, dict[str, Any]]) -> None:
    torch.testing.assert_close(torch.tensor(one[0]), torch.tensor(other[0]), rtol=2e-6, atol=1e-6)
    for name, values in one[1].items():
        torch.testing.assert_close(other[1][name], values, rtol=0, atol=2e-7)


@pytest.mark.parametrize("one", [False, True])
def test_one_rank_alternates_as_a_plain_loop_does_to_the_bit(one: bool) -> None:
    expected, values = plain_rounds(3, one=one)
    engine, schedulers = engine_of(alone(), sw.Plan(), one=one)
    assert rounds_of(engine, schedulers, 3) == expected
    for name, each in whole(engine).items():
        assert torch.equal(each, values[name]), name


@pytest.mark.parametrize(
    ("mesh", "stage", "k", "bucket_bytes"),
    pairwise(["dp_shard=2", "pp=2", "tp=2", "pp=2,dp_shard=2", "dp_shard=2,tp=2"], [0, 1, 2, 3], [1, 2], [64, 1 << 20]),
)
def test_ranks_alternate_as_a_plain_loop_does(mesh: str, stage: int, k: int, bucket_bytes: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=bucket_bytes),
        merge=sw.Merge(microbatches=k),
        pipeline=sw.Pipeline(stages={"g": 0, "d": 1, "nothing": 1}) if "pp" in mesh else sw.Pipeline(),
        tensor=sw.Tensor(rules=RULES) if "tp" in mesh else sw.Tensor(),
    )

    def run(channel: sw.Channel) -> tuple[Figures, dict[str, torch.Tensor]]:
        engine, schedulers = engine_of(channel, plan)
        return rounds_of(engine, schedulers, 2), whole(engine)

    found = sw.simulate(plan.mesh.size, run)
    assert all(each[0] == found[0][0] for each in found)
    is_close(plain_rounds(2, ranks=plan.mesh.num_data_ranks, k=k), found[0])


def counts_of(engine: sw.Engine[Gan], *args: Any, **kwargs: Any) -> tuple[int, int, int]:
    before = engine.counters.reduce_scatters, engine.counters.all_gathers, engine.counters.cast_elements
    engine.step(*args, **kwargs)
    after = engine.counters.reduce_scatters, engine.counters.all_gathers, engine.counters.cast_elements
    return after[0] - before[0], after[1] - before[1], after[2] - before[2]


@pytest.mark.parametrize("stage", [1, 2])
def test_buckets_without_a_trained_parameter_are_neither_reduced_nor_cast_nor_sent(stage: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=stage, bucket_bytes=1),  # a bucket for each parameter
        precision=sw.Precision(compute="bfloat16"),
    )

    def run(channel: sw.Channel) -> list[tuple[int, int, int]]:
        engine, _ = engine_of(channel, plan)
        (_, critic), _, (_, generator) = losses_of(engine.model)
        batch = {name: each.bfloat16() for name, each in batch_of(channel.rank).items()}
        return [
            counts_of(engine, batch, only="critic", loss=critic),
            counts_of(engine, batch, only="generator", loss=generator),
            counts_of(engine, batch, only=("generator", "critic"), loss=critic),
        ]

    counts = sw.simulate(2, run)
    # Four parameters in each part, and one that nothing uses in the critic's group.
    assert [each[:2] for each in counts[0]] == [(5, 5), (4, 4), (9, 9)]
    elements = [sum(each[at][2] for each in counts) for at in range(3)]
    of_g, of_d = 4 * 8 + 8 + 8 * 6 + 6, 6 * 8 + 8 + 8 + 1
    assert elements == [of_d + 3, of_g, of_d + 3 + of_g]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_step_leaves_out_does_not_move(stage: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=stage),
        precision=sw.Precision(compute="bfloat16"),
        clip_grad_norm=0.1,
    )

    def run(channel: sw.Channel) -> None:
        engine, _ = engine_of(channel, plan)
        losses = [loss for _, loss in losses_of(engine.model)]
        batch = {name: each.bfloat16() for name, each in batch_of(channel.rank).items()}
        for _ in range(2):
            engine.step(batch, only="critic", loss=losses[0])
            engine.step(batch, only="generator", loss=losses[2])
        for group, loss, letter in (("critic", losses[1], "d"), ("generator", losses[2], "g")):
            before = {piece: values.clone() for piece, values in engine.state().items()}
            engine.step(batch, only=group, loss=loss)
            moved = {
                piece.name.removeprefix("optimizer/").split("/")[0]
                for piece, values in engine.state().items()
                if not torch.equal(values, before[piece])
            }
            assert {name[0] for name in moved} <= {letter}
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
        engine = sw.parallelize(
            model, sw.Plan(mesh=sw.Mesh(dp_shard=2)), optimizer=optimizer, channel=channel, groups=GROUPS
        )
        for group, loss in losses_of(model):
            engine.step(batch_of(channel.rank), only=group, loss=loss)
        counts = [group["count"] for group in optimizer.param_groups]
        model.d.requires_grad_(False)  # not left out by `only`: the plain loop goes on to step it
        engine.step(batch_of(channel.rank), loss=lambda fake, _: fake.square().mean())
        return counts + [group["count"] for group in optimizer.param_groups]

    assert sw.simulate(2, run) == [[1, 2, 2, 3], [1, 2, 2, 3]]


def test_a_save_between_two_losses_goes_on_in_another_layout(tmp_path: Any) -> None:
    expected = plain_rounds(4, ranks=2)

    def begin(channel: sw.Channel) -> Figures:
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3))
        engine, schedulers = engine_of(channel, plan)
        figures = rounds_of(engine, schedulers, 2)
        sw.save(tmp_path / "save", engine)
        return figures

    def go_on(channel: sw.Channel) -> tuple[Figures, dict[str, torch.Tensor]]:
        plan = sw.Plan(mesh=sw.Mesh(pp=2, dp_shard=2), pipeline=sw.Pipeline(stages={"g": 0, "d": 1, "nothing": 1}))
        engine, schedulers = engine_of(channel, plan)
        sw.load(tmp_path / "save", engine)
        for each, steps in zip(schedulers, (2, 4), strict=True):
            each.last_epoch = steps
        return rounds_of(engine, schedulers, 2, first=2), whole(engine)

    first, rest = sw.simulate(2, begin)[0], sw.simulate(4, go_on)[0]
    is_close(expected, ([*first, *rest[0]], rest[1]))


def test_groups_and_frozen_parameters_go_on_after_a_relayout() -> None:
    def run(channel: sw.Channel, *, moves: bool) -> tuple[Figures, dict[str, torch.Tensor]]:
        engine, schedulers = engine_of(channel, sw.Plan(mesh=sw.Mesh(dp_shard=channel.size)))
        figures = rounds_of(engine, schedulers, 1)
        engine.model.d[0].requires_grad_(False)
        figures += rounds_of(engine, schedulers, 1, first=1)
        if moves:
            stages = sw.Pipeline(stages={"g": 0, "d": 1, "nothing": 1})
            engine = sw.relayout(engine, sw.Plan(mesh=sw.Mesh(pp=2), pipeline=stages))
            assert not any(each.requires_grad for each in engine.model.d[0].parameters())
        figures += rounds_of(engine, schedulers, 1, first=2)
        engine.model.d[0].requires_grad_(True)
        return figures + rounds_of(engine, schedulers, 1, first=3), whole(engine)

    is_close(run(alone(), moves=False), sw.simulate(2, lambda channel: run(channel, moves=True))[0])


def test_a_loss_of_the_call_without_a_group_trains_everything() -> None:
    model, plain = gan(), gan()
    opt = torch.optim.SGD(plain.parameters(), lr=0.1)
    engine = sw.parallelize(
        model, sw.Plan(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), channel=alone(), loss=broken
    )
    for step in range(2):
        batch = batch_of(step)
        opt.zero_grad()
        loss = plain.d(plain(batch["z"])).square().mean()
        loss.backward()
        opt.step()
        assert engine.step(batch, loss=lambda fake, _: model.d(fake).square().mean()).loss == loss.item()
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(one, other)


def test_groups_may_overlap_and_a_step_may_name_several() -> None:
    model, plain = gan(), gan()
    engine = sw.parallelize(
        model,
        sw.Plan(),
        optimizer=torch.optim.AdamW(model.parameters()),
        channel=alone(),
        loss=lambda fake, _: model.d(fake).square().mean(),
        groups={"first": ("g.0", "d.0"), "middle": ("g.2", "d.0.bias")},
    )
    opt = torch.optim.AdamW(plain.parameters())
    for only, frozen in (("first", ("2.",)), ("middle", ("g.0", "d.0.w", "d.2")), (("first", "middle"), ("d.2",))):
        for name, each in plain.named_parameters():
            each.requires_grad_(not any(part in name for part in frozen))
        opt.zero_grad()
        plain.d(plain(batch_of(0)["z"])).square().mean().backward()
        opt.step()
        engine.step(batch_of(0), only=only)
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(one, other)


def test_a_step_that_is_not_finite_is_skipped_and_the_next_one_goes_on() -> None:
    def run(channel: sw.Channel) -> list[bool]:
        engine, _ = engine_of(channel, sw.Plan(mesh=sw.Mesh(dp_shard=2)))
        reports = []
        for factor in (1.0, float("inf"), 1.0):
            loss: Any = lambda fake, _, factor=factor: (fake * factor).square().mean()  # noqa: E731
            reports.append(engine.step(batch_of(channel.rank), only="generator", loss=loss).skipped)
        return reports

    assert sw.simulate(2, run) == [[False, True, False]] * 2


@pytest.mark.parametrize(
    ("step", "words", "kind"),
    [
        ({"only": "painter"}, "no such group; the groups are 'generator', 'critic'", ModelError),
        ({"only": ()}, "trains nothing; name a group", ModelError),
        ({"only": 3}, "is neither the name of a group nor several", ModelError),
        ({"only": ["critic", ["generator"]]}, "is neither the name of a group nor several", ModelError),
        ({"loss": 3}, "loss: 3 is no function; give f(output, batch)", ModelError),
        ({"only": "generator"}, "rank 0 trains all, and rank 1 trains only 'generator'", MismatchError),
    ],
)
def test_what_no_step_can_train_is_refused_on_all_ranks(step: Any, words: str, kind: type) -> None:
    def run(channel: sw.Channel) -> None:
        engine, _ = engine_of(channel, sw.Plan(mesh=sw.Mesh(dp_shard=2)))
        given = step if channel.rank or kind is ModelError else {}
        try:
            engine.step(batch_of(0), **given)
        finally:
            assert all(each.requires_grad for each in engine.model.parameters())
            engine.step(batch_of(0))

    error = same_error_everywhere(2, run)
    assert type(error) is kind
    assert words in str(error)


def test_an_error_in_a_loss_leaves_the_flags_of_all_parameters_on() -> None:
    engine, _ = engine_of(alone(), sw.Plan())
    with pytest.raises(ZeroDivisionError):
        engine.step(batch_of(0), only="generator", loss=broken)
    assert all(each.requires_grad for each in engine.model.parameters())


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ({"painter": "brush.*"}, r"groups\['painter'\]: 'brush.\*' matches none of the 9 parameters; the nearest"),
        ({"painter": []}, "groups: 'painter' names no parameter; give it names or globs, or leave it out"),
        ({"painter": 3}, "is not a name with globs of parameters; write groups="),
    ],
)
def test_groups_without_a_parameter_are_refused(groups: Any, words: str) -> None:
    model = gan()
    with pytest.raises(PlanError, match=words):
        sw.parallelize(
            model, sw.Plan(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), channel=alone(), groups=groups
        )


def test_a_step_with_a_group_and_an_engine_without_groups_says_where_they_are_named() -> None:
    model = gan()
    engine = sw.parallelize(model, sw.Plan(), optimizer=torch.optim.SGD(model.parameters(), lr=0.1), channel=alone())
    with pytest.raises(ModelError, match="parallelize was given no groups"):
        engine.step(batch_of(0), only="generator")


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("mesh", ["dp_shard=2", "pp=2", "tp=2"])
def test_turns_on_a_device_are_those_on_the_host(fake: str, mesh: str, stage: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=64),
        merge=sw.Merge(microbatches=2),
        pipeline=sw.Pipeline(stages={"g": 0, "d": 1, "nothing": 1}) if "pp" in mesh else sw.Pipeline(),
        tensor=sw.Tensor(rules=RULES) if "tp" in mesh else sw.Tensor(),
        clip_grad_norm=0.5,
    )

    def run(channel: sw.Channel) -> tuple[Figures, dict[str, torch.Tensor]]:
        engine, schedulers = engine_of(channel, plan)
        return rounds_of(engine, schedulers, 2), {name: each.cpu() for name, each in whole(engine).items()}

    on_host, on_device = sw.simulate(2, run)[0], sw.simulate(2, run, device=fake)[0]
    is_close(on_host, on_device)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_predictions_follow_a_step_of_some_groups(stage: int) -> None:
    """What a step counts on masters of the other groups is its own, and no write from outside."""

    def run(channel: sw.Channel) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 3))
        engine = sw.parallelize(
            model,
            sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=stage)),
            optimizer=[torch.optim.SGD(each.parameters(), lr=0.1) for each in model],
            loss=lambda output, batch: output.square().mean(),
            groups={"0": ["0.*"], "1": ["1.*"]},
            channel=channel,
        )
        batch = {"input": torch.randn(4, 4) + channel.rank}
        for only in (None, "1", "0", None):
            engine.step(batch, only=only)
            engine.predict(batch)

    sw.simulate(2, run)
