"""An optimizer, and its scheduler, that have trained a model in plain PyTorch go on under any plan, and in the next."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import shardwise as sw
from tests.oracle.batches import word_batch
from tests.oracle.comparison import assert_close
from tests.oracle.one_process import Trained
from tests.oracle.places import data_share, put_together
from tests.oracle.program import Optimizers, adamw, plan_of
from tests.oracle.programs import PROGRAMS, in_groups

PROGRAM = PROGRAMS["decoder"]


class Accumulating(torch.optim.Optimizer):
    """Makes its state when it is built, as Adagrad does before 2.12."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})
        for group in self.param_groups:
            for each in group["params"]:
                self.state[each]["sum"] = torch.zeros_like(each)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    self.state[each]["sum"].addcmul_(each.grad, each.grad)
                    each.addcdiv_(each.grad, self.state[each]["sum"].sqrt().add_(1e-10), value=-group["lr"])


def of_trained(kind: Callable[..., torch.optim.Optimizer]) -> Optimizers:
    return lambda parameters: kind([each for each in parameters if each.requires_grad], lr=1e-2)


def trained(channel: sw.Channel, meshes: tuple[str, ...], make_optimizer: Optimizers) -> Any:
    """Two updates of plain PyTorch, and two under each mesh; a scheduler halves the rates after each."""
    model: Any = PROGRAM.make()
    optimizer = make_optimizer(list(model.parameters()))
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    for seed in (7, 8):
        optimizer.zero_grad()
        PROGRAM.loss_of(model, word_batch(seed, 6)).backward()
        optimizer.step()
        scheduler.step()
    optimizer.zero_grad()
    engine: Any = None
    losses, norms, states = [], [], []
    for mesh in meshes:
        plan = plan_of(PROGRAM, mesh, stage=3 if "dp" in mesh else 1, clip=0.2)
        if engine is None:
            engine = sw.parallelize(model, plan, optimizer=optimizer, loss=PROGRAM.loss, channel=channel)
        elif mesh != "single":
            engine = sw.relayout(engine, plan)
        for batch in PROGRAM.batches:
            report = engine.step(data_share(batch, plan.mesh, channel.rank))
            scheduler.step()
            losses.append(report.loss)
            norms.append(report.grad_norm)
            states.append({piece: tensor.clone() for piece, tensor in engine.state().items()})
    return losses, norms, 1.0, states


@pytest.mark.parametrize(
    ("mesh", "make_optimizer"),
    [
        ("tp=2", in_groups),
        ("tp=2", of_trained(Accumulating)),
        ("pp=2,tp=2", of_trained(torch.optim.Adagrad)),
        ("dp_shard=2,tp=2", adamw),
        ("pp=2,dp_shard=2", in_groups),
    ],
    ids=["tp groups", "tp accumulating", "pp x tp adagrad", "dp x tp adamw", "pp x dp groups"],
)
def test_it_goes_on(mesh: str, make_optimizer: Optimizers) -> None:
    size = sw.Mesh.parse(mesh).size
    moved = "tp=2" if size == 2 else "dp_replicate=2,tp=2"

    def under(size: int, *meshes: str) -> Trained:
        return put_together(sw.simulate(size, lambda channel: trained(channel, meshes, make_optimizer)))

    assert_close(under(size, mesh, moved), under(1, "single", "single"), relative=1e-9, noise=PROGRAM.noise)
