"""Averages of the weights are those of torch's `AveragedModel`, to the bit, under every layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import shardwise as sw
from shardwise.errors import CheckpointError, ModelError, PeerError, PlanError
from tests.checkpoint.layouts import LAYOUTS, Whole, engine_of, odd, train
from tests.engine.expected import adamw, points, square_loss
from tests.engine.models import Residual, word_batch, word_loss
from tests.engine.oracle import share_of

EMA = sw.Average(decay=0.9)
MEAN = sw.Average(start=1)
AVERAGE = "/weight_average"


def multi_of(rule: sw.Average) -> Any:
    return get_swa_multi_avg_fn() if rule.decay is None else get_ema_multi_avg_fn(rule.decay)


def averages_of(whole: Whole) -> Whole:
    """By parameter."""
    return {name.split("/")[1]: each for name, each in whole.items() if name.endswith(AVERAGE)}


def weights_of(whole: Whole) -> Whole:
    """By parameter: the master, where there is one."""
    masters = {name.split("/")[1]: each for name, each in whole.items() if name.endswith("/master")}
    return {name: each for name, each in whole.items() if not name.startswith("optimizer/")} | masters


def same(one: Whole, other: Whole) -> None:
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []


def working_copies(engine: sw.Engine) -> Whole:
    """Of the parameters that are whole on this rank."""
    whole = {} if engine.plan.sharding.stage == 3 else dict(engine.model.named_parameters())
    return {name: each.detach().clone() for name, each in whole.items() if not each.is_meta}


class Values(nn.Module):
    """Tensors as the parameters of a plain module, for `AveragedModel`."""

    def __init__(self, values: Whole) -> None:
        super().__init__()
        self.values = nn.ParameterList(nn.Parameter(each.clone(), requires_grad=False) for each in values.values())

    @torch.no_grad()
    def take(self, values: Whole) -> None:
        for mine, new in zip(self.values, values.values(), strict=True):
            mine.copy_(new)


class Expected:
    """What `AveragedModel` makes of the weights that an engine has after its steps."""

    def __init__(self, rule: sw.Average, first: Whole) -> None:
        self.names = list(first)
        self.plain = Values(first)
        self.averaged = AveragedModel(self.plain, multi_avg_fn=multi_of(rule))

    def update(self, weights: Whole) -> None:
        self.plain.take(weights)
        self.averaged.update_parameters(self.plain)

    def values(self) -> Whole:
        return dict(zip(self.names, (each.detach() for each in self.averaged.module.parameters()), strict=True))


def full_state(engine: sw.Engine) -> Whole:
    return dict(sw.full(engine, optimizer=True))


RULES = {"ema": EMA, "mean": MEAN, "seldom": sw.Average(decay=0.75, every=2)}

ALWAYS = [
    *("one-stage0-bf16", "two-stage0", "three-whole-bf16", "four-replicas", "stages-two-x-two", "stage2-replicas"),
    *("stage3-replicas-bf16", "stage3-stages", "tensor-two-parts-x-two", "tensor-two-stages"),
]
CASES = [
    pytest.param(name, list(RULES)[at % len(RULES)], marks=() if name in ALWAYS else pytest.mark.stress)
    for at, name in enumerate([*ALWAYS, *(name for name in LAYOUTS if name not in ALWAYS)])
]
"""Every layout, and every rule under all kinds of them."""


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_averages_are_those_of_torch_and_the_weights_come_back(name: str, rule: str) -> None:
    average = RULES[rule]
    plan = replace(LAYOUTS[name], average=average)

    def run(channel: sw.Channel) -> tuple[list[tuple[Whole, Whole]], Whole, float]:
        engine = engine_of(plan, channel)
        seen: list[tuple[Whole, Whole]] = [(full_state(engine), {})]
        for update in range(4):
            train(engine, channel, [update])
            before, local = full_state(engine), {piece: each.clone() for piece, each in engine.state().items()}
            copies = working_copies(engine)
            with engine.averaged():
                inside = dict(sw.full(engine, optimizer=True))
                loss = engine.evaluate(share(engine, 9)).loss
            assert all(torch.equal(local[piece], each) for piece, each in engine.state().items())
            same(working_copies(engine), copies)
            seen.append((before, inside))
        return seen, full_state(engine), loss

    ranks = sw.simulate(plan.mesh.size, run)
    seen, after, loss = ranks[0]
    for (one, two), (other, another) in zip(seen, ranks[-1][0], strict=True):
        same(one, other)
        same(two, another)
    names = list(averages_of(seen[0][0]))
    assert {"embedding.weight", "unused", "cube"} <= set(names)
    assert not {"nothing", "order"} & set(names)
    expected = Expected(average, {name: weights_of(seen[0][0])[name] for name in names})
    for step, (before, inside) in enumerate(seen[1:], start=1):
        weights = {name: weights_of(before)[name] for name in names}
        if average.averages(step):
            expected.update(weights)
        averages = averages_of(before)
        same(averages, expected.values())
        assert not all(torch.equal(averages[name], weights[name]) for name in names) or step < 4
        # Inside: the averages as the weights, cast as masters are, and no state of other weights.
        assert not any(key.startswith("optimizer/") and not key.endswith("/master") for key in inside)
        assert all(torch.equal(weights_of(inside)[name], averages[name]) for name in names)
        assert all(torch.equal(inside[name], averages[name].to(inside[name].dtype)) for name in names)
    assert sw.Plan.parse(plan.text()) == plan
    same(after, seen[-1][0])

    # Training has not noticed, and the loss is that of a model with the averages.
    def without(channel: sw.Channel) -> tuple[Whole, float]:
        engine = engine_of(replace(plan, average=None), channel)
        train(engine, channel, range(4))
        return full_state(engine), alone(channel)

    def alone(channel: sw.Channel) -> float:
        model = odd()
        model.load_state_dict({key: each for key, each in seen[-1][1].items() if key in model.state_dict()})
        engine = sw.parallelize(
            model, replace(plan, average=None), optimizer=adamw_of_trained, loss=word_loss, channel=channel
        )
        return engine.evaluate(share(engine, 9)).loss

    trained, wanted = sw.simulate(plan.mesh.size, without)[0]
    same({name: each for name, each in after.items() if not name.endswith(AVERAGE)}, trained)
    assert loss == wanted


def adamw_of_trained(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in parameters if each.requires_grad])


def share(engine: sw.Engine, seed: int) -> dict[str, Any]:
    mesh = engine.plan.mesh
    data_ranks = mesh.peers(engine.channel.rank, ("dp_replicate", "dp_shard"))
    return share_of(word_batch(seed, 28), data_ranks.index(engine.channel.rank), len(data_ranks))


# One process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_one_rank_equals_a_plain_loop_to_the_bit(rule: str) -> None:
    average = RULES[rule]
    model = Residual()
    optimizer = adamw(list(model.parameters()))
    averaged = AveragedModel(model, multi_avg_fn=multi_of(average))
    engine = sw.parallelize(Residual(), sw.Plan(average=average), optimizer=adamw, loss=square_loss)
    for step in range(1, 8):
        batch = points(step, 6)
        optimizer.zero_grad()
        square_loss(model(batch["x"]), batch).backward()
        optimizer.step()
        engine.step(batch)
        if step > average.start and (step - average.start) % average.every == 0:
            averaged.update_parameters(model)
    plain = dict(averaged.module.named_parameters())
    with engine.averaged():
        assert all(torch.equal(plain[name], each) for name, each in engine.model.named_parameters())
        assert engine.evaluate(batch).loss == square_loss(averaged(batch["x"]), batch).item()
    current = dict(model.named_parameters())
    assert all(torch.equal(current[name], each) for name, each in engine.model.named_parameters())


def test_a_warmup_keeps_little_at_first() -> None:
    engine = engine_on(None, sw.Plan(average=sw.Average(decay=0.999, warmup=True)))
    expected: Whole = {}
    for step in range(5):
        engine.step(points(step, 6))
        weight = max(1 - 0.999, 9 / (9 + step))
        for name, each in engine.model.named_parameters():
            expected[name] = each.detach().clone() if not step else expected[name].lerp(each.detach(), weight)
    same(averages_of(full_state(engine)), expected)


def engine_on(channel: sw.Channel | None, plan: sw.Plan, **more: Any) -> sw.Engine:
    return sw.parallelize(Residual(), plan, optimizer=adamw, loss=square_loss, channel=channel, **more)


def plan_of(stage: int = 1, *, average: sw.Average | None = EMA, compute: str | None = None, **mesh: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=200),
        precision=sw.Precision(compute=compute),
        average=average,
    )


@pytest.mark.parametrize("stage", [1, 3])
def test_a_skipped_update_is_not_averaged(stage: int) -> None:
    """The mean counts what was averaged: a skipped update would show in all later ones."""
    plan = plan_of(stage, average=sw.Average(), dp_shard=2)

    def run(broken: tuple[int, ...], channel: sw.Channel) -> Whole:
        engine = engine_on(channel, plan)
        for step in range(5):
            batch = share_of(points(step, 6), channel.rank, 2)
            if step in broken:
                batch["y"] = batch["y"] * float("inf")
            if step not in broken or broken:
                assert engine.step(batch).skipped == (step in broken)
        assert engine.settings()["average"] == {"averaged": 5 - len(broken)}
        return full_state(engine)

    def shorter(channel: sw.Channel) -> Whole:
        engine = engine_on(channel, plan)
        for step in (1, 2, 4):
            engine.step(share_of(points(step, 6), channel.rank, 2))
        return full_state(engine)

    same(sw.simulate(2, partial(run, (0, 3)))[0], sw.simulate(2, shorter)[0])


def test_float64_complex_and_narrow_masters_are_averaged_in_their_own_dtypes() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        master = "bfloat16" if dtype == torch.bfloat16 else "float32"
        model = Residual().to(dtype)
        engine = sw.parallelize(
            model, sw.Plan(precision=sw.Precision(master=master), average=EMA), optimizer=adamw, loss=float_loss
        )
        expected: Expected | None = None
        for step in range(3):
            engine.step({name: each.to(dtype) for name, each in points(step, 6).items()})
            weights = {name: each.detach().clone() for name, each in model.named_parameters()}
            expected = expected or Expected(EMA, weights)
            expected.update(weights)
        assert expected is not None
        found = averages_of(full_state(engine))
        assert {each.dtype for each in found.values()} == {dtype}
        same(found, {name: expected.values()[name] for name in found})


def float_loss(output: torch.Tensor, batch: Any) -> torch.Tensor:
    return square_loss(output.float(), {name: each.float() for name, each in batch.items()})


def test_the_footprint_counts_the_averages() -> None:
    def run(channel: sw.Channel) -> None:
        for stage in range(4):
            engine = engine_on(channel, plan_of(stage, dp_shard=2))
            assert engine._rank.averages is not None
            num_bytes: int = sum(average.nbytes for _, average in engine._rank.averages._averages)
            assert engine.footprint().average_bytes == num_bytes
            assert num_bytes > 0
            assert engine_on(channel, plan_of(stage, average=None, dp_shard=2)).footprint().average_bytes == 0

    sw.simulate(2, run)


# In their place ---------------------------------------------------------------------------------------------------


@contextmanager
def left_as_it_was(engine: sw.Engine) -> Iterator[None]:
    before = {piece: each.clone() for piece, each in engine.state().items()}
    copies = working_copies(engine)
    yield
    assert all(torch.equal(each, before[piece]) for piece, each in engine.state().items())
    same(working_copies(engine), copies)


IN_PLACE = [plan_of(), *(plan_of(stage, dp_shard=2, compute="bfloat16") for stage in range(4)), plan_of(3, dp_shard=2)]


@pytest.mark.parametrize("plan", IN_PLACE, ids=lambda plan: f"{plan.sharding.stage} {plan.precision.compute}")
def test_weights_come_back_after_an_error_on_one_rank_or_on_all(plan: sw.Plan) -> None:
    def run(channel: sw.Channel) -> None:
        engine, batch = engine_on(channel, plan), share_of(points(0, 6), channel.rank, channel.size)
        for _ in range(3):
            engine.step(batch)

        def fail(error: Exception | None) -> None:
            with engine.averaged():
                engine.evaluate(batch)
                if error is not None:
                    raise error

        with left_as_it_was(engine), pytest.raises(ZeroDivisionError):
            fail(ZeroDivisionError())
        # On the last rank alone: the others hear of it at the end of the block.
        is_last = channel.rank == channel.size - 1
        wanted, words = (
            (KeyError, "lost") if is_last else (PeerError, r"left engine.averaged\(\) with KeyError: 'lost'")
        )
        with left_as_it_was(engine), pytest.raises(wanted, match=words):
            fail(KeyError("lost") if is_last else None)
        # And training goes on.
        engine.step(batch)
        with engine.averaged(), engine.averaged():
            engine.evaluate(batch)

    sw.simulate(plan.mesh.size, run)


def after_three_steps(channel: sw.Channel, plan: sw.Plan) -> tuple[sw.Engine, Any, dict[sw.Piece, torch.Tensor]]:
    """An engine, this rank's rows, and a copy of its state."""
    engine, batch = engine_on(channel, plan), share_of(points(0, 6), channel.rank, channel.size)
    for _ in range(3):
        engine.step(batch)
    return engine, batch, {piece: each.clone() for piece, each in engine.state().items()}


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_whose_peers_are_gone_has_its_own_weights_again(stage: int) -> None:
    """The last rank leaves out an evaluation: no rank can talk any more."""
    plan = plan_of(stage, dp_shard=2, compute="bfloat16")

    def run(channel: sw.Channel) -> None:
        engine, batch, before = after_three_steps(channel, plan)

        def fail() -> None:
            with engine.averaged():
                if channel.rank:
                    raise ZeroDivisionError
                engine.evaluate(batch)

        with pytest.raises((ZeroDivisionError, sw.ShardwiseError)):
            fail()
        assert all(torch.equal(each, before[piece]) for piece, each in engine.state().items())

    sw.simulate(2, run)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_weights_are_back_where_the_averages_do_not_even_come_in(stage: int) -> None:
    plan = plan_of(stage, dp_shard=2, compute="bfloat16")

    def run(channel: sw.Channel) -> None:
        engine, batch, before = after_three_steps(channel, plan)
        if channel.rank:
            engine._buffers.publish = no_memory  # type: ignore[method-assign]
        with pytest.raises((MemoryError, PeerError)), engine.averaged():
            engine.evaluate(batch)
        assert all(torch.equal(each, before[piece]) for piece, each in engine.state().items())

    sw.simulate(2, run)


