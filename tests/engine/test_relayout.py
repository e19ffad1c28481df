"""A running engine under another plan: nothing of its state changes, and a plan that cannot be leaves it as it was."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import CheckpointError, MismatchError, ModelError, PlanError, ShardwiseError
from tests.checkpoint.layouts import (
    LAYOUTS,
    Whole,
    assembled,
    engine_of,
    layout,
    masters_of,
    same_bits,
    state_of,
    train,
)
from tests.engine.hybrid_models import assert_close, data_rank, decoder, plan_of, together
from tests.engine.models import word_batch, word_loss
from tests.engine.oracle import share_of
from tests.engine.pipeline.oracle import adamw

FOUR = {name: plan for name, plan in LAYOUTS.items() if plan.mesh.size == 4}

ROUNDS = [
    ["four-replicas", "tensor-two-stages", "stage3-replicas-bf16", "stages-four-bf16", "tensor-two-x-two-whole-bf16"],
    ["tensor-two-parts-x-two", "stage3-stages", "four-replicas-whole", "stages-two-x-two", "stage2-replicas"],
]
"""Five layouts each, and back to the first; all of four ranks."""


def buffers_of(engine: sw.Engine) -> Whole:
    """Also those that checkpoints leave out."""
    return {name: each.clone() for name, each in engine.model.named_buffers() if not each.is_meta}


def assert_same(got: Whole, wanted: Whole) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in got if not same_bits(got[name], wanted[name])] == []


@pytest.mark.parametrize("has_trained", [True, False], ids=["trained", "fresh"])
@pytest.mark.parametrize("names", ROUNDS, ids=["first", "second"])
def test_through_five_layouts_and_back_to_the_bits_it_started_from(names: Sequence[str], has_trained: bool) -> None:
    def run(channel: sw.Channel) -> list[tuple[dict[sw.Piece, torch.Tensor], dict[str, Any], Whole]]:
        engine = engine_of(FOUR[names[0]], channel)
        if has_trained:
            train(engine, channel, range(2))
        seen = [(state_of(engine), engine.settings(), buffers_of(engine))]
        for name in (*names[1:], names[0]):
            engine = sw.relayout(engine, FOUR[name])
            assert engine.plan == FOUR[name]
            seen.append((state_of(engine), engine.settings(), buffers_of(engine)))
        return seen

    ranks = sw.simulate(4, run)
    visits = [list(visit) for visit in zip(*ranks, strict=True)]
    wholes = [masters_of(assembled(state for state, _, _ in visit)) for visit in visits]
    first = {name: each for _, _, buffers in visits[0] for name, each in buffers.items()}
    for visit, whole in zip(visits[1:], wholes[1:], strict=True):
        assert_same(whole, wholes[0])
        for _, settings, buffers in visit:
            assert settings["random"] == visits[0][0][1]["random"]
            assert [each["groups"] for each in settings["optimizers"]] == [
                each["groups"] for each in visits[0][0][1]["optimizers"]
            ]
            assert all(same_bits(each, first[name]) for name, each in buffers.items())
        assert {name for _, _, buffers in visit for name in buffers} == first.keys()
    assert "turn.angles" in first
    for (state, settings, _), (before, settings_before, _) in zip(visits[-1], visits[0], strict=True):
        assert state.keys() == before.keys()
        assert all(same_bits(tensor, before[piece]) for piece, tensor in state.items())
        assert settings == settings_before


SAME_BITS = [
    layout(1, 4, 1, "slice", 500),
    layout(1, 4, 3, "slice", 130),
    layout(4, 1, 0, "slice", 1 << 20),
    layout(2, 2, 2, "whole", 300),
]
"""Layouts in which the losses of one update have the same bits."""


def test_training_goes_on_as_if_nothing_had_been_with_the_same_dropout() -> None:
    def still(channel: sw.Channel) -> list[float]:
        return train(engine_of(SAME_BITS[0], channel), channel, range(8))

    def moving(channel: sw.Channel) -> list[float]:
        engine = engine_of(SAME_BITS[0], channel)
        losses = train(engine, channel, range(2))
        for at, plan in enumerate(SAME_BITS[1:], 1):
            engine = sw.relayout(engine, plan)
            losses += train(engine, channel, range(2 * at, 2 * at + 2))
        return losses

    wanted = sw.simulate(4, still)
    assert sw.simulate(4, moving) == wanted
    assert len(set(wanted[0])) == 8


def test_between_all_axes_training_goes_on_to_the_order_of_sums() -> None:
    """float64: what is left of a difference is the order in which ranks add."""
    plans = [plan_of(mesh, stage=stage, k=k) for mesh, stage, k in MOVES]
    assert {plan.mesh.size for plan in plans} == {4}

    def run(channel: sw.Channel, plans: Sequence[sw.Plan]) -> tuple[Any, ...]:
        engine = sw.parallelize(decoder(0.2), plans[0], optimizer=adamw, loss=word_loss, channel=channel)
        losses, norms = [], []
        for update, plan in enumerate(plans):
            if plan is not engine.plan:
                engine = sw.relayout(engine, plan)
            ranks = plan.mesh.dp_replicate * plan.mesh.dp_shard
            report = engine.step(share_of(word_batch(update, 12), data_rank(plan.mesh, channel.rank), ranks))
            losses.append(report.loss)
            norms.append(report.grad_norm)
        held_out = engine.evaluate(share_of(word_batch(9, 12), data_rank(plan.mesh, channel.rank), ranks)).loss
        return losses, norms, held_out, [state_of(engine)]

    moved = together(sw.simulate(4, lambda channel: run(channel, plans)))
    still = together(sw.simulate(1, lambda channel: run(channel, [plan_of("single", k=4)] * len(plans))))
    assert_close(moved, still, relative=1e-9, names=decoder().state_dict().keys() - {"head.weight"})


MOVES = [
    ("dp_shard=4", 3, 1),
    ("pp=2,tp=2", 1, 4),
    ("dp_shard=2,tp=2", 2, 2),
    ("pp=2,dp_shard=2", 3, 2),
    ("dp_replicate=2,tp=2", 0, 2),
    ("dp_shard=2,tp=2", 3, 2),
]
"""Four microbatches in all, whoever has them."""


def test_a_schedule_attached_to_the_optimizer_goes_on() -> None:
    names = ["stages-two-x-two", "tensor-two-parts-x-two", "stage3-replicas-bf16"]

    def run(channel: sw.Channel) -> None:
        engine = engine_of(FOUR[names[0]], channel)
        optimizer = engine.optimizer
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for at, name in enumerate(names):
            if at:
                engine = sw.relayout(engine, FOUR[name])
            assert engine.optimizer is optimizer
            train(engine, channel, [at])
            schedule.step()
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            assert rates == [1e-2 * 0.5 ** (at + 1), 3e-3 * 0.5 ** (at + 1)]
            held = {id(each) for group in optimizer.param_groups for each in group["params"]}
            assert {id(each) for each in optimizer.state} <= held

    sw.simulate(4, run)


def other_world(rank: int) -> sw.Plan:
    return LAYOUTS["three-slice"]


def no_such_rule(rank: int) -> sw.Plan:
    return replace(FOUR["tensor-two-stages"], tensor=sw.Tensor(rules={"upp": "column"}))


def too_many_parts(rank: int) -> sw.Plan:
    return replace(
        FOUR["tensor-two-stages"],
        mesh=sw.Mesh(tp=4),
        pipeline=sw.Pipeline(),
        tensor=sw.Tensor(rules={"up": "column(unit=11)", "down": "row(unit=11)"}),
    )


def nothing_to_keep(rank: int) -> sw.Plan:
    return replace(FOUR["four-replicas"], precision=sw.Precision(compute="bfloat16", keep=("nrom",)))


def no_such_stage(rank: int) -> sw.Plan:
    return replace(FOUR["stages-two-x-two"], pipeline=sw.Pipeline(stages={"embeding": 0}))


def another_on_one_rank(rank: int) -> sw.Plan:
    return FOUR["four-replicas" if rank == 2 else "stages-two-x-two"]


REFUSED: list[tuple[Callable[[int], sw.Plan], type[ShardwiseError], str]] = [
    (other_world, PlanError, "3"),
    (no_such_rule, PlanError, "'upp' means none"),
    (too_many_parts, PlanError, "33 indices in units of 11 are 3 for 4 ranks"),
    (nothing_to_keep, PlanError, "nrom"),
    (no_such_stage, PlanError, "embeding"),
    (another_on_one_rank, MismatchError, "rank 2"),
]


@pytest.mark.parametrize("name", ["tensor-two-x-two-whole-bf16", "stage3-stages"])
def test_a_plan_that_cannot_be_leaves_the_engine_as_it_was(name: str) -> None:
    def still(channel: sw.Channel) -> list[float]:
        return train(engine_of(FOUR[name], channel), channel, range(2 + len(REFUSED)))

    def refused(channel: sw.Channel) -> tuple[list[float], list[str]]:
        engine = engine_of(FOUR[name], channel)
        losses, said = train(engine, channel, range(2)), []
        for at, (plan_for, kind, words) in enumerate(REFUSED):
            with pytest.raises(kind) as caught:
                sw.relayout(engine, plan_for(channel.rank))
            assert words in str(caught.value)
            said.append(str(caught.value))
            losses += train(engine, channel, [2 + at])
        return losses, said

    wanted = sw.simulate(4, still)
    results = sw.simulate(4, refused)
    assert [losses for losses, _ in results] == wanted
    assert all(said == results[0][1] for _, said in results), "every rank is told the same"


def test_what_is_no_engine_or_no_plan_is_refused_in_words_and_the_engine_goes_on() -> None:
    def run(channel: sw.Channel) -> list[str]:
        engine = engine_of(FOUR["four-replicas"], channel)
        no_plan: Any = {"tp": 2} if channel.rank == 3 else FOUR["tensor-two-stages"]
        no_engine: Any = engine.model
        said = []
        for given, plan in ((engine, no_plan), (no_engine, FOUR["four-replicas"])):
            with pytest.raises(PlanError) as caught:
                sw.relayout(given, plan)
            said.append(str(caught.value))
        train(engine, channel, [0])
        return said

    first, *others = sw.simulate(4, run)
    assert others == [first] * 3
    assert "was given a dict as the plan; give sw.Plan(mesh=sw.Mesh(..))" in first[0]
    assert "give the engine that sw.parallelize returned" in first[1]


def test_what_one_rank_alone_cannot_hand_over_is_told_to_all() -> None:
    def run(channel: sw.Channel) -> str:
        engine = engine_of(FOUR["four-replicas"], channel)
        train(engine, channel, [0])
        if channel.rank == 3:
            engine.model.gate = torch.nn.Parameter(torch.ones(1))
        with pytest.raises(ModelError, match=r"rank 3: 1 parameters were replaced.*'gate'") as caught:
            sw.relayout(engine, FOUR["tensor-two-stages"])
        return str(caught.value)

    assert len(set(sw.simulate(4, run))) == 1


def test_what_one_rank_alone_cannot_take_over_leaves_the_engine_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = sw.Engine.restore

    def failing(engine: sw.Engine, *args: Any) -> Any:
        if engine._channels.world.rank == 1:
            raise CheckpointError("there is no room for the state")
        return restore(engine, *args)

    monkeypatch.setattr(sw.Engine, "restore", failing)

    def run(channel: sw.Channel) -> list[float]:
        engine = engine_of(FOUR["four-replicas"], channel)
        losses = train(engine, channel, [0])
        with pytest.raises(CheckpointError, match="rank 1: there is no room for the state"):
            sw.relayout(engine, FOUR["stage3-stages"])
        return losses + train(engine, channel, [1])

    wanted = sw.simulate(4, lambda channel: train(engine_of(FOUR["four-replicas"], channel), channel, range(2)))
    assert sw.simulate(4, run) == wanted


class Noted(torch.nn.Parameter):
    """A parameter of a class of the user's."""

    note: str


