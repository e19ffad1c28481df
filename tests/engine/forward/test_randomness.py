"""Masks depend on seed, step, microbatch and the calls that a model makes, and on nothing that happens elsewhere."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from shardwise.errors import MismatchError
from tests.engine.loops import mean_square, sgd
from tests.engine.refusals import same_error_everywhere
from tests.engine.tower import on_ranks, train
from tests.oracle.batches import points, square_loss
from tests.oracle.one_process import train_in_one_process
from tests.oracle.program import seeded


class Dropping(nn.Module):
    """Every row has a mask of its own, so that a mean over microbatches shows whose masks were drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 32)
        self.dropout = nn.Dropout(0.5)
        self.last = nn.Linear(32, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(nn.functional.dropout(self.dropout(self.first(x)), 0.2, self.training))
        return out


def engine_of(channel: sw.Channel, k: int = 1, seed: int | None = None) -> sw.Engine[Any]:
    mesh, merge = sw.Mesh(dp_shard=channel.size), sw.Merge(microbatches=k)
    plan = sw.Plan(mesh=mesh, merge=merge, sharding=sw.Sharding(stage=0))
    return sw.parallelize(seeded(Dropping)(), plan, optimizer=sgd, loss=square_loss, channel=channel, seed=seed)


def losses(num_ranks: int, k: int, *, seed: int | None = None, model_seed: int = 0) -> list[float]:
    """Of four steps on simulated ranks, which leave the random state of the program alone."""

    def run(channel: sw.Channel) -> list[float]:
        torch.manual_seed(model_seed + channel.rank)
        engine = engine_of(channel, k, seed)
        reports = []
        for step in range(4):
            before = torch.get_rng_state()
            reports += train(engine, [points(step, 12)])
            engine.evaluate(points(step, 2))
            assert torch.equal(torch.get_rng_state(), before)
        return reports

    first, *others = sw.simulate(num_ranks, run)
    assert all(other == first for other in others)
    return first


class Layered(nn.Module):
    """More blocks of one class than torch compiles versions of its code."""

    def __init__(self, calls: torch.Tensor) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Block, [calls] * 10))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.mean(1, keepdim=True)


class Block(Dropping):
    """Counts where it runs compiled."""

    def __init__(self, calls: torch.Tensor) -> None:
        super().__init__()
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            self.calls.add_(1)
        return x + super().forward(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # by the compiler, of what it traces
@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.quick), 3])
def test_blocks_that_draw_are_compiled_however_many_there_are(stage: int) -> None:
    calls = torch.zeros(())

    def run(channel: sw.Channel) -> None:
        model = Layered(calls)
        for block in model.blocks:
            block.compile(backend="eager")
        plan = sw.Plan(mesh=sw.Mesh(dp_shard=channel.size), sharding=sw.Sharding(stage=stage))
        train(sw.parallelize(model, plan, optimizer=sgd, loss=square_loss, channel=channel), [points(0, 4)] * 2)

    sw.simulate(1 if stage == 0 else 2, run)
    assert calls == 2 * len(Layered(calls).blocks) * (1 if stage == 0 else 2)


def test_masks_do_not_depend_on_how_microbatches_lie_over_data_ranks() -> None:
    expected = losses(1, 4)
    assert losses(2, 2) == pytest.approx(expected, rel=1e-6)
    assert losses(4, 1) == pytest.approx(expected, rel=1e-6)
    assert losses(1, 2) != pytest.approx(expected, rel=1e-3)


def test_without_a_seed_the_masks_are_those_of_the_random_state_of_rank_0() -> None:
    assert losses(2, 1, seed=5, model_seed=7) == losses(2, 1, seed=5, model_seed=8)
    assert losses(2, 1, model_seed=7) == losses(2, 1, seed=7)
    assert losses(2, 1, model_seed=7) != losses(2, 1, model_seed=8)


def test_ranks_with_different_seeds_refuse_together() -> None:
    assert isinstance(same_error_everywhere(2, lambda channel: engine_of(channel, seed=channel.rank)), MismatchError)


