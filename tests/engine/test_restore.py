"""A load into an engine: training goes on to the bit, under any layout."""

import json
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.checkpoint.states import Restorable
from tests.covering import covering
from tests.engine.checkpoints import (
    OPTIMIZERS,
    SHARDINGS,
    SLICES,
    STAGE0,
    WHOLE,
    Counting,
    Saved,
    State,
    after,
    assert_same_bits,
    engine_of,
    everything,
    load,
    plan_of,
    saved,
    snapshot,
    train,
)
from tests.engine.expected import adamw, points
from tests.engine.oracle import Optimizers


def outcome(engine: sw.Engine, channel: sw.Channel, steps: range) -> tuple[Any, State, dict[str, torch.Tensor], Any]:
    return train(engine, channel, steps), *snapshot(engine)[:1], everything(engine), engine.settings()


def assert_same_outcomes(one: Sequence[Any], other: Sequence[Any]) -> None:
    for (losses, state, tensors, settings), (its_losses, its_state, its_tensors, its_settings) in zip(
        one, other, strict=True
    ):
        assert losses == its_losses
        assert settings == its_settings
        assert_same_bits(state, its_state)
        assert_same_bits(tensors, its_tensors)


@pytest.mark.parametrize(
    ("ranks", "k", "sharding", "compute", "optimizer"),
    covering((1, 2, 3), (1, 4), list(SHARDINGS), (None, "bfloat16"), ("adamw", "sgd", "counting")),
)
def test_training_goes_on_to_the_bit(ranks: int, k: int, sharding: str, compute: str | None, optimizer: str) -> None:
    plan = plan_of(ranks, SHARDINGS[sharding], compute=compute, k=k)
    checkpoint = after(plan, OPTIMIZERS[optimizer], 2)

    def uninterrupted(channel: sw.Channel) -> Any:
        engine = engine_of(channel, plan, OPTIMIZERS[optimizer])
        train(engine, channel, range(2))
        return outcome(engine, channel, range(2, 5))

    def resumed(channel: sw.Channel) -> Any:
        engine = engine_of(channel, plan, OPTIMIZERS[optimizer], seed=1)
        load(engine, checkpoint)
        return outcome(engine, channel, range(2, 5))

    assert_same_outcomes(sw.simulate(ranks, resumed), sw.simulate(ranks, uninterrupted))


@pytest.mark.parametrize(
    ("num_before", "sharding", "optimizer"), covering((1, 4), list(SHARDINGS), list(OPTIMIZERS), strength=2)
)
def test_an_engine_that_has_trained_forgets_everything_of_its_own(
    num_before: int, sharding: str, optimizer: str
) -> None:
    plan = plan_of(2, SHARDINGS[sharding], compute="bfloat16")
    checkpoint = after(plan, OPTIMIZERS[optimizer], 2)

    def from_scratch(channel: sw.Channel) -> Any:
        engine = engine_of(channel, plan, OPTIMIZERS[optimizer], seed=1)
        load(engine, checkpoint)
        return outcome(engine, channel, range(2, 5))

    def from_elsewhere(channel: sw.Channel) -> Any:
        engine = engine_of(channel, plan, OPTIMIZERS[optimizer], seed=1)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.7
        train(engine, channel, range(7, 7 + num_before))
        with torch.no_grad():
            engine.model.get_parameter("out.weight").fill_(3.0)  # a write that the engine has not noticed yet
        load(engine, checkpoint)
        return outcome(engine, channel, range(2, 5))

    assert_same_outcomes(sw.simulate(2, from_elsewhere), sw.simulate(2, from_scratch))