def no_memory(*_: Any, **__: Any) -> None:
    raise MemoryError


def test_what_needs_the_weights_is_refused_inside(tmp_path: Path) -> None:
    engine = engine_on(None, plan_of())
    engine.step(points(0, 6))
    sw.save(tmp_path, engine)
    with left_as_it_was(engine), engine.averaged():
        calls: dict[str, Callable[[], Any]] = {
            "engine.step": lambda: engine.step(points(0, 6)),
            "sw.load or sw.stream": lambda: sw.load(tmp_path, engine),
            "sw.relayout": lambda: sw.relayout(engine, plan_of()),
        }
        for name, call in calls.items():
            with pytest.raises(ModelError, match=rf"{name} was called inside engine\.averaged\(\)"):
                call()
    without = engine_on(None, plan_of(average=None))
    with pytest.raises(ModelError, match=r"keeps no average of the weights; give Plan\(average="), without.averaged():
        pass


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_what_is_written_inside_stays_with_the_averages(compute: str | None) -> None:
    engine = engine_on(None, plan_of(compute=compute))
    for seed in range(3):
        engine.step(points(seed, 6))
    with left_as_it_was_but_averages(engine), engine.averaged():
        engine.model.load_state_dict({name: each + 1 for name, each in engine.model.state_dict().items()})
    engine.step(points(3, 6))


