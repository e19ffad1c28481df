"""What does not fit is said before a load: findings, and state that no checkpoint can keep."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import ModelError, OptimizerError
from tests.engine.checkpoints import (
    OPTIMIZERS,
    SLICES,
    Mixed,
    Saved,
    State,
    after,
    assert_same_bits,
    engine_of,
    load,
    plan_of,
    saved,
    snapshot,
    train,
)
from tests.engine.expected import adamw, seeded, sgd, square_loss
from tests.engine.test_restore import with_groups


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"words": {1, 2}}, r"state 'words' of 'scalar' is {1, 2} \(set\); a checkpoint keeps tensors, bool"),
        ({"big": 1 << 63}, r"state 'big' of 'scalar' is 9223372036854775808 \(int\)"),
        ({"history": [1, 1j]}, r"state 'history\[1\]' of 'scalar' is 1j \(complex\)"),
        ({"a/b": 1}, r"has the key 'a/b'. .* keys that are strings without /"),
        ({"master": 1}, "has the key 'master'"),
        ({3: 1}, "has the key 3"),
    ],
)
def test_state_that_no_checkpoint_can_keep_is_refused_by_name(entry: dict[Any, Any], message: str) -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(1, SLICES), adamw)
        engine.optimizer.state[engine.optimizer.param_groups[0]["params"][0]].update(entry)
        with pytest.raises(OptimizerError, match=message):
            engine.state()

    sw.simulate(1, run)


def test_one_key_with_values_of_two_types_is_refused() -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(1, SLICES), adamw)
        first, second, *_ = engine.optimizer.param_groups[0]["params"]
        engine.optimizer.state[first]["count"] = 1
        engine.optimizer.state[second]["count"] = 1.0
        with pytest.raises(OptimizerError, match=r"'count' is of type float for 'gate', and of type int for other"):
            engine.settings()

    sw.simulate(1, run)


def test_state_of_parameters_that_came_later_is_refused() -> None:
    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(1, SLICES), adamw)
        stranger = nn.Parameter(torch.zeros(2, 3))
        engine.optimizer.state[stranger]["step"] = 1
        with pytest.raises(
            OptimizerError, match=r"has state for a parameter of shape \[2, 3\], which it did not get at first"
        ):
            engine.state()
        del engine.optimizer.state[stranger]
        engine.optimizer.add_param_group({"params": [stranger]})
        with pytest.raises(OptimizerError, match="has 2 groups, and had 1 in the last step"):
            engine.settings()

    sw.simulate(1, run)


def findings_of(checkpoint: Saved, optimizer: Any, *, prepare: Callable[[sw.Engine], object] = id) -> list[str]:
    """The findings on two ranks, which must be the same."""

    def run(channel: sw.Channel) -> list[str]:
        engine = engine_of(channel, plan_of(2, SLICES), optimizer)
        prepare(engine)
        return list(engine.restore(checkpoint.stored(), checkpoint.settings).findings)

    first, second = sw.simulate(2, run)
    assert first == second
    return first


def test_another_optimizer_is_a_finding_and_its_state_is_not_mixed_in() -> None:
    checkpoint = after(plan_of(2, SLICES), sgd, 2)
    finding, *others = findings_of(checkpoint, adamw)
    assert others == []
    assert finding.startswith("AdamW trains 'scalar', 'gate', 'long' and ")
    assert "but SGD trained it in the checkpoint" in finding

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(1, SLICES), adamw)
        load(engine, checkpoint, strict=False)
        assert not engine.optimizer.state
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2
        train(engine, channel, range(1))

    sw.simulate(1, run)


def test_groups_that_were_apart_with_other_settings_are_a_finding_that_names_them() -> None:
    findings = findings_of(after(plan_of(2, SLICES), with_groups(wide=0.5), 1), adamw)
    assert [finding.split("; ")[0].split(": ", 1)[1] for finding in findings] == [
        "betas is [0.5, 0.6] for 'scalar' and [0.9, 0.999] for 'nothing'",
        "lr is 0.25 for 'scalar' and 0.5 for 'nothing'",
    ]


def test_parameters_that_only_one_side_trains_are_findings() -> None:
    def frozen(channel: sw.Channel) -> tuple[State, dict[str, Any]]:
        model = seeded(Mixed)()
        model.out.weight.requires_grad_(False)
        engine = sw.parallelize(model, plan_of(2, SLICES), optimizer=adamw, loss=square_loss, channel=channel)
        train(engine, channel, range(1))
        return snapshot(engine)

    fewer = saved(sw.simulate(2, frozen))
    (finding,) = findings_of(fewer, adamw)
    assert finding.startswith("1 parameters are trained here, but were frozen in the checkpoint: 'out.weight'")

    more = after(plan_of(2, SLICES), adamw, 1)

    def run(channel: sw.Channel) -> list[str]:
        model = seeded(Mixed)()
        model.out.weight.requires_grad_(False)
        engine = sw.parallelize(model, plan_of(2, SLICES), optimizer=adamw, loss=square_loss, channel=channel)
        return list(engine.restore(more.stored(), more.settings).findings)

    [(finding,), _] = sw.simulate(2, run)
    assert finding.startswith("1 parameters were trained in the checkpoint, but are not here: 'out.weight'")


def test_settings_that_only_one_side_knows_are_findings() -> None:
    checkpoint = after(plan_of(2, SLICES), adamw, 1)
    settings = checkpoint.settings["optimizers"][0]["groups"][0]["settings"]
    del settings["eps"]
    settings["warmth"] = 3
    findings = findings_of(checkpoint, adamw)
    group = "the group of AdamW with 'scalar', 'gate', 'long' and 9 more"
    assert findings == [
        f"{group} has no setting 'warmth', which the checkpoint has (3)",
        f"{group} has settings that the checkpoint does not have: 'eps'",
    ]


def test_plain_weights_load_into_a_fresh_engine_and_leave_state_alone_otherwise() -> None:
    held = after(plan_of(2, SLICES), adamw, 2)
    names = [name for name in held.tensors if not name.startswith("optimizer/")]
    weights = Saved(tensors={name: held.tensors[name] for name in names}, settings={})
    for optimizer in ("adamw", "adagrad"):
        assert findings_of(weights, OPTIMIZERS[optimizer]) == []

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(2, SLICES), adamw, seed=1)
        train(engine, channel, range(1))
        before = snapshot(engine)[0]
        restoration = load(engine, weights, strict=False)
        (finding,) = restoration.findings
        assert finding.startswith("the checkpoint has no optimizer state, and the optimizer has updated already")
        state = snapshot(engine)[0]
        assert_same_bits(
            {piece: value for piece, value in state.items() if piece.name.startswith("optimizer/")},
            {piece: value for piece, value in before.items() if piece.name.startswith("optimizer/")},
        )
        for name, value in engine.model.named_parameters():
            assert torch.equal(value, weights.tensors[name])

    sw.simulate(2, run)


def test_a_load_into_a_model_whose_storage_was_replaced_is_refused() -> None:
    checkpoint = after(plan_of(1, SLICES), adamw, 1)

    def run(channel: sw.Channel) -> None:
        engine = engine_of(channel, plan_of(1, SLICES), adamw)
        engine.model.get_parameter("out.weight").data = torch.zeros(1, 9)
        with pytest.raises(ModelError, match=r"given other storage after parallelize, among them 'out\.weight'"):
            engine.restore(checkpoint.stored(), checkpoint.settings)

    sw.simulate(1, run)
