"""Checkpoints of Lightning: saved under one layout, resumed under another, read by a plain module."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.lightning import Strategy
from tests.lightning.lightning_modules import PLANS, Gan, Net, assert_near, fitted, loader, trainer_for, under, weights


class Dropped(Net):
    """Draws random numbers, and has buffers that its forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(torch.nn.BatchNorm1d(8))
        self.body.append(torch.nn.Dropout(0.5))


def on(layout: str, run: Any) -> Any:
    """What `run` gives on rank 0 under a plan, or plainly."""
    return run("auto") if layout == "plain" else under(PLANS[layout], run)[0]


@pytest.mark.parametrize(
    ("saved", "resumed"),
    [("stage 3", "pp"), ("pp", "tp"), ("tp", "plain"), ("plain", "stage 3"), ("stage 1", "stage 0")],
)
def test_a_run_goes_on_under_another_layout(saved: str, resumed: str, tmp_path: Path) -> None:
    trainer, seen = fitted("auto", max_epochs=3)
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)

    def first(strategy: Any) -> None:
        fitted(strategy, Net, saving, max_epochs=1)

    def second(strategy: Any) -> Any:
        again, found = fitted(strategy, Net, max_epochs=3, ckpt_path=tmp_path / "epoch=0.ckpt")
        return weights(again), found, again.global_step

    on(saved, first)
    state, found, count = on(resumed, second)
    assert_near(weights(trainer), state)
    assert_near(seen.losses[3:], found.losses)
    assert (found.rates, count) == (seen.rates[3:], trainer.global_step)


def test_random_numbers_and_buffers_go_on(tmp_path: Path) -> None:
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    plan = PLANS["stage 3"]
    for expected in under(plan, lambda strategy: weights(fitted(strategy, Dropped, saving, max_epochs=2)[0])):
        for state in under(
            plan,
            lambda strategy: weights(fitted(strategy, Dropped, max_epochs=2, ckpt_path=tmp_path / "epoch=0.ckpt")[0]),
        ):
            assert all(torch.equal(state[name], each) for name, each in expected.items())


@pytest.mark.parametrize("layout", ["stage 3", "pp", "tp"])
def test_a_plain_module_reads_a_checkpoint(layout: str, tmp_path: Path) -> None:
    def run(strategy: Strategy) -> Any:
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="best", monitor="val_loss")
        trainer, _ = fitted(strategy, Net, saving)
        tested = trainer.test(ckpt_path="best", dataloaders=loader(strategy), verbose=False)
        return weights(trainer), tested, saving.best_model_path

    state, tested, path = under(PLANS[layout], run)[0]
    module = Net.load_from_checkpoint(path)
    assert module.hparams == {"width": 8, "rate": 1e-2}
    assert all(torch.equal(module.state_dict()[name], each) for name, each in state.items())
    assert_near(tested, trainer_for("auto").test(module, loader("auto"), verbose=False))


def test_weights_alone_and_several_optimizers(tmp_path: Path) -> None:
    def run(strategy: Strategy) -> None:
        trainer, _ = fitted(strategy, lambda: Gan("toggled"), max_epochs=1)
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        trainer.save_checkpoint(tmp_path / "all.ckpt")

    under(PLANS["stage 1"], run)
    assert "optimizer_states" not in torch.load(tmp_path / "weights.ckpt")
    expected = weights(fitted("auto", lambda: Gan("toggled"), max_epochs=2)[0])
    trainer, _ = fitted("auto", lambda: Gan("toggled"), max_epochs=2, ckpt_path=tmp_path / "all.ckpt")
    assert_near(expected, weights(trainer))


def test_where_rank_0_cannot_write_all_ranks_say_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def run(strategy: Strategy) -> str:
        trainer, _ = fitted(strategy, max_epochs=1)
        with pytest.raises(CheckpointError) as raised:
            trainer.save_checkpoint(tmp_path / "file" / "here.ckpt")
        return str(raised.value)

    one, other = under(PLANS["stage 1"], run)
    assert one == other
    assert "here.ckpt cannot be written" in one


def test_runs_of_other_trainers_go_on_with_the_weights() -> None:
    def run(strategy: Any) -> Any:
        torch.manual_seed(3)
        module = Net()
        for epochs in (1, 2):
            anew = strategy if strategy == "auto" else Strategy(strategy.plan, channel=strategy._channel)
            trainer = trainer_for(anew, max_epochs=epochs)
            trainer.fit(module, loader(anew), loader(anew))
            tester = strategy if strategy == "auto" else Strategy(strategy.plan, channel=strategy._channel)
            tested = trainer_for(tester).test(module, loader(tester), verbose=False)
        return weights(trainer), tested

    expected, tested = run("auto")
    for layout in ("stage 3", "pp"):
        for state, found in under(PLANS[layout], run):
            assert_near(expected, state)
            assert_near(tested, found)


def test_the_whole_module_is_at_hand_after_a_fit() -> None:
    def run(strategy: Strategy) -> dict[str, torch.Tensor]:
        trainer, _ = fitted(strategy)
        engine: sw.Engine[Any] = trainer.strategy.engine
        with engine.whole():
            return {name: each.clone() for name, each in trainer.lightning_module.state_dict().items()}

    expected = weights(fitted("auto")[0])
    for state in under(PLANS["pp"], run):
        assert_near(expected, state)
