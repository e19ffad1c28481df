"""Parameters that come and go between steps, and groups that steps update alone: as in a plain loop."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from itertools import pairwise as pairs
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import shardwise as sw
from shardwise.comm import Channel, alone
from tests.covering import pairwise
from tests.engine.loops import mean_square, plan_of, share
from tests.engine.refusals import raise_of_all
from tests.engine.tower import DATA
from tests.oracle.batches import microbatches_of
from tests.oracle.program import seeded
from tests.refusals import Refusals

Batch = Mapping[str, torch.Tensor]
STEPS = 7


@dataclass(frozen=True)
class Turn:
    """One step: of some groups or all, with a loss of its own or the loop's, by one optimizer of several."""

    batch: Batch
    only: Any = None
    loss: Callable[..., torch.Tensor] | None = None
    at: int = 0


Story = Callable[[Any, list[Any]], Iterator[Turn]]
"""f(model, optimizers): what the loop does before each step happens before its turn is given."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A program."""

    make: Callable[[], Any]
    optimizers: Callable[[Any], list[torch.optim.Optimizer]]
    story: Story
    groups: Mapping[str, Any] = field(default_factory=dict)
    loss: Callable[..., torch.Tensor] = mean_square


# Parameters that are frozen for some steps ----------------------------------------------------------------------------


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 4, generator=generator) for name in ("x", "y")}


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.mse_loss(output, batch["y"])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    """Of a transformer what counts here: a stack of alike blocks; the head may be tied to what comes first."""

    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(4, 4)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def turn(module: nn.Module, on: bool) -> None:
    for each in module.parameters():
        each.requires_grad_(on)


def gradually(model: Any, _: Any) -> Iterator[Turn]:
    """From the top down, through parameters that the loop has held since before parallelize; the optimizer has all."""
    kept = [list(block.parameters()) for block in model.blocks]
    turn(model.blocks, False)
    for step in range(STEPS):
        for each in kept[2 - step // 2] if step in (2, 4) else ():
            each.requires_grad_(True)
        yield Turn(batch_of(step))


def with_new_groups(model: Any, optimizers: list[Any]) -> Iterator[Turn]:
    """The optimizer gets each block when it is unfrozen."""
    turn(model.blocks, False)
    for step in range(STEPS):
        if step in (2, 4):
            block = model.blocks[2 - step // 2]
            turn(block, True)
            optimizers[0].add_param_group({"params": list(block.parameters()), "lr": 0.02, "weight_decay": 0.3})
        yield Turn(batch_of(step))


def off_and_on(model: Any, _: Any) -> Iterator[Turn]:
    """What has state rests for some steps, once together with what has just been unfrozen, and goes on."""
    first, last = model.blocks
    changes = {
        0: [(last, False)],
        1: [(first, False)],
        2: [(model.embed, False), (last, True)],  # the embedding is tied to the head, or not
        4: [(model.embed, True), (model.head, False)],
        5: [(model.head, True), (first, True)],
    }
    for step in range(STEPS):
        for module, on in changes.get(step, ()):
            turn(module, on)
        yield Turn(batch_of(step))


def in_groups(model: Any, _: Any) -> Iterator[Turn]:
    """Groups that overlap; a step may name several."""
    for step in range(STEPS):
        only = (None, "ends", "middle", ("ends", "middle"))[step % 4]
        yield Turn(batch_of(step), only=only, loss=None if step % 2 else lambda output, _: output.square().mean())


def adamw(model: nn.Module, *, without: str = "-") -> list[torch.optim.Optimizer]:
    named = [each for name, each in model.named_parameters() if without not in name]
    return [torch.optim.AdamW(named, lr=0.05, weight_decay=0.1)]


GROUPS: Mapping[str, Any] = {"ends": ("embed", "head.*"), "middle": ("blocks.*", "head.bias")}


def loop(story: Story, *, is_tied: bool = False, without: str = "-") -> Loop:
    make = seeded(lambda: Net(is_tied=is_tied))
    return Loop(make=make, optimizers=partial(adamw, without=without), story=story, groups=GROUPS, loss=loss_of)


# Parts that train by turns --------------------------------------------------------------------------------------------


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


def points_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, width, generator=generator) for name, width in (("z", 4), ("real", 6))}


