"""Automatic optimisation under plans: the numbers of a plain Trainer in one process."""

from functools import cache
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import shardwise as sw
from shardwise.errors import PeerError
from shardwise.lightning import Strategy
from tests.lightning.lightning_modules import PLANS, Net, Seen, assert_near, fitted, loader, trainer_for, under, weights

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "bfloat16": {"precision": "bf16-mixed"},
    "float64": {"precision": "64-true"},
}


@cache
def plain(kind: str) -> tuple[dict[str, torch.Tensor], Seen, dict[str, float], int]:
    trainer, seen = fitted("auto", **SETTINGS[kind])
    return weights(trainer), seen, {k: float(v) for k, v in trainer.callback_metrics.items()}, trainer.global_step


CASES = [(name, "plain") for name in PLANS] + [
    ("one rank", "accumulated and clipped"),
    ("stage 3", "accumulated and clipped"),
    ("pp", "accumulated and clipped"),
    ("stage 2, k = 2", "clipped by value"),
    ("tp", "clipped by value"),
    ("stage 0", "float64"),
    ("pp", "float64"),
]


@pytest.mark.parametrize(("plan", "kind"), CASES)
def test_a_fit_is_that_of_the_plain_trainer(plan: str, kind: str) -> None:
    expected, seen, metrics, steps = plain(kind)

    def run(strategy: Strategy) -> Any:
        trainer, found = fitted(strategy, **SETTINGS[kind])
        metrics = {name: float(each) for name, each in trainer.callback_metrics.items()}
        return weights(trainer), found, metrics, trainer.global_step

    for state, found, here, count in under(PLANS[plan], run):
        assert_near(expected, state)
        assert found.rates == seen.rates
        assert count == steps
        assert here.keys() == metrics.keys()
        if "accumulate_grad_batches" not in SETTINGS[kind]:
            assert_near(seen.losses, found.losses)
            assert_near(metrics, here)
            assert_near(
                [each for one in seen.evaluations for each in one.values()],
                [each for one in found.evaluations for each in one.values()],
            )
        else:  # the losses of batches whose update is to come are not known
            assert_near(metrics["val_loss"], here["val_loss"])
    if plan == "one rank" and kind == "plain":
        assert all(torch.equal(state[name], expected[name]) for name in expected)


def test_a_region_of_autocast_is_that_of_the_plain_trainer() -> None:
    expected = plain("bfloat16")[0]
    for name in ("one rank", "stage 3"):
        for state in under(PLANS[name], lambda strategy: weights(fitted(strategy, precision="bf16-mixed")[0])):
            torch.testing.assert_close(state, expected, rtol=0.05, atol=0.05)
            if name == "one rank":
                assert_near(expected, state)


@pytest.mark.parametrize(
    ("plan", "kind"),
    [("pp", "accumulated and clipped"), pytest.param("tp", "plain", marks=pytest.mark.stress), ("stage 3", "plain")],
)
def test_a_fit_on_devices_is_that_of_the_host(on_fake: None, plan: str, kind: str) -> None:
    expected, _, metrics, _ = plain(kind)

    def run(strategy: Strategy) -> Any:
        trainer = fitted(strategy, **SETTINGS[kind])[0]
        return weights(trainer), {name: float(each) for name, each in trainer.callback_metrics.items()}

    for state, here in under(PLANS[plan], run):
        assert_near(expected, {name: each.cpu() for name, each in state.items()})
        assert here.keys() == metrics.keys()


