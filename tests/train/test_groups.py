"""Learning rate, weight decay and freezing by name: [[train.groups]], against a plain optimizer with those groups."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from shardwise import checkpoint
from shardwise.data import DataPlace, first_batches
from shardwise.errors import ConfigError
from shardwise.train import RunConfig
from shardwise.train.run_build import build_model, optimizer_factory
from shardwise.train.run_data import build_data
from shardwise.train.turns import build_loss
from tests.train.runs import Finished, finished, laid_out, small_run

PLAIN = ("train.decay=constant", "train.warmup_steps=0", "train.clip_grad_norm=null")
GROUPS = (
    "train.groups=[{parameters=['*.bias'], learning_rate=0.05, weight_decay=0.3}, "
    "{parameters=['norm', '*.bias'], frozen=true}, {parameters=['embed*'], learning_rate=0.0}]"
)


def plain_losses(config: RunConfig, groups: dict[str, dict[str, float]], steps: int) -> list[float]:
    """A loop over the same global batches, with torch's AdamW over these groups of one parameter each."""
    model = build_model(config)
    loss = cast("Callable[..., torch.Tensor]", build_loss(config, model))
    trained = dict(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [trained[name]], **settings} for name, settings in groups.items()])
    for name, parameter in trained.items():
        parameter.requires_grad_(name in groups)
    losses = []
    for batch in first_batches(build_data(config).data, DataPlace(), steps):
        optimizer.zero_grad()
        found = loss(model(batch["input_ids"]), batch)
        found.backward()
        optimizer.step()
        losses.append(found.item())
    return losses


OF_ONE = {
    "embedding.weight": {"lr": 0.0, "weight_decay": 0.1},
    "norm.bias": {"lr": 0.05, "weight_decay": 0.3},
    "head.weight": {"lr": 0.02, "weight_decay": 0.1},
    "head.bias": {"lr": 0.05, "weight_decay": 0.3},
}
"""`GROUPS`, spelled out: the first group that names a parameter wins, and norm.weight is frozen."""


@pytest.mark.parametrize(
    "overrides",
    [[], ["mesh.dp_shard=3", "sharding.stage=3"], ["mesh.pp=2"], ["mesh.dp_shard=2", "sharding.partition=whole"]],
)
def test_groups_train_as_a_plain_optimizer_with_those_groups(tmp_path: Path, overrides: list[str]) -> None:
    config = laid_out(tmp_path, *PLAIN, GROUPS, *overrides)
    expected = plain_losses(config, OF_ONE, config.train.steps)
    assert finished(config).curve("loss") == pytest.approx(expected, rel=1e-5)


def test_the_first_group_that_names_a_parameter_decides(tmp_path: Path) -> None:
    config = small_run(tmp_path, GROUPS)
    model = build_model(config)
    assert [name for name, each in model.named_parameters() if not each.requires_grad] == ["norm.weight"]
    optimizer: Any = optimizer_factory(config, model)(list(model.parameters()))
    name_of = {each: name for name, each in model.named_parameters()}
    found = [
        (sorted(name_of[each] for each in group["params"]), group["lr"], group["weight_decay"])
        for group in optimizer.param_groups
    ]
    # Those without a group come first: a run reports their learning rate.
    assert found == [
        (["head.weight"], 0.02, 0.1),
        (["head.bias", "norm.bias"], 0.05, 0.3),
        (["embedding.weight"], 0.0, 0.1),
    ]


def test_a_name_that_no_parameter_has_is_refused_with_the_nearest(tmp_path: Path) -> None:
    config = small_run(tmp_path, "train.groups=[{parameters=['*.bias', 'haed*'], learning_rate=0.1}]")
    with pytest.raises(ConfigError) as caught:
        build_model(config)
    assert caught.value.problems == (
        "train.groups.0.parameters: 'haed*' matches none of the 5 parameters; the nearest parameter is 'head.bias'",
    )


def test_an_optimizer_that_loses_the_settings_of_groups_is_refused(tmp_path: Path) -> None:
    (tmp_path / "joined.py").write_text(
        "import torch\n\ndef joined(groups, lr):\n"
        "    return torch.optim.SGD([each for group in groups for each in group['params']], lr=lr)\n"
    )
    config = small_run(
        tmp_path, "train.optimizer=joined.py:joined", "train.groups=[{parameters=['*'], learning_rate=1.0}]"
    )
    model = build_model(config)
    with pytest.raises(ConfigError, match=r"joined\.py:joined makes optimizers with another lr than 1\.0; let it keep"):
        optimizer_factory(config, model)(list(model.parameters()))