def by_turns(model: Any, optimizers: list[Any]) -> Iterator[Turn]:
    """Two of three losses call the critic; one needs no forward of the model."""

    def tell_apart(fake: torch.Tensor, batch: Batch) -> torch.Tensor:
        return F.softplus(-model.d(batch["real"])).mean() + F.softplus(model.d(fake)).mean()

    def penalty(batch: Batch) -> torch.Tensor:
        found: torch.Tensor = model.d(batch["real"])
        return found.square().mean()

    def deceive(fake: torch.Tensor, _: Batch) -> torch.Tensor:
        return F.softplus(-model.d(fake)).mean()

    turns: list[tuple[str, Callable[..., torch.Tensor]]] = [
        ("critic", tell_apart), ("critic", penalty), ("generator", deceive)
    ]  # fmt: skip
    for step in range(STEPS):
        only, loss = turns[step % 3]
        yield Turn(points_of(step), only=only, loss=loss, at=len(optimizers) - 1 if only == "critic" else 0)


def of_parts(model: Gan) -> list[torch.optim.Optimizer]:
    """One of each part; the critic's has two groups, one of them with what nothing uses."""
    return [
        torch.optim.AdamW(model.g.parameters(), lr=0.01),
        torch.optim.SGD([{"params": model.d.parameters()}, {"params": model.nothing.parameters()}], lr=0.1),
    ]


PARTS: Mapping[str, Any] = {"generator": "g.*", "critic": ("d", "nothing.[a-z]*")}
GAN = Loop(make=seeded(Gan), optimizers=of_parts, story=by_turns, groups=PARTS)
LOOPS = {
    "gradually": loop(gradually),
    "with new groups": loop(with_new_groups, is_tied=True, without="blocks"),
    "off and on": loop(off_and_on),
    "off and on, tied": loop(off_and_on, is_tied=True),
    "in groups": loop(in_groups),
    "by turns": GAN,
    "by turns of one optimizer": Loop(make=seeded(Gan), optimizers=adamw, story=by_turns, groups=PARTS),
}
RULES = {
    "blocks": {"*.up": "column", "*.down": "row"},
    "turns": {"g.0": "column", "g.2": "row", "d.0": "column", "d.2": "row"},
}

Found = tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]
"""Losses and norms, parameters, and what the average of the weights gives in the end."""


def begun(given: Loop) -> tuple[Any, list[torch.optim.Optimizer], list[Any], Iterator[Turn]]:
    model = given.make()
    optimizers = given.optimizers(model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.9) for each in optimizers]
    return model, optimizers, schedulers, given.story(model, optimizers)


def is_of(name: str, patterns: Any) -> bool:
    heads = [each.split("*")[0].split("[")[0] for each in ([patterns] if isinstance(patterns, str) else patterns)]
    return any(name.startswith(each) for each in heads)


def plain(given: Loop, parts: int = 1, *, clip: float | None = None) -> Found:
    """In one process, with `requires_grad` off for what a step leaves out."""
    model, optimizers, schedulers, turns = begun(given)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    figures = []
    for each in turns:
        only = (each.only,) if isinstance(each.only, str) else each.only
        was = {one: one.requires_grad for one in model.parameters()}
        for name, one in model.named_parameters():
            one.requires_grad_(was[one] and (only is None or any(is_of(name, given.groups[group]) for group in only)))
        mine = [one for one in model.parameters() if one.requires_grad]
        optimizers[each.at].zero_grad()
        loss, total = each.loss or given.loss, 0.0
        for part in microbatches_of(each.batch, 1, parts)[0]:
            output = () if len(inspect.signature(loss).parameters) == 1 else (model(next(iter(part.values()))),)
            value = loss(*output, part)
            (value / parts if parts > 1 else value).backward()
            total += value.item() / parts
        figures.append((total, nn.utils.get_total_norm([one.grad for one in mine if one.grad is not None]).item()))
        if clip is not None:
            nn.utils.clip_grad_norm_(mine, clip)
        optimizers[each.at].step()
        schedulers[each.at].step()
        average.update_parameters(model)
        for one, before in was.items():
            one.requires_grad_(before)
    held_out = given.loss(average.module(next(iter(each.batch.values()))), each.batch).item()
    return figures, {name: one.detach().clone() for name, one in model.named_parameters()}, held_out