@cache
def after_three(plan: sw.Plan, optimizer: str) -> Saved:
    """When every kind of state is there: `Counting` begins its last one with the third update."""
    return after(plan, OPTIMIZERS[optimizer], 3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("compute", [(None, None), ("bfloat16", "bfloat16"), ("bfloat16", None)])
def test_every_layout_takes_over_every_other(optimizer: str, compute: tuple[str | None, str | None]) -> None:
    """AdamW with masters from each to each; else each optimizer to another one: the five to all."""
    layouts = [
        (1, SLICES),
        (3, SLICES),
        (2, WHOLE),
        (2, STAGE0),
        (4, sw.Sharding(owners="dp_shard", bucket_bytes=500)),
    ]
    plans = [
        [
            sw.Plan(
                mesh=sw.Mesh(dp_replicate=2, dp_shard=2) if ranks == 4 else sw.Mesh(dp_shard=ranks),
                sharding=sharding,
                precision=sw.Precision(compute=each),
            )
            for ranks, sharding in layouts
        ]
        for each in compute
    ]
    ahead = list(OPTIMIZERS).index(optimizer)
    goes_to_each = ahead == 0 and compute[0] == compute[1] == "bfloat16"
    for at, source in enumerate(plans[0]):
        checkpoint = after_three(source, optimizer)
        for target in plans[1] if goes_to_each else [plans[1][(at + ahead) % len(plans[1])]]:

            def run(channel: sw.Channel, plan: sw.Plan = target, held: Saved = checkpoint) -> Any:
                engine = engine_of(channel, plan, OPTIMIZERS[optimizer], seed=1)
                restoration = load(engine, held)
                names = {*(piece.name for piece in restoration.wanted), *restoration.accounted}
                return names, snapshot(engine)

            results = sw.simulate(target.mesh.size, run)
            asked = {name for names, _ in results for name in names}
            masters = {f"optimizer/{name}/master" for name in asked}
            assert checkpoint.tensors.keys() <= asked | masters, "everything has a place"
            again = saved([each for _, each in results])
            assert {**again.settings, "plan": ""} == {**checkpoint.settings, "plan": ""}
            expected = dict(checkpoint.tensors)
            if compute[0] and not compute[1]:
                masters = {name for name in expected if name.endswith("/master")}
                expected |= {name.split("/")[1]: expected[name] for name in masters}
                expected = {name: value for name, value in expected.items() if name not in masters}
                again.tensors.pop("nothing")
                expected.pop("nothing")
            assert_same_bits(again.tensors, expected)


def test_the_state_tells_a_number_per_parameter_from_one_per_element() -> None:
    """`long` leaves a slice of one element to the second rank, where both have one shape."""
    tensors = after(plan_of(2, sw.Sharding(bucket_bytes=1)), Counting, 3).tensors
    assert tensors["optimizer/long/one"].shape == (1,)
    assert tensors["optimizer/long/late"].shape == (17,)
    assert tensors["optimizer/gate/late"].shape == (1,)
    assert tensors["optimizer/scalar/one"].shape == (1,)
    assert tensors["optimizer/scalar/late"].shape == ()


def test_python_values_are_kept_as_numbers_of_64_bits_and_come_back_as_they_were() -> None:
    checkpoint = after(plan_of(2, SLICES), Counting, 2)
    held = {key: checkpoint.tensors[f"optimizer/out.bias/{key}"] for key in ("step", "decay", "even")}
    assert {key: (value.dtype, value.shape) for key, value in held.items()} == {
        "step": (torch.int64, ()),
        "decay": (torch.float64, ()),
        "even": (torch.bool, ()),
    }
    (optimizer,) = checkpoint.settings["optimizers"]
    assert optimizer["plain"] == {"step": "int", "decay": "float", "even": "bool"}
    assert optimizer["none"] == {"late": True}

    def run(channel: sw.Channel) -> list[Any]:
        engine = engine_of(channel, plan_of(1, SLICES), Counting)
        load(engine, checkpoint)
        state = engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]
        assert state["one"].item() == 0.25
        return [state[key] for key in ("step", "decay", "even", "late")]

    [values] = sw.simulate(1, run)
    assert values == [2, 1.0 * 0.99 * 0.99, True, None]
    assert [type(value) for value in values] == [int, float, bool, type(None)]


def test_nothing_changes_before_finish_and_nothing_is_sent() -> None:
    checkpoint = after(plan_of(2, SLICES, compute="bfloat16"), Counting, 2)

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = engine_of(recorded, plan_of(2, SLICES, compute="bfloat16"), Counting, seed=1)
        train(engine, channel, range(7, 8))
        state, settings = snapshot(engine)
        tensors = everything(engine)
        recorded.clear()
        restoration = engine.restore(checkpoint.stored(), checkpoint.settings)
        assert recorded.calls == []
        assert_same_bits(snapshot(engine)[0], state)
        assert_same_bits(everything(engine), tensors)
        assert engine.settings() == settings
        restoration.finish()
        purposes = [call.purpose for call in recorded.calls]
        assert purposes == [f"restored parameters of bucket {at}" for at in range(len(purposes))]
        assert len(purposes) > 2

    sw.simulate(2, run)


def test_working_copies_are_made_from_masters_and_not_wanted() -> None:
    checkpoint = after(plan_of(2, SLICES, compute="bfloat16"), adamw, 1)

    def run(channel: sw.Channel) -> None:
        engine: Restorable = engine_of(channel, plan_of(2, SLICES, compute="bfloat16"), adamw)
        restoration = engine.restore(checkpoint.stored(), checkpoint.settings)
        wanted = {piece.name for piece in restoration.wanted}
        assert "first.weight" in restoration.accounted
        assert "frozen.weight" in restoration.accounted
        assert not wanted & set(restoration.accounted)
        assert {"order", "norm.running_mean", "norm.num_batches_tracked"} <= wanted
        assert dict(restoration.aliases) == {"again.weight": "first.weight"}

    sw.simulate(2, run)


