"""Parameters that are frozen and unfrozen between steps, and groups that come later: as in a plain loop."""

from collections.abc import Callable
from inspect import isroutine
from itertools import pairwise as pairs
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import shardwise as sw
from shardwise.comm import Channel, alone
from shardwise.errors import MismatchError, OptimizerError
from tests.covering import pairwise
from tests.engine.refusals import same_error_everywhere

Found = tuple[list[tuple[float, float]], dict[str, torch.Tensor]]
STEPS = 7
RULES = {"blocks.*.up": "column", "blocks.*.down": "row"}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x)))
        return out


class Net(nn.Module):
    """Of a transformer what counts here: a stack of alike blocks; the head may be tied to what comes first."""

    def __init__(self, *, is_tied: bool) -> None:
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


def net(*, is_tied: bool = False) -> Net:
    torch.manual_seed(0)
    return Net(is_tied=is_tied)


def batch_of(step: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {name: torch.randn(8, 4, generator=generator) for name in ("x", "y")}


def loss_of(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return F.mse_loss(output, batch["y"])


def turn(module: nn.Module, on: bool) -> None:
    for each in module.parameters():
        each.requires_grad_(on)


Story = Callable[[Net, torch.optim.Optimizer, list[Any], int], None]
"""f(model, optimizer, kept, step): what the loop does before a step; `kept` is from before parallelize."""


def gradually(model: Net, _: torch.optim.Optimizer, kept: list[Any], step: int) -> None:
    """From the top down, through parameters that the loop has held since before parallelize; the optimizer has all."""
    if step == 0:
        kept += [list(block.parameters()) for block in model.blocks]
        turn(model.blocks, False)
    if step in (2, 4):
        for each in kept[2 - step // 2]:
            each.requires_grad_(True)


def with_new_groups(model: Net, optimizer: torch.optim.Optimizer, _: list[Any], step: int) -> None:
    """The optimizer gets each block when it is unfrozen."""
    if step == 0:
        turn(model.blocks, False)
    if step in (2, 4):
        block = model.blocks[2 - step // 2]
        turn(block, True)
        optimizer.add_param_group({"params": list(block.parameters()), "lr": 0.02, "weight_decay": 0.3})


def off_and_on(model: Net, _: torch.optim.Optimizer, kept: list[Any], step: int) -> None:
    """What has state rests for some steps, once together with what has just been unfrozen, and goes on."""
    if step == 0:
        turn(model.blocks[1], False)
    if step == 1:
        turn(model.blocks[0], False)
    if step == 2:
        turn(model.embed, False)  # tied to the head, or not
        turn(model.blocks[1], True)
    if step == 4:
        turn(model.embed, True)
        turn(model.head, False)
    if step == 5:
        turn(model.head, True)
        turn(model.blocks[0], True)


STORIES = [gradually, with_new_groups, off_and_on]


def begun(model: Net, story: Story) -> tuple[torch.optim.Optimizer, Any, list[Any]]:
    kept: list[Any] = []
    parameters = [*model.parameters()]
    if story is with_new_groups:
        parameters = [each for name, each in model.named_parameters() if "blocks" not in name]
    optimizer = torch.optim.AdamW(parameters, lr=0.05, weight_decay=0.1)
    story(model, optimizer, kept, 0)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), kept


def plain(story: Story, *, clip: float | None, parts: int = 1, is_tied: bool = False) -> Found:
    model = net(is_tied=is_tied)
    optimizer, scheduler, kept = begun(model, story)
    figures = []
    for step in range(STEPS):
        if step:
            story(model, optimizer, kept, step)
        optimizer.zero_grad()
        total = 0.0
        for rows in zip(*(each.chunk(parts) for each in batch_of(step).values()), strict=True):
            loss = loss_of(model(rows[0]), {"y": rows[1]})
            (loss / parts if parts > 1 else loss).backward()
            total += loss.item() / parts
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        norm = nn.utils.get_total_norm(gradients).item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        figures.append((total, norm))
    return figures, {name: each.detach().clone() for name, each in model.named_parameters()}


def ours(channel: sw.Channel, plan: sw.Plan, story: Story, *, is_tied: bool = False, folder: Any = None) -> Found:
    model = net(is_tied=is_tied)
    optimizer, scheduler, kept = begun(model, story)
    held = {name: id(each) for name, each in model.named_parameters()}
    engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
    rank, ranks = plan.mesh.data_rank(channel.rank), plan.mesh.num_data_ranks
    figures = []
    for step in range(STEPS):
        if step:
            story(model, optimizer, kept, step)
        report = engine.step({name: each.chunk(ranks)[rank] for name, each in batch_of(step).items()})
        scheduler.step()
        figures.append((report.loss, report.grad_norm))
        if step == 5 and folder is not None:  # what was saved comes back, whatever is frozen
            sw.save(folder / "save", engine)
            sw.load(folder / "save", engine)
    assert engine.counters.updates == engine.steps == STEPS
    assert {name: id(each) for name, each in model.named_parameters()} == held  # the user's own objects
    assert engine.optimizer is optimizer
    return figures, {name: values.cpu().clone() for name, values in sw.full(engine)}


def is_close(one: Found, other: Found) -> None:
    torch.testing.assert_close(torch.tensor(other[0]), torch.tensor(one[0]), rtol=2e-6, atol=1e-6)
    for name, values in one[1].items():
        torch.testing.assert_close(other[1][name], values, rtol=0, atol=5e-7)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("story", STORIES)
def test_one_rank_freezes_and_unfreezes_as_a_plain_loop_does_to_the_bit(
    story: Story, clip: float | None, is_tied: bool
) -> None:
    expected, values = plain(story, clip=clip, is_tied=is_tied)
    figures, found = ours(alone(), sw.Plan(clip_grad_norm=clip), story, is_tied=is_tied)
    assert figures == expected
    for name, each in values.items():
        assert torch.equal(found[name], each), name


@pytest.mark.parametrize(
    ("mesh", "stage", "k", "story", "on_device", "is_tied"),
    pairwise(
        ["dp_shard=2", "pp=2", "tp=2", "pp=2,dp_shard=2", "dp_replicate=2,tp=2"],
        [0, 1, 2, 3],
        [1, 2],
        STORIES,
        [False, True],
        [False, True],
    ),
)
def test_ranks_freeze_and_unfreeze_as_a_plain_loop_does(
    fake: str, tmp_path: Any, mesh: str, stage: int, k: int, story: Story, on_device: bool, is_tied: bool
) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=200),
        merge=sw.Merge(microbatches=k),
        tensor=sw.Tensor(rules=RULES) if "tp" in mesh else sw.Tensor(),
        clip_grad_norm=0.5,
    )

    def run(channel: sw.Channel) -> Found:
        return ours(channel, plan, story, is_tied=is_tied, folder=tmp_path)

    found = sw.simulate(plan.mesh.size, run, device=fake if on_device else "cpu")
    assert all(each[0] == found[0][0] for each in found)
    is_close(plain(story, clip=0.5, parts=k * plan.mesh.num_data_ranks, is_tied=is_tied), found[0])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_frozen_is_not_reduced_and_keeps_its_master_and_state(stage: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=stage, bucket_bytes=1),
        precision=sw.Precision(compute="bfloat16"),
    )

    def run(channel: sw.Channel) -> list[int]:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        batch = {name: each.bfloat16() for name, each in batch_of(channel.rank).items()}
        sums = [engine.counters.reduce_scatters]
        for step in range(3):
            if step:
                turn(model.blocks, step == 2)
            before = {piece: values.clone() for piece, values in engine.state().items()}
            engine.step(batch)
            sums.append(engine.counters.reduce_scatters)
            still = [p.name for p, values in engine.state().items() if p in before and torch.equal(values, before[p])]
            if step == 1:
                assert sum("blocks" in name for name in still) == sum("blocks" in piece.name for piece in before)
                assert not any("blocks" in piece.name for piece in engine.gradients())
        return [after - before for before, after in pairs(sums)]

    counts = sw.simulate(2, run)
    assert counts[0] == counts[1]
    assert counts[0][0] - counts[0][1] == 8  # parameters of the blocks, with a bucket each
    assert counts[0][2] == counts[0][0]