def ours(
    channel: Channel, given: Loop, plan: sw.Plan, *, folder: Path | None = None, moves_to: sw.Plan | None = None
) -> Found:
    """folder: it is saved and loaded on the way. moves_to: it goes on under another plan."""
    model, optimizers, schedulers, turns = begun(given)
    first = next(turns)
    held = {name: id(each) for name, each in model.named_parameters()}
    engine: sw.Engine = sw.parallelize(
        model, plan, optimizer=optimizers, loss=given.loss, channel=channel, groups=given.groups
    )
    figures = []
    for each in chain([first], turns):
        report = engine.step(share(engine, each.batch), only=each.only, loss=each.loss)
        schedulers[each.at].step()
        figures.append((report.loss, report.grad_norm))
        assert {name: id(one) for name, one in model.named_parameters()} == held, "the user's own objects"
        if len(figures) == 6 and folder is not None:  # what was saved comes back, whatever is frozen
            sw.save(folder / "save", engine)
            sw.load(folder / "save", engine)
        if len(figures) == 3 and moves_to is not None:
            engine = sw.relayout(engine, moves_to)
            held = {name: id(one) for name, one in model.named_parameters()}
    assert list(engine.optimizers) == optimizers
    held_out = 0.0
    if plan.average is not None:
        with engine.averaged():
            held_out = engine.evaluate(share(engine, each.batch)).loss
    return figures, {name: values.cpu().clone() for name, values in sw.full(engine)}, held_out


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("name", LOOPS)
def test_one_rank_trains_as_a_plain_loop_does_to_the_bit(name: str, clip: float | None) -> None:
    figures, values, _ = ours(alone(), LOOPS[name], sw.Plan(clip_grad_norm=clip))
    expected, wanted, _ = plain(LOOPS[name], clip=clip)
    assert figures == expected
    assert all(torch.equal(values[key], each) for key, each in wanted.items())


MESHES = ["dp_shard=2", "pp=2", "tp=2", "pp=2,dp_shard=2"]


@pytest.mark.parametrize(
    ("name", "mesh", "stage", "k", "on_device", "moves"),
    pairwise(
        [each for each in LOOPS if each != "off and on"], MESHES, [0, 1, 2, 3], [1, 2], [False, True], [False, True]
    ),
)
def test_ranks_train_as_a_plain_loop_does(
    fake: str, tmp_path: Path, name: str, mesh: str, stage: int, k: int, on_device: bool, moves: bool
) -> None:
    """Also an average of the weights, around a save, and from one layout to another."""
    settings: Any = {"clip_grad_norm": 0.5, "average": sw.Average(decay=0.9)}
    stages = {"g": 0, "d": 1, "nothing": 1} if "turns" in name else None
    rules = RULES["turns" if "turns" in name else "blocks"]
    plan, other = (
        plan_of(each, stage, k, sharding={"bucket_bytes": 200}, rules=rules, stages=stages, **settings)
        for each in (mesh, "tp=2" if mesh == "pp=2" else "pp=2" if "," not in mesh else "dp_shard=2,tp=2")
    )

    def run(channel: Channel) -> Found:
        return ours(channel, LOOPS[name], plan, folder=tmp_path, moves_to=other if moves else None)

    found = sw.simulate(plan.mesh.size, run, device=fake if on_device else "cpu")
    assert all((each[0], each[2]) == (found[0][0], found[0][2]) for each in found)
    expected = plain(LOOPS[name], k * plan.mesh.num_data_ranks, clip=0.5)
    torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(expected[0]), rtol=2e-6, atol=1e-6)
    for key, values in expected[1].items():
        torch.testing.assert_close(found[0][1][key], values, rtol=0, atol=5e-7)
    assert found[0][2] == pytest.approx(expected[2], rel=2e-6)


# What a step leaves out -----------------------------------------------------------------------------------------------


def engine_of(channel: Channel, plan: sw.Plan | None = None, optimizer: Any = torch.optim.AdamW, **more: Any) -> Any:
    given = {"optimizer": optimizer, "loss": loss_of, "groups": GROUPS, **more}
    return sw.parallelize(seeded(Net)(), plan or sw.Plan(), channel=channel, **given)


