"""Modules of Lightning as users write them, and how the tests train them: plainly, and under plans."""

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Sampler, TensorDataset

import shardwise as sw
from shardwise.lightning import Strategy

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

STAGES = sw.Pipeline(stages={"body": 0, "head": 1})
PLANS = {
    "one rank": sw.Plan(),
    "stage 0": sw.Plan(mesh=sw.Mesh(dp_replicate=2), sharding=sw.Sharding(stage=0)),
    "stage 1": sw.Plan(mesh=sw.Mesh(dp_shard=2)),
    "stage 2, k = 2": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=2), merge=sw.Merge(microbatches=2)),
    "stage 3": sw.Plan(mesh=sw.Mesh(dp_shard=2), sharding=sw.Sharding(stage=3)),
    "pp": sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2), pipeline=STAGES),
    "interleaved": sw.Plan(
        mesh=sw.Mesh(pp=2),
        merge=sw.Merge(microbatches=2),
        pipeline=sw.Pipeline(
            schedule="interleaved", stages={"body.0": 0, "body.1": 1, "body.2": 2, "body.3": 2, "head": 3}
        ),
    ),
    "tp": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules={"body.0": "column", "body.2": "row"})),
}

_made = torch.Generator().manual_seed(7)
ROWS = torch.randn(22, 4, generator=_made), torch.randint(3, (22,), generator=_made)
"""Two batches of 8, and one of 6."""


class Net(pl.LightningModule):
    """A classifier."""

    def __init__(self, width: int = 8, rate: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.body = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())
        self.head = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.body(x))
        return out

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = functional.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rows", float(len(x)), on_step=False, on_epoch=True, reduce_fx="sum")
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x, y = batch
        out: torch.Tensor = self(x)
        self.log("val_loss", functional.cross_entropy(out, y), sync_dist=True)
        self.log("val_right", (out.argmax(-1) == y).float().mean(), sync_dist=True)
        return out

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test_loss", functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        out: torch.Tensor = self(batch[0])
        return out

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams["rate"])
        rates = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "interval": "step"}}