def test_ranks_that_freeze_others_are_refused_and_go_on_when_they_agree() -> None:
    def run(channel: sw.Channel) -> None:
        model = net()
        optimizer = torch.optim.AdamW(model.parameters())
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2))
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        turn(model.head, channel.rank == 0)
        try:
            engine.step(batch_of(0))
        finally:
            turn(model.head, False)
            engine.step(batch_of(0))

    error = same_error_everywhere(2, run)
    assert type(error) is MismatchError
    assert "rank 0 trains all, and rank 1 trains 'head.bias', 'head.weight' frozen" in str(error)


def test_what_is_unfrozen_and_in_no_optimizer_is_refused_and_the_way_out_works() -> None:
    def run(channel: sw.Channel) -> None:
        model = net()
        turn(model.embed, False)
        others = [each for name, each in model.named_parameters() if "embed" not in name]
        optimizer = torch.optim.AdamW(others)
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3))
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        turn(model.embed, True)
        with pytest.raises(OptimizerError, match=r"were unfrozen, and no optimizer has them: 'embed.weight'"):
            engine.step(batch_of(0))
        assert engine.evaluate(batch_of(0)).loss > 0
        turn(model.embed, False)
        engine.step(batch_of(0))
        optimizer.add_param_group({"params": [model.embed.weight], "lr": 0.5})
        engine.step(batch_of(0))  # in a group and frozen
        before = dict(sw.full(engine))["embed.weight"].clone()
        engine.step(batch_of(1))
        assert torch.equal(dict(sw.full(engine))["embed.weight"], before)
        turn(model.embed, True)
        engine.step(batch_of(0))
        assert not torch.equal(dict(sw.full(engine))["embed.weight"], before)

    sw.simulate(2, run)