def test_parameters_keep_their_class_and_what_is_noted_on_them() -> None:
    def run(channel: sw.Channel) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
        layers: list[Any] = list(model)
        for layer in layers:
            layer.weight = Noted(layer.weight.detach())
            layer.weight.note = "mine"
        engine = sw.parallelize(model, plan_of("dp_shard=2"), optimizer=adamw, loss=None, channel=channel)
        for plan in (plan_of("dp_shard=2", stage=3), sw.Plan(mesh=sw.Mesh(pp=2)), plan_of("dp_shard=2")):
            engine = sw.relayout(engine, plan)
            for layer in layers:
                assert isinstance(layer.weight, Noted)
                assert type(layer.bias) is not Noted
                assert layer.weight.note == "mine"
        assert {type(layer.weight) for layer in layers} == {Noted}

    sw.simulate(2, run)


def test_hooks_of_the_user_stay_and_can_be_taken_off_after_a_refusal() -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(FOUR["stages-two-x-two"], channel)
        called: list[int] = []
        handle = engine.model.register_forward_hook(lambda *_: called.append(1))
        with pytest.raises(PlanError):
            sw.relayout(engine, no_such_rule(channel.rank))
        train(engine, channel, [0])
        before = len(called)
        assert before
        engine = sw.relayout(engine, FOUR["tensor-two-stages"])
        train(engine, channel, [1])
        assert len(called) > before
        handle.remove()
        before = len(called)
        train(engine, channel, [2])
        assert len(called) == before

    sw.simulate(4, run)


USES: list[Callable[[sw.Engine, sw.Channel], object]] = [
    lambda engine, channel: train(engine, channel, [1]),
    lambda engine, channel: engine.evaluate(word_batch(0, 7)),
    lambda engine, channel: engine.state(),
    lambda engine, channel: sw.save("nowhere", engine, channel=channel),
    lambda engine, channel: sw.relayout(engine, FOUR["four-replicas"]),
]


def test_the_engine_before_refuses_and_its_memory_goes() -> None:
    def run(channel: sw.Channel) -> None:
        before = engine_of(FOUR["stages-two-x-two"], channel)
        train(before, channel, [0])
        engine = sw.relayout(before, FOUR["tensor-two-parts-x-two"])
        for use in USES:
            with pytest.raises(ModelError, match=r"sw\.relayout has given the model of this engine to another"):
                use(before, channel)
        train(engine, channel, [1])
        kept = weakref.ref(before)
        del before
        gc.collect()
        assert kept() is None
        train(engine, channel, [2])

    sw.simulate(4, run)
