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
from shardwise.errors import CallMismatchError, ShardwiseError, StageReadsWarning
from tests.engine.channels import GoesOnAlone
from tests.engine.formed import formed, linear
from tests.oracle.batches import Batch
from tests.oracle.comparison import assert_trains_like_one_process
from tests.oracle.one_process import expected
from tests.oracle.pipeline_programs import CHAIN, Chain, square, vectors
from tests.oracle.places import data_share
from tests.oracle.program import Program, plan_of, seeded

BOUND_TO_WAIT = "ignore::shardwise.errors.StageReadsWarning"
pytestmark = pytest.mark.filterwarnings(BOUND_TO_WAIT)


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


def reading(net: Any, x: torch.Tensor) -> Any:
    """Keeps all that it reads of two stages, and goes on by some of it."""
    h = net.blocks[1](net.blocks[0](net.first(x)))
    net.seen += [(name, read(h)) for name, read in READS.items()]
    for _ in range(int(abs(10 * h).sum()) % 3):  # other numbers of calls in other microbatches
        h = h + 0.5 * h.mean().item()
    h = net.blocks[3](net.blocks[2](h))
    net.seen.append(h.sum().item())
    return net.last(h)


def peeking(net: Any, x: torch.Tensor, looks: torch.Tensor) -> Any:
    """Reads in the microbatches that the batch names; the first is not among them."""
    h = net.blocks[1](net.blocks[0](net.first(x)))
    if looks.any():
        h = h * (2 if h.sum() > 0 else 3)
    return net.last(net.blocks[3](net.blocks[2](h)))


def choosing(net: Any, x: torch.Tensor) -> Any:
    """Takes values apart whose number of rows depends on other values."""
    h = net.blocks[1](net.blocks[0](net.first(x)))
    for row in (h[:, 0] > 0.1).nonzero():
        h = h + h[row[0]] / 8
    h = h + sum(piece.sum(0) for piece in h[h[:, 1] > 0].split(2))
    at = (h[:, 2] > 0.1).nonzero().squeeze()  # without dims, where it is one
    return net.last(net.blocks[3](net.blocks[2](h + h[at].sum())))