# -- generators of a model's own


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(7)


class Noise(nn.Module):
    """Adds numbers of a generator that is kept in some way, or that it is given."""

    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.draws_from = keep(self)

    def forward(self, x: torch.Tensor, given: torch.Generator | None = None) -> torch.Tensor:
        # Twice, and of no fixed number: a run more or less shows in every later call.
        given = given or self.draws_from()
        mask = torch.rand(4, generator=given) < 0.5 + 0.1 * torch.rand((), generator=given)
        out: torch.Tensor = x + self.down(torch.tanh(self.up(x * mask)))
        return out


class Noisy(nn.Module):
    def __init__(self, keep: Any) -> None:
        super().__init__()
        self.first, self.noise, self.last = nn.Linear(4, 4), Noise(keep), nn.Linear(4, 1)
        self.drawn = generator() if keep is as_argument else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        output: torch.Tensor = self.last(self.noise(hidden) if self.drawn is None else self.noise(hidden, self.drawn))
        return output


class Sampler:
    def __init__(self) -> None:
        self.source = {"of masks": [generator()]}

    def given(self) -> torch.Generator:
        return self.source["of masks"][0]


def attribute(module: Any) -> Callable[[], torch.Generator]:
    module.generator = generator()
    return lambda: module.generator


def in_containers(module: Any) -> Callable[[], torch.Generator]:
    module.generators = {"masks": (generator(),)}
    return lambda: module.generators["masks"][0]


def in_closure(_: Any) -> Any:
    kept = generator()
    return lambda: kept


def as_argument(_: Any) -> Any:
    return None


KEPT: dict[str, Any] = {
    "attribute": attribute,
    "containers": in_containers,
    "object": lambda _: Sampler().given,
    "closure": in_closure,
    "partial": lambda _: partial(lambda kept: kept, generator()),
    "argument": as_argument,
}
STAGES = sw.Pipeline(stages={"first": 0, "noise": 1, "last": 1})
TENSOR = sw.Tensor(rules={"noise.up": "column", "noise.down": "row"})
AGAIN, TWO = sw.Activations(checkpoint=("noise",)), sw.Merge(microbatches=2)
PLANS = {
    "plain": sw.Plan(),
    "again": sw.Plan(activations=AGAIN, merge=TWO),
    "tp, proof": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TENSOR),
    "tp, auto": sw.Plan(mesh=sw.Mesh(tp=2), tensor=sw.Tensor(rules="auto")),
    "pp, k=2": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=STAGES, merge=TWO),
    "pp, measured": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=sw.Pipeline(balance="flops")),
    "pp, again": sw.Plan(mesh=sw.Mesh(pp=2), pipeline=STAGES, activations=AGAIN, merge=TWO),
    "tp, stage 3, again": sw.Plan(mesh=sw.Mesh(tp=2), tensor=TENSOR, sharding=sw.Sharding(stage=3), activations=AGAIN),
}
TAKEN = [
    *((keep, name) for at, keep in enumerate(KEPT) for name in list(PLANS)[at % 2 :: 2] if keep != "argument"),
    *[("argument", "plain"), ("argument", "again")],
]


@pytest.mark.parametrize(("keep", "name"), TAKEN)
def test_a_generator_of_the_model_goes_on_as_in_a_plain_loop(keep: str, name: str) -> None:
    plan, make = PLANS[name], seeded(lambda: Noisy(KEPT[keep]))
    batches = [{"x": torch.randn(4, 4, generator=torch.Generator().manual_seed(step))} for step in range(3)]

    def run(channel: sw.Channel) -> list[float]:
        engine = sw.parallelize(
            make(), plan, optimizer=sgd, loss=mean_square, channel=channel, sample={"x": torch.ones(4, 4)}
        )
        return train(engine, batches)

    model, k = make(), plan.merge.microbatches
    expected = train_in_one_process(
        model, sgd(model.parameters()), batches, loss=mean_square, num_microbatches=k
    ).losses
    for found in on_ranks(plan, run):
        assert found == pytest.approx(expected, rel=1e-5)