def test_groups_that_say_nothing_or_too_much_are_refused(tmp_path: Path) -> None:
    words = "train.groups=[{parameters=['a']}, {parameters=['b'], frozen=true, learning_rate=1.0}, {parameter=['c']}]"
    with pytest.raises(ConfigError) as caught:
        small_run(tmp_path, words)
    assert list(caught.value.problems) == [
        "train.groups.2.parameters: missing; Names or globs of parameters, or of modules that contain them, such as "
        '["*.bias", "*norm*"].',
        "train.groups.2.parameter: unknown setting; did you mean train.groups.2.parameters?",
    ]
    with pytest.raises(ConfigError) as caught:
        small_run(tmp_path, words.replace(", {parameter=['c']}", ""))
    assert list(caught.value.problems) == [
        "train.groups.0: says nothing of its parameters; give learning_rate, weight_decay or frozen",
        "train.groups.1.learning_rate: given with frozen = true; leave one out",
    ]


SAVES = (*PLAIN, "checkpoint.every=2", "train.evaluate_every=100")
FROZEN = "train.groups=[{parameters=['norm', 'head.bias'], frozen=true}]"
ONE = "train.groups=[{parameters=['head.weight'], learning_rate=0.01, weight_decay=0.0}]"


def parts(folder: Path, then: str, now: str, *layouts: list[str]) -> tuple[Finished, dict[str, torch.Tensor]]:
    """A run of 4 updates, and of 2 more after the groups and the layout were changed; and the state in between."""
    first, second = layouts or ([], [])
    finished(laid_out(folder, *SAVES, then, "train.steps=4", *first))
    catalogue = checkpoint.open(folder / "out" / "checkpoints")
    state = {name: catalogue.read(name) for name in catalogue.tensors}
    return finished(laid_out(folder, *SAVES, now, *second), resume="auto"), state


NONE = "train.seed=5"
OTHERWISE = [["mesh.dp_shard=3"], ["mesh.dp_shard=2", "sharding.stage=3"]]


@pytest.mark.parametrize(
    ("then", "now", "layouts"),
    [
        (NONE, ONE, []),
        (ONE, NONE, OTHERWISE),
        (NONE, FROZEN, OTHERWISE),
        (FROZEN, ONE, OTHERWISE),
        (ONE, FROZEN, []),
    ],
    ids=["none to one", "one to none", "none to frozen", "frozen to one", "one to frozen"],
)
def test_a_run_goes_on_after_its_groups_were_changed(
    tmp_path: Path, then: str, now: str, layouts: list[list[str]]
) -> None:
    resumed, state = parts(tmp_path, then, now, *layouts)
    assert "optimizers have other groups than in the saved run: lr and weight_decay are those of now" in resumed.printed
    config = small_run(tmp_path, *SAVES, now)
    model = build_model(config)
    loss = cast("Callable[..., torch.Tensor]", build_loss(config, model))
    optimizer: Any = optimizer_factory(config, model)(list(model.parameters()))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(state[name])
            if parameter.requires_grad and f"optimizer/{name}/step" in state:
                optimizer.state[parameter] = {
                    key: state[f"optimizer/{name}/{key}"] for key in ("step", "exp_avg", "exp_avg_sq")
                }
    expected = []
    for batch in first_batches(build_data(config).data, DataPlace(), 6)[4:]:
        optimizer.zero_grad()
        found = loss(model(batch["input_ids"]), batch)
        found.backward()
        optimizer.step()
        expected.append(found.item())
    assert resumed.curve("loss")[4:] == pytest.approx(expected, rel=1e-5)


def test_a_parameter_in_half_precision_is_trained_from_a_resume_on(tmp_path: Path) -> None:
    half = ["precision.compute=bfloat16"]
    resumed, _ = parts(tmp_path, FROZEN, "train.seed=5", half, half)
    assert len(resumed.metrics) == 6


@pytest.mark.parametrize(("then", "now"), [(NONE, FROZEN), (FROZEN, NONE)], ids=["frozen", "trained"])
def test_averages_go_along_where_parameters_are_frozen_or_trained_from_a_resume_on(
    tmp_path: Path, then: str, now: str
) -> None:
    averages = ["average.decay=0.5"]
    resumed, _ = parts(tmp_path, then, now, averages, averages)
    assert len(resumed.metrics) == 6


def test_groups_hold_in_a_verification(tmp_path: Path) -> None:
    from shardwise.train.verification.program import configured
    from shardwise.train.verification.verifier import verify_simulated

    program = configured(laid_out(tmp_path, GROUPS, "mesh.dp_shard=2", "sharding.stage=3"), steps=2)
    assert verify_simulated(program).verdict in ("equal", "rounding")
