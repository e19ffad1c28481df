"""Groups of parameters with losses of their own in turns, and rows in other dims, against a plain loop."""

import math
from pathlib import Path
from typing import Any

import pytest

from shardwise.data import DataPlace, first_batches
from shardwise.errors import BatchError, ConfigError
from shardwise.train import RunConfig, check_references, read_config
from shardwise.train.run_build import build_model, optimizer_factory
from shardwise.train.run_data import build_data
from shardwise.train.turns import build_loss, build_turns
from tests.cli.processes import in_this_process
from tests.train.runs import finished, without_times

GAN = """
import torch
from torch import nn
from torch.nn.functional import softplus


class Gan(nn.Module):
    def __init__(self):
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise):
        return self.generator(noise)


def fools(fake, batch, model):
    return {"loss": softplus(-model.critic(fake)).mean(), "size": fake.square().mean()}


class TellsApart:
    def __init__(self, model, penalty):
        self.model, self.penalty = model, penalty

    def __call__(self, fake, batch):
        of_real = self.model.critic(batch["real"])
        wrong = softplus(-of_real).mean() + softplus(self.model.critic(fake)).mean()
        return {"loss": wrong + self.penalty * of_real.square().mean(), "wrong": wrong}


def two(groups, lr):
    weights = [each for group in groups for each in group["params"]]
    last = [each for each in weights if each.shape[0] in (1, 4)]
    return [torch.optim.AdamW(chosen, lr=lr, betas=(0.5, 0.9)) for chosen in (
        [each for each in weights if not any(each is other for other in last)], last)]


class Numbers:
    def __len__(self):
        return 60

    def __getitem__(self, at):
        return {"noise": torch.linspace(-1, 1, 3) * (at % 7), "real": torch.linspace(0, 1, 4) * (at % 5)}


class Frames(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Linear(5, 4)
        self.inner = nn.Linear(4, 2)

    def forward(self, frames, table):
        return self.inner(torch.tanh(frames + self.table(table))).mean(0)


def halves(output, batch):
    return (output - batch["wanted"]).square().mean()


def frames(samples):
    return {
        "frames": torch.stack([each["noise"][:, None].expand(3, 4) for each in samples], 1),
        "wanted": torch.stack([each["real"][:2] for each in samples]),
        "table": torch.linspace(-1, 1, 5),
    }
"""

TURNS = """
[model]
factory = "gan.py:Gan"
loss = "gan.py:fools"
groups = { generator = "generator", critic = ["critic.0", "critic.2"] }

[data]
dataset = "gan.py:Numbers"
held_out = 0.2

[train]
steps = 7
global_batch = 12
microbatch = 3
decay = "constant"
learning_rate = 0.02
weight_decay = 0.1
evaluate_every = 4

[[train.turns]]
only = "critic"
loss = "gan.py:TellsApart"
loss_options = { penalty = 0.1 }
steps = 2

[[train.turns]]
only = ["generator"]
"""

FRAMES = """
[model]
factory = "gan.py:Frames"
loss = "gan.py:halves"

[data]
dataset = "gan.py:Numbers"
collate = "gan.py:frames"
held_out = 0.2
rows = { frames = 1, table = "all" }

[train]
steps = 4
global_batch = 12
microbatch = 3
decay = "constant"
learning_rate = 0.02
evaluate_batches = 1
"""

STAGES = "pipeline.stages={'generator.*'=0, 'critic.*'=1}"


def configured(folder: Path, text: str, *overrides: str) -> RunConfig:
    (folder / "gan.py").write_text(GAN)
    (folder / "run.toml").write_text(text)
    sizes = [int(word.partition("=")[2]) for word in overrides if word.startswith("mesh.")]
    output = f"train.output={folder / 'out'}"
    return read_config(folder / "run.toml", overrides=[output, *overrides], num_processes=math.prod(sizes))