class Gan(pl.LightningModule):
    """Two optimizers in turns, by hand."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.style = style
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
        self.head = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, noise: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.body(noise)
        return out

    def critic_loss(self, x: torch.Tensor) -> torch.Tensor:
        fake = self(x * 2).detach()
        return functional.softplus(-self.head(x)).mean() + functional.softplus(self.head(fake)).mean()

    def generator_loss(self, x: torch.Tensor) -> torch.Tensor:
        return functional.softplus(-self.head(self(x * 2))).mean()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        generator, critic = self.optimizers()
        getattr(self, self.style)(batch[0], generator, critic)
        for rates in self.lr_schedulers():
            rates.step()

    def toggled(self, x: torch.Tensor, generator: Any, critic: Any) -> None:
        self.toggle_optimizer(critic)
        critic_loss = self.critic_loss(x)
        critic.zero_grad()
        self.manual_backward(critic_loss)
        critic.step()
        self.untoggle_optimizer(critic)
        with self.toggled_optimizer(generator):
            loss = self.generator_loss(x)
            self.manual_backward(loss)
            generator.step()
            generator.zero_grad()
        self.log_dict({"critic": critic_loss, "generator": loss})

    def in_closures(self, x: torch.Tensor, generator: Any, critic: Any) -> None:
        for name, optimizer in (("critic", critic), ("generator", generator)):

            def closure(name: str = name, optimizer: Any = optimizer) -> torch.Tensor:
                loss: torch.Tensor = getattr(self, f"{name}_loss")(x)
                optimizer.zero_grad()
                self.manual_backward(loss)
                self.log(name, loss)
                return loss

            optimizer.step(closure)

    def dropped(self, x: torch.Tensor, generator: Any, critic: Any) -> None:
        for optimizer, loss in ((critic, self.critic_loss), (generator, self.generator_loss)):
            self.log("critic" if optimizer is critic else "generator", 1.0)
            with self.toggled_optimizer(optimizer):
                self.manual_backward(loss(x * 5))
                optimizer.zero_grad()
                self.manual_backward(loss(x * 3))
                self.zero_grad()
                self.manual_backward(loss(x))
                generator.zero_grad() if optimizer is critic else critic.zero_grad()
                optimizer.step()
                optimizer.zero_grad()

    def old_graph(self, x: torch.Tensor, generator: Any, critic: Any) -> None:
        fake = self(x * 2)
        self.toggle_optimizer(generator)
        self.manual_backward(functional.softplus(-self.head(fake)).mean())
        generator.step()

    def configure_optimizers(self) -> Any:
        optimizers = [
            torch.optim.Adam(self.body.parameters(), lr=1e-2),
            torch.optim.Adam(self.head.parameters(), lr=2e-2),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]


class TwoOptimizers(Net):
    """Two optimizers, and one backward for both: the form in which Lightning takes Muon beside AdamW."""

    def __init__(self, style: str) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.style = style

    def loss(self, batch: Any) -> torch.Tensor:
        return functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        getattr(self, self.style)(batch, batch_idx, *self.optimizers())

    def ordinary(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        self.log("number", float(batch_idx))
        for each in optimizers:
            each.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        for each in optimizers:
            each.step()
        self.log("loss", loss)
        for rates in self.lr_schedulers():
            rates.step()

    def schedulers_between(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        self.manual_backward(self.loss(batch))
        for each, rates in zip(reversed(optimizers), reversed(self.lr_schedulers()), strict=True):
            each.step()
            each.zero_grad()
            rates.step()

    def two_losses(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        self.manual_backward(self.loss(batch) * 9)
        for each in optimizers:
            each.zero_grad()
        self.manual_backward(self.loss(batch) * 5)
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        self.manual_backward(self.body(batch[0]).square().mean())
        for each in optimizers:
            each.step()
        self.zero_grad()

    def then_toggled(self, batch: Any, batch_idx: int, one: Any, other: Any) -> None:
        self.ordinary(batch, batch_idx, one, other)
        self.only_toggled(batch, batch_idx, one, other)

    def only_toggled(self, batch: Any, batch_idx: int, one: Any, other: Any) -> None:
        self.log("before", 1.0)
        with self.toggled_optimizer(other):
            other.zero_grad()
            self.manual_backward(self.loss(batch))
            other.step()

    def later_toggled(self, batch: Any, batch_idx: int, one: Any, other: Any) -> None:
        (self.ordinary if batch_idx == 0 and self.current_epoch == 0 else self.only_toggled)(
            batch, batch_idx, one, other
        )

    def some_batches(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        if batch_idx != 1:
            self.ordinary(batch, batch_idx, *optimizers)

    def clipped(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        self.clip(batch, optimizers, {0: (0.05, "norm"), 1: (0.1, "norm")})

    def clipped_by_value(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        self.clip(batch, optimizers, {0: (0.01, "value"), 1: (0.01, "value")})

    def clip(self, batch: Any, optimizers: Any, clips: dict[int, tuple[float, str]]) -> None:
        self.manual_backward(self.loss(batch))
        for at, (value, algorithm) in clips.items():
            self.clip_gradients(optimizers[at], value, algorithm)
        for each in optimizers:
            each.step()
            each.zero_grad()

    # Refused

    def one_clipped(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        self.clip(batch, optimizers, {1: (0.01, "value")})

    def one_steps(self, batch: Any, batch_idx: int, one: Any, other: Any) -> None:
        self.manual_backward(self.loss(batch))
        one.step()

    def in_turns(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        for each in optimizers:
            each.zero_grad()
            self.manual_backward(self.loss(batch))
            each.step()

    def toggled_between(self, batch: Any, batch_idx: int, one: Any, other: Any) -> None:
        self.manual_backward(self.loss(batch))
        one.step()
        self.only_toggled(batch, batch_idx, one, other)

    def rate_between(self, batch: Any, batch_idx: int, one: Any, other: Any) -> None:
        self.manual_backward(self.loss(batch))
        one.step()
        other.param_groups[0]["lr"] = 0.5
        other.step()

    def dropped_of_one(self, batch: Any, batch_idx: int, one: Any, other: Any) -> None:
        self.manual_backward(self.loss(batch))
        other.zero_grad()
        one.step()
        other.step()

    def twice(self, batch: Any, batch_idx: int, *optimizers: Any) -> None:
        for _ in range(2):
            self.manual_backward(self.loss(batch))
            for each in optimizers:
                each.step()

    def configure_optimizers(self) -> Any:
        optimizers: list[Any] = [
            torch.optim.AdamW(self.body.parameters(), lr=1e-2),
            torch.optim.SGD(self.head.parameters(), lr=0.1, momentum=0.9),
        ]
        return optimizers, [torch.optim.lr_scheduler.StepLR(each, 2, 0.5) for each in optimizers]


class ByHand(Net):
    """One optimizer by hand, which needs no toggle."""

    def __init__(self, *, steps: bool = True, clip: float | None = None) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.does_step, self.clip = steps, clip

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = functional.cross_entropy(self(batch[0]), batch[1])
        optimizer.zero_grad()
        self.manual_backward(loss)
        if self.clip:
            self.clip_gradients(optimizer, self.clip)
        if self.does_step or batch_idx % 2:
            optimizer.step()


class Seen(pl.Callback):
    """Remembers what a run showed: of each batch its loss, where it is known, and rate; of each evaluation all."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.figures: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.figures.append({"rate": trainer.optimizers[0].param_groups[0]["lr"]})
        if outputs:
            self.losses.append(float(outputs["loss"]))
            self.figures[-1]["loss"] = self.losses[-1]

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            found = trainer.callback_metrics.items()
            self.figures.append({name: float(each) for name, each in found if name.startswith("val")})


