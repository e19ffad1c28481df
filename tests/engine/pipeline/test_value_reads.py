"""A program reads elements of values of a stage, and goes on by them: every rank gets what one process gets."""

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardwise as sw
from shardwise.errors import CallMismatchError, ModelError, ShardwiseError, StageReadsWarning
from tests.engine.channels import GoesOnAlone
from tests.engine.expected import seeded
from tests.engine.pipeline.models import CHAIN, Chain, square, vectors
from tests.engine.pipeline.oracle import Case, adamw, expected


def caught(h: torch.Tensor) -> str:
    """What a program goes on with that tries to read."""
    try:
        return str(h.item())
    except RuntimeError as error:
        return str(error)


def caught_number(h: torch.Tensor) -> int:
    try:
        return int(h[0, 0] / 0)
    except OverflowError:
        return 1


READS: dict[str, Callable[[torch.Tensor], Any]] = {
    "item": lambda h: h[0, 0].item(),
    "float": lambda h: float(h.detach().mean()),
    "int": lambda h: int(100 * h[0, 0].detach()),
    "bool": lambda h: bool(h.mean() > 0),
    "if": lambda h: 1 if (h > 0).all() else 2,
    "max of two": lambda h: max(h[0, 0], h[0, 1]).item(),
    "str": lambda h: str(h.detach()),
    "format": lambda h: f"{h.sum():.3f}",
    "tolist": lambda h: h.tolist(),
    "nothing": lambda h: h[:0].tolist(),
    "of an unknown shape": lambda h: h[h > 0.3].tolist(),
    "numpy": lambda h: h.detach().cpu().numpy().tolist(),
    "array": lambda h: np.asarray(h.detach().cpu()).tolist(),
    "narrow": lambda h: h.bfloat16().sum().item(),
    "equal": lambda h: torch.equal(h, h + 1),
    "allclose": lambda h: torch.allclose(h, h),
    "index": lambda h: [0, 1][(h[0, 0] > 0).long()],
    "contains": lambda h: 1.0 in h,
    "an error": caught,
    "another error": caught_number,
    "infinite": lambda h: ((h - h) / 0).tolist()[0][0] != 0 and (h / 0).abs().max().item(),
}


