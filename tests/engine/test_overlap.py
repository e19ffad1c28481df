"""Transfers that go on alone overlap with computation: by the order of calls, by counters, and on a simulated link."""

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import shardwise as sw
from benchmarks.host_cost import Stage
from tests.engine.late_channels import Event, Late, Log, Logged, LoggedBlock
from tests.engine.link_timeline import least_makespan, makespan, makespan_of_gradients, transfers_of

WIDTH = 8
building = threading.Lock()


def loss(output: torch.Tensor, batch: Mapping[str, Any]) -> torch.Tensor:
    return output.square().mean()


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def engine_of(
    log: Log,
    stage: Stage,
    inner: Sequence[int],
    *,
    k: int = 1,
    bucket_bytes: int = 600,
    channel: sw.Channel | None = None,
    loss: Callable[[torch.Tensor, Mapping[str, Any]], torch.Tensor] = loss,
) -> sw.Engine:
    """An engine over blocks with these inner widths. A block of 8 fills a bucket of 600 bytes."""
    with building:  # ranks are threads, and draw from one generator
        torch.manual_seed(0)
        model = nn.Sequential(*(LoggedBlock(log, str(at), WIDTH, width) for at, width in enumerate(inner)))
    plan = sw.Plan(
        mesh=sw.Mesh(dp_shard=2),
        sharding=sw.Sharding(stage=stage, bucket_bytes=bucket_bytes),
        merge=sw.Merge(microbatches=k),
    )
    return sw.parallelize(model, plan, optimizer=sgd, loss=loss, channel=Logged(log) if channel is None else channel)


def logged_step(stage: Stage, inner: Sequence[int], *, k: int = 1, bucket_bytes: int = 600) -> list[Event]:
    """The events of the third step."""
    log = Log()
    engine = engine_of(log, stage, inner, k=k, bucket_bytes=bucket_bytes)
    for _ in range(3):
        log.events.clear()
        engine.step({"input": torch.ones(2 * k, WIDTH)})
    return log.events


def until_last_gradient(events: list[Event]) -> list[Event]:
    return events[: max(at for at, each in enumerate(events) if each.what.startswith("gradients")) + 1]


def in_short(events: list[Event]) -> list[str]:
    """Computations and beginnings of transfers, a word or two each: 'gather 1' and 'reduce 1' of unit or bucket 1."""
    words = []
    for each in events:
        if each.kind == "compute":
            words.append(each.what)
        elif each.kind == "issue":
            found = re.search(r"unit '(\d)'", each.what) or re.search(r"bucket (\d)", each.what)
            assert found is not None
            words.append(f"{'reduce' if each.what.startswith('gradients') else 'gather'} {found[1]}")
    return words


def test_reductions_begin_inside_of_backward() -> None:
    # Bucket 0 has the last block.
    computed = ["F 0", "F 1", "F 2", "B 2", "reduce 0", "B 1", "reduce 1", "B 0", "reduce 2"]
    assert in_short(logged_step(1, [8, 8, 8])) == [*computed, "gather 0", "gather 1", "gather 2"]
    events = logged_step(1, [8, 8, 8], k=2)  # only the last microbatch makes a sum complete
    assert in_short(events) == ["F 0", "F 1", "F 2", "B 2", "B 1", "B 0", *computed, "gather 0", "gather 1", "gather 2"]


def test_under_stage_2_no_reduction_waits_for_one_before_it_while_there_is_a_buffer() -> None:
    events = logged_step(2, [8, 8, 8])
    kinds = [each.kind for each in until_last_gradient(events)]
    assert kinds == [*["compute"] * 4, "issue", "compute", "issue", "compute", "wait", "issue", "wait", "wait"]


def test_a_unit_is_gathered_while_the_one_before_it_computes() -> None:
    # The last two units of a forward are still there for the backward.
    forward = ["gather 0", "gather 1", "F 0", "gather 2", "F 1", "gather 3", "F 2", "F 3"]
    # A gather goes ahead of the gradients whose unit makes room for it: a backward waits for it.
    backward = ["B 3", "gather 1", "reduce 3", "B 2", "gather 0", "reduce 2", "B 1", "reduce 1", "B 0", "reduce 0"]
    assert in_short(logged_step(3, [8, 8, 8, 8])) == forward + backward


