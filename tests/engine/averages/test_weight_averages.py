"""Averages of the weights are those of torch's `AveragedModel`, to the bit, under every layout."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import PeerError
from tests.checkpoint.layouts import LAYOUTS, Whole, engine_of, train
from tests.engine.loops import share
from tests.engine.tower import on_ranks
from tests.oracle.batches import points, square_loss, word_batch
from tests.oracle.program import adamw
from tests.oracle.words import Residual
from tests.refusals import Refusals

EMA = sw.Average(decay=0.9)
AVERAGE = "/weight_average"
RULES = {
    **{"ema": EMA, "mean": sw.Average(start=1), "seldom": sw.Average(decay=0.75, every=2)},
    "warmup": sw.Average(decay=0.999, warmup=True),
}


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


def full_state(engine: sw.Engine) -> Whole:
    return dict(sw.full(engine, optimizer=True))


def followed(rule: sw.Average, average: Whole, weights: Whole, averaged: int) -> Whole:
    """The average with new weights, as `AveragedModel` takes them; the first are the average."""
    share = 1 / (averaged + 1) if rule.decay is None else 1 - rule.decay
    share = max(share, 9 / (9 + averaged)) if rule.warmup else share
    return {name: each.lerp(weights[name], share) if averaged else weights[name] for name, each in average.items()}


@contextmanager
def left_as_it_was(engine: sw.Engine) -> Iterator[None]:
    before = {piece: each.clone() for piece, each in engine.state().items()}
    copies = working_copies(engine)
    yield
    assert all(torch.equal(each, before[piece]) for piece, each in engine.state().items())
    same(working_copies(engine), copies)


ALWAYS = [
    *("one-stage0-bf16", "three-whole-bf16", "four-replicas", "stages-two-x-two"),
    *("stage3-replicas-bf16", "tensor-two-parts-x-two"),
]
CASES = [
    pytest.param(name, list(RULES)[at % len(RULES)], marks=() if name in ALWAYS else pytest.mark.stress)
    for at, name in enumerate([*ALWAYS, *(name for name in LAYOUTS if name not in ALWAYS)])
]
"""Every layout, and every rule under all kinds of them."""


@pytest.mark.parametrize(("name", "rule"), CASES)
def test_averages_are_those_of_torch_and_the_weights_come_back(name: str, rule: str) -> None:
    plan = replace(LAYOUTS[name], average=RULES[rule])

    def run(channel: sw.Channel) -> tuple[list[tuple[Whole, Whole]], float]:
        engine = engine_of(plan, channel)
        seen: list[tuple[Whole, Whole]] = [(full_state(engine), {})]
        for update in range(4):
            train(engine, channel, [update])
            before = full_state(engine)
            with left_as_it_was(engine), engine.averaged():
                inside = full_state(engine)
                loss = engine.evaluate(share(engine, word_batch(9, 28))).loss
            seen.append((before, inside))
        own = [each.nbytes for piece, each in engine.state().items() if piece.name.endswith(AVERAGE)]
        assert sum(own) <= engine.footprint().average_bytes
        return seen, loss

    ranks = on_ranks(plan, run)
    (seen, loss), (on_last, _) = ranks[0], ranks[-1]
    for (one, two), (other, another) in zip(seen, on_last, strict=True):
        same(one, other)
        same(two, another)
    names = list(averages_of(seen[0][0]))
    assert {"embedding.weight", "unused", "cube"} <= set(names)
    assert not {"nothing", "order"} & set(names)
    expected, averaged = {name: weights_of(seen[0][0])[name] for name in names}, 0
    for step, (before, inside) in enumerate(seen[1:], start=1):
        if RULES[rule].averages(step):
            expected, averaged = followed(RULES[rule], expected, weights_of(before), averaged), averaged + 1
        averages = averages_of(before)
        same(averages, expected)
        # Inside: the averages as the weights, cast as masters are, and no state of other weights.
        assert not any(key.startswith("optimizer/") and not key.endswith("/master") for key in inside)
        assert all(torch.equal(weights_of(inside)[name], averages[name]) for name in names)
        assert all(torch.equal(inside[name], averages[name].to(inside[name].dtype)) for name in names)

    # Training has not noticed, and the loss is that of a model with the averages.
    def without(channel: sw.Channel) -> tuple[Whole, float]:
        engine = engine_of(replace(plan, average=None), channel)
        train(engine, channel, range(4))
        other = engine_of(replace(plan, average=None), channel)
        with other.whole(optimizer=False):
            held = other.model.state_dict()
            other.model.load_state_dict({key: each for key, each in seen[-1][1].items() if key in held})
        return full_state(engine), other.evaluate(share(other, word_batch(9, 28))).loss

    trained, wanted = on_ranks(plan, without)[0]
    same({name: each for name, each in seen[-1][0].items() if not name.endswith(AVERAGE)}, trained)
    assert loss == wanted


def engine_on(channel: sw.Channel | None, plan: sw.Plan, **more: Any) -> sw.Engine:
    return sw.parallelize(Residual(), plan, optimizer=adamw, loss=square_loss, channel=channel, **more)


def plan_of(stage: int = 1, *, average: sw.Average | None = EMA, compute: str | None = None, **mesh: int) -> sw.Plan:
    return sw.Plan(
        mesh=sw.Mesh(**mesh),
        sharding=sw.Sharding(stage=stage, bucket_bytes=200),
        precision=sw.Precision(compute=compute),
        average=average,
    )


def steps(engine: sw.Engine, updates: Any, broken: tuple[int, ...] = ()) -> None:
    """Updates, of which some have a loss that is not finite."""
    for at in updates:
        batch = share(engine, points(at, 6))
        engine.step(batch | ({"y": batch["y"] * float("inf")} if at in broken else {}))


@pytest.mark.parametrize(
    "rule",
    [pytest.param(EMA, marks=pytest.mark.quick), sw.Average(), sw.Average(decay=0.9, every=2, start=1, warmup=True)],
)
def test_a_skipped_update_is_not_averaged_on_the_host_nor_by_a_device(rule: sw.Average, fake: str) -> None:
    """The second and the fourth update are skipped; no host knows when a device averages."""

    def run(channel: sw.Channel, *, skips: bool = True) -> tuple[Whole, Any, float]:
        def fused(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
            return torch.optim.AdamW(parameters, lr=0.1, fused=True)

        engine = sw.parallelize(
            Residual(), plan_of(2, average=rule, dp_shard=2), optimizer=fused, loss=square_loss, channel=channel
        )
        steps(engine, range(6) if skips else (0, 1, 3, 5), (2, 4) if skips else ())
        with engine.averaged():
            loss = engine.evaluate(share(engine, points(9, 6))).loss
        averages = {name: each.cpu() for name, each in averages_of(full_state(engine)).items()}
        return averages, engine.settings()["average"], loss

    here, there = sw.simulate(2, run)[0], sw.simulate(2, run, device=fake)[0]
    never = sw.simulate(2, lambda channel: run(channel, skips=False))[0]
    for averages, settings, loss in (there, *([never] if rule.every == 1 else [])):
        same(averages, here[0])
        assert settings == here[1]
        assert loss == pytest.approx(here[2])


IN_PLACE = [plan_of(), *(plan_of(stage, dp_shard=2, compute="bfloat16") for stage in (0, 2, 3))]


@pytest.mark.parametrize("is_silent", [False, True])
@pytest.mark.parametrize("plan", IN_PLACE, ids=lambda plan: f"{plan.sharding.stage} {plan.precision.compute}")
def test_weights_come_back_after_an_error_on_one_rank_or_on_all(plan: sw.Plan, is_silent: bool) -> None:
    """`is_silent`: the last rank leaves out an evaluation, so that no rank can talk any more."""

    def run(channel: sw.Channel) -> None:
        engine = engine_on(channel, plan)
        steps(engine, [0] * 3)
        is_last = channel.rank == channel.size - 1

        def fail(error: Exception | None, *, evaluates: bool = True) -> None:
            with left_as_it_was(engine), engine.averaged():
                if evaluates:
                    engine.evaluate(share(engine, points(0, 6)))
                if error is not None:
                    raise error

        if is_silent:
            with pytest.raises((ZeroDivisionError, sw.ShardwiseError)):
                fail(ZeroDivisionError() if is_last else None, evaluates=not is_last)
            return
        with pytest.raises(ZeroDivisionError):
            fail(ZeroDivisionError())
        # On the last rank alone: the others hear of it at the end of the block.
        kind, words = (KeyError, "lost") if is_last else (PeerError, r"left engine.averaged\(\) with KeyError: 'lost'")
        with pytest.raises(kind, match=words):
            fail(KeyError("lost") if is_last else None)
        # And training goes on.
        steps(engine, [0])
        with engine.averaged():
            fail(None)

    on_ranks(plan, run)


@pytest.mark.parametrize("compute", [None, "bfloat16"])
def test_what_is_written_inside_stays_with_the_averages(compute: str | None) -> None:
    engine = engine_on(None, plan_of(compute=compute))
    steps(engine, range(3))
    before = {name: each.clone() for name, each in full_state(engine).items()}
    with engine.averaged():
        engine.model.load_state_dict({name: each + 1 for name, each in engine.model.state_dict().items()})
    after = full_state(engine)
    same(weights_of(after), weights_of(before))
    assert not any(torch.equal(each, averages_of(before)[name]) for name, each in averages_of(after).items())
    steps(engine, [3])


# Checkpoints ------------------------------------------------------------------------------------------------------


def test_averages_that_a_checkpoint_has_not_begin_with_its_weights_and_others_are_left(tmp_path: Path) -> None:
    without, engine = engine_on(None, plan_of(average=None)), engine_on(None, plan_of())
    steps(without, [0])
    steps(engine, range(3))
    sw.save(tmp_path / "without", without)
    sw.save(tmp_path / "with", engine)
    loaded = sw.load(tmp_path / "with", without)
    (note,) = loaded.report.notes
    assert "averages of 12 parameters that the target does not keep" in note
    same(full_state(without), {name: each for name, each in full_state(engine).items() if not name.endswith(AVERAGE)})
    again = engine_on(None, plan_of())
    sw.load(tmp_path / "with", again)
    assert again.settings()["average"] == {"averaged": 3}
    loaded = sw.load(tmp_path / "without", engine)
    words = "the checkpoint has no average of any parameter; it begins with the weights that are loaded"
    assert loaded.report.notes == (words,)
    assert engine.settings()["average"] == {"averaged": 0}
    same(averages_of(full_state(engine)), weights_of(full_state(engine)))


# Refusals ---------------------------------------------------------------------------------------------------------


def inside(call: Callable[[sw.Engine, Path], object], average: sw.Average | None = EMA) -> Callable[[Path], None]:
    def refused(folder: Path) -> None:
        engine = engine_on(None, plan_of(average=average))
        steps(engine, [0])
        sw.save(folder, engine)
        with engine.averaged():
            call(engine, folder)

    return refused


def with_entry(entry: object) -> Callable[[], object]:
    def call() -> None:
        engine = engine_on(None, plan_of())
        engine.restore({piece.name: piece for piece in engine.state()}, {**engine.settings(), "average": entry})

    return call


def average(**settings: Any) -> Callable[[], object]:
    return lambda: sw.Average(**settings)


REFUSED = Refusals(
    "engine.weight_averages",
    {
        "a step inside": inside(lambda engine, _: steps(engine, [0])),
        "a load inside": inside(lambda engine, folder: sw.load(folder, engine)),
        "a relayout inside": inside(lambda engine, _: sw.relayout(engine, plan_of())),
        "no average": inside(lambda *_: None, None),
        **{f"settings with {entry}": with_entry(entry) for entry in (None, 3, {"averaged": -1}, {"averaged": True})},
        **{f"decay {decay}": average(decay=decay) for decay in (1.0, -0.1, True, float("nan"))},
        "every 0": average(every=0),
        "start -1": average(start=-1),
        "warmup 1": average(warmup=1, decay=0.5),
        "warmup alone": average(warmup=True),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_average_or_needs_the_weights_is_refused(case: str) -> None:
    REFUSED.check(case)