class Reading(Chain):
    """Keeps all that it reads of two stages, and goes on by some of it."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](self.first(x)))
        self.seen += [(name, read(h)) for name, read in READS.items()]
        for _ in range(int(abs(10 * h).sum()) % 3):  # other numbers of calls in other microbatches
            h = h + 0.5 * h.mean().item()
        h = self.blocks[3](self.blocks[2](h))
        self.seen.append(h.sum().item())
        out: torch.Tensor = self.last(h)
        return out


def halved(output: torch.Tensor, batch: Any) -> torch.Tensor:
    """Half of a loss that is large, as programs clip it."""
    loss = square(output, batch)
    return loss / 2 if loss.item() > 1 else loss


CASE = Case(make=seeded(Reading), batches=[vectors(seed) for seed in range(3)], stages=CHAIN, loss=halved)
BOUND_TO_WAIT = "ignore::shardwise.errors.StageReadsWarning"


def plan_of(mesh: str, schedule: str, k: int, *, chunks: int | None = None, stage: int = 1) -> sw.Plan:
    shape = sw.Mesh.parse(mesh)
    return sw.Plan(
        mesh=shape,
        merge=sw.Merge(microbatches=k),
        sharding=sw.Sharding(stage=stage),
        pipeline=sw.Pipeline(schedule=schedule, chunks=chunks, stages=CASE.stages_for(shape.pp * (chunks or 1))),
    )


@pytest.mark.filterwarnings(BOUND_TO_WAIT)
@pytest.mark.parametrize(
    "plan",
    [
        plan_of("pp=3", "1f1b", 2),
        plan_of("pp=2", "interleaved", 3, chunks=2),
        pytest.param(plan_of("pp=4", "1f1b", 1), marks=pytest.mark.stress),
        pytest.param(plan_of("pp=3", "1f1b", 4), marks=pytest.mark.stress),
        pytest.param(plan_of("pp=2", "fthenb", 3), marks=pytest.mark.stress),
        pytest.param(plan_of("pp=2", "fthenb", 2, chunks=2, stage=3), marks=pytest.mark.stress),
    ],
    ids=lambda plan: f"{plan.mesh} {plan.pipeline.schedule} {plan.merge.microbatches}",
)
def test_all_ranks_read_what_one_process_reads(plan: sw.Plan) -> None:
    k = plan.merge.microbatches
    wanted = expected(CASE, k)
    alone: Any = CASE.make()
    for batch in CASE.batches[:1]:
        for rows in batch["x"].split(len(batch["x"]) // k):
            alone(rows)

    def run(channel: sw.Channel) -> None:
        model: Any = CASE.make()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=halved, channel=channel)
        losses = []
        for batch in CASE.batches:
            losses.append(engine.step(batch).loss)
            if len(losses) == 1:
                assert model.seen == alone.seen
        assert losses == wanted.losses
        assert engine.evaluate(CASE.batches[0]).loss == wanted.held_out
        assert engine.pipeline is not None
        assert engine.pipeline.num_reads >= 4 * k * (len(READS) + 1)
        for name, each in model.named_parameters():
            assert plan.sharding.stage == 3 or each.is_meta or torch.equal(each, wanted.states[-1][name])

    sw.simulate(plan.mesh.size, run)


class Peeking(Chain):
    """Reads in the microbatches that the batch names; the first is not among them."""

    def forward(self, x: torch.Tensor, looks: torch.Tensor | None = None) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](self.first(x)))
        if looks is not None and looks.any():
            h = h * (2 if h.sum() > 0 else 3)
        out: torch.Tensor = self.last(self.blocks[3](self.blocks[2](h)))
        return out


def peeks(seed: int) -> dict[str, torch.Tensor]:
    looks = torch.zeros(12, dtype=torch.bool)
    looks[3 * (seed % 4)] = seed > 0
    return {**vectors(seed), "looks": looks}


@pytest.mark.filterwarnings(BOUND_TO_WAIT)
@pytest.mark.parametrize(
    "plan", [plan_of("pp=2", "interleaved", 4, chunks=2), plan_of("pp=4", "1f1b", 4)], ids=["interleaved", "1f1b"]
)
def test_a_read_that_comes_in_some_microbatches_only_holds_no_rank_up(plan: sw.Plan) -> None:
    case = Case(make=seeded(Peeking), batches=[peeks(seed) for seed in (0, 2, 3, 0, 1)], stages=CHAIN, loss=square)
    wanted = expected(case, 4)

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(case.make(), plan, optimizer=adamw, loss=square, channel=channel)
        assert [engine.step(batch).loss for batch in case.batches] == wanted.losses

    sw.simulate(plan.mesh.size, run)


def told(k: int, steps: int = 2) -> list[str]:
    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(CASE.make(), plan_of("pp=2", "1f1b", k), optimizer=adamw, loss=halved, channel=channel)
        for _ in range(steps):
            engine.step(CASE.batches[0])

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sw.simulate(2, run)
    return [str(each.message) for each in seen if each.category is StageReadsWarning]


@pytest.mark.filterwarnings(BOUND_TO_WAIT)
def test_reads_on_one_data_rank_that_change_the_order_of_reductions_are_refused_with_the_way_out() -> None:
    plan = plan_of("pp=2,dp_shard=2", "interleaved", 4, chunks=2, stage=2)

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(seeded(Peeking)(), plan, optimizer=adamw, loss=square, channel=channel)
        for seed in (0, 1):
            engine.step(peeks(seed * plan.mesh.data_rank(channel.rank)))

    with pytest.raises(CallMismatchError, match="to 1f1b, or sharding"):
        sw.simulate(4, run)


class Choosing(Chain):
    """Takes values apart whose number of rows depends on other values."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.blocks[1](self.blocks[0](self.first(x)))
        for row in (h[:, 0] > 0.1).nonzero():
            h = h + h[row[0]] / 8
        h = h + sum(piece.sum(0) for piece in h[h[:, 1] > 0].split(2))
        at = (h[:, 2] > 0.1).nonzero().squeeze()  # without dims, where it is one
        h = h + h[at].sum()
        out: torch.Tensor = self.last(self.blocks[3](self.blocks[2](h)))
        return out


@pytest.mark.filterwarnings(BOUND_TO_WAIT)
@pytest.mark.parametrize(
    "plan", [plan_of("pp=2", "interleaved", 4, chunks=2), plan_of("pp=4", "1f1b", 4)], ids=["interleaved", "1f1b"]
)
def test_the_number_of_pieces_of_a_value_may_depend_on_values(plan: sw.Plan) -> None:
    case = Case(make=seeded(Choosing), batches=[vectors(seed) for seed in range(4)], stages=CHAIN, loss=square)
    wanted = expected(case, 4)

    def run(channel: sw.Channel) -> None:
        engine = sw.parallelize(case.make(), plan, optimizer=adamw, loss=square, channel=channel)
        assert [engine.step(batch).loss for batch in case.batches] == wanted.losses

    sw.simulate(plan.mesh.size, run)


def test_what_reads_cost_is_said_once_and_not_where_nothing_overlaps() -> None:
    (text,) = told(3)
    assert f"{__file__}:" in text
    assert "such reads in this step" in text
    assert told(1) == []


