"""The state of an engine, and loads into one: pieces, what ranks hold, training that goes on to the bit, findings."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError
from tests.covering import covering
from tests.engine.checkpoints import (
    OPTIMIZERS,
    SHARDINGS,
    SLICES,
    Counting,
    Mixed,
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
from tests.engine.refusals import same_error_everywhere
from tests.oracle.batches import points, square_loss
from tests.oracle.program import Optimizers, adamw, seeded
from tests.refusals import Refusals

TRAINED = {"first.weight", "first.bias", "norm.weight", "norm.bias", "scalar", "gate", "long"}
TRAINED |= {"again.bias", "out.weight", "out.bias"}
OTHERS = {"nothing", "unused", "frozen.weight", "frozen.bias", "order"}
BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}


# What there is ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("compute", [None, "bfloat16"])
@pytest.mark.parametrize(
    ("optimizer", "keys"), [("adamw", ("exp_avg", "exp_avg_sq", "step")), ("sgd", ("momentum_buffer",))]
)
def test_every_tensor_has_a_name_and_optimizer_state_is_where_its_owner_is(
    sharding: str, compute: str | None, optimizer: str, keys: tuple[str, ...]
) -> None:
    plan = plan_of(2, SHARDINGS[sharding], compute=compute)

    def run(channel: sw.Channel) -> tuple[State, dict[str, Any]]:
        recorded = sw.Recorded(channel)
        engine = engine_of(recorded, plan, OPTIMIZERS[optimizer])
        assert {piece.name for piece in engine.state()} <= TRAINED | OTHERS | BUFFERS | {
            f"optimizer/{name}/master" for name in TRAINED | OTHERS
        }
        train(engine, channel, range(2))
        recorded.clear()
        state, settings = snapshot(engine)
        assert recorded.calls == []
        held = {(each.name, each.elements) for each in state if each.name in TRAINED}
        for key in keys if sharding != "stage0" else ():
            of_key = {(each.name.split("/")[1], each.elements) for each in state if each.name.endswith(f"/{key}")}
            assert key == "step" or of_key == held or compute
        if sharding == "whole":
            assert all(piece.run is None for piece in state)
        # What was given are views: they follow the next update.
        before = engine.state()
        train(engine, channel, range(2, 3))
        assert all(torch.equal(before[piece], each) for piece, each in engine.state().items())
        assert not any(torch.equal(state[each], before[each]) for each in state if each.name.endswith(keys[0]))
        return state, settings

    tensors = saved(sw.simulate(2, run)).tensors
    names = TRAINED | OTHERS | BUFFERS | {f"optimizer/{name}/{key}" for name in TRAINED for key in keys}
    if compute:
        cast = TRAINED | OTHERS - {"nothing", "order"}
        names |= {f"optimizer/{name}/master" for name in cast if not name.startswith("norm")}
    assert tensors.keys() == names
    shapes = {name: each.shape for name, each in seeded(Mixed)().state_dict().items()}
    for name, tensor in tensors.items():
        _, parameter, key = name.split("/") if "/" in name else ("", name, "")
        assert tensor.shape == (() if key == "step" else shapes[parameter])


def other_values() -> dict[str, torch.Tensor]:
    """Values that bfloat16 holds: a working copy can give its master no more than it holds itself."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        values = Mixed().state_dict()
    return {name: value.bfloat16().to(value.dtype) for name, value in values.items()}


@torch.no_grad()
def copy_in(model: nn.Module, names: Sequence[str] = ()) -> None:
    for name, parameter in model.named_parameters():
        if not names or name in names:
            parameter.copy_(other_values()[name])


LOADS: dict[str, Callable[[nn.Module], object]] = {
    "plain": lambda model: model.load_state_dict(other_values()),
    "by copies": copy_in,
    "one": lambda model: copy_in(model, ["long"]),
}


@pytest.mark.parametrize(
    ("sharding", "way", "compute"), covering(list(SHARDINGS), list(LOADS), (None, "bfloat16"), strength=2)
)
def test_values_loaded_into_the_model_reach_the_masters(sharding: str, way: str, compute: str | None) -> None:
    plan = plan_of(2, SHARDINGS[sharding], compute=compute)

    def trained(channel: sw.Channel, *, afterwards: bool) -> tuple[State, dict[str, Any]]:
        model = seeded(Mixed)()
        if not afterwards:
            LOADS[way](model)
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=square_loss, channel=channel)
        if afterwards:
            LOADS[way](model)
        train(engine, channel, range(2))
        return snapshot(engine)

    later = saved(sw.simulate(2, lambda channel: trained(channel, afterwards=True)))
    assert_same_bits(later.tensors, saved(sw.simulate(2, lambda channel: trained(channel, afterwards=False))).tensors)


def replace_data(model: nn.Module) -> None:
    model.get_parameter("long").data = torch.zeros(17)