def recomputing(net: Any, x: torch.Tensor, *, is_wide: bool = False) -> Any:
    """Reads while it recomputes, of one stage or of two."""

    def read(h: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(h)
        return torch.tanh(h * (net.blocks[1](h) if is_wide else h).sum().item())

    h = checkpoint(read, net.blocks[0](net.first(x)), use_reentrant=False)
    return net.last(net.blocks[3](net.blocks[2](net.blocks[1](h))))


class Scale:
    """An object of a class that the engine does not know."""

    value = 2.0


def given_again(net: Any, x: torch.Tensor) -> Any:
    """Its layers are given an object, and are computed again after the last read, which itself is computed again."""
    scale = Scale()

    def run(x: torch.Tensor, layer: nn.Module) -> Any:
        h = layer(x, scale)
        return h * h.sum().item()

    for layer in (net.one, net.two):
        x = checkpoint(run, x, layer, use_reentrant=False)
    return net.last(x)


SCALED = formed(lambda net, x, scale: torch.tanh(net.layer(x) * scale.value), layer=linear(5, 5))
GIVEN_AGAIN = formed(given_again, one=SCALED, two=SCALED, last=linear(5, 3))


def halved(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """Half of a loss that is large, as programs clip it."""
    loss = square(output, batch)
    return loss / 2 if loss.item() > 1 else loss


def peeks(seed: int) -> dict[str, torch.Tensor]:
    looks = torch.zeros(12, dtype=torch.bool)
    looks[3 * (seed % 4)] = seed > 0
    return {**vectors(seed), "looks": looks}


def program(way: Callable[..., Any], num_batches: int = 3, **settings: Any) -> Program:
    make = formed(way, base=Chain, seen=list)
    batches = [vectors(seed) for seed in range(num_batches)]
    return Program(make=seeded(make), **{"batches": batches, "stages": CHAIN, "loss": halved, **settings})


READING = program(reading)
PEEKING = program(peeking, batches=[peeks(seed) for seed in (0, 2, 3, 0, 1)], loss=square)
AGAIN = {"make": seeded(GIVEN_AGAIN), "stages": {"one": 0, "two": 1, "last": 1}, "num_stages": 2}
PROGRAMS = {
    "reading": READING,
    "peeking": PEEKING,
    "choosing": program(choosing, 4),
    "recomputing": program(recomputing, 1),
    "given again": Program(batches=[vectors(0), vectors(1)], loss=halved, **AGAIN),  # type: ignore[arg-type]
}
LAYOUTS: list[tuple[str, dict[str, Any]]] = [
    ("reading", {"mesh": "pp=3", "k": 2}),
    ("reading", {"mesh": "pp=2", "k": 3, "schedule": "interleaved"}),
    ("reading", {"mesh": "pp=2", "k": 2, "chunks": 2, "schedule": "fthenb", "stage": 3}),
    ("peeking", {"mesh": "pp=4", "k": 4}),
    ("peeking", {"mesh": "pp=2", "k": 4, "schedule": "interleaved"}),
    ("choosing", {"mesh": "pp=4", "k": 4}),
    ("choosing", {"mesh": "pp=2", "k": 4, "schedule": "interleaved"}),
    ("recomputing", {"mesh": "pp=4"}),
    ("given again", {"mesh": "pp=2", "k": 2}),
]


@pytest.mark.parametrize(("name", "layout"), LAYOUTS, ids=str)
def test_programs_that_read_train_like_one_process(name: str, layout: dict[str, Any]) -> None:
    assert_trains_like_one_process(PROGRAMS[name], plan_of(PROGRAMS[name], **layout))


@pytest.mark.parametrize("k", [1, 2])
def test_all_ranks_read_what_one_process_reads(k: int) -> None:
    alone: Any = READING.make()
    for rows in READING.batches[0]["x"].split(12 // k):
        alone(rows)

    def run(channel: sw.Channel) -> None:
        engine = READING.engine(plan_of(READING, "pp=2", k=k), channel)
        engine.step(READING.batches[0])
        assert engine.model.seen == alone.seen

    sw.simulate(2, run)


def told(k: int) -> list[str]:
    def run(channel: sw.Channel) -> None:
        engine = READING.engine(plan_of(READING, "pp=2", k=k), channel)
        for _ in range(2):
            engine.step(READING.batches[0])

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        sw.simulate(2, run)
    return [str(each.message) for each in seen if each.category is StageReadsWarning]


def test_what_reads_cost_is_said_once_and_not_where_nothing_overlaps() -> None:
    (text,) = told(3)
    assert f"{__file__}:" in text
    assert "such reads in this step" in text
    assert told(1) == []


def written(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    output.detach().numpy()[:] = 0
    return square(output, batch)


PLAIN = program(Chain.forward)
WIDE = program(lambda net, x: recomputing(net, x, is_wide=True))


@pytest.mark.parametrize(
    ("case", "loss", "message"),
    [
        (PLAIN, written, "read-only"),
        (PLAIN, lambda output, batch: square(output, batch) * output.item(), "converted to Scalar"),
        (WIDE, square, "checkpoint each placed module alone"),
    ],
    ids=["a write to an array", "an item of many", "a recomputation of two stages"],
)
def test_reads_that_cannot_be_end_the_step_on_all_ranks(case: Program, loss: Any, message: str) -> None:
    def run(channel: sw.Channel) -> None:
        with pytest.raises((RuntimeError, ValueError, ShardwiseError), match=message):
            case.engine(plan_of(case, "pp=4"), channel, loss=loss).step(vectors(0))

    sw.simulate(4, run)


def test_reads_on_one_data_rank_that_change_the_order_of_reductions_are_refused_with_the_way_out() -> None:
    plan = plan_of(PEEKING, "pp=2,dp_shard=2", k=4, schedule="interleaved", stage=2)

    def run(channel: sw.Channel) -> None:
        engine = PEEKING.engine(plan, channel)
        for seed in (0, 1):
            engine.step(peeks(seed * plan.mesh.data_rank(channel.rank)))

    with pytest.raises(CallMismatchError, match="to 1f1b, or sharding"):
        sw.simulate(4, run)


@pytest.mark.parametrize(
    "alone", [True, pytest.param(False, marks=pytest.mark.stress)], ids=["progresses alone", "waits"]
)
def test_on_a_device(fake: str, alone: bool) -> None:
    plan = plan_of(READING, "pp=2", k=2)

    def run(channel: sw.Channel) -> list[float]:
        engine = READING.engine(plan, GoesOnAlone(channel) if alone else channel)
        return [engine.step(data_share(batch, plan.mesh, channel.rank)).loss for batch in READING.batches]

    for found in sw.simulate(2, run, device=fake):
        np.testing.assert_allclose(found, expected(READING, 2).losses, rtol=1e-6)
