"""A running engine under another plan: nothing of its state changes, and a plan that cannot be leaves it as it was."""

import gc
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch

import shardwise as sw
from shardwise.errors import ModelError, PlanError, ShardwiseError
from tests.checkpoint.layouts import LAYOUTS, Whole, assembled, engine_of, same_bits, state_of, train
from tests.engine.loops import mean_square, sgd
from tests.oracle.batches import word_batch
from tests.oracle.decoder import decoder
from tests.refusals import Refusals

FOUR = {name: plan for name, plan in LAYOUTS.items() if plan.mesh.size == 4}
ROUNDS = [
    ["four-replicas", "tensor-two-stages", "stage3-replicas-bf16", "stages-four-bf16", "tensor-two-x-two-whole-bf16"],
    ["tensor-two-parts-x-two", "stage3-stages", "four-replicas-whole", "stages-two-x-two", "stage2-replicas"],
]
"""Five layouts each, and back to the first; all of four ranks."""


def buffers_of(engine: sw.Engine) -> Whole:
    """Also those that checkpoints leave out."""
    return {name: each.clone() for name, each in engine.model.named_buffers() if not each.is_meta}


def with_masters(whole: Whole) -> Whole:
    """A working copy of a parameter is its master, where another layout has no master."""
    masters = {name.split("/")[1]: each for name, each in whole.items() if name.endswith("/master")}
    return {name: each for name, each in (whole | masters).items() if not name.endswith("/master")}


@pytest.mark.parametrize(("names", "has_trained"), [(ROUNDS[0], True), (ROUNDS[1], False)], ids=["trained", "fresh"])
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
    wholes = [with_masters(assembled(state for state, _, _ in visit)) for visit in visits]
    first = {name: each for _, _, buffers in visits[0] for name, each in buffers.items()}
    for visit, whole in zip(visits[1:], wholes[1:], strict=True):
        assert whole.keys() == wholes[0].keys()
        assert [name for name in whole if not same_bits(whole[name], wholes[0][name])] == []
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


def test_schedules_hooks_and_optimizers_of_the_user_go_on_and_the_engine_before_refuses() -> None:
    names = ["stages-two-x-two", "tensor-two-parts-x-two", "stage3-replicas-bf16"]

    def run(channel: sw.Channel) -> None:
        engine = before = engine_of(FOUR[names[0]], channel)
        optimizer, called = engine.optimizer, list[int]()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        handle = engine.model.register_forward_hook(lambda *_: called.append(1))
        for at, name in enumerate(names):
            if at:
                with pytest.raises(PlanError):
                    sw.relayout(engine, PLANS["no such rule"](channel.rank))
                engine = sw.relayout(engine, FOUR[name])
            assert engine.optimizer is optimizer
            count = len(called)
            train(engine, channel, [at])
            assert len(called) > count
            schedule.step()
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            assert rates == [1e-2 * 0.5 ** (at + 1), 3e-3 * 0.5 ** (at + 1)]
            held = {id(each) for group in optimizer.param_groups for each in group["params"]}
            assert {id(each) for each in optimizer.state} <= held
        handle.remove()
        count = len(called)
        train(engine, channel, [3])
        assert len(called) == count
        uses: list[Callable[[], object]] = [
            lambda: train(before, channel, [1]),
            lambda: before.evaluate(word_batch(0, 7)),
            before.state,
            lambda: sw.save("nowhere", before),
            lambda: sw.relayout(before, FOUR["four-replicas"]),
        ]
        for use in uses:
            with pytest.raises(ModelError, match=r"sw\.relayout has given the model of this engine to another"):
                use()

    sw.simulate(4, run)


PLANS: dict[str, Callable[[int], Any]] = {
    "another world": lambda _: LAYOUTS["three-slice"],
    "no such rule": lambda _: replace(FOUR["tensor-two-stages"], tensor=sw.Tensor(rules={"upp": "column"})),
    "too many parts": lambda _: sw.Plan(
        mesh=sw.Mesh(tp=4), tensor=sw.Tensor(rules={"up": "column(unit=11)", "down": "row(unit=11)"})
    ),
    "nothing to keep": lambda _: replace(
        FOUR["four-replicas"], precision=sw.Precision(compute="bfloat16", keep=("nrom",))
    ),
    "no such stage": lambda _: replace(FOUR["stages-two-x-two"], pipeline=sw.Pipeline(stages={"embeding": 0})),
    "another plan on one rank": lambda rank: FOUR["four-replicas" if rank == 2 else "stages-two-x-two"],
    "no plan on one rank": lambda rank: {"tp": 2} if rank == 3 else FOUR["tensor-two-stages"],
}


@cache
def refused_by_all() -> dict[str, ShardwiseError]:
    """What an engine says to which every plan is given; between them it trains as if nothing had been."""

    def still(channel: sw.Channel) -> list[float]:
        return train(engine_of(FOUR["four-replicas"], channel), channel, range(2 + len(PLANS)))

    def run(channel: sw.Channel) -> tuple[list[float], dict[str, ShardwiseError]]:
        engine = engine_of(FOUR["four-replicas"], channel)
        losses, said = train(engine, channel, range(2)), {}
        for at, (case, plan_for) in enumerate(PLANS.items()):
            with pytest.raises(ShardwiseError) as caught:
                sw.relayout(engine, plan_for(channel.rank))
            said[case] = caught.value
            losses += train(engine, channel, [2 + at])
        return losses, said

    results = sw.simulate(4, run)
    assert [losses for losses, _ in results] == sw.simulate(4, still)
    assert all(str(said) == str(results[0][1]) for _, said in results), "every rank is told the same"
    return results[0][1]


def refused(case: str) -> Callable[[], None]:
    def call() -> None:
        raise refused_by_all()[case]

    return call


def no_engine() -> None:
    given: Any = decoder()
    sw.relayout(given, FOUR["four-replicas"])


REFUSED = Refusals("engine.relayout", {case: refused(case) for case in PLANS} | {"no engine": no_engine})


@pytest.mark.slow
@pytest.mark.parametrize("case", REFUSED)
def test_a_plan_that_cannot_be_is_refused_and_leaves_the_engine_as_it_was(case: str) -> None:
    REFUSED.check(case)


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


class Noted(torch.nn.Parameter):
    """A parameter of a class of the user's."""

    note: str


def test_parameters_keep_their_class_and_what_is_noted_on_them_and_the_engine_before_goes() -> None:
    def run(channel: sw.Channel) -> None:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 3))
        layers: list[Any] = list(model)
        for layer in layers:
            layer.weight = Noted(layer.weight.detach())
            layer.weight.note = "mine"
        data = sw.Mesh(dp_shard=2)
        engine = sw.parallelize(model, sw.Plan(mesh=data), optimizer=sgd, loss=mean_square, channel=channel)
        for plan in (sw.Plan(mesh=data, sharding=sw.Sharding(stage=3)), sw.Plan(mesh=sw.Mesh(pp=2)), engine.plan):
            before = weakref.ref(engine)
            engine = sw.relayout(engine, plan)
            gc.collect()
            assert before() is None
            for layer in layers:
                assert isinstance(layer.weight, Noted)
                assert type(layer.bias) is not Noted
                assert layer.weight.note == "mine"
        assert {type(layer.weight) for layer in layers} == {Noted}

    sw.simulate(2, run)