def test_arrays_of_values_cannot_be_written_to() -> None:
    def write(output: torch.Tensor, batch: Any) -> torch.Tensor:
        output.detach().numpy()[:] = 0
        return square(output, batch)

    def run(channel: sw.Channel) -> None:
        plan = plan_of("pp=2", "1f1b", 1)
        engine = sw.parallelize(seeded(Chain)(), plan, optimizer=adamw, loss=write, channel=channel)
        with pytest.raises((ValueError, ShardwiseError), match="read-only"):
            engine.step(vectors(0))

    sw.simulate(2, run)


def test_a_read_that_fails_ends_the_step_on_all_ranks() -> None:
    def run(channel: sw.Channel) -> str:
        engine = sw.parallelize(
            seeded(Chain)(),
            plan_of("pp=3", "1f1b", 2),
            optimizer=adamw,
            loss=lambda output, batch: square(output, batch) * output.item(),
            channel=channel,
        )
        with pytest.raises((RuntimeError, ShardwiseError)) as caught:
            engine.step(vectors(0))
        return str(caught.value)

    for text in sw.simulate(3, run):
        assert "cannot be converted to Scalar" in text


class Checkpointed(Chain):
    """Reads while it recomputes."""

    def __init__(self, *, is_wide: bool) -> None:
        super().__init__()
        self.is_wide = is_wide

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def read(h: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(h)
            return torch.tanh(h * (self.blocks[1](h) if self.is_wide else h).sum().item())

        h = checkpoint(read, self.blocks[0](self.first(x)), use_reentrant=False)
        out: torch.Tensor = self.last(self.blocks[3](self.blocks[2](self.blocks[1](h))))
        return out


@pytest.mark.parametrize("is_wide", [False, True], ids=["one stage", "two stages"])
def test_a_recomputation_reads_what_is_on_its_own_stage(is_wide: bool) -> None:
    case = Case(make=seeded(lambda: Checkpointed(is_wide=is_wide)), batches=[vectors(0)], stages=CHAIN, loss=square)
    plan = plan_of("pp=4", "1f1b", 1)

    def run(channel: sw.Channel) -> float:
        return sw.parallelize(case.make(), plan, optimizer=adamw, loss=square, channel=channel).step(vectors(0)).loss

    if is_wide:
        with pytest.raises(ModelError, match="checkpoint each placed module alone"):
            sw.simulate(4, run)
    else:
        assert sw.simulate(4, run) == expected(case, 1).losses * 4


class Scale:
    """An object of a class that the engine does not know."""

    value = 2.0


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor, scale: Scale) -> torch.Tensor:
        return torch.tanh(self.layer(x) * scale.value)


class GivenAgain(nn.Module):
    """Its layers are given an object, and are computed again after the last read, which itself is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Scaled(), Scaled()])
        self.last = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = Scale()

        def run(x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
            h: torch.Tensor = layer(x, scale)
            return h * h.sum().item()

        for layer in self.layers:
            x = checkpoint(run, x, layer, use_reentrant=False)
        out: torch.Tensor = self.last(x)
        return out


@pytest.mark.filterwarnings(BOUND_TO_WAIT)
def test_modules_that_are_computed_again_get_their_objects_and_count_no_reads() -> None:
    stages = {"layers.0": 0, "layers.1": 1, "last": 1}
    case = Case(make=seeded(GivenAgain), batches=[vectors(0), vectors(1)], stages=stages, num_stages=2, loss=halved)
    plan = sw.Plan(mesh=sw.Mesh(pp=2), merge=sw.Merge(microbatches=2), pipeline=sw.Pipeline(stages=stages))

    def run(channel: sw.Channel) -> tuple[list[float], int]:
        engine = sw.parallelize(case.make(), plan, optimizer=adamw, loss=halved, channel=channel)
        losses = [engine.step(batch).loss for batch in case.batches]
        assert engine.pipeline is not None
        return losses, engine.pipeline.num_reads

    assert sw.simulate(2, run) == [(expected(case, 2).losses, 2 * 2 * 3)] * 2


@pytest.mark.filterwarnings(BOUND_TO_WAIT)
@pytest.mark.parametrize(
    "alone", [True, pytest.param(False, marks=pytest.mark.stress)], ids=["progresses alone", "waits"]
)
def test_on_a_device(fake: str, alone: bool) -> None:
    plan = plan_of("pp=2", "1f1b", 2)

    def run(channel: sw.Channel) -> list[float]:
        channel = GoesOnAlone(channel) if alone else channel
        model: nn.Module = CASE.make()
        engine = sw.parallelize(model, plan, optimizer=adamw, loss=halved, channel=channel)
        return [engine.step(batch).loss for batch in CASE.batches]

    for found in sw.simulate(2, run, device=fake):
        np.testing.assert_allclose(found, expected(CASE, 2).losses, rtol=1e-6)