class EveryNth(Sampler[int]):
    """The rows of one data rank, without Lightning's own shuffle."""

    def __init__(self, first: int, step: int) -> None:
        self.rows = range(first, len(ROWS[0]), step)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)


def loader(strategy: Any, global_batch: int = 8) -> DataLoader[Any]:
    """This rank's rows of global batches, the same rows under every plan."""
    count, rank = 1, 0
    if isinstance(strategy, Strategy):
        mesh = strategy.plan.mesh
        count, rank = mesh.num_data_ranks, mesh.data_rank(strategy.global_rank)
    return DataLoader(TensorDataset(*ROWS), batch_size=global_batch // count, sampler=EveryNth(rank, count))


def trainer_for(strategy: Any, *callbacks: pl.Callback, folder: Path | None = None, **settings: Any) -> pl.Trainer:
    given = {"devices": 1, "max_epochs": 2, "num_sanity_val_steps": 1, "use_distributed_sampler": False} | settings
    return pl.Trainer(
        accelerator="cpu",
        strategy=strategy,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=any(isinstance(each, pl.callbacks.ModelCheckpoint) for each in callbacks),
        default_root_dir=folder,
        callbacks=[*callbacks],
        **given,
    )


def fitted(
    strategy: Any,
    build: Callable[[], pl.LightningModule] = Net,
    *callbacks: pl.Callback,
    ckpt_path: Any = None,
    **settings: Any,
) -> tuple[pl.Trainer, Seen]:
    """A trainer that has trained; with `Seen`."""
    torch.manual_seed(3)
    module, seen = build(), Seen()
    trainer = trainer_for(strategy, seen, *callbacks, **settings)
    trainer.fit(module, loader(strategy), loader(strategy), ckpt_path=ckpt_path)
    return trainer, seen


def under(plan: sw.Plan, run: Callable[[Strategy], Any], **settings: Any) -> list[Any]:
    """What `run` gives on each rank."""
    return sw.simulate(plan.mesh.size, lambda channel: run(Strategy(plan, channel=channel)), **settings)


def weights(trainer: pl.Trainer) -> dict[str, torch.Tensor]:
    """The whole state dict of the module, on each rank."""
    engine = getattr(trainer.strategy, "engine", None)
    if engine is None:
        plain: dict[str, torch.Tensor] = trainer.lightning_module.state_dict()
        return plain
    found: dict[str, torch.Tensor] = sw.full_state_dict(engine, rank0_only=False)
    return found


def assert_near(ones: Any, others: Any) -> None:
    torch.testing.assert_close(others, ones, rtol=2e-5, atol=2e-6)