@pytest.mark.parametrize("num_units", [1, 2, 3, 5])
@pytest.mark.parametrize("k", [1, 3])
def test_gatherings_are_those_of_the_formula(num_units: int, k: int) -> None:
    log = Log()
    engine = engine_of(log, 3, [8] * num_units, k=k)
    for _ in range(3):
        log.events.clear()
        engine.step({"input": torch.ones(2 * k, WIDTH)})
    sent = sum(each.num_bytes for each in log.events if each.kind == "issue" and each.what.startswith("parameters"))
    assert sent == engine.traffic().gather_bytes


@pytest.mark.parametrize(("num_units", "k"), [(2, 3), (3, 1), (4, 3)])
def test_gatherings_are_those_of_the_formula_where_the_loss_reads_parameters(num_units: int, k: int) -> None:
    log = Log()
    engine = engine_of(log, 3, [8] * num_units, k=k, loss=lambda output, batch: (output @ weight.t()).square().mean())
    weight = engine.model[0].up.weight  # type: ignore[index]
    for _ in range(4):
        log.events.clear()
        engine.step({"input": torch.ones(2 * k, WIDTH)})
    sent = sum(each.num_bytes for each in log.events if each.kind == "issue" and each.what.startswith("parameters"))
    assert sent == engine.traffic().gather_bytes


EQUAL = [(8, 8, 8, 8), (8, 8, 8)]
UNEQUAL = [(16, 8, 24), (24, 8, 8), (8, 24, 8, 16)]


@pytest.mark.parametrize(
    ("stage", "bucket_bytes", "inner"),
    [
        *((stage, 600, inner) for stage in (1, 2, 3) for inner in EQUAL),
        *((1, 600, inner) for inner in UNEQUAL),
        *((3, 1 << 20, inner) for inner in [*EQUAL, *UNEQUAL]),
    ],
)
def test_transfers_on_a_link_are_as_little_exposed_as_can_be(
    stage: Stage, bucket_bytes: int, inner: tuple[int, ...]
) -> None:
    events = until_last_gradient(logged_step(stage, inner, bucket_bytes=bucket_bytes))
    seconds_of = {f"F {at}": 1.0 * width for at, width in enumerate(inner)}
    seconds_of |= {f"B {at}": 2.0 * width for at, width in enumerate(inner)}
    durations = [seconds_of[each.what] for each in events if each.kind == "compute"]
    for bytes_per_second in (8, 12, 20, 40, 120):  # from where transfers take longest to where they hide
        transfers = transfers_of(events, bytes_per_second, num_kept=2)
        exposed = makespan(events, seconds_of.__getitem__, bytes_per_second) - sum(durations)
        assert exposed <= 1.05 * (least_makespan(durations, transfers) - sum(durations))


@pytest.mark.parametrize("bucket_bytes", [600, 200])
@pytest.mark.parametrize("inner", [(8, 24, 8), (24, 8, 8), (8, 8, 24)])
def test_a_block_of_several_buckets_waits_for_no_more_than_its_two_buffers(
    bucket_bytes: int, inner: tuple[int, ...]
) -> None:
    events = until_last_gradient(logged_step(2, inner, bucket_bytes=bucket_bytes))
    seconds_of = {f"F {at}": 1.0 * width for at, width in enumerate(inner)}
    seconds_of |= {f"B {at}": 2.0 * width for at, width in enumerate(inner)}
    durations = [seconds_of[each.what] for each in events if each.kind == "compute"]
    for bytes_per_second in (8, 12, 20, 40, 120):
        transfers = transfers_of(events, bytes_per_second, num_kept=2)
        assert len(transfers) > len(inner)
        exposed = makespan(events, seconds_of.__getitem__, bytes_per_second) - sum(durations)
        assert exposed <= 1.05 * (makespan_of_gradients(durations, transfers, num_buffers=2) - sum(durations))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("k", [1, 2])
def test_transfers_that_are_late_change_no_bit(stage: Stage, k: int) -> None:
    def run(channel: sw.Channel) -> tuple[list[tuple[float, float]], int]:
        engine = engine_of(Log(), stage, [8, 24], k=k, channel=channel)
        torch.manual_seed(channel.rank)
        batches = [{"input": torch.randn(2 * k, WIDTH)} for _ in range(2)]
        reports = [engine.step(batch) for batch in batches]
        return [(each.loss, each.grad_norm) for each in reports], engine.counters.early_reductions

    punctual = sw.simulate(2, run)
    late = sw.simulate(2, lambda channel: run(Late(channel)))
    assert [found for found, _ in late] == [found for found, _ in punctual]
    assert all(num_early > 0 for _, num_early in late)