def with_groups(*, wide: float, tensor: bool = False) -> Optimizers:
    """Matrices in one group, the others in a second one."""

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        rate: Any = torch.tensor(wide) if tensor else wide
        return torch.optim.AdamW(
            [
                {"params": [each for each in parameters if each.requires_grad and each.ndim > 1], "lr": rate},
                {"params": [each for each in parameters if each.requires_grad and each.ndim < 2], "betas": (0.5, 0.6)},
            ],
            lr=torch.tensor(0.25) if tensor else 0.25,
            foreach=False if tensor else None,
        )

    return make


@pytest.mark.parametrize("from_tensor", [False, True])
def test_settings_go_into_the_same_groups_that_schedulers_hold(from_tensor: bool) -> None:
    def save(channel: sw.Channel) -> tuple[State, dict[str, Any]]:
        engine = engine_of(channel, plan_of(2, SLICES), with_groups(wide=0.5, tensor=from_tensor))
        torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda _: 0.125)
        return snapshot(engine)

    checkpoint = saved(sw.simulate(2, save))

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(2, SLICES), with_groups(wide=0.75, tensor=not from_tensor))
        before = [(group, group["lr"]) for group in engine.optimizer.param_groups]
        load(engine, checkpoint)
        for group, (was, rate), expected in zip(engine.optimizer.param_groups, before, (0.0625, 0.03125), strict=True):
            assert group is was
            assert isinstance(group["lr"], torch.Tensor if not from_tensor else float)
            assert group["lr"] is rate or from_tensor
            assert float(group["lr"]) == expected
            assert float(group["initial_lr"]) == expected * 8
            assert group["foreach"] is (None if from_tensor else False)
        assert [group["betas"] for group in engine.optimizer.param_groups] == [(0.9, 0.999), (0.5, 0.6)]

    sw.simulate(2, run)


def test_a_checkpoint_from_before_the_first_update_empties_the_state() -> None:
    checkpoint = after(plan_of(2, SLICES), adamw, 0)

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(2, SLICES), adamw)
        train(engine, channel, range(2))
        load(engine, checkpoint)
        assert not engine.optimizer.state

    sw.simulate(2, run)


def test_buffers_that_a_rank_wrote_on_its_own_still_follow_rank_0_after_a_load() -> None:
    checkpoint = after(plan_of(2, SLICES), adamw, 1)

    def run(channel: sw.Channel) -> tuple[torch.Tensor, int, int]:
        engine = engine_of(channel, plan_of(2, SLICES), adamw)
        engine.model.get_buffer("scratch").fill_(float(channel.rank + 1))
        load(engine, checkpoint)
        before = engine.counters.all_gathers
        train(engine, channel, range(1, 2))
        in_first = engine.counters.all_gathers - before
        engine.evaluate(points(0, 4))
        return engine.model.get_buffer("scratch").clone(), in_first, engine.counters.all_gathers

    (first, *_), (second, *_) = sw.simulate(2, run)
    assert first.tolist() == second.tolist() == [1.0, 1.0]


def test_state_in_a_wider_dtype_follows_the_masters_and_counts_stay_as_they_are() -> None:
    checkpoint = after(plan_of(1, SLICES), adamw, 1)

    def run(channel: sw.Channel) -> None:
        plan = sw.Plan(precision=sw.Precision(compute="float64", master="float64"))
        engine = engine_of(channel, plan, adamw)
        wanted = engine.restore(checkpoint.stored(), checkpoint.settings).wanted
        dtypes = {piece.name: piece.dtype for piece in wanted}
        assert dtypes["optimizer/out.bias/exp_avg"] == "float64"
        assert dtypes["optimizer/out.bias/step"] == "float32"

    sw.simulate(1, run)


def test_ties_of_one_side_are_found_on_the_other() -> None:
    checkpoint = after(plan_of(2, SLICES), adamw, 2)
    renamed = json.loads(
        json.dumps(checkpoint.settings).replace('"first.weight"', '"other"').replace("again.weight", "first.weight")
    )
    tensors = {name.replace("first.weight", "other"): value for name, value in checkpoint.tensors.items()}
    assert renamed["ties"] == {"first.weight": "other"}

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(2, SLICES), adamw, seed=1)
        restoration = engine.restore(Saved(tensors=tensors, settings={}).stored(), renamed)
        assert list(restoration.findings) == []
        names = {piece.name for piece in restoration.wanted}
        assert channel.rank == 1 or "optimizer/first.weight/exp_avg" in names

    sw.simulate(2, run)