@pytest.mark.parametrize("by", ["only", "requires_grad"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_what_a_step_leaves_out_stays_and_is_neither_reduced_nor_cast(stage: int, by: str) -> None:
    """What steps count on masters of others is their own, and no write from outside."""
    plan = plan_of("dp_shard=2", stage, sharding={"bucket_bytes": 1}, compute="bfloat16")

    def run(channel: Channel) -> list[tuple[int, int]]:
        engine = engine_of(channel, plan)
        counters, counts = engine.counters, []
        batch = {name: each.bfloat16() for name, each in batch_of(channel.rank).items()}
        for step in range(4):
            leaves_out = step % 2 == 1
            if by == "requires_grad":
                turn(engine.model.blocks, not leaves_out)
            before = {piece: values.clone() for piece, values in engine.state().items()}
            engine.step(batch, only="ends" if leaves_out and by == "only" else None)
            counts.append((counters.reduce_scatters, counters.cast_elements))
            engine.predict({"x": batch["x"]})
            state = engine.state()
            moved = {piece.name for piece in before if not torch.equal(state[piece], before[piece])}
            assert not leaves_out or not any("blocks" in name for name in moved)
            assert not leaves_out or not any("blocks" in piece.name for piece in engine.gradients())
            assert by == "requires_grad" or all(each.requires_grad for each in engine.model.parameters())
        return [(two[0] - one[0], two[1] - one[1]) for one, two in pairs(counts)]

    ranks = sw.simulate(2, run)
    for left_out, every, again in ranks:
        assert left_out == again
        assert every[0] == left_out[0] + 8, "parameters of the blocks, with a bucket each"
    cast = [sum(each[at][1] for each in ranks) for at in range(2)]
    of_all = {name: each.numel() for name, each in Net().named_parameters()}
    of_ends = sum(size for name, size in of_all.items() if "blocks" not in name)
    assert cast == [count * (1 if stage else 2) for count in (of_ends, sum(of_all.values()))]


class Counting(torch.optim.SGD):
    """Counts its steps in each group, whether or not there is anything to do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["count"] = group.get("count", 0) + 1
        return super().step(closure)


def broken(*_: object) -> torch.Tensor:
    raise ZeroDivisionError


def test_only_optimizers_and_groups_with_something_trained_step() -> None:
    def run(channel: Channel) -> list[int]:
        model = GAN.make()
        critic: list[Any] = [*model.d.parameters(), *model.nothing.parameters()]
        optimizer = Counting([{"params": [*model.g.parameters()]}, {"params": critic}], lr=0.1)
        engine: sw.Engine = sw.parallelize(
            model, sw.Plan(mesh=DATA), optimizer=optimizer, channel=channel, groups=PARTS
        )
        for each, _ in zip(by_turns(model, [optimizer]), range(3), strict=False):
            engine.step(each.batch, only=each.only, loss=each.loss)
        counts = [group["count"] for group in optimizer.param_groups]
        model.d.requires_grad_(False)  # not left out by `only`: the plain loop goes on to step it
        engine.step(points_of(channel.rank), loss=mean_square)
        with pytest.raises(ZeroDivisionError):
            engine.step(points_of(0), only="critic", loss=broken)
        assert all(each.requires_grad for each in model.g.parameters())
        return counts + [group["count"] for group in optimizer.param_groups]

    assert sw.simulate(2, run) == [[1, 2, 2, 3]] * 2


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_computes_in_bfloat16_keeps_every_bit_of_its_master_when_it_is_unfrozen(stage: int) -> None:
    def run(channel: Channel) -> dict[str, torch.Tensor]:
        plan = plan_of("dp_shard=2", stage, compute="bfloat16")
        engine = engine_of(channel, plan, lambda given: torch.optim.SGD(given, lr=0.0))
        for on in (False, True, False):
            turn(engine.model.blocks, on)
            engine.step({name: each.bfloat16() for name, each in batch_of(channel.rank).items()})
        return {name: values.clone() for name, values in sw.full(engine, optimizer=True)}

    found = sw.simulate(2, run)[0]
    for name, values in seeded(Net)().named_parameters():
        assert torch.equal(found.get(f"optimizer/{name}/master", found[name]), values), name


@pytest.mark.parametrize(
    "plan", [sw.Plan(), plan_of("dp_shard=2", 3), plan_of("tp=2", rules=RULES["blocks"])], ids=["", "3", "tp"]
)
def test_all_that_a_program_may_hold_of_an_engine_survives_what_it_takes_in(plan: sw.Plan) -> None:
    def run(channel: Channel) -> None:
        model = seeded(Net)()
        turn(model.embed, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine: Any = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        engine.step(share(engine, batch_of(0)))
        names = ("counters", "optimizers", "channel", "model", "trained_batches")
        held = {name: getattr(engine, name) for name in names}
        stepped, losses, asked = list[int](), list[float](), list[int]()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5**at)
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        engine.see_losses = losses.append
        step, stop_asking = engine.step, engine.ask_in_steps(lambda: len(asked.__iadd__([1])) < 0)
        turn(model.embed, True)
        step(share(engine, batch_of(0)))
        schedule.step()
        stop_asking()
        engine.step(share(engine, batch_of(0)))
        assert [len(each) for each in (stepped, losses, asked)] == [2, 2, 1]
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert held["counters"].updates == engine.counters.updates == 3
        assert all(getattr(engine, name) in (each,) for name, each in held.items())

    sw.simulate(plan.mesh.size, run)


# Refusals -------------------------------------------------------------------------------------------------------------


def on_ranks_that_freeze_others(channel: Channel) -> None:
    engine = engine_of(channel, plan_of("dp_shard=2"))
    turn(engine.model.head, channel.rank == 0)
    try:
        engine.step(batch_of(0))
    finally:  # they go on when they agree
        turn(engine.model.head, False)
        engine.step(batch_of(0))


def in_no_optimizer(channel: Channel) -> None:
    model = seeded(Net)()
    turn(model.embed, False)
    [optimizer] = adamw(model, without="embed")
    engine: Any = sw.parallelize(model, plan_of("dp_shard=2", 3), optimizer=optimizer, loss=loss_of, channel=channel)
    turn(model.embed, True)
    try:
        engine.step(batch_of(0))
    finally:  # the way out works
        assert engine.evaluate(batch_of(0)).loss > 0
        optimizer.add_param_group({"params": [model.embed.weight], "lr": 0.5})
        for on in (False, True):  # in a group and frozen, and trained
            turn(model.embed, on)
            engine.step(batch_of(0))
            before = dict(sw.full(engine))["embed.weight"].clone()
            engine.step(batch_of(1))
            assert torch.equal(dict(sw.full(engine))["embed.weight"], before) == (not on)


def with_a_group(parameters: Callable[[Net], list[nn.Parameter]]) -> None:
    engine, other = (engine_of(alone(), optimizer=lambda each: torch.optim.SGD(each, lr=0.1)) for _ in range(2))
    engine.optimizer.add_param_group({"params": parameters(engine.model)})
    try:
        engine.step(batch_of(0))
    finally:  # it goes on without the group
        del engine.optimizer.param_groups[1]
        assert engine.step(batch_of(1)).loss == other.step(batch_of(1)).loss


def with_a_stranger_on_one_rank(channel: Channel) -> None:
    engine = engine_of(channel, plan_of("dp_shard=2", 3))
    if channel.rank == 0:
        engine.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    engine.step(batch_of(channel.rank))


def stepping(on_all: bool = True, **step: Any) -> Callable[[], None]:
    def run(channel: Channel) -> None:
        engine = engine_of(channel, sw.Plan(mesh=DATA))
        try:
            engine.step(batch_of(0), **(step if channel.rank or on_all else {}))
        finally:
            assert all(each.requires_grad for each in engine.model.parameters())
            engine.step(batch_of(0))

    return lambda: raise_of_all(2, run)


def grouped(groups: Any, **step: Any) -> Callable[[], None]:
    return lambda: engine_of(alone(), groups=groups).step(batch_of(0), **step)


REFUSED = Refusals(
    "engine.trained_parameters",
    {
        "other parameters are frozen on some ranks": lambda: raise_of_all(2, on_ranks_that_freeze_others),
        "what was unfrozen is in no optimizer": lambda: raise_of_all(2, in_no_optimizer),
        "a group of a stranger on one rank": lambda: raise_of_all(2, with_a_stranger_on_one_rank),
        "a group of a stranger": lambda: with_a_group(lambda model: [nn.Parameter(torch.ones(2))]),
        "a parameter in two groups": lambda: with_a_group(lambda model: list(model.embed.parameters())),
        "no such group": stepping(only="painter"),
        "no group": stepping(only=()),
        "a number": stepping(only=3),
        "nested names": stepping(only=["ends", ["middle"]]),
        "a loss that is no function": stepping(loss=3),
        "a group on one rank": stepping(False, only="ends"),
        "no such parameter": grouped({"painter": "brush.*"}),
        "no names": grouped({"painter": []}),
        "a number for names": grouped({"painter": 3}),
        "an engine without groups": grouped(None, only="ends"),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_and_the_engine_goes_on(case: str) -> None:
    REFUSED.check(case)