def test_groups_that_do_not_fit_the_model_are_refused_and_the_engine_goes_on() -> None:
    def engine_of() -> tuple[sw.Engine[Net], torch.optim.Optimizer]:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return sw.parallelize(model, sw.Plan(), optimizer=optimizer, loss=loss_of, channel=alone()), optimizer

    engine, optimizer = engine_of()
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(
        OptimizerError, match=r"have \[11, 1\] parameters here, and had \[11\] after the last step; 0 of"
    ):
        engine.step(batch_of(0))
    del optimizer.param_groups[1]
    engine.step(batch_of(0))
    optimizer.add_param_group({"params": [engine.model.embed.weight]})  # it is in the first group already
    with pytest.raises(OptimizerError, match=r"these are in several groups: 'embed\.weight'"):
        engine.step(batch_of(1))
    del optimizer.param_groups[1]
    other, _ = engine_of()
    other.step(batch_of(0))
    assert engine.step(batch_of(1)).loss == other.step(batch_of(1)).loss


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_computes_in_bfloat16_keeps_every_bit_of_its_master_when_it_is_unfrozen(stage: int) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=stage), precision=sw.Precision(compute="bfloat16")
    )

    def run(channel: sw.Channel) -> dict[str, torch.Tensor]:
        model = net()
        turn(model.blocks, False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        batch = {name: each.bfloat16() for name, each in batch_of(channel.rank).items()}
        engine.step(batch)
        turn(model.blocks, True)
        engine.step(batch)
        turn(model.blocks, False)
        engine.step(batch)
        return {name: values.clone() for name, values in sw.full(engine, optimizer=True)}

    found = sw.simulate(2, run)[0]
    for name, values in net().named_parameters():
        assert torch.equal(found.get(f"optimizer/{name}/master", found[name]), values), name


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    ("mesh", "stage", "story"),
    [("dp_shard=2", 3, with_new_groups), ("pp=2", 1, off_and_on), ("dp_shard=2", 1, gradually)],
)
def test_an_average_of_the_weights_goes_on_as_that_of_a_plain_loop(
    mesh: str, stage: int, story: Story, is_tied: bool
) -> None:
    plan = sw.Plan(
        mesh=sw.Mesh.parse(mesh), sharding=sw.Sharding(stage=stage), average=sw.Average(decay=0.9), clip_grad_norm=0.5
    )

    def run(channel: sw.Channel) -> float:
        model = net(is_tied=is_tied)
        optimizer, _, kept = begun(model, story)
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        rank, ranks = plan.mesh.data_rank(channel.rank), plan.mesh.num_data_ranks
        for step in range(STEPS):
            if step:
                story(model, optimizer, kept, step)
            engine.step({name: each.chunk(ranks)[rank] for name, each in batch_of(step).items()})
        with engine.averaged():
            return engine.evaluate(batch_of(STEPS)).loss

    model = net(is_tied=is_tied)
    optimizer, _, kept = begun(model, story)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for step in range(STEPS):
        if step:
            story(model, optimizer, kept, step)
        optimizer.zero_grad()
        loss_of(model(batch_of(step)["x"]), batch_of(step)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        average.update_parameters(model)
    expected = loss_of(average.module(batch_of(STEPS)["x"]), batch_of(STEPS)).item()
    assert sw.simulate(2, run) == pytest.approx([expected, expected], rel=2e-6)


@pytest.mark.parametrize(
    "plan",
    [
        sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
        sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(balance="flops")),
    ],
    ids=["tp", "pp"],
)
def test_what_was_decided_on_a_sample_stays_as_it_was(plan: sw.Plan) -> None:
    """An engine that goes on has no batch to run the model on, and needs none."""

    def on_rank(channel: sw.Channel) -> list[float]:
        model = net()
        model.blocks.requires_grad_(False)
        engine: sw.Engine = sw.parallelize(
            model,
            plan,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            loss=lambda output, batch: F.mse_loss(output, batch["y"]),
            channel=channel,
            sample=batch_of(0),
        )
        losses = [engine.step(batch_of(0)).loss]
        before = engine.tensor_decision
        model.blocks.requires_grad_(True)
        losses.append(engine.step(batch_of(1)).loss)
        engine = sw.relayout(engine, plan)
        assert engine.tensor_decision == before
        return [*losses, engine.step(batch_of(2)).loss]

    model = net()
    expected = []
    for step in range(3):
        model.blocks.requires_grad_(step > 0)
        loss = F.mse_loss(model(batch_of(step)["x"]), batch_of(step)["y"])
        model.zero_grad()
        loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        expected.append(loss.item())
    for found in sw.simulate(2, on_rank):
        assert found == pytest.approx(expected, rel=1e-5)


