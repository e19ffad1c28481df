"""The state of an engine, and loads into one: pieces, what ranks hold, training that goes on to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.covering import covering
from tests.engine.checkpoints import (
    SHARDINGS,
    SLICES,
    STAGE0,
    WHOLE,
    Counting,
    Mixed,
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
from tests.engine.refusals import raise_of_all
from tests.oracle.batches import points, square_loss
from tests.oracle.program import Optimizers, adamw, seeded
from tests.refusals import Refusals

# What there is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sharding", "compute"),
    [(SLICES, "bfloat16"), (WHOLE, None), (STAGE0, "bfloat16"), (sw.Sharding(stage=3, bucket_bytes=200), None)],
    ids=["slices", "whole", "stage 0", "stage 3"],
)
def test_the_state_is_views_that_follow_updates_and_takes_no_message(
    sharding: sw.Sharding, compute: str | None
) -> None:
    """Names, shapes and cover are compared by the driver of `tests/oracle`."""

    def run(channel: sw.Channel) -> None:
        recorded = sw.Recorded(channel)
        engine = engine_of(recorded, plan_of(2, sharding, compute=compute), adamw)
        train(engine, channel, range(2))
        recorded.clear()
        state, _ = snapshot(engine)
        assert recorded.calls == []
        assert sharding.partition != "whole" or all(piece.run is None for piece in state)
        views = engine.state()
        train(engine, channel, range(2, 3))
        assert all(torch.equal(views[piece], each) for piece, each in engine.state().items())
        moments = [piece for piece in state if piece.name.endswith("exp_avg")]
        assert moments
        assert not any(torch.equal(state[piece], views[piece]) for piece in moments)

    sw.simulate(2, run)


def other(value: torch.Tensor) -> torch.Tensor:
    """What bfloat16 holds: a working copy can give its master no more than it holds itself."""
    return (value.detach().float() * 3 + 1).bfloat16() if value.is_floating_point() else value


@torch.no_grad()
def copy_in(model: nn.Module, *names: str) -> None:
    for name, parameter in model.named_parameters():
        if not names or name in names:
            parameter.copy_(other(parameter))


LOADS: dict[str, Callable[[nn.Module], object]] = {
    "plain": lambda model: model.load_state_dict({key: other(each) for key, each in model.state_dict().items()}),
    "by copies": copy_in,
    "one": lambda model: copy_in(model, "long"),
}


@pytest.mark.parametrize(
    ("sharding", "way", "compute"), covering(list(SHARDINGS), list(LOADS), (None, "bfloat16"), strength=2)
)
def test_values_loaded_into_the_model_reach_the_masters(sharding: str, way: str, compute: str | None) -> None:
    def trained(channel: sw.Channel, *, afterwards: bool) -> tuple[State, dict[str, Any]]:
        model = seeded(Mixed)().bfloat16().float()
        if not afterwards:
            LOADS[way](model)
        plan = plan_of(2, SHARDINGS[sharding], compute=compute)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        if afterwards:
            LOADS[way](model)
        train(engine, channel, range(2))
        return snapshot(engine)

    later = saved(sw.simulate(2, lambda channel: trained(channel, afterwards=True)))
    assert_same_bits(later.tensors, saved(sw.simulate(2, lambda channel: trained(channel, afterwards=False))).tensors)


# Loads --------------------------------------------------------------------------------------------------------------


def test_a_number_per_parameter_and_one_per_element_and_python_values_come_back_as_they_were() -> None:
    """`long` leaves a slice of one element to the second rank, where both have one shape."""
    checkpoint = after(plan_of(2, sw.Sharding(bucket_bytes=1)), Counting, 3)
    shapes = {"long/one": (1,), "long/late": (17,), "gate/late": (1,), "scalar/one": (1,), "scalar/late": ()}
    assert {name: checkpoint.tensors[f"optimizer/{name}"].shape for name in shapes} == shapes
    checkpoint = after(plan_of(2, SLICES), Counting, 2)
    held = {key: checkpoint.tensors[f"optimizer/out.bias/{key}"] for key in ("step", "decay", "even")}
    dtypes = {"step": torch.int64, "decay": torch.float64, "even": torch.bool}
    assert {key: (value.dtype, value.shape) for key, value in held.items()} == {
        key: (dtype, ()) for key, dtype in dtypes.items()
    }
    (optimizer,) = checkpoint.settings["optimizers"]
    assert optimizer["plain"] == {"step": "int", "decay": "float", "even": "bool"}
    assert optimizer["none"] == {"late": True}
    engine = engine_of(sw.comm.alone(), plan_of(1, SLICES), Counting)
    load(engine, checkpoint)
    state = engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]]
    values = [state[key] for key in ("step", "decay", "even", "late")]
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


def test_a_checkpoint_from_before_the_first_update_empties_the_state_and_buffers_follow_rank_0() -> None:
    checkpoint = after(plan_of(2, SLICES), adamw, 0)

    def run(channel: sw.Channel) -> list[float]:
        engine = engine_of(channel, plan_of(2, SLICES), adamw)
        train(engine, channel, range(2))
        engine.model.get_buffer("scratch").fill_(float(channel.rank + 1))  # which no checkpoint has
        load(engine, checkpoint)
        assert not engine.optimizer.state
        train(engine, channel, range(1, 2))
        found: list[float] = engine.model.get_buffer("scratch").tolist()
        return found

    assert sw.simulate(2, run) == [[1.0, 1.0]] * 2


# Refusals -------------------------------------------------------------------------------------------------------------


def keeping(act: Callable[[torch.optim.Optimizer], object], method: str = "state") -> Callable[[], None]:
    """What the optimizer has in `act` is in no checkpoint."""

    def refused() -> None:
        engine = engine_of(sw.comm.alone(), plan_of(1, SLICES), adamw)
        act(engine.optimizer)
        getattr(engine, method)()

    return refused


def with_entries(*entries: dict[Any, Any]) -> Callable[[torch.optim.Optimizer], None]:
    """State of the first parameters."""

    def act(optimizer: torch.optim.Optimizer) -> None:
        for parameter, entry in zip(optimizer.param_groups[0]["params"], entries, strict=False):
            optimizer.state[parameter].update(entry)

    return act


STRANGER = nn.Parameter(torch.zeros(2, 3))


def other_storage() -> None:
    checkpoint = after(plan_of(1, SLICES), adamw, 1)
    engine = engine_of(sw.comm.alone(), plan_of(1, SLICES), adamw)
    engine.model.get_parameter("out.weight").data = torch.zeros(1, 9)
    engine.restore(checkpoint.stored(), checkpoint.settings)


def replaced(
    replace: Callable[[nn.Module], object], method: str = "step", on_ranks: tuple[int, ...] = (0, 1)
) -> Callable[[], None]:
    """After a step, on some ranks."""

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(2, SLICES), adamw)
        engine.step(points(channel.rank, 4))
        if channel.rank in on_ranks:
            replace(engine.model)
        getattr(engine, method)(points(channel.rank, 4))

    return lambda: raise_of_all(2, run)


def replace_data(model: nn.Module) -> None:
    model.get_parameter("long").data = torch.zeros(17)


REFUSED = Refusals(
    "engine.state",
    {
        "a set": keeping(with_entries({"words": {1}})),
        "a large number": keeping(with_entries({"big": 1 << 63})),
        "a complex number in a list": keeping(with_entries({"history": [1, 1j]})),
        "a key with /": keeping(with_entries({"a/b": 1})),
        "the key of masters": keeping(with_entries({"master": 1})),
        "a key that is a number": keeping(with_entries({3: 1})),
        "values of two types": keeping(with_entries({"count": 1}, {"count": 1.0}), "settings"),
        "a parameter that came later": keeping(lambda each: each.state[STRANGER].update(step=1)),
        "a group that came later": keeping(lambda each: each.add_param_group({"params": [STRANGER]}), "settings"),
        "storage that was replaced before a load": other_storage,
        "storage that was replaced before a step": replaced(replace_data),
        "storage that was replaced before an evaluation, on one rank": replaced(replace_data, "evaluate", (1,)),
        "a model that was cast": replaced(lambda model: model.double()),
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_cannot_be_kept_is_refused_by_name(case: str) -> None:
    REFUSED.check(case)