@pytest.mark.parametrize("on_ranks", [(0, 1), (1,)])
@pytest.mark.parametrize(
    ("replace", "method"), [(replace_data, "step"), (replace_data, "evaluate"), (lambda model: model.double(), "step")]
)
def test_storage_that_was_replaced_is_refused_on_all_ranks(
    replace: Callable[[nn.Module], object], method: str, on_ranks: tuple[int, ...]
) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(2, SLICES), adamw)
        engine.step(points(channel.rank, 4))
        if channel.rank in on_ranks:
            replace(engine.model)
        getattr(engine, method)(points(channel.rank, 4))

    error = same_error_everywhere(2, run)
    assert isinstance(error, ModelError)
    assert "parameters were given other storage after parallelize, among them '" in str(error)
    assert "Write values in place (load_state_dict, copy_)" in str(error)
    assert str(error).startswith("rank 1: ") == (on_ranks == (1,))


# Loads --------------------------------------------------------------------------------------------------------------


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
    ("ranks", "k", "sharding", "compute", "optimizer", "num_before"),
    covering((1, 2, 3), (1, 4), list(SHARDINGS), (None, "bfloat16"), list(OPTIMIZERS), (0, 1, 4), strength=2),
)
def test_training_goes_on_to_the_bit_also_in_an_engine_that_has_trained(
    ranks: int, k: int, sharding: str, compute: str | None, optimizer: str, num_before: int
) -> None:
    plan = plan_of(ranks, SHARDINGS[sharding], compute=compute, k=k)
    checkpoint = after(plan, OPTIMIZERS[optimizer], 3)  # `Counting` begins its last state with the third update

    def uninterrupted(channel: sw.Channel) -> Any:
        engine = engine_of(channel, plan, OPTIMIZERS[optimizer])
        train(engine, channel, range(3))
        return outcome(engine, channel, range(3, 6))

    def resumed(channel: sw.Channel) -> Any:
        engine = engine_of(channel, plan, OPTIMIZERS[optimizer], seed=1)
        for group in engine.optimizer.param_groups if num_before else ():
            group["lr"] = 0.7
        train(engine, channel, range(7, 7 + num_before))
        with torch.no_grad():
            engine.model.get_parameter("out.weight").fill_(3.0)  # a write that the engine has not noticed yet
        load(engine, checkpoint)
        return outcome(engine, channel, range(3, 6))

    assert_same_outcomes(sw.simulate(ranks, resumed), sw.simulate(ranks, uninterrupted))


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


# Refusals and findings ----------------------------------------------------------------------------------------------


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
    },
)


@pytest.mark.parametrize("case", REFUSED)
def test_state_that_no_checkpoint_can_keep_is_refused_by_name(case: str) -> None:
    REFUSED.check(case)


def findings_of(checkpoint: Saved, optimizer: Any = adamw, *, freezes: bool = False) -> list[str]:
    """The findings on two ranks, which must be the same."""

    def run(channel: sw.Channel) -> list[str]:
        engine = frozen_engine(channel) if freezes else engine_of(channel, plan_of(2, SLICES), optimizer)
        return list(engine.restore(checkpoint.stored(), checkpoint.settings).findings)

    first, second = sw.simulate(2, run)
    assert first == second
    return first


def frozen_engine(channel: sw.Channel) -> sw.Engine:
    model = seeded(Mixed)()
    model.out.weight.requires_grad_(False)
    return sw.parallelize(model, plan_of(2, SLICES), optimizer=adamw, loss=square_loss, channel=channel)


def test_what_only_one_side_has_is_a_finding_that_names_it() -> None:
    def fewer(channel: sw.Channel) -> tuple[State, dict[str, Any]]:
        engine = frozen_engine(channel)
        train(engine, channel, range(1))
        return snapshot(engine)

    (finding,) = findings_of(saved(sw.simulate(2, fewer)))
    assert finding.startswith("1 parameters are trained here, but were frozen in the checkpoint: 'out.weight'")
    held = after(plan_of(2, SLICES), adamw, 1)
    (finding,) = findings_of(held, freezes=True)
    assert finding.startswith("1 parameters were trained in the checkpoint, but are not here: 'out.weight'")
    findings = findings_of(after(plan_of(2, SLICES), with_groups(wide=0.5), 1))
    assert [finding.split("; ")[0].split(": ", 1)[1] for finding in findings] == [
        "betas is [0.5, 0.6] for 'scalar' and [0.9, 0.999] for 'nothing'",
        "lr is 0.25 for 'scalar' and 0.5 for 'nothing'",
    ]
    settings = held.settings["optimizers"][0]["groups"][0]["settings"]
    del settings["eps"]
    settings["warmth"] = 3
    group = "the group of AdamW with 'scalar', 'gate', 'long' and 9 more"
    assert findings_of(held) == [
        f"{group} has no setting 'warmth', which the checkpoint has (3)",
        f"{group} has settings that the checkpoint does not have: 'eps'",
    ]