PLANS_OF_REFITS = {
    "alone": sw.Plan(average=sw.Average(decay=0.5)),
    "dp": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(stages={"embed": 0, "blocks": 0, "head": 1})),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules=RULES)),
}

SETTINGS = {"see_losses", "asked_to_stop", "successor", "rebuild"}
"""Public attributes that are no objects with a life of their own."""


def values_in(held: object) -> dict[str, Any]:
    """What a program reads of an object of the engine: its public attributes and properties."""
    names = [name for name in dir(held) if not name.startswith("_")]
    return {name: each for name in names if not isroutine(each := getattr(held, name))}


@pytest.mark.parametrize("name", PLANS_OF_REFITS)
def test_all_that_a_program_may_hold_of_an_engine_survives_what_it_takes_in(name: str) -> None:
    plan = PLANS_OF_REFITS[name]

    def run(channel: sw.Channel) -> None:
        model = net()
        turn(model.embed, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        share = {key: each.chunk(plan.mesh.num_data_ranks)[0] for key, each in batch_of(0).items()}
        engine.step(share)
        held = {key: each for key, each in values_in(engine).items() if key not in SETTINGS}
        assert {"recorder", "counters", "activations", "optimizers", "channel", "model"} <= held.keys()
        noted: dict[str, list[Any]] = {key: [] for key in ("stepped", "losses", "asked", "updates", "spans")}
        stepped, losses, asked, updates, spans = noted.values()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5**at)
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        engine.see_losses = losses.append
        engine.extra = "set by an adapter"  # type: ignore[attr-defined]
        step, stop_asking = engine.step, engine.ask_in_steps(lambda: len(asked.__iadd__([1])) < 0)
        held["recorder"].spans, held["recorder"].updates = spans, updates
        held["recorder"].clock = iter(range(10**6)).__next__
        turn(model.embed, True)
        step(share)
        schedule.step()
        assert [len(each) for each in (stepped, losses, asked, updates)] == [1, 1, 1, 1]
        assert spans
        assert engine.extra == "set by an adapter"  # type: ignore[attr-defined]
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert held["counters"].updates == engine.counters.updates == 2
        for key, each in held.items():
            now = getattr(engine, key)
            if isinstance(each, int | str | tuple | sw.Plan):
                continue
            assert now is each or values_in(now) == values_in(each), key
        stop_asking()
        engine.step(share)
        assert [len(each) for each in (stepped, losses, asked, updates)] == [2, 2, 1, 2]
        if plan.average is not None:
            assert engine.num_averaged == 3
            with engine.averaged():
                engine.evaluate(share)

    sw.simulate(plan.mesh.size, run)


class TurnsOn(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.requires_grad_(True)
        out: torch.Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_step_leaves_out_stays_where_a_forward_turns_its_gradient_on(stage: int) -> None:
    def fn(channel: Channel) -> list[list[float]]:
        losses = []
        for kind in (nn.Sequential, TurnsOn):
            torch.manual_seed(0)
            engine = sw.parallelize(
                kind(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)),
                sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=stage, bucket_bytes=600)),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                loss=lambda output, batch: output.square().mean(),
                groups={"first": "0.*", "last": "2.*"},
                channel=channel,
            )
            losses.append([engine.step(torch.ones(2, 64), only=each).loss for each in (None, "last", "first", None)])
        return losses

    for plain, turning in sw.simulate(2, fn):
        assert turning == plain