class InRegions(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.is_autocast_enabled(x.device.type), x.device
        return super().forward(x)


def test_a_region_of_autocast_is_of_the_devices_that_ranks_have(on_fake: None) -> None:
    """The Trainer says "cpu" here."""
    (rate,) = under(PLANS["one rank"], lambda strategy: fitted(strategy, InRegions, precision="bf16-mixed")[1].rates[0])
    assert rate == plain("bfloat16")[1].rates[0]


@pytest.mark.parametrize("plan", ["one rank", "stage 3", "pp", "tp"])
def test_evaluation_and_prediction(plan: str) -> None:
    torch.manual_seed(3)
    module = Net()
    trainer = trainer_for("auto")
    tested = trainer.test(module, loader("auto"), verbose=False)
    predicted = trainer.predict(module, loader("auto"))
    trainer.fit(module, loader("auto"), loader("auto"))
    validated = trainer.validate(module, loader("auto"), verbose=False)

    def run(strategy: Strategy) -> Any:
        torch.manual_seed(3)
        module = Net()
        trainer = trainer_for(strategy)
        found = trainer.test(module, loader(strategy), verbose=False), trainer.predict(module, loader(strategy))
        trainer.fit(module, loader(strategy), loader(strategy))
        return *found, trainer.validate(module, loader(strategy), verbose=False)

    for number, found in enumerate(under(PLANS[plan], run)):
        rank = PLANS[plan].mesh.data_rank(number)
        count = PLANS[plan].mesh.num_data_ranks
        assert_near(tested, found[0])
        assert_near([each[rank::count] for each in predicted], found[1])
        assert_near(validated, found[2])


def test_ranks_with_fewer_batches_to_predict_do_not_keep_others_waiting() -> None:
    def run(strategy: Strategy) -> int:
        rows = torch.utils.data.TensorDataset(torch.ones(5, 4))
        found = trainer_for(strategy, use_distributed_sampler=True).predict(Net(), torch.utils.data.DataLoader(rows))
        return len(found)

    torch.manual_seed(0)
    assert under(PLANS["stage 3"], lambda strategy: (torch.manual_seed(0), run(strategy))[1]) == [3, 2]


def test_a_run_stops_early_on_all_ranks_alike() -> None:
    def stopped(strategy: Any) -> int:
        stopping = pl.callbacks.EarlyStopping("val_right", patience=1, mode="max", min_delta=0.5)
        return int(fitted(strategy, Net, stopping, max_epochs=9)[0].current_epoch)

    expected = stopped("auto")
    assert expected < 8
    assert under(PLANS["stage 1"], stopped) == [expected] * 2


class Extras(Net):
    """Gives more than a loss, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.5)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = torch.nn.functional.cross_entropy(self.head(self.drop(self.body(batch[0]))), batch[1])
        return {"loss": loss, "rows": len(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["rows"] == len(batch[0])


def test_what_else_a_training_step_gives_comes_to_the_hooks() -> None:
    one, other = under(PLANS["stage 1"], lambda strategy: weights(fitted(strategy, Extras)[0]))
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_name_takes_the_place_of_a_plan() -> None:
    trainer, _ = fitted("shardwise")
    assert trainer.strategy.plan == sw.Plan()
    assert_near(plain("plain")[0], weights(trainer))


def test_averages_are_saved_and_go_on(tmp_path: Path) -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), average=sw.Average(decay=0.5))

    def averages(strategy: Strategy, **settings: Any) -> Any:
        trainer, _ = fitted(strategy, Net, *settings.pop("callbacks", ()), **settings)
        engine = trainer.strategy.engine
        with engine.averaged():
            return engine.num_averaged, sw.full_state_dict(engine, rank0_only=False)

    whole = under(plan, lambda strategy: averages(strategy, max_epochs=2))
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    under(plan, lambda strategy: averages(strategy, max_epochs=1, callbacks=[saving]))
    again = under(plan, lambda strategy: averages(strategy, max_epochs=2, ckpt_path=tmp_path / "last.ckpt"))
    for (count, expected), (found, state) in zip(whole, again, strict=True):
        assert count == found == 6
        assert_near(expected, state)


class Unfreezes(pl.callbacks.BaseFinetuning):
    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.body)

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch > 0:
            self.unfreeze_and_add_param_group(module.body[3 - epoch :], optimizer, initial_denom_lr=2.0)


class Selects(Net):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([each for each in self.parameters() if each.requires_grad], lr=1e-2)


@pytest.mark.parametrize("layout", ["stage 3", "pp"])
def test_layers_that_a_callback_unfreezes_train(layout: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"max_epochs": 4}
    plain, seen = fitted("auto", Selects, Unfreezes(), **settings)

    def run(strategy: Any, epochs: int = 4, **more: Any) -> Any:
        trainer, found = fitted(strategy, Selects, *more.pop("callbacks", ()), Unfreezes(), max_epochs=epochs, **more)
        return weights(trainer), found.losses

    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="first")
    for state, losses in under(PLANS[layout], lambda strategy: run(strategy, callbacks=[saving])):
        assert_near(weights(plain), state)
        assert_near(seen.losses, losses)
    [groups] = torch.load(tmp_path / "first.ckpt")["callbacks"]["Unfreezes"]["internal_optimizer_metadata"].values()
    expected = [["head.weight", "head.bias"], ["body.2.weight", "body.2.bias"], ["body.0.weight", "body.0.bias"]]
    assert [each["params"] for each in groups] == expected
    again = run("auto", 5, ckpt_path=tmp_path / "first.ckpt")
    for found in under(PLANS[layout], lambda strategy: run(strategy, 5, ckpt_path=tmp_path / "first.ckpt")):
        assert_near(again, found)


class FailsOnOne(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 1 and self.global_rank == 1:
            raise OSError("no such file")
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss


def test_an_error_of_one_rank_ends_all() -> None:
    def run(strategy: Strategy) -> str:
        with pytest.raises((OSError, PeerError)) as raised:
            fitted(strategy, FailsOnOne)
        return str(raised.value)

    assert all("no such file" in each for each in under(PLANS["stage 3"], run))


class Overflows(Net):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = super().training_step(batch, batch_idx)
        return loss * (float("inf") if batch_idx == 1 else 1.0)


def test_an_update_that_is_not_finite_is_skipped_by_all() -> None:
    def run(strategy: Strategy) -> Any:
        trainer, _ = fitted(strategy, Overflows, limit_train_batches=2)
        return trainer.strategy.report.skipped, weights(trainer)

    for skipped, state in under(PLANS["stage 1"], run):
        assert skipped
        assert all(each.isfinite().all() for each in state.values())