def plain_losses(config: RunConfig) -> list[float]:
    """The loop that everybody writes: a group, its loss, its optimizers, and the next rows."""
    model = build_model(config)
    optimizers: Any = optimizer_factory(config, model)(list(model.parameters()))
    losses, turns, usual = [], build_turns(config, model), build_loss(config, model)
    for step, batch in enumerate(first_batches(build_data(config).data, DataPlace(), config.train.steps), start=1):
        turn = turns.of(step)
        only = turn.get("only") or ()
        only = [only] if isinstance(only, str) else only
        model.requires_grad_(not only)
        for name in only:
            getattr(model, name).requires_grad_(True)
        model.zero_grad()
        loss: Any = turn.get("loss") or usual
        given = [batch[name] for name in ("noise", "frames", "table") if name in batch]
        found = loss(model(*given), batch)
        found = found["loss"] if isinstance(found, dict) else found
        found.backward()
        for optimizer in optimizers if isinstance(optimizers, list) else [optimizers]:
            optimizer.step()
        losses.append(found.item())
    return losses


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["mesh.dp_shard=2", "sharding.stage=3", "train.optimizer=gan.py:two"],
        ["mesh.pp=2", STAGES, "mesh.dp_shard=2"],
    ],
)
def test_turns_train_as_a_plain_loop(tmp_path: Path, overrides: list[str]) -> None:
    config = configured(tmp_path, TURNS, *overrides)
    check_references(config)
    found = finished(config)
    assert found.curve("loss") == pytest.approx(plain_losses(config), rel=1e-5)
    names = [sorted(line["losses"]) for line in found.metrics if line["loss"] is not None]
    assert names == [["size"] if step in (3, 6) else ["wrong"] for step in range(1, 8)]
    assert sorted(found.metrics[-1]["held_out"]) == ["size"]  # by the loss of [model]


def test_a_run_that_goes_on_goes_on_with_its_turn(tmp_path: Path) -> None:
    whole = finished(configured(tmp_path, TURNS))
    parts = "checkpoint.every=4", f"train.output={tmp_path / 'parts'}"
    finished(configured(tmp_path, TURNS, *parts, "train.steps=4"))
    gone_on = finished(configured(tmp_path, TURNS, *parts), resume="auto")
    assert without_times(gone_on.metrics)[-3:] == without_times(whole.metrics)[-3:]


def test_turns_are_verified(tmp_path: Path) -> None:
    configured(tmp_path, TURNS)
    words = ("verify", str(tmp_path / "run.toml"), "--against", "pp=2", "--steps", "3", "--set", STAGES)
    result = in_this_process(*words)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "verdict: equal" in result.stdout or "verdict: rounding" in result.stdout


@pytest.mark.parametrize("overrides", [[], ["mesh.dp_shard=2", "sharding.stage=3"], ["mesh.pp=2"]])
def test_rows_in_other_dims_train_as_in_a_plain_loop(tmp_path: Path, overrides: list[str]) -> None:
    config = configured(tmp_path, FRAMES, *overrides)
    assert finished(config).curve("loss") == pytest.approx(plain_losses(config), rel=1e-5)


def test_rows_in_other_dims_are_verified(tmp_path: Path) -> None:
    configured(tmp_path, FRAMES)
    result = in_this_process("verify", str(tmp_path / "run.toml"), "--against", "dp_shard=2", "--steps", "2")
    assert (result.exit_code, result.stderr) == (0, "")


def test_turns_and_rows_that_mean_nothing_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.rows\.table: 'none' given(.|\n)*train\.turns\.0\.steps: 0 given"):
        configured(tmp_path, TURNS, "train.turns=[{steps=0}]", "data.rows={table='none'}")
    with pytest.raises(ConfigError, match=r"data\.rows: -1 is no dim; give 0, 1, \.\."):
        configured(tmp_path, TURNS, "data.rows={frames=-1}")
    with pytest.raises(ConfigError) as error:
        configured(tmp_path, TURNS, "train.turns=[{only='critc'}, {only=[]}, {loss_options={a=1}}]")
    assert error.value.problems == (
        "train.turns.0.only: 'critc' is no group; model.groups has 'generator', 'critic'; the nearest is 'critic'",
        "train.turns.1.only: [] trains nothing; name a group, or leave it out",
        "train.turns.2.loss_options: given without train.turns.2.loss",
    )
    with pytest.raises(ConfigError, match=r"train.turns.0.loss_options.penalty: missing; .*TellsApart needs it"):
        check_references(configured(tmp_path, TURNS, "train.turns=[{loss='gan.py:TellsApart'}]"))
    with pytest.raises(BatchError, match=r"rows: 'frmes' matches none of the entries.*the nearest is 'frames'"):
        finished(configured(tmp_path, FRAMES, "data.rows={frmes=1}"))


def test_a_clip_may_name_a_group_of_the_model(tmp_path: Path) -> None:
    clip = "train.clip_grad_norm={generator=1e-9}"
    with_clip, without = (finished(configured(tmp_path, TURNS, *more)).curve("loss") for more in ([clip], []))
    assert with_clip[:3] == without[:3]  # AdamW of a generator that is clipped moves as little as its eps says
    assert with_clip[4:] != without[4:]
