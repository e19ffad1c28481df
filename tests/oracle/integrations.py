"""Loops of other trainers as places: what their users write, on the programs of the table.

train(program, plan, by_accelerate)
train(program, plan, by_lightning)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

import shardwise as sw
from shardwise.accelerate import Accelerator
from shardwise.lightning import Strategy
from tests.accelerate.accelerate_loops import on_ranks
from tests.lightning.lightning_modules import trainer_for, under
from tests.oracle.batches import Batch, parts_of
from tests.oracle.places import OfRank, Pieces, data_share
from tests.oracle.program import Program


@dataclass
class Noted:
    """What one rank reports of each update, and has after it."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    states: list[Pieces] = field(default_factory=list)

    def note(self, report: Any, engine: Any, *, within: str = "") -> None:
        """within: the module of the engine's model that is the program's."""
        self.losses.append(report.loss)
        self.grad_norms.append(report.grad_norm)
        state = engine.state().items()
        self.states.append({replace(key, name=key.name.replace(within, "", 1)): each.clone() for key, each in state})


def parts_on(program: Program, plan: sw.Plan, rank: int) -> list[list[Batch]]:
    """The microbatches of each batch on a rank."""
    return [[*parts_of(data_share(each, plan.mesh, rank), plan.merge.microbatches)] for each in program.batches]


def by_accelerate(program: Program, plan: sw.Plan) -> Sequence[OfRank]:
    """A loop of accelerate, with a microbatch for each call of the model."""

    def run(accelerator: Accelerator) -> OfRank:
        model, noted = program.make(), Noted()
        batches = parts_on(program, plan, accelerator.channel.rank)
        model, optimizer = accelerator.prepare(model, program.optimizer(list(model.parameters())))
        for parts in batches:
            for part in parts:
                with accelerator.accumulate(model):
                    accelerator.backward(program.loss_of(model, part))
                    optimizer.step()
                    optimizer.zero_grad()
            noted.note(accelerator.report, accelerator.engine)
        model.eval()
        with torch.no_grad():
            held_out = torch.stack([program.loss_of(model, part) for part in batches[0]])
        return noted.losses, noted.grad_norms, fmean(accelerator.gather(held_out).tolist()), noted.states

    of_calls = replace(plan, merge=sw.Merge())
    return on_ranks(of_calls, run, gradient_accumulation_steps=plan.merge.microbatches)


class Module(pl.LightningModule):  # type: ignore[misc]
    """A program in a module of Lightning."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.program, self.net = program, program.make()

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        return self.program.loss_of(self.net, batch)

    validation_step = training_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.program.optimizer(list(self.parameters()))


def by_lightning(program: Program, plan: sw.Plan) -> Sequence[OfRank]:
    """A fit of Lightning, whose strategy cuts batches into microbatches."""

    def run(strategy: Strategy) -> tuple[Noted, list[float]]:
        noted, rank, held_out = Noted(), strategy.global_rank, []
        shares = [data_share(batch, plan.mesh, rank) for batch in program.batches]
        given: list[Any] = [shares, parts_on(program, plan, rank)[0]]
        between = pl.callbacks.LambdaCallback(
            on_train_batch_end=lambda *_: noted.note(strategy.report, strategy.engine, within="net."),
            on_validation_batch_end=lambda trainer, module, loss, *_: held_out.append(loss.item()),
        )
        trainer = trainer_for(strategy, between, max_epochs=1, num_sanity_val_steps=0)
        trainer.fit(Module(program), *(DataLoader(each, batch_size=None) for each in given))
        return noted, held_out

    ranks = under(_within("net", plan), run)
    held_out = fmean(loss for _, losses in ranks for loss in losses)
    return [(noted.losses, noted.grad_norms, held_out, noted.states) for noted, _ in ranks]


def _within(name: str, plan: sw.Plan) -> sw.Plan:
    """The plan for a model that has the program's under this name."""

    def named(given: Any) -> Any:
        return {f"{name}.{each}": value for each, value in given.items()} if isinstance(given, Mapping) else given

    return replace(
        plan,
        pipeline=replace(plan.pipeline, stages=named(plan.pipeline.stages)),
        tensor=replace(plan.tensor, rules=named(plan.tensor.rules)),
    )
