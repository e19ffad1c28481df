"""The loop of a plain program, and the same under a plan: tests add to them what they are about."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from tests.oracle.batches import Batch
from tests.oracle.one_process import Trained, train_in_one_process
from tests.oracle.places import data_share
from tests.oracle.program import seeded

Make = Callable[[], nn.Module]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """The plainest optimizer."""
    return torch.optim.SGD(parameters, lr=0.1)


def mean_square(output: torch.Tensor, batch: Any = None) -> torch.Tensor:
    """The plainest loss."""
    return output.float().square().mean()


def rows(seed: int, width: int = 4, count: int = 8) -> dict[str, torch.Tensor]:
    """[count, width] points as "x"."""
    return {"x": torch.randn(count, width, generator=torch.Generator().manual_seed(seed))}


def plan_of(
    mesh: str = "single",
    stage: int = 1,
    k: int = 1,
    *,
    rules: Any = None,
    stages: Mapping[str, int] | None = None,
    schedule: Any = "1f1b",
    checkpoint: Any = None,
    compute: str | None = None,
    sharding: Mapping[str, Any] | None = None,
    **settings: Any,
) -> sw.Plan:
    """A plan in a line. `rules` count where the mesh has an axis tp, `stages` and `schedule` where it has pp."""
    axes = sw.Mesh.parse(mesh)
    is_staged = axes.pp > 1
    return sw.Plan(
        mesh=axes,
        sharding=sw.Sharding(stage=stage, **(sharding or {})),
        merge=sw.Merge(microbatches=k),
        tensor=sw.Tensor(rules=rules if axes.tp > 1 else None),
        pipeline=sw.Pipeline(stages=stages, schedule=schedule) if is_staged else sw.Pipeline(),
        activations=sw.Activations(checkpoint=checkpoint),
        **{"precision": sw.Precision(compute=compute), **settings},
    )


def begun(channel: sw.Channel, make: Make, plan: sw.Plan | None = None, **settings: Any) -> Any:
    """An engine over what `make` builds from one seed; SGD on the mean square, where nothing else is said."""
    given = {"optimizer": sgd, "loss": mean_square, **settings}
    return sw.parallelize(seeded(make)(), plan or sw.Plan(), channel=channel, **given)


def share(engine: Any, batch: Batch) -> dict[str, Any]:
    """The rows of the engine's data rank."""
    return dict(data_share(batch, engine.plan.mesh, engine.channel.rank))


def on_ranks(
    make: Make,
    plan: sw.Plan,
    batches: Sequence[Batch],
    *,
    device: str = "cpu",
    region: AbstractContextManager[Any] | None = None,
    **settings: Any,
) -> Trained:
    """An update for each batch; what all ranks report alike, and whole parameters at the end."""

    def run(channel: sw.Channel) -> Trained:
        engine, trained = begun(channel, make, plan, **settings), Trained()
        for batch in batches:
            with region or nullcontext():
                report = engine.step(share(engine, batch))
            trained.losses.append(report.loss)
            trained.grad_norms.append(report.grad_norm)
        trained.parameters = {name: each.cpu().clone() for name, each in sw.full(engine)}
        return trained

    first, *others = sw.simulate(plan.mesh.size, run, device=device)
    assert all((each.losses, each.grad_norms) == (first.losses, first.grad_norms) for each in others)
    return first


def in_one_process(
    make: Make,
    batches: Sequence[Batch],
    *,
    loss: Any = mean_square,
    optimizer: Any = sgd,
    parts: int = 1,
    device: str = "cpu",
    region: AbstractContextManager[Any] | None = None,
) -> Trained:
    """The plain program, with as many microbatches as all data ranks together have."""

    def loss_of(model: nn.Module, part: Batch) -> torch.Tensor:
        with region or nullcontext():
            value: torch.Tensor = loss(model(next(iter(part.values()))), part)
        return value

    model = seeded(make)().to(device)
    given = [{name: each.to(device) for name, each in batch.items()} for batch in batches]
    return train_in_one_process(
        model, optimizer(list(model.parameters())), given, loss_of=loss_of, num_microbatches=parts
    )


def assert_alike(got: Trained, expected: Trained, *, rtol: float = 1e-5, atol: float = 1e-6) -> None:
    """To rounding; with rtol=0 to the bit."""
    if not rtol:
        assert (got.losses, got.grad_norms) == (expected.losses, expected.grad_norms)
        atol = 0.0
    assert got.losses == pytest.approx(expected.losses, rel=rtol)
    assert got.parameters.keys() >= expected.parameters.keys()
    for name, each in expected.parameters.items():
        torch.testing.assert_close(got.parameters[name], each, rtol=rtol, atol=atol)
