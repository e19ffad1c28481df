"""The strategy of Lightning beyond the contract of adapters: evaluation, hooks, checkpoints, averages, errors."""

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

import shardwise as sw
from shardwise.errors import CheckpointError
from shardwise.lightning import Strategy
from tests.lightning.lightning_modules import (
    PLANS,
    ROWS,
    Gan,
    Net,
    Seen,
    assert_near,
    fitted,
    loader,
    trainer_for,
    under,
    weights,
)


class InRegions(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.is_autocast_enabled(x.device.type), x.device
        return super().forward(x)


def test_a_region_of_autocast_is_of_the_devices_that_ranks_have(fake: str) -> None:
    """The Trainer says "cpu" here."""

    def rates(strategy: Any) -> Any:
        return [
            each["rate"] for each in fitted(strategy, InRegions, precision="bf16-mixed")[1].figures if "rate" in each
        ]

    assert under(PLANS["one rank"], rates, device=fake) == [rates("auto")]


@pytest.mark.parametrize("plan", ["stage 3", "pp"])
def test_evaluation_and_prediction(plan: str) -> None:
    def run(strategy: Any) -> Any:
        torch.manual_seed(3)
        module = Net()
        trainer = trainer_for(strategy)
        found = trainer.test(module, loader(strategy), verbose=False), trainer.predict(module, loader(strategy))
        trainer.fit(module, loader(strategy), loader(strategy))
        return *found, trainer.validate(module, loader(strategy), verbose=False)

    tested, predicted, validated = run("auto")
    mesh = PLANS[plan].mesh
    for number, found in enumerate(under(PLANS[plan], run)):
        assert_near(tested, found[0])
        assert_near([each[mesh.data_rank(number) :: mesh.num_data_ranks] for each in predicted], found[1])
        assert_near(validated, found[2])


def test_ranks_with_fewer_batches_to_predict_do_not_keep_others_waiting() -> None:
    def run(strategy: Strategy) -> int:
        torch.manual_seed(0)
        rows = torch.utils.data.TensorDataset(torch.ones(5, 4))
        found = trainer_for(strategy, use_distributed_sampler=True).predict(Net(), torch.utils.data.DataLoader(rows))
        return len(found)

    assert under(PLANS["stage 3"], run) == [3, 2]


class Dropped(Net):
    """Draws random numbers, has buffers that its forward writes, and gives more than a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.body.append(torch.nn.BatchNorm1d(8))
        self.body.append(torch.nn.Dropout(0.5))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "rows": len(batch[0])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["rows"] == len(batch[0])


def test_random_numbers_and_buffers_go_on(tmp_path: Path) -> None:
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)

    def run(strategy: Strategy, *callbacks: Any, **more: Any) -> Any:
        return weights(fitted(strategy, Dropped, *callbacks, max_epochs=2, **more)[0])

    whole = under(PLANS["stage 3"], lambda strategy: run(strategy, saving))
    again = under(PLANS["stage 3"], lambda strategy: run(strategy, ckpt_path=tmp_path / "epoch=0.ckpt"))
    for expected, state in zip(whole, again, strict=True):
        assert all(torch.equal(state[name], each) for name, each in expected.items())


def test_a_name_takes_the_place_of_a_plan() -> None:
    trainer, _ = fitted("shardwise")
    assert trainer.strategy.plan == sw.Plan()
    assert_near(weights(fitted("auto")[0]), weights(trainer))


def test_averages_are_saved_and_go_on(tmp_path: Path) -> None:
    plan = sw.Plan(mesh=sw.Mesh(dp_shard=2), average=sw.Average(decay=0.5))

    def averages(strategy: Strategy, *callbacks: Any, **settings: Any) -> Any:
        trainer, _ = fitted(strategy, Net, *callbacks, **settings)
        engine = trainer.strategy.engine
        with engine.averaged():
            return engine.num_averaged, sw.full_state_dict(engine, rank0_only=False)

    whole = under(plan, lambda strategy: averages(strategy, max_epochs=2))
    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    under(plan, lambda strategy: averages(strategy, saving, max_epochs=1))
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


@pytest.mark.quick
def test_layers_that_a_callback_unfreezes_train(tmp_path: Path) -> None:
    def run(strategy: Any, epochs: int = 4, *callbacks: Any, **more: Any) -> Any:
        trainer, found = fitted(strategy, Selects, *callbacks, Unfreezes(), max_epochs=epochs, **more)
        return weights(trainer), found.losses

    expected = run("auto")
    saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="first")
    for found in under(PLANS["pp"], lambda strategy: run(strategy, 4, saving)):
        assert_near(expected, found)
    [groups] = torch.load(tmp_path / "first.ckpt")["callbacks"]["Unfreezes"]["internal_optimizer_metadata"].values()
    names = [["head.weight", "head.bias"], ["body.2.weight", "body.2.bias"], ["body.0.weight", "body.0.bias"]]
    assert [each["params"] for each in groups] == names
    again = run("auto", 5, ckpt_path=tmp_path / "first.ckpt")
    for found in under(PLANS["pp"], lambda strategy: run(strategy, 5, ckpt_path=tmp_path / "first.ckpt")):
        assert_near(again, found)


@pytest.mark.parametrize("layout", ["stage 3", "pp"])
def test_a_plain_module_reads_a_checkpoint(layout: str, tmp_path: Path) -> None:
    def run(strategy: Strategy) -> Any:
        saving = pl.callbacks.ModelCheckpoint(tmp_path, filename="best", monitor="val_loss")
        trainer, _ = fitted(strategy, Net, saving)
        tested = trainer.test(ckpt_path="best", dataloaders=loader(strategy), verbose=False)
        with trainer.strategy.engine.whole():
            held = {name: each.clone() for name, each in trainer.lightning_module.state_dict().items()}
        return weights(trainer), held, tested, saving.best_model_path

    state, held, tested, path = under(PLANS[layout], run)[0]
    module = Net.load_from_checkpoint(path)
    assert module.hparams == {"width": 8, "rate": 1e-2}
    for found in (module.state_dict(), held):
        assert all(torch.equal(found[name], each) for name, each in state.items())
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
    def run(channel: sw.Channel | None) -> Any:
        def anew() -> Any:
            return "auto" if channel is None else Strategy(PLANS["pp"], channel=channel)

        torch.manual_seed(3)
        module = Net()
        for epochs in (1, 2):
            strategy = anew()
            trainer = trainer_for(strategy, max_epochs=epochs)
            trainer.fit(module, loader(strategy), loader(strategy))
            tester = anew()
            tested = trainer_for(tester).test(module, loader(tester), verbose=False)
        return weights(trainer), tested

    expected = run(None)
    for found in sw.simulate(2, run):
        assert_near(expected, found)


def test_a_fit_over_data_resumes_on_the_next_row_on_any_ranks(tmp_path: Path) -> None:
    class Samples:
        read = 0

        def __len__(self) -> int:
            return len(ROWS[0])

        def __getitem__(self, at: int) -> Any:
            self.read += 1
            return ROWS[0][at], ROWS[1][at]

    def run(strategy: Strategy, *callbacks: Any, ckpt_path: Any = None) -> tuple[list[float], int]:
        samples, seen = Samples(), Seen()
        trainer = trainer_for(strategy, seen, *callbacks, num_sanity_val_steps=0, accumulate_grad_batches=2)
        torch.manual_seed(3)
        trainer.fit(Net(), strategy.loader_of(sw.Data(samples, global_batch=8, seed=2)), ckpt_path=ckpt_path)
        return [loss for loss in seen.losses if loss == loss], samples.read

    def saving(strategy: Strategy) -> tuple[list[float], int]:
        return run(strategy, pl.callbacks.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1))

    (whole, read), _ = under(PLANS["stage 3"], saving)
    assert (len(whole), read) == (6, 6 * 4)  # three updates are an epoch; a rank reads half of their rows
    for plan, rows in (("stage 3", 4), ("pp", 8), ("one rank", 8)):
        resumed, read = under(PLANS[plan], lambda strategy: run(strategy, ckpt_path=tmp_path / "step=4.ckpt"))[0]
        assert (resumed == pytest.approx(whole[4:], rel=2e-5), read) == (True, 2 * rows)
