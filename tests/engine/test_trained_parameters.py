"""Parameters that are frozen and unfrozen between steps, and groups that come later: as in a plain loop."""

from collections.abc import Callable, Iterator
from itertools import chain
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
from tests.engine.loops import plan_of, share
from tests.engine.refusals import same_error_everywhere
from tests.oracle.program import seeded
from tests.refusals import Refusals

Batch = dict[str, torch.Tensor]
Story = Callable[[Any, Any], Iterator[Batch]]
"""f(model, optimizer): what the loop does before each step happens before its batch is given."""
STEPS = 7
RULES = {"blocks.*.up": "column", "blocks.*.down": "row"}


def batch_of(step: int) -> Batch:
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


def gradually(model: Any, _: Any) -> Iterator[Batch]:
    """From the top down, through parameters that the loop has held since before parallelize; the optimizer has all."""
    kept = [list(block.parameters()) for block in model.blocks]
    turn(model.blocks, False)
    for step in range(STEPS):
        for each in kept[2 - step // 2] if step in (2, 4) else ():
            each.requires_grad_(True)
        yield batch_of(step)


def with_new_groups(model: Any, optimizer: Any) -> Iterator[Batch]:
    """The optimizer gets each block when it is unfrozen."""
    turn(model.blocks, False)
    for step in range(STEPS):
        if step in (2, 4):
            block = model.blocks[2 - step // 2]
            turn(block, True)
            optimizer.add_param_group({"params": list(block.parameters()), "lr": 0.02, "weight_decay": 0.3})
        yield batch_of(step)


def off_and_on(model: Any, _: Any) -> Iterator[Batch]:
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
        yield batch_of(step)


STORIES: list[Story] = [gradually, with_new_groups, off_and_on]
Found = tuple[list[tuple[float, float]], dict[str, torch.Tensor], float]
"""Losses and norms, parameters, and what the average of the weights gives in the end."""


def begun(story: Story, is_tied: bool) -> tuple[Any, torch.optim.Optimizer, Any, Iterator[Batch]]:
    model = seeded(lambda: Net(is_tied=is_tied))()
    every = [each for name, each in model.named_parameters() if story is not with_new_groups or "blocks" not in name]
    optimizer = torch.optim.AdamW(every, lr=0.05, weight_decay=0.1)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), story(model, optimizer)


def plain(story: Story, parts: int = 1, *, clip: float | None = 0.5, is_tied: bool = False) -> Found:
    model, optimizer, scheduler, batches = begun(story, is_tied)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    figures = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for x, y in zip(*(each.chunk(parts) for each in batch.values()), strict=True):
            loss = loss_of(model(x), {"y": y})
            (loss / parts if parts > 1 else loss).backward()
            total += loss.item() / parts
        norm = nn.utils.get_total_norm([each.grad for each in model.parameters() if each.grad is not None]).item()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        scheduler.step()
        average.update_parameters(model)
        figures.append((total, norm))
    held_out = loss_of(average.module(batch["x"]), batch).item()
    return figures, {name: each.detach().clone() for name, each in model.named_parameters()}, held_out


def ours(channel: Channel, plan: sw.Plan, story: Story, *, is_tied: bool = False, folder: Any = None) -> Found:
    model, optimizer, scheduler, batches = begun(story, is_tied)
    first = next(batches)
    held = {name: id(each) for name, each in model.named_parameters()}
    engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
    figures = []
    for batch in chain([first], batches):
        report = engine.step(share(engine, batch))
        scheduler.step()
        figures.append((report.loss, report.grad_norm))
        if len(figures) == 6 and folder is not None:  # what was saved comes back, whatever is frozen
            sw.save(folder / "save", engine)
            sw.load(folder / "save", engine)
    assert engine.counters.updates == engine.steps == STEPS
    assert {name: id(each) for name, each in model.named_parameters()} == held, "the user's own objects"
    assert engine.optimizer is optimizer
    held_out = 0.0
    if plan.average is not None:
        with engine.averaged():
            held_out = engine.evaluate(share(engine, batch)).loss
    return figures, {name: values.cpu().clone() for name, values in sw.full(engine)}, held_out


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("story", STORIES)
def test_one_rank_trains_as_a_plain_loop_does_to_the_bit(story: Story, clip: float | None, is_tied: bool) -> None:
    figures, values, _ = ours(alone(), sw.Plan(clip_grad_norm=clip), story, is_tied=is_tied)
    expected, wanted, _ = plain(story, clip=clip, is_tied=is_tied)
    assert figures == expected
    assert all(torch.equal(values[name], each) for name, each in wanted.items())


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
def test_ranks_train_as_a_plain_loop_does(
    fake: str, tmp_path: Any, mesh: str, stage: int, k: int, story: Story, on_device: bool, is_tied: bool
) -> None:
    """Also an average of the weights."""
    settings: Any = {"clip_grad_norm": 0.5, "average": sw.Average(decay=0.9)}
    plan = plan_of(mesh, stage, k, sharding={"bucket_bytes": 200}, rules=RULES, **settings)

    def run(channel: Channel) -> Found:
        return ours(channel, plan, story, is_tied=is_tied, folder=tmp_path)

    found = sw.simulate(plan.mesh.size, run, device=fake if on_device else "cpu")
    assert all((each[0], each[2]) == (found[0][0], found[0][2]) for each in found)
    expected = plain(story, k * plan.mesh.num_data_ranks, is_tied=is_tied)
    torch.testing.assert_close(torch.tensor(found[0][0]), torch.tensor(expected[0]), rtol=2e-6, atol=1e-6)
    for name, values in expected[1].items():
        torch.testing.assert_close(found[0][1][name], values, rtol=0, atol=5e-7)
    assert found[0][2] == pytest.approx(expected[2], rel=2e-6)


def engine_of(channel: Channel, plan: sw.Plan | None = None, optimizer: Any = torch.optim.AdamW, **more: Any) -> Any:
    model = seeded(Net)()
    return sw.parallelize(model, plan or sw.Plan(), optimizer=optimizer, loss=loss_of, channel=channel, **more)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_is_frozen_is_not_reduced_and_keeps_its_master_and_state(stage: int) -> None:
    plan = plan_of("dp_shard=2", stage, sharding={"bucket_bytes": 1}, compute="bfloat16")

    def run(channel: Channel) -> list[int]:
        engine = engine_of(channel, plan)
        sums = [engine.counters.reduce_scatters]
        for step in range(3):
            if step:
                turn(engine.model.blocks, step == 2)
            before = {piece: values.clone() for piece, values in engine.state().items()}
            engine.step(batch_of(channel.rank))
            sums.append(engine.counters.reduce_scatters)
            still = [p.name for p, values in engine.state().items() if p in before and torch.equal(values, before[p])]
            if step == 1:
                assert sum("blocks" in name for name in still) == sum("blocks" in piece.name for piece in before)
                assert not any("blocks" in piece.name for piece in engine.gradients())
        return [after - before for before, after in pairs(sums)]

    one, other = sw.simulate(2, run)
    assert one == other
    assert one[0] == one[1] + 8 == one[2], "parameters of the blocks, with a bucket each"


def on_ranks_that_freeze_others() -> None:
    def run(channel: Channel) -> None:
        engine = engine_of(channel, plan_of("dp_shard=2"))
        turn(engine.model.head, channel.rank == 0)
        try:
            engine.step(batch_of(0))
        finally:  # they go on when they agree
            turn(engine.model.head, False)
            engine.step(batch_of(0))

    raise same_error_everywhere(2, run)


def in_no_optimizer() -> None:
    def run(channel: Channel) -> None:
        model = seeded(Net)()
        turn(model.embed, False)
        optimizer = torch.optim.AdamW([each for name, each in model.named_parameters() if "embed" not in name])
        engine = sw.parallelize(model, plan_of("dp_shard=2", 3), optimizer=optimizer, loss=loss_of, channel=channel)

        def embedding() -> torch.Tensor:
            return dict(sw.full(engine))["embed.weight"].clone()

        turn(model.embed, True)
        try:
            engine.step(batch_of(0))
        finally:  # the way out works
            assert engine.evaluate(batch_of(0)).loss > 0
            turn(model.embed, False)
            engine.step(batch_of(0))
            optimizer.add_param_group({"params": [model.embed.weight], "lr": 0.5})
            engine.step(batch_of(0))  # in a group and frozen
            before = embedding()
            engine.step(batch_of(1))
            assert torch.equal(embedding(), before)
            turn(model.embed, True)
            engine.step(batch_of(0))
            assert not torch.equal(embedding(), before)

    raise same_error_everywhere(2, run)


def with_a_group(parameters: Callable[[Net], list[nn.Parameter]]) -> None:
    engine, other = (engine_of(alone(), optimizer=lambda each: torch.optim.SGD(each, lr=0.1)) for _ in range(2))
    engine.optimizer.add_param_group({"params": parameters(engine.model)})
    try:
        engine.step(batch_of(0))
    finally:  # it goes on without the group
        del engine.optimizer.param_groups[1]
        assert engine.step(batch_of(1)).loss == other.step(batch_of(1)).loss


REFUSED = Refusals(
    "engine.trained_parameters",
    {
        "other parameters are frozen on some ranks": on_ranks_that_freeze_others,
        "what was unfrozen is in no optimizer": in_no_optimizer,
        "a group of a stranger": lambda: with_a_group(lambda model: [nn.Parameter(torch.ones(2))]),
        "a parameter in two groups": lambda: with_a_group(lambda model: list(model.embed.parameters())),
    },
    kind=(MismatchError, OptimizerError),
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_trained_is_refused_and_the_engine_goes_on(case: str) -> None:
    REFUSED.check(case)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_what_computes_in_bfloat16_keeps_every_bit_of_its_master_when_it_is_unfrozen(stage: int) -> None:
    def run(channel: Channel) -> dict[str, torch.Tensor]:
        model = seeded(Net)()
        turn(model.blocks, False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        plan = plan_of("dp_shard=2", stage, compute="bfloat16")
        engine = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        for on in (False, True, False):
            turn(model.blocks, on)
            engine.step({name: each.bfloat16() for name, each in batch_of(channel.rank).items()})
        return {name: values.clone() for name, values in sw.full(engine, optimizer=True)}

    found = sw.simulate(2, run)[0]
    for name, values in seeded(Net)().named_parameters():
        assert torch.equal(found.get(f"optimizer/{name}/master", found[name]), values), name


HELD = ("counters", "optimizers", "channel", "model", "trained_batches")
"""What a program may keep of an engine."""


@pytest.mark.parametrize(
    "plan",
    [
        sw.Plan(average=sw.Average(decay=0.5)),
        plan_of("dp_shard=2", 3),
        plan_of("pp=2", stages={"embed": 0, "blocks": 0, "head": 1}),
        plan_of("tp=2", rules=RULES),
    ],
    ids=["alone", "dp", "pp", "tp"],
)
def test_all_that_a_program_may_hold_of_an_engine_survives_what_it_takes_in(plan: sw.Plan) -> None:
    def run(channel: Channel) -> None:
        model = seeded(Net)()
        turn(model.embed, False)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        engine: Any = sw.parallelize(model, plan, optimizer=optimizer, loss=loss_of, channel=channel)
        engine.step(share(engine, batch_of(0)))
        held = {name: getattr(engine, name) for name in HELD}
        noted: dict[str, list[Any]] = {key: [] for key in ("stepped", "losses", "asked", "updates", "spans")}
        stepped, losses, asked, updates, spans = noted.values()
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda at: 0.5**at)
        optimizer.register_step_post_hook(lambda *_: stepped.append(1))
        engine.see_losses = losses.append
        engine.extra = "set by an adapter"
        step, stop_asking = engine.step, engine.ask_in_steps(lambda: len(asked.__iadd__([1])) < 0)
        recorder = engine.recorder
        recorder.spans, recorder.updates, recorder.clock = spans, updates, iter(range(10**6)).__next__
        turn(model.embed, True)
        step(share(engine, batch_of(0)))
        schedule.step()
        assert [len(each) for each in (stepped, losses, asked, updates)] == [1, 1, 1, 1]
        assert spans
        assert engine.extra == "set by an adapter"
        assert optimizer.param_groups[0]["lr"] == 0.05
        assert held["counters"].updates == engine.counters.updates == 2
        assert all(getattr(engine, name) in (each,) for name, each in held.items())
        stop_asking()
        engine.step(share(engine, batch_of(0)))
        assert [len(each) for each in (stepped, losses, asked, updates)] == [2, 2, 1, 2]
        if plan.average is not None:
            assert engine.num_averaged == 3
            with engine.averaged():
                engine.evaluate(batch_of(0))

    sw.simulate(plan.mesh.size, run)


class TurnsOn(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.requires_grad_(True)
        out: torch.Tensor = super().forward(x)  # type: ignore[no-untyped-call]
        return out


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_what_a_step_leaves_out_stays_where_a_forward_turns_its_gradient_on(stage: int) -> None:
    def run(channel: Channel) -> list[list[float]]:
        losses = []
        for kind in (nn.Sequential, TurnsOn):
            engine = sw.parallelize(
                seeded(lambda kind=kind: kind(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2)))(),  # type: ignore[misc]
                plan_of("dp_shard=2", stage, sharding={"bucket_bytes": 600}),
                optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
                loss=lambda output, batch: output.square().mean(),
                groups={"first": "0.*", "last": "2.*"},
                channel=channel,
            )
            losses.append([engine.step(torch.ones(2, 64), only=each).loss for each in (None, "last", "first", None)])
        return losses

    for without, turning in sw.simulate(2, run):
        assert turning == without