@contextmanager
def left_as_it_was_but_averages(engine: sw.Engine) -> Iterator[None]:
    before = {name: each.clone() for name, each in full_state(engine).items()}
    yield
    after = full_state(engine)
    same(weights_of(after), weights_of(before))
    assert not any(torch.equal(each, averages_of(before)[name]) for name, each in averages_of(after).items())


# Checkpoints ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("two-slice-bf16", "stage3-stages"),
        ("stage3-replicas-bf16", "tensor-two"),
        ("tensor-two-parts-x-two", "three-whole-bf16"),
        ("stages-two-x-two", "one"),
        ("one", "all-stage3"),
    ],
)
@pytest.mark.parametrize("way", ["load", "relayout"])
def test_averages_go_on_in_another_layout(source: str, target: str, way: str, tmp_path: Path) -> None:
    """Averages and their number arrive to the bit; the mean shows a wrong number in the next update."""
    rule = sw.Average(start=1)
    first, second = (replace(LAYOUTS[name], average=rule) for name in (source, target))
    if way == "relayout":
        size = first.mesh.size
        names = [name for name, plan in LAYOUTS.items() if plan.mesh.size == size and name != source]
        second = replace(LAYOUTS[names[0]], average=rule) if names else first

    def save(channel: sw.Channel) -> tuple[Whole, Whole, Any]:
        engine = engine_of(first, channel)
        train(engine, channel, range(3))
        before = full_state(engine)
        sw.save(tmp_path, engine)
        if way == "relayout":
            engine = sw.relayout(engine, second)
        after = full_state(engine)
        return before, after, engine.settings()["average"]

    def load(channel: sw.Channel) -> tuple[Whole, Whole, Any]:
        engine = engine_of(second, channel, seed=5)
        loaded = sw.load(tmp_path, engine)
        assert loaded.report.notes == ()
        before = full_state(engine)
        train(engine, channel, [3])
        return before, full_state(engine), engine.settings()["average"]

    before, after, settings = sw.simulate(first.mesh.size, save)[0]
    assert settings == {"averaged": 2}
    if way == "relayout":
        same(averages_of(after), averages_of(before))
        return
    loaded, after, settings = sw.simulate(second.mesh.size, load)[0]
    assert settings == {"averaged": 3}
    same(averages_of(loaded), averages_of(before))
    weights, averages = weights_of(after), averages_of(loaded)
    same(averages_of(after), {name: each.lerp(weights[name], 1 / 3) for name, each in averages.items()})


def test_a_run_that_was_resumed_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    plan = plan_of(2, average=sw.Average(decay=0.9, every=2, warmup=True), dp_shard=2, compute="bfloat16")

    def run(until: int, resumed: bool, channel: sw.Channel) -> Whole:
        engine = engine_on(channel, plan)
        if resumed:
            sw.load(tmp_path, engine)
        for step in range(engine.steps, until):
            engine.step(share_of(points(step, 6), channel.rank, 2))
        if until == 3:
            sw.save(tmp_path, engine)
        return full_state(engine)

    sw.simulate(2, partial(run, 3, False))
    same(sw.simulate(2, partial(run, 7, True))[0], sw.simulate(2, partial(run, 7, False))[0])


class Renamed(Residual):
    """`Residual` with another name for its first layer, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.begin = nn.Parameter(torch.zeros(4, 8))
        self.shift = self.first.bias
        del self.first

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.begin + self.shift
        for at in range(len(self.layers)):
            x = self.added(at, x)
        out: torch.Tensor = self.head(x)
        return out


RENAMING = sw.Rewrite("first.weight^T -> begin; first.bias -> shift")


@pytest.mark.parametrize("at_save", [True, False])
def test_averages_go_with_their_parameters_through_a_rewrite(at_save: bool, tmp_path: Path) -> None:
    plan = plan_of(2, average=sw.Average(), dp_shard=2, compute="bfloat16")

    def save(channel: sw.Channel) -> Whole:
        engine = engine_on(channel, plan)
        for seed in range(3):
            engine.step(share_of(points(seed, 6), channel.rank, 2))
        sw.save(tmp_path, engine, rewrite=RENAMING if at_save else None)
        return averages_of(full_state(engine))

    def load(channel: sw.Channel) -> tuple[Whole, Any]:
        engine = sw.parallelize(
            Renamed(), plan_of(3, average=sw.Average(), dp_shard=3), optimizer=adamw, channel=channel
        )
        sw.load(tmp_path, engine, rewrite=None if at_save else RENAMING)
        return averages_of(full_state(engine)), engine.settings()["average"]

    saved = sw.simulate(2, save)[0]
    loaded, settings = sw.simulate(3, load)[0]
    assert settings == {"averaged": 3}
    assert torch.equal(loaded.pop("begin"), saved.pop("first.weight").T)
    assert torch.equal(loaded.pop("shift"), saved.pop("first.bias"))
    same(loaded, saved)


def test_without_averages_in_the_checkpoint_they_begin_with_its_weights(tmp_path: Path) -> None:
    without = engine_on(None, plan_of(average=None))
    without.step(points(0, 6))
    sw.save(tmp_path, without)
    engine = engine_on(None, plan_of())
    for seed in range(3):
        engine.step(points(seed, 6))
    loaded = sw.load(tmp_path, engine)
    assert loaded.report.notes == (
        "the checkpoint has no average of any parameter; it begins with the weights that are loaded",
    )
    assert engine.settings()["average"] == {"averaged": 0}
    same(averages_of(full_state(engine)), weights_of(full_state(without)))


def test_an_engine_without_averages_leaves_them_and_says_so(tmp_path: Path) -> None:
    engine = engine_on(None, plan_of(compute="bfloat16"))
    engine.step(points(0, 6))
    sw.save(tmp_path, engine)
    without = engine_on(None, plan_of(average=None, compute="bfloat16"))
    loaded = sw.load(tmp_path, without)
    assert len(loaded.report.notes) == 1
    assert "averages of 12 parameters that the target does not keep" in loaded.report.notes[0]
    wanted = {name: each for name, each in full_state(engine).items() if not name.endswith(AVERAGE)}
    same(full_state(without), wanted)
    # A plain model and its optimizer have no place for them either.
    model = Residual()
    optimizer = adamw(list(model.parameters()))
    sw.load(tmp_path, sw.checkpoint.TorchState(model, optimizer), cast=True)
    assert set(next(iter(optimizer.state.values()))) == {"exp_avg", "exp_avg_sq", "step"}


def test_a_parameter_that_was_frozen_begins_with_its_weights(tmp_path: Path) -> None:
    def engine_with(frozen: bool) -> sw.Engine:
        model = odd()
        model.up.requires_grad_(not frozen)
        return sw.parallelize(model, sw.Plan(average=EMA), optimizer=adamw_of_trained, loss=word_loss)

    engine = engine_with(True)
    for seed in range(3):
        engine.step(word_batch(seed, 8))
    assert "up.weight" not in averages_of(full_state(engine))
    sw.save(tmp_path, engine)
    thawed = engine_with(False)
    loaded = sw.load(tmp_path, thawed, strict=False)
    assert loaded.report.notes == (
        "the checkpoint has no average of 'up.bias', 'up.weight'; it begins with the weights that are loaded",
    )
    after, before = averages_of(full_state(thawed)), averages_of(full_state(engine))
    same({name: each for name, each in after.items() if name in before}, before)
    assert torch.equal(after["up.weight"], full_state(engine)["up.weight"])


def test_a_save_inside_has_the_model_alone(tmp_path: Path) -> None:
    """With the averages as its masters, so that it loads as plain weights do."""
    plan = plan_of(3, dp_shard=2, compute="bfloat16")

    def run(channel: sw.Channel) -> tuple[Whole, Whole]:
        engine = engine_on(channel, plan)
        for seed in range(3):
            engine.step(share_of(points(seed, 6), channel.rank, 2))
        with engine.averaged():
            sw.save(tmp_path, engine)
        fresh = engine_on(channel, plan_of(1, dp_shard=2))
        sw.load(tmp_path, fresh)
        with pytest.raises(CheckpointError, match="no optimizer state, and the optimizer has updated"):
            sw.load(tmp_path, engine)
        return averages_of(full_state(engine)), dict(sw.full(fresh))

    averages, loaded = sw.simulate(2, run)[0]
    same(loaded, averages)


@pytest.mark.parametrize("entry", [None, 3, {"averaged": -1}, {"averaged": True}])
def test_settings_without_the_number_of_averages_are_refused(entry: object) -> None:
    engine = engine_on(None, plan_of())
    stored = {piece.name: piece for piece in engine.state()}
    with pytest.raises(CheckpointError, match="which is no number of averaged weights"):
        engine.restore(stored, {**engine.settings(), "average": entry})


# On a device ------------------------------------------------------------------------------------------------------


def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.1, fused=True)


@pytest.mark.parametrize("rule", [EMA, sw.Average(), sw.Average(decay=0.9, every=2, start=1, warmup=True)])
def test_a_device_that_skips_alone_has_the_averages_of_the_host(rule: sw.Average, fake: str) -> None:
    """The second and the fourth step are skipped, and no host knows when it averages."""

    def run(channel: sw.Channel) -> tuple[Whole, Any]:
        engine = sw.parallelize(
            Residual(), plan_of(2, average=rule, dp_shard=2), optimizer=fused, loss=square_loss, channel=channel
        )
        for step in range(6):
            batch = share_of(points(step, 6), channel.rank, 2)
            if step in (2, 4):
                batch["y"] = batch["y"] * float("inf")
            engine.step(batch)
        with engine.averaged():
            loss = engine.evaluate(share_of(points(9, 6), channel.rank, 2)).loss
        return {name: each.cpu() for name, each in full_state(engine).items()}, (engine.settings()["average"], loss)

    here, on_host = sw.simulate(2, run)[0]
    there, on_device = sw.simulate(2, run, device=fake)[0]
    same(averages_of(there), averages_of(here))
    assert on_device[0] == on_host[0]
    assert on_device[1] == pytest.approx(on_host[1])


# Plans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"decay": 1.0}, r"average\.decay: 1\.0 is not a number from 0 to below 1"),
        ({"decay": -0.1}, r"average\.decay: -0\.1 is not a number"),
        ({"decay": True}, r"average\.decay: True is not a number"),
        ({"decay": float("nan")}, r"average\.decay: nan is not a number"),
        ({"every": 0}, r"average\.every: 0 is not a whole number of at least 1"),
        ({"start": -1}, r"average\.start: -1 is not a whole number of at least 0"),
        ({"warmup": 1, "decay": 0.5}, r"average\.warmup: 1 is neither True nor False"),
        ({"warmup": True}, r"average\.warmup: there is no decay to warm up"),
    ],
)
def test_what_is_no_average_is_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        sw.Average(**settings)


def test_a_plan_has_its_average_in_its_text() -> None:
    plan = sw.Plan(average=sw.Average(decay=0.999, every=2))
    assert "average.decay = 0.999\naverage.every = 2\naverage.start = 0\naverage.warmup = false\n" in plan.text()
    assert sw.Plan.parse(plan.text()) == plan
    assert "average.every" not in sw.Plan().text()
    assert sw.Plan.parse("[average]\n") == sw.Plan(average=sw.Average())
    with pytest.raises(PlanError, match=r"average\.dekay: unknown setting; did you mean average\.decay\?"):
        sw.Plan.parse("average.dekay = 0.5")
    with pytest.raises(PlanError, match=r"average: 0\.999 is not a Average"):
        sw.Plan(average=0.999)  # type: ignore[arg-type]
